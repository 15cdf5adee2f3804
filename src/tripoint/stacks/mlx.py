"""MLX, an engine for Apple silicon whose CPU build also runs on Linux: `mlx`, by mlx-lm's own models and KV cache.

Batching is the trainer's: only sequences of one length share a pass when scoring. When sampling, the
prompts of one length are prefilled and decoded together at temperature 0, and each for itself above.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tripoint.errors import MeasurementError, UsageError
from tripoint.stacks.base import Progress, Rollout, Stack, end_tokens, vocab_size
from tripoint.stacks.hf import equal_lengths

BATCH_TOKENS = 4096


class MlxStack(Stack):
    """A model of mlx-lm in BF16."""

    def __init__(self, model: Path) -> None:
        """Load the checkpoint in directory `model`. Raises UsageError if mlx-lm is missing or cannot load it."""
        if importlib.util.find_spec("mlx_lm") is None:
            raise UsageError("stack `mlx` is not installed here: `pip install 'tripoint[mlx]'`")
        import mlx.core as mx
        from mlx_lm.utils import load_model

        self.name = "mlx"
        self._mx = mx
        try:
            self.model, config = load_model(model, lazy=True)
        except (ValueError, FileNotFoundError, KeyError) as error:
            raise UsageError(f"mlx-lm cannot load the checkpoint in `{model}`: {str(error).splitlines()[0]}") from error
        self.model.set_dtype(mx.bfloat16)  # whatever the file holds, as `load_weights` does
        mx.eval(self.model.parameters())  # type: ignore[no-untyped-call]
        self.layers = config["num_hidden_layers"]
        self.vocab_size = vocab_size(model)
        self.end_tokens = frozenset(end_tokens(model))

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        seed: int,
        temperature: float = 1.0,
        progress: Progress | None = None,
    ) -> list[Rollout]:
        self._check(prompts)
        rollouts: dict[int, Rollout] = {}
        rows = 64 if temperature == 0 else 1
        for batch in equal_lengths([len(prompt) for prompt in prompts], lambda length: rows):
            sampled = self._sample_batch([prompts[i] for i in batch], [seed + i for i in batch], max_tokens, temperature)
            rollouts.update(zip(batch, sampled, strict=True))
            if progress:
                progress(len(batch))
        return [rollouts[i] for i in range(len(prompts))]

    def score(self, rollouts: Sequence[Rollout], *, progress: Progress | None = None) -> list[list[float]]:
        mx = self._mx
        sequences = [[*rollout.prompt_ids, *rollout.completion_ids] for rollout in rollouts]
        self._check(sequences)
        scores: dict[int, list[float]] = {}
        for batch in equal_lengths([len(ids) for ids in sequences], lambda length: max(1, BATCH_TOKENS // length)):
            ids = mx.array([sequences[i] for i in batch])
            logprobs = self._logprobs(self.model(ids)[:, :-1])
            token_logprobs = np.array(mx.take_along_axis(logprobs, ids[:, 1:, None], -1)[..., 0])
            for row, i in zip(token_logprobs, batch, strict=True):
                scores[i] = row[-len(rollouts[i].completion_ids) :].tolist()
            if progress:
                progress(len(batch))
        return [scores[i] for i in range(len(rollouts))]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        mx = self._mx
        self.weights_complete = False
        given = {name: mx.array(tensor.float().numpy(force=True)).astype(mx.bfloat16) for name, tensor in weights}
        if hasattr(self.model, "sanitize"):
            given = self.model.sanitize(given)
        try:
            self.model.load_weights(list(given.items()))
        except ValueError as error:
            raise MeasurementError(f"stack `mlx`: {str(error).splitlines()[0]}") from error
        mx.eval(self.model.parameters())  # type: ignore[no-untyped-call]
        self.weights_complete = True

    def conditions(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "tp": 1,
            "batch": "sequences of equal length, no padding",
            "compile": False,
            "device": str(self._mx.default_device()),
            "dtype": "bfloat16",
        }

    def versions(self) -> dict[str, str]:
        return {package: version(package) for package in ("mlx", "mlx-lm")}

    def _logprobs(self, logits: Any) -> Any:
        """FP32 log-probabilities of the model's own logits."""
        logits = logits.astype(self._mx.float32)
        return logits - self._mx.logsumexp(logits, axis=-1, keepdims=True)

    def _sample_batch(
        self, prompts: list[Sequence[int]], seeds: list[int], max_tokens: int, temperature: float
    ) -> list[Rollout]:
        """Prompts of one length; each stops at its own end-of-sequence token."""
        from mlx_lm.models.cache import make_prompt_cache

        mx = self._mx
        cache = make_prompt_cache(self.model)
        generators = [np.random.default_rng(seed) for seed in seeds]
        new = mx.array([list(prompt) for prompt in prompts])
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        for _ in range(max_tokens):
            rows = np.array(self._logprobs(self.model(new, cache=cache)[:, -1])).astype(np.float64)
            drawn = [
                int(row.argmax()) if temperature == 0 else _draw(row / temperature, generator)
                for row, generator in zip(rows, generators, strict=True)
            ]
            for i in list(running):
                tokens[i].append(drawn[i])
                logprobs[i].append(float(rows[i, drawn[i]]))
                if drawn[i] in self.end_tokens:
                    running.discard(i)
            if not running:
                break
            new = mx.array(drawn)[:, None]
        return [Rollout(tuple(p), tuple(t), tuple(lp)) for p, t, lp in zip(prompts, tokens, logprobs, strict=True)]


def _draw(scaled: np.ndarray[Any, Any], generator: np.random.Generator) -> int:
    """One token of the distribution softmax(scaled)."""
    below = np.exp(scaled - scaled.max()).cumsum()
    return int(min(np.searchsorted(below, generator.random() * below[-1], side="right"), len(below) - 1))
