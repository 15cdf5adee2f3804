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
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tripoint.canary import emulator
from tripoint.canary.circuit import RSTD, UNIT, Circuit
from tripoint.canary.emulator import Array, Rotary, Rounding, bf16, ulp
from tripoint.canary.questions import CASTS, PROPOSALS, Answers, Candidate, Question, question
from tripoint.schedule import Angle, QkNormRounding, RopeRounding

SHORT, LONG = 24, 256  # prompt lengths, of most prompts and of those that ask for the angle
VALUE = 1 / 32  # what the key token's value adds to `result`, too little to move its mean square

_LOUDEST = 2.0**36  # scale of the query: the smallest score asked about must overwhelm softmax
_ENOUGH = 2.0**10
_FILLS, _FILL_SCALE = 4, 16.0
ANGLE_MARGIN = 7e-4  # ulps: 2.5e-6, as an error of the angle is no error of reduction order
_TABLES = [("bf16", "bf16"), ("bf16", "bf16_fma"), ("bf16", "fp32"), ("fp32", "fp32")]
_QK_NORMS = [QkNormRounding(n, o, c) for n, o, c in product((True, False), (True, False), CASTS) if n or o or c == "rne"]

# A query at position `at` and a key at position `key_at`, both in rotary pair `pair`, as the projections put them out.
_PROPOSAL = np.dtype([("pair", int), ("at", int), ("key_at", int), *((name, float) for name in ("qx", "qy", "kx", "ky"))])
Proposals = NDArray[np.void]
Pair = tuple[Array, Array]


def layers_asked(layers: int) -> list[int]:
    """RoPE is asked in the first and the last layer at once; where they disagree the answer is "equal"."""
    return sorted({0, layers - 1})


def rope(circuit: Circuit, rng: np.random.Generator) -> list[Question]:
    """What happens to queries and to keys."""
    bench = _Bench(circuit, rng)
    bench.wire()
    queries = np.concatenate([bench.propose_queries(alone=True), bench.propose_queries(alone=False)])
    questions = [bench.question("query", queries), bench.question("key", bench.propose_keys())]
    if bench.rotary.theta is not None and bench.longest == LONG:
        questions.append(bench.angle_question())
    return questions


class _Bench:
    """One canary's RoPE: the wires, the proposals and what the emulator says to them."""

    def __init__(self, circuit: Circuit, rng: np.random.Generator) -> None:
        self.circuit, self.rng, self.shape = circuit, rng, circuit.shape
        self.half = self.shape.head_dim // 2
        fast = 8 if self.shape.hidden >= 128 else 3
        self.pairs = sorted({*range(fast), self.half // 4, self.half // 2})
        self.longest = min(LONG, self.shape.max_positions - 2)
        self.rotary = self.shape.rotary
        # QK-norm weights that are no powers of two tell whether the product with them is rounded.
        self.weights = np.ones((2, 2, self.half))  # query or key, x or y, pair
        if self.shape.qk_norm:
            odd = self.pairs[1::2]
            self.weights[:, :, odd] = bf16(rng.uniform(1.1, 1.9, (2, 2, len(odd))))

    def question(self, place: str, proposals: Proposals) -> Question:
        """The question about the table, the products and the casts, whatever the angle's order of operations."""
        candidates = [candidate.without("rope.angle") for candidate in self._candidates(("pos*inv",))]
        expected, margin = self._answers(proposals, candidates, emulator.ANGLE_NOISE)
        return question(self.circuit, "rope", place, candidates, expected, margin, self._maker(place, proposals))

    def angle_question(self) -> Question:
        """The question about the angle, to be read once the rest is known: it goes down to the last bits of FP32."""
        proposals = self.propose_angles()
        candidates = self._candidates(self.rotary.angle_forms)
        expected, margin = self._answers(proposals, candidates, emulator.FP32_NOISE)
        margin = margin * (emulator.MARGIN / ANGLE_MARGIN)
        groups = [number // len(self.rotary.angle_forms) for number in range(len(candidates))]
        maker = self._maker("angle", proposals)
        return question(self.circuit, "rope.angle", "angle", candidates, expected, margin, maker, 2, groups)

    def _candidates(self, angles: Sequence[Angle]) -> list[Candidate]:
        """Those that differ only in the angle stand together."""
        qk_norms: Sequence[QkNormRounding | None] = _QK_NORMS if self.shape.qk_norm else [None]
        return [
            Candidate.of({"rope": RopeRounding(table, compute, angle, cast)} | ({} if qk is None else {"norm.qk": qk}))
            for (table, compute), cast, qk, angle in product(_TABLES, CASTS, qk_norms, angles)
        ]

    def _answers(self, proposals: Proposals, candidates: list[Candidate], noise: float) -> tuple[Answers, Array]:
        """The answers [proposal, candidate] and the least margin of each proposal. Scales queries that are loud enough down."""
        scores, margin = np.empty((len(proposals), len(candidates))), np.full(len(proposals), np.inf)
        for column, candidate in enumerate(candidates):
            scores[:, column], safe = self._scores(proposals, candidate, noise)
            np.minimum(margin, safe, out=margin)
        if not self.shape.qk_norm:
            quietest = np.maximum(np.abs(scores).min(1), 1e-12) * _LOUDEST / math.sqrt(self.shape.head_dim)
            down = np.ldexp(1.0, np.minimum(0, np.frexp(_ENOUGH / quietest)[1]))
            proposals["qx"], proposals["qy"] = proposals["qx"] * down, proposals["qy"] * down
        return np.sign(scores).astype(np.int8), margin

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
            query |= self._fill(len(self.pairs) * (proposal["qx"] ** 2 + proposal["qy"] ** 2))
            key |= self._fill(proposal["kx"] ** 2 + proposal["ky"] ** 2)
        start = -VALUE * len(layers_asked(self.shape.layers)) / 2
        last = self.circuit.token(f"{name}q", {"one": UNIT, "result": start} | query)
        first = self.circuit.token(f"{name}k", {"one": UNIT, "value": VALUE} | key)
        before, between = int(proposal["key_at"]), int(proposal["at"] - proposal["key_at"] - 1)
        pad = self.circuit.pad
        return (*[pad] * before, first, *[pad] * between, last)

    def _fill(self, squares: float) -> dict[str, float]:
        """Values that bring the root mean square of a query or key to 1 / RSTD."""
        left = self.shape.head_dim * (RSTD**-2 - self.shape.eps) - squares
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
        for name in ("qx", "qy", "kx", "ky"):
            drawn[name] = bf16(rng.uniform(0.5, 1, size) * rng.choice([-1, 1], size))
        return drawn

    def propose_queries(self, alone: bool) -> Proposals:
        """Key at position 0. `alone`: only one element of the rotated query meets the key."""
        drawn = self._draw(PROPOSALS, self.pairs)
        drawn["at"] = self.rng.integers(2, SHORT, len(drawn))
        if alone:
            drawn[self.rng.choice(["kx", "ky"])] = 0
            return self._cancel(drawn, "qy")
        return self._cancel(drawn, "ky")

    def propose_keys(self) -> Proposals:
        drawn = self._draw(2 * PROPOSALS, self.pairs)
        drawn["key_at"] = self.rng.integers(1, SHORT - 2, len(drawn))
        drawn["at"] = self.rng.integers(drawn["key_at"] + 2, SHORT)
        along_x = self.rng.random(len(drawn)) < 0.5
        drawn["qx"], drawn["qy"] = along_x, ~along_x
        return self._cancel(drawn, "ky")

    def propose_angles(self) -> Proposals:
        """Late queries whose sign depends on the angle's order of operations: through FP32 tables, or through BF16 ones."""
        unweighed = self.pairs[::2] if self.shape.qk_norm else self.pairs
        drawn = self._draw(50 * PROPOSALS, [pair for pair in unweighed if pair and _power_is_clear(self.rotary, pair)])
        drawn["at"] = self.rng.integers(16, self.longest, len(drawn))
        drawn["ky"] = 0
        drawn = self._cancel(drawn, "qy")
        tables = [self._tables(drawn, "at", form) for form in self.rotary.angle_forms]
        signs = np.sign([self._exact_score(drawn, form) for form in self.rotary.angle_forms])
        rounded = np.array([bf16(table) for table in tables])
        moved = (signs != signs[0]).any(0), (rounded != rounded[0]).any((0, 1))
        return np.concatenate([drawn[rows][:PROPOSALS] for rows in moved])

    def _cancel(self, drawn: Proposals, name: str) -> Proposals:
        """Set the element `name` so that the score vanishes, but for its rounding to BF16 and at most two ulps more."""
        drawn[name] = 0
        rest = self._exact_score(drawn)
        drawn[name] = 1
        value = bf16(-rest / (self._exact_score(drawn) - rest))
        drawn[name] = value + self.rng.integers(-2, 3, len(drawn)) * ulp(value)
        for x, y in (("qx", "qy"), ("kx", "ky")):  # to at most 1
            scale = np.ldexp(1.0, -np.frexp(np.maximum(np.abs(drawn[x]), np.abs(drawn[y])))[1])
            drawn[x], drawn[y] = drawn[x] * scale, drawn[y] * scale
        return drawn

    # -- what the emulator says ---------------------------------------------------------------------------------------

    def _tables(self, proposals: Proposals, place: str, form: str) -> Pair:
        """cos and sin at the positions in the field `place`."""
        cos, sin = self.rotary.tables(form, self.longest)
        return cos[proposals[place], proposals["pair"]], sin[proposals[place], proposals["pair"]]

    def _exact_score(self, proposals: Proposals, form: str = "pos*inv") -> Array:
        """Rotated query times rotated key without any rounding but the tables' to FP32."""
        qx, qy, kx, ky = self._weighed(proposals)
        (cq, sq), (ck, sk) = (self._tables(proposals, place, form) for place in ("at", "key_at"))
        return (qx * cq - qy * sq) * (kx * ck - ky * sk) + (qy * cq + qx * sq) * (ky * ck + kx * sk)

    def _weighed(self, proposals: Proposals) -> list[Array]:
        """The elements times the weights of the QK-norms."""
        return [
            proposals[name] * self.weights[i // 2, i % 2, proposals["pair"]] for i, name in enumerate(("qx", "qy", "kx", "ky"))
        ]

    def _scores(self, proposals: Proposals, candidate: Candidate, noise: float) -> tuple[Array, Array]:
        """The score under one candidate, and the margin of its sign."""
        rope: RopeRounding = candidate.parts[0]
        rounded = Rounding(rope.cast, len(proposals), noise)
        elements = [proposals[name] for name in ("qx", "qy", "kx", "ky")]
        if self.shape.qk_norm:
            qk: QkNormRounding = candidate.parts[1]
            in_norm = Rounding(qk.cast, len(proposals))
            elements = [
                emulator.qk_norm(x, RSTD, self.weights[i // 2, i % 2, proposals["pair"]], qk, in_norm)
                for i, x in enumerate(elements)
            ]
            rounded.require(in_norm.margin)
        query, key = (
            emulator.rotate(x, y, *self._tables(proposals, place, rope.angle), rope, rounded)
            for x, y, place in (elements[:2] + ["at"], elements[2:] + ["key_at"])
        )
        score = _product(query, key, rounded)
        # Attention kernels may scale the query, or both sides, in BF16 first.
        for power, sides in ((-0.5, 1), (-0.25, 2)):
            prescaled = Rounding("rne", len(proposals))
            scaled = [tuple(prescaled(x * self.shape.head_dim**power) for x in side) for side in (query, key)[:sides]]
            other = _product(scaled[0], scaled[-1] if sides == 2 else key, prescaled)
            both = (query[0] * key[0] != 0) & (query[1] * key[1] != 0)  # a single product keeps its sign
            rounded.require(np.where(both, prescaled.margin, np.inf))
            rounded.require(np.where(np.sign(other) == np.sign(score), np.inf, 0.0))
        return score, rounded.margin


def _product(query: Pair, key: Pair, rounded: Rounding) -> Array:
    score = query[0] * key[0] + query[1] * key[1]
    rounded.require_sign(score, np.abs(query[0] * key[0]) + np.abs(query[1] * key[1]))
    rounded.require(np.where(score == 0, 0.0, np.inf))
    return score


def _power_is_clear(rotary: Rotary, pair: int) -> bool:
    """Whether every sound FP32 power function gives this pair the same timescale."""
    assert rotary.theta is not None
    exact = float(rotary.theta) ** float(np.float32(2 * pair) / np.float32(rotary.head_dim))
    fraction = exact / float(np.spacing(np.float32(exact))) % 1
    return abs(fraction - 0.5) > 0.1
