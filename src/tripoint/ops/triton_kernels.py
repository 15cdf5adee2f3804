"""Triton kernels of the three operations: the formulas of `reference`, one pass over memory each.

Settings are constexprs. `DTYPE` is the compute dtype, `CAST` rne or rtz. Kernels must be launched with fused multiply-add
contraction off; where `tl.fma` stands, one is meant. `BITS` spells conversions from and to BF16 out on bit patterns: GPUs
have instructions, but Triton's interpreter truncates instead of rounding and misreads subnormal numbers.
"""

# Triton compiles these functions; their arguments are its own kinds of values, and constexprs are written in capitals.
# ruff: noqa: N803, SIM300
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra import libdevice  # type: ignore[import-untyped]

# -- rounding ---------------------------------------------------------------------------------------------------------


@triton.jit
def _round(x, DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr):
    """The values of FP32 `x` rounded to `DTYPE`, in FP32."""
    if DTYPE == tl.bfloat16:
        if CAST == "rtz" or BITS:
            bits = x.to(tl.int32, bitcast=True)
            if CAST == "rne":
                bits += 0x7FFF + ((bits >> 16) & 1)
            y = tl.where(x == x, (bits & -65536).to(tl.float32, bitcast=True), float("nan"))
        else:
            y = x.to(tl.bfloat16).to(tl.float32)
    elif DTYPE == tl.float16:
        half = x.to(tl.float16)
        if CAST == "rtz":
            # Sign and magnitude: one less in the bit pattern is the neighbour toward zero.
            over = tl.abs(half.to(tl.float32)) > tl.abs(x)
            half = (half.to(tl.int16, bitcast=True) - over.to(tl.int16)).to(tl.float16, bitcast=True)
        y = half.to(tl.float32)
    else:
        y = x
    return y


@triton.jit
def _cast(x, DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr):
    """FP32 `x` in `DTYPE`, rounded once."""
    if CAST == "rtz" or BITS:
        x = _round(x, DTYPE, CAST, BITS)
    if BITS and DTYPE == tl.bfloat16:
        y = (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def _load(pointers, mask, BITS: tl.constexpr):
    """What the pointers point to, in FP32; 0 where masked."""
    x = tl.load(pointers, mask=mask, other=0.0)
    if BITS and pointers.dtype.element_ty == tl.bfloat16:
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def _store(pointers, x, mask, CAST: tl.constexpr, BITS: tl.constexpr):
    """Store FP32 `x` in the dtype of the memory."""
    tl.store(pointers, _cast(x, pointers.dtype.element_ty, CAST, BITS), mask=mask)


@triton.jit
def _fma_to_odd(x, y, z):
    """x * y + z exactly, rounded to odd on the way to FP32: rounded again, it is what an FMA of that dtype gives."""
    product = x.to(tl.float64) * y.to(tl.float64)
    addend = z.to(tl.float64)
    total = product + addend
    # What the addition lost, exactly (Knuth, TwoSum).
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    inexact = tl.abs(lost) > 0
    away = inexact & ((lost < 0) != (total < 0))
    odd = (total.to(tl.int64, bitcast=True) - away.to(tl.int64)) | inexact.to(tl.int64)
    total = odd.to(tl.float64, bitcast=True)
    narrow = total.to(tl.float32)
    inexact = narrow.to(tl.float64) != total
    away = inexact & (tl.abs(narrow.to(tl.float64)) > tl.abs(total))
    odd32 = (narrow.to(tl.int32, bitcast=True) - away.to(tl.int32)) | inexact.to(tl.int32)
    return odd32.to(tl.float32, bitcast=True)


# -- RoPE -------------------------------------------------------------------------------------------------------------


@triton.jit
def _rotated(x, cos, partner, sin, COMPUTE: tl.constexpr, DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr):
    if COMPUTE == "bf16":
        return _round(x * cos, DTYPE, CAST, BITS) + _round(partner * sin, DTYPE, CAST, BITS)
    if COMPUTE == "bf16_fma":
        return _fma_to_odd(x, cos, _round(partner * sin, DTYPE, CAST, BITS))
    return x * cos + partner * sin


@triton.jit
def _table(row, columns, mask, TABLE_ROUND: tl.constexpr, TABLE_CAST: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr):
    values = _load(row + columns, mask, BITS)
    if TABLE_ROUND:
        values = _round(values, DTYPE, TABLE_CAST, BITS)
    return values[None, :]


@triton.jit
def _rotate_heads(
    x, out, heads, x_stride, out_stride, cos1, cos2, sin1, sin2,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    COMPUTE: tl.constexpr, DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    for start in range(0, heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS))[:, None].to(tl.int64)
        mask = (head < heads) & (columns < HALF)
        source, target = x + head * x_stride + columns, out + head * out_stride + columns
        first = _load(source, mask, BITS)
        second = _load(source + HALF, mask, BITS)
        _store(target, _rotated(first, cos1, -second, sin1, COMPUTE, DTYPE, CAST, BITS), mask, CAST, BITS)
        _store(target + HALF, _rotated(second, cos2, first, sin2, COMPUTE, DTYPE, CAST, BITS), mask, CAST, BITS)


@triton.jit
def _tables(
    cos, sin, i, j, cos_stride0, cos_stride1, sin_stride0, sin_stride1, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    TABLE_ROUND: tl.constexpr, TABLE_CAST: tl.constexpr, BACKWARD: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Both halves of the cosines and sines of token (i, j); of the opposite angles if `BACKWARD`."""
    columns = tl.arange(0, BLOCK_HALF)
    mask = columns < HALF
    cos += i * cos_stride0 + j * cos_stride1
    sin += i * sin_stride0 + j * sin_stride1
    cos1 = _table(cos, columns, mask, TABLE_ROUND, TABLE_CAST, DTYPE, BITS)
    cos2 = _table(cos + HALF, columns, mask, TABLE_ROUND, TABLE_CAST, DTYPE, BITS)
    sin1 = _table(sin, columns, mask, TABLE_ROUND, TABLE_CAST, DTYPE, BITS)
    sin2 = _table(sin + HALF, columns, mask, TABLE_ROUND, TABLE_CAST, DTYPE, BITS)
    if BACKWARD:
        sin1, sin2 = -sin1, -sin2
    return cos1, cos2, sin1, sin2


@triton.jit
def rope(
    query, query_out, key, key_out, cos, sin, query_heads, key_heads, size1,
    query_stride0, query_stride1, query_stride_head, query_out_stride0, query_out_stride1, query_out_stride_head,
    key_stride0, key_stride1, key_stride_head, key_out_stride0, key_out_stride1, key_out_stride_head,
    cos_stride0, cos_stride1, sin_stride0, sin_stride1,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_QUERY_HEADS: tl.constexpr, BLOCK_KEY_HEADS: tl.constexpr,
    TABLE_ROUND: tl.constexpr, TABLE_CAST: tl.constexpr, BACKWARD: tl.constexpr,
    COMPUTE: tl.constexpr, DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Query and key of one token. Tokens have two outer dimensions."""
    token = tl.program_id(0).to(tl.int64)
    i, j = token // size1, token % size1
    cos1, cos2, sin1, sin2 = _tables(
        cos, sin, i, j, cos_stride0, cos_stride1, sin_stride0, sin_stride1, HALF, BLOCK_HALF,
        TABLE_ROUND, TABLE_CAST, BACKWARD, DTYPE, BITS,
    )  # fmt: skip
    _rotate_heads(
        query + i * query_stride0 + j * query_stride1, query_out + i * query_out_stride0 + j * query_out_stride1,
        query_heads, query_stride_head, query_out_stride_head, cos1, cos2, sin1, sin2,
        HALF, BLOCK_HALF, BLOCK_QUERY_HEADS, COMPUTE, DTYPE, CAST, BITS,
    )  # fmt: skip
    _rotate_heads(
        key + i * key_stride0 + j * key_stride1, key_out + i * key_out_stride0 + j * key_out_stride1,
        key_heads, key_stride_head, key_out_stride_head, cos1, cos2, sin1, sin2,
        HALF, BLOCK_HALF, BLOCK_KEY_HEADS, COMPUTE, DTYPE, CAST, BITS,
    )  # fmt: skip


# -- QK-norm and RoPE -------------------------------------------------------------------------------------------------


@triton.jit
def _normed(
    x, rstd, scale, NORM_ROUND: tl.constexpr, OUT_ROUND: tl.constexpr,
    DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    normalised = x * rstd
    if NORM_ROUND:
        normalised = _round(normalised, DTYPE, CAST, BITS)
    out = normalised * scale
    if OUT_ROUND:
        out = _round(out, DTYPE, CAST, BITS)
    return out


@triton.jit
def _norm_rotate_heads(
    x, weight, out, rstds, heads, eps, x_stride, out_stride, rstd_stride, cos1, cos2, sin1, sin2,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    NORM_ROUND: tl.constexpr, OUT_ROUND: tl.constexpr, NORM_CAST: tl.constexpr,
    COMPUTE: tl.constexpr, DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """All heads of one token."""
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    scale1 = _load(weight + columns, columns < HALF, BITS)
    scale2 = _load(weight + HALF + columns, columns < HALF, BITS)
    for start in range(0, heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS))[:, None].to(tl.int64)
        mask = (head < heads) & (columns < HALF)
        source, target = x + head * x_stride + columns, out + head * out_stride + columns
        first = _load(source, mask, BITS)
        second = _load(source + HALF, mask, BITS)
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        rstd = tl.rsqrt(tl.div_rn(squares, 2.0 * HALF) + eps)
        tl.store(rstds + head * rstd_stride, rstd, mask=head < heads)
        first = _normed(first, rstd, scale1, NORM_ROUND, OUT_ROUND, DTYPE, NORM_CAST, BITS)
        second = _normed(second, rstd, scale2, NORM_ROUND, OUT_ROUND, DTYPE, NORM_CAST, BITS)
        _store(target, _rotated(first, cos1, -second, sin1, COMPUTE, DTYPE, CAST, BITS), mask, CAST, BITS)
        _store(target + HALF, _rotated(second, cos2, first, sin2, COMPUTE, DTYPE, CAST, BITS), mask, CAST, BITS)


@triton.jit
def qk_norm_rope(
    query, query_weight, query_out, query_rstd, key, key_weight, key_out, key_rstd, cos, sin,
    query_heads, key_heads, size1, eps,
    query_stride0, query_stride1, query_stride_head, query_out_stride0, query_out_stride1, query_out_stride_head,
    query_rstd_stride0, query_rstd_stride1, query_rstd_stride_head,
    key_stride0, key_stride1, key_stride_head, key_out_stride0, key_out_stride1, key_out_stride_head,
    key_rstd_stride0, key_rstd_stride1, key_rstd_stride_head,
    cos_stride0, cos_stride1, sin_stride0, sin_stride1,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_QUERY_HEADS: tl.constexpr, BLOCK_KEY_HEADS: tl.constexpr,
    NORM_ROUND: tl.constexpr, OUT_ROUND: tl.constexpr, NORM_CAST: tl.constexpr,
    TABLE_ROUND: tl.constexpr, TABLE_CAST: tl.constexpr,
    COMPUTE: tl.constexpr, DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Query and key of one token. Tokens have two outer dimensions."""
    token = tl.program_id(0).to(tl.int64)
    i, j = token // size1, token % size1
    cos1, cos2, sin1, sin2 = _tables(
        cos, sin, i, j, cos_stride0, cos_stride1, sin_stride0, sin_stride1, HALF, BLOCK_HALF,
        TABLE_ROUND, TABLE_CAST, False, DTYPE, BITS,
    )  # fmt: skip
    _norm_rotate_heads(
        query + i * query_stride0 + j * query_stride1, query_weight,
        query_out + i * query_out_stride0 + j * query_out_stride1,
        query_rstd + i * query_rstd_stride0 + j * query_rstd_stride1,
        query_heads, eps, query_stride_head, query_out_stride_head, query_rstd_stride_head, cos1, cos2, sin1, sin2,
        HALF, BLOCK_HALF, BLOCK_QUERY_HEADS, NORM_ROUND, OUT_ROUND, NORM_CAST, COMPUTE, DTYPE, CAST, BITS,
    )  # fmt: skip
    _norm_rotate_heads(
        key + i * key_stride0 + j * key_stride1, key_weight,
        key_out + i * key_out_stride0 + j * key_out_stride1,
        key_rstd + i * key_rstd_stride0 + j * key_rstd_stride1,
        key_heads, eps, key_stride_head, key_out_stride_head, key_rstd_stride_head, cos1, cos2, sin1, sin2,
        HALF, BLOCK_HALF, BLOCK_KEY_HEADS, NORM_ROUND, OUT_ROUND, NORM_CAST, COMPUTE, DTYPE, CAST, BITS,
    )  # fmt: skip


@triton.jit
def _norm_rotate_heads_backward(
    grad, x, weight, rstds, grad_x, heads, grad_stride, x_stride, rstd_stride, grad_x_stride,
    cos1, cos2, sin1, sin2, d_scale1, d_scale2,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    NORM_ROUND: tl.constexpr, OUT_ROUND: tl.constexpr, NORM_CAST: tl.constexpr,
    COMPUTE: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """All heads of one token, whose shares of the weight's gradient are added to `d_scale1` and `d_scale2`."""
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    scale1 = _load(weight + columns, columns < HALF, BITS)
    scale2 = _load(weight + HALF + columns, columns < HALF, BITS)
    for start in range(0, heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS))[:, None].to(tl.int64)
        mask = (head < heads) & (columns < HALF)
        source = grad + head * grad_stride + columns
        rotated1 = _load(source, mask, BITS)
        rotated2 = _load(source + HALF, mask, BITS)
        d1 = _rotated(rotated1, cos1, -rotated2, sin1, COMPUTE, DTYPE, "rne", BITS)
        d2 = _rotated(rotated2, cos2, rotated1, sin2, COMPUTE, DTYPE, "rne", BITS)
        if OUT_ROUND:
            d1 = _round(d1, DTYPE, "rne", BITS)
            d2 = _round(d2, DTYPE, "rne", BITS)

        source = x + head * x_stride + columns
        first = _load(source, mask, BITS)
        second = _load(source + HALF, mask, BITS)
        rstd = tl.load(rstds + head * rstd_stride, mask=head < heads, other=0.0)
        d_weight1 = d1 * _normed(first, rstd, 1.0, NORM_ROUND, False, DTYPE, NORM_CAST, BITS)
        d_weight2 = d2 * _normed(second, rstd, 1.0, NORM_ROUND, False, DTYPE, NORM_CAST, BITS)
        d1 *= scale1
        d2 *= scale2
        if NORM_ROUND and OUT_ROUND:
            d_weight1 = _round(d_weight1, DTYPE, "rne", BITS)
            d_weight2 = _round(d_weight2, DTYPE, "rne", BITS)
            d1 = _round(d1, DTYPE, "rne", BITS)
            d2 = _round(d2, DTYPE, "rne", BITS)
        d_scale1 += tl.sum(d_weight1, axis=0, keep_dims=True)
        d_scale2 += tl.sum(d_weight2, axis=0, keep_dims=True)
        d_rstd = tl.sum(d1 * first + d2 * second, axis=1, keep_dims=True)
        d_square = tl.div_rn(-0.5 * d_rstd * (rstd * rstd * rstd), 2.0 * HALF)
        target = grad_x + head * grad_x_stride + columns
        _store(target, d1 * rstd + d_square * (2.0 * first), mask, "rne", BITS)
        _store(target + HALF, d2 * rstd + d_square * (2.0 * second), mask, "rne", BITS)
    return d_scale1, d_scale2


@triton.jit
def qk_norm_rope_backward(
    grad_query, query, query_weight, query_rstd, query_grad, query_weight_grads,
    grad_key, key, key_weight, key_rstd, key_grad, key_weight_grads, cos, sin,
    tokens, query_heads, key_heads, size1,
    grad_query_stride0, grad_query_stride1, grad_query_stride_head, query_stride0, query_stride1, query_stride_head,
    query_rstd_stride0, query_rstd_stride1, query_rstd_stride_head,
    query_grad_stride0, query_grad_stride1, query_grad_stride_head,
    grad_key_stride0, grad_key_stride1, grad_key_stride_head, key_stride0, key_stride1, key_stride_head,
    key_rstd_stride0, key_rstd_stride1, key_rstd_stride_head,
    key_grad_stride0, key_grad_stride1, key_grad_stride_head,
    cos_stride0, cos_stride1, sin_stride0, sin_stride1,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_QUERY_HEADS: tl.constexpr, BLOCK_KEY_HEADS: tl.constexpr,
    NORM_ROUND: tl.constexpr, OUT_ROUND: tl.constexpr, NORM_CAST: tl.constexpr,
    TABLE_ROUND: tl.constexpr, TABLE_CAST: tl.constexpr,
    COMPUTE: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Query and key of every num_programs-th token; the program's shares of the weights' gradients go to its own rows of
    `query_weight_grads` and `key_weight_grads`."""
    query_scale1 = tl.zeros((1, BLOCK_HALF), dtype=tl.float32)
    query_scale2 = tl.zeros((1, BLOCK_HALF), dtype=tl.float32)
    key_scale1 = tl.zeros((1, BLOCK_HALF), dtype=tl.float32)
    key_scale2 = tl.zeros((1, BLOCK_HALF), dtype=tl.float32)
    program = tl.program_id(0)
    for number in range(program, tokens, tl.num_programs(0)):
        token = tl.cast(number, tl.int64)
        i, j = token // size1, token % size1
        cos1, cos2, sin1, sin2 = _tables(
            cos, sin, i, j, cos_stride0, cos_stride1, sin_stride0, sin_stride1, HALF, BLOCK_HALF,
            TABLE_ROUND, TABLE_CAST, True, DTYPE, BITS,
        )  # fmt: skip
        query_scale1, query_scale2 = _norm_rotate_heads_backward(
            grad_query + i * grad_query_stride0 + j * grad_query_stride1,
            query + i * query_stride0 + j * query_stride1, query_weight,
            query_rstd + i * query_rstd_stride0 + j * query_rstd_stride1,
            query_grad + i * query_grad_stride0 + j * query_grad_stride1,
            query_heads, grad_query_stride_head, query_stride_head, query_rstd_stride_head, query_grad_stride_head,
            cos1, cos2, sin1, sin2, query_scale1, query_scale2,
            HALF, BLOCK_HALF, BLOCK_QUERY_HEADS, NORM_ROUND, OUT_ROUND, NORM_CAST, COMPUTE, DTYPE, BITS,
        )  # fmt: skip
        key_scale1, key_scale2 = _norm_rotate_heads_backward(
            grad_key + i * grad_key_stride0 + j * grad_key_stride1,
            key + i * key_stride0 + j * key_stride1, key_weight,
            key_rstd + i * key_rstd_stride0 + j * key_rstd_stride1,
            key_grad + i * key_grad_stride0 + j * key_grad_stride1,
            key_heads, grad_key_stride_head, key_stride_head, key_rstd_stride_head, key_grad_stride_head,
            cos1, cos2, sin1, sin2, key_scale1, key_scale2,
            HALF, BLOCK_HALF, BLOCK_KEY_HEADS, NORM_ROUND, OUT_ROUND, NORM_CAST, COMPUTE, DTYPE, BITS,
        )  # fmt: skip
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    mask = columns < HALF
    at = program.to(tl.int64) * 2 * HALF + columns
    tl.store(query_weight_grads + at, query_scale1, mask=mask)
    tl.store(query_weight_grads + at + HALF, query_scale2, mask=mask)
    tl.store(key_weight_grads + at, key_scale1, mask=mask)
    tl.store(key_weight_grads + at + HALF, key_scale2, mask=mask)


# -- SwiGLU and GeGLU -------------------------------------------------------------------------------------------------


@triton.jit
def _exp(x, BITS: tl.constexpr):
    """CUDA's accurate exp, which PyTorch uses, as it does its tanh. The interpreter has no library, and its `tl.exp` is
    accurate."""
    return tl.exp(x) if BITS else libdevice.exp(x)


@triton.jit
def _sigmoid(x, BITS: tl.constexpr):
    return tl.div_rn(1.0, 1.0 + _exp(-x, BITS))


@triton.jit
def _gelu_inner(x):
    return 0.7978845608028654 * tl.fma(x * x * x, 0.044715, x)


@triton.jit
def _tanh(x, BITS: tl.constexpr):
    return 2.0 * _sigmoid(2.0 * x, BITS) - 1.0 if BITS else libdevice.tanh(x)


@triton.jit
def _act(x, ACT: tl.constexpr, BITS: tl.constexpr):
    if ACT == "silu":
        return tl.div_rn(x, 1.0 + _exp(-x, BITS))
    if ACT == "gelu":
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return 0.5 * x * (1.0 + _tanh(_gelu_inner(x), BITS))


@triton.jit
def _act_backward(grad, x, ACT: tl.constexpr, BITS: tl.constexpr):
    if ACT == "silu":
        sigmoid = _sigmoid(x, BITS)
        return grad * sigmoid * tl.fma(x, 1.0 - sigmoid, 1.0)
    if ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return grad * tl.fma(x, 0.3989422804014327 * _exp(x * x * -0.5, BITS), cdf)
    tanh = _tanh(_gelu_inner(x), BITS)
    slope = 0.7978845608028654 * tl.fma(x * x, 3 * 0.044715, 1.0)
    return grad * tl.fma(0.5 * x * (1.0 - tanh * tanh), slope, 0.5 * (1.0 + tanh))


@triton.jit
def _silu_bf16_sigmoid(x, DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr):
    exp = _round(_exp(tl.abs(x), BITS), DTYPE, CAST, BITS)
    y = _round(tl.div_rn(1.0, _round(1.0 + exp, DTYPE, CAST, BITS)), DTYPE, CAST, BITS)
    return x * tl.where(x < 0.0, y, _round(1.0 - y, DTYPE, CAST, BITS))


@triton.jit
def gated_act(
    gate, up, out, width, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr,
    ACT: tl.constexpr, ROUND: tl.constexpr, BF16_SIGMOID: tl.constexpr,
    DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """A stretch of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    x = _load(gate + row * gate_stride + columns, mask, BITS)
    factor = _load(up + row * up_stride + columns, mask, BITS)
    activated = _silu_bf16_sigmoid(x, DTYPE, CAST, BITS) if BF16_SIGMOID else _act(x, ACT, BITS)
    if ROUND:
        activated = _round(activated, DTYPE, CAST, BITS)
    _store(out + row * out_stride + columns, activated * factor, mask, CAST, BITS)


@triton.jit
def gated_act_backward(
    grad, gate, up, grad_gate, grad_up, width, grad_stride, gate_stride, up_stride, grad_gate_stride, grad_up_stride,
    BLOCK: tl.constexpr, ACT: tl.constexpr, STEPWISE: tl.constexpr,
    DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """A stretch of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    d = _load(grad + row * grad_stride + columns, mask, BITS)
    x = _load(gate + row * gate_stride + columns, mask, BITS)
    factor = _load(up + row * up_stride + columns, mask, BITS)
    activated = _act(x, ACT, BITS)
    d_activated = d * factor
    if STEPWISE:
        activated = _round(activated, DTYPE, CAST, BITS)
        d_activated = _round(d_activated, DTYPE, "rne", BITS)
    _store(grad_gate + row * grad_gate_stride + columns, _act_backward(d_activated, x, ACT, BITS), mask, "rne", BITS)
    _store(grad_up + row * grad_up_stride + columns, d * activated, mask, "rne", BITS)


# -- residual add + RMSNorm -------------------------------------------------------------------------------------------


@triton.jit
def _row(base, row, size1, size2, stride0, stride1, stride2):
    """Where row number `row` of a tensor with three outer dimensions begins."""
    return base + (row // size2 // size1) * stride0 + (row // size2 % size1) * stride1 + (row % size2) * stride2


@triton.jit
def _sum_rounded(
    total, when: tl.constexpr, SUM_ROUND: tl.constexpr, DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr
):
    """The residual sum as the variance (`when` is before_var) or the normalisation (after_var) sees it."""
    if SUM_ROUND == "before_var" or SUM_ROUND == when:
        return _round(total, DTYPE, CAST, BITS)
    return total


@triton.jit
def add_rms_norm(
    x, residual, weight, out, carry, rstds, hidden, eps, size1, size2,
    x_stride0, x_stride1, x_stride2, residual_stride0, residual_stride1, residual_stride2,
    out_stride0, out_stride1, out_stride2, carry_stride0, carry_stride1, carry_stride2,
    HAS_RESIDUAL: tl.constexpr, HAS_CARRY: tl.constexpr, BLOCK: tl.constexpr,
    SUM_ROUND: tl.constexpr, NORM_ROUND: tl.constexpr, DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    source = _row(x, row, size1, size2, x_stride0, x_stride1, x_stride2)
    total = _load(source + columns, mask, BITS)
    if HAS_RESIDUAL:
        source = _row(residual, row, size1, size2, residual_stride0, residual_stride1, residual_stride2)
        total = _load(source + columns, mask, BITS) + total
    if HAS_CARRY:
        target = _row(carry, row, size1, size2, carry_stride0, carry_stride1, carry_stride2)
        _store(target + columns, total, mask, CAST, BITS)
    seen = _sum_rounded(total, "before_var", SUM_ROUND, DTYPE, CAST, BITS)
    rstd = tl.rsqrt(tl.div_rn(tl.sum(seen * seen), tl.cast(hidden, tl.float32)) + eps)
    tl.store(rstds + row, rstd)
    normalised = _sum_rounded(total, "after_var", SUM_ROUND, DTYPE, CAST, BITS) * rstd
    if NORM_ROUND:
        normalised = _round(normalised, DTYPE, CAST, BITS)
    scale = _load(weight + columns, mask, BITS)
    target = _row(out, row, size1, size2, out_stride0, out_stride1, out_stride2)
    _store(target + columns, normalised * scale, mask, CAST, BITS)


@triton.jit
def add_rms_norm_backward(
    grad_out, grad_carry, x, residual, weight, rstds, grad_x, grad_residual, grad_weights, rows, hidden, size1, size2,
    grad_out_stride0, grad_out_stride1, grad_out_stride2, grad_carry_stride0, grad_carry_stride1, grad_carry_stride2,
    x_stride0, x_stride1, x_stride2, residual_stride0, residual_stride1, residual_stride2,
    grad_x_stride0, grad_x_stride1, grad_x_stride2,
    grad_residual_stride0, grad_residual_stride1, grad_residual_stride2,
    HAS_CARRY: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GRAD_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    SUM_ROUND: tl.constexpr, NORM_ROUND: tl.constexpr, STEPWISE: tl.constexpr,
    DTYPE: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th row; the program's share of the weight's gradient goes to its own row of `grad_weights`."""
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    scale = _load(weight + columns, mask, BITS)
    d_scale = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0)
    for number in range(first, rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        source = _row(x, row, size1, size2, x_stride0, x_stride1, x_stride2)
        total = _load(source + columns, mask, BITS)
        if HAS_RESIDUAL:
            source = _row(residual, row, size1, size2, residual_stride0, residual_stride1, residual_stride2)
            total = _load(source + columns, mask, BITS) + total
        seen_by_var = _sum_rounded(total, "before_var", SUM_ROUND, DTYPE, CAST, BITS)
        seen_by_norm = _sum_rounded(total, "after_var", SUM_ROUND, DTYPE, CAST, BITS)
        source = _row(grad_out, row, size1, size2, grad_out_stride0, grad_out_stride1, grad_out_stride2)
        d = _load(source + columns, mask, BITS)
        rstd = tl.load(rstds + row)

        normalised = seen_by_norm * rstd
        if NORM_ROUND:
            normalised = _round(normalised, DTYPE, CAST, BITS)
        d_weight, d_normalised = d * normalised, d * scale
        if STEPWISE:
            d_weight = _round(d_weight, DTYPE, "rne", BITS)
            d_normalised = _round(d_normalised, DTYPE, "rne", BITS)
        d_scale += d_weight
        d_rstd = tl.sum(d_normalised * seen_by_norm)
        d_square = tl.div_rn(-0.5 * d_rstd * (rstd * rstd * rstd), tl.cast(hidden, tl.float32))
        d_total = d_normalised * rstd + d_square * (2.0 * seen_by_var)
        if STEPWISE:
            d_total = _round(d_total, DTYPE, "rne", BITS)
        if HAS_CARRY:
            source = _row(grad_carry, row, size1, size2, grad_carry_stride0, grad_carry_stride1, grad_carry_stride2)
            d_total += _load(source + columns, mask, BITS)
        target = _row(grad_x, row, size1, size2, grad_x_stride0, grad_x_stride1, grad_x_stride2)
        _store(target + columns, d_total, mask, "rne", BITS)
        if HAS_GRAD_RESIDUAL:
            target = _row(grad_residual, row, size1, size2, grad_residual_stride0, grad_residual_stride1, grad_residual_stride2)
            _store(target + columns, d_total, mask, "rne", BITS)
    tl.store(grad_weights + first.to(tl.int64) * hidden + columns, d_scale, mask=mask)


# -- adding and rounding ----------------------------------------------------------------------------------------------


@triton.jit
def add(x, residual, out, numel, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr):
    """A stretch of `residual + x`, or of `x`, in the dtype of `out`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    total = _load(x + at, mask, BITS)
    if HAS_RESIDUAL:
        total = _load(residual + at, mask, BITS) + total
    _store(out + at, total, mask, CAST, BITS)
