"""The ops on GPUs: launches the Triton kernels, which must not contract multiply-adds.

Under Triton's interpreter (`TRITON_INTERPRET=1`) they run on CPU tensors too, slowly: for tests.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from tripoint.ops import reference
from tripoint.ops import triton_kernels as kernels
from tripoint.ops.backend import BackendError
from tripoint.ops.layout import contiguous_like, laid_out_like, rows_like, whole_rows

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


def _outer_strides(tensor: Tensor | None) -> tuple[int, int, int]:
    """The strides of three outer dimensions, those that are missing in front."""
    outer = () if tensor is None else tensor.stride()[:-1]
    return (*(0,) * (3 - len(outer)), *outer)  # type: ignore[return-value]


def _outer_sizes(tensor: Tensor) -> tuple[int, int]:
    """The second and third of three outer dimensions."""
    sizes = (1, 1, *tensor.shape[:-1])
    return sizes[-2], sizes[-1]


# -- RoPE -------------------------------------------------------------------------------------------------------------


def rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, table: str, compute: str, cast: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.rope`."""
    heads = _heads_dimension(query, key, cos, sin)
    if heads is None:
        return reference.rope(query, key, cos, sin, table, compute, cast, dtype)
    return _rotate(query, key, cos, sin, heads, table, cast, compute, cast, dtype, dtype, backward=False)


def rope_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    cos: Tensor,
    sin: Tensor,
    table: str,
    compute: str,
    cast: str,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `reference.rope_backward`."""
    heads = _heads_dimension(grad_query, grad_key, cos, sin)
    if heads is None:
        return reference.rope_backward(grad_query, grad_key, cos, sin, table, compute, cast, dtype, x_dtype)
    compute = "bf16" if compute == "bf16" and x_dtype == dtype else "fp32"
    return _rotate(grad_query, grad_key, cos, sin, heads, table, cast, compute, "rne", dtype, x_dtype, backward=True)


def _heads_dimension(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> int | None:
    """The largest dimension along which the table is the same, and the only one in which query and key may differ.

    None if there is none, or more than two are left for tokens: no kernel has that.
    """
    tables = cos.expand(query.shape), sin.expand(query.shape)
    dims = range(query.dim() - 1)
    shared = [dim for dim in dims if all(t.stride(dim) == 0 or t.shape[dim] == 1 for t in tables)]
    differing = {dim for dim in dims if query.shape[dim] != key.shape[dim]}
    heads = max((dim for dim in shared if differing <= {dim}), key=lambda dim: query.shape[dim], default=None)
    return heads if query.dim() <= 4 else None


def _by_token(tensor: Tensor, heads: int) -> Tensor:
    """As [i, j, head, head_dim]: tokens have two outer dimensions."""
    tensor = tensor.movedim(heads, -2)
    return tensor[(None,) * (4 - tensor.dim())]


def _head_blocks(query: Tensor, key: Tensor, heads: int, most: int) -> dict[str, int]:
    """Settings of the kernels that take half rows of several heads at once, `most` numbers of them."""
    half = query.shape[-1] // 2
    block_half = triton.next_power_of_2(half)
    query_heads, key_heads = (min(triton.next_power_of_2(x.shape[heads]), max(most // block_half, 1)) for x in (query, key))
    return {"HALF": half, "BLOCK_HALF": block_half, "BLOCK_QUERY_HEADS": query_heads, "BLOCK_KEY_HEADS": key_heads}


def _rotate(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    table: str,
    table_cast: str,
    compute: str,
    cast: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    outs = rows_like(query, out_dtype), rows_like(key, out_dtype)
    rows = [_by_token(x, heads) for x in (whole_rows(query), outs[0], whole_rows(key), outs[1])]
    tables = [_by_token(whole_rows(t).expand(query.shape), heads) for t in (cos, sin)]
    size0, size1 = rows[0].shape[:2]
    if query.numel() + key.numel() > 0:
        _launch(
            kernels.rope,
            (size0 * size1,),
            query,
            *(*rows, *tables, query.shape[heads], key.shape[heads], size1),
            *(stride for tensor in rows for stride in tensor.stride()[:3]),
            *(stride for tensor in tables for stride in tensor.stride()[:2]),
            **_head_blocks(query, key, heads, 2048),
            TABLE_ROUND=table == "bf16",
            TABLE_CAST=table_cast,
            BACKWARD=backward,
            COMPUTE=compute,
            DTYPE=_DTYPES[dtype],
            CAST=cast,
            num_warps=4,
        )
    return laid_out_like(query, outs[0]), laid_out_like(key, outs[1])


# -- QK-norm and RoPE -------------------------------------------------------------------------------------------------


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    norm_round: bool,
    out_round: bool,
    norm_cast: str,
    cos: Tensor,
    sin: Tensor,
    table: str,
    compute: str,
    cast: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.qk_norm_rope`; sums of squares run in another order."""
    heads = _heads_dimension(query, key, cos, sin)
    if heads is None or query.dtype != dtype:
        return reference.qk_norm_rope(
            query, key, query_weight, key_weight, eps, norm_round, out_round, norm_cast, cos, sin, table, compute, cast, dtype
        )
    outs = rows_like(query, dtype), rows_like(key, dtype)
    rstds = [x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for x in (query, key)]
    pair = zip((query, key), outs, rstds, strict=True)
    per_head = [_by_token(t, heads) for x, out, rstd in pair for t in (whole_rows(x), out, rstd)]
    tables = [_by_token(whole_rows(t).expand(query.shape), heads) for t in (cos, sin)]
    size0, size1 = per_head[0].shape[:2]
    if query.numel() + key.numel() > 0:
        _launch(
            kernels.qk_norm_rope,
            (size0 * size1,),
            query,
            *(per_head[0], query_weight.contiguous(), *per_head[1:4], key_weight.contiguous(), *per_head[4:], *tables),
            *(query.shape[heads], key.shape[heads], size1, eps),
            *(stride for tensor in per_head for stride in tensor.stride()[:3]),
            *(stride for tensor in tables for stride in tensor.stride()[:2]),
            **_head_blocks(query, key, heads, 1024),
            NORM_ROUND=norm_round,
            OUT_ROUND=out_round,
            NORM_CAST=norm_cast,
            TABLE_ROUND=table == "bf16",
            TABLE_CAST=cast,
            COMPUTE=compute,
            DTYPE=_DTYPES[dtype],
            CAST=cast,
            num_warps=4,
        )
    return laid_out_like(query, outs[0]), laid_out_like(key, outs[1]), rstds[0], rstds[1]


def qk_norm_rope_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    query_rstd: Tensor,
    key_rstd: Tensor,
    norm_round: bool,
    out_round: bool,
    norm_cast: str,
    cos: Tensor,
    sin: Tensor,
    table: str,
    compute: str,
    cast: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.qk_norm_rope_backward`; sums run in another order, the same one every time."""
    heads = _heads_dimension(query, key, cos, sin)
    if heads is None or query.dtype != dtype:
        inputs = (grad_query, grad_key, query, key, query_weight, key_weight, query_rstd, key_rstd)
        return reference.qk_norm_rope_backward(*inputs, norm_round, out_round, norm_cast, cos, sin, table, compute, cast, dtype)
    grads = rows_like(query, dtype), rows_like(key, dtype)
    of_query = (whole_rows(grad_query), whole_rows(query), query_rstd, grads[0])
    of_key = (whole_rows(grad_key), whole_rows(key), key_rstd, grads[1])
    per_head = [_by_token(t, heads) for t in (*of_query, *of_key)]
    tables = [_by_token(whole_rows(t).expand(query.shape), heads) for t in (cos, sin)]
    size0, size1, _, head_dim = per_head[0].shape
    programs = min(size0 * size1, _PROGRAMS) if query.numel() + key.numel() > 0 else 0
    weight_grads = [w.new_empty((programs, head_dim), dtype=torch.float32) for w in (query_weight, key_weight)]
    if programs > 0:
        _launch(
            kernels.qk_norm_rope_backward,
            (programs,),
            query,
            *(*per_head[:2], query_weight.contiguous(), *per_head[2:4], weight_grads[0]),
            *(*per_head[4:6], key_weight.contiguous(), *per_head[6:], weight_grads[1], *tables),
            *(size0 * size1, query.shape[heads], key.shape[heads], size1),
            *(stride for tensor in per_head for stride in tensor.stride()[:3]),
            *(stride for tensor in tables for stride in tensor.stride()[:2]),
            **_head_blocks(query, key, heads, 1024),
            NORM_ROUND=norm_round,
            OUT_ROUND=out_round,
            NORM_CAST=norm_cast,
            TABLE_ROUND=table == "bf16",
            TABLE_CAST=cast,
            COMPUTE="bf16" if compute == "bf16" and out_round else "fp32",
            DTYPE=_DTYPES[dtype],
            num_warps=4,
        )
    grad_query_weight, grad_key_weight = (
        grad.sum(0).to(weight.dtype) for grad, weight in zip(weight_grads, (query_weight, key_weight), strict=True)
    )
    return laid_out_like(query, grads[0]), laid_out_like(key, grads[1]), grad_query_weight, grad_key_weight


# -- SwiGLU and GeGLU -------------------------------------------------------------------------------------------------


def _matrix(x: Tensor) -> Tensor:
    """[rows, width], without a copy where the rows are evenly spaced."""
    return whole_rows(x).reshape(-1, x.shape[-1])


def gated_act(gate: Tensor, up: Tensor, act: str, silu_round: bool, sig: str, cast: str) -> Tensor:
    """See `reference.gated_act`."""
    gates, ups = _matrix(gate), _matrix(up)
    out = contiguous_like(gate, gate.dtype)
    rows, width = gates.shape
    block = min(triton.next_power_of_2(width), 4096)
    if out.numel() > 0:
        _launch(
            kernels.gated_act,
            (rows, triton.cdiv(width, block)),
            gate,
            *(gates, ups, out, width, gates.stride(0), ups.stride(0), width),
            BLOCK=block,
            ACT=act,
            ROUND=silu_round,
            BF16_SIGMOID=sig == "bf16",
            DTYPE=_DTYPES[gate.dtype],
            CAST=cast,
            num_warps=_warps(block),
        )
    return laid_out_like(gate, out)


def gated_act_backward(
    grad: Tensor, gate: Tensor, up: Tensor, act: str, silu_round: bool, sig: str, cast: str
) -> tuple[Tensor, Tensor]:
    """See `reference.gated_act_backward`."""
    grads, gates, ups = _matrix(grad), _matrix(gate), _matrix(up)
    grad_gate, grad_up = contiguous_like(gate, gate.dtype), contiguous_like(up, up.dtype)
    rows, width = gates.shape
    block = min(triton.next_power_of_2(width), 4096)
    if gate.numel() > 0:
        _launch(
            kernels.gated_act_backward,
            (rows, triton.cdiv(width, block)),
            gate,
            *(grads, gates, ups, grad_gate, grad_up, width),
            *(grads.stride(0), gates.stride(0), ups.stride(0), width, width),
            BLOCK=block,
            ACT=act,
            STEPWISE=silu_round and sig == "fp32",
            DTYPE=_DTYPES[gate.dtype],
            CAST=cast,
            num_warps=_warps(block),
        )
    return laid_out_like(gate, grad_gate), laid_out_like(up, grad_up)


# -- residual add + RMSNorm -------------------------------------------------------------------------------------------


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    sum_round: str,
    norm_round: bool,
    out_round: bool,
    carry_round: bool | None,
    cast: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.add_rms_norm`; the sum of squares runs in another order."""
    if x.dim() > 4:
        return reference.add_rms_norm(x, residual, weight, eps, sum_round, norm_round, out_round, carry_round, cast, dtype)
    rows, residuals = whole_rows(x), None if residual is None else whole_rows(residual)
    out = rows_like(x, dtype if out_round else torch.float32)
    carry = None if carry_round is None else rows_like(x, dtype if carry_round else torch.float32)
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    block = triton.next_power_of_2(x.shape[-1])
    if x.numel() > 0:
        _launch(
            kernels.add_rms_norm,
            (rstd.numel(),),
            x,
            *(rows, residuals, weight.contiguous(), out, carry, rstd, x.shape[-1], eps, *_outer_sizes(x)),
            *(stride for tensor in (rows, residuals, out, carry) for stride in _outer_strides(tensor)),
            HAS_RESIDUAL=residual is not None,
            HAS_CARRY=carry is not None,
            BLOCK=block,
            SUM_ROUND=sum_round,
            NORM_ROUND=norm_round,
            DTYPE=_DTYPES[dtype],
            CAST=cast,
            num_warps=_warps(block),
        )
    return laid_out_like(x, out), x.new_empty(0) if carry is None else laid_out_like(x, carry), rstd


def add_rms_norm_backward(
    grad_out: Tensor,
    grad_carry: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    rstd: Tensor,
    sum_round: str,
    norm_round: bool,
    out_round: bool,
    cast: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.add_rms_norm_backward`; sums run in another order, the same one every time."""
    if x.dim() > 4:
        return reference.add_rms_norm_backward(
            grad_out, grad_carry, x, residual, weight, rstd, sum_round, norm_round, out_round, cast, dtype
        )
    inputs = [None if t is None else whole_rows(t) for t in (grad_out, grad_carry, x, residual)]
    grad_x = rows_like(x, x.dtype)
    # One tensor stands for both gradients where the inputs share a dtype.
    grad_residual = None if residual is None or residual.dtype == x.dtype else rows_like(residual, residual.dtype)
    rows, hidden = rstd.numel(), x.shape[-1]
    programs = min(rows, _PROGRAMS)
    grad_weights = weight.new_empty((programs, hidden), dtype=torch.float32)
    block = triton.next_power_of_2(hidden)
    if x.numel() > 0:
        _launch(
            kernels.add_rms_norm_backward,
            (programs,),
            x,
            *(*inputs, weight.contiguous(), rstd, grad_x, grad_residual, grad_weights, rows, hidden, *_outer_sizes(x)),
            *(stride for tensor in (*inputs, grad_x, grad_residual) for stride in _outer_strides(tensor)),
            HAS_CARRY=grad_carry is not None,
            HAS_RESIDUAL=residual is not None,
            HAS_GRAD_RESIDUAL=grad_residual is not None,
            BLOCK=block,
            SUM_ROUND=sum_round,
            NORM_ROUND=norm_round,
            STEPWISE=sum_round == "before_var" and norm_round and out_round,
            DTYPE=_DTYPES[dtype],
            CAST=cast,
            num_warps=_warps(block),
        )
    out, grad_weight = laid_out_like(x, grad_x), grad_weights.sum(0).to(weight.dtype)
    if residual is None:
        return out, x.new_empty(0), grad_weight
    return out, laid_out_like(residual, grad_x if grad_residual is None else grad_residual), grad_weight


# -- adding and rounding ----------------------------------------------------------------------------------------------


def residual_add(x: Tensor, residual: Tensor, rounded: bool, cast: str, dtype: torch.dtype) -> Tensor:
    """See `reference.residual_add`."""
    return _add(x, residual, dtype if rounded else torch.float32, cast)


def cast_to(x: Tensor, dtype: torch.dtype, cast: str) -> Tensor:
    """See `rounding.cast_to`."""
    return reference.cast_to(x, dtype, cast) if x.dtype == torch.float64 else _add(x, None, dtype, cast)


def _add(x: Tensor, residual: Tensor | None, dtype: torch.dtype, cast: str) -> Tensor:
    out = contiguous_like(x, dtype)
    block = 2048
    if out.numel() > 0:
        _launch(
            kernels.add,
            (triton.cdiv(out.numel(), block),),
            x,
            *(x.contiguous(), None if residual is None else residual.contiguous(), out, out.numel()),
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            CAST=cast,
            num_warps=4,
        )
    return laid_out_like(x, out)
