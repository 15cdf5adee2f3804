"""The prompts that the engine completes where the user brings no rollouts: a small built-in set, as the model's token ids."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tripoint.models import read_tokenizer

RANDOM_PROMPTS = 32
RANDOM_LENGTHS = (16, 49)


def built_in_prompts() -> list[str]:
    """The texts of prompts.toml."""
    data = tomllib.loads(files("tripoint.drift").joinpath("prompts.toml").read_text(encoding="utf-8"))
    return list(data["prompts"])


def prompt_ids(model: Path, vocab_size: int) -> tuple[list[list[int]], str]:
    """The built-in prompts in the tokens of the checkpoint in directory `model`, and in words what they are.

    They go through the tokenizer's chat template where it has one. A checkpoint without a tokenizer gets random token ids
    below `vocab_size`, the same every time. Raises UsageError for a tokenizer that cannot be read.
    """
    tokenizer = read_tokenizer(model)
    if tokenizer is None:
        rng = np.random.default_rng(0)
        lengths = rng.integers(*RANDOM_LENGTHS, size=RANDOM_PROMPTS)
        return [rng.integers(vocab_size, size=n).tolist() for n in lengths], "random token ids (the model has no tokenizer)"

    texts = built_in_prompts()
    if tokenizer.chat_template is None:
        return [list(ids) for ids in tokenizer(texts)["input_ids"]], "built-in prompts, as plain text"
    chats = [[{"role": "user", "content": text}] for text in texts]
    encoded: Any = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    return [list(ids) for ids in encoded["input_ids"]], "built-in prompts, through the chat template"
