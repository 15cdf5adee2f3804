"""Puts the trainer's weights into the engine, and makes sure that they are there.

The engine is asked after every sync for the log-probabilities of a few fixed tokens. Weights that did not change must not
change a bit of them, and weights that did must. There is no tolerance in that, and so no confusion with rounding noise:
it takes the same engine answering the same question twice alike, which is tried at the start.

An update so small that it is lost in the engine's roundings would look like a skipped sync. Then the engine is given
weights that cannot be overlooked and after them the right ones again: only a skipped sync changes what it says.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch

from tripoint.errors import MeasurementError
from tripoint.stacks import Rollout, Stack

Named = Iterable[tuple[str, torch.Tensor]]


class WeightSync:
    """The way from a trainer to an engine that holds the same weights to begin with.

    `digest`: a checksum of the weights that the engine holds. `exact`: whether the engine answers twice alike; if not,
    skipped syncs cannot be told.
    """

    def __init__(
        self, engine: Stack, weights: Named, prompts: Sequence[Sequence[int]], max_tokens: int, dtype: torch.dtype
    ) -> None:
        """`weights`: the trainer's, as the engine holds them already. `dtype`: of the engine's weights.

        `prompts`: token ids, which the engine completes by up to `max_tokens` each to make the fixed tokens.
        """
        self.engine = engine
        self.dtype = dtype
        self._probe: list[Rollout] = engine.sample(prompts, max_tokens=max_tokens, seed=0)
        self._answers = engine.score(self._probe)
        self.exact = engine.score(self._probe) == self._answers
        self.digest = _digest(self._rounded(weights))

    def push(self, weights: Named) -> None:
        """Give the engine `weights`, rounded to what it holds. Raises MeasurementError if it does not hold them afterwards."""
        tensors = self._rounded(weights)
        digest = _digest(tensors)
        self.engine.load_weights(tensors.items())
        answers = self.engine.score(self._probe)
        if self.exact and digest == self.digest and answers != self._answers:
            raise MeasurementError(
                f"engine `{self.engine.name}` answers otherwise after it was given the very weights it held: "
                "its weight sync does not do what loading the checkpoint does"
            )
        if self.exact and digest != self.digest and answers == self._answers:
            self._challenge(tensors, answers)
        self.digest, self._answers = digest, answers

    def _challenge(self, tensors: dict[str, torch.Tensor], answers: list[list[float]]) -> None:
        """Raise unless the engine, whose answers did not change, does hold `tensors`."""
        self.engine.load_weights(
            (name, tensor * 2 if name.endswith("norm.weight") else tensor) for name, tensor in tensors.items()
        )
        challenged = self.engine.score(self._probe)
        self.engine.load_weights(tensors.items())
        if challenged == answers or self.engine.score(self._probe) != answers:
            raise MeasurementError(
                f"the weights did not reach engine `{self.engine.name}`: after the sync its log-probabilities are, bit by bit, "
                "those of the weights before"
            )

    def _rounded(self, weights: Named) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().to(self.dtype).contiguous() for name, tensor in weights}


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """A checksum over names and bits."""
    total = 0
    for name, tensor in tensors.items():
        total = zlib.crc32(tensor.cpu().flatten().view(torch.uint8).numpy().data, zlib.crc32(name.encode(), total))
    return f"{total:08x}"
