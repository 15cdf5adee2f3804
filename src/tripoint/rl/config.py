"""The configuration of `tripoint train`: one TOML file, its keys checked before anything heavy is imported."""

from __future__ import annotations

import itertools
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tripoint.errors import UsageError
from tripoint.rl.arms import Arm, arm_named
from tripoint.schedule import suggest
from tripoint.stacks import EngineOptions, parse_stack

Weights = Literal["fp32-masters", "bf16"]

# Settings of TRL's GRPOConfig that `[grpo]` must leave alone, by what decides them.
DECIDED: dict[str, str] = {
    name: what
    for what, names in {
        "`arm`": "cast_lm_head_to_fp32 fp16 liger_kernel_config torch_compile torch_compile_backend torch_compile_mode "
        "use_liger_kernel vllm_importance_sampling_correction vllm_importance_sampling_mode",
        "`checkpoint_every`": "enable_jit_checkpoint ignore_data_skip resume_from_checkpoint save_on_each_node save_only_model "
        "save_steps save_strategy save_total_limit sync_ref_model",  # no checkpoint holds a reference model that moves
        "`engine`": "cache_implementation generation_kwargs min_p num_iterations repetition_penalty steps_per_generation "
        "temperature top_k top_p transformers_continuous_batching_config use_transformers_continuous_batching "
        "use_transformers_paged use_vllm vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port "
        "vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port "
        "vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size",
        "`generations`": "num_generations num_generations_eval",
        "`lr`": "learning_rate",
        "`max_completion`": "max_completion_length",
        "`microbatch`": "auto_find_batch_size gradient_accumulation_steps per_device_train_batch_size",
        "`model`": "model_init_kwargs trust_remote_code",
        "`out`": "output_dir",
        "`prompts`": "generation_batch_size",
        "`seed`": "seed",
        "`steps`": "max_steps num_train_epochs",
        "`task`": "chat_template_kwargs remove_unused_columns reward_weights",
        "`weights`": "bf16",
        "`accelerate launch`": "accelerator_config deepspeed fsdp fsdp_config local_rank parallelism_config use_cpu",
        "the run's records, of every step": "disable_tqdm log_completions log_completions_hub_repo log_unique_prompts "
        "logging_first_step logging_steps logging_strategy num_completions_to_print",
        "the run, which evaluates nothing": "eval_on_start eval_strategy load_best_model_at_end",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True)
class TrainConfig:
    """One run.

    `model`: a directory, a hub id, `smollm2`, or `tiny:FAMILY` (see `tripoint.rl.families`), which is warmed up on the task.
    `task`: see `tripoint.rl.tasks`. `engine`: the STACK that samples. `target`: what the arm aligns to, by default the
    engine's fingerprint, taken at the start.

    Each of `steps` updates takes `generations` completions of at most `max_completion` tokens for each of `prompts` prompts,
    in passes of `microbatch` completions (a divisor of their product, 0 for one pass) on each process. Advantages are
    TRL's (the group's mean and scale), or r - `baseline` if that is given. `weights`: FP32 parameters of which the forward
    pass sees the 16-bit rounding, or BF16 parameters.

    A checkpoint is made every `checkpoint_every` steps; every `watch_every` steps (0: never) systematic drift and gradient
    bias are measured. `grpo`: further settings of TRL's GRPOConfig. `engine_options`: of `EngineOptions`.
    """

    model: str
    task: str
    engine: str
    out: str
    arm: str = "none"
    seed: int = 0
    target: str | None = None
    steps: int = 100
    prompts: int = 16
    generations: int = 8
    microbatch: int = 0
    max_completion: int = 32
    lr: float = 1e-6
    baseline: float | None = None
    weights: Weights = "fp32-masters"
    checkpoint_every: int = 10
    watch_every: int = 0
    grpo: dict[str, Any] = field(default_factory=dict)
    engine_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in {
            "steps": 1,
            "prompts": 1,
            "generations": 2,
            "microbatch": 0,
            "max_completion": 1,
            "watch_every": 0,
        }.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}: give {least} or more")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed={self.seed}: give 0 to {2**32 - 1}")
        for name in ("checkpoint_every", "lr"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name}={getattr(self, name)}: give a positive number")
        if self.microbatch and self.sequences % self.microbatch:
            raise UsageError(
                f"microbatch={self.microbatch} does not divide the {self.sequences} completions of a step "
                f"(prompts={self.prompts} x generations={self.generations})"
            )
        kind = parse_stack(self.engine).kind
        if kind not in ("vllm", "mlx", "emulated"):
            raise UsageError(f"engine={self.engine!r} is none for training: use vllm, vllm:eager, mlx or emulated:TARGET")
        if "dtype" in self.engine_options:
            raise UsageError("[engine_options] dtype: decided by `arm`; leave it out")
        if self.weights not in get_args(Weights):
            raise UsageError(f"weights={self.weights!r}{suggest(self.weights, list(get_args(Weights)))}")
        arm = self.how
        if self.weights == "bf16" and arm.trainer_dtype != "bfloat16":
            raise UsageError(f"arm={self.arm!r} computes in {arm.trainer_dtype}: weights must be 'fp32-masters'")
        if arm.exact and kind != "emulated":
            raise UsageError(f"arm={self.arm!r} needs the trainer's kernels in the engine: engine must be 'emulated:TARGET'")
        if arm.engine_dtype != "bfloat16" and kind == "mlx":
            raise UsageError(f"arm={self.arm!r} needs an engine in {arm.engine_dtype}: engine must be vllm or emulated:TARGET")
        if self.watch_every and (arm.trainer_dtype != "bfloat16" or arm.engine_dtype != "bfloat16" or arm.exact):
            raise UsageError(
                f"watch_every={self.watch_every}: drift is measured between BF16 stacks, not for arm={self.arm!r}; give 0"
            )
        for name in self.grpo:
            if name in DECIDED:
                raise UsageError(f"[grpo] {name}: decided by {DECIDED[name]}; leave it out")

    @property
    def how(self) -> Arm:
        return arm_named(self.arm)

    @property
    def sequences(self) -> int:
        """Completions in a step."""
        return self.prompts * self.generations

    @property
    def name(self) -> str:
        """What tells this run from the others of its file."""
        return f"{self.arm}-seed{self.seed}"

    @property
    def directory(self) -> Path:
        return Path(self.out) / self.name

    def options(self, max_model_len: int) -> EngineOptions:
        """How the engine is started."""
        given = {"max_num_seqs": max(64, self.sequences), "dtype": self.how.engine_dtype} | self.engine_options
        return replace(EngineOptions(max_model_len=max_model_len), **given)

    def to_dict(self) -> dict[str, Any]:
        """As TOML has it: keys without a value left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_config(path: Path, arm: str | None = None, seed: int | None = None) -> list[TrainConfig]:
    """Every run that the file asks for: `arm` and `seed` may be lists there, and are replaced by the arguments if given.

    Seeds turn slowest, so that what is there after half the time is balanced over arms. Raises UsageError for a file that
    cannot be read, an unknown key, a value of the wrong type or out of range.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not a TOML file: {error}") from None
    if arm is not None:
        data["arm"] = arm
    if seed is not None:
        data["seed"] = seed
    try:
        arms, seeds = (_values(data, key, default) for key, default in (("arm", "none"), ("seed", 0)))
        return [_checked(data | {"arm": arm, "seed": seed}) for seed, arm in itertools.product(seeds, arms)]
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _values(data: Mapping[str, Any], key: str, default: Any) -> list[Any]:
    value = data.get(key, default)
    values = value if isinstance(value, list) else [value]
    if not values or any(values.count(value) > 1 for value in values):
        raise UsageError(f"{key}={value!r}: give each once, and at least one")
    return values


def _checked(data: Mapping[str, Any]) -> TrainConfig:
    values = _typed("", data, TrainConfig)
    if missing := [f.name for f in fields(TrainConfig)[:4] if f.name not in data]:
        raise UsageError(f"no `{missing[0]}`; a run needs model, task, engine and out")
    values["engine_options"] = _typed("[engine_options] ", values.get("engine_options", {}), EngineOptions)
    return TrainConfig(**values)


def _typed(where: str, data: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """`data` if every key is a field of dataclass `kind` and every value of its type; integers may stand for floats."""
    kinds = typing.get_type_hints(kind)
    values = {}
    for key, value in data.items():
        if key not in kinds:
            raise UsageError(f"{where}unknown key {key!r}{suggest(key, list(kinds))}")
        wanted = kinds[key]
        if typing.get_origin(wanted) is types.UnionType:
            wanted = next(part for part in get_args(wanted) if part is not type(None))
        wanted = str if typing.get_origin(wanted) is Literal else typing.get_origin(wanted) or wanted
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            raise UsageError(f"{where}{key}={value!r}: expected {'a table' if wanted is dict else wanted.__name__}")
        values[key] = value
    return values
