"""The last lines of a report follow the numbers and their errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tripoint.drift.estimate import Estimate
from tripoint.drift.findings import Finding
from tripoint.drift.systematic import Controls
from tripoint.drift.verdict import headline


def estimate(value: float, stderr: float = 1e-5) -> Estimate:
    return Estimate(value, stderr, 20, value - 2 * stderr, value + 2 * stderr)


FINE = Controls(estimate(0.0), estimate(1e-3))


def result(
    total: float, left: float | None, *, controls: Controls = FINE, findings: tuple[Finding, ...] = (), **systematic: Any
) -> Any:
    aligned = None if left is None else estimate(left)
    found = {
        "controls": controls,
        "total": estimate(total),
        "aligned": aligned,
        "removed": None if left is None else estimate(total - left),
        "attribution": None,
        "ranged": None,
        "bound_only": False,
        "noise_rms": {"trainer": 0.05, "engine": 0.04},
        "replicates": 4,
        "tokens": 2000,
    }
    target = SimpleNamespace(alignment=SimpleNamespace(target=SimpleNamespace(name="R3 S3 N3")))
    return SimpleNamespace(
        systematic=SimpleNamespace(**found | systematic), findings=findings, aligned=None if left is None else target
    )


SITE = SimpleNamespace(op="norm", before="N1", after="N3", shapley=estimate(3e-4), share=Estimate(0.8, 0.1, 20, 0.6, 1.0))


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (result(4e-4, 1e-6), "0.02 nats rms (95 %: 0.019 to 0.02) do not average out: 9% of the variance"),
        (result(4e-4, 1e-6), "Align the trainer to R3 S3 N3: then none is told from zero (below 0.0046 nats rms)"),
        (result(4e-4, 1e-4), "removes 75% of the systematic variance; 0.01 nats rms remain"),
        (result(4e-4, 9e-4), "it is larger: the engine does not round like that; ask it (fingerprint)"),
        (result(4e-4, 4e-4), "does not measurably change it: look at attention, GEMMs and the lm_head"),
        (result(4e-4, None), "Give --to"),
        (result(4e-4, 4e-4, removed=None), "rounds where the engine does, so that it is none of the three operations"),
        (result(2e-5, 1e-6), "No systematic drift is told from zero: it is below 0.0063 nats rms"),
        (result(2e-5, 1e-6), "For 50% of the error: --tokens"),
        (result(2e-5, 1e-6, removed=estimate(1e-4)), "Alignment to R3 S3 N3 all the same removes 0.0001"),
        (
            result(4e-4, 1e-6, attribution=SimpleNamespace(sites=(SITE,))),
            "The largest part of what alignment removes is due to norm (N1 against N3, 80% ± 10%)",
        ),
        (
            result(4e-4, 1e-6, ranged=SimpleNamespace(disagree=True, permutation=estimate(9e-4))),
            "Permutations in place of dithers give 0.03 nats: take the two as a range",
        ),
        (result(4e-4, 1e-6, controls=Controls(estimate(5e-5), estimate(1e-3))), "its dithers are not exchangeable"),
        (result(4e-4, 1e-6, controls=Controls(estimate(0.0), estimate(1e-5))), "the measurement is too coarse"),
        (
            result(4e-4, 1e-4, bound_only=True),
            "known only to be below 0.02 nats rms. Aligned to R3 S3 N3 the trainer is nearer",
        ),
        (result(4e-4, 9e-4, bound_only=True), "the trainer is farther from it"),
        (result(4e-4, 4e-4, bound_only=True), "Whether the trainer is nearer to it aligned to R3 S3 N3 is not told"),
        (result(4e-4, None, bound_only=True), "Give --to to compare schedules"),
        (
            result(4e-4, 1e-6, findings=(Finding("bos", "evidence", 0.3, "drop the engine's BOS token"),)),
            "First of all drop the engine's BOS token (bos, 0.3 nats); what rounding does can be judged after that.",
        ),
    ],
)
def test_the_last_line_follows_the_numbers(measured: Any, words: str) -> None:
    assert words in headline(measured)


def test_a_failed_control_leaves_nothing_else_said() -> None:
    said = headline(result(4e-4, 1e-6, controls=Controls(estimate(5e-5), estimate(1e-3))))
    assert said.startswith("This measurement does not say anything yet")
    assert "Align" not in said
