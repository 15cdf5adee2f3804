"""Scores the same tokens many times, each time with the stack's roundings decorrelated, so that what averages out can be told
from what does not.

Two ways. *Dither*: every element of the embedding matrix is multiplied by 1 + r * 2^-8, r drawn from {-1, 0, 1}, and rounded
to BF16, which moves about two thirds of them by one ulp. *Permutation*: hidden channels and MLP neurons change places,
consistently through all weights, which leaves the function as it is in exact arithmetic and reorders every sum.

A dither reaches every rounding from the first norm on, but also moves the input a little; a permutation moves nothing, but
decorrelates the first layers only as far as reordered sums change their last bit.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from tripoint.drift.groups import group_numbers
from tripoint.errors import MeasurementError, UsageError
from tripoint.models import checkpoint_weights, weight_files
from tripoint.stacks import Progress, Rollout, Stack
from tripoint.stacks.hf import HFStack

Floats = NDArray[np.float64]
Weights = Mapping[str, torch.Tensor]
How = Literal["dither", "permutation"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ULP = 2.0**-8

# Along which dimensions of a weight hidden channels and MLP neurons lie, by the end of its name. Heads keep their places.
_HIDDEN: dict[str, int] = {
    "embed_tokens.weight": 1,
    "lm_head.weight": 1,
    "norm.weight": 0,
    "input_layernorm.weight": 0,
    "post_attention_layernorm.weight": 0,
    "q_proj.weight": 1,
    "k_proj.weight": 1,
    "v_proj.weight": 1,
    "o_proj.weight": 0,
    "o_proj.bias": 0,
    "gate_proj.weight": 1,
    "up_proj.weight": 1,
    "down_proj.weight": 0,
    "down_proj.bias": 0,
}
_NEURONS: dict[str, int] = {
    "gate_proj.weight": 0,
    "gate_proj.bias": 0,
    "up_proj.weight": 0,
    "up_proj.bias": 0,
    "down_proj.weight": 1,
}
_UNTOUCHED = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "q_norm.weight", "k_norm.weight")
_KNOWN = {*_HIDDEN, *_NEURONS, *_UNTOUCHED}


@dataclass(frozen=True)
class Replicates:
    """Log-probabilities of the same tokens from K dithers of one stack.

    `values`: (K, tokens), nats, tokens in the order of the sequences. `lengths`: tokens of each sequence. `groups`: a number
    for each sequence, the same for those that errors must not take for independent (see `Rollout.group`); by default all are.
    """

    values: Floats
    lengths: tuple[int, ...]
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.groups and len(self.groups) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} sequences, but groups of {len(self.groups)}")
        if self.values.ndim != 2 or self.values.shape[1] != sum(self.lengths):
            raise ValueError(f"replicates of shape {self.values.shape} do not hold {sum(self.lengths)} tokens each")

    def __len__(self) -> int:
        return len(self.values)

    @property
    def owners(self) -> NDArray[np.int64]:
        """The group of each token: (tokens,)."""
        return np.repeat(self.groups or np.arange(len(self.lengths)), self.lengths)

    @property
    def mean(self) -> Floats:
        """The expected log-probability of each token under rounding noise, as estimated: (tokens,)."""
        return self.values.mean(axis=0)

    def noise_rms(self, tokens: NDArray[np.bool_] | slice = slice(None)) -> float:
        """Root mean square over `tokens` of the standard deviation of one replicate, nats; NaN for a single one."""
        if len(self) < 2:
            return float("nan")
        return float(np.sqrt(self.values[:, tokens].var(axis=0, ddof=1).mean()))


def seeds(seed: int, stack: str, count: int) -> list[int]:
    """`count` seeds for one stack, independent of those of any other name or `seed`."""
    sequence = np.random.SeedSequence([seed, *stack.encode()])
    return [int(state) for state in sequence.generate_state(count, np.uint32)]


def dithered(matrix: torch.Tensor, seed: int, *, amplitude: float = ULP) -> torch.Tensor:
    """`matrix` with each element times 1 + r * `amplitude`, r from {-1, 0, 1}, rounded to BF16 and returned in its dtype."""
    generator = torch.Generator().manual_seed(seed)
    r = torch.randint(-1, 2, matrix.shape, generator=generator, dtype=torch.int8).to(matrix.device)
    return (matrix.float() * (1 + r * amplitude)).bfloat16().to(matrix.dtype)


def permutable(weights: Weights) -> bool:
    """Whether it is known for every weight which channels a permutation has to move."""
    return all(_channels(name) in _KNOWN for name in weights)


def _channels(name: str) -> str:
    """What a weight is called in the tables of channels."""
    layer, _, end = name.rpartition(".mlp.")
    return end if layer else ".".join(name.split(".")[-2:])


def permuted(weights: Weights, seed: int) -> dict[str, torch.Tensor]:
    """`weights` of a decoder with hidden channels and the MLP neurons of each layer permuted: the same function.

    Raises UsageError for a weight whose channels are not known (see `permutable`).
    """
    generator = torch.Generator().manual_seed(seed)
    channels = torch.randperm(weights[EMBEDDING].shape[1], generator=generator)
    neurons: dict[str, torch.Tensor] = {}
    out = {}
    for name, weight in weights.items():
        layer, end = name.rpartition(".mlp.")[0], _channels(name)
        if end not in _KNOWN:
            raise UsageError(f"weight `{name}`: which channels a permutation has to move is not known")
        if end in _HIDDEN:
            weight = weight.index_select(_HIDDEN[end], channels.to(weight.device))
        if end in _NEURONS:
            if layer not in neurons:
                neurons[layer] = torch.randperm(weight.shape[_NEURONS[end]], generator=generator)
            weight = weight.index_select(_NEURONS[end], neurons[layer].to(weight.device))
        out[name] = weight
    return out


class Dithering:
    """The tokens to be scored and the weights to be varied, by which any number of stacks of one checkpoint are measured."""

    def __init__(self, weights: Weights, rollouts: Sequence[Rollout]) -> None:
        """`weights`: the checkpoint's, by name, untied (see `untied`). Raises UsageError for tied ones."""
        if HEAD not in weights:
            raise UsageError(f"the checkpoint ties `{HEAD}` to its embeddings: dithering one would dither both; untie it first")
        self.weights = dict(weights)
        self.rollouts = list(rollouts)
        self.lengths = tuple(len(rollout.completion_ids) for rollout in rollouts)
        self.groups = group_numbers(rollouts)
        ids = {token for rollout in rollouts for token in (*rollout.prompt_ids, *rollout.completion_ids)}
        # Rows that no token looks up cannot matter: leaving them alone makes a dither cost nothing.
        self._rows = torch.tensor(sorted(ids))

    def score(
        self,
        stack: Stack,
        seeds: Sequence[int],
        *,
        how: How = "dither",
        matrix: str = EMBEDDING,
        amplitude: float = ULP,
        progress: Progress | None = None,
    ) -> Replicates:
        """Score the tokens with `stack` once for each of `seeds`, and leave it with the weights as they are.

        `matrix` is the weight that is dithered. `progress` is told of sequences. Raises MeasurementError for log-probabilities
        that are not finite.
        """
        rows = []
        with self.varying(stack, how=how, matrix=matrix, amplitude=amplitude) as vary:
            for seed in seeds:
                vary(seed)
                rows.append(self._once(stack, progress))
        return Replicates(np.stack(rows), self.lengths, self.groups)

    @contextmanager
    def varying(
        self, stack: Stack, *, how: How = "dither", matrix: str = EMBEDDING, amplitude: float = ULP
    ) -> Iterator[Callable[[int], None]]:
        """Yields what to call with a seed to have `stack` hold varied weights; afterwards it holds the checkpoint's again."""
        if how not in get_args(How):
            raise UsageError(f"roundings are decorrelated by {how!r}? It must be one of {', '.join(get_args(How))}")

        def vary(seed: int) -> None:
            self._load(stack, permuted(self.weights, seed) if how == "permutation" else self._dither(matrix, seed, amplitude))

        try:
            yield vary
        finally:
            self._load(stack, self.weights if how == "permutation" else {matrix: self.weights[matrix]})

    def score_once(self, stack: Stack, *, progress: Progress | None = None) -> Replicates:
        """Score the tokens with `stack` as it is: a single sample of its roundings."""
        return Replicates(self._once(stack, progress)[None], self.lengths, self.groups)

    def _once(self, stack: Stack, progress: Progress | None) -> Floats:
        values = np.concatenate([np.asarray(row, np.float64) for row in stack.score(self.rollouts, progress=progress)])
        if not np.isfinite(values).all():
            bad = int((~np.isfinite(values)).sum())
            raise MeasurementError(
                f"stack `{stack.name}` gave {bad} of {len(values)} tokens a log-probability that is not finite"
            )
        return values

    def _dither(self, matrix: str, seed: int, amplitude: float) -> dict[str, torch.Tensor]:
        weight = self.weights[matrix]
        if matrix != EMBEDDING:
            return {matrix: dithered(weight, seed, amplitude=amplitude)}
        varied = weight.clone()
        varied[self._rows] = dithered(weight[self._rows], seed, amplitude=amplitude)
        return {matrix: varied}

    def _load(self, stack: Stack, changed: Weights) -> None:
        """Have `stack` hold the checkpoint's weights but for the `changed` ones."""
        if isinstance(stack, HFStack) and len(changed) == 1:
            # Nothing else differs from what it holds, so one matrix is copied in place.
            held = stack.model.state_dict()
            for name, weight in changed.items():
                held[name].copy_(weight)
        else:
            stack.load_weights((self.weights | dict(changed)).items())


@contextmanager
def untied(model: Path) -> Iterator[Path]:
    """A directory with the checkpoint of directory `model` in which `lm_head.weight` is a weight of its own.

    A checkpoint that has one already is given as it is. Otherwise its files are linked, its embeddings copied, and the
    directory is gone afterwards. Raises UsageError for a checkpoint that ties the two and stores different ones.
    """
    names = weight_files(model)
    where = {name: shard for shard, held in names.items() for name in held}
    if EMBEDDING not in where:
        raise UsageError(f"model directory `{model}` has no weight `{EMBEDDING}`: its layout is not known to dithering")
    if HEAD in where:
        if not AutoConfig.from_pretrained(model).tie_word_embeddings:
            yield model
            return
        head, embedding = (_tensor(where[name], name) for name in (HEAD, EMBEDDING))
        if not torch.equal(head, embedding):
            raise UsageError(
                f"model directory `{model}`: config.json ties `{HEAD}` to `{EMBEDDING}`, but the two are stored and differ: "
                "save the model again"
            )
    with tempfile.TemporaryDirectory(prefix="tripoint-untied-") as name:
        directory = Path(name)
        index: dict[str, str] = {}
        for number, shard in enumerate(names):
            # Not under its own name: a file called model.safetensors would be read in place of the index.
            linked = f"model-{number:05}.safetensors"
            (directory / linked).symlink_to(shard.resolve())
            index |= dict.fromkeys(names[shard], linked)
        if HEAD not in where:
            copied = {HEAD: _tensor(where[EMBEDDING], EMBEDDING)}
            save_file(copied, directory / "model-lm-head.safetensors", metadata={"format": "pt"})
            index[HEAD] = "model-lm-head.safetensors"
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        config = json.loads((model / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        replaced = ("config.json", "model.safetensors.index.json")
        for file in model.iterdir():
            if file not in names and file.name not in replaced:
                (directory / file.name).symlink_to(file.resolve())
        yield directory


def _tensor(shard: Path, name: str) -> torch.Tensor:
    with safe_open(shard, framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor


def read_weights(model: Path) -> dict[str, torch.Tensor]:
    """Every weight of the checkpoint in directory `model`, on the CPU."""
    return dict(checkpoint_weights(model))
