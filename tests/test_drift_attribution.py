"""Shares add up, additive parts have no interaction, and a trainer's drift is put down to the operation that differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import VOCABULARY, counted, tiny
from tripoint.drift.attribution import (
    Moved,
    attribute,
    attribute_fields,
    code,
    differing,
    field_moves,
    local_errors,
    name,
    shapley,
    subsets,
)
from tripoint.drift.dither import Dithering, Replicates, read_weights
from tripoint.drift.systematic import SystematicDrift, measure_systematic
from tripoint.schedule import RoundingSchedule
from tripoint.stacks import Rollout, open_stack
from tripoint.stacks.hf import HFStack

TRAINER, ENGINE = RoundingSchedule.parse("R1 S1 N1"), RoundingSchedule.parse("R3 S3 N3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    tiny("llama", tie_word_embeddings=False, max_position_embeddings=64).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return random_rollouts(32)


def random_rollouts(sequences: int) -> list[Rollout]:
    ids = np.random.default_rng(0).integers(VOCABULARY, size=(sequences, 25)).tolist()
    return [Rollout((row[0],), tuple(row[1:])) for row in ids]


def measured(
    model: Path, rollouts: list[Rollout], engine: str, assumed: RoundingSchedule, replicates: int = 12, fields: bool = False
) -> SystematicDrift:
    dithering = Dithering(read_weights(model), rollouts)
    trainer = open_stack("hf", model)
    assert isinstance(trainer, HFStack)
    with open_stack(f"emulated:{engine}", model) as running:
        return measure_systematic(
            running, trainer, dithering, (TRAINER, assumed), full=True, fields=fields, replicates=replicates
        )


def test_combinations_are_of_the_operations_that_differ() -> None:
    assert differing(TRAINER, ENGINE) == ("rope", "swiglu", "norm")
    assert differing(TRAINER, RoundingSchedule.parse("R1 S3 N1")) == ("swiglu",)
    assert [name(moved) for moved in subsets(("rope", "norm"))] == ["nothing", "rope", "norm", "rope+norm"]
    assert len(subsets(("rope", "swiglu", "norm"))) == 8


def test_shapley_values_add_up_and_are_plain_for_additive_parts() -> None:
    whole: Moved = ("rope", "swiglu", "norm")
    part = {"rope": 1.0, "swiglu": 2.0, "norm": 4.0}
    additive = {name(moved): 10 - sum(part[op] for op in moved) for moved in subsets(whole)}
    anything = dict(zip(additive, np.random.default_rng(0).normal(size=8), strict=True))
    total = 0.0
    for op in whole:
        assert sum(additive[combination] * c for combination, c in shapley(whole, op).items()) == pytest.approx(part[op])
        total += sum(anything[combination] * c for combination, c in shapley(whole, op).items())
    assert total == pytest.approx(anything["nothing"] - anything["rope+swiglu+norm"])


def test_known_parts_are_found_with_their_interaction() -> None:
    rng = np.random.default_rng(0)
    rope, norm = (size * rng.normal(size=400) for size in (0.02, 0.04))
    lengths = (20,) * 20

    def stack(mean: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Replicates:
        return Replicates(mean + 0.01 * rng.normal(size=(16, 400)), lengths)

    trainers: dict[Moved, Replicates] = {
        (): stack(rope + norm),
        ("rope",): stack(norm),
        ("norm",): stack(rope),
        ("rope", "norm"): stack(np.zeros(400)),
    }
    schedules = TRAINER, RoundingSchedule.parse("R3 S1 N3")
    found = attribute(stack(np.zeros(400)), trainers, schedules, np.ones(400, bool))
    sites = {site.op: site for site in found.sites}
    overlap = 2 * float((rope * norm).mean())
    for op, own in (("rope", rope), ("norm", norm)):
        alone = float((own**2).mean())
        assert (sites[op].before, sites[op].after) == (code(TRAINER, op), code(schedules[1], op))
        for estimate, expected in (
            (sites[op].moved_alone, alone + overlap),
            (sites[op].moved_away, alone),
            (sites[op].shapley, alone + overlap / 2),
        ):
            assert estimate.value == pytest.approx(expected, abs=3 * estimate.stderr)
            assert estimate.stderr < 0.3 * alone
    assert found.interaction.value == pytest.approx(-overlap, abs=3 * found.interaction.stderr)
    assert found.unexplained.value == pytest.approx(0, abs=3 * found.unexplained.stderr)
    assert sum(site.share.value for site in found.sites) == pytest.approx(1)
    for bins in (found.by_position, found.by_probability):
        assert sum(b.tokens for b in bins) == 400


def test_alignment_explains_all_of_an_emulated_engine(model: Path, rollouts: list[Rollout]) -> None:
    result = measured(model, rollouts, "R3 S3 N3", ENGINE)
    assert result.total.value > 5 * result.total.stderr
    assert result.aligned is not None
    assert abs(result.aligned.value) < 3 * result.aligned.stderr
    assert result.controls.problem is None
    assert result.attribution is not None
    assert sum(site.shapley.value for site in result.attribution.sites) == pytest.approx(
        result.total.value - result.aligned.value
    )
    assert result.ranged is not None
    assert result.ranged.left is not None
    assert abs(result.ranged.left.value) < 3 * result.ranged.left.stderr < result.ranged.permutation.value
    # 2 K of the trainer, K each of the odd schedule, of seven moves, and permuted as it is and aligned.
    assert result.passes == {"engine": 24, "trainer": 12 * (2 + 1 + 7 + 2)}


def test_an_operation_that_does_not_differ_gets_nothing(model: Path) -> None:
    # The engine differs in the norms only, but is thought to differ in all three.
    result = measured(model, random_rollouts(64), "R1 S1 N3", ENGINE, replicates=20)
    assert result.attribution is not None
    sites = {site.op: site for site in result.attribution.sites}
    assert sites["norm"].moved_alone.value > 3 * sites["norm"].moved_alone.stderr
    # Moving rope moves away from the engine.
    assert sites["rope"].moved_alone.value < -2 * sites["rope"].moved_alone.stderr
    assert result.attribution.unexplained.value > 3 * result.attribution.unexplained.stderr


def test_equal_stacks_give_no_drift_and_nothing_to_attribute(model: Path, rollouts: list[Rollout]) -> None:
    result = measured(model, rollouts, "R1 S1 N1", TRAINER)
    assert abs(result.total.value) < 3 * result.total.stderr
    assert result.attribution is None
    assert result.removed is None
    assert result.aligned == result.total
    assert result.controls.positive.value > 3 * result.controls.positive.stderr


def test_the_trainer_ends_as_it_was(model: Path, rollouts: list[Rollout]) -> None:
    dithering = Dithering(read_weights(model), rollouts)
    trainer = open_stack("hf", model)
    assert isinstance(trainer, HFStack)
    before = trainer.score(rollouts)
    recorded = Replicates(np.concatenate(before)[None], dithering.lengths)
    result = measure_systematic(recorded, trainer, dithering, (TRAINER, ENGINE), full=False, replicates=4)
    assert result.bound_only
    with counted() as calls:
        assert trainer.score(rollouts) == before
    assert not calls


def test_tokens_go_where_the_model_is() -> None:
    model = tiny("llama", tie_word_embeddings=False).to("meta")
    seen: list[str] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, given: seen.append(given[0].device.type))
    with pytest.raises(RuntimeError, match="meta"):  # where numbers have no values, so that it gets no further
        local_errors(model, torch.tensor([[5, 6, 7]]), TRAINER, ENGINE)
    assert seen == ["meta"]


def test_local_errors_grow_from_the_operation_that_moves(model: Path, rollouts: list[Rollout]) -> None:
    trainer = open_stack("hf", model)
    assert isinstance(trainer, HFStack)
    ids = torch.tensor([[*r.prompt_ids, *r.completion_ids] for r in rollouts[:4]])
    found = local_errors(trainer.model, ids, TRAINER, ENGINE)
    assert [(error.layer, error.op) for error in found] == [
        (layer, op) for layer in range(3) for op in ("rope", "swiglu", "norm", None)
    ]
    assert all(0 < error.changed < 1 and error.ulps >= 1 and 0 < error.relative < 0.05 for error in found)
    same = local_errors(trainer.model, ids, TRAINER, TRAINER)
    assert all(error.changed == 0 and error.relative == 0 for error in same)
    assert not any("forward" in vars(module) for module in trainer.model.modules())


def test_fields_move_one_at_a_time_where_they_can() -> None:
    moves = field_moves(TRAINER, RoundingSchedule.parse("R4 S3 N3 carry=layer"))
    assert str(moves["swiglu.silu_round"]) == "R1 S3 N1"
    assert str(moves["norm.final.norm_round"]) == "R1 S1 N1 N.final=N2"
    # A table in FP32 under BF16 products, and a residual carried past a norm that rounds it.
    assert {"rope.table", "carry"}.isdisjoint(moves)


def test_known_parts_of_fields_are_found() -> None:
    rng = np.random.default_rng(0)
    compute, silu = (size * rng.normal(size=400) for size in (0.02, 0.04))

    def stack(mean: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Replicates:
        return Replicates(mean + 0.01 * rng.normal(size=(16, 400)), (20,) * 20)

    schedules = TRAINER, RoundingSchedule.parse("R4 S3 N1")
    moved = {"rope.compute": stack(silu), "swiglu.silu_round": stack(compute)}
    found = attribute_fields(stack(np.zeros(400)), stack(compute + silu), moved, schedules, np.ones(400, bool))
    assert [(part.field, part.op, part.before, part.after) for part in found] == [
        ("rope.table", "rope", "bf16", "fp32"),
        ("rope.compute", "rope", "bf16", "fp32"),
        ("swiglu.silu_round", "swiglu", "true", "false"),
    ]
    assert found[0].moved_alone is None
    overlap = 2 * float((compute * silu).mean())
    for part, own in zip(found[1:], (compute, silu), strict=True):
        assert part.moved_alone is not None
        assert part.moved_alone.value == pytest.approx(float((own**2).mean()) + overlap, abs=3 * part.moved_alone.stderr)
        assert part.moved_alone.value > 5 * part.moved_alone.stderr


def test_fields_are_measured_where_asked(model: Path, rollouts: list[Rollout]) -> None:
    assumed = RoundingSchedule.parse("R4 S3 N1")
    result = measured(model, rollouts[:8], "R4 S3 N1", assumed, replicates=4, fields=True)
    assert result.attribution is not None
    assert result.fields is not None
    alone = {part.field: part.moved_alone for part in result.fields}
    assert list(alone) == ["rope.table", "rope.compute", "swiglu.silu_round"]
    assert alone["rope.table"] is None
    assert alone["rope.compute"] is not None
    # The only field of its operation: the same passes, so that the two rows agree.
    assert alone["swiglu.silu_round"] == result.attribution.sites[1].moved_alone
    # As without fields, and rope.compute: 2 K of the trainer, K each of the odd schedule, of three moves, two permuted, and it.
    assert result.passes["trainer"] == 4 * (2 + 1 + 3 + 2 + 1)
