"""What a mismatch does to the policy gradient, which is what reinforcement learning feels of it.

Training on the engine's tokens as if they were the trainer's own weights each token's gradient wrongly by
pi_train / pi_engine - 1. Let, for advantages A_t and n tokens,

    g = 1/n sum_t A_t grad log pi_train(t)        b = 1/n sum_t A_t (pi_train(t) / pi_engine(t) - 1) grad log pi_train(t)

Rounding noise makes b large, but it points elsewhere in every step. Its systematic part is the norm of its mean over
dithers, whose square is estimated without bias by products of different replicates, and may come out negative.

Gradients are compared through a sketch: signs drawn once, and all parameters summed into `SKETCH` numbers. Inner products
keep their expectation, at an error of about the product of the norms over sqrt(SKETCH).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tripoint.drift.dither import Dithering, Floats, Replicates
from tripoint.errors import MeasurementError
from tripoint.stacks.hf import HFStack

SKETCH = 2**16
POSITION_BINS = 4


@dataclass(frozen=True)
class Bias:
    """Norms of b over that of g. `low`, `high`: the positions meant, `high` excluded.

    `one_step`: of b as a single replicate has it. `systematic`: of its mean; the root of the squared norm's estimate, with
    its sign. `stderr`: of that estimate, `systematic` squared, from what it becomes without each replicate (`left_out`).
    """

    low: int
    high: int
    one_step: float
    systematic: float
    stderr: float
    left_out: tuple[float, ...] = field(repr=False)

    @property
    def square(self) -> float:
        """The estimate whose root `systematic` is, which may be negative."""
        return math.copysign(self.systematic**2, self.systematic)

    def less(self, other: Bias) -> tuple[float, float]:
        """`square` less that of `other`, of the same dithers, with the standard error of the difference: of a recorded engine's
        own noise, which is in both, it is free."""
        differences = np.subtract(self.left_out, other.left_out)
        return self.square - other.square, _jackknife(differences)


@dataclass(frozen=True)
class GradientBias:
    """The bias over all positions, and by position in the completion, but where there is hardly a gradient: where all
    advantages are zero, or too few replicates have one for its norm to be told."""

    total: Bias
    by_position: tuple[Bias, ...]


def gradient_bias(
    trainer: HFStack,
    engine: Replicates,
    dithering: Dithering,
    advantages: Sequence[float | Sequence[float]],
    seeds: Sequence[int],
) -> GradientBias:
    """The gradient bias of `trainer` as it is now (aligned or not) on the tokens of `dithering`.

    `engine`: the engine's replicates on those tokens. `advantages`: for each sequence one, or one for each of its tokens.
    `seeds`: of the trainer's dithers, three or more, as many as the engine has replicates (a recorded engine has one, which
    then serves for all). A compiled trainer is run as it is without compilation. Raises MeasurementError where there is no
    gradient.
    """
    if len(seeds) < 3 or len(engine) not in (1, len(seeds)) or len(advantages) != len(dithering.lengths):
        raise ValueError("needs three seeds or more, as many engine replicates, and an advantage for each sequence")
    by_token = [np.full(n, a, np.float32) for n, a in zip(dithering.lengths, advantages, strict=True)]
    longest = max(dithering.lengths)
    edges = np.linspace(0, longest, min(POSITION_BINS, longest) + 1).round().astype(int)
    sketch = _Sketch(trainer.model.parameters())
    biased, plain = [], []
    with dithering.varying(trainer) as vary:
        for number, seed in enumerate(seeds):
            vary(seed)
            scores = engine.values[number if len(engine) > 1 else 0]
            b, g = _gradients(trainer, dithering, scores, by_token, edges, sketch)
            biased.append(b)
            plain.append(g)
    b, g = np.stack(biased), np.stack(plain)  # (replicates, positions, sketch)
    total = _bias(0, longest, b.sum(axis=1), g.sum(axis=1))
    if total is None:
        raise MeasurementError("the policy gradient is zero on these rollouts, or too small to be told: are all advantages?")
    parts = [_bias(int(low), int(high), b[:, i], g[:, i]) for i, (low, high) in enumerate(pairwise(edges))]
    return GradientBias(total, tuple(part for part in parts if part is not None))


class _Sketch:
    """Random signs for every parameter, fixed; adds up what gradients there are."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = list(parameters)
        self.signs = [torch.randint(0, 2, (p.numel(),), generator=generator, dtype=torch.int8) * 2 - 1 for p in self.parameters]

    def take(self) -> Floats:
        """The sketch of the gradients, which are cleared."""
        total = torch.zeros(SKETCH)
        for parameter, signs in zip(self.parameters, self.signs, strict=True):
            if parameter.grad is None:
                continue
            signed = parameter.grad.flatten().float().cpu() * signs
            whole = len(signed) // SKETCH * SKETCH
            total += signed[:whole].view(-1, SKETCH).sum(0)
            total[: len(signed) - whole] += signed[whole:]
            parameter.grad = None
        return total.double().numpy()


def _gradients(
    trainer: HFStack,
    dithering: Dithering,
    engine: Floats,
    advantages: Sequence[NDArray[np.float32]],
    edges: np.ndarray[tuple[int], np.dtype[np.int64]],
    sketch: _Sketch,
) -> tuple[Floats, Floats]:
    """b and g by position: (positions, sketch) each."""
    model, tokens = trainer.model, sum(dithering.lengths)
    out = np.zeros((2, len(edges) - 1, SKETCH))
    start = 0
    for rollout, by_token in zip(dithering.rollouts, advantages, strict=True):
        count = len(rollout.completion_ids)
        scored = engine[start : start + count]
        start += count
        if not by_token.any():
            continue
        advantage = torch.tensor(by_token, device=trainer.device)
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]], device=trainer.device)
        with torch.autocast(trainer.device.type, torch.bfloat16, enabled=trainer.mode == "autocast"):
            logits = model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, -count:, None])[:, 0]
        recorded = torch.tensor(scored, device=trainer.device)
        excess = torch.expm1(logprobs.detach().double() - recorded).float()
        for place, (low, high) in enumerate(pairwise(edges)):
            if low >= count:
                continue
            for kind, weight in enumerate((excess, torch.ones_like(excess))):
                loss = (advantage[low:high] * weight[low:high] * logprobs[low:high]).sum() / tokens
                loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
                out[kind, place] += sketch.take()
    return out[0], out[1]


def _bias(low: int, high: int, b: Floats, g: Floats) -> Bias | None:
    """From sketches of all replicates, (replicates, sketch) each. None where the norm of g is not told from zero."""

    def products(x: Floats, kept: list[int]) -> float:
        gram = x[kept] @ x[kept].T
        n = len(kept)
        return float((gram.sum() - np.trace(gram)) / (n * (n - 1)))

    everyone = list(range(len(b)))
    without = [[k for k in everyone if k != left] for left in everyone]
    norm, norms = products(g, everyone), [products(g, kept) for kept in without]
    if min(norm, *norms) <= 0:
        return None
    square = products(b, everyone) / norm
    left_out = tuple(products(b, kept) / n for kept, n in zip(without, norms, strict=True))
    one_step = math.sqrt((b**2).sum(axis=1).mean() / norm)
    return Bias(low, high, one_step, math.copysign(math.sqrt(abs(square)), square), _jackknife(left_out), left_out)


def _jackknife(left_out: Sequence[float] | Floats) -> float:
    """The standard error of an estimate from what it becomes without each replicate."""
    values, n = np.asarray(left_out), len(left_out)
    return math.sqrt((n - 1) / n * ((values - values.mean()) ** 2).sum())
