"""Questions about RoPE and, where there is one, the QK-norm in front of it.

A prompt holds one key token and, as its last token, one query token. Everything else in it scores zero, so the sign of
the rotated query times the rotated key decides whether attention picks the key's value, which turns `result` from less to
greater. Inputs are proposed such that the score nearly cancels: its sign is then that of a rounding error. Scaling the query
or the score, in whatever precision, must not change that sign.

- Query: the key stands at position 0, where the rotation is the identity.
- Angle: the same at late positions of fast pairs, where the FP32 error of the angle moves the sign.
- Key: the query (1, 0) or (0, 1) turns into the rounded cos and sin themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tripoint.canary import emulator
from tripoint.canary.circuit import RSTD, UNIT, Circuit
from tripoint.canary.emulator import Array, Rounding, bf16, ulp
from tripoint.canary.questions import CASTS, Answers, Candidate, Question, question
from tripoint.schedule import Angle, QkNormRounding, RopeRounding, RoundingSchedule

SHORT, LONG = 24, 256  # prompt lengths, of most prompts and of those that ask for the angle
VALUE = 1 / 32  # what the key token's value adds to `result`, too little to move its mean square

_PROPOSALS = 20000
_LOUDEST = 2.0**36  # scale of the query: the smallest score asked about must overwhelm softmax
_ENOUGH = 2.0**10
_FILLS, _FILL_SCALE = 4, 16.0

# Margins in ulps where the usual one leaves too few inputs; 2e-6 of a value is at most 5e-4 ulp.
QK_MARGIN = 0.01  # with a QK-norm seven times as many candidates round
EXACT_MARGIN = 1e-3  # in front of the rounding there is one multiplication
ANGLE_MARGIN = 7e-4  # of tables

_ROPE = [RoundingSchedule.parse(f"{code} S1 N1").rope for code in ("R1", "R2", "R3", "R4")]
_QK_NORMS = list(
    dict.fromkeys(QkNormRounding(norm, out, cast) for norm, out, cast in product((True, False), (True, False), CASTS))
)

# A query at position `at` and a key at position `key_at`, both in rotary pair `pair`, as the projections put them out, and what
# the QK-norms multiply them with.
_VALUES = ("qx", "qy", "kx", "ky", "q_rstd", "k_rstd")
_PROPOSAL = np.dtype([("pair", int), ("at", int), ("key_at", int), *((name, float) for name in _VALUES)])
Proposals = NDArray[np.void]
Pair = tuple[Array, Array]
Score = Callable[[Proposals, Candidate, Rounding], Array]


def layers_asked(layers: int) -> list[int]:
    """RoPE is asked in the first and the last layer at once; where they disagree the answer is "equal"."""
    return sorted({0, layers - 1})


def rope(circuit: Circuit, rng: np.random.Generator) -> list[Question]:
    """What happens to queries and to keys."""
    bench = _Bench(circuit, rng)
    bench.wire()
    lone, whole = bench.lone_score, bench.score
    questions = [
        bench.question("query", (bench.propose_lone_queries(), lone), (bench.propose_queries(), whole)),
        bench.question("key", (bench.propose_keys(), whole)),
    ]
    if bench.angle_pairs:
        questions.append(bench.angle_question())
    return [question for question in questions if question.prompts]


class _Bench:
    """One canary's RoPE: the wires, the proposals and what the emulator says to them."""

    def __init__(self, circuit: Circuit, rng: np.random.Generator) -> None:
        self.circuit, self.rng, self.shape = circuit, rng, circuit.shape
        self.half = self.shape.head_dim // 2
        fast = 8 if self.shape.hidden >= 128 else 3
        pairs = {*range(fast), self.half // 4, self.half // 2}
        self.longest = min(LONG, self.shape.max_positions - 2)
        self.usual = min(SHORT, self.longest)
        self.rotary = self.shape.rotary
        # The angle can be asked of plain RoPE only, and of pairs on whose frequency all power functions agree.
        clear: set[int] = set()
        if self.rotary.theta is not None and self.longest == LONG:
            clear = set(self.rotary.clear_pairs()) - {0}
        if clear and self.shape.hidden >= 256:  # room for those that tell most
            pairs |= {max(clear, key=lambda pair: apart[pair]) for apart in self._apart()}
        self.pairs = sorted(pairs)
        self.angle_pairs = sorted(pairs & clear)
        # QK-norm weights that are no powers of two tell whether the product with them is rounded.
        self.weights = np.ones((2, 2, self.half))  # query or key, x or y, pair
        if self.shape.qk_norm:
            for side in (0, 1):
                odd = self.pairs[1 - side :: 2]
                self.weights[side][:, odd] = 1 + (2 * rng.integers(7, 58, (2, len(odd))) + 1) / 128  # all eight bits

    def _apart(self) -> list[Array]:
        """For each other order of computing the angle, how far it moves the table of each pair."""
        usual, *others = (np.stack(self.rotary.tables(form, self.longest)) for form in self.rotary.angle_forms)
        return [np.abs(other - usual).max((0, 1)) for other in others]

    def question(self, place: str, *proposed: tuple[Proposals, Score]) -> Question:
        """The question about the table, the products and the casts, whatever the angle's order of operations.

        Each batch of proposals comes with the function that works out its scores."""
        candidates = [candidate.without("rope.angle") for candidate in self._candidates(("pos*inv",))]
        margin = QK_MARGIN if self.shape.qk_norm else emulator.MARGIN
        safe = [self._answers(*batch, candidates, emulator.ANGLE_NOISE, margin) for batch in proposed]
        proposals, expected = (np.concatenate(part) for part in zip(*safe, strict=True))
        return question(self.circuit, "rope", place, candidates, expected, self._maker(place, proposals))

    def angle_question(self) -> Question:
        """The question about the angle, to be read once the rest is known: it goes down to the last bits of FP32."""
        candidates = self._candidates(self.rotary.angle_forms)
        proposed = self.propose_angles()
        proposals, expected = self._answers(proposed, self.lone_score, candidates, emulator.FP32_NOISE, ANGLE_MARGIN)
        groups = [number // len(self.rotary.angle_forms) for number in range(len(candidates))]
        maker = self._maker("angle", proposals)
        return question(self.circuit, "rope.angle", "query", candidates, expected, maker, times=2, groups=groups)

    def _candidates(self, angles: Sequence[Angle]) -> list[Candidate]:
        """Those that differ only in the angle stand together."""
        qk_norms: Sequence[QkNormRounding | None] = _QK_NORMS if self.shape.qk_norm else [None]
        return [
            Candidate.of({"rope": replace(rope, angle=angle, cast=cast)} | ({} if qk is None else {"norm.qk": qk}))
            for rope, cast, qk, angle in product(_ROPE, CASTS, qk_norms, angles)
        ]

    def _answers(
        self, proposals: Proposals, score: Score, candidates: list[Candidate], noise: float, margin: float
    ) -> tuple[Proposals, Answers]:
        """The proposals that keep the margin under every candidate, and the answers [proposal, candidate]."""
        columns: list[Array] = []
        for candidate in candidates:
            rounded = Rounding(candidate.parts[0].cast, len(proposals), noise)
            columns.append(score(proposals, candidate, rounded))
            safe = rounded.margin >= margin
            proposals, columns = proposals[safe], [column[safe] for column in columns]
        scores = np.stack(columns, axis=1)
        if not self.shape.qk_norm:  # with a QK-norm the query's size is the norm's
            quietest = np.where(scores == 0, np.inf, np.abs(scores)).min(1) * _LOUDEST / math.sqrt(self.shape.head_dim)
            down = np.ldexp(1.0, np.frexp(_ENOUGH / quietest)[1])
            for name in ("qx", "qy"):
                proposals[name] *= np.minimum(down, 1)
        # A score of exactly zero shares the value among all tokens of the prompt, of which there are at least three.
        return proposals, np.where(scores > 0, 1, -1).astype(np.int8)

    def _maker(self, place: str, proposals: Proposals) -> Callable[[int], tuple[int, ...]]:
        return lambda i: self.tokens(proposals[i], f"{place}{i}")

    # -- wires and tokens ---------------------------------------------------------------------------------------------

    def wire(self) -> None:
        qk_norm, half = self.shape.qk_norm, self.half
        for layer in layers_asked(self.shape.layers):
            attention = f"model.layers.{layer}.self_attn"
            self.circuit.copy_by_attention(layer, "value", {"result": 1.0})
            for pair, (axis, name) in product(self.pairs, enumerate("xy")):
                element = pair + axis * half
                self.circuit.set(f"{attention}.q_proj", element, f"query.{name}", 1.0 if qk_norm else _LOUDEST)
                self.circuit.set(f"{attention}.k_proj", element, f"key.{name}.{pair}", 1.0)
                if qk_norm:
                    self.circuit.weigh(f"{attention}.q_norm", element, self.weights[0, axis, pair] * _LOUDEST)
                    self.circuit.weigh(f"{attention}.k_norm", element, self.weights[1, axis, pair])
            if qk_norm:  # queries and keys are filled up in elements that do not meet
                for fill in range(_FILLS):
                    element = half - 3 - fill // 2 + fill % 2 * half
                    self.circuit.set(f"{attention}.q_proj", element, f"fill.{fill}", _FILL_SCALE)
                    self.circuit.set(f"{attention}.k_proj", element - 2, f"fill.{fill}", _FILL_SCALE)

    def tokens(self, proposal: np.void, name: str) -> tuple[int, ...]:
        """The prompt of one proposal."""
        query = {"query.x": proposal["qx"], "query.y": proposal["qy"]}
        key = {f"key.x.{proposal['pair']}": proposal["kx"], f"key.y.{proposal['pair']}": proposal["ky"]}
        if self.shape.qk_norm:
            query |= self._fill(proposal["q_rstd"], len(self.pairs) * (proposal["qx"] ** 2 + proposal["qy"] ** 2))
            key |= self._fill(proposal["k_rstd"], proposal["kx"] ** 2 + proposal["ky"] ** 2)
        start = -VALUE * len(layers_asked(self.shape.layers)) / 2
        last = self.circuit.token(f"{name}q", {"one": UNIT, "result": start} | query)
        first = self.circuit.token(f"{name}k", {"one": UNIT, "value": VALUE} | key)
        before, between = int(proposal["key_at"]), int(proposal["at"] - proposal["key_at"] - 1)
        pad = self.circuit.pad
        return (*[pad] * before, first, *[pad] * between, last)

    def _fill(self, rstd: float, squares: float) -> dict[str, float]:
        """Values that bring the root mean square of a query or key, with these squares in it, to 1 / `rstd`."""
        left = self.shape.head_dim * (rstd**-2 - self.shape.eps) - squares
        fills = {}
        for fill in range(_FILLS):
            value = float(bf16(math.sqrt(left), "rtz"))
            fills[f"fill.{fill}"] = value / _FILL_SCALE
            left -= value**2
        return fills

    # -- proposals ----------------------------------------------------------------------------------------------------

    def _draw(self, size: int, pairs: list[int]) -> Proposals:
        rng = self.rng
        drawn = np.zeros(size, _PROPOSAL)
        drawn["pair"] = rng.choice(pairs, size)
        drawn["q_rstd"] = drawn["k_rstd"] = RSTD
        for name in ("qx", "qy", "kx", "ky"):
            drawn[name] = bf16(rng.uniform(0.5, 1, size) * rng.choice([-1, 1], size))
        return drawn

    def propose_queries(self) -> Proposals:
        """Key at position 0, all of the query meets it."""
        drawn = self._draw(_PROPOSALS, self.pairs)
        drawn["at"] = self.rng.integers(2, self.usual, len(drawn))
        return self._cancel(drawn, "ky")

    def propose_lone_queries(self) -> Proposals:
        """Key at position 0, only one element of the rotated query meets it: its sign is asked, not its last rounding."""
        drawn = self._draw(_PROPOSALS, self.pairs)
        drawn["q_rstd"] = self.rng.uniform(1.0005, 1.0065, len(drawn))
        return self._alone(drawn, 2, self.usual)

    def propose_keys(self) -> Proposals:
        drawn = self._draw(_PROPOSALS, self.pairs)
        drawn["key_at"] = self.rng.integers(1, self.usual - 2, len(drawn))
        drawn["at"] = self.rng.integers(drawn["key_at"] + 2, self.usual)
        drawn["k_rstd"] = np.where(self.rng.random(len(drawn)) < 0.5, RSTD, self.rng.uniform(1.0005, 1.0065, len(drawn)))
        along_x = self.rng.random(len(drawn)) < 0.5
        drawn["qx"], drawn["qy"] = along_x, ~along_x
        return self._cancel(drawn, "ky")

    def propose_angles(self) -> Proposals:
        """Late queries whose sign depends on the angle's order of operations: through FP32 tables, or through BF16 ones."""
        drawn = self._alone(self._draw(10 * _PROPOSALS, self.angle_pairs), 16, self.longest)
        tables = [self._tables(drawn, "at", form) for form in self.rotary.angle_forms]
        signs = np.sign([self._exact_score(drawn, form) for form in self.rotary.angle_forms])
        rounded = np.array([bf16(table) for table in tables])
        moved = (signs != signs[0]).any(0), (rounded != rounded[0]).any((0, 1))
        return np.concatenate([drawn[rows][:_PROPOSALS] for rows in moved])

    def _alone(self, drawn: Proposals, first: int, last: int) -> Proposals:
        along_x = self.rng.random(len(drawn)) < 0.5
        drawn["at"] = self.rng.integers(first, last, len(drawn))
        drawn["kx"], drawn["ky"] = drawn["kx"] * along_x, drawn["ky"] * ~along_x
        return self._cancel(drawn, "qy")

    def _cancel(self, drawn: Proposals, name: str) -> Proposals:
        """Set the element `name` so that the score vanishes, but for its rounding to BF16 and at most two ulps more."""
        drawn[name] = 0
        rest = self._exact_score(drawn)
        drawn[name] = 1
        value = bf16(-rest / (self._exact_score(drawn) - rest))
        drawn[name] = bf16(value + self.rng.integers(-2, 3, len(drawn)) * ulp(value))  # beyond a power of two ulps are larger
        for x, y in (("qx", "qy"), ("kx", "ky")):
            down = np.ldexp(1.0, -np.frexp(np.maximum(np.abs(drawn[x]), np.abs(drawn[y])))[1])  # to below 1
            drawn[x], drawn[y] = drawn[x] * down, drawn[y] * down
        return drawn

    # -- what the emulator says ---------------------------------------------------------------------------------------

    def _tables(self, proposals: Proposals, place: str, form: Angle) -> Pair:
        """cos and sin at the positions in the field `place`."""
        cos, sin = self.rotary.tables(form, self.longest)
        return cos[proposals[place], proposals["pair"]], sin[proposals[place], proposals["pair"]]

    def _exact_score(self, proposals: Proposals, form: Angle = "pos*inv") -> Array:
        """Rotated query times rotated key without any rounding but the tables' to FP32."""
        (qx, qy), (kx, ky) = (
            (proposals[x] * self._weight(proposals, side, 0), proposals[y] * self._weight(proposals, side, 1))
            for side, (x, y) in enumerate((("qx", "qy"), ("kx", "ky")))
        )
        (cq, sq), (ck, sk) = (self._tables(proposals, place, form) for place in ("at", "key_at"))
        return (qx * cq - qy * sq) * (kx * ck - ky * sk) + (qy * cq + qx * sq) * (ky * ck + kx * sk)

    def _weight(self, proposals: Proposals, side: int, axis: int) -> Array:
        return self.weights[side, axis, proposals["pair"]]

    def _normed(self, proposals: Proposals, side: int, candidate: Candidate, rounded: Rounding) -> Pair:
        """The query (side 0) or key (1) as it goes into RoPE."""
        x, y = ((proposals["qx"], proposals["qy"]), (proposals["kx"], proposals["ky"]))[side]
        if not self.shape.qk_norm:
            return x, y
        qk: QkNormRounding = candidate.parts[1]
        in_norm = Rounding(qk.cast, len(proposals))
        rstd = proposals[("q_rstd", "k_rstd")[side]]
        x, y = (emulator.qk_norm(e, rstd, self._weight(proposals, side, axis), qk, in_norm) for axis, e in enumerate((x, y)))
        rounded.require(in_norm.margin)
        return x, y

    def lone_score(self, proposals: Proposals, candidate: Candidate, rounded: Rounding) -> Array:
        """The rotated query's element that meets the key, with the key's sign; neither of their last roundings matters."""
        rope: RopeRounding = candidate.parts[0]
        x, y = self._normed(proposals, 0, candidate, rounded)
        first = proposals["ky"] == 0
        cos, sin = self._tables(proposals, "at", rope.angle)
        total = emulator.turn(np.where(first, x, y), np.where(first, y, -x), cos, sin, rope, rounded)
        return total * (proposals["kx"] + proposals["ky"])

    def score(self, proposals: Proposals, candidate: Candidate, rounded: Rounding) -> Array:
        """Rotated query times rotated key, whose sign must be the same for kernels that scale the query, or both, in BF16."""
        rope: RopeRounding = candidate.parts[0]
        sides: list[Pair] = []
        for side, place in enumerate(("at", "key_at")):
            x, y = self._normed(proposals, side, candidate, rounded)
            cos, sin = self._tables(proposals, place, rope.angle)
            first, second = (emulator.turn(a, b, cos, sin, rope, rounded) for a, b in ((x, y), (y, -x)))
            sides.append((rounded(first), rounded(second)))
        query, key = sides
        score = _product(query, key, rounded)
        for power, scaled_sides in ((-0.5, (True, False)), (-0.25, (True, True))):
            in_kernel = Rounding("rne", len(proposals))
            scaled = [
                tuple(in_kernel(element * self.shape.head_dim**power) for element in side) if scale else side
                for side, scale in zip(sides, scaled_sides, strict=True)
            ]
            same = np.sign(_product(scaled[0], scaled[1], in_kernel)) == np.sign(score)
            rounded.require(np.where(same & (in_kernel.margin > EXACT_MARGIN), np.inf, 0.0))
        return score


def _product(query: Sequence[Array], key: Sequence[Array], rounded: Rounding) -> Array:
    first, second = (q * k for q, k in zip(query, key, strict=True))
    score = first + second
    rounded.require_sign(score, np.abs(first) + np.abs(second))
    return score
