"""Trainer and engine of an arm, as live models: alignment, the placebo, and alignment of some layers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from experiments.collapse import pocket
from experiments.collapse.arms import STOCK, Arm
from experiments.collapse.spec import Run
from torch import Tensor, nn
from transformers import PreTrainedModel

from tripoint.align import align
from tripoint.align.forwards import AlignedAttention
from tripoint.schedule import RoundingSchedule


def noise_of(run: Run) -> torch.Generator:
    """What draws the signs of a run's placebo."""
    return torch.Generator().manual_seed(run.seed + 7919)


def build_engine(arm: Arm, shape: str) -> PreTrainedModel:
    model = pocket.build(shape, getattr(torch, arm.engine_dtype))
    align(model, arm.engine)
    return model


def build_trainer(arm: Arm, shape: str, noise: torch.Generator) -> PreTrainedModel:
    """`noise` draws the placebo's signs. A trainer that rounds like transformers is left as transformers wrote it."""
    model = pocket.build(shape, getattr(torch, arm.trainer_dtype))
    if arm.trainer == STOCK:
        return model
    align(model, arm.trainer)
    if arm.layers is not None:
        _return_to_stock(model, arm.layers, arm.trainer)
    if arm.noise in ("rope", "rope fixed"):
        for layer in model.model.layers:
            fixed = arm.noise == "rope fixed"
            layer.self_attn.forward = NoisyAttention(layer.self_attn, arm.trainer, noise, fixed).forward
    return model


class NoisyAttention(AlignedAttention):
    """Attention whose rotated queries and keys are moved by as much as `STOCK` would move them, in a random direction: a fresh
    one each time, or the same for all sequences and all passes of a run, which differs between layers."""

    def __init__(self, module: nn.Module, schedule: str, noise: torch.Generator, fixed: bool) -> None:
        super().__init__(module, "self_attn", None, RoundingSchedule.parse(schedule))
        self.stock = AlignedAttention(module, "self_attn", None, RoundingSchedule.parse(STOCK))
        self.noise, self.fixed = noise, fixed

    def _rotate(self, unaligned: Callable[..., tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        aligned = super()._rotate(unaligned, *args, **kwargs)
        with torch.no_grad():
            stock = self.stock._rotate(unaligned, *args, **kwargs)
        noise = self.noise
        if self.fixed:
            attention: Any = self.module
            noise = torch.Generator().manual_seed(1000 * self.noise.initial_seed() + attention.layer_idx)
        query, key = (self._moved(a, s, noise) for a, s in zip(aligned, stock, strict=True))
        return query, key

    def _moved(self, aligned: Tensor, stock: Tensor, noise: torch.Generator) -> Tensor:
        """Query or key [batch, heads, places, head_dim]."""
        if not self.fixed:
            return moved(aligned, stock, random_signs(aligned.shape, noise))
        directions = random_signs((1, *aligned.shape[1:]), noise)
        return moved(aligned, stock, directions * (stock - aligned.detach()).sign())


def random_signs(shape: Sequence[int], noise: torch.Generator) -> Tensor:
    return torch.randint(2, tuple(shape), generator=noise) * 2 - 1


def moved(here: Tensor, there: Tensor, signs: Tensor) -> Tensor:
    """`here` and the way to `there`, in the direction of `there` or away from it; the gradient is that of `here`."""
    distance = (there.detach().double() - here.detach().double()) * signs
    return here + distance.to(here.dtype)


def _return_to_stock(model: PreTrainedModel, aligned_layers: int, target: str) -> None:
    """Leave only the first layers of a model aligned to `target`: `align` takes a model as a whole, so mix two alignments.

    Where they meet, the stock norm gets the residual sum unrounded, and rounds it first thing, as the stock add would have.
    """
    others = model.model.layers[aligned_layers:]
    modules = [model.model.norm, *(module for layer in others for module in layer.modules())]
    align(model, STOCK)
    taken = [module.forward for module in modules]
    align(model, target)
    for module, forward in zip(modules, taken, strict=True):
        module.forward = forward
