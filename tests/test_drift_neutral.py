"""Neutral tokens: equal lengths, the wanted number, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny import VOCABULARY, tiny
from tripoint.drift.neutral import MIN_SEQUENCES, most_neutral, neutral_rollouts
from tripoint.drift.prompts import prompt_ids
from tripoint.errors import UsageError
from tripoint.models import resolve_model


@pytest.mark.parametrize("tokens", [300, 2000, 5000])
def test_the_built_in_text_gives_sequences_of_one_length(tokens: int) -> None:
    model = resolve_model(None)
    rollouts, source = neutral_rollouts(model, 49152, tokens)
    lengths = {len(rollout.completion_ids) for rollout in rollouts}
    assert len(lengths) == 1
    assert len(rollouts) >= MIN_SEQUENCES
    assert tokens <= len(rollouts) * lengths.pop() < tokens + len(rollouts)
    assert all(len(rollout.prompt_ids) == 1 and rollout.logprobs is None for rollout in rollouts)
    assert "text" in source
    assert neutral_rollouts(model, 49152, tokens)[0] == rollouts


def test_more_than_the_text_has_is_refused() -> None:
    model = resolve_model(None)
    most = most_neutral(model)
    rollouts, _ = neutral_rollouts(model, 49152, most)
    assert sum(len(rollout.completion_ids) for rollout in rollouts) == most
    for more in (most + 1, 50000):
        with pytest.raises(UsageError, match="ask for fewer"):
            neutral_rollouts(model, 49152, more)


@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1", "{", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    for read in (lambda: neutral_rollouts(tmp_path, VOCABULARY, 800), lambda: prompt_ids(tmp_path, VOCABULARY)):
        with pytest.raises(UsageError, match=f"`{tmp_path}`: transformers cannot read its tokenizer") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_checkpoint_without_a_tokenizer_gets_random_tokens(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    rollouts, source = neutral_rollouts(tmp_path, VOCABULARY, 800)
    assert "random" in source
    assert all(0 <= token < VOCABULARY for rollout in rollouts for token in rollout.completion_ids)
    assert len({rollout.completion_ids for rollout in rollouts}) == len(rollouts)
