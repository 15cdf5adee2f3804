"""Tokens that no stack under comparison has chosen.

Tokens sampled from one of the stacks favour that stack's own upward noise (by about variance * (1 - p) a token), which would
read as a difference between the stacks. These come from a fixed text that ships with Tripoint.
"""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path

import numpy as np

from tripoint.errors import UsageError
from tripoint.models import read_tokenizer
from tripoint.stacks import Rollout

MIN_SEQUENCES = 16  # sequences, not tokens, are what an error can be estimated from
USUAL_LENGTH = 100
RANDOM_SEQUENCES = 256


def neutral_rollouts(model: Path, vocab_size: int, tokens: int) -> tuple[list[Rollout], str]:
    """About `tokens` tokens to score, in sequences of one length with a prompt of one token, and in words where they are from.

    A checkpoint without a tokenizer gets random token ids below `vocab_size`, the same every time. Raises UsageError for more
    tokens than the text has, and for a tokenizer that cannot be read.
    """
    texts = _passages(model)
    source = "the built-in text" if texts else "random token ids (the model has no tokenizer)"
    available = len(texts) or RANDOM_SEQUENCES
    count = min(max(math.ceil(tokens / min(USUAL_LENGTH, _shortest(texts))), MIN_SEQUENCES), available)
    length = -(-tokens // count)
    if not texts:
        rng = np.random.default_rng(0)
        texts = rng.integers(vocab_size, size=(count, length + 1)).tolist()
    chosen = texts[:count]
    if (most := _shortest(chosen)) < length:
        raise UsageError(f"the built-in text has about {most * available} tokens of this model, not {tokens}: ask for fewer")
    return [Rollout((ids[0],), tuple(ids[1 : length + 1])) for ids in chosen], source


def most_neutral(model: Path) -> int:
    """The most tokens that `neutral_rollouts` has for the checkpoint in directory `model`."""
    texts = _passages(model)
    return len(texts) * _shortest(texts) if texts else RANDOM_SEQUENCES * USUAL_LENGTH


def _shortest(texts: list[list[int]]) -> int:
    """How many tokens after the first each of `texts` has; as many as one likes where there are none."""
    return min(map(len, texts), default=USUAL_LENGTH + 1) - 1


def _passages(model: Path) -> list[list[int]]:
    """The passages of neutral.txt in the tokens of the checkpoint in directory `model`; none if it has no tokenizer."""
    tokenizer = read_tokenizer(model)
    if tokenizer is None:
        return []
    text = files("tripoint.drift").joinpath("neutral.txt").read_text(encoding="utf-8")
    return [list(ids) for ids in tokenizer(text.strip().split("\n%%\n"))["input_ids"]]
