"""A canary put together: which questions it asks where, and the checkpoint that asks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tripoint.canary.circuit import Circuit
from tripoint.canary.controls import controls
from tripoint.canary.questions import Prompt, Question, carry, norm, swiglu
from tripoint.canary.rope import rope
from tripoint.canary.shape import CanaryShape

MOST_PROMPTS = 256


@dataclass(frozen=True)
class Canary:
    """A checkpoint with its questions. `answers` maps the token ids of the three answers to -1, 0 and 1."""

    shape: CanaryShape
    seed: int
    questions: tuple[Question, ...]
    circuit: Circuit

    @property
    def config(self) -> dict[str, Any]:
        return self.shape.config

    @property
    def answers(self) -> dict[int, int]:
        return self.circuit.answers

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        """All prompts, in the order of the questions: the token greedily sampled after `tokens` is the answer."""
        return tuple(prompt for question in self.questions for prompt in question.prompts)

    @cached_property
    def decode_prompts(self) -> tuple[Prompt, ...]:
        """Those that can be asked with the last token generated: the second token after `decode` is the answer."""
        return tuple(prompt for prompt in self.prompts if prompt.decode is not None)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by its checkpoint name, in BF16, made one at a time."""
        return self.circuit.tensors()

    def words(self, tokens: tuple[int, ...]) -> str:
        """A prompt as text that the canary's tokenizer turns into these ids."""
        return " ".join(self.circuit.words[token] for token in tokens)

    def save(self, directory: Path) -> None:
        """Write config.json, model.safetensors and the tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config, indent=2))
        save_file(dict(self.tensors()), directory / "model.safetensors", metadata={"format": "pt"})
        self._save_tokenizer(directory)

    def _save_tokenizer(self, directory: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = {self.circuit.words.get(i, f"unused{i}"): i for i in range(self.shape.vocab)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token=self.circuit.words[self.circuit.pad]))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)  # type: ignore[no-untyped-call]


def build(shape: CanaryShape = CanaryShape(), seed: int = 0) -> Canary:  # noqa: B008 (immutable)
    """The canary of this shape; the same shape and seed give the same checkpoint.

    Raises UsageError for a shape without room for the questions.
    """
    circuit = Circuit(shape)
    rng = np.random.default_rng(seed)
    questions = [*controls(circuit, rng), *rope(circuit, rng)]
    probed = _probed_layers(shape)
    for layer in probed:
        questions.append(swiglu(circuit, rng, layer))
        questions.append(norm(circuit, rng, "input", layer))
        questions.append(norm(circuit, rng, "post_attention", layer))
    questions.append(norm(circuit, rng, "final", shape.layers - 1))
    # Carry takes what is left: six prompts tell one add's roundings apart three times, and one whether it rounds at all.
    left = MOST_PROMPTS - sum(len(question.prompts) for question in questions)
    adds = min(2 * shape.layers - 1, left)
    for add in range(adds):
        ends = add // 2 in (0, shape.layers - 1)
        questions.append(carry(circuit, rng, add, times=min(left // (2 * adds), 3), in_decode=ends))
    return Canary(shape, seed, tuple(questions), circuit)


def _probed_layers(shape: CanaryShape) -> list[int]:
    """The layers in which SwiGLU and the norms are asked: the first, the last, and where there is room the middle one."""
    last = shape.layers - 1
    roomy = shape.hidden >= 128 and shape.layers <= 12
    return sorted({0, last // 2, last} if roomy else {0, last})
