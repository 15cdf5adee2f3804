"""The native CPU kernels give the reference's bits: every schedule, shape, layout and number of threads, forward and backward.

Also which backend runs, and that one whose bits differ does not.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bits import random, same, same_layout
from strategies import LAYOUTS, NORM, QK, ROPE, SWIGLU, casts, laid_out, tensors
from tripoint import ops
from tripoint.errors import UsageError
from tripoint.ops import backend, cpu, reference
from tripoint.ops.backend import BackendError, backend_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
some = settings(max_examples=30, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    cpu.prepare("cpu")


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def equal(mine: Tensor | tuple[Tensor, ...], theirs: Tensor | tuple[Tensor, ...]) -> bool:
    """Equal bits, dtype and layout."""
    return same(mine, theirs) and same_layout(mine, theirs)


# -- bits -------------------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("code", ROPE)
@some
@given(
    data=st.data(),
    cast=casts,
    unrounded=st.booleans(),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.sampled_from([2, 6, 16, 32, 62, 64, 96, 128])),
    seq_first=st.booleans(),
)
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
    # The halves of a table need not agree; nor do its signs.
    cos, sin = (data.draw(tensors(table, FP32, special=False)) for _ in range(2))
    settings = (*ROPE[code], cast, dtype)
    assert equal(cpu.rope(*pair, cos, sin, *settings), reference.rope(*pair, cos, sin, *settings))
    settings = (*settings, x_dtype)
    assert equal(cpu.rope_backward(*grads, cos, sin, *settings), reference.rope_backward(*grads, cos, sin, *settings))


@dtypes
@pytest.mark.parametrize("code", SWIGLU)
@some
@given(data=st.data(), cast=casts, shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 130)))
def test_gated_act(code: str, dtype: torch.dtype, data: st.DataObject, cast: str, shape: tuple[int, int, int]) -> None:
    gate, up, grad = (data.draw(tensors(shape, dtype, scale=6.0)) for _ in range(3))
    assert equal(
        cpu.gated_act(gate, up, "silu", *SWIGLU[code], cast), reference.gated_act(gate, up, "silu", *SWIGLU[code], cast)
    )
    mine = cpu.gated_act_backward(grad, gate, up, "silu", *SWIGLU[code], cast)
    assert equal(mine, reference.gated_act_backward(grad, gate, up, "silu", *SWIGLU[code], cast))


@dtypes
@pytest.mark.parametrize("code", SWIGLU)
@pytest.mark.parametrize("cast", ["rne", "rtz"])
def test_gated_act_of_every_gate(dtype: torch.dtype, code: str, cast: str) -> None:
    """Under S5 the reference's exp is MKL's and ours Sleef's: no gate of 16 bits may tell them apart."""
    gate = torch.arange(2**16).to(torch.int16).view(dtype)
    up = random((2**16,), dtype)
    for g, u in ((gate, torch.ones_like(gate)), (gate, up), (gate[5:], up[5:])):
        assert equal(cpu.gated_act(g, u, "silu", *SWIGLU[code], cast), reference.gated_act(g, u, "silu", *SWIGLU[code], cast))
        mine = cpu.gated_act_backward(u, g, u, "silu", *SWIGLU[code], cast)
        assert equal(mine, reference.gated_act_backward(u, g, u, "silu", *SWIGLU[code], cast))


def check_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    grad: Tensor,
    grad_carry: Tensor | None,
    code: str,
    out_round: bool,
    carry_round: bool | None,
    cast: str,
    dtype: torch.dtype,
) -> None:
    forward = (x, residual, weight, EPS, *NORM[code], out_round, carry_round, cast, dtype)
    theirs = reference.add_rms_norm(*forward)
    assert equal(cpu.add_rms_norm(*forward), theirs)
    backward = (grad, grad_carry, x, residual, weight, theirs[2], *NORM[code], out_round, cast, dtype)
    assert equal(cpu.add_rms_norm_backward(*backward), reference.add_rms_norm_backward(*backward))


@dtypes
@pytest.mark.parametrize("code", NORM)
@some
@given(
    data=st.data(),
    cast=casts,
    wide=st.tuples(*[st.booleans()] * 3),
    has_residual=st.booleans(),
    out_round=st.booleans(),
    carry_round=st.sampled_from([None, True, False]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(2, 140)),
)
def test_add_rms_norm(
    dtype: torch.dtype,
    code: str,
    data: st.DataObject,
    cast: str,
    wide: tuple[bool, bool, bool],
    has_residual: bool,
    out_round: bool,
    carry_round: bool | None,
    shape: tuple[int, int, int],
) -> None:
    x_dtype, residual_dtype, weight_dtype = (FP32 if w else dtype for w in wide)
    x = data.draw(tensors(shape, x_dtype))
    residual = data.draw(tensors(shape, residual_dtype)) if has_residual else None
    weight = data.draw(tensors(shape[-1:], weight_dtype, special=False, strided=False))
    # The gradient's layout decides in which order the weight's gradient is summed; the input's, what `+` makes of two.
    grad = laid_out(data.draw(tensors(shape, dtype if out_round else FP32)), "contiguous")
    grad_carry = None if carry_round is None else data.draw(tensors(shape, dtype if carry_round else FP32))
    check_norm(x, residual, weight, grad, grad_carry, code, out_round, carry_round, cast, dtype)


@dtypes
@pytest.mark.parametrize("code", NORM)
@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, LAYOUTS)], ids="-".join)
def test_qk_norm_layouts(dtype: torch.dtype, code: str, layouts: tuple[str, str]) -> None:
    shape = (2, 50, 3, 64)
    x, grad = laid_out(random(shape, dtype), layouts[0]), laid_out(random(shape, dtype, 1), layouts[1])
    check_norm(x, None, random((64,), dtype, 2), grad, None, code, True, None, "rne", dtype)


@dtypes
@pytest.mark.parametrize("code", ROPE)
@pytest.mark.parametrize("mode", QK)
@some
@given(
    data=st.data(),
    norm_cast=casts,
    cast=casts,
    wide=st.tuples(*[st.booleans()] * 2),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.sampled_from([2, 6, 32, 62, 64, 128])),
    seq_first=st.booleans(),
)
def test_qk_norm_rope(
    dtype: torch.dtype,
    code: str,
    mode: str,
    data: st.DataObject,
    norm_cast: str,
    cast: str,
    wide: tuple[bool, bool],
    shape: tuple[int, int, int, int],
    seq_first: bool,
) -> None:
    batch, heads, seq, head_dim = shape
    shapes = [(batch, seq, n, head_dim) if seq_first else (batch, n, seq, head_dim) for n in (heads, 1)]
    table = (1, seq, 1, head_dim) if seq_first else (data.draw(st.sampled_from([1, batch])), 1, seq, head_dim)
    x_dtype, weight_dtype = (FP32 if w else dtype for w in wide)
    pair = [data.draw(tensors(shape, x_dtype)) for shape in shapes]
    grads = [data.draw(tensors(shape, dtype)) for shape in shapes]
    weights = [data.draw(tensors((head_dim,), weight_dtype, special=False, strided=False)) for _ in pair]
    cos, sin = (data.draw(tensors(table, FP32, special=False)) for _ in range(2))
    rope = (cos, sin, *ROPE[code], cast, dtype)
    forward = (*pair, *weights, EPS, *QK[mode], norm_cast, *rope)
    theirs = reference.qk_norm_rope(*forward)
    assert equal(cpu.qk_norm_rope(*forward), theirs)
    backward = (*grads, *pair, *weights, *theirs[2:], *QK[mode], norm_cast, *rope)
    assert equal(cpu.qk_norm_rope_backward(*backward), reference.qk_norm_rope_backward(*backward))


@pytest.mark.parametrize("code", ["N1", "N5"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("rows", "hidden"),
    [(2048, 576), (333, 2048), (70000, 24), (17, 8192), (4099, 100), (1, 20000), (3, 5), (40, 7), (257, 333)],
)
def test_norm_sums_run_in_atens_order(code: str, threads: int, rows: int, hidden: int) -> None:
    torch.set_num_threads(threads)
    x, residual, grad, grad_carry = (random((rows, hidden), BF16, seed) for seed in range(4))
    weight = random((hidden,), BF16, 4)
    check_norm(x, residual, weight, grad, grad_carry, code, True, True, "rne", BF16)
    # In FP32 nothing hides a different last bit.
    check_norm(x.float(), None, weight.float(), grad.float(), None, code, False, None, "rne", FP32)


@dtypes
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_elementwise_shapes(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    for shape in ((1009, 1537), (70001,), (32768,), (32769,)):
        gate, up, grad = (random(shape, dtype, seed, 3.0) for seed in range(3))
        for code in SWIGLU:
            assert equal(
                cpu.gated_act(gate, up, "silu", *SWIGLU[code], "rne"),
                reference.gated_act(gate, up, "silu", *SWIGLU[code], "rne"),
            )
            mine = cpu.gated_act_backward(grad, gate, up, "silu", *SWIGLU[code], "rne")
            assert equal(mine, reference.gated_act_backward(grad, gate, up, "silu", *SWIGLU[code], "rne"))
    x = random((2, 9, 700, 64), dtype)
    angles = random((2, 1, 700, 64), FP32, 1, 100.0)
    for code in ROPE:
        rope = (x, x[:, :3], angles.cos(), angles.sin(), *ROPE[code], "rne", dtype)
        assert equal(cpu.rope(*rope), reference.rope(*rope))


@dtypes
@some
@given(data=st.data(), cast=casts, wide=st.tuples(st.booleans(), st.booleans()), rounded=st.booleans(), n=st.integers(1, 99))
def test_residual_add_and_cast(
    dtype: torch.dtype, data: st.DataObject, cast: str, wide: tuple[bool, bool], rounded: bool, n: int
) -> None:
    x, residual = (data.draw(tensors((2, 3, n), FP32 if w else dtype)) for w in wide)
    add = (x, residual, rounded, cast, dtype)
    assert equal(cpu.residual_add(*add), reference.residual_add(*add))
    assert equal(cpu.cast_to(x.contiguous(), dtype, cast), reference.cast_to(x.contiguous(), dtype, cast))


def test_empty_batches() -> None:
    x, weight = torch.empty(0, 5, 64, dtype=BF16), random((64,), BF16)
    cos = torch.ones(1, 5, 64)
    assert cpu.rope(x, x, cos, cos, "bf16", "fp32", "rne", BF16)[0].shape == x.shape
    assert cpu.gated_act(x, x, "silu", False, "fp32", "rne").shape == x.shape
    settings = (True, True, "rne", cos, cos, "bf16", "fp32", "rne", BF16)
    rotated, _, *rstds = cpu.qk_norm_rope(x, x, weight, weight, EPS, *settings)
    assert rotated.shape == x.shape
    grads = cpu.qk_norm_rope_backward(x, x, x, x, weight, weight, *rstds, *settings)
    assert torch.equal(grads[3], torch.zeros(64, dtype=BF16))
    out, carry, rstd = cpu.add_rms_norm(x, x, weight, EPS, "never", False, True, True, "rne", BF16)
    assert out.shape == carry.shape == x.shape
    grads = cpu.add_rms_norm_backward(x, x, x, x, weight, rstd, "never", False, True, "rne", BF16)
    assert torch.equal(grads[2], torch.zeros(64, dtype=BF16))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_ops_save_nothing_but_their_inputs_and_one_number_per_row() -> None:
    x, residual, gate, up = (random((3, 7, 64), BF16, seed).requires_grad_() for seed in range(4))
    weight = random((64,), BF16, 4).requires_grad_()
    angles = random((7, 64), FP32, 5)
    cos, sin = angles.cos(), angles.sin()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.rope(x, residual, cos, sin, "bf16", "fp32", "rne", BF16)
        assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}
        saved.clear()
        ops.gated_act(gate, up, "silu", False, "fp32", "rne")
        assert {t.data_ptr() for t in saved} == {gate.data_ptr(), up.data_ptr()}
        saved.clear()
        rotated = ops.qk_norm_rope(x, up, weight, weight, EPS, True, False, "rne", cos, sin, "bf16", "fp32", "rne", BF16)
        assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, up, weight, *rotated[2:], cos, sin)}
        saved.clear()
        _, _, rstd = ops.add_rms_norm(x, residual, weight, EPS, "never", False, True, False, "rne", BF16)
        assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, residual, weight, rstd)}
        saved.clear()
        ops.residual_add(x, residual, False, "rne", BF16)
        assert not saved


# -- choice of backend ------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """`backend_for` and the CPU library, as in a process that has not chosen yet."""
    monkeypatch.delenv("TRIPOINT_BACKEND", raising=False)
    for cached in (backend._load, cpu._library):
        cached.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cached in (backend._load, cpu._library):
        cached.cache_clear()


def test_backend_by_device_and_by_force(fresh_choice: pytest.MonkeyPatch) -> None:
    assert backend_for(torch.device("cpu")) is cpu
    assert backend_for(torch.device("mps")) is reference
    fresh_choice.setenv("TRIPOINT_BACKEND", "reference")
    assert backend_for(torch.device("cpu")) is reference
    fresh_choice.setenv("TRIPOINT_BACKEND", "gpu")
    with pytest.raises(UsageError, match="TRIPOINT_BACKEND=gpu: unknown backend; set it to one of reference, cpu, triton"):
        backend_for(torch.device("cpu"))


def test_without_a_compiler_the_reference_runs_with_one_warning(fresh_choice: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_choice.setenv("TRIPOINT_CACHE", str(tmp_path))
    fresh_choice.setenv("CXX", "no-such-compiler")
    x = random((2, 64), BF16)
    with pytest.warns(RuntimeWarning, match="the slower reference operations run instead .no C.. compiler") as caught:
        out = ops.gated_act(x, x, "silu", False, "fp32", "rne")
    assert len(caught) == 1
    assert torch.equal(out, reference.gated_act(x, x, "silu", False, "fp32", "rne"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.gated_act(x, x, "silu", False, "fp32", "rne")


def test_kernels_with_other_bits_are_refused(fresh_choice: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Contracted multiply-adds are what a careless build has."""
    fresh_choice.setenv("TRIPOINT_CACHE", str(tmp_path))
    capability = torch.backends.cpu.get_cpu_capability()
    fresh_choice.setitem(cpu._INSTRUCTIONS, capability, (*cpu._INSTRUCTIONS[capability], "-mfma", "-ffp-contract=fast"))
    with pytest.raises(BackendError, match=r"bits differ from the reference's in .*rope"):
        cpu.prepare("cpu")


@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_other_instruction_sets(capability: str) -> None:
    """ATen's bits are not the same on all of them; the kernels follow."""
    code = "from tripoint.ops import cpu; cpu.prepare('cpu')"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
