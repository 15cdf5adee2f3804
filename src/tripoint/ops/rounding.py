"""Rounding to the compute dtype, said explicitly: the one place where the reference ops lose bits.

Everything here works on values: a rounded tensor is returned in FP32, holding numbers the compute dtype can represent,
so that the ops read as FP32 formulas with a `round_to` wherever a stack rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cast_to(x: Tensor, dtype: torch.dtype, cast: str) -> Tensor:
    """`x` (FP32 or FP64) in `dtype` (BF16, FP16 or FP32), rounded once: to nearest even (`rne`) or toward zero (`rtz`)."""
    if x.dtype == torch.float64:
        x = _to_odd_fp32(x)
    y = x.to(dtype)
    if cast == "rtz" and dtype != torch.float32:
        # Sign and magnitude: one less in the bit pattern is the neighbour toward zero (infinity becomes the largest
        # finite number).
        overshoot = y.float().abs() > x.abs()
        y = (y.view(torch.int16) - overshoot.to(torch.int16)).view(dtype)
    return y


def round_to(x: Tensor, dtype: torch.dtype, cast: str) -> Tensor:
    """The values of `x` rounded to `dtype`, returned in FP32."""
    return cast_to(x, dtype, cast).float()


def cast_like(x: Tensor, template: Tensor, dtype: torch.dtype, cast: str) -> Tensor:
    """`cast_to` into a new tensor laid out in memory like `template`, which is what the fake kernels promise the compiler."""
    return torch.empty_like(template, dtype=dtype).copy_(cast_to(x, dtype, cast))


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """`x * y + z` in FP64, rounded to odd: rounded once more, it is what a fused multiply-add gives.

    The product has to be exact in FP64: at most 53 bits of significand in `x` and `y` together.
    """
    product, z = x.double() * y.double(), z.double()
    total = product + z
    # What the addition lost, exactly (Knuth, TwoSum).
    back = total - product
    lost = (product - (total - back)) + (z - back)
    inexact = lost.abs() > 0
    toward_zero = total.view(torch.int64) - (inexact & ((lost < 0) != (total < 0))).to(torch.int64)
    return (toward_zero | inexact.to(torch.int64)).view(torch.float64)


def _to_odd_fp32(x: Tensor) -> Tensor:
    """FP64 to FP32 rounded to odd: a later rounding to 8 or 11 bits is then as if done once, from FP64.

    Torch converts FP64 to BF16 through FP32 with two roundings to nearest, which is wrong next to ties.
    """
    y = x.float()
    inexact = y.double() != x
    toward_zero = y.view(torch.int32) - (inexact & (y.double().abs() > x.abs())).to(torch.int32)
    return (toward_zero | inexact.to(torch.int32)).view(torch.float32)
