"""Reads recorded rollouts (`rollouts:FILE`): prompt and completion token ids with the log-probabilities they were sampled at.

A file is JSONL or Parquet, one completion a row, in one of the layouts of `LAYOUTS`: our own (which is what a `rollout_func` of
TRL returns), TRL's GRPO batch, verl's agent loop and verl's batch. Padding is dropped by the attention masks. Tokens that no
policy sampled (tool output, by `tool_mask` or `response_mask`) stay in the context but are not scored: each stretch of sampled
tokens becomes a rollout of its own. All that begin with the same prompt are a group. Advantages are read where there are any: a
number for the row or one for each completion token. Other columns are ignored.

The log-probabilities are taken to be those of the raw distribution. TRL records them after temperature and top-p: they are raw
only where it sampled at temperature 1 with top-p 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripoint.errors import UsageError
from tripoint.stacks.base import Rollout


@dataclass(frozen=True)
class Layout:
    """The columns of one kind of file.

    `attended` are masks that are 0 at padding: one of the prompt and one of the completion, or one of both in a row. `sampled`
    is a mask that is 0 at completion tokens that were not sampled. A file may lack that and `advantages`.
    """

    writer: str
    prompt: str
    completion: str
    logprobs: str
    attended: tuple[str, ...] = ()
    sampled: str | None = None
    advantages: str = "advantages"

    def required(self) -> list[str]:
        return [self.prompt, self.completion, self.logprobs, *self.attended]


LAYOUTS = (
    Layout("TRL's rollout_func", "prompt_ids", "completion_ids", "logprobs", sampled="tool_mask", advantages="advantage"),
    Layout(
        "TRL's GRPO batch",
        "prompt_ids",
        "completion_ids",
        "sampling_per_token_logps",
        ("prompt_mask", "completion_mask"),
        "tool_mask",
    ),
    Layout("verl's agent loop", "prompt_ids", "response_ids", "response_logprobs", sampled="response_mask"),
    Layout("verl's batch", "prompts", "responses", "rollout_log_probs", ("attention_mask",), "response_mask"),
)

TEXT_ONLY = {
    ("prompt", "completion"): "as TRL's `log_completions=True` writes; no option of TRL writes token ids, so write what "
    "`rollout_func` returns",
    (
        "input",
        "output",
    ): "as verl's `trainer.rollout_data_dir` writes; set `actor_rollout_ref.rollout.calculate_log_probs=True` "
    "and write the batch itself",
}


def read_rollouts(path: Path, vocab_size: int) -> Iterator[Rollout]:
    """The rollouts recorded in `path`, read as they are asked for. Every one has log-probabilities.

    Raises UsageError, naming the file and the row, for a file that is missing, empty, cut off or of no known layout, and for a
    rollout without tokens, with token ids outside `vocab_size`, or with log-probabilities (or advantages, if the first row has
    any) that are missing or cannot be any; in the end also for log-probabilities that are all 0.
    """
    layout: Layout | None = None
    empty, placeholders, weighted = True, True, False
    for where, row in _rows(path):
        if layout is None:
            layout = _layout(row.keys(), path)
            weighted = layout.advantages in row
        try:
            for rollout in _rollouts(row, layout, vocab_size, weighted=weighted):
                empty = False
                placeholders &= not any(rollout.logprobs or ())
                yield rollout
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
    if empty:
        raise UsageError(f"{path} holds no rollouts: was anything sampled?")
    if placeholders:
        raise UsageError(
            f"{path}: the log-probabilities are all 0: the file holds placeholders, so record what the tokens were sampled at"
        )


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row as a dictionary, with the words that say where it is."""
    try:
        with path.open("rb") as file:
            parquet = file.read(4) == b"PAR1"
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    return _parquet_rows(path) if parquet else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:  # bad JSON or bad UTF-8
                if line.endswith(b"\n"):
                    raise UsageError(f"{where} is not JSON: expected one object a line, or a Parquet file") from error
                raise UsageError(f"{where} is cut off: delete it, or write the file again") from error
            if not isinstance(row, dict):
                raise UsageError(f"{where} is no JSON object: expected one with {_expected()}")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException, parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            required = {name for layout in LAYOUTS for name in layout.required()}
            optional = {name for layout in LAYOUTS for name in (layout.sampled, layout.advantages)}
            if not file.metadata.num_rows:
                return
            if not required.isdisjoint(columns):  # otherwise all, for the error message
                columns = [name for name in columns if name in required | optional]
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{path} is cut off or damaged after row {number}, write it again ({reason})") from error


def _layout(columns: Collection[str], path: Path) -> Layout:
    for layout in LAYOUTS:
        if set(layout.required()) <= set(columns):
            return layout
    for layout in LAYOUTS:
        if {layout.prompt, layout.completion, *layout.attended} <= set(columns):
            raise UsageError(
                f"{path} has completions without logprobs (columns: {', '.join(columns)}): "
                f"record what they were sampled at in `{layout.logprobs}`"
            )
    found = ", ".join(f"`{column}`" for column in columns)
    for text, hint in TEXT_ONLY.items():
        if set(text) <= set(columns):
            raise UsageError(
                f"{path} holds text only, {hint}: token ids and logprobs are missing (found {found}; expected {_expected()})"
            )
    raise UsageError(f"{path} has columns of no known layout: found {found}; expected {_expected()}")


def _expected() -> str:
    return ", or ".join(f"{', '.join(f'`{name}`' for name in layout.required())} ({layout.writer})" for layout in LAYOUTS)


def _rollouts(row: dict[str, Any], layout: Layout, vocab_size: int, *, weighted: bool) -> Iterator[Rollout]:
    """The stretches of sampled tokens in one row, `weighted` with their advantages. Raises ValueError, without saying where."""
    prompt, completion, logprobs = (_list(row, name) for name in (layout.prompt, layout.completion, layout.logprobs))
    if len(logprobs) != len(completion):
        raise ValueError(f"{len(completion)} tokens in `{layout.completion}`, but {len(logprobs)} in `{layout.logprobs}`")
    attended = [mask for name in layout.attended for mask in _list(row, name)] or [1] * (len(prompt) + len(completion))
    if len(attended) != len(prompt) + len(completion):
        masks = " and ".join(f"`{name}`" for name in layout.attended)
        raise ValueError(f"{len(prompt)} + {len(completion)} tokens, but {len(attended)} mask values in {masks}")
    sampled = _list(row, layout.sampled) if layout.sampled in row else [1] * len(completion)
    if len(sampled) != len(completion):
        raise ValueError(f"{len(completion)} tokens in `{layout.completion}`, but {len(sampled)} in `{layout.sampled}`")
    advantages = row.get(layout.advantages) if weighted else None
    if not isinstance(advantages, list):
        advantages = [advantages] * len(completion)
    if len(advantages) != len(completion):
        raise ValueError(f"{len(completion)} tokens in `{layout.completion}`, but {len(advantages)} in `{layout.advantages}`")

    context = [_token(token, vocab_size) for token, kept in zip(prompt, attended, strict=False) if kept]
    if not context or not completion:
        raise ValueError(f"`{layout.completion if context else layout.prompt}` holds no token")
    group = tuple(context)
    stretch: list[tuple[int, float, float | None]] = []

    def finished() -> Rollout:
        tokens, values, weights = zip(*stretch, strict=True)
        return Rollout(tuple(context), tokens, values, weights if weighted else None, group)

    for token, logprob, advantage, kept, drawn in zip(
        completion, logprobs, advantages, attended[len(prompt) :], sampled, strict=True
    ):
        if kept and drawn:
            stretch.append((_token(token, vocab_size), _logprob(logprob), _advantage(advantage) if weighted else None))
            continue
        if stretch:
            yield finished()
            context += [earlier for earlier, _, _ in stretch]
            stretch = []
        if kept:
            context.append(_token(token, vocab_size))
    if stretch:
        yield finished()


def _list(row: dict[str, Any], name: str) -> list[Any]:
    values = row.get(name)
    if not isinstance(values, list):
        raise ValueError(f"`{name}` is {_shown(values)[:40]}, not a list" if name in row else f"`{name}` is missing")
    return values


def _token(token: Any, vocab_size: int) -> int:
    if type(token) is not int:
        raise ValueError(f"token id {token!r} is no integer")
    if not 0 <= token < vocab_size:
        raise ValueError(f"token id {token} is outside the model's vocabulary of {vocab_size}: was it made with another model?")
    return token


def _logprob(logprob: Any) -> float:
    if type(logprob) not in (float, int):
        raise ValueError(f"logprob {_shown(logprob)} is no number: tokens without one cannot be compared")
    if not math.isfinite(logprob) or logprob > 0:
        raise ValueError(f"logprob {logprob} is not the logarithm of a probability above 0 (in nats)")
    return float(logprob)


def _advantage(advantage: Any) -> float:
    if type(advantage) not in (float, int) or not math.isfinite(advantage):
        raise ValueError(f"advantage {_shown(advantage)} is no finite number: give every row one, or none")
    return float(advantage)


def _shown(value: Any) -> str:
    """A value as JSON has it; Parquet holds kinds that JSON has not."""
    return json.dumps(value, default=repr)
