"""`align_model`: the three operations of a live model under another schedule, with a record of what changed."""

from __future__ import annotations

from collections import Counter
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
    aligned,
    forward_slot,
)
from tripoint.align.layouts import Decoder, Place, find_decoders
from tripoint.errors import UsageError
from tripoint.profiles import Target, resolve_target
from tripoint.schedule import QkNormRounding, RoundingSchedule, value_text

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
    _root: nn.Module

    def undo(self) -> None:
        """Give every module of the model the `forward` it had before it was first aligned. Doing it twice is harmless."""
        for module in self._root.modules():
            site = aligned(module)
            if site is None:
                continue
            slot = forward_slot(module)
            if site.replaced is None and slot == "forward":
                del module.forward
            else:
                setattr(module, slot, site.replaced or type(module).forward.__get__(module))

    def __str__(self) -> str:
        lines = [f"aligned to {self.target.name}: {self.schedule}  ({self.target.detail})"]
        for (op, before, after), count in Counter((site.op, site.before, site.after) for site in self.sites).items():
            change = f"{before} -> {after}" if before != after else f"{after} (as before)"
            lines.append(f"  {op:<22} {change:<24} {count} module{'s' if count > 1 else ''}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def align_model(model: nn.Module, to: str | Path | RoundingSchedule) -> Alignment:
    """See `tripoint.align.align`."""
    target = resolve_target(to)
    decoders = find_decoders(model)
    schedule = target.schedule
    if schedule.norm.qk is None and any(decoder.has_qk_norm for decoder in decoders):
        schedule = _with_qk(schedule, TRANSFORMERS.norm.qk)
    for decoder in decoders:
        _check_supported(schedule, decoder)

    before = _schedule_before(decoders[0])
    sites: list[AlignedSite] = []
    notes: list[str] = []
    if _compiled(model) and aligned(decoders[0].rotary) is None:
        notes.append(
            "the model was compiled: what is given as before is its uncompiled code's, of which a compiler drops roundings"
        )
    for decoder in decoders:
        notes += _notes(decoder)
        for place in decoder.places:
            sites.append(_record(place, before, schedule))
            _install(place, decoder, schedule)
    return Alignment(target, schedule, before, tuple(sites), tuple(notes), model)


def _compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` wraps the model or a module in it."""
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


def _install(place: Place, decoder: Decoder, schedule: RoundingSchedule) -> None:
    module = place.module
    slot = forward_slot(module)
    current = aligned(module)
    replaced = current.replaced if current is not None else vars(module).get(slot)
    common = (module, place.name, replaced, schedule)
    site: AlignedForward
    if place.kind == "layer":
        site = AlignedDecoderLayer(*common, index=place.index, last=place.index == decoder.layers - 1)
    elif place.kind == "norm":
        site = AlignedNorm(
            *common, site=place.site, after_add=place.site == "final" or (place.site == "input" and place.index > 0)
        )
    elif place.kind == "mlp":
        site = AlignedGatedMLP(*common, act=decoder.act)
    elif place.kind == "attention":
        site = AlignedAttention(*common)
    else:
        site = AlignedRotaryEmbedding(*common)
    setattr(module, slot, site.forward)  # type: ignore[attr-defined]


def _schedule_before(decoder: Decoder) -> RoundingSchedule:
    """What the model does now: its alignment if it has one, else what transformers' code does."""
    site = aligned(decoder.rotary)
    if site is not None:
        return site.schedule
    own = TRANSFORMERS_AUTOCAST if decoder.weight_dtype == torch.float32 else TRANSFORMERS
    return own if decoder.has_qk_norm else _with_qk(own, None)


def _with_qk(schedule: RoundingSchedule, qk: QkNormRounding | None) -> RoundingSchedule:
    return dataclass_replace(schedule, norm=dataclass_replace(schedule.norm, qk=qk))


def _check_supported(schedule: RoundingSchedule, decoder: Decoder) -> None:
    name = decoder.name or "the model"
    if schedule.swiglu.sig == "bf16" and decoder.act != "silu":
        raise UsageError(
            f"{name}: swiglu.sig=bf16 (S5) is a sigmoid's rounding, but the gate here is {decoder.act}; use S1 or S3"
        )
    if schedule.rope.angle != "pos*inv" and decoder.rotary.rope_type != "default":
        raise UsageError(
            f"{name}: angle={schedule.rope.angle} is defined for plain RoPE only, but rope_type here is "
            f"{decoder.rotary.rope_type}; use angle=pos*inv"
        )


def _notes(decoder: Decoder) -> list[str]:
    """What somebody who reads the record has to know about the model."""
    name = decoder.name or "the model"
    taken = Counter(place.taken_over for place in decoder.places if place.taken_over is not None)
    notes = [f"{name}: taken over from {library}: {count} modules" for library, count in taken.items()]
    held = decoder.rotary.inv_freq.dtype
    if held != torch.float32:
        notes.append(
            f"{name}: rotary_emb.inv_freq was rounded to {held}, probably by `.to({held})`, and no schedule gives its angles "
            "back; load the model with `dtype=` instead"
        )
    if decoder.weight_dtype == torch.float32:
        notes.append(f"{name}: FP32 weights: rounds as recorded under autocast, and computes as before without")
    return notes


def _record(place: Place, before: RoundingSchedule, after: RoundingSchedule) -> AlignedSite:
    """`place` with its rounding points before and after, as the words of the schedule that concern it."""

    def words(schedule: RoundingSchedule) -> str:
        if place.kind == "layer":
            return f"carry={value_text(schedule.carry)}"
        part: Any = getattr(schedule.norm, place.site) if place.kind == "norm" else getattr(schedule, place.site)
        angle = getattr(part, "angle", "pos*inv")
        return " ".join(
            [part.code, *([f"angle={angle}"] if angle != "pos*inv" else []), *(["cast=rtz"] if part.cast == "rtz" else [])]
        )

    op = {"layer": "residual adds", "rotary": "rope table", "norm": f"norm.{place.site}"}.get(place.kind, place.site)
    was = words(before) if place.taken_over is None or aligned(place.module) else f"{place.taken_over}'s"
    return AlignedSite(place.name, op, was, words(after))
