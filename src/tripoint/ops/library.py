"""The ops as PyTorch sees them: `torch.library` custom ops with fake and autograd registrations.

A custom op is opaque to `torch.compile`. That is the point: Inductor drops roundings inside a region it compiles, explicit
`.to(torch.bfloat16)` included, and here no rounding may be dropped or added. Backward passes are custom ops for the same
reason: they save the inputs in their own dtype, with one FP32 number per row for a norm, and compute the rest again.
Argument meanings and shapes are those of `reference`; `backend` chooses whose kernels run.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tripoint.ops.backend import backend_for


def _of(tensor: Tensor) -> ModuleType:
    """The kernels for a tensor."""
    return backend_for(tensor.device)


@torch.library.custom_op("tripoint::rope", mutates_args=())
def rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, table: str, compute: str, cast: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _of(query).rope(query, key, cos, sin, table, compute, cast, dtype)


@rope.register_fake
def _(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, table: str, compute: str, cast: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query, dtype=dtype), torch.empty_like(key, dtype=dtype)


@torch.library.custom_op("tripoint::rope_backward", mutates_args=())
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
    return _of(grad_query).rope_backward(grad_query, grad_key, cos, sin, table, compute, cast, dtype, x_dtype)


@rope_backward.register_fake
def _(
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
    return torch.empty_like(grad_query, dtype=x_dtype), torch.empty_like(grad_key, dtype=x_dtype)


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, _, cos, sin, *settings = inputs
    ctx.settings = (*settings, query.dtype)
    ctx.save_for_backward(cos, sin)


def _rope_backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
    return *rope_backward(grad_query, grad_key, *ctx.saved_tensors, *ctx.settings), *(None,) * 6


rope.register_autograd(_rope_backward, setup_context=_rope_setup)


@torch.library.custom_op("tripoint::gated_act", mutates_args=())
def gated_act(gate: Tensor, up: Tensor, act: str, silu_round: bool, sig: str, cast: str) -> Tensor:
    return _of(gate).gated_act(gate, up, act, silu_round, sig, cast)


@gated_act.register_fake
def _(gate: Tensor, up: Tensor, act: str, silu_round: bool, sig: str, cast: str) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("tripoint::gated_act_backward", mutates_args=())
def gated_act_backward(
    grad: Tensor, gate: Tensor, up: Tensor, act: str, silu_round: bool, sig: str, cast: str
) -> tuple[Tensor, Tensor]:
    return _of(gate).gated_act_backward(grad, gate, up, act, silu_round, sig, cast)


@gated_act_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, act: str, silu_round: bool, sig: str, cast: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


def _gated_act_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, *ctx.settings = inputs
    ctx.save_for_backward(gate, up)


def _gated_act_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *gated_act_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None


gated_act.register_autograd(_gated_act_backward, setup_context=_gated_act_setup)


@torch.library.custom_op("tripoint::add_rms_norm", mutates_args=())
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
    return _of(x).add_rms_norm(x, residual, weight, eps, sum_round, norm_round, out_round, carry_round, cast, dtype)


@add_rms_norm.register_fake
def _(
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
    if carry_round is None:
        carry = x.new_empty(0)
    else:
        carry = torch.empty_like(x, dtype=dtype if carry_round else torch.float32)
    out = torch.empty_like(x, dtype=dtype if out_round else torch.float32)
    return out, carry, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("tripoint::add_rms_norm_backward", mutates_args=())
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
    """`reference.add_rms_norm_backward`, but that one tensor stands for both gradients where the inputs share a dtype: the
    gradient at `residual` is empty then, too."""
    grad_x, grad_residual, grad_weight = _of(x).add_rms_norm_backward(
        grad_out, grad_carry, x, residual, weight, rstd, sum_round, norm_round, out_round, cast, dtype
    )
    return grad_x, grad_residual if _separate_gradients(x, residual) else x.new_empty(0), grad_weight


@add_rms_norm_backward.register_fake
def _(
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
    separate = _separate_gradients(x, residual)
    grad_residual = torch.empty_like(residual) if residual is not None and separate else x.new_empty(0)
    return torch.empty_like(x), grad_residual, torch.empty_like(weight)


def _separate_gradients(x: Tensor, residual: Tensor | None) -> bool:
    return residual is not None and residual.dtype != x.dtype


def _add_rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _, sum_round, norm_round, out_round, carry_round, cast, dtype = inputs
    ctx.settings = (sum_round, norm_round, out_round, cast, dtype)
    ctx.mark_non_differentiable(*output[1 if carry_round is None else 2 :])
    # A carry that nobody uses (the last norm, QK-norms) has no gradient, rather than one of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, residual, weight, output[2])


def _add_rms_norm_backward(ctx: Any, grad_out: Tensor | None, grad_carry: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    x, residual, weight, rstd = ctx.saved_tensors
    _, _, out_round, _, dtype = ctx.settings
    if grad_out is None:
        grad_out = torch.zeros_like(x, dtype=dtype if out_round else torch.float32)
    grad_x, grad_residual, grad_weight = add_rms_norm_backward(grad_out, grad_carry, x, residual, weight, rstd, *ctx.settings)
    if residual is None:
        grad_residual = None
    elif not _separate_gradients(x, residual):
        grad_residual = grad_x
    return grad_x, grad_residual, grad_weight, *(None,) * 7


add_rms_norm.register_autograd(_add_rms_norm_backward, setup_context=_add_rms_norm_setup)


@torch.library.custom_op("tripoint::qk_norm_rope", mutates_args=())
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
    return _of(query).qk_norm_rope(
        query, key, query_weight, key_weight, eps, norm_round, out_round, norm_cast, cos, sin, table, compute, cast, dtype
    )


@qk_norm_rope.register_fake
def _(
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
    query_rstd, key_rstd = (x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for x in (query, key))
    return torch.empty_like(query, dtype=dtype), torch.empty_like(key, dtype=dtype), query_rstd, key_rstd


@torch.library.custom_op("tripoint::qk_norm_rope_backward", mutates_args=())
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
    inputs = (grad_query, grad_key, query, key, query_weight, key_weight, query_rstd, key_rstd)
    return _of(query).qk_norm_rope_backward(*inputs, norm_round, out_round, norm_cast, cos, sin, table, compute, cast, dtype)


@qk_norm_rope_backward.register_fake
def _(
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
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(query_weight), torch.empty_like(key_weight)


def _qk_norm_rope_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, query_weight, key_weight, _, *ctx.norm, cos, sin, table, compute, cast, dtype = inputs
    ctx.rope = (table, compute, cast, dtype)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(query, key, query_weight, key_weight, *output[2:], cos, sin)


def _qk_norm_rope_backward(ctx: Any, grad_query: Tensor, grad_key: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *inputs, cos, sin = ctx.saved_tensors
    return *qk_norm_rope_backward(grad_query, grad_key, *inputs, *ctx.norm, cos, sin, *ctx.rope), *(None,) * 10


qk_norm_rope.register_autograd(_qk_norm_rope_backward, setup_context=_qk_norm_rope_setup)


@torch.library.custom_op("tripoint::residual_add", mutates_args=())
def residual_add(x: Tensor, residual: Tensor, rounded: bool, cast: str, dtype: torch.dtype) -> Tensor:
    return _of(x).residual_add(x, residual, rounded, cast, dtype)


@residual_add.register_fake
def _(x: Tensor, residual: Tensor, rounded: bool, cast: str, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype if rounded else torch.float32)


@torch.library.custom_op("tripoint::round_to", mutates_args=())
def round_to(x: Tensor, cast: str, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`: a copy where it already is."""
    rounded: Tensor = _of(x).cast_to(x, dtype, cast)
    return rounded.clone() if rounded is x else rounded


@round_to.register_fake
def _(x: Tensor, cast: str, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _residual_add_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, residual, *_ = inputs
    ctx.dtypes = (x.dtype, residual.dtype)


def _residual_add_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_residual = (grad if grad.dtype == dtype else round_to(grad, "rne", dtype) for dtype in ctx.dtypes)
    return grad_x, grad_residual, None, None, None


residual_add.register_autograd(_residual_add_backward, setup_context=_residual_add_setup)


def _round_to_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _round_to_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad if grad.dtype == ctx.dtype else round_to(grad, "rne", ctx.dtype), None, None


round_to.register_autograd(_round_to_backward, setup_context=_round_to_setup)
