"""Asks stacks: builds a canary, has it answered, and reads the answers together with the conditions they were given under."""

from __future__ import annotations

import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tripoint.canary.checkpoint import Canary, build
from tripoint.canary.reading import Fingerprint, Observed, read
from tripoint.canary.shape import CanaryShape
from tripoint.errors import MeasurementError, UsageError

if TYPE_CHECKING:
    from tripoint.stacks.base import EngineOptions, Rollout, Stack

ALONE = 32  # prompts that are asked a second time, one by one


def fingerprint_stack(
    name: str, shape: CanaryShape = CanaryShape(), *, seed: int = 0, options: EngineOptions | None = None, device: str | None = None
) -> Fingerprint:
    ...


def ask(stack: Stack, canary: Canary) -> Fingerprint:
    """Ask a running stack that holds the canary's weights: all prompts in one batch, then some while decoding, some alone."""
    started = time.monotonic()

    def first(prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[int, ...]]:
        return [rollout.completion_ids for rollout in stack.sample(prompts, max_tokens=tokens, seed=0, temperature=0.0)]

    prefill = [ids[0] for ids in first([prompt.tokens for prompt in canary.prompts], 1)]
    decoded = first([prompt.decode for prompt in canary.decode_prompts if prompt.decode], 2)
    alone = [first([prompt.tokens], 1)[0][0] for prompt in canary.decode_prompts]
    found = read(canary, Observed(prefill, decoded, alone), stack.name)
    return replace(found, conditions=stack.conditions(), versions=stack.versions(), seconds=time.monotonic() - started)
