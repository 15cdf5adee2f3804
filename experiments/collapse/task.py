"""The task: ten values are given, their sorted order is wanted, right or wrong as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

LENGTH = 10
VALUES = 18
BEGIN, SEPARATOR = VALUES, VALUES + 1
PROMPTS = 256


def problems(count: int, generator: torch.Generator) -> Tensor:
    """`count` random prompts [count, LENGTH + 2] of token ids: BEGIN, the values, SEPARATOR."""
    values = torch.randint(VALUES, (count, LENGTH), generator=generator)
    begin, separator = torch.full((count, 1), BEGIN), torch.full((count, 1), SEPARATOR)
    return torch.cat((begin, values, separator), dim=1)


def training_prompts() -> Tensor:
    """The fixed prompts [PROMPTS, LENGTH + 2] of reinforcement learning."""
    return problems(PROMPTS, torch.Generator().manual_seed(1_000_003))


def answers(prompts: Tensor) -> Tensor:
    """The right completions [count, LENGTH]."""
    return prompts[:, 1:-1].sort(dim=1).values


def reward(prompts: Tensor, completions: Tensor) -> Tensor:
    """1.0 where the whole completion is right, else 0.0, FP64 [count]."""
    return (completions == answers(prompts)).all(dim=1).double()
