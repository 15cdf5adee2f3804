"""Of recorded rollouts a bounded number of tokens is measured, from all over the file, and those of one prompt count as one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tiny import tiny
from tripoint.drift import result as result_module
from tripoint.drift.dither import Dithering, Replicates
from tripoint.drift.expectation import NoiseOnly, noise_only
from tripoint.drift.groups import group_numbers, group_sums, spread
from tripoint.drift.result import measure_drift
from tripoint.errors import MeasurementError
from tripoint.stacks import Rollout, open_stack


def rollout(prompt: int, number: int, length: int) -> Rollout:
    """Token ids say where in the completion they are."""
    values = tuple(-0.1 * (i + 1) for i in range(length))
    return Rollout((prompt, number), tuple(range(length)), values, values, group=(prompt,))


def tokens(rollouts: list[Rollout]) -> int:
    return sum(len(r.completion_ids) for r in rollouts)


def test_all_are_taken_where_there_are_few() -> None:
    rollouts = [rollout(i, 0, 50) for i in range(20)]
    assert spread(rollouts, 1000, 0) == rollouts


def test_tokens_are_from_all_over_the_file_and_another_seed_takes_others() -> None:
    rollouts = [rollout(i, 0, 20) for i in range(1000)]
    chosen = spread(rollouts, 2000, 0)
    assert tokens(chosen) == 2000
    prompts = [r.prompt_ids[0] for r in chosen]
    assert prompts == sorted(prompts)
    assert [sum(low <= p < low + 250 for p in prompts) for low in (0, 250, 500, 750)] == pytest.approx([25] * 4, abs=12)
    assert spread(rollouts, 2000, 0) == chosen
    assert spread(rollouts, 2000, 1) != chosen


def test_long_completions_lose_their_ends() -> None:
    chosen = spread([rollout(i, 0, 8000) for i in range(64)], 4096, 0)
    assert tokens(chosen) == 4096
    assert len(chosen) == 16
    for r in chosen:
        assert r.completion_ids == tuple(range(256))
        assert r.logprobs == r.advantages == tuple(-0.1 * (i + 1) for i in range(256))
    few = spread([rollout(i, 0, 8000) for i in range(8)], 4096, 0)
    assert [len(r.completion_ids) for r in few] == [512] * 8


def test_no_prompt_comes_twice_before_all_have_come() -> None:
    rollouts = [rollout(prompt, number, 10) for prompt in range(40) for number in range(8)]
    for count in (30, 40, 60):
        seen = [r.prompt_ids[0] for r in spread(rollouts, 10 * count, 0)]
        assert len(set(seen)) == min(count, 40)


def test_rollouts_without_a_group_are_their_own() -> None:
    alone = Rollout((1,), (2,))
    assert group_numbers([alone, rollout(7, 0, 2), alone, rollout(8, 0, 2), rollout(7, 1, 2)]) == (0, 1, 2, 3, 1)


def test_sums_by_group_need_no_order() -> None:
    values = np.arange(12.0).reshape(2, 6)
    sums = group_sums(values, np.array([3, 0, 3, 0, 5, 0]))
    assert sums.tolist() == [[1 + 3 + 5, 0 + 2, 4], [7 + 9 + 11, 6 + 8, 10]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    tiny("llama", tie_word_embeddings=False, max_position_embeddings=128).save_pretrained(directory)
    return directory


def recorded(model: Path, path: Path, prompts: int) -> Path:
    """Four completions of each prompt, the first token of which an environment puts in."""
    with open_stack("emulated:R3 S3 N3", model) as engine:
        rollouts = engine.sample([[3 + i % prompts, 4, 5] for i in range(4 * prompts)], max_tokens=40, seed=0)
    rows = [
        {
            "prompt_ids": r.prompt_ids,
            "completion_ids": r.completion_ids,
            "logprobs": r.logprobs,
            "tool_mask": [i != len(r.completion_ids) // 2 for i in range(len(r.completion_ids))],
        }
        for r in rollouts
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_large_file_is_not_scored_whole(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is asked for."""
    monkeypatch.setattr(result_module, "SEARCHED_TOKENS", 600)
    monkeypatch.setattr(result_module, "NEUTRAL_TOKENS", 400)
    scored: list[int] = []
    once = Dithering._once

    def counted(self: Dithering, *arguments: object) -> object:
        scored.append(sum(self.lengths))
        return once(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Dithering, "_once", counted)
    engine = f"rollouts:{recorded(model, tmp_path / 'run.jsonl', 12)}"
    plain = measure_drift(str(model), engine, to="R3 S3 N3", replicates=4)
    assert (plain.mismatch.tokens, plain.systematic.tokens, set(scored)) == (600, 400, {600, 400})
    scored.clear()
    asked = measure_drift(str(model), engine, to="R3 S3 N3", replicates=4, tokens=1000)
    assert (asked.mismatch.tokens, asked.systematic.tokens, set(scored)) == (1000, 1000, {600, 1000})


def test_stretches_and_completions_of_few_prompts_are_refused(model: Path, tmp_path: Path) -> None:
    engine = f"rollouts:{recorded(model, tmp_path / 'run.jsonl', 7)}"
    with pytest.raises(MeasurementError, match=r"tokens in \d\d sequences of 7 prompts are too few"):
        measure_drift(str(model), engine, quick=True, replicates=4)


def test_noise_without_a_target_is_not_compared_with_itself(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[tuple[Replicates, Replicates]] = []

    def watched(trainer: Replicates, engine: Replicates) -> NoiseOnly:
        pairs.append((trainer, engine))
        return noise_only(trainer, engine)

    monkeypatch.setattr(result_module, "noise_only", watched)
    engine = f"rollouts:{recorded(model, tmp_path / 'run.jsonl', 12)}"
    measure_drift(str(model), engine, quick=True, replicates=4, tokens=600)
    ((left, right),) = pairs
    assert not any(np.array_equal(a, b) for a in left.values for b in right.values)
