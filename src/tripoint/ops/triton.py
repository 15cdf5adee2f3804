"""The ops on GPUs: launches the Triton kernels, which must not contract multiply-adds.

Under Triton's interpreter (`TRITON_INTERPRET=1`) they run on CPU tensors too, slowly: for tests.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tripoint.ops import reference
from tripoint.ops import triton_kernels as kernels
from tripoint.ops.backend import BackendError

INTERPRETED: bool = triton.knobs.runtime.interpret
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
# Each program of the norm's backward pass leaves a row of partial sums: enough of them to fill a GPU, the same number always.
_PROGRAMS = 512


def prepare(device_type: str) -> None:
    """Raises BackendError if the kernels cannot serve tensors of this device."""
    if device_type == "cpu" and not INTERPRETED:
        raise BackendError("they need a GPU")


def _launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **settings: Any) -> None:
    device: AbstractContextManager[Any] = torch.cuda.device(like.device) if like.is_cuda else nullcontext()
    with device:
        kernel[grid](*args, **settings, BITS=INTERPRETED, enable_fp_fusion=False)


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16)


# -- RoPE -------------------------------------------------------------------------------------------------------------


def rope(x: Tensor, cos: Tensor, sin: Tensor, table: str, compute: str, cast: str, dtype: torch.dtype) -> Tensor:
    """See `reference.rope`."""
    return _rotate([x], cos, sin, table, cast, compute, cast, dtype, dtype, backward=False)[0]


def rope_backward(
    grad: Tensor, cos: Tensor, sin: Tensor, table: str, compute: str, cast: str, dtype: torch.dtype, x_dtype: torch.dtype
) -> Tensor:
    """See `reference.rope_backward`."""
    compute = "bf16" if compute == "bf16" and x_dtype == dtype else "fp32"
    return _rotate([grad], cos, sin, table, cast, compute, "rne", dtype, x_dtype, backward=True)[0]


def rope_qk(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, table: str, compute: str, cast: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.rope_qk`."""
    query, key = _rotate([query, key], cos, sin, table, cast, compute, cast, dtype, dtype, backward=False)
    return query, key
