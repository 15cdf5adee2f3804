"""One GRPO run: TRL's trainer, loss, corrections and metrics, with rollouts from an engine of its own.

Imports TRL, so only what makes or plans a run imports this module, once `tripoint.rl.runs` has prepared for TRL.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import accelerate
import torch
import transformers
import trl
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from tripoint.canary import CanaryShape, Fingerprint, fingerprint, fingerprint_in_place, fingerprint_stack
from tripoint.canary.rope import LONG as LONGEST_CANARY
from tripoint.canary.shape import VOCABULARY as CANARY_VOCABULARY
from tripoint.drift.dither import EMBEDDING, HEAD, untied
from tripoint.errors import MeasurementError, UsageError
from tripoint.profiles import resolve_target
from tripoint.rl.arms import STOCK
from tripoint.rl.config import TrainConfig
from tripoint.rl.exact import make_exact
from tripoint.rl.policy import as_trained, autocast_of, build_policy, fsdp2_policy, prepare
from tripoint.rl.records import RunDirectory
from tripoint.rl.sync import WeightSync
from tripoint.rl.tasks import problems, reward
from tripoint.rl.watch import mismatch, systematic
from tripoint.schedule import RoundingSchedule, suggest
from tripoint.stacks import Rollout, Stack, open_stack, parse_stack
from tripoint.stacks.emulated import EmulatedStack

SHOTS = 1
"""Solved problems in front of each prompt for models that were not warmed up on the task."""

PROBE_PROMPTS = 4


def train(config: TrainConfig, model: Path) -> None:
    """Make or resume the run of `config` on the checkpoint in directory `model`, and return when it is complete.

    With several processes (`accelerate launch`) the first of them holds the engine and writes the records. Raises UsageError
    and MeasurementError.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    state = _processes()
    first = state.is_main_process
    with state.main_process_first():  # the others look at a directory that is begun or not, but not half
        records = RunDirectory(config.directory, config)
        checkpoint = records.begin() if first else None
    [checkpoint] = broadcast_object_list([checkpoint])
    if records.finished:
        return

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    made = problems(config.task, shots=0 if config.model.startswith("tiny:") else SHOTS)
    prompt_ids = [tokenizer(problem.prompt, add_special_tokens=False)["input_ids"] for problem in made]
    longest = max(map(len, prompt_ids))
    if config.how.exact and longest != min(map(len, prompt_ids)):
        raise UsageError(
            f"arm={config.arm!r} needs prompts of one length, but those of {config.task!r} differ: choose another task"
        )

    most_tokens = max(longest + config.max_completion, LONGEST_CANARY + 2)  # it will be asked in place where it rounds
    with ExitStack() as opened:
        # Dithering tells embeddings from the output head, which takes an engine that holds them apart.
        checkpoint_of_engine = opened.enter_context(untied(model)) if config.watch_every else model
        options = config.options(most_tokens)
        engine = opened.enter_context(open_stack(config.engine, checkpoint_of_engine, options=options)) if first else None
        if config.how.exact:
            make_exact(cast(EmulatedStack, engine).model)
        about = records.about
        if not about:
            about = _describe(config, checkpoint_of_engine, engine) if engine is not None else {}
            [about] = broadcast_object_list([about])
        schedule = None if about["trainer_schedule"] is None else RoundingSchedule.parse(about["trainer_schedule"])
        policy = build_policy(model, config, schedule)
        if engine is not None:
            session = {
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "resumed_from": None if checkpoint is None else checkpoint.name,
                "versions": _versions() | engine.versions(),
                "engine_conditions": engine.conditions(),
            }
            records.write_about(about | {"sessions": [*about.get("sessions", []), session]})
        dataset = Dataset.from_list([dataclasses.asdict(problem) for problem in made])
        trainer = TwoStackTrainer(
            config, policy, schedule, tokenizer, dataset, engine, checkpoint_of_engine, records, prompt_ids[:PROBE_PROMPTS]
        )
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))


# -- the two stacks at the start --------------------------------------------------------------------------------------


def _describe(config: TrainConfig, model: Path, engine: Stack) -> dict[str, Any]:
    """Where both stacks round, measured, and what follows for the trainer."""
    arm = config.how
    found: dict[str, Any] = {"engine": None, "trainer": None}
    target = None if config.target is None else resolve_target(config.target)
    if arm.engine_dtype == "bfloat16":
        asked = _ask_engine(config, model, engine)
        found["engine"] = asked.to_dict()
        if target is None and asked.schedule is not None:
            target = resolve_target(asked.schedule)
    if target is None and (arm.aligned or arm.exact):
        raise MeasurementError(
            f"arm={config.arm!r} aligns to the engine, but the fingerprint of `{config.engine}` leaves fields undetermined: "
            "name its schedule with `target`"
        )
    schedule = arm.schedule(target.schedule if target is not None else STOCK)
    if arm.trainer_dtype == "bfloat16":
        device = "cuda" if torch.cuda.is_available() else "cpu"  # where it will be trained, with that device's kernels

        def load(checkpoint: str) -> Any:
            policy: Any = build_policy(Path(checkpoint), config, schedule)
            return as_trained(policy.to(device), config)

        asked = fingerprint(load, CanaryShape.like(model))
        found["trainer"] = dataclasses.replace(asked, conditions=asked.conditions | {"device": device}).to_dict()
    return {
        "target": None if target is None else str(target.schedule),
        "trainer_schedule": None if schedule is None else str(schedule),
        "fingerprints": found,
    }


def _ask_engine(config: TrainConfig, model: Path, engine: Stack) -> Fingerprint:
    """In place where another one would be long in starting and the model has words enough for a canary; else on another one."""
    if parse_stack(config.engine).kind == "vllm" and engine.vocab_size >= CANARY_VOCABULARY:
        return fingerprint_in_place(engine, model)
    return fingerprint_stack(lambda checkpoint: open_stack(config.engine, checkpoint), CanaryShape.like(model))


def _processes() -> accelerate.PartialState:
    # Without being told, accelerate takes each of several processes without a GPU for the only one.
    return accelerate.PartialState(cpu=not torch.cuda.is_available())


def _versions() -> dict[str, str]:
    packages = {module.__name__: module.__version__ for module in (torch, transformers, trl, accelerate)}
    return {"python": platform.python_version(), **packages}


# -- the trainer ------------------------------------------------------------------------------------------------------


def grpo_config(config: TrainConfig, directory: Path) -> trl.GRPOConfig:
    """TRL's settings. Raises UsageError for a key of `[grpo]` that TRL does not know, or a value that it refuses."""
    known = [f.name for f in dataclasses.fields(trl.GRPOConfig)]
    for key in config.grpo:
        if key not in known:
            raise UsageError(f"[grpo] {key}: TRL {trl.__version__} has no such setting{suggest(key, known)}")
    processes = _processes().num_processes
    microbatch = config.microbatch or config.sequences // processes
    if config.sequences % (microbatch * processes):
        raise UsageError(
            f"{config.sequences} completions of a step cannot be split over {processes} processes in passes of {microbatch}: "
            "change prompts, generations or microbatch"
        )
    arm, cpu = config.how, not torch.cuda.is_available()
    defaults: dict[str, Any] = {"lr_scheduler_type": "constant", "gradient_checkpointing": not cpu, "report_to": "none"}
    ours: dict[str, Any] = {
        "output_dir": str(directory),
        "max_steps": config.steps,
        "seed": config.seed,
        "learning_rate": config.lr,
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": config.sequences // (microbatch * processes),
        "num_generations": config.generations,
        "max_completion_length": config.max_completion,
        "bf16": arm.trainer_dtype == "bfloat16" and config.weights == "fp32-masters",
        "fp16": arm.trainer_dtype == "float16",
        "use_cpu": cpu,
        "vllm_importance_sampling_correction": arm.correction is not None,
        "save_strategy": "steps",
        "save_steps": config.checkpoint_every,
        "save_total_limit": 2,  # the older one is there until the newer is complete
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    if arm.correction is not None:
        ours["vllm_importance_sampling_mode"] = arm.correction
    try:
        return trl.GRPOConfig(**(defaults | config.grpo | ours))
    except (ValueError, TypeError) as error:
        raise UsageError(f"[grpo]: TRL refuses these settings: {str(error).splitlines()[0]}") from None


class _MarkComplete(TrainerCallback):
    def __init__(self, records: RunDirectory) -> None:
        self.records = records

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.records.mark_complete(state.global_step)


class TwoStackTrainer(trl.GRPOTrainer):
    """TRL's trainer with an engine in the place of its vLLM: synced when TRL syncs, sampling where TRL samples."""

    def __init__(
        self,
        config: TrainConfig,
        policy: Any,
        schedule: RoundingSchedule | None,
        tokenizer: Any,
        dataset: Dataset,
        engine: Stack | None,
        model: Path,
        records: RunDirectory,
        probe: Sequence[Sequence[int]],
    ) -> None:
        """`model`: the checkpoint that `engine` was opened on; it is None on all processes but the first. `probe`: prompts
        for `WeightSync`."""
        self.config, self.schedule, self.records, self.engine, self.checkpoint = config, schedule, records, engine, model
        self.sync: WeightSync | None = None
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # of rollout_func, whose version is pinned
        super().__init__(
            model=policy,
            reward_funcs=[self._reward],  # type: ignore[list-item]
            args=grpo_config(config, records.checkpoints),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[_MarkComplete(records)],
            rollout_func=self._rollouts,
        )
        self.remove_callback(PrinterCallback)
        if self.ref_model is not None:
            if self.is_fsdp_enabled:  # sharded by now, under accelerate's policy, which casts between layers
                raise UsageError("[grpo] beta: under FSDP the reference model would not round like the policy; leave it out")
            prepare(self.accelerator.unwrap_model(self.ref_model), config, schedule)  # TRL loads it anew
        # TRL syncs and corrects only for a vLLM of its own. Ours stands in for it.
        self.use_vllm, self._last_loaded_step = True, -1
        self.vllm_generation: Any = self
        if self.args.fp16 and self.accelerator.scaler is None:  # accelerate scales losses on GPUs only
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler(self.accelerator.device.type)
        if self.accelerator.is_fsdp2:
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = fsdp2_policy(config)
        if engine is not None:
            dtype = getattr(torch, config.how.engine_dtype)
            self.sync = WeightSync(engine, self._weights(), probe, config.max_completion, dtype)
            if not self.sync.exact:
                _say(f"`{engine.name}` does not answer twice alike: a weight sync that it skipped would go unnoticed")
        self._rewards: list[float] = []
        self._differences: list[torch.Tensor] = []
        self._scored: torch.Tensor | None = None
        self._completions: dict[str, list[Any]] = {}
        self._systematic: dict[str, float] = {}
        self._overflows = max((step["overflows"] or 0 for step in records.steps()), default=0)
        self._began = self._sampled_in = 0.0

    # -- rollouts

    def sync_weights(self) -> None:
        """Called by TRL before it samples with weights that the engine does not have yet."""
        self._began = time.perf_counter()
        if self.sync is None:
            for _ in self._weights():  # every process takes part in gathering sharded parameters
                pass
            return
        try:
            self.sync.push(self._weights())
        except MeasurementError as error:
            raise MeasurementError(f"step {self.state.global_step + 1}: {error}") from error

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's, whole and by their names in a checkpoint; a tied output head twice."""
        policy: Any = self.accelerator.unwrap_model(self.model)
        for name, parameter in policy.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, whole
            if name == EMBEDDING and policy.config.tie_word_embeddings:
                yield HEAD, whole

    def _rollouts(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: one completion for each prompt, with the engine's own log-probabilities."""
        tokenizer: Any = self.processing_class
        ids: list[list[int]] = tokenizer(prompts, add_special_tokens=False)["input_ids"]
        everyones = gather_object(ids)
        rollouts: list[Rollout] = []
        if self.engine is not None:
            seed = (self.config.seed * 1_000_003 + self.state.global_step) * len(everyones)
            rollouts = self.engine.sample(everyones, max_tokens=self.config.max_completion, seed=seed)
        [rollouts] = broadcast_object_list([rollouts])
        columns: dict[str, list[Any]] = {
            "prompt_ids": [list(rollout.prompt_ids) for rollout in rollouts],
            "completion_ids": [list(rollout.completion_ids) for rollout in rollouts],
            "logprobs": [list(rollout.logprobs or ()) for rollout in rollouts],
        }
        self._completions = columns
        self._sampled_in = time.perf_counter() - self._began
        mine = slice(self.accelerator.process_index * len(prompts), (self.accelerator.process_index + 1) * len(prompts))
        return {name: column[mine] for name, column in columns.items()}

    def _reward(self, completions: list[str], answer: list[str], **_: Any) -> list[float]:
        self._rewards = [reward(self.config.task, *pair) for pair in zip(completions, answer, strict=True)]
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        if self.config.baseline is not None:
            batch["advantages"] = torch.tensor(self._rewards, device=self.accelerator.device) - self.config.baseline
        step = self.state.global_step + 1
        if self.config.watch_every and step % self.config.watch_every == 0:
            self._watch(gather_object(batch["advantages"].tolist()), step)
        return batch

    def _watch(self, advantages: list[float], step: int) -> None:
        weights = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in self._weights()}
        if self.engine is not None and self.schedule is not None:
            rows = zip(*(self._completions[name] for name in ("prompt_ids", "completion_ids")), strict=True)
            rollouts = [Rollout(tuple(prompt), tuple(completion)) for prompt, completion in rows]
            self._systematic = systematic(
                self.engine, self.checkpoint, weights, self.schedule, rollouts, advantages, seed=self.config.seed + step
            )

    # -- loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        if self.config.how.exact:
            scored = self._with_the_models_own_head(model, input_ids, logits_to_keep)
        else:
            scored = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        self._scored = scored[0].detach()
        return scored

    def _with_the_models_own_head(self, model: Any, ids: torch.Tensor, keep: int) -> tuple[torch.Tensor, torch.Tensor, None]:
        """As TRL's, whose fused head multiplies with a kernel that is not the engine's."""
        with autocast_of(self.config, ids.device.type):
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=keep + 1).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, ids[:, -keep:, None])[..., 0], entropies, None

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]
        assert self._scored is not None
        d = self._scored.double() - inputs["sampling_per_token_logps"].double()
        self._differences.append(d[inputs["completion_mask"].bool()])
        return loss

    # -- records

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Called by TRL after every step, before a checkpoint of it is made."""
        super().log(logs, start_time)
        if "grad_norm" not in logs:
            return
        differences = gather_object(torch.cat(self._differences).tolist())
        rewards = gather_object(self._rewards)
        self._differences.clear()
        if self.engine is None:
            return
        assert self.sync is not None
        record: dict[str, Any] = {
            "step": self.state.global_step,
            **{name: logs[name] for name in ("reward", "reward_std", "entropy", "grad_norm", "loss")},
            "length": logs["completions/mean_length"],
            "truncated": logs["completions/clipped_ratio"],
            "tokens": len(differences),
            **(mismatch(differences) if differences else {}),  # TRL can leave truncated completions out, even all of them
            **self._systematic,
            "weights": self.sync.digest,
            "rollout_seconds": self._sampled_in,
            "seconds": time.perf_counter() - self._began,
        }
        if (scaler := self.accelerator.scaler) is not None:
            self._overflows += self.accelerator.optimizer_step_was_skipped
            record |= {"overflows": self._overflows, "loss_scale": scaler.get_scale()}
        if self.config.how.exact and record.get("max_abs", 0.0) > 0:
            raise MeasurementError(
                f"step {record['step']}: arm={self.config.arm!r} must match the engine bit for bit, but a log-probability "
                f"differs by {record['max_abs']:.3g} nats"
            )
        self._systematic = {}
        self.records.write(record, self._completions | {"reward": rewards})
        _say(_line(record, self.config))


def _line(record: dict[str, Any], config: TrainConfig) -> str:
    shown = {
        "reward": "{:.3f}",
        "entropy": "{:.3f}",
        "grad_norm": "{:.3g}",
        "length": "{:.1f}",
        "k1": "{:+.1e}",
        "k3": "{:.1e}",
        "max_ratio": "{:.3f}",
        "systematic_rms": "{:.1e}",
        "gradient_bias_systematic": "{:.3f}",
        "ess": "{:.4f}",
        "overflows": "{}",
        "seconds": "{:.1f}",
    }
    parts = [f"{name} {form.format(record[name])}" for name, form in shown.items() if record.get(name) is not None]
    return "  ".join([f"{config.name} step {record['step']}/{config.steps}", *parts])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
