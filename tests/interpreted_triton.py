"""The Triton kernels against the reference, in Triton's interpreter. Run by `test_triton.py`, with TRITON_INTERPRET=1.

Bits are equal wherever FP32 leaves no room. Where it does (the last bits of exp, erf and tanh; the order of a sum), a result
lies between what the formula gives for slightly less and slightly more of the quantity in question.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from benchmarks import gpu
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bits import assert_gated, random, same, same_layout
from strategies import LAYOUTS, NORM, QK, ROPE, SWIGLU, casts, laid_out, tensors
from tripoint import ops
from tripoint.ops import reference, triton
from tripoint.ops.backend import backend_for
from tripoint.ops.rounding import cast_to, round_to

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6
ULP = 2.0**-23
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
# Shrinking a failure would take minutes here.
some = settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
shapes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.sampled_from([2, 6, 16, 24, 64]))


def equal(mine: Tensor | tuple[Tensor, ...], theirs: Tensor | tuple[Tensor, ...]) -> bool:
    """Equal bits, dtype and layout."""
    return same(mine, theirs) and same_layout(mine, theirs)


def between(x: Tensor, one: Tensor, other: Tensor) -> bool:
    x, one, other = x.double(), one.double(), other.double()
    return bool(((torch.minimum(one, other) <= x) & (x <= torch.maximum(one, other))).all())


def test_these_kernels_are_the_ones_that_run() -> None:
    assert triton.INTERPRETED
    assert backend_for(torch.device("cpu")) is triton
    x = random((3, 8), BF16)
    assert equal(ops.residual_add(x, x, True, "rne", BF16), reference.residual_add(x, x, True, "rne", BF16))


@dtypes
@pytest.mark.parametrize("code", ROPE)
@some
@given(data=st.data(), cast=casts, unrounded=st.booleans(), shape=shapes, seq_first=st.booleans())
def test_rope(
    dtype: torch.dtype,
    code: str,
    data: st.DataObject,
    cast: str,
    unrounded: bool,
    shape: tuple[int, int, int, int],
    seq_first: bool,
) -> None:
    batch, heads, seq, head_dim = shape
    if seq_first:
        shapes, table = [(batch, seq, n, head_dim) for n in (heads, 1)], (1, seq, 1, head_dim)
    else:
        shapes = [(batch, n, seq, head_dim) for n in (heads, 1)]
        table = (data.draw(st.sampled_from([1, batch])), 1, seq, head_dim)
    x_dtype = FP32 if unrounded else dtype
    pair = [data.draw(tensors(shape, x_dtype)) for shape in shapes]
    grads = [data.draw(tensors(shape, dtype)) for shape in shapes]
    cos, sin = (data.draw(tensors(table, FP32, special=False)) for _ in range(2))
    settings = (*ROPE[code], cast, dtype)
    assert equal(triton.rope(*pair, cos, sin, *settings), reference.rope(*pair, cos, sin, *settings))
    settings = (*settings, x_dtype)
    assert equal(triton.rope_backward(*grads, cos, sin, *settings), reference.rope_backward(*grads, cos, sin, *settings))


def test_rope_without_heads_and_with_more_than_fit_one_block() -> None:
    settings = (*ROPE["R3"], "rne", BF16)
    x, angles = random((2, 5, 16), BF16), random((5, 16), FP32, 1)
    assert equal(triton.rope(x, x, angles, angles, *settings), reference.rope(x, x, angles, angles, *settings))
    x, angles = random((2, 70, 3, 128), BF16), random((3, 128), FP32, 1)
    pair = x, x[:, :33]
    assert equal(triton.rope(*pair, angles, angles, *settings), reference.rope(*pair, angles, angles, *settings))


FREEDOM = {"silu": 2, "gelu": 4, "gelu_tanh": 8}
"""FP32 units in the last place that exp, erf and tanh (here a difference of two exps) may be off."""


def activation(x: Tensor, act: str) -> Tensor:
    if act == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


@dtypes
@pytest.mark.parametrize(
    ("code", "act"), [(c, a) for c in SWIGLU for a in ("silu", "gelu", "gelu_tanh") if c != "S5" or a == "silu"]
)
@some
@given(data=st.data(), cast=casts, shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 70)))
def test_gated_act(
    dtype: torch.dtype, code: str, act: str, data: st.DataObject, cast: str, shape: tuple[int, int, int]
) -> None:
    gate, up, grad = (data.draw(tensors(shape, dtype, scale=2.0, special=False)) for _ in range(3))
    out = triton.gated_act(gate, up, act, *SWIGLU[code], cast)
    assert_gated(out, gate, up, act, code, cast, FREEDOM[act])
    grad_gate, grad_up = triton.gated_act_backward(grad, gate, up, act, *SWIGLU[code], cast)
    assert out.stride() == torch.empty_like(gate).stride()
    x = gate.double().requires_grad_()
    exact = activation(x, act)
    (slope,) = torch.autograd.grad(exact.sum(), x)
    exact = exact.detach()
    room = 4 * ULP * (exact.abs() + (0 if act == "silu" else gate.double().abs()))
    around = [(exact - room).float(), (exact + room).float()]
    stepwise = code == "S1"
    if stepwise:
        around = [round_to(a, dtype, cast) for a in around]
    assert between(grad_up, *(cast_to(a.double() * grad.double(), dtype, "rne") for a in around))
    d_activated = grad.double() * up.double()
    if stepwise:
        d_activated = round_to(d_activated.float(), dtype, "rne").double()
    room = 8 * ULP * (1 + gate.double().abs()) * d_activated.abs()
    assert between(grad_gate, *(cast_to(d_activated * slope + r, dtype, "rne") for r in (-room, room)))


@dtypes
@pytest.mark.parametrize("code", SWIGLU)
def test_swiglu_differs_from_the_reference_only_where_exps_last_bit_does(dtype: torch.dtype, code: str) -> None:
    gate, up = random((50, 2000), dtype, 0, 3.0), random((50, 2000), dtype, 1)
    mine = triton.gated_act(gate, up, "silu", *SWIGLU[code], "rne")
    assert_gated(mine, gate, up, "silu", code, "rne", FREEDOM["silu"])
    theirs = reference.gated_act(gate, up, "silu", *SWIGLU[code], "rne")
    # FP16 has more boundaries, and under S5 one gate whose exp lies at one moves every product that it is in.
    assert (mine != theirs).float().mean() <= (5e-5 if dtype == BF16 and code != "S5" else 5e-4)


def norm_given(
    rstd: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, code: str, cast: str, dtype: torch.dtype
) -> Tensor:
    """The FP32 output of the reference's norm, had it found this reciprocal root mean square."""
    _, _, seen_by_norm = reference._norm_inputs(x, residual, NORM[code][0], cast, dtype)
    normalised = seen_by_norm * rstd
    return (round_to(normalised, dtype, cast) if NORM[code][1] else normalised) * weight.float()


@dtypes
@pytest.mark.parametrize("code", NORM)
@some
@given(
    data=st.data(),
    cast=casts,
    wide=st.tuples(*[st.booleans()] * 2),
    has_residual=st.booleans(),
    out_round=st.booleans(),
    carry_round=st.sampled_from([None, True, False]),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(2, 70)),
)
def test_add_rms_norm(
    dtype: torch.dtype,
    code: str,
    data: st.DataObject,
    cast: str,
    wide: tuple[bool, bool],
    has_residual: bool,
    out_round: bool,
    carry_round: bool | None,
    shape: tuple[int, ...],
) -> None:
    x_dtype, residual_dtype = (FP32 if w else dtype for w in wide)
    x = data.draw(tensors(shape, x_dtype, special=False))
    residual = data.draw(tensors(shape, residual_dtype, special=False)) if has_residual else None
    weight = data.draw(tensors(shape[-1:], dtype, special=False, strided=False))
    forward = (x, residual, weight, EPS, *NORM[code], out_round, carry_round, cast, dtype)
    out, carry, rstd = triton.add_rms_norm(*forward)
    _, their_carry, their_rstd = reference.add_rms_norm(*forward)
    assert equal(carry, their_carry)
    torch.testing.assert_close(rstd, their_rstd, rtol=8 * ULP, atol=0)
    out_dtype = dtype if out_round else FP32
    expected = cast_to(norm_given(rstd, x, residual, weight, code, cast, dtype), out_dtype, cast)
    assert equal(out, torch.empty_like(x, dtype=out_dtype).copy_(expected))

    grad = data.draw(tensors(shape, out_dtype, special=False))
    grad_carry = None if carry_round is None else data.draw(tensors(shape, dtype if carry_round else FP32, special=False))
    backward = (grad, grad_carry, x, residual, weight, rstd, *NORM[code], out_round, cast, dtype)
    mine, theirs = triton.add_rms_norm_backward(*backward), reference.add_rms_norm_backward(*backward)
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == other.dtype
        assert same_layout(one, other)
        # A sum in another order moves the FP32 value a little, and with it at most one rounding to a neighbour.
        precision = {FP32: 2.0**-20, FP16: 2.0**-10, BF16: 2.0**-7}[one.dtype]
        scale = other.float().abs().max() if other.numel() else 0
        torch.testing.assert_close(one.float(), other.float(), rtol=precision, atol=float(2.0**-18 * scale))


@dtypes
@pytest.mark.parametrize("code", NORM)
@pytest.mark.parametrize("cast", ["rne", "rtz"])
@pytest.mark.parametrize("out_round", [True, False])
@pytest.mark.parametrize("residual_dtype", [None, BF16, FP32])
def test_norm_of_two_numbers_leaves_no_room(
    dtype: torch.dtype, code: str, cast: str, out_round: bool, residual_dtype: torch.dtype | None
) -> None:
    """Sums of two numbers have one order: every rounding, forward and backward, shows in the bits."""
    weight = random((2,), dtype, 9)
    for seed in range(3):
        x, grad = random((2, 2), dtype, seed), random((2, 2), dtype if out_round else FP32, seed + 10)
        residual = None if residual_dtype is None else random((2, 2), dtype if residual_dtype == BF16 else FP32, seed + 20)
        grad_carry = random((2, 2), FP32, seed + 30)
        forward = (x, residual, weight, EPS, *NORM[code], out_round, False, cast, dtype)
        theirs = reference.add_rms_norm(*forward)
        for one, other in zip(triton.add_rms_norm(*forward), theirs, strict=True):
            assert equal(one, other)
        backward = (grad, grad_carry, x, residual, weight, theirs[2], *NORM[code], out_round, cast, dtype)
        pairs = zip(triton.add_rms_norm_backward(*backward), reference.add_rms_norm_backward(*backward), strict=True)
        for one, other in pairs:
            assert equal(one, other)


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_rows_than_programs_and_two_runs_alike(dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_PROGRAMS", 7)
    shape = (2, 3, 4, 5)
    x, grad = laid_out(random(shape, dtype), layout), laid_out(random(shape, dtype, 1), layout)
    weight = random((5,), dtype, 2)
    rstd = reference.add_rms_norm(x, None, weight, EPS, *NORM["N3"], True, None, "rne", dtype)[2]
    backward = (grad, None, x, None, weight, rstd, *NORM["N3"], True, "rne", dtype)
    first, second = triton.add_rms_norm_backward(*backward), triton.add_rms_norm_backward(*backward)
    assert all(equal(one, other) for one, other in zip(first, second, strict=True))
    exact = (grad.double() * x.double() * rstd.double()).sum((0, 1, 2))
    torch.testing.assert_close(first[2].double(), exact, rtol=2.0**-8, atol=1e-4)


@dtypes
@pytest.mark.parametrize("code", ROPE)
@some
@given(data=st.data(), mode=st.sampled_from(list(QK)), norm_cast=casts, cast=casts, shape=shapes, seq_first=st.booleans())
def test_qk_norm_rope(
    dtype: torch.dtype,
    code: str,
    data: st.DataObject,
    mode: str,
    norm_cast: str,
    cast: str,
    shape: tuple[int, int, int, int],
    seq_first: bool,
) -> None:
    batch, heads, seq, head_dim = shape
    shapes = [(batch, seq, n, head_dim) if seq_first else (batch, n, seq, head_dim) for n in (heads, 1)]
    table = (1, seq, 1, head_dim) if seq_first else (data.draw(st.sampled_from([1, batch])), 1, seq, head_dim)
    pair, grads = ([data.draw(tensors(shape, dtype, special=False)) for shape in shapes] for _ in range(2))
    weights = [data.draw(tensors(shape[-1:], dtype, special=False, strided=False)) for _ in pair]
    cos, sin = (data.draw(tensors(table, FP32, special=False)) for _ in range(2))
    rope, norm_round, out_round = (cos, sin, *ROPE[code], cast, dtype), *QK[mode]
    forward = (*pair, *weights, EPS, norm_round, out_round, norm_cast, *rope)
    *rotated, query_rstd, key_rstd = triton.qk_norm_rope(*forward)
    rstds = (query_rstd, key_rstd)
    for one, other in zip(rstds, reference.qk_norm_rope(*forward)[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=8 * ULP, atol=0)
    # Given these numbers every other bit is determined.
    normed = []
    for x, weight, rstd in zip(pair, weights, rstds, strict=True):
        exact = norm_given(rstd, x, None, weight, "N1" if norm_round else "N2", norm_cast, dtype)
        out_dtype = dtype if out_round else FP32
        normed.append(torch.empty_like(x, dtype=out_dtype).copy_(cast_to(exact, out_dtype, norm_cast)))
    assert equal(tuple(rotated), reference.rope(*normed, *rope))

    backward = (*grads, *pair, *weights, *rstds, norm_round, out_round, norm_cast, *rope)
    mine, theirs = triton.qk_norm_rope_backward(*backward), reference.qk_norm_rope_backward(*backward)
    assert equal(mine, triton.qk_norm_rope_backward(*backward))
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == other.dtype
        assert same_layout(one, other)
        precision, scale = {FP16: 2.0**-10, BF16: 2.0**-7}[one.dtype], float(other.float().abs().max())
        torch.testing.assert_close(one.float(), other.float(), rtol=precision, atol=2.0**-18 * scale)


@dtypes
@pytest.mark.parametrize("code", ROPE)
@pytest.mark.parametrize("mode", QK)
@pytest.mark.parametrize("casts_", [("rne", "rne"), ("rtz", "rne"), ("rne", "rtz")], ids="-".join)
def test_qk_norm_rope_of_two_numbers_leaves_no_room(
    dtype: torch.dtype, code: str, mode: str, casts_: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, and with one token to a program and two, whose gradients of a weight are two summands."""
    pair, grads = ([random((1, 1, 2, 2), dtype, seed + i) for i in range(2)] for seed in (0, 10))
    weights, angles = [random((2,), dtype, seed) for seed in (20, 21)], random((2, 2), FP32, 22, 3.0)
    rope, (norm_cast, cast) = (angles.cos(), angles.sin(), *ROPE[code]), casts_
    forward = (*pair, *weights, EPS, *QK[mode], norm_cast, *rope, cast, dtype)
    theirs = reference.qk_norm_rope(*forward)
    assert equal(triton.qk_norm_rope(*forward), theirs)
    backward = (*grads, *pair, *weights, *theirs[2:], *QK[mode], norm_cast, *rope, cast, dtype)
    for programs in (1, 2):
        monkeypatch.setattr(triton, "_PROGRAMS", programs)
        assert equal(triton.qk_norm_rope_backward(*backward), reference.qk_norm_rope_backward(*backward))


@dtypes
@some
@given(data=st.data(), cast=casts, wide=st.tuples(st.booleans(), st.booleans()), rounded=st.booleans(), n=st.integers(1, 99))
def test_residual_add_and_cast(
    dtype: torch.dtype, data: st.DataObject, cast: str, wide: tuple[bool, bool], rounded: bool, n: int
) -> None:
    x, residual = (data.draw(tensors((2, 3, n), FP32 if w else dtype)) for w in wide)
    add = (x, residual, rounded, cast, dtype)
    assert equal(triton.residual_add(*add), reference.residual_add(*add))
    assert equal(triton.cast_to(x.contiguous(), dtype, cast), reference.cast_to(x.contiguous(), dtype, cast))


def test_empty_batches() -> None:
    x, weight = torch.empty(0, 5, 64, dtype=BF16), random((64,), BF16)
    cos = torch.ones(1, 5, 64)
    assert triton.rope(x, x, cos, cos, "bf16", "fp32", "rne", BF16)[0].shape == x.shape
    assert triton.gated_act(x, x, "silu", False, "fp32", "rne").shape == x.shape
    settings = (True, True, "rne", cos, cos, "bf16", "fp32", "rne", BF16)
    rotated, _, *rstds = triton.qk_norm_rope(x, x, weight, weight, EPS, *settings)
    assert rotated.shape == x.shape
    grads = triton.qk_norm_rope_backward(x, x, x, x, weight, weight, *rstds, *settings)
    assert torch.equal(grads[3], torch.zeros(64, dtype=BF16))
    out, carry, rstd = triton.add_rms_norm(x, x, weight, EPS, "never", False, True, True, "rne", BF16)
    assert out.shape == carry.shape == x.shape
    grads = triton.add_rms_norm_backward(x, x, x, x, weight, rstd, "never", False, True, "rne", BF16)
    assert torch.equal(grads[2], torch.zeros(64, dtype=BF16))


def test_the_gpu_benchmark_on_these_kernels() -> None:
    """Its comparisons hold, and what it times runs."""
    device = torch.device("cpu")
    outcomes = [*gpu.checks(triton, device, 3, 24), *gpu.checks(triton, device, 2, 40)]
    assert [check.name for check in outcomes if not check.holds] == []
    for operation in gpu.operations(256, 2, device, liger=False):
        operation = dataclasses.replace(operation, implementations={"tripoint": operation.implementations["tripoint"]})
        for direction in gpu.GOALS:
            for run in gpu.runs(operation, direction).values():
                run()
