"""One adapter per way to run a checkpoint, all behind `Stack`; `open_stack` finds the one a user named.

with open_stack("vllm", resolve_model(None)) as engine:
    rollouts = engine.sample([[1, 2, 3]], max_tokens=16, seed=0)
    logprobs = engine.score(rollouts)
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from tripoint.errors import UsageError
from tripoint.stacks.base import EngineOptions, Progress, Rollout, Stack, end_tokens, vocab_size

__all__ = [
    "EngineOptions",
    "Progress",
    "Rollout",
    "Stack",
    "StackName",
    "end_tokens",
    "is_stack",
    "open_stack",
    "parse_stack",
    "vocab_size",
]

MODES = {"hf": ("", "compile", "autocast"), "vllm": ("", "eager"), "mlx": ("",)}
GRAMMAR = "hf, hf:compile, hf:autocast, vllm, vllm:eager, mlx, http://HOST:PORT, emulated:TARGET, rollouts:FILE"


@dataclass(frozen=True)
class StackName:
    """A STACK as typed, taken apart: `kind` is hf, vllm, mlx, http, emulated or rollouts, `detail` its mode, URL or target."""

    kind: str
    detail: str

    def __str__(self) -> str:
        if self.kind == "http":
            return self.detail
        return f"{self.kind}:{self.detail}" if self.detail else self.kind


def parse_stack(name: str) -> StackName:
    """Take a STACK apart. Raises UsageError for one that does not exist, naming the nearest that does."""
    if name.startswith(("http://", "https://")):
        return StackName("http", name)
    kind, _, detail = name.partition(":")
    if detail in MODES.get(kind, ()):
        return StackName(kind, detail)
    if kind in ("emulated", "rollouts"):
        if not detail:
            what = "a schedule, as in `emulated:R3 S3 N3`" if kind == "emulated" else "a file, as in `rollouts:run.jsonl`"
            raise UsageError(f"stack `{name}` needs {what}")
        return StackName(kind, detail)
    known = [f"{kind}:{mode}" if mode else kind for kind, modes in MODES.items() for mode in modes]
    nearest = get_close_matches(name, [*known, "emulated", "rollouts"], n=1, cutoff=0.5)
    hint = f"did you mean `{nearest[0]}`? " if nearest else ""
    raise UsageError(f"unknown stack `{name}`: {hint}There are {GRAMMAR}")


def is_stack(name: str) -> bool:
    """Whether `name` is a STACK rather than a target: a profile such as `vllm@0.32` or `vllm/cuda` names its parts."""
    try:
        parse_stack(name)
    except UsageError:
        return False
    return True


def open_stack(
    name: str,
    model: Path,
    *,
    options: EngineOptions | None = None,
    device: str | None = None,
) -> Stack:
    """Load the checkpoint in directory `model` (see `tripoint.models.resolve_model`) into the stack called `name`.

    `options` are the engine's, `device` the trainer's (`cpu`, `cuda`; by default a GPU if there is one). Raises UsageError
    for an unknown stack, for one whose package is not installed, and for `rollouts:FILE`, which holds no model: read it with
    `tripoint.stacks.rollouts.read_rollouts`. Raises MeasurementError when the engine does not start.
    """
    stack = parse_stack(name)
    match stack.kind:
        case "hf":
            from tripoint.stacks.hf import HFStack

            return HFStack(model, mode=stack.detail, device=device)
        case "emulated":
            from tripoint.stacks.emulated import EmulatedStack

            dtype = (options or EngineOptions()).dtype
            return EmulatedStack(model, target=stack.detail, device=device, dtype=dtype)
        case "vllm":
            from tripoint.stacks.vllm import VllmStack

            return VllmStack(model, eager=stack.detail == "eager", options=options or EngineOptions())
        case "mlx":
            from tripoint.stacks.mlx import MlxStack

            return MlxStack(model)
        case "http":
            from tripoint.stacks.http import HttpStack

            return HttpStack(stack.detail, model)
    raise UsageError(f"stack `{name}` is a recording: it can be the engine of `drift` and `diagnose`, but runs no model")
