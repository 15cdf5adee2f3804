"""Memory layouts of what the fused kernels read and write: rows whose elements follow each other."""

from __future__ import annotations

import torch
from torch import Tensor


def whole_rows(x: Tensor) -> Tensor:
    """`x`, or a contiguous copy of it if its rows are not in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor laid out like `x`, if that leaves rows in one piece; otherwise contiguous."""
    out = torch.empty_like(x, dtype=dtype)
    return out if out.stride(-1) == 1 else out.contiguous()


def contiguous_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty contiguous tensor, laid out like `x` down to its unit dimensions if `x` is contiguous too."""
    return torch.empty_like(x, dtype=dtype) if x.is_contiguous() else x.new_empty(x.shape, dtype=dtype)


def laid_out_like(x: Tensor, out: Tensor) -> Tensor:
    """`out` in the layout that `torch.empty_like(x)` has, which is what the fake kernels promise the compiler."""
    if x.is_contiguous() and out.is_contiguous():
        return out
    wanted = torch.empty_like(x, dtype=out.dtype)
    return out if wanted.stride() == out.stride() else wanted.copy_(out)
