"""What a stack is: anything that maps token ids to log-probabilities with a checkpoint, behind one interface.

Rules every stack keeps, so that two of them can be compared token by token:

* Log-probabilities are natural logarithms (nats) of the raw model distribution: temperature 1, no top-p, top-k, penalty or
  logit bias, whatever temperature the tokens were sampled at. Sampling parameters are ours, never `generation_config`'s.
* A sequence stops at any of the checkpoint's end-of-sequence tokens (`end_tokens`), and the completion includes that token.
* Randomness belongs to the sequence, not to the batch: sequence i of a call draws from the seed `seed + i`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tripoint.errors import MeasurementError, UsageError

Progress = Callable[[int], None]
"""Told how many more sequences are finished, each time some are."""


@dataclass(frozen=True)
class Rollout:
    """One prompt with one sampled completion.

    `logprobs` holds the sampling stack's own log-probability (nats) of each completion token at the moment it was sampled,
    or is None where the tokens were not sampled but are only to be scored. `advantages` holds the advantage of each completion
    token, or is None where none are known. `group` is the prompt that a recorded row began with: completions of one prompt, and
    the stretches of one row, share it, and errors are not estimated from them as if they were independent. None: a group of
    its own.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None
    group: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.completion_ids:
            raise ValueError("a rollout needs at least one prompt token and one completion token")
        for what, values in (("logprobs", self.logprobs), ("advantages", self.advantages)):
            if values is not None and len(values) != len(self.completion_ids):
                raise ValueError(f"{len(self.completion_ids)} completion tokens, but {len(values)} {what}")


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is started. Trainer stacks have no such settings and ignore all but `dtype`.

    `max_model_len`: longest prompt + completion in tokens; None for the model's own limit, at most 4096.
    `max_num_seqs`: how many sequences run at a time. `tensor_parallel_size`: over how many devices the weights are split.
    `gpu_memory_utilization`: the engine's share of the GPU's memory (the rest is the trainer's); without effect on a CPU.
    `dtype`: what `vllm` and `emulated:TARGET` hold weights and compute in, bfloat16 or float16.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.45
    dtype: str = "bfloat16"


class Stack(ABC):
    """A checkpoint held by one way of running it. Use as a context manager, or call `close`."""

    name: str
    """As a user types it: `hf`, `vllm:eager`, ..."""
    vocab_size: int
    """Token ids are below this."""
    weights_complete: bool = True
    """False from the start of `load_weights` until it succeeds."""
    closed: bool = False
    """True once an engine has ended: nothing can be asked of it, and it holds no weights."""

    @abstractmethod
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        seed: int,
        temperature: float = 1.0,
        progress: Progress | None = None,
    ) -> list[Rollout]:
        """One completion of at most `max_tokens` tokens for each prompt (token ids), in the prompts' order.

        `temperature` (0 to 2) shapes what is sampled (0: the most likely token), not the log-probabilities, which are always
        those of the raw distribution. For several completions of a prompt, repeat the prompt.
        """

    @abstractmethod
    def score(self, rollouts: Sequence[Rollout], *, progress: Progress | None = None) -> list[list[float]]:
        """The log-probability (nats) of every completion token given all tokens before it, in the rollouts' order."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights of the running stack. Names and shapes are the checkpoint's; each tensor is cast (to nearest
        even) to the type the stack holds it in. A tied `lm_head.weight` may be left out.

        Raises MeasurementError if a weight is missing, unknown or of another shape. The stack then holds no usable weights and
        refuses to sample and score until a later call succeeds.
        """

    @abstractmethod
    def conditions(self) -> dict[str, Any]:
        """What its rounding may depend on: `layers`, `tp`, `batch`, `compile`, `device`, `dtype`, and so on. JSON values."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of the packages that computed, by package name."""

    def _check(self, sequences: Iterable[Sequence[int]]) -> None:
        """Raise unless the stack holds usable weights and every id is a token of the model."""
        if not self.weights_complete:
            raise MeasurementError(
                f"stack `{self.name}`: its last load_weights failed, so it holds no complete weights: load again"
            )
        for number, ids in enumerate(sequences):
            if bad := next((i for i in ids if not 0 <= i < self.vocab_size), None):
                raise UsageError(
                    f"sequence {number} holds token id {bad}, but `{self.name}` has a vocabulary of {self.vocab_size}: "
                    "was it made with another model?"
                )

    def close(self) -> None:  # noqa: B027 (most stacks hold nothing that outlives them)
        """Give up the model and its memory or process. Harmless when called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def vocab_size(model: Path) -> int:
    """How many tokens the checkpoint knows, by its config.json: token ids are below that."""
    size: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return size


def end_tokens(model: Path) -> tuple[int, ...]:
    """The token ids that end a sequence: `eos_token_id` of the checkpoint's config.json, and its tokenizer's, if it has one.

    Raises UsageError for a tokenizer whose files are damaged.
    """
    config = json.loads((model / "config.json").read_text())
    found = config.get("eos_token_id")
    ids = set(found if isinstance(found, list) else [] if found is None else [found])
    tokenizer_config = model / "tokenizer_config.json"
    tokenizer = model / "tokenizer.json"
    if tokenizer_config.exists() and tokenizer.exists():
        try:
            eos = json.loads(tokenizer_config.read_text()).get("eos_token")
            eos = eos["content"] if isinstance(eos, dict) else eos
            ids |= {token["id"] for token in json.loads(tokenizer.read_text())["added_tokens"] if token["content"] == eos}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{tokenizer} or {tokenizer_config.name} is damaged: fetch them again") from error
    return tuple(sorted(ids))
