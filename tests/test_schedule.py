"""The vocabulary: what can be said, its one printed form, what is refused and how, and comparing two schedules."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from strategies import NORM, QK, ROPE, SWIGLU, schedules
from tripoint import RoundingSchedule, UsageError
from tripoint.schedule import NormRounding, NormSites, QkNormRounding, RopeRounding, SwigluRounding, diff

parse = RoundingSchedule.parse

# -- text -------------------------------------------------------------------------------------------------------------


@given(schedules())
def test_every_schedule_reads_back_from_its_printed_form(schedule: RoundingSchedule) -> None:
    text = str(schedule)
    assert parse(text) == schedule
    assert str(parse(text)) == text
    assert hash(parse(text)) == hash(schedule)


@given(schedules(), st.randoms())
def test_the_order_of_words_does_not_matter(schedule: RoundingSchedule, random: Any) -> None:
    words = str(schedule).split()
    random.shuffle(words)
    assert parse("  ".join(words)) == schedule


def test_codes_mean_the_documented_fields() -> None:
    for code, fields in ROPE.items():
        assert parse(f"{code} S1 N1").rope == RopeRounding(*fields)
    for code, fields in SWIGLU.items():
        assert parse(f"R1 {code} N1").swiglu == SwigluRounding(*fields)
    for code, fields in NORM.items():
        norm = NormRounding(*fields)
        assert parse(f"R1 S1 {code}").norm == NormSites(norm, norm, norm)
    for code, fields in QK.items():
        assert parse(f"R1 S1 N1 qk={code}").norm.qk == QkNormRounding(*fields)
    assert parse("R4 S1 N6") == parse("R4 S1 N3 carry=fp32")


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("R3 S3 N3 carry=layer", "R3 S3 N3 carry=layer"),
        ("carry=layer N3 S3 R3", "R3 S3 N3 carry=layer"),
        ("R4 S1 N6", "R4 S1 N3 carry=fp32"),
        ("R1 S1 N1 carry=bf16 angle=pos*inv cast=rne", "R1 S1 N1"),
        ("R1 S1 N3 carry=1", "R1 S1 N3"),
        ("R1 S1 N3 carry=2", "R1 S1 N3 carry=layer"),
        ("R1 S1 N3 carry=6", "R1 S1 N3 carry=6"),
        ("R1 S1 N3 carry=[]", "R1 S1 N3 carry=fp32"),
        ("R1 S1 N3 carry=[5,1,5]", "R1 S1 N3 carry=[1,5]"),
        ("R1 S1 N3 N.final=N3", "R1 S1 N3"),
        ("R1 S1 N3 N.final=N1", "R1 S1 N3 N.final=N1"),
        ("R1 S1 N1 N.input=N3 N.post_attention=N3", "R1 S1 N3 N.final=N1"),
        ("R1 S1 N1 cast=rtz", "R1 S1 N1 cast=rtz"),
        ("R1 S1 N1 cast=rope:rtz,swiglu:rtz,norm:rtz", "R1 S1 N1 cast=rtz"),
        ("R1 S1 N1 cast=norm.final:rtz,rope:rtz", "R1 S1 N1 cast=rope:rtz,norm.final:rtz"),
        ("R1 S1 N1 cast=norm.input:rtz,norm.post_attention:rtz,norm.final:rtz", "R1 S1 N1 cast=norm:rtz"),
        ("R1 S1 N1 qk=out cast=swiglu:rtz,norm:rtz", "R1 S1 N1 qk=out cast=swiglu:rtz,norm:rtz"),
        ("R1 S1 N1 cast=norm:rtz,norm.final:rne", "R1 S1 N1 cast=norm.input:rtz,norm.post_attention:rtz"),
        ("R1 S1 N1 qk=out cast=norm.qk:rtz,rope:rtz", "R1 S1 N1 qk=out cast=rope:rtz,norm.qk:rtz"),
        ("R1 S1 N1 qk=none cast=rtz", "R1 S1 N1 qk=none cast=rtz"),
        ("R4 S5 N1 angle=exp2 qk=both", "R4 S5 N1 qk=both angle=exp2"),
    ],
)
def test_canonical_form(written: str, canonical: str) -> None:
    assert str(parse(written)) == canonical


def test_fields_without_effect_compare_equal() -> None:
    assert QkNormRounding(False, False, "rtz") == QkNormRounding(False, False, "rne")
    assert parse("R1 S1 N1 qk=none cast=rope:rtz,swiglu:rtz,norm:rtz") == parse("R1 S1 N1 qk=none cast=rtz")
    assert parse("R1 S1 N1 cast=norm.qk:rtz") == parse("R1 S1 N1")  # no QK-norm to truncate in
    assert parse("R1 S1 N1 qk=out cast=norm.qk:rtz") != parse("R1 S1 N1 qk=out")


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("R3 S3 N7", "unknown code 'N7'; nearest: N"),
        ("R3 S2 N3", "unknown code 'S2'; nearest: S"),
        ("r3 S3 N3", "unknown code 'r3'; nearest: R3"),
        ("R3 S3 N3 carri=layer", "unknown setting 'carri'; nearest: carry"),
        ("R3 S3 N3 N.finale=N1", "unknown setting 'N.finale'; nearest: N.final"),
        ("R3 S3", "no code for N (norm)"),
        ("", "no code for R (rope), S (swiglu), N (norm)"),
        ("R3 R4 S3 N3", "R3 and R4 are both given"),
        ("R3 S3 N3 carry=layer carry=fp32", "carry is given twice"),
        ("R3 S3 N3 carry=layers", "carry='layers' is not bf16, layer, fp32, a period"),
        ("R3 S3 N3 carry=0", "a period of residual adds is 1 or more"),
        ("R3 S3 N3 carry=-1", "carry='-1' is not"),
        ("R3 S3 N3 carry=[1,]", "carry='[1,]' is not"),
        ("R3 S3 N6 carry=layer", "N6 means N3 carry=fp32"),
        ("R3 S3 N3 N.final=N6", "N.final='N6' is not a norm code"),
        ("R3 S3 N3 qk=all", "qk: 'all' is not one of both, out, none, norm"),
        ("R3 S3 N3 angle=pos", "rope.angle: 'pos' is not one of"),
        ("R3 S3 N3 cast=rtn", "cast: 'rtn' is not one of rne, rtz"),
        ("R3 S3 N3 cast=ropes:rtz", "cast of unknown place 'ropes'; nearest: rope"),
        ("R3 S3 N3 cast=rope:rtz:rne", "is not rne, rtz or a list"),
    ],
)
def test_text_that_says_nothing_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "R1 S1 N1 carry=fp32",
        "R1 S1 N2 carry=layer",
        "R1 S1 N3 N.input=N1 carry=fp32",
        "R1 S1 N3 N.post_attention=N2 carry=layer",
        "R1 S1 N2 carry=4",
        "R1 S1 N1 carry=[1,3]",
    ],
)
def test_a_norm_cannot_see_a_rounded_sum_that_is_carried_unrounded(text: str) -> None:
    with pytest.raises(UsageError, match="cannot exist"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "R1 S1 N3 N.input=N1 carry=layer",  # the sum in front of an input norm is the layer's last, and rounded
        "R1 S1 N3 N.final=N1 carry=fp32",  # nothing is added after the final norm
        "R1 S1 N4 carry=fp32",
        "R1 S1 N5 carry=layer",
    ],
)
def test_combinations_that_can_exist(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "make",
    [
        lambda: RopeRounding("fp32", "bf16"),
        lambda: RopeRounding("fp32", "bf16_fma"),
        lambda: SwigluRounding(False, "bf16"),
        lambda: NormRounding("after_var", True),
        lambda: RopeRounding("fp16", "fp32"),  # type: ignore[arg-type]
        lambda: SwigluRounding(1),  # type: ignore[arg-type]
        lambda: NormRounding("never", False, "up"),  # type: ignore[arg-type]
        lambda: replace(parse("R1 S1 N3"), carry=True),
        lambda: replace(parse("R1 S1 N3"), carry=(-1,)),
        lambda: replace(parse("R1 S1 N3"), carry="none"),
        lambda: replace(parse("R1 S1 N3"), carry=1.5),
    ],
)
def test_values_that_cannot_exist_are_refused(make: Any) -> None:
    with pytest.raises(UsageError):
        make()


# -- dictionaries -----------------------------------------------------------------------------------------------------


@given(schedules())
def test_every_schedule_survives_json_and_toml(schedule: RoundingSchedule) -> None:
    data = schedule.to_dict()
    assert RoundingSchedule.from_dict(json.loads(json.dumps(data))) == schedule
    if data["norm"]["qk"] is None:
        del data["norm"]["qk"]  # TOML has no null
    assert RoundingSchedule.from_dict(tomllib.loads(tomli_w.dumps(data))) == schedule


def test_the_dictionary_has_the_fingerprints_layout() -> None:
    norm = {"sum_round": "never", "norm_round": False, "cast": "rne"}
    assert parse("R3 S3 N3 carry=layer qk=out").to_dict() == {
        "rope": {"table": "bf16", "compute": "fp32", "angle": "pos*inv", "cast": "rne"},
        "swiglu": {"silu_round": False, "sig": "fp32", "cast": "rne"},
        "norm": {
            "input": norm,
            "post_attention": norm,
            "final": norm,
            "qk": {"norm_round": False, "out_round": True, "cast": "rne"},
        },
        "carry": "layer",
    }
    assert parse("R3 S3 N3 carry=[4,1]").to_dict()["carry"] == [1, 4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.pop("rope"), "schedule: missing field, one of rope"),
        (lambda d: d["norm"].pop("final"), "schedule.norm: missing field, one of final"),
        (lambda d: d["norm"]["final"].pop("sum_round"), "schedule.norm.final: missing field, one of sum_round"),
        (lambda d: d["rope"].update(tables="bf16"), "schedule.rope: unknown field 'tables'; nearest: table"),
        (lambda d: d.update(rop={}), "schedule: unknown field 'rop'; nearest: rope"),
        (lambda d: d["norm"].update(post=1), "schedule.norm: unknown field 'post'"),
        (lambda d: d.update(rope="R1"), "schedule.rope: expected a table of fields, found 'R1'"),
        (lambda d: d.update(norm=[1]), "schedule.norm: expected a table of sites, found [1]"),
        (lambda d: d["rope"].update(table="fp64"), "rope.table: 'fp64' is not one of bf16, fp32"),
        (lambda d: d["swiglu"].update(silu_round="true"), "swiglu.silu_round: 'true' is not one of True, False"),
        (lambda d: d["rope"].update(table="fp32"), "cannot exist"),
        (lambda d: d.update(carry=[0.5]), "carry=(0.5,) is neither"),
    ],
)
def test_a_wrong_dictionary_is_refused_by_the_name_of_its_field(change: Any, says: str) -> None:
    data = json.loads(json.dumps(parse("R1 S1 N1").to_dict()))
    change(data)
    with pytest.raises(UsageError) as caught:
        RoundingSchedule.from_dict(data)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_a_dictionary_is_refused() -> None:
    with pytest.raises(UsageError, match="f: expected a table of fields"):
        RoundingSchedule.from_dict("R1 S1 N1", where="f")  # type: ignore[arg-type]


# -- carry ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("carry", "rounded"),
    [
        ("bf16", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("layer", [1, 3, 5, 7]),
        ("fp32", []),
        ("3", [2, 5]),
        ("4", [3, 7]),
        ("[0,6]", [0, 6]),
    ],
)
def test_carry_says_which_residual_adds_round(carry: str, rounded: list[int]) -> None:
    """Layer i adds the attention's output as number 2 i and the MLP's as 2 i + 1."""
    schedule = parse(f"R3 S3 N3 carry={carry}")
    assert [add for add in range(8) if schedule.carry_rounds(add)] == rounded


# -- comparing --------------------------------------------------------------------------------------------------------


def test_diff_names_the_fields() -> None:
    found = diff(parse("R1 S1 N1"), parse("R3 S3 N3 carry=layer"))
    assert [str(difference) for difference in found] == [
        "rope.compute: bf16 | fp32",
        "swiglu.silu_round: true | false",
        "norm.input.sum_round: before_var | never",
        "norm.input.norm_round: true | false",
        "norm.post_attention.sum_round: before_var | never",
        "norm.post_attention.norm_round: true | false",
        "norm.final.sum_round: before_var | never",
        "norm.final.norm_round: true | false",
        "carry: bf16 | layer",
    ]
    assert [difference.op for difference in found] == ["rope", "swiglu"] + 7 * ["norm"]


def test_diff_of_lists_casts_and_sites() -> None:
    one, other = parse("R4 S1 N3 carry=[1,5]"), parse("R4 S1 N3 carry=6 N.final=N4 cast=rope:rtz angle=exp2")
    found = [str(difference) for difference in diff(one, other)]
    assert found == [
        "rope.angle: pos*inv | exp2",
        "rope.cast: rne | rtz",
        "norm.final.norm_round: false | true",
        "carry: [1,5] | 6",
    ]


def test_a_qk_norm_counts_only_where_both_have_one() -> None:
    assert diff(parse("R1 S1 N1"), parse("R1 S1 N1 qk=none")) == []
    assert [d.field for d in diff(parse("R1 S1 N1 qk=both"), parse("R1 S1 N1 qk=norm"))] == ["norm.qk.out_round"]


@given(schedules(), schedules())
def test_diff_is_empty_for_equals_and_the_same_both_ways(one: RoundingSchedule, other: RoundingSchedule) -> None:
    assert diff(one, one) == []
    forth, back = diff(one, other), diff(other, one)
    assert [(d.field, d.left, d.right) for d in forth] == [(d.field, d.right, d.left) for d in back]
    if (one.norm.qk is None) == (other.norm.qk is None):
        assert (forth == []) == (one == other)


@given(schedules(), schedules(), st.sets(st.sampled_from(["rope", "swiglu", "norm"])))
def test_moved_takes_whole_operations(one: RoundingSchedule, other: RoundingSchedule, ops: set[Any]) -> None:
    moved = one.moved(other, tuple(ops))
    assert moved.rope == (other if "rope" in ops else one).rope
    assert moved.swiglu == (other if "swiglu" in ops else one).swiglu
    assert (moved.norm, moved.carry) == ((other if "norm" in ops else one).norm, (other if "norm" in ops else one).carry)
    assert {d.op for d in diff(moved, other)} <= {"rope", "swiglu", "norm"} - ops


def test_moving_an_unknown_operation_is_refused() -> None:
    with pytest.raises(UsageError, match="operation: 'silu' is not one of rope, swiglu, norm"):
        parse("R1 S1 N1").moved(parse("R3 S3 N3"), ("silu",))  # type: ignore[arg-type]
