"""The questions: each is a place in the checkpoint, the roundings it tells apart, and prompts with the answer of each of them.

Every question is made the same way. It lays its wires, proposes many random inputs, has the emulator say what each candidate
rounding answers to each (less than, equal to or greater than a reference), throws out inputs that come near a rounding
boundary, and picks a few prompts such that every two candidates are told apart by several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from tripoint.canary import emulator
from tripoint.canary.circuit import UNIT, Circuit
from tripoint.canary.emulator import Array, Rounding, bf16, ulp
from tripoint.schedule import Cast, RoundingSchedule

Answers = NDArray[np.int8]

PROPOSALS = 4000
CASTS: tuple[Cast, ...] = get_args(Cast)


@dataclass(frozen=True)
class Candidate:
    """One possible rounding at a place: the parts of a schedule that the emulator takes, and their fields by dotted name."""

    parts: tuple[Any, ...]
    fields: dict[str, object]

    @classmethod
    def of(cls, named: dict[str, Any]) -> Candidate:
        """From parts of a schedule by their dotted names."""
        fields = {f"{name}.{key}": value for name, part in named.items() for key, value in asdict(part).items()}
        return cls(tuple(named.values()), fields)

    def without(self, field: str) -> Candidate:
        """The same where a question does not settle `field`."""
        return Candidate(self.parts, {name: value for name, value in self.fields.items() if name != field})

    def __str__(self) -> str:
        words = [part.code if part.cast == "rne" else f"{part.code} truncated" for part in self.parts]
        return " ".join(words or map(str, self.fields.values()))


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the answer (-1, 0, 1) of each candidate of the question.

    `decode` are ids after which the engine generates the last of `tokens`, so that its second token is the answer; None
    where this is asked in prefill only.
    """

    tokens: tuple[int, ...]
    expected: tuple[int, ...]
    decode: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Question:
    """`subject` is the part of the schedule asked about (`rope`, `norm.input`, `carry.5`, or `control`), `place` where it is
    asked. Questions of one subject have the same candidates."""

    subject: str
    place: str
    candidates: tuple[Candidate, ...]
    prompts: tuple[Prompt, ...]


def choose(expected: Answers, times: int, groups: Sequence[int] | None = None) -> list[int]:
    """Rows of `expected` [input, candidate] such that any two candidates differ in `times` of them, or in all that there are.

    With `groups`, a label for each candidate, only candidates of one group are to be told apart.
    """
    labelled = expected if groups is None else np.vstack([expected, np.array(groups, dtype=expected.dtype)])
    _, classes = np.unique(labelled, axis=1, return_index=True)
    left, right = np.triu_indices(len(classes), 1)
    if groups is not None:
        alike = np.array(groups)[classes]
        left, right = left[alike[left] == alike[right]], right[alike[left] == alike[right]]
    distinct = expected[:, classes]
    differs = distinct[:, left] != distinct[:, right]
    needed = np.minimum(differs.sum(0), times)
    picked: list[int] = []
    while needed.any():
        gain = differs[:, needed > 0].sum(1)
        gain[picked] = 0
        picked.append(int(gain.argmax()))
        needed -= np.minimum(needed, differs[picked[-1]])
    return picked


def question(
    circuit: Circuit,
    subject: str,
    place: str,
    candidates: Sequence[Candidate],
    expected: Answers,
    tokens: Callable[[int], tuple[int, ...]],
    margin: Array | None = None,
    times: int = 3,
    groups: Sequence[int] | None = None,
    in_decode: bool = True,
) -> Question:
    """The question made of a few of the proposals. `tokens(i)` makes the prompt of proposal i, whose last token is its own.

    `expected` is [proposal, candidate], `margin` that of each proposal, if not all are safe; `in_decode` says whether to ask it
    while decoding too; the rest as for `choose`."""
    safe = np.arange(len(expected)) if margin is None else np.flatnonzero(margin >= emulator.MARGIN)
    picked = safe[choose(expected[safe], times, groups)]
    decoded = choose(expected[picked], 1, groups) if in_decode else []
    prompts = []
    for number, proposal in enumerate(picked):
        ids = tokens(proposal)
        # The pointer stands right before its token, in the place of padding, so that no position changes.
        decode = (*ids[:-2], circuit.pointer(ids[-1])) if number in decoded else None
        prompts.append(Prompt(ids, tuple(map(int, expected[proposal])), decode))
    return Question(subject, place, tuple(candidates), tuple(prompts))


# -- SwiGLU and GeGLU -------------------------------------------------------------------------------------------------

SWIGLU = [replace(RoundingSchedule.parse(f"R1 {code} N1").swiglu, cast=cast) for code in ("S1", "S3", "S5") for cast in CASTS]
_GATE_SCALE, _UP_SCALE, _OUT_SCALE = 8.0, 2.0, 1 / 16


def swiglu(circuit: Circuit, rng: np.random.Generator, layer: int) -> Question:
    """act(gate) * up of one unit, against a reference that `result` holds."""
    shape = circuit.shape
    gate_input, up_input = f"gate.{layer}", f"up.{layer}"
    unit = circuit.neuron(layer, {gate_input: _GATE_SCALE}, {up_input: _UP_SCALE})
    circuit.set(f"model.layers.{layer}.mlp.down_proj", "result", unit, _OUT_SCALE)

    gate = bf16(rng.uniform(-1, 1, PROPOSALS)) * _GATE_SCALE
    up = bf16(rng.uniform(0.5, 1, PROPOSALS)) * _UP_SCALE
    candidates = [Candidate.of({"swiglu": part}) for part in SWIGLU if shape.act == "silu" or part.sig == "fp32"]
    outcomes, margin = np.empty((PROPOSALS, len(candidates))), np.full(PROPOSALS, np.inf)
    for column, candidate in enumerate(candidates):
        (part,) = candidate.parts
        rounded = Rounding(part.cast, PROPOSALS)
        outcomes[:, column] = emulator.gated_act(gate, up, shape.act, part, rounded)
        np.minimum(margin, rounded.margin, out=margin)
    margin[np.abs(outcomes).min(1) < 0.125] = 0
    reference = _one_of(outcomes, rng)

    def tokens(i: int) -> tuple[int, ...]:
        row = {
            "one": UNIT,
            gate_input: gate[i] / _GATE_SCALE,
            up_input: up[i] / _UP_SCALE,
            "result": -reference[i] * _OUT_SCALE,
        }
        return (circuit.token(f"swiglu{layer}.{i}", row),)

    expected = np.sign(outcomes - reference[:, None]).astype(np.int8)
    return question(circuit, "swiglu", f"layer {layer}", candidates, expected, tokens, margin)


def _one_of(outcomes: Array, rng: np.random.Generator) -> Array:
    """For each row the outcome of a random candidate."""
    return outcomes[np.arange(len(outcomes)), rng.integers(outcomes.shape[1], size=len(outcomes))]


# -- residual + RMSNorm -----------------------------------------------------------------------------------------------

NORMS = [
    replace(RoundingSchedule.parse(f"R1 S1 {code}").norm.final, cast=cast)
    for code in ("N1", "N2", "N3", "N4", "N5")
    for cast in CASTS
]


def norm(circuit: Circuit, rng: np.random.Generator, site: str, layer: int) -> Question:
    """One element of a norm right after a residual add that makes it and a heavy element, which rules the mean square, inexact.

    The final norm is read by the output head, the others by the projection behind them.
    """
    shape = circuit.shape
    probe, source = ("probe" if site == "final" else f"probe.{site}.{layer}"), f"source.{site}.{layer}"
    add = {"input": 2 * layer - 1, "post_attention": 2 * layer, "final": 2 * shape.layers - 1}[site]
    # A heavy value of a large mantissa: its rounding must not move the reciprocal RMS out of the window that copies survive.
    heavy_size = 0.96 * np.sqrt(circuit.squares)
    heavy_ulp = float(ulp(heavy_size))
    if heavy_size / heavy_ulp < 1.4 * 128:
        heavy_size, heavy_ulp = 255 * heavy_ulp / 2, heavy_ulp / 2
    to_heavy = -16 * heavy_ulp
    if add >= 0:
        circuit.copy_at_add(add, source, {probe: 1.0, "heavy": to_heavy})
    weight = float(bf16(rng.uniform(1.1, 1.4)))
    if (4 * weight).is_integer():
        weight += 2**-7  # products with a weight as short as 1.25 end too far from rounding boundaries
    if site == "final":
        circuit.weigh("model.norm", probe, weight)
    elif site == "input":
        circuit.weigh(f"model.layers.{layer}.input_layernorm", probe, weight)
        circuit.copy_by_attention(layer, probe, {"result": 1.0})
    else:
        circuit.weigh(f"model.layers.{layer}.post_attention_layernorm", probe, weight)
        circuit.copy_by_mlp(layer, probe, {"result": 1.0})

    value = bf16(rng.uniform(0.5, 0.95, PROPOSALS))
    kind = rng.integers(3 if add >= 0 else 1, size=PROPOSALS)
    added = np.select(
        [kind == 0, kind == 1],
        [
            0.0,  # nothing is added: only norm_round shows
            bf16(rng.uniform(-1, 1, PROPOSALS)) * 2.0**-8,  # a fraction of an ulp of the probe
        ],
        rng.integers(4, 8, PROPOSALS) * 2.0**-8,  # exact for the probe, 0.25 to 0.44 ulp of the heavy value
    )
    heavy = np.where(kind == 2, bf16(heavy_size * rng.uniform(0.98, 1.0, PROPOSALS)), 0.0)

    candidates = [Candidate.of({f"norm.{site}": part}) for part in NORMS]
    outcomes, margin = np.empty((PROPOSALS, len(NORMS))), np.full(PROPOSALS, np.inf)
    roundings = [Rounding(part.cast, PROPOSALS) for part in NORMS]
    mean_squares = []
    for column, (part, rounded) in enumerate(zip(NORMS, roundings, strict=True)):
        sums = value + added, heavy + to_heavy * added
        others = circuit.squares - value**2 - heavy**2
        exact = (others + sums[0] ** 2 + sums[1] ** 2) / shape.hidden + shape.eps
        of_rounded = (others + rounded(sums[0]) ** 2 + rounded(sums[1]) ** 2) / shape.hidden + shape.eps
        mean_squares.append((exact, of_rounded))
        outcomes[:, column] = emulator.rms_norm(sums[0], weight, mean_squares[-1], part, rounded)
        if site == "post_attention":  # the gate that opens the copy went through this norm too
            gate = emulator.rms_norm(np.full(PROPOSALS, UNIT), 1.0, mean_squares[-1], part, rounded)
            rounded.require(np.where(gate == UNIT, np.inf, 0.0))
    reference = _one_of(outcomes, rng)
    compared = np.repeat(reference[:, None], len(NORMS), 1)
    if site == "final":  # the reference goes through this norm too
        for column, (part, rounded) in enumerate(zip(NORMS, roundings, strict=True)):
            compared[:, column] = emulator.rms_norm(reference, 1.0, mean_squares[column], part, rounded)
    for rounded in roundings:
        np.minimum(margin, rounded.margin, out=margin)

    def tokens(i: int) -> tuple[int, ...]:
        row = {"one": UNIT, "self": UNIT, probe: value[i], source: added[i], "heavy": heavy[i]}
        row |= {"reference": reference[i]} if site == "final" else {"result": -reference[i]}
        return (circuit.token(f"{site}{layer}.{i}", row),)

    expected = np.sign(outcomes - compared).astype(np.int8)
    return question(circuit, f"norm.{site}", f"layer {layer}", candidates, expected, tokens, margin)


# -- carry ------------------------------------------------------------------------------------------------------------


def carry_source(circuit: Circuit, add: int) -> str:
    """The coordinate that residual add number `add` adds to `result`; wired when first asked for."""
    name = f"add.{add}"
    if not circuit.has(name):
        circuit.copy_at_add(add, name, {"result": 1.0})
    return name


def carry(circuit: Circuit, rng: np.random.Generator, add: int, times: int, in_decode: bool) -> Question:
    """Residual add `add` makes an inexact sum, the next one takes a BF16 number near it away.

    With `times` 0, one prompt asks whether the add rounds, and not how.
    """
    sources = carry_source(circuit, add), carry_source(circuit, add + 1)
    start = bf16(rng.uniform(0.5, 0.99, PROPOSALS))
    fraction = rng.choice([0.3, 0.4, 0.6, 0.7], PROPOSALS) * rng.choice([-1, 1], PROPOSALS)
    added = bf16(fraction * rng.uniform(0.9, 1.1, PROPOSALS) * ulp(start))
    total = start + added
    outcomes, margin = [], np.full(PROPOSALS, np.inf)
    for cast in CASTS:
        rounded = Rounding(cast, PROPOSALS)
        outcomes.append(rounded(total))
        np.minimum(margin, rounded.margin, out=margin)
    names: list[str] = [*CASTS, "unrounded"]
    if times == 0:
        margin[outcomes[0] != outcomes[1]] = 0
        outcomes, names = outcomes[:1], ["rounded", "unrounded"]
    reference = _one_of(np.stack(outcomes, 1), rng)
    expected = np.sign(np.stack([*outcomes, total], 1) - reference[:, None]).astype(np.int8)
    candidates = [Candidate((), {f"carry.{add}": name}) for name in names]

    def tokens(i: int) -> tuple[int, ...]:
        row = {"one": UNIT, "self": UNIT, "result": start[i], sources[0]: added[i], sources[1]: -reference[i]}
        return (circuit.token(f"carry{add}.{i}", row),)

    return question(
        circuit, f"carry.{add}", f"add {add}", candidates, expected, tokens, margin, max(1, times), in_decode=in_decode
    )
