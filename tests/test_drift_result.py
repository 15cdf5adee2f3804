"""`measure_drift` end to end on a tiny model: the JSON of the documentation, and what is withheld when."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import save_file
from transformers import AutoConfig

from tiny import LAYERS, tiny
from tripoint.drift.dither import Dithering, Replicates, read_weights, seeds, untied
from tripoint.drift.gradient_bias import gradient_bias
from tripoint.drift.result import DriftResult, measure_drift
from tripoint.errors import UsageError
from tripoint.report.drift import render
from tripoint.stacks import open_stack
from tripoint.stacks.hf import HFStack

KEYS = [
    "tokens",
    "sequences",
    "replicates",
    "mismatch",
    "noise_rms",
    "expected_k3_from_noise",
    "systematic",
    "attribution",
    "interaction",
    "unexplained",
    "control",
    "findings",
    "withheld",
    "bound_only",
    "positive_control",
    "problem",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    tiny("llama", tie_word_embeddings=True, max_position_embeddings=128).save_pretrained(directory)
    return directory


def shown(result: DriftResult, *, detailed: bool = False) -> str:
    with (console := Console(width=120)).capture() as written:
        console.print(render(result, detailed=detailed))
    return written.get()


def measured(model: Path, engine: str, **options: object) -> DriftResult:
    return measure_drift(str(model), engine, **{"tokens": 800, "replicates": 6} | options)  # type: ignore[arg-type]


def test_the_json_is_the_documented_one(model: Path) -> None:
    result = measured(model, "emulated:R3 S3 N3", to="R3 S3 N3")
    out = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert list(out) == KEYS
    assert result.withheld is None
    assert [row["site"] for row in out["attribution"]] == ["rope", "swiglu", "norm"]
    assert [(row["from"], row["to"]) for row in out["attribution"]] == [("R1", "R3"), ("S1", "S3"), ("N1", "N3")]
    assert set(out["systematic"]) == {"variance", "stderr", "rms", "p_value"}
    assert out["systematic"]["p_value"] < 0.01
    assert abs(out["unexplained"]["variance"]) < 3 * out["unexplained"]["stderr"]
    assert abs(out["control"]["variance"]) < 3 * out["control"]["stderr"]
    assert set(out["noise_rms"]) == {"trainer", "engine"}
    # A dither moves the input as well, which in so shallow a model is much of its noise.
    assert out["expected_k3_from_noise"] / 4 < out["mismatch"]["k3"] < out["expected_k3_from_noise"]
    assert out["findings"] == []

    report = json.loads(json.dumps(result.to_report(), allow_nan=False))
    assert [(row["low"], row["high"]) for row in report["by_position"]] == [(0, 12), (12, 25), (25, 38), (38, 50)]
    assert sum(row["tokens"] for row in report["by_probability"]) == out["tokens"]
    assert [(row["layer"], row["op"]) for row in report["by_layer"]] == [
        (layer, op) for layer in range(LAYERS) for op in ("rope", "swiglu", "norm", None)
    ]
    assert all(0 < row["changed"] < 1 and 0 < row["relative"] < 0.1 and row["ulps"] >= 1 for row in report["by_layer"])
    assert "layer, on one input" in shown(result, detailed=True)


def test_quick_attributes_nothing_and_says_why(model: Path) -> None:
    quick = measured(model, "emulated:R3 S3 N3", to="R3 S3 N3", quick=True)
    assert "quick" in str(quick.withheld)
    assert quick.systematic.aligned is not None


def test_fields_are_in_the_json_and_in_the_table_where_asked(model: Path) -> None:
    result = measured(model, "emulated:R4 S1 N1", to="R4 S1 N1", fields=True)
    out = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert list(out) == [*KEYS, "fields"]
    rows = [(row["field"], row["from"], row["to"]) for row in out["fields"]]
    assert rows == [("rope.table", "bf16", "fp32"), ("rope.compute", "bf16", "fp32")]
    assert (out["fields"][0]["variance"], out["fields"][0]["stderr"]) == (None, None)
    assert out["fields"][1]["stderr"] > 0
    rope, table, compute, *_ = [line[1:] for line in shown(result).splitlines() if "→" in line]
    assert rope.startswith("  rope R1 → R4")
    assert re.fullmatch(r"    table bf16 → fp32 +cannot be moved alone *", table)
    assert re.fullmatch(r"    compute bf16 → fp32 .*±.* moved alone *", compute)
    with pytest.raises(UsageError, match="--fields"):
        measured(model, "emulated:R4 S1 N1", fields=True, quick=True)


def test_a_wanted_precision_is_planned_for_and_kept(model: Path) -> None:
    options: dict[str, Any] = {"tokens": None, "replicates": None, "quick": True}
    said: list[str] = []
    result = measured(model, "emulated:R3 S3 N3", precision=1e-4, say=said.append, **options)
    (sentence,) = said
    planned = re.match(r"planned (\d+) replicates of about (\d+) tokens, for a standard error of (\S+) nats²$", sentence)
    assert planned is not None
    found = result.systematic
    assert found.replicates == int(planned[1])
    assert int(planned[2]) <= found.tokens < int(planned[2]) + found.sequences
    assert float(planned[3]) <= 1e-4
    assert found.total.stderr == pytest.approx(float(planned[3]), rel=0.5)
    for refused in ({"precision": 1e-4, "tokens": 800}, {"precision": 1e-4, "replicates": 6}, {"precision": 0.0}):
        with pytest.raises(UsageError, match="--precision"):
            measured(model, "emulated:R3 S3 N3", **options | refused)


def test_recorded_rollouts_give_a_bound_and_a_finding_withholds(model: Path, tmp_path: Path) -> None:
    with open_stack("emulated:R3 S3 N3", model) as engine:
        prompts = [[3 + i, 4, 5] for i in range(24)]
        rollouts = engine.sample(prompts, max_tokens=40, seed=0)
    file = tmp_path / "run.jsonl"

    def write(late: int) -> None:
        rows = [
            {
                "prompt_ids": r.prompt_ids,
                "completion_ids": r.completion_ids,
                "logprobs": [*(r.logprobs or ())[-late:], *(r.logprobs or ())[:-late]] if late else r.logprobs,
            }
            for r in rollouts
        ]
        file.write_text("\n".join(map(json.dumps, rows)))

    write(0)
    result = measured(model, f"rollouts:{file}", to="R3 S3 N3")
    assert result.systematic.bound_only
    assert result.systematic.attribution is not None
    assert result.to_json()["noise_rms"]["engine"] is None
    said: list[str] = []
    options: dict[str, Any] = {"tokens": None, "replicates": None, "quick": True}
    all_there_is = measured(model, f"rollouts:{file}", to="R3 S3 N3", precision=1e-9, say=said.append, **options)
    assert said[0].endswith("out of reach")
    assert all_there_is.systematic.tokens == sum(len(rollout.completion_ids) for rollout in rollouts)
    unknown = measured(model, f"rollouts:{file}", tokens=2000, replicates=12)
    assert "not known" in str(unknown.withheld)
    assert unknown.to_json()["unexplained"] is None
    # A single sample, but differences between schedules on its tokens are paired.
    above = {fit.candidate: fit.above_best for fit in unknown.systematic.fits}
    assert above["R3 S3 N3 carry=layer"].value <= 3 * above["R3 S3 N3 carry=layer"].stderr
    assert above["R1 S1 N1"].value > 3 * above["R1 S1 N1"].stderr
    assert not any("qk" in candidate for candidate in above)
    write(1)
    shifted = measured(model, f"rollouts:{file}", to="R3 S3 N3")
    assert [finding.cause for finding in shifted.findings] == ["shifted"]
    assert shifted.systematic.attribution is None
    assert "shifted" in str(shifted.withheld)


def test_recorded_advantages_give_the_gradient_bias(model: Path, tmp_path: Path) -> None:
    with open_stack("emulated:R3 S3 N3", model) as engine:
        rollouts = engine.sample([[3 + i, 4, 5] for i in range(16)], max_tokens=24, seed=0)
    advantages = [0.5 - i % 2 for i in range(16)]
    file = tmp_path / "run.jsonl"

    def write(factor: float) -> None:
        rows = [
            {"prompt_ids": r.prompt_ids, "completion_ids": r.completion_ids, "logprobs": r.logprobs, "advantage": factor * a}
            for r, a in zip(rollouts, advantages, strict=True)
        ]
        file.write_text("\n".join(map(json.dumps, rows)))

    write(1.0)
    result = measured(model, f"rollouts:{file}", to="R3 S3 N3", gradient=True, replicates=3)
    found = result.to_report()["gradient_bias"]
    json.dumps(found, allow_nan=False)
    assert found["tokens"] == sum(len(rollout.completion_ids) for rollout in rollouts)
    with untied(model) as directory, open_stack("emulated:R3 S3 N3", directory) as same:
        assert isinstance(same, HFStack)
        dithering = Dithering(read_weights(directory), rollouts)
        recorded = Replicates(np.concatenate([r.logprobs or () for r in rollouts])[None], dithering.lengths)
        expected = gradient_bias(same, recorded, dithering, advantages, seeds(0, "gradient bias", 4))
    assert found["aligned"]["total"] == {name: vars(expected.total)[name] for name in found["aligned"]["total"]}
    assert len(found["aligned"]["by_position"]) == len(expected.by_position)
    assert result.gradient_bias is not None
    assert found["lowered"]["square"] == result.gradient_bias.unaligned.total.square - expected.total.square
    assert found["lowered"]["stderr"] > 0
    assert found["unaligned"]["total"] != found["aligned"]["total"]
    table = shown(result, detailed=True)
    for label, bias in (
        ("trainer as it is", found["unaligned"]["total"]),
        ("trainer, aligned", found["aligned"]["total"]),
        ("tokens 0 to 6", found["aligned"]["by_position"][0]),
    ):
        assert re.search(rf"{label} +{bias['one_step']:.2g} +{bias['systematic']:.2g} ", table)
    assert measured(model, f"rollouts:{file}", quick=True, gradient=True).gradient_bias is None
    write(0.0)
    assert measured(model, f"rollouts:{file}", replicates=3, gradient=True).gradient_bias is None


def test_what_equal_schedules_leave_is_unexplained(model: Path) -> None:
    result = measured(model, "emulated:R1 S1 N1", to="R1 S1 N1")
    out = result.to_json()
    assert out["attribution"] == []
    assert out["unexplained"] == {name: out["systematic"][name] for name in ("variance", "stderr")}
    assert "left: no operation explains it" in shown(result)
    assert "removed by alignment" not in shown(result)


@pytest.mark.parametrize("to", [None, "R3 S3 N3"])
def test_a_model_that_no_schedule_can_be_given_is_refused_at_once(tmp_path: Path, to: str | None) -> None:
    AutoConfig.for_model("phi3").save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")  # no weights, so that nothing can have been measured
    with pytest.raises(UsageError, match="phi3"):
        measured(tmp_path, "emulated:R3 S3 N3", to=to)


@pytest.mark.parametrize("kind", ["t5", "clip"])
def test_a_model_that_predicts_no_next_token_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=f"no causal language model of type {kind}") as caught:
        measured(tmp_path, "emulated:R3 S3 N3")
    assert "\n" not in str(caught.value)


def test_a_trainer_that_cannot_be_aligned_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="cannot be aligned"):
        measured(model, "hf", trainer="vllm")
