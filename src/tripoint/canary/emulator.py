"""What the tested values become under every candidate rounding, with how near each rounding came to its boundary.

This shares no code with `tripoint.ops`: BF16 numbers are multiples of a power of two in FP64, and everything between two
roundings is computed in FP64. Where real arithmetic is FP32 the difference is below a thousandth of a BF16 ulp, and inputs
are only used if every rounding keeps `MARGIN` away from its boundary; only the RoPE angle is computed in FP32, whose order
of operations is one of the questions.

All functions work on arrays, one element per proposed input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from tripoint.schedule import Angle, NormRounding, QkNormRounding, RopeRounding, SwigluRounding

Array = NDArray[np.float64]

MARGIN = 0.04
"""Least distance, in BF16 ulps, of a value from the boundary at which it would round differently."""

FP32_NOISE = 4e-7
"""Bound on the relative error of an FP32 sum of two products whose factors carry an error of their own."""

ANGLE_NOISE = 1e-5
"""The same where the angle (some tens of radians) may have been computed in any order of FP32 operations."""


def bf16(x: Any, cast: str = "rne") -> Array:
    """The nearest BF16 numbers (`rne`, ties to even), or the next ones toward zero (`rtz`)."""
    mantissa, exponent = np.frexp(np.asarray(x, dtype=np.float64))
    scaled = mantissa * 256.0
    return np.ldexp(np.rint(scaled) if cast == "rne" else np.trunc(scaled), exponent - 8)


def ulp(x: Any) -> Array:
    """The distance between BF16 numbers around x."""
    return np.ldexp(1.0, np.frexp(np.asarray(x, dtype=np.float64))[1] - 8)


class Rounding:
    """Rounds to BF16 like `bf16`; `margin` is the least distance from a boundary so far, in ulps, per element.

    `noise` is the relative error that a difference of two products may have without changing its sign."""

    def __init__(self, cast: str, size: int, noise: float = ANGLE_NOISE) -> None:
        self.cast = cast
        self.noise = noise
        self.margin = np.full(size, np.inf)

    def __call__(self, x: Array) -> Array:
        scaled = np.frexp(x)[0] * 256.0
        fraction = scaled - np.floor(scaled)
        if self.cast == "rne":
            distance = np.abs(fraction - 0.5)
        else:  # a number that needs no rounding cannot be rounded wrongly
            distance = np.where(fraction == 0, np.inf, np.minimum(fraction, 1 - fraction))
        self.require(distance)
        return bf16(x, self.cast)

    def require(self, distance: Array) -> None:
        np.minimum(self.margin, distance, out=self.margin)

    def require_sign(self, x: Array, scale: Array) -> None:
        """The sign of x, a difference of numbers that add up to `scale`, must survive FP32 arithmetic; an exact 0 does."""
        self.require(np.where((np.abs(x) > self.noise * scale) | (x == 0), np.inf, 0.0))


# -- RoPE and QK-norm -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rotary:
    """Frequencies of the rotary pairs in radians per position, FP32; `scaling` of cos and sin; `theta` of plain RoPE only."""

    head_dim: int
    theta: float | None
    inv_freq: tuple[float, ...]
    scaling: float = 1.0

    @classmethod
    def plain(cls, head_dim: int, theta: float) -> Rotary:
        return cls(head_dim, theta, tuple(np.float32(1) / _powers(theta, head_dim).astype(np.float32)))

    @property
    def angle_forms(self) -> tuple[Angle, ...]:
        return ("pos*inv",) if self.theta is None else get_args(Angle)

    def clear_pairs(self) -> list[int]:
        """The pairs to which every sound FP32 function gives the same powers: those not near an FP32 rounding boundary."""
        assert self.theta is not None
        exact = np.stack([_powers(self.theta, self.head_dim), _negative_powers_of_2(self.theta, self.head_dim)])
        fraction = exact / np.spacing(exact.astype(np.float32)) % 1
        return [int(pair) for pair in np.flatnonzero((np.abs(fraction - 0.5) > 0.15).all(0))]

    @cache  # noqa: B019 (a handful of instances)
    def tables(self, form: Angle, positions: int) -> tuple[Array, Array]:
        """cos and sin [position, pair] as FP32 numbers, for positions 0 to `positions` - 1."""
        angles = self._angles(form, np.arange(positions, dtype=np.float32)[:, None]).astype(np.float64)
        scaling = np.float32(self.scaling)
        cos, sin = (f(angles).astype(np.float32) * scaling for f in (np.cos, np.sin))
        return cos.astype(np.float64), sin.astype(np.float64)

    def _angles(self, form: Angle, position: NDArray[np.float32]) -> NDArray[Any]:
        if form == "pos*inv":
            return position * np.array(self.inv_freq, dtype=np.float32)
        assert self.theta is not None
        if form == "pos/timescale":
            return position / _powers(self.theta, self.head_dim).astype(np.float32)
        if form == "exp2":
            return position * _negative_powers_of_2(self.theta, self.head_dim).astype(np.float32)
        step = np.float32(self.theta ** float(np.float32(-2.0 / self.head_dim)))
        columns: list[NDArray[np.float32]] = [position]
        while len(columns) < self.head_dim // 2:
            columns.append(columns[-1] * step)
        return np.hstack(columns)


def _powers(theta: float, head_dim: int) -> Array:
    """theta^(2j / head_dim), exact but for the rounding of the exponent to FP32."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float64(theta) ** exponent.astype(np.float64)


def _negative_powers_of_2(theta: float, head_dim: int) -> Array:
    """2^(-(2j / head_dim) log2(theta)), exact but for the FP32 exponent."""
    half = head_dim // 2
    log2 = np.float32(math.log2(theta))
    return np.exp2(-(np.arange(half, dtype=np.float32) / np.float32(half) * log2).astype(np.float64))


def turn(x: Array, y: Array, cos: Array, sin: Array, rope: RopeRounding, rounded: Rounding) -> Array:
    """The first element of the pair (x, y) after rotation, before its last rounding; cos and sin are FP32 numbers.

    The second element is the first of the pair (y, -x).
    """
    if rope.table == "bf16":
        cos, sin = rounded(cos), rounded(sin)
    with_cos, with_sin = x * cos, y * sin
    if rope.compute == "bf16":
        with_cos = rounded(with_cos)
    if rope.compute in ("bf16", "bf16_fma"):
        with_sin = rounded(with_sin)
    total = with_cos - with_sin
    rounded.require_sign(total, np.abs(with_cos) + np.abs(with_sin))
    return total


def qk_norm(x: Array, rstd: Array, weight: Array, qk: QkNormRounding, rounded: Rounding) -> Array:
    """One element of a QK-norm whose reciprocal root mean square is known."""
    normalised = x * rstd
    if qk.norm_round:
        normalised = rounded(normalised)
    out = normalised * weight
    return rounded(out) if qk.out_round else out


# -- SwiGLU and GeGLU -------------------------------------------------------------------------------------------------


def gated_act(gate: Array, up: Array, act: str, swiglu: SwigluRounding, rounded: Rounding) -> Array:
    """act(gate) * up. `sig=bf16` follows MLX's Sigmoid, in which every step is rounded."""
    if swiglu.sig == "bf16":
        y = rounded(1.0 / rounded(1.0 + rounded(np.exp(np.abs(gate)))))
        activated = gate * np.where(gate < 0, y, rounded(1.0 - y))
    else:
        activated = ACTIVATIONS[act](gate)
    if swiglu.silu_round:
        activated = rounded(activated)
    return rounded(activated * up)


_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str, Any] = {
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
}


# -- residual + RMSNorm -----------------------------------------------------------------------------------------------


def rms_norm(value: Array, weight: float, mean_square: tuple[Array, Array], norm: NormRounding, rounded: Rounding) -> Array:
    """One element of a norm. `value` is its residual sum, `mean_square` that of the exact and of the rounded sums, plus eps."""
    exact, of_rounded = mean_square
    seen = value if norm.sum_round == "never" else rounded(value)
    normalised = seen / np.sqrt(of_rounded if norm.sum_round == "before_var" else exact)
    if norm.norm_round:
        normalised = rounded(normalised)
    return rounded(normalised * weight)
