"""Under every schedule, every site of an aligned model gives the bits of the independent oracle, and no field reaches further
than its own site."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

from sites import GEMMS, OWNERS, changed, mismatches, record
from strategies import NORM, QK, ROPE, SWIGLU, schedules
from tiny import ARCHITECTURES, logits, same, tiny, tokens
from tripoint import align
from tripoint.errors import UsageError
from tripoint.schedule import RoundingSchedule

pytestmark = pytest.mark.usefixtures("one_thread")

UNROUNDED = ("N3", "N4", "N5")
NORMS = [
    *(f"{code} carry=bf16" for code in NORM),
    *(f"{code} carry={carry}" for code in UNROUNDED for carry in ("layer", "fp32", "3", "[0,3,4]")),
    "N1 N.final=N3",
    "N3 carry=layer N.input=N2",
    "N5 carry=fp32 N.final=N1",
    "N4 carry=5 N.post_attention=N3 N.final=N5",
]


def check(model: Any, schedule: str | RoundingSchedule, length: int = 7) -> None:
    ids = tokens(length)
    align(model, schedule)
    expected = schedule if isinstance(schedule, RoundingSchedule) else RoundingSchedule.parse(schedule)
    assert mismatches(model, record(model, ids), expected, ids) == []


@pytest.mark.parametrize("norm", NORMS)
def test_every_schedule_gives_the_oracles_bits(norm: str) -> None:
    model = tiny("llama")
    for rope in ROPE:
        for swiglu in SWIGLU:
            check(model, f"{rope} {swiglu} {norm}", length=4)


@pytest.mark.parametrize("cast", ["rne", "rtz"])
@pytest.mark.parametrize("qk", QK)
def test_every_qk_norm_gives_the_oracles_bits(qk: str, cast: str) -> None:
    model = tiny("qwen3")
    for rope in ROPE:
        check(model, f"{rope} S3 N3 carry=layer qk={qk} cast={cast}")


@settings(max_examples=30, deadline=None)
@given(schedule=schedules())
def test_any_schedule_gives_the_oracles_bits(schedule: RoundingSchedule) -> None:
    model = tiny("qwen3")
    if schedule.norm.qk is None:  # the model has QK-norms, which then stay as they were
        align(model, schedule)
        assert align(model, schedule).schedule.norm.qk == RoundingSchedule.parse("R1 S1 N1 qk=both").norm.qk
    else:
        check(model, schedule)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_activations_and_formats(architecture: str, dtype: torch.dtype, act: str) -> None:
    model = tiny(architecture, dtype=dtype, hidden_act=act)
    for schedule in ("R1 S1 N1 qk=both", "R3 S3 N3 carry=layer qk=none", "R4 S1 N4 carry=fp32 qk=out cast=rtz"):
        check(model, schedule)


BASES = ("R1 S1 N1 qk=both", "R3 S3 N3 carry=layer qk=out", "R2 S1 N4 carry=3 qk=norm", "R4 S3 N5 carry=fp32 qk=none")
VALUES = {
    "table": ("bf16", "fp32"),
    "compute": ("bf16", "bf16_fma", "fp32"),
    "angle": ("pos*inv", "pos/timescale", "exp2", "powscale"),
    "silu_round": (True, False),
    "sig": ("fp32", "bf16"),
    "sum_round": ("before_var", "after_var", "never"),
    "norm_round": (True, False),
    "out_round": (True, False),
    "cast": ("rne", "rtz"),
    "carry": ("bf16", "layer", "fp32", 3, [1, 2]),
}


def neighbours(base: RoundingSchedule) -> list[tuple[str, RoundingSchedule]]:
    """Every schedule that differs from `base` in one field, with that field's name."""
    out = []
    for field in base.flat:
        *path, last = field.split(".")
        for value in VALUES[last]:
            data: dict[str, Any] = base.to_dict()
            part = data
            for key in path:
                part = part[key]
            part[last] = value
            try:
                schedule = RoundingSchedule.from_dict(data)
            except UsageError:  # such a schedule cannot exist
                continue
            if schedule != base:
                out.append((field, schedule))
    return out


def test_every_field_is_changed_in_some_schedule() -> None:
    bases = [RoundingSchedule.parse(text) for text in BASES]
    assert {field for base in bases for field, _ in neighbours(base)} == set(bases[0].flat)


@pytest.mark.parametrize("text", BASES)
def test_one_field_changes_its_own_site_and_no_other(text: str) -> None:
    base = RoundingSchedule.parse(text)
    model, ids = tiny("qwen3"), tokens(19)
    align(model, base)
    before = record(model, ids)
    # Every site gets the inputs it had under `base`.
    forced = {name: tensor for name, tensor in before.items() if name.split(".")[-1] in (*GEMMS, *OWNERS["norm.qk"])}
    for field, schedule in neighbours(base):
        align(model, schedule)
        differing = changed(before, record(model, ids, forced))
        site = field.rpartition(".")[0]
        if field == "carry" or (field.endswith(".cast") and site in ("norm.input", "norm.post_attention")):
            # The stored sum is another one, and every later norm sees it.
            assert differing, f"{field}: {schedule}"
            assert differing <= {"norm.input", "norm.post_attention", "norm.final"}, f"{field}: {schedule}"
            assert site in {"", *differing}, f"{field}: {schedule}"
        else:
            assert differing == {site}, f"{field}: {schedule}"


def test_two_schedules_that_differ_give_other_logits_and_equal_ones_the_same() -> None:
    model, ids = tiny("llama"), tokens()
    seen = []
    for schedule in ("R1 S1 N1", "R3 S3 N3 carry=layer", "R3 S3 N3 carry=fp32", "R3 S3 N6"):
        align(model, schedule)
        seen.append(logits(model, ids))
    assert not same(seen[0], seen[1])
    assert not same(seen[1], seen[2])
    assert same(seen[2], seen[3])
