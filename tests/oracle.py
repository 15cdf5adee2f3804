"""An independent oracle for the three operations: NumPy, rounding done on integer bit patterns.

Shares no code with `tripoint.ops`: no torch rounding, no torch arithmetic, formulas written out again from the rounding
points of each code (R1..R4, S1, S3, S5, N1..N5). Arrays hold values (float32 or float64); `bits` gives a value's pattern in a
16-bit format. Where FP32 itself leaves room (the last bits of exp, erf and tanh, the order of a sum), the oracle takes the
quantity in question as an argument (`nudge`, `rstd`), so that a test can say how much room there was and bind the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bits = NDArray[np.uint16]


@dataclass(frozen=True)
class Format:
    """A 16-bit floating-point format: bits of significand (the hidden one included) and of exponent."""

    precision: int
    exponent_bits: int

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def infinity(self) -> int:
        return (2**self.exponent_bits - 1) << (self.precision - 1)

    @property
    def nan(self) -> int:
        return self.infinity | 1 << (self.precision - 2)


BF16 = Format(precision=8, exponent_bits=8)
FP16 = Format(precision=11, exponent_bits=5)


def bits(x: F32 | F64, fmt: Format, cast: str) -> Bits:
    """The pattern of each value, rounded once to nearest even (`rne`) or toward zero (`rtz`); every NaN is one pattern."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        pattern = np.asarray(x, np.float64).view(np.uint64)
    sign = pattern >> np.uint64(63)
    field = ((pattern >> np.uint64(52)) & np.uint64(0x7FF)).astype(np.int64)
    significand = (pattern & np.uint64(2**52 - 1)).astype(np.int64) + np.where(field > 0, 2**52, 0)
    exponent = np.maximum(field, 1) - 1023
    # Low bits that do not fit, more of them below the normal range; 60 is as good as any larger number.
    drop = np.minimum(53 - fmt.precision + np.maximum(fmt.emin - exponent, 0), 60)
    kept, rest, half = significand >> drop, significand & ((1 << drop) - 1), 1 << (drop - 1)
    if cast == "rne":
        kept = kept + ((rest > half) | ((rest == half) & (kept % 2 == 1)))
    # A carry out of the significand moves into the exponent by itself.
    magnitude = ((np.maximum(exponent, fmt.emin) - fmt.emin) << (fmt.precision - 1)) + kept
    magnitude = np.minimum(magnitude, fmt.infinity if cast == "rne" else fmt.infinity - 1)
    magnitude = np.where(np.isinf(x), fmt.infinity, magnitude)
    return np.where(np.isnan(x), fmt.nan, (sign.astype(np.int64) << 15) | magnitude).astype(np.uint16)


def values(pattern: Bits, fmt: Format) -> F64:
    """The value of each pattern."""
    magnitude = (pattern & np.uint16(0x7FFF)).astype(np.int64)
    field = magnitude >> (fmt.precision - 1)
    significand = (magnitude & (2 ** (fmt.precision - 1) - 1)) + np.where(field > 0, 2 ** (fmt.precision - 1), 0)
    finite = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) + fmt.emin - fmt.precision)
    out = np.where(magnitude < fmt.infinity, finite, np.where(magnitude == fmt.infinity, np.inf, np.nan))
    return np.where(pattern >> 15 == 1, -out, out)


def rounded(x: F32 | F64, fmt: Format, cast: str) -> F32:
    """The values of `x` after one rounding (both formats fit into FP32)."""
    return values(bits(x, fmt, cast), fmt).astype(np.float32)


def fma_bits(a: F32, b: F32, c: F32, fmt: Format, cast: str) -> Bits:
    """a * b + c with one rounding, in exact rational arithmetic where it is finite."""

    def one(a: float, b: float, c: float) -> int:
        approximate = np.float64(a) * np.float64(b) + np.float64(c)
        if not np.isfinite(approximate) or not math.isfinite(a) or not math.isfinite(b):
            return int(bits(approximate, fmt, cast))
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact == 0:
            return int(bits(approximate, fmt, cast))
        sign, exact = exact < 0, abs(exact)
        exponent = max(exact.numerator.bit_length() - exact.denominator.bit_length(), fmt.emin)
        if exponent > fmt.emin and exact < Fraction(2) ** exponent:
            exponent -= 1
        scaled = exact / Fraction(2) ** (exponent - fmt.precision + 1)
        kept = round(scaled) if cast == "rne" else math.floor(scaled)  # Python rounds ties to even
        magnitude = ((exponent - fmt.emin) << (fmt.precision - 1)) + kept
        return sign << 15 | min(magnitude, fmt.infinity if cast == "rne" else fmt.infinity - 1)

    with np.errstate(all="ignore"):
        broadcast = np.broadcast_arrays(a, b, c)
        flat = [one(*triple) for triple in zip(*(array.ravel().tolist() for array in broadcast), strict=True)]
    return np.array(flat, np.uint16).reshape(broadcast[0].shape)


def rope(x: F32, cos: F32, sin: F32, code: str, fmt: Format, cast: str) -> Bits:
    """Pattern of `x` [..., head_dim] rotated, halves paired. Tables are FP32 of full head_dim."""
    if code != "R4":
        cos, sin = rounded(cos, fmt, cast), rounded(sin, fmt, cast)
    half = x.shape[-1] // 2
    partner = np.concatenate((-x[..., half:], x[..., :half]), axis=-1)
    with np.errstate(all="ignore"):
        if code == "R1":
            return bits(rounded(x * cos, fmt, cast) + rounded(partner * sin, fmt, cast), fmt, cast)
        if code == "R2":
            return fma_bits(x, cos, rounded(partner * sin, fmt, cast), fmt, cast)
        return bits(x * cos + partner * sin, fmt, cast)


def _moved(x: F64, ulps: int) -> F32:
    """FP64 values as FP32, moved by some units in the last place: what another exp, erf or tanh may return."""
    out = x.astype(np.float32)
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(out), out + np.float32(ulps) * np.spacing(np.abs(out)), out).astype(np.float32)


def _activation(x: F32, act: str, nudge: int) -> F32:
    wide = x.astype(np.float64)
    one, half = np.float32(1), np.float32(0.5)
    if act == "silu":
        return x / (one + _moved(np.exp(-wide), nudge))
    if act == "gelu":
        inner = np.vectorize(math.erf, otypes=[np.float64])(wide / math.sqrt(2))
    else:
        inner = np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    # A kernel that fuses x * (1 + inner) may miss the last bit or two of the product as well.
    return half * x * (one + _moved(inner, nudge)) * np.float32(1 + np.sign(nudge) * 2.0**-22)


def gated_act(gate: F32, up: F32, act: str, code: str, fmt: Format, cast: str, nudge: int = 0) -> Bits:
    """Pattern of act(gate) * up; the transcendental moved by `nudge` FP32 units in the last place."""
    with np.errstate(all="ignore"):
        if code == "S5":
            one = np.float32(1)
            exp = rounded(_moved(np.exp(np.abs(gate).astype(np.float64)), nudge), fmt, cast)
            reciprocal = rounded(one / rounded(one + exp, fmt, cast), fmt, cast)
            sigmoid = np.where(gate < 0, reciprocal, rounded(one - reciprocal, fmt, cast))
            activated = rounded(gate * sigmoid, fmt, cast)
        else:
            activated = _activation(gate, act, nudge)
            if code == "S1":
                activated = rounded(activated, fmt, cast)
        return bits(activated * up, fmt, cast)


@dataclass(frozen=True)
class Norm:
    """What one residual + RMSNorm site gives: the output before its last rounding, the FP32 sum, and 1/rms in FP64."""

    out: F32
    total: F32
    rstd: F64


def add_rms_norm(
    x: F32, residual: F32 | None, weight: F32, eps: float, code: str, fmt: Format, cast: str, rstd: F32 | None = None
) -> Norm:
    """RMSNorm of `x + residual` [..., hidden]. With `rstd` [..., 1] given, every later bit is determined."""
    with np.errstate(all="ignore"):
        total = x if residual is None else x + residual
        stored = rounded(total, fmt, cast)
        seen_by_var = stored if code in ("N1", "N2") else total
        seen_by_norm = total if code in ("N3", "N4") else stored
        exact = 1 / np.sqrt(np.mean(seen_by_var.astype(np.float64) ** 2, axis=-1, keepdims=True) + eps)
        normalised = seen_by_norm * (exact.astype(np.float32) if rstd is None else rstd)
        if code in ("N1", "N4"):
            normalised = rounded(normalised, fmt, cast)
        return Norm(normalised * weight, total, exact)
