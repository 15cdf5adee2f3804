"""Recorded rollouts: what each layout means, and one clear line for each way a file can be wrong."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tripoint.errors import UsageError
from tripoint.stacks import Rollout
from tripoint.stacks.rollouts import read_rollouts

VOCABULARY = 100
ROWS = [
    {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "logprobs": [-0.5, -1.25, 0.0], "reward": 1.0},
    {"prompt_ids": [5], "completion_ids": [99], "logprobs": [-3.0], "reward": 0.0},
]


def rollout(
    prompt: tuple[int, ...], completion: tuple[int, ...], logprobs: tuple[float, ...], of: int | None = None
) -> Rollout:
    """`of`: how many tokens of `prompt` the row began with."""
    return Rollout(prompt, completion, logprobs, group=prompt[:of])


ROLLOUTS = [rollout((5, 6), (7, 8, 9), (-0.5, -1.25, 0.0)), rollout((5,), (99,), (-3.0,))]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def in_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


WRITERS = pytest.mark.parametrize("write", [jsonl, in_parquet])


def read(path: Path) -> list[Rollout]:
    return list(read_rollouts(path, VOCABULARY))


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@WRITERS
def test_own_layout_with_other_columns(tmp_path: Path, write: Any) -> None:
    assert read(write(tmp_path / "run", ROWS)) == ROLLOUTS


@WRITERS
def test_trl_batch_drops_padding(tmp_path: Path, write: Any) -> None:
    rows = [
        {
            "prompt_ids": [0, 5, 6],
            "prompt_mask": [0, 1, 1],
            "completion_ids": [7, 8, 0],
            "completion_mask": [1, 1, 0],
            "sampling_per_token_logps": [-0.5, -1.0, 0.0],
        }
    ]
    assert read(write(tmp_path / "run", rows)) == [rollout((5, 6), (7, 8), (-0.5, -1.0))]


@WRITERS
def test_verl_batch_drops_padding_and_splits_at_tool_tokens(tmp_path: Path, write: Any) -> None:
    rows = [
        {
            "prompts": [0, 5, 6],
            "responses": [7, 8, 30, 31, 9, 0],
            "attention_mask": [0, 1, 1, 1, 1, 1, 1, 1, 0],
            "response_mask": [1, 1, 0, 0, 1, 0],
            "rollout_log_probs": [-0.5, -1.0, 0.0, 0.0, -2.0, 0.0],
        }
    ]
    assert read(write(tmp_path / "run", rows)) == [
        rollout((5, 6), (7, 8), (-0.5, -1.0)),
        rollout((5, 6, 7, 8, 30, 31), (9,), (-2.0,), of=2),
    ]


def test_verl_agent_loop(tmp_path: Path) -> None:
    row = {"prompt_ids": [5], "response_ids": [30, 7, 31], "response_mask": [0, 1, 0], "response_logprobs": [0.0, -0.5, 0.0]}
    assert read(jsonl(tmp_path / "run", [row])) == [rollout((5, 30), (7,), (-0.5,), of=1)]


def test_tool_mask_of_trl(tmp_path: Path) -> None:
    row = ROWS[0] | {"tool_mask": [1, 0, 1]}
    assert read(jsonl(tmp_path / "run", [row])) == [rollout((5, 6), (7,), (-0.5,)), rollout((5, 6, 7, 8), (9,), (0.0,), of=2)]


def test_completions_of_one_prompt_are_a_group(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [5 + i % 2], "completion_ids": [7], "logprobs": [-0.5]} for i in range(6)]
    assert [found.group for found in read(jsonl(tmp_path / "run", rows))] == [(5,), (6,)] * 3


def test_log_probabilities_that_are_all_zero_are_placeholders(tmp_path: Path) -> None:
    rows = [row | {"logprobs": [0.0] * len(row["completion_ids"])} for row in ROWS]  # type: ignore[arg-type]
    assert "the log-probabilities are all 0: the file holds placeholders" in refusal(jsonl(tmp_path / "run", rows))
    read(jsonl(tmp_path / "run", [*rows, ROWS[0]]))


def test_rows_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "run", [*ROWS, {"prompt_ids": []}])
    rollouts = read_rollouts(path, VOCABULARY)
    assert [next(rollouts), next(rollouts)] == ROLLOUTS
    with pytest.raises(UsageError, match="line 3"):
        next(rollouts)


@WRITERS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [float("nan")]}, "logprob nan is not the logarithm"),
        ({"logprobs": [0.25]}, "logprob 0.25 is not the logarithm of a probability"),
        ({"logprobs": [float("-inf")]}, "logprob -inf is not the logarithm"),
        ({"logprobs": [None]}, "logprob null is no number"),
        ({"logprobs": None}, "`logprobs` is null, not a list"),
        ({"logprobs": [-1.0, -1.0]}, "1 tokens in `completion_ids`, but 2 in `logprobs`"),
        ({"completion_ids": [100]}, "token id 100 is outside the model's vocabulary of 100"),
        ({"completion_ids": [-1]}, "token id -1 is outside"),
        ({"prompt_ids": [4, 100]}, "token id 100 is outside"),
        ({"prompt_ids": []}, "`prompt_ids` holds no token"),
        ({"completion_ids": [], "logprobs": []}, "`completion_ids` holds no token"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, write: Any, change: dict[str, Any], message: str) -> None:
    said = refusal(write(tmp_path / "run", [ROWS[0], ROWS[1] | change]))
    assert f"{tmp_path / 'run'}, {'line' if write is jsonl else 'row'} 2: " in said
    assert message in said


def test_parquet_values_that_json_does_not_know_are_named(tmp_path: Path) -> None:
    for change, message in (
        ({"logprobs": b"\x00\xff"}, r"""`logprobs` is "b'\\x00\\xff'", not a list"""),
        ({"logprobs": [Decimal("-1.5")]}, """logprob "Decimal('-1.5')" is no number"""),
        ({"logprobs": [-1.5], "advantage": Decimal("0.5")}, """advantage "Decimal('0.5')" is no finite number"""),
    ):
        row = {"prompt_ids": [5], "completion_ids": [7], **change}
        assert f"row 1: {message}" in refusal(in_parquet(tmp_path / "run", [row]))


def test_a_token_id_must_be_an_integer(tmp_path: Path) -> None:
    for token in (7.0, "7", True, [7]):
        assert "is no integer" in refusal(jsonl(tmp_path / "run", [ROWS[1] | {"completion_ids": [token]}]))


def test_a_row_without_a_column(tmp_path: Path) -> None:
    row = {"prompt_ids": [5], "completion_ids": [7]}
    assert "line 2: `logprobs` is missing" in refusal(jsonl(tmp_path / "run", [ROWS[0], row]))


def test_masks_must_fit(tmp_path: Path) -> None:
    row = {"prompts": [5], "responses": [7], "rollout_log_probs": [-1.0], "attention_mask": [1], "response_mask": [1]}
    assert "1 + 1 tokens, but 1 mask values in `attention_mask`" in refusal(jsonl(tmp_path / "run", [row]))
    row |= {"attention_mask": [1, 1], "response_mask": [1, 1]}
    assert "1 tokens in `responses`, but 2 in `response_mask`" in refusal(jsonl(tmp_path / "run", [row]))


def test_truncated_jsonl(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "run.jsonl", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    assert "line 2 is cut off" in refusal(path)
    path.write_text("{not json}\n" + json.dumps(ROWS[0]))
    assert "line 1 is not JSON" in refusal(path)
    path.write_text("[1, 2]\n")
    assert "line 1 is no JSON object" in refusal(path)


def test_a_last_line_without_newline_is_whole(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "run.jsonl", ROWS)
    path.write_bytes(path.read_bytes().rstrip())
    assert read(path) == ROLLOUTS


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.99])
def test_truncated_parquet(tmp_path: Path, kept: float) -> None:
    path = in_parquet(tmp_path / "run.parquet", ROWS * 300)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    assert "is cut off or damaged" in refusal(path)


def test_damaged_parquet(tmp_path: Path) -> None:
    path = in_parquet(tmp_path / "run.parquet", ROWS * 300)
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(200) + content[204:])
    assert "is cut off or damaged after row 0" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").write_bytes(content)
    assert "holds no rollouts" in refusal(tmp_path / "run")


def test_parquet_without_rows(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), tmp_path / "run")
    assert "holds no rollouts" in refusal(tmp_path / "run")


def test_missing_file(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "run")
    assert "Is a directory" in refusal(tmp_path)


@WRITERS
def test_completions_without_logprobs(tmp_path: Path, write: Any) -> None:
    rows = [{"prompt_ids": [5], "completion_ids": [7]}]
    said = refusal(write(tmp_path / "run", rows))
    assert "completions without logprobs" in said
    assert "`logprobs`" in said


@WRITERS
def test_text_only_dumps_say_what_is_missing(tmp_path: Path, write: Any) -> None:
    trl = refusal(write(tmp_path / "run", [{"step": 1, "prompt": "a", "completion": "b", "advantage": 0.5}]))
    assert "text only, as TRL's `log_completions=True` writes" in trl
    verl = refusal(write(tmp_path / "run", [{"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 1}]))
    assert "text only, as verl's `trainer.rollout_data_dir` writes" in verl
    assert "calculate_log_probs=True" in verl
    for said in (trl, verl):
        assert "token ids and logprobs are missing" in said


@WRITERS
def test_unknown_columns_are_listed_with_the_known(tmp_path: Path, write: Any) -> None:
    said = refusal(write(tmp_path / "run", [{"tokens": [5], "scores": [1.0]}]))
    assert "found `tokens`, `scores`" in said
    assert "`prompt_ids`, `completion_ids`, `logprobs`" in said
    assert "`prompts`, `responses`, `rollout_log_probs`, `attention_mask`" in said
