"""`align_model`: the three operations of a live model under another schedule, with a record of what changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tripoint.align.forwards import (
    AlignedAttention,
    AlignedDecoderLayer,
    AlignedForward,
    AlignedGatedMLP,
    AlignedNorm,
    AlignedRotaryEmbedding,
    forward_slot,
)
from tripoint.align.layouts import Decoder, Place, find_decoders
from tripoint.errors import UsageError
from tripoint.profiles import Target, resolve_target
from tripoint.schedule import RoundingSchedule

# What transformers' own code does in the known layouts: with BF16 or FP16 weights, and with FP32 weights under autocast.
TRANSFORMERS = RoundingSchedule.parse("R1 S1 N1 qk=both")
TRANSFORMERS_AUTOCAST = RoundingSchedule.parse("R4 S1 N6 qk=norm")


@dataclass(frozen=True)
class AlignedSite:
    """One patched module: its name, which of the ops it holds, and its rounding points before and after as text."""

    module: str
    op: str
    before: str
    after: str


@dataclass(frozen=True)
class Alignment:
    """The record of one call of `align`: print it to see what changed, `undo()` it to have the old bits back."""

    target: Target
    schedule: RoundingSchedule
    before: RoundingSchedule
    sites: tuple[AlignedSite, ...]
    notes: tuple[str, ...]
    _modules: tuple[nn.Module, ...]
    _root: nn.Module

    def undo(self) -> None:
        """Give every module of the model the `forward` it had before it was first aligned. Doing it twice is harmless."""
        for module in self._modules:
            slot = forward_slot(module)
            own = vars(module).get(slot)
            if not isinstance(own, AlignedForward):
                continue
            if own.replaced is not None:
                setattr(module, slot, own.replaced)
            elif slot == "forward":
                del module.forward
            else:
                setattr(module, slot, type(module).forward.__get__(module))
        _forget_compiled(self._root)

    def __str__(self) -> str:
        lines = [f"aligned to {self.target.name}: {self.schedule}  ({self.target.detail})"]
        groups: dict[tuple[str, str, str], int] = {}
        for site in self.sites:
            key = (site.op, site.before, site.after)
            groups[key] = groups.get(key, 0) + 1
        for (op, before, after), count in groups.items():
            change = f"{before} -> {after}" if before != after else f"{after} (as before)"
            lines.append(f"  {op:<22} {change:<24} {count} module{'s' if count > 1 else ''}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def align_model(model: nn.Module, to: str | Path | RoundingSchedule) -> Alignment:
    """See `tripoint.align.align`."""
    target = resolve_target(to)
    decoders = find_decoders(model)
    before = _schedule_before(decoders[0], model)
    schedule = target.schedule
    if schedule.norm.qk is None:
        schedule = dataclass_replace(schedule, norm=dataclass_replace(schedule.norm, qk=TRANSFORMERS.norm.qk))
    _check_supported(schedule, decoders)

    sites: list[AlignedSite] = []
    modules: list[nn.Module] = []
    notes: list[str] = []
    for decoder in decoders:
        for place in decoder.places:
            _install(place, decoder, schedule)
            modules.append(place.module)
            sites.append(_record(place, before, schedule))
            if place.taken_over is not None:
                notes.append(f"{place.name}: taken over from {place.taken_over}")
    _forget_compiled(model)
    return Alignment(target, schedule, before, tuple(sites), tuple(notes), tuple(modules), model)


def _install(place: Place, decoder: Decoder, schedule: RoundingSchedule) -> None:
    module = place.module
    slot = forward_slot(module)
    own = vars(module).get(slot)
    replaced: Callable[..., Any] | None = own.replaced if isinstance(own, AlignedForward) else own
    if replaced is not None and getattr(replaced, "__func__", None) is type(module).forward:
        replaced = None  # accelerate's copy of the class's own forward
    common = (module, place.name, replaced, schedule)
    forward: AlignedForward
    if place.kind == "layer":
        forward = AlignedDecoderLayer(*common, index=place.index, last=place.index == decoder.layers - 1)
    elif place.kind == "norm":
        forward = AlignedNorm(*common, site=place.site, of_sum=place.site == "final" or (place.site == "input" and place.index > 0))
    elif place.kind == "mlp":
        forward = AlignedGatedMLP(*common, act=decoder.act)
    elif place.kind == "attention":
        forward = AlignedAttention(*common)
    else:
        forward = AlignedRotaryEmbedding(*common)
    setattr(module, slot, forward.forward)


def _schedule_before(decoder: Decoder, model: nn.Module) -> RoundingSchedule:
    """What the model does now: its alignment if it has one, else what transformers' code does."""
    for place in decoder.places:
        own = vars(place.module).get(forward_slot(place.module))
        if isinstance(own, AlignedForward):
            return own.schedule
    fp32 = next(iter(model.parameters())).dtype == torch.float32
    return TRANSFORMERS_AUTOCAST if fp32 else TRANSFORMERS


def _check_supported(schedule: RoundingSchedule, decoders: list[Decoder]) -> None:
    for decoder in decoders:
        if schedule.swiglu.sig == "bf16" and decoder.act != "silu":
            raise UsageError(
                f"{decoder.name or 'the model'}: swiglu.sig=bf16 (S5) is a sigmoid's rounding, but the gate here is "
                f"{decoder.act}; use S1 or S3"
            )
        rotary: Any = next(place.module for place in decoder.places if place.kind == "rotary")
        if schedule.rope.angle != "pos*inv" and rotary.rope_type != "default":
            raise UsageError(
                f"{decoder.name or 'the model'}: angle={schedule.rope.angle} is defined for plain RoPE only, but rope_type "
                f"here is {rotary.rope_type}; use angle=pos*inv"
            )


def _record(place: Place, before: RoundingSchedule, after: RoundingSchedule) -> AlignedSite:
    """`place` with its rounding points before and after, as the words of the schedule that concern it."""

    def words(schedule: RoundingSchedule) -> str:
        if place.kind == "layer":
            return f"carry={schedule.flat['carry']}"
        part: Any = getattr(schedule.norm, place.site) if place.kind == "norm" else getattr(schedule, place.site)
        angle = getattr(part, "angle", "pos*inv")
        return " ".join(
            [part.code, *([f"angle={angle}"] if angle != "pos*inv" else []), *(["cast=rtz"] if part.cast == "rtz" else [])]
        )

    op = {"layer": "residual adds", "rotary": "rope table", "norm": f"norm.{place.site}"}.get(place.kind, place.site)
    return AlignedSite(place.name, op, words(before), words(after))


def _forget_compiled(model: nn.Module) -> None:
    """Have a compiled model traced anew: what Dynamo compiled earlier would go on running the old forwards."""
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()):
        torch.compiler.reset()
