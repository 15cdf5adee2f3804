"""The wiring: named coordinates of the residual stream, copies between them, and tokens that are programs.

A token's embedding row puts values on coordinates; the weights, the same for all tokens, only copy. Each projection row has
at most one weight whose input is not zero, all copying weights are powers of two, and the reciprocal root mean square is
slightly above 1 (`RSTD`), so that a BF16 number comes through every norm as itself, rounded or truncated, under every schedule.

- Attention copies: in a one-token context attention returns the value; in longer ones a token with `self` attends to itself.
- MLP copies: act(64) = 64 for every gate, and 1/64 goes into the down projection.
- `result` starts at minus the value expected, and what a question adds to it leaves less than, exactly or more than zero.
- The output head turns the sign of `result + probe - reference` into one of three words.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from tripoint.canary.emulator import bf16
from tripoint.canary.shape import CanaryShape
from tripoint.errors import UsageError

RSTD = 1.001
UNIT = 0.5  # what `one` and `self` hold
ANSWERS: dict[str, int] = {"less": -1, "equal": 0, "greater": 1}
TIED_WORD = "tied"  # wins every prompt where an engine takes the embedding for the output head

_FILLERS = 4  # each takes up what the one before left of the sum of squares, to 2^-7
_GATE = 64.0
_EQUAL, _SIGN = 2.0**16, 2.0**40  # output weights: any difference beats "equal", "equal" beats any other row
_SELF = 2.0**14
_POINTER_GAIN = 2.0**48  # leaves of anything else that a pointer gathers less than the output weights can raise
_POINTER = 0.25
_AXES = ("x", "y", "z")


@dataclass
class Circuit:
    """The weights of a canary while they are being laid out, sparse: tensor name -> {(row, column): value}."""

    shape: CanaryShape
    matrices: dict[str, dict[tuple[int, int], float]] = field(default_factory=lambda: defaultdict(dict))
    norms: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    words: dict[int, str] = field(default_factory=dict)
    _rows: dict[int, dict[str, float]] = field(default_factory=dict)
    _coordinates: dict[str, int] = field(default_factory=dict)
    _values_used: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _neurons_used: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _pointers: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free_ids = (i for i in range(self.shape.vocab) if i not in self.shape.reserved)
        self.pad = self.token("_", {})
        self.answers = {self.token(word, {}): value for word, value in ANSWERS.items()}
        self.tied_token = None if self.shape.tied else self.token(TIED_WORD, {})
        for layer in range(self.shape.layers):
            self._wire_self_attention(layer)
        self._wire_pointers()

    # -- coordinates and copies ---------------------------------------------------------------------------------------

    def coordinate(self, name: str) -> int:
        """The index of a coordinate of the residual stream, a new one if the name is new."""
        if name not in self._coordinates:
            if len(self._coordinates) + _FILLERS >= self.shape.hidden:
                raise UsageError(f"canary of hidden size {self.shape.hidden}: too small for {self.shape.layers} layers")
            self._coordinates[name] = len(self._coordinates)
        return self._coordinates[name]

    def has(self, name: str) -> bool:
        return name in self._coordinates

    def copy_by_attention(self, layer: int, source: str, targets: Mapping[str, float]) -> None:
        """At the attention output of `layer`, add the normalised `source` to each target, times a power of two."""
        value = self.value_slot(layer)
        self.set(f"model.layers.{layer}.self_attn.v_proj", value, source, 1.0)
        for target, scale in targets.items():
            self.set(f"model.layers.{layer}.self_attn.o_proj", target, value, scale)

    def copy_by_mlp(self, layer: int, source: str, targets: Mapping[str, float]) -> None:
        """At the MLP output of `layer`, add the normalised `source` to each target, times a power of two."""
        neuron = self.neuron(layer, {"one": _GATE / UNIT}, {source: 1.0})
        for target, scale in targets.items():
            self.set(f"model.layers.{layer}.mlp.down_proj", target, neuron, scale / _GATE)

    def copy_at_add(self, add: int, source: str, targets: Mapping[str, float]) -> None:
        """The copy whose output is residual add number `add`."""
        copy = self.copy_by_mlp if add % 2 else self.copy_by_attention
        copy(add // 2, source, targets)

    def neuron(self, layer: int, gate: Mapping[str, float], up: Mapping[str, float]) -> int:
        """A new unit of the MLP with these input weights."""
        index = self._neurons_used[layer]
        self._neurons_used[layer] += 1
        for name, weights in (("gate", gate), ("up", up)):
            for source, weight in weights.items():
                self.set(f"model.layers.{layer}.mlp.{name}_proj", index, source, weight)
        return index

    def value_slot(self, layer: int) -> int:
        """A new element of the first KV head's value, which the first query head puts out at the same index."""
        index = self._values_used[layer]
        self._values_used[layer] += 1
        assert index < self.shape.head_dim
        return index

    def set(self, matrix: str, row: int | str, column: int | str, value: float) -> None:
        """One weight; a name stands for its coordinate."""
        indices = [self.coordinate(i) if isinstance(i, str) else i for i in (row, column)]
        self.matrices[f"{matrix}.weight"][indices[0], indices[1]] = value

    def weigh(self, norm: str, element: int | str, value: float) -> None:
        """One weight of a norm; all others are 1."""
        self.norms[f"{norm}.weight"][self.coordinate(element) if isinstance(element, str) else element] = value

    # -- tokens -------------------------------------------------------------------------------------------------------

    def token(self, word: str, row: Mapping[str, float]) -> int:
        """A new token whose embedding holds `row`, coordinate -> value."""
        index = next(self._free_ids, None)
        if index is None:
            raise UsageError(f"canary of vocabulary {self.shape.vocab}: too small for its questions")
        self.words[index] = word
        self._rows[index] = dict(row)
        for name in row:
            self.coordinate(name)
        return index

    def pointer(self, token: int) -> int:
        """A new token after which any engine generates `token`."""
        index = self.token(f"{self.words[token]}<", {"one": UNIT})
        self._pointers.append((index, token))
        return index

    def _wire_self_attention(self, layer: int) -> None:
        """`self` and, for pointers, `from` attend to their own position: in rotary pairs that hardly turn."""
        half = self.shape.head_dim // 2
        elements = {half - 1: "self", half - 2: "from.x", 2 * half - 2: "from.y", 2 * half - 1: "from.z"}
        for projection, scale in (("q", 1.0 if self.shape.qk_norm else _SELF), ("k", 1.0)):
            for element, source in elements.items():
                self.set(f"model.layers.{layer}.self_attn.{projection}_proj", element, source, scale)
        if self.shape.qk_norm:
            for element in elements:
                self.weigh(f"model.layers.{layer}.self_attn.q_norm", element, _SELF)

    def _wire_pointers(self) -> None:
        for axis in _AXES:
            self.copy_by_mlp(0, f"from.{axis}", {f"to.{axis}": _POINTER_GAIN})

    # -- finished tensors ---------------------------------------------------------------------------------------------

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden] in FP32, all values BF16 numbers."""
        self._aim_pointers()
        table = torch.zeros(self.shape.vocab, self.shape.hidden)
        for token, row in self._rows.items():
            for name, value in row.items():
                table[token, self.coordinate(name)] = value
            if row:
                self._fill(table[token])
        if self.tied_token is None:
            for token, row in self._output_rows().items():
                for name, value in row.items():
                    table[token, self.coordinate(name)] = value
        else:
            table[self.tied_token, self.coordinate("one")] = _SIGN
        return table

    def output_head(self) -> torch.Tensor:
        """[vocab, hidden] in FP32, where it is not the embedding."""
        table = torch.zeros(self.shape.vocab, self.shape.hidden)
        pointed = {token: {f"to.{axis}": self._rows[token][f"to.{axis}"] for axis in _AXES} for _, token in self._pointers}
        for token, row in {**self._output_rows(), **pointed}.items():
            for name, value in row.items():
                table[token, self.coordinate(name)] = value
        return table

    def _output_rows(self) -> dict[int, dict[str, float]]:
        signs = {"result": _SIGN, "probe": _SIGN, "reference": -_SIGN}
        return {
            token: {name: answer * weight for name, weight in signs.items()} if answer else {"one": _EQUAL}
            for token, answer in self.answers.items()
        }

    def _aim_pointers(self) -> None:
        """Give each pointer and its token a direction of their own, spread over the sphere: the nearest output row wins."""
        size = math.sqrt(self.shape.hidden * 0.8)
        for number, (pointer, token) in enumerate(self._pointers):
            z = 1 - (2 * number + 1) / len(self._pointers)
            turn = math.pi * (3 - math.sqrt(5)) * number
            flat = math.sqrt(1 - z * z)
            for axis, part in zip(_AXES, (flat * math.cos(turn), flat * math.sin(turn), z), strict=True):
                self._rows[pointer][f"from.{axis}"] = float(bf16(size * part))
                self._rows[token][f"to.{axis}"] = float(bf16(_POINTER * part))

    def _fill(self, row: torch.Tensor) -> None:
        """Bring the root mean square of an embedding row to 1 / RSTD by means of coordinates that nobody reads."""
        left = self.squares - float((row.double() ** 2).sum())
        assert left > 0, "the values of a token leave no room for its mean square"
        for filler in range(_FILLERS):
            value = float(bf16(math.sqrt(left), "rtz"))
            row[-1 - filler] = value
            left -= value**2

    @property
    def squares(self) -> float:
        """The sum of squares of every embedding row."""
        return self.shape.hidden * (RSTD**-2 - self.shape.eps)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight of the checkpoint by name, in BF16, made one at a time."""
        for name, shape in self.shape.weights().items():
            if name == "model.embed_tokens.weight":
                yield name, self.embedding().bfloat16()
            elif name == "lm_head.weight":
                yield name, self.output_head().bfloat16()
            elif name.endswith("norm.weight"):
                weight = torch.ones(shape, dtype=torch.bfloat16)
                for element, value in self.norms.get(name, {}).items():
                    weight[element] = value
                yield name, weight
            else:
                weight = torch.zeros(shape, dtype=torch.bfloat16)
                for place, value in self.matrices.get(name, {}).items():
                    weight[place] = value
                yield name, weight
