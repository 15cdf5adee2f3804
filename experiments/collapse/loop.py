"""The loop: warm-up by imitation, then sample with the engine, update with the trainer, copy the weights, again."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from experiments.collapse import pocket, sides, task
from experiments.collapse.arms import ARMS, Arm, arm_named
from experiments.collapse.spec import Run
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tripoint.errors import MeasurementError
from tripoint.rl.watch import mismatch

PROMPTS_PER_UPDATE, SAMPLES = 16, 8
SFT_BATCH, SFT_LR, SFT_TARGET, SFT_MOST_UPDATES = 128, 1e-3, 0.34, 3000
TIS_LIMIT = 2.0
BIAS_EVERY = 20


class DivergenceError(Exception):
    """Numbers are not finite any more."""


# -- warm-up ----------------------------------------------------------------------------------------------------------


def warmed_up(run: Run, directory: Path) -> list[Tensor]:
    """FP32 weights after the warm-up of `run`, made once and kept in `directory`.

    Trained on fresh problems in FP32, so that no schedule is favoured, until the engine answers `SFT_TARGET` of the fixed
    prompts right when sampling.
    """
    path = directory / f"{run.shape}-keys{run.key_size:g}-{run.sft_seed}.safetensors"
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            weights = _warm_up(run)
            unfinished = path.with_suffix(".unfinished")
            save_file({f"{i:03}": weight for i, weight in enumerate(weights)}, unfinished)
            unfinished.rename(path)
    return [weight for _, weight in sorted(load_file(path).items())]


def _warm_up(run: Run) -> list[Tensor]:
    model = pocket.build(run.shape, torch.float32)
    pocket.initialise(model, run.key_size, run.sft_seed)
    engine = sides.build_engine(ARMS["all"], run.shape)
    generator = torch.Generator().manual_seed(run.sft_seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=SFT_LR, fused=True)
    prompts = task.training_prompts()
    for update in range(SFT_MOST_UPDATES):
        if update % 20 == 0:
            pocket.copy_weights(engine, list(model.parameters()))
            uniform = torch.rand(task.LENGTH, len(prompts), generator=generator, dtype=torch.float64)
            if task.reward(prompts, sample(engine, prompts, uniform)[0]).mean() >= SFT_TARGET:
                return [parameter.detach().clone() for parameter in model.parameters()]
        batch = task.problems(SFT_BATCH, generator)
        completions = task.answers(batch)
        loss = -logprobs_of(completion_logits(model, batch, completions), completions).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    raise MeasurementError(f"{run.shape}, keys {run.key_size:g}: not warmed up after {SFT_MOST_UPDATES} updates")


# -- both sides -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(engine: PreTrainedModel, prompts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample completions [batch, LENGTH]; also their log-probabilities and the entropies, in nats, of each position.

    Every prompt is answered batch / len(prompts) times, its samples next to each other: one prefill per prompt, then decoding
    with a KV cache. `uniform` [LENGTH, batch] in [0, 1), FP64, decides: a token is where the distribution function passes it.
    Raises DivergenceError.
    """
    logits, cache = _prefill(engine, prompts, uniform.shape[1] // len(prompts))
    tokens: list[Tensor] = []
    logprobs, entropies = [], []
    for position, position_uniform in enumerate(uniform):
        if position > 0:
            logits = engine(input_ids=tokens[-1], past_key_values=cache, use_cache=True).logits
        every = logits[:, -1].double().log_softmax(-1)
        below = every.exp().cumsum(-1)
        if not below.isfinite().all():
            raise DivergenceError
        token = torch.searchsorted(below, position_uniform[:, None] * below[:, -1:], right=True)
        tokens.append(token)
        logprobs.append(every.gather(-1, token))
        entropies.append(-(every.exp() * every).sum(-1, keepdim=True))
    return torch.cat(tokens, 1), torch.cat(logprobs, 1), torch.cat(entropies, 1)


def completion_logits(model: PreTrainedModel, prompts: Tensor, completions: Tensor) -> Tensor:
    """Logits [batch, LENGTH, VOCABULARY], FP64, that predict `completions` [batch, LENGTH].

    Every prompt has batch / len(prompts) completions, next to each other, which share one pass over it; a second pass sees
    the completions whole.
    """
    first, cache = _prefill(model, prompts, len(completions) // len(prompts))
    rest = model(input_ids=completions[:, :-1], past_key_values=cache, use_cache=True).logits
    return torch.cat((first, rest), dim=1).double()


def _prefill(model: PreTrainedModel, prompts: Tensor, samples: int) -> tuple[Tensor, DynamicCache]:
    """One pass over `prompts`: the logits [len(prompts) * samples, 1, VOCABULARY] that follow them, and the cache, with each
    prompt `samples` times in a row."""
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=prompts, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    cache.batch_repeat_interleave(samples)
    return logits.repeat_interleave(samples, dim=0), cache


def logprobs_of(logits: Tensor, completions: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]


def policy_logits(
    arm: Arm, trainer: PreTrainedModel, engine: PreTrainedModel, noise: torch.Generator, prompts: Tensor, completions: Tensor
) -> tuple[Tensor, PreTrainedModel]:
    """The logits that the arm's loss sees, and the model whose parameters its gradient reaches."""
    if arm.split is None and arm.noise != "logits":
        return completion_logits(trainer, prompts, completions), trainer
    trainer_logits, engine_logits = (completion_logits(model, prompts, completions) for model in (trainer, engine))
    if arm.noise == "logits":
        return sides.moved(engine_logits, trainer_logits, sides.random_signs(engine_logits.shape, noise)), engine
    if arm.split == "aligned forward":
        return engine_logits.detach() + (trainer_logits - trainer_logits.detach()), trainer
    return trainer_logits.detach() + (engine_logits - engine_logits.detach()), engine


# -- reinforcement learning -------------------------------------------------------------------------------------------


def advantages(run: Run, rewards: Tensor) -> Tensor:
    """One advantage per completion, from rewards [prompts * SAMPLES], samples of a prompt next to each other."""
    if isinstance(run.baseline, float):
        return rewards - run.baseline
    groups = rewards.view(-1, SAMPLES)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4) if run.baseline == "group" else centred).flatten()


@dataclass(frozen=True)
class Batch:
    """The samples of one update, those of a prompt next to each other: `prompts` [prompts, ...], `completions`,
    `engine_logprobs` and `entropies` [prompts * SAMPLES, LENGTH], `rewards` and `advantages` [prompts * SAMPLES]."""

    prompts: Tensor
    completions: Tensor
    engine_logprobs: Tensor
    entropies: Tensor
    rewards: Tensor
    advantages: Tensor


def draw(run: Run, engine: PreTrainedModel, prompts: Tensor, generator: torch.Generator) -> Batch:
    """Choose PROMPTS_PER_UPDATE of `prompts` and let the engine answer them."""
    chosen = prompts[torch.randperm(len(prompts), generator=generator)[:PROMPTS_PER_UPDATE]]
    uniform = torch.rand(task.LENGTH, len(chosen) * SAMPLES, generator=generator, dtype=torch.float64)
    completions, engine_logprobs, entropies = sample(engine, chosen, uniform)
    rewards = task.reward(chosen.repeat_interleave(SAMPLES, dim=0), completions)
    return Batch(chosen, completions, engine_logprobs, entropies, rewards, advantages(run, rewards))


def policy_loss(
    arm: Arm, trainer: PreTrainedModel, engine: PreTrainedModel, noise: torch.Generator, batch: Batch
) -> tuple[Tensor, Tensor, PreTrainedModel]:
    """The loss of the arm; d = logp_trainer - logp_engine [batch, LENGTH]; the model whose parameters the gradient reaches."""
    logits, carrier = policy_logits(arm, trainer, engine, noise, batch.prompts, batch.completions)
    logprobs = logprobs_of(logits, batch.completions)
    d = logprobs.detach() - batch.engine_logprobs
    weight = batch.advantages[:, None]
    corrected = weight * d.exp().clamp(max=TIS_LIMIT) if arm.correction == "tis" else weight
    return -(corrected * logprobs).mean(), d, carrier


def engine_gradient(engine: PreTrainedModel, batch: Batch, scaler: torch.amp.GradScaler) -> Tensor:
    """What the gradient would be if the trainer were the engine, and nothing corrected."""
    logprobs = logprobs_of(completion_logits(engine, batch.prompts, batch.completions), batch.completions)
    return gradient_of(-(batch.advantages[:, None] * logprobs).mean(), engine, scaler)


def gradient_of(loss: Tensor, model: PreTrainedModel, scaler: torch.amp.GradScaler) -> Tensor:
    """The gradient of every parameter, as one FP32 vector; `scaler` keeps small numbers in FP16's range on the way."""
    gradients = torch.autograd.grad(scaler.scale(loss), list(model.parameters()))
    return torch.cat([gradient.flatten().float() for gradient in gradients]) / scaler.get_scale()


def train(run: Run, weights: list[Tensor]) -> Iterator[dict[str, Any]]:
    """Train from FP32 `weights`, yielding one record per update.

    A record has `update`, `seconds`; `reward` and `entropy` (nats per token) of the samples; `k1`, `k3`, `ess`, `max_ratio`,
    `max_abs` of d = logp_trainer - logp_engine; `grad_norm`; for FP16 `overflows` so far. Every `BIAS_EVERY` updates also
    `bias`, the norm of the difference between this gradient and the one that the same samples give under the engine's own
    schedule, relative to the latter, and `bias_cosine`, its cosine with the latter.

    Where numbers stop being finite, a run has `diverged`: this update's record and all later ones say so, with a reward of zero
    and no measurements.

    Raises MeasurementError if an arm that must match the engine bit for bit does not.
    """
    done = 0
    try:
        for record in _train(run, weights):
            yield record
            done += 1
    except DivergenceError:
        yield from ({"update": later, "reward": 0.0, "diverged": True, "seconds": 0.0} for later in range(done, run.updates))


def _train(run: Run, weights: list[Tensor]) -> Iterator[dict[str, Any]]:
    arm = arm_named(run.arm)
    noise = sides.noise_of(run)
    trainer = sides.build_trainer(arm, run.shape, noise)
    engine = sides.build_engine(arm, run.shape)
    masters = [weight.clone() for weight in weights]
    optimizer = torch.optim.Adam(masters, lr=run.lr, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=arm.trainer_dtype == "float16")
    prompts = task.training_prompts()
    generator = torch.Generator().manual_seed(run.seed)
    overflows = 0

    for update in range(run.updates):
        started = time.perf_counter()
        for model in (trainer, engine):
            pocket.copy_weights(model, masters)
        batch = draw(run, engine, prompts, generator)
        loss, d, carrier = policy_loss(arm, trainer, engine, noise, batch)
        if arm.bitwise and d.any():
            raise MeasurementError(f"{run.name}, update {update}: max |d| is {d.abs().max():.3g} nats, but must be zero")
        gradients = torch.autograd.grad(scaler.scale(loss), list(carrier.parameters()))
        for master, scaled in zip(masters, gradients, strict=True):
            master.grad = scaled.float()
        scaler.unscale_(optimizer)
        gradient = torch.cat([master.grad.flatten() for master in masters if master.grad is not None])

        record: dict[str, Any] = {
            "update": update,
            "reward": batch.rewards.mean().item(),
            "entropy": batch.entropies.mean().item(),
            "grad_norm": gradient.norm().item(),
            **mismatch(d.flatten().numpy()),
        }
        finite = math.isfinite(record["grad_norm"])
        if not finite and arm.trainer_dtype != "float16":  # there the scaler will skip this update
            raise DivergenceError
        if update % BIAS_EVERY == 0 and finite:
            record |= gradient_bias(gradient, engine_gradient(engine, batch, scaler))
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        overflows += scaler.get_scale() < scale
        if arm.trainer_dtype == "float16":
            record["overflows"] = overflows
        yield record | {"seconds": time.perf_counter() - started}


def gradient_bias(gradient: Tensor, reference: Tensor) -> dict[str, float]:
    """`bias` and `bias_cosine` of `train`. The cosine is 0 where there is no difference."""
    difference, reference = gradient.double() - reference.double(), reference.double()
    size, length = difference.norm(), reference.norm()
    if length == 0:
        return {"bias": 0.0, "bias_cosine": 0.0}
    cosine = (difference @ reference) / (size * length) if size > 0 else torch.zeros(())
    return {"bias": (size / length).item(), "bias_cosine": cosine.item()}
