"""Under `torch.compile` the ops give the bits that they give without it, forward and backward, for every schedule.

Inductor computes a chain of elementwise BF16 operations in FP32 and rounds at its end; it drops even explicit casts. The ops
are opaque to it. What surrounds them here are multiplications by powers of two, which are exact however they are fused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strategies import CASTS, NORM, QK, ROPE, SWIGLU
from tripoint import ops
from tripoint.ops import reference

DTYPE = torch.bfloat16
EPS = 1e-6
ACTS = ("silu", "gelu", "gelu_tanh")
ROPES = [*itertools.product(ROPE, CASTS)]
GATED = [(code, act, cast) for code, act, cast in itertools.product(SWIGLU, ACTS, CASTS) if code != "S5" or act == "silu"]
NORMS = [*itertools.product(NORM, (None, True, False), CASTS)]
QKS = [*itertools.product(QK, CASTS)]


def leaf(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    out = []
    for q, k, (code, cast) in zip((2 * query).unbind(), (2 * key).unbind(), ROPES, strict=True):
        out += ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, *ROPE[code], cast, DTYPE)
    return [0.5 * x.float() for x in out]


def gated(gate: Tensor, up: Tensor) -> list[Tensor]:
    return [
        0.5 * ops.gated_act(2 * g, 0.25 * u, act, *SWIGLU[code], cast).float()
        for g, u, (code, act, cast) in zip(gate.unbind(), up.unbind(), GATED, strict=True)
    ]


def normed(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    out = []
    for x_, r, w, (code, carry, cast) in zip((2 * x).unbind(), residual.unbind(), weight.unbind(), NORMS, strict=True):
        normalised, total, _ = ops.add_rms_norm(x_, r, w, EPS, *NORM[code], True, carry, cast, DTYPE)
        out += [0.5 * normalised.float()] + ([] if carry is None else [0.25 * total.float()])
    return out


def qk_normed(query: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """A QK-norm, its output rounded or not, on its way into RoPE."""
    out = []
    for q, w, (mode, cast) in zip(query.unbind(), weight.unbind(), QKS, strict=True):
        norm_round, out_round = QK[mode]
        normalised, _, _ = ops.add_rms_norm(2 * q, None, w, EPS, "before_var", norm_round, out_round, None, cast, DTYPE)
        heads, rope = normalised.transpose(1, 2), (cos, sin, *ROPE["R3"], "rne", DTYPE)
        out += [0.5 * x.float() for x in ops.rope(heads, heads, *rope)]
        heads = (2 * q).transpose(1, 2)
        fused = ops.qk_norm_rope(heads, heads[:, :1], w, w, EPS, norm_round, out_round, cast, *rope)
        out += [0.5 * x.float() for x in fused[:2]]
    return out


def added(x: Tensor, residual: Tensor) -> list[Tensor]:
    sums = [
        0.5 * ops.residual_add(2 * a, r, to, cast, DTYPE).float()
        for a, r, (to, cast) in zip(x.unbind(), residual.unbind(), itertools.product((True, False), CASTS), strict=True)
    ]
    return sums + [0.5 * ops.round_to(4 * r, cast, DTYPE).float() for r, cast in zip(residual, CASTS, strict=False)]


def tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = reference.rope_angles(torch.arange(length), 100.0, head_dim, "pos*inv").repeat(1, 2)
    return angles.cos(), angles.sin()


CASES: dict[str, tuple[Callable[..., list[Tensor]], tuple[Tensor, ...]]] = {
    "rope": (rotated, (leaf(len(ROPES), 2, 9, 3, 16, seed=1), leaf(len(ROPES), 2, 9, 1, 16, seed=11), *tables(9, 16))),
    "gated_act": (gated, (leaf(len(GATED), 7, 40, seed=2), leaf(len(GATED), 7, 40, seed=3))),
    "add_rms_norm": (
        normed,
        (leaf(len(NORMS), 2, 5, 48, seed=4), leaf(len(NORMS), 2, 5, 48, seed=5), leaf(len(NORMS), 48, seed=6)),
    ),
    "qk_norm": (qk_normed, (leaf(len(QKS), 2, 9, 3, 16, seed=7), leaf(len(QKS), 16, seed=8), *tables(9, 16))),
    "residual_add": (added, (leaf(4, 3, 20, seed=9), leaf(4, 3, 20, seed=10, dtype=torch.float32))),
}


def outputs_and_gradients(function: Callable[..., list[Tensor]], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    outputs = function(*inputs)
    grads = [torch.randn(out.shape, generator=torch.Generator().manual_seed(i)) for i, out in enumerate(outputs)]
    return outputs + list(torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], grads))


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def assert_compiled_equals_uncompiled(
    function: Callable[..., list[Tensor]], inputs: tuple[Tensor, ...], backend: str = "inductor"
) -> None:
    expected = outputs_and_gradients(function, inputs)
    actual = outputs_and_gradients(torch.compile(function, fullgraph=True, backend=backend), inputs)
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), f"result {number} of {len(expected)}"


@pytest.mark.parametrize("case", CASES)
def test_traced_ops_give_the_same_bits_under_every_schedule(case: str) -> None:
    """All that `torch.compile` does but for generating code: tracing, fake kernels, functionalising, partitioning."""
    assert_compiled_equals_uncompiled(*CASES[case], backend="aot_eager")


def test_compiled_ops_give_the_same_bits_for_every_code() -> None:
    """One graph with every code, so that Inductor has everything to fuse that it wants to."""

    def all_codes(query: Tensor, gate: Tensor, up: Tensor, x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
        queries, gates, ups = (2 * query).unbind(), (2 * gate).unbind(), (0.25 * up).unbind()
        *xs, last_x = (2 * x).unbind()
        *residuals, last_residual = (4 * residual).unbind()
        out = [x for q, code in zip(queries, ROPE, strict=True) for x in ops.rope(q, q, cos, sin, *ROPE[code], "rne", DTYPE)]
        for g, u, code in zip(gates, ups, SWIGLU, strict=True):
            out.append(ops.gated_act(g, u, "silu", *SWIGLU[code], "rne"))
        for x_, r, w, code in zip(xs, residuals, weight.unbind(), NORM, strict=True):
            out += ops.add_rms_norm(x_, r, w, EPS, *NORM[code], True, True, "rne", DTYPE)[:2]
        out.append(ops.residual_add(last_x, last_residual, True, "rne", DTYPE))
        return [0.5 * y.float() for y in out]

    cos, sin = tables(9, 16)
    query, gate, up = leaf(len(ROPE), 2, 3, 9, 16, seed=1), leaf(len(SWIGLU), 7, 48, seed=2), leaf(len(SWIGLU), 7, 48, seed=3)
    x, residual, weight = leaf(len(NORM) + 1, 4, 48, seed=4), leaf(len(NORM) + 1, 4, 48, seed=5), leaf(len(NORM), 48, seed=6)
    assert_compiled_equals_uncompiled(all_codes, (query, gate, up, x, residual, weight))


def test_without_custom_ops_the_compiler_drops_roundings() -> None:
    """The control: the same formulas, compiled as they stand, lose the rounding of silu, S1 becomes S3."""
    gate, up = leaf(64, 64, seed=1).detach(), leaf(64, 64, seed=2).detach()
    compiled = torch.compile(reference.gated_act)(gate, up, "silu", *SWIGLU["S1"], "rne")
    assert not torch.equal(compiled, ops.gated_act(gate, up, "silu", *SWIGLU["S1"], "rne"))
    assert torch.equal(compiled, ops.gated_act(gate, up, "silu", *SWIGLU["S3"], "rne"))
