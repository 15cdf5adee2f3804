"""What tests of the ops ask of tensors: random ones, bit patterns, equality of bits and layout, agreement with the oracle."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import oracle

FORMATS = {torch.bfloat16: oracle.BF16, torch.float16: oracle.FP16}


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def f32(x: Tensor) -> np.ndarray:
    return x.float().numpy()


def pattern(x: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Bit patterns, every NaN the same."""
    assert x.dtype == dtype
    out = x.contiguous().view(torch.int16).numpy().view(np.uint16)
    return np.where(np.isnan(f32(x)), np.uint16(FORMATS[dtype].nan), out)


def same(mine: Tensor | tuple[Tensor, ...], theirs: Tensor | tuple[Tensor, ...]) -> bool:
    """Equal bits (a zero's sign too) and dtype, any NaN equal to any other."""
    if isinstance(mine, tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    assert isinstance(theirs, Tensor)
    assert mine.dtype == theirs.dtype
    assert mine.shape == theirs.shape
    integer = {2: torch.int16, 4: torch.int32}[mine.element_size()]
    bits = [t.contiguous().view(integer) for t in (mine, theirs)]
    return bool(((bits[0] == bits[1]) | (mine.isnan() & theirs.isnan())).all())


def same_layout(mine: Tensor | tuple[Tensor, ...], theirs: Tensor | tuple[Tensor, ...]) -> bool:
    """Equal strides, where there is a step to take: PyTorch gives a dimension of one element any stride."""
    if isinstance(mine, tuple):
        return all(map(same_layout, mine, theirs))
    assert isinstance(theirs, Tensor)
    strides = [[stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (mine, theirs)]
    return mine.numel() <= 1 or strides[0] == strides[1]


def assert_gated(actual: Tensor, gate: Tensor, up: Tensor, act: str, code: str, cast: str, freedom: int) -> np.ndarray:
    """Each element has the oracle's bits, or some that a transcendental moved by `freedom` FP32 ulps would give.

    Returns which elements have not the bits of the correctly rounded transcendental.
    """
    fmt = FORMATS[gate.dtype]
    low, exact, high = (oracle.gated_act(f32(gate), f32(up), act, code, fmt, cast, n) for n in (-freedom, 0, freedom))
    got = pattern(actual, gate.dtype)
    bounds, value = [oracle.values(bits, fmt) for bits in (low, high)], oracle.values(got, fmt)
    assert np.all((got == exact) | ((np.minimum(*bounds) <= value) & (value <= np.maximum(*bounds))))
    return got != exact
