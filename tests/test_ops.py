"""The ops under every schedule give the bits of an independent oracle, and gradients the value of the exact formula.

`oracle` is NumPy with rounding on integer bit patterns and shares no code with `tripoint.ops`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
from bits import FORMATS, assert_gated, f32, pattern, random
from strategies import CASTS, LAYOUTS, NORM, QK, ROPE, SWIGLU, casts, laid_out, tensors
from tripoint import ops
from tripoint.ops import reference
from tripoint.ops.rounding import cast_to

DTYPES = list(FORMATS)
EPS = 1e-6
few = settings(max_examples=12, deadline=None)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])


@pytest.fixture(scope="module", params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for the readable formulas and for the fused kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPOINT_BACKEND", request.param)
        yield


def same_fp32(actual: Tensor, expected: np.ndarray) -> bool:
    """Equal bits in FP32, any NaN equal to any other."""
    assert actual.dtype == torch.float32
    bits = actual.contiguous().view(torch.int32).numpy()
    return bool(np.all((bits == expected.astype(np.float32).view(np.int32)) | (np.isnan(expected) & np.isnan(actual.numpy()))))


def tables(positions: Tensor, head_dim: int, theta: float = 1e6) -> tuple[Tensor, Tensor]:
    angles = reference.rope_angles(positions, theta, head_dim, "pos*inv").repeat(1, 2)
    return angles.cos(), angles.sin()


# -- rounding ---------------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("cast", CASTS)
def test_every_tie_and_its_neighbours_round_as_on_integers(dtype: torch.dtype, cast: str) -> None:
    every = oracle.values(np.arange(2**16, dtype=np.uint16), FORMATS[dtype])
    every = np.sort(every[np.isfinite(every)])
    middle = (every[1:] + every[:-1]) / 2
    wide = np.concatenate((every, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)))
    wide = np.concatenate((wide, [np.inf, -np.inf, np.nan, 1e300, -1e300, 1e-320]))
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    for x in (wide, narrow):
        assert np.array_equal(pattern(cast_to(torch.from_numpy(x), dtype, cast), dtype), oracle.bits(x, FORMATS[dtype], cast))


@dtypes
@pytest.mark.parametrize("cast", CASTS)
def test_round_to_and_its_gradient(dtype: torch.dtype, cast: str) -> None:
    x = random((5, 64), torch.float32).requires_grad_()
    y = ops.round_to(x, cast, dtype)
    assert np.array_equal(pattern(y.detach(), dtype), oracle.bits(f32(x.detach()), FORMATS[dtype], cast))
    grad = random((5, 64), dtype, seed=1)
    y.backward(grad)
    assert torch.equal(x.grad, grad.float())


# -- RoPE -------------------------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("code", ROPE)
@few
@given(data=st.data(), cast=casts, unrounded=st.booleans(), heads=st.integers(1, 3), seq=st.integers(1, 5))
def test_rope_equals_the_oracle(
    dtype: torch.dtype, code: str, data: st.DataObject, cast: str, unrounded: bool, heads: int, seq: int
) -> None:
    head_dim = data.draw(st.sampled_from([2, 6, 16]))
    # A QK-norm whose output is not rounded hands over FP32.
    pair = [data.draw(tensors((2, n, seq, head_dim), torch.float32 if unrounded else dtype)) for n in (heads, 1)]
    first = data.draw(st.integers(0, 100_000))
    cos, sin = tables(torch.arange(first, first + seq), head_dim)
    for x, actual in zip(pair, ops.rope(*pair, cos, sin, *ROPE[code], cast, dtype), strict=True):
        assert np.array_equal(pattern(actual, dtype), oracle.rope(f32(x), f32(cos), f32(sin), code, FORMATS[dtype], cast))
        assert actual.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("lower_is_even", [False, True])
@pytest.mark.parametrize("sign", [1, 0, -1])
@pytest.mark.parametrize(
    ("dtype", "tail"), [(torch.bfloat16, 2.0**-45), (torch.bfloat16, 2.0**-90), (torch.float16, 2.0**-24)], ids=str
)
def test_fma_of_rope_rounds_once(cast: str, lower_is_even: bool, sign: int, dtype: torch.dtype, tail: float) -> None:
    """x * cos lies halfway, and the sin product is lost in FP32, or even in FP64: whoever rounds twice misses it."""
    ulp = 2.0 ** (1 - FORMATS[dtype].precision)
    steps = 3 if lower_is_even else 1
    x, cos = torch.tensor([1.5, sign * tail]), torch.tensor([1 + steps * ulp] * 2)
    halfway = 1.5 * (1 + steps * ulp)
    up = sign > 0 or (sign == 0 and not lower_is_even)
    expected = halfway + (ulp / 2 if up and cast == "rne" else -ulp / 2)
    x = x.to(dtype)
    for actual in ops.rope(x, x, cos, torch.tensor([-1.0, -1.0]), *ROPE["R2"], cast, dtype):
        assert actual[0].item() == expected


@dtypes
@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(itertools.product(ROPE, CASTS), 2)])
def test_every_two_rope_schedules_differ(dtype: torch.dtype, one: tuple[str, str], other: tuple[str, str]) -> None:
    x, (cos, sin) = random((1, 2, 64, 32), dtype), tables(torch.arange(64), 32, theta=100.0)
    outputs = [ops.rope(x, x, cos, sin, *ROPE[code], cast, dtype) for code, cast in (one, other)]
    assert not any(torch.equal(*pair) for pair in zip(*outputs, strict=True))


@dtypes
@pytest.mark.parametrize("code", ROPE)
@pytest.mark.parametrize("unrounded", [False, True])
def test_rope_gradient_is_exact_but_for_one_rounding(dtype: torch.dtype, code: str, unrounded: bool) -> None:
    pair = [random((2, n, 40, 32), torch.float32 if unrounded else dtype, n).requires_grad_() for n in (3, 1)]
    cos, sin = tables(torch.arange(40), 32, theta=100.0)
    grads = [random((2, n, 40, 32), dtype, seed=n + 1) for n in (3, 1)]
    torch.autograd.backward(ops.rope(*pair, cos, sin, *ROPE[code], "rtz", dtype), grads)

    # The backward pass sees the tables of the forward pass.
    seen = [f32(t) if code == "R4" else oracle.rounded(f32(t), FORMATS[dtype], "rtz") for t in (cos, sin)]
    cos64, sin64 = (torch.from_numpy(t).double() for t in seen)
    for x, grad in zip(pair, grads, strict=True):
        x64 = x.detach().double().requires_grad_()
        first, second = x64.chunk(2, dim=-1)
        (x64 * cos64 + torch.cat((-second, first), dim=-1) * sin64).backward(grad.double())
        terms = (grad.double() * cos64).abs() + (grad.double() * sin64).abs().roll(16, -1)
        if code == "R1" and not unrounded:
            # Stepwise, as transformers: each product is rounded too. Its bits are compared in test_ops_real_modules.
            assert_rounded(x.grad, x64.grad, terms * 2.0 ** -(FORMATS[dtype].precision))
            assert not torch.equal(x.grad, x64.grad.to(dtype))
        else:
            assert_rounded(x.grad, x64.grad, terms * 2.0**-23)


def assert_rounded(actual: Tensor, exact: Tensor, slack: Tensor | float) -> None:
    """`actual` is a rounding to nearest of a number within `slack` of `exact`."""
    low, high = (exact - slack).to(torch.float64), (exact + slack).to(torch.float64)
    if actual.dtype == torch.float32:
        step = torch.finfo(torch.float32).eps * exact.abs()
        assert bool(((actual.double() >= low - step) & (actual.double() <= high + step)).all())
        return
    fmt = FORMATS[actual.dtype]
    low64, high64 = (oracle.values(oracle.bits(x.numpy(), fmt, "rne"), fmt) for x in (low, high))
    out = actual.double().numpy()
    assert np.all((low64 <= out) & (out <= high64))


ANGLES = {"pos*inv": 2, "pos/timescale": 2, "exp2": 8, "powscale": 32}
"""How to compute the angle, and within how many FP32 epsilons it may miss the exact one (powscale: a running product)."""


def test_rope_angles_are_near_the_exact_ones_and_one_to_eight_percent_of_the_outputs_apart() -> None:
    theta, head_dim = 1e6, 128
    positions = torch.randint(0, 32768, (512,), generator=torch.Generator().manual_seed(1))
    exact = positions.double()[:, None] * theta ** (-2 * torch.arange(head_dim // 2).double() / head_dim)
    x, outputs = random((1, 4, 512, head_dim), torch.bfloat16), {}
    for angle, epsilons in ANGLES.items():
        angles = reference.rope_angles(positions, theta, head_dim, angle)
        assert bool(((angles.double() - exact).abs() <= epsilons * 2**-23 * exact).all()), angle
        table = angles.repeat(1, 2)
        outputs[angle], _ = ops.rope(x, x, table.cos(), table.sin(), *ROPE["R4"], "rne", torch.bfloat16)
    for one, other in itertools.combinations(ANGLES, 2):
        assert 0.005 < share(outputs[one], outputs[other]) < 0.08, (one, other)


# -- gated activation -------------------------------------------------------------------------------------------------

ACTS = ("silu", "gelu", "gelu_tanh")
GATED = [("S1", act) for act in ACTS] + [("S3", act) for act in ACTS] + [("S5", "silu")]
gated = pytest.mark.parametrize(("code", "act"), GATED)
FREEDOM = {"silu": 2, "gelu": 12, "gelu_tanh": 8}
"""FP32 units in the last place that exp, erf (oneDNN: a polynomial) and tanh may be off."""


def where_defined(gate: Tensor, act: str) -> Tensor:
    """torch's FP32 erf-GELU (oneDNN) gives NaN at infinity and infinity from 2e38 on: no gate of a model."""
    return torch.where(gate.float().abs() > 1e38, torch.ones_like(gate), gate) if act == "gelu" else gate


@dtypes
@gated
@few
@given(data=st.data(), cast=casts, rows=st.integers(1, 4), width=st.integers(1, 70))
def test_gated_act_equals_the_oracle(
    dtype: torch.dtype, code: str, act: str, data: st.DataObject, cast: str, rows: int, width: int
) -> None:
    gate = where_defined(data.draw(tensors((2, rows, width), dtype, scale=8.0)), act)
    up = data.draw(tensors((2, rows, width), dtype))
    if act != "silu":
        # Zero times infinity is NaN, and where a GELU underflows to zero is left to FP32.
        up = torch.where(up.isinf(), torch.ones_like(up), up)
    actual = ops.gated_act(gate, up, act, *SWIGLU[code], cast)
    assert_gated(actual, gate, up, act, code, cast, FREEDOM[act])
    assert actual.stride() == torch.empty_like(gate).stride()


@dtypes
@gated
@pytest.mark.parametrize("cast", CASTS)
def test_gated_act_of_every_gate(dtype: torch.dtype, code: str, act: str, cast: str) -> None:
    """All 65536 gates against a random up: where silu is concerned, exp's form decides not one bit.

    Where it is a GELU, FP32 itself is coarse below -1 (1 + erf cancels), and, truncating, wherever the exact result is a
    number of the format: the erf polynomial just misses it.
    """
    gate = where_defined(torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype), act).repeat(4, 1)
    up = random((4, 2**16), dtype)
    differ = assert_gated(ops.gated_act(gate, up, act, *SWIGLU[code], cast), gate, up, act, code, cast, FREEDOM[act])
    share = float(differ[f32(gate) > -1].mean())
    assert share <= (0 if act == "silu" else 3e-3 if (act, cast) == ("gelu", "rtz") else 5e-5)


@dtypes
@pytest.mark.parametrize("act", ACTS)
def test_every_two_swiglu_schedules_differ(dtype: torch.dtype, act: str) -> None:
    gate, up = random((64, 64), dtype), random((64, 64), dtype, seed=1)
    known = [(code, cast) for code, of in GATED if of == act for cast in CASTS]
    for (one, cast_one), (other, cast_other) in itertools.combinations(known, 2):
        outputs = [ops.gated_act(gate, up, act, *SWIGLU[c], cast) for c, cast in ((one, cast_one), (other, cast_other))]
        assert not torch.equal(*outputs), (one, cast_one, other, cast_other)


@dtypes
@gated
def test_gated_act_gradient_is_exact_but_for_one_rounding(dtype: torch.dtype, code: str, act: str) -> None:
    gate, up = (random((64, 48), dtype, seed).requires_grad_() for seed in (0, 1))
    grad = random((64, 48), dtype, seed=2)
    ops.gated_act(gate, up, act, *SWIGLU[code], "rne").backward(grad)

    wide = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}.get(
        act, lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    )
    gate64, up64 = (x.detach().double().requires_grad_() for x in (gate, up))
    (wide(gate64) * up64).backward(grad.double())
    # Stepwise under S1, as transformers: grad * up and the activation are rounded first (in FP16 perhaps to a subnormal).
    unit, least = (2.0 ** -FORMATS[dtype].precision, 2.0**-25) if code == "S1" else (2.0**-21, 0.0)
    grad64 = grad.double().abs()
    assert_rounded(gate.grad, gate64.grad, 1.2 * (unit * grad64 * up64.detach().abs() + least))
    assert_rounded(up.grad, up64.grad, grad64 * (unit * gate64.detach().abs() + least))
    if code == "S1":
        assert not torch.equal(gate.grad, gate64.grad.to(dtype))


# -- residual + RMSNorm -----------------------------------------------------------------------------------------------

norm_codes = pytest.mark.parametrize("code", NORM)


def check_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, code: str, cast: str, out_round: bool, carry_round: bool | None
) -> None:
    dtype = weight.dtype
    fmt = FORMATS[dtype]
    out, carry, rstd = ops.add_rms_norm(x, residual, weight, EPS, *NORM[code], out_round, carry_round, cast, dtype)
    arrays = (f32(x), None if residual is None else f32(residual), f32(weight))

    # Where the order of the sum is free: 1/rms agrees with FP64's to a few FP32 units.
    expected = oracle.add_rms_norm(*arrays, EPS, code, fmt, cast)
    with np.errstate(all="ignore"):
        fits = (expected.rstd**-2 < 3.4e38) & (expected.rstd**-2 > 1e-38)  # FP32 squares neither overflow nor vanish
        error = np.abs(rstd.numpy() / expected.rstd - 1)
    assert np.all(error[fits] < 5e-7)

    # All that follows is determined, given that number.
    expected = oracle.add_rms_norm(*arrays, EPS, code, fmt, cast, rstd.numpy())
    if out_round:
        assert np.array_equal(pattern(out, dtype), oracle.bits(expected.out, fmt, cast))
    else:
        assert same_fp32(out, expected.out)
    if carry_round is None:
        assert carry.numel() == 0
    elif carry_round:
        assert np.array_equal(pattern(carry, dtype), oracle.bits(expected.total, fmt, cast))
    else:
        assert same_fp32(carry, expected.total)
    assert out.stride() == torch.empty_like(x).stride()


@dtypes
@norm_codes
@few
@given(data=st.data(), cast=casts, shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 70)))
def test_add_rms_norm_equals_the_oracle(
    dtype: torch.dtype, code: str, data: st.DataObject, cast: str, shape: tuple[int, ...]
) -> None:
    x = data.draw(tensors(shape, dtype))
    # FP32 where an unrounded sum was carried to here.
    residual = data.draw(st.none() | tensors(shape, dtype) | tensors(shape, torch.float32))
    weight = data.draw(tensors(shape[-1:], dtype, special=False, strided=False))
    check_norm(x, residual, weight, code, cast, True, data.draw(st.sampled_from([None, True, False])))


@dtypes
@pytest.mark.parametrize("mode", QK)
@few
@given(data=st.data(), cast=casts, heads=st.integers(1, 3))
def test_qk_norm_equals_the_oracle(dtype: torch.dtype, mode: str, data: st.DataObject, cast: str, heads: int) -> None:
    x = data.draw(tensors((2, heads, 3, 16), dtype))
    weight = data.draw(tensors((16,), dtype, special=False, strided=False))
    norm_round, out_round = QK[mode]
    # A QK-norm adds nothing, so that only N1 and N2's second field is left.
    check_norm(x, None, weight, "N1" if norm_round else "N2", cast, out_round, None)


@dtypes
@norm_codes
def test_norm_of_an_fp32_sum_without_residual(dtype: torch.dtype, code: str) -> None:
    """The first norm after an unrounded embedding or add: nothing is added, the FP32 value is carried on."""
    check_norm(random((3, 40), torch.float32), None, random((40,), dtype, 1), code, "rne", True, False)


@dtypes
def test_every_two_norm_schedules_differ(dtype: torch.dtype) -> None:
    x, residual, weight = random((256, 64), dtype), random((256, 64), dtype, 1, 4.0), random((64,), dtype, 2)
    known = list(itertools.product(NORM, CASTS))
    outputs = {k: ops.add_rms_norm(x, residual, weight, EPS, *NORM[k[0]], True, None, k[1], dtype)[0] for k in known}
    for one, other in itertools.combinations(known, 2):
        assert not torch.equal(outputs[one], outputs[other]), (one, other)
    carried = [ops.add_rms_norm(x, residual, weight, EPS, *NORM["N3"], True, r, "rne", dtype)[1] for r in (True, False)]
    assert not torch.equal(carried[0].float(), carried[1])


@dtypes
def test_every_two_qk_modes_differ(dtype: torch.dtype) -> None:
    """Also after RoPE, which takes an unrounded output in FP32."""
    x, weight, (cos, sin) = random((1, 2, 64, 32), dtype), random((32,), dtype, 1), tables(torch.arange(64), 32)
    rotated = {}
    for mode, (norm_round, out_round) in QK.items():
        for cast in CASTS[: 1 if mode == "none" else 2]:
            out, _, _ = ops.add_rms_norm(x, None, weight, EPS, "before_var", norm_round, out_round, None, cast, dtype)
            rotated[mode, cast], _ = ops.rope(out, out, cos, sin, "bf16", "fp32", "rne", dtype)
    for one, other in itertools.combinations(rotated, 2):
        assert not torch.equal(rotated[one], rotated[other]), (one, other)


@dtypes
@pytest.mark.parametrize("mode", QK)
@few
@given(data=st.data(), code=st.sampled_from(list(ROPE)), norm_cast=casts, cast=casts, heads=st.integers(1, 3))
def test_qk_norm_and_rope_in_one_call_equal_the_oracle(
    dtype: torch.dtype, mode: str, data: st.DataObject, code: str, norm_cast: str, cast: str, heads: int
) -> None:
    fmt, (norm_round, out_round) = FORMATS[dtype], QK[mode]
    pair = [data.draw(tensors((2, n, 5, 16), dtype)) for n in (heads, 1)]
    weights = [data.draw(tensors((16,), dtype, special=False, strided=False)) for _ in pair]
    cos, sin = tables(torch.arange(5) + data.draw(st.integers(0, 100_000)), 16)
    rope = (cos, sin, *ROPE[code], cast, dtype)
    *rotated, query_rstd, key_rstd = ops.qk_norm_rope(*pair, *weights, EPS, norm_round, out_round, norm_cast, *rope)
    for x, weight, rstd, actual in zip(pair, weights, (query_rstd, key_rstd), rotated, strict=True):
        check_norm(x, None, weight, "N1" if norm_round else "N2", norm_cast, out_round, None)
        norm_code = "N1" if norm_round else "N2"
        normed = oracle.add_rms_norm(f32(x), None, f32(weight), EPS, norm_code, fmt, norm_cast, rstd.numpy()).out
        if out_round:
            normed = oracle.rounded(normed, fmt, norm_cast)
        assert np.array_equal(pattern(actual, dtype), oracle.rope(normed, f32(cos), f32(sin), code, fmt, cast))
        assert actual.stride() == torch.empty_like(x).stride()


@dtypes
@norm_codes
@pytest.mark.parametrize("carry", ["none", "rounded", "fp32"])
def test_norm_gradient_is_exact_but_for_one_rounding(dtype: torch.dtype, code: str, carry: str) -> None:
    x = random((48, 64), dtype).requires_grad_()
    residual = random((48, 64), torch.float32 if carry == "fp32" else dtype, 1, 2.0).requires_grad_()
    weight = random((64,), dtype, 2).requires_grad_()
    carry_round = {"none": None, "rounded": True, "fp32": False}[carry]
    out, carried, rstd = ops.add_rms_norm(x, residual, weight, EPS, *NORM[code], True, carry_round, "rne", dtype)
    grad = random((48, 64), dtype, 3)
    grad_carry = random((48, 64), torch.float32 if carry == "fp32" else dtype, 4)
    torch.autograd.backward([out] if carry == "none" else [out, carried], [grad] if carry == "none" else [grad, grad_carry])
    assert not rstd.requires_grad

    # The formula in FP64, differentiated as if its roundings were not there, at the values that they leave.
    def through(exact: Tensor, to: Tensor) -> Tensor:
        return exact + (to.double() - exact).detach()

    x64, residual64, weight64 = (t.detach().double().requires_grad_() for t in (x, residual, weight))
    total = x64 + residual64
    stored = through(total, (x.float() + residual.float()).to(dtype))
    for_var, for_norm = {"before_var": (stored, stored), "never": (total, total), "after_var": (total, stored)}[NORM[code][0]]
    normalised = for_norm * torch.rsqrt(for_var.pow(2).mean(-1, keepdim=True) + EPS)
    if NORM[code][1]:
        normalised = through(normalised, (for_norm.detach().float() * rstd).to(dtype))
    objective = (normalised * weight64 * grad.double()).sum()
    if carry != "none":
        objective = objective + (total * grad_carry.double()).sum()
    objective.backward()

    # Relative to the terms that are added: N1 is stepwise and rounds each of them, the others are FP32.
    unit = 2.0 ** -FORMATS[dtype].precision if code == "N1" else 2.0**-21
    scale = (grad.double().abs() * weight64.detach().abs() * rstd.double()).amax(-1, keepdim=True)
    if carry != "none":
        scale = scale + grad_carry.double().abs()
    for actual, exact in ((x.grad, x64.grad), (residual.grad, residual64.grad)):
        assert_rounded(actual, exact, 2 * unit * scale)
    assert_rounded(weight.grad, weight64.grad, unit * (normalised * grad.double()).detach().abs().sum(0))
    if code != "N1":
        assert float((x.grad != x64.grad.to(dtype)).double().mean()) < 1e-3


@dtypes
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("to", [True, False])
def test_residual_add(dtype: torch.dtype, cast: str, to: bool) -> None:
    x, residual = random((9, 33), dtype).requires_grad_(), random((9, 33), torch.float32, 1).requires_grad_()
    total = ops.residual_add(x, residual, to, cast, dtype)
    exact = f32(x.detach()) + f32(residual.detach())
    if to:
        assert np.array_equal(pattern(total.detach(), dtype), oracle.bits(exact, FORMATS[dtype], cast))
    else:
        assert same_fp32(total.detach(), exact)
    grad = random((9, 33), total.dtype, 2)
    total.backward(grad)
    assert torch.equal(x.grad, grad.to(dtype))
    assert torch.equal(residual.grad, grad.float())


# -- how far apart ----------------------------------------------------------------------------------------------------


def share(one: Tensor, other: Tensor) -> float:
    return float((one != other).double().mean())


def test_rope_schedules_are_as_far_apart_as_documented() -> None:
    x = random((1, 4, 512, 128), torch.bfloat16)
    positions = torch.randint(0, 32768, (512,), generator=torch.Generator().manual_seed(1))
    cos, sin = tables(positions, 128)
    out = {code: ops.rope(x, x, cos, sin, *fields, "rne", torch.bfloat16)[0] for code, fields in ROPE.items()}
    for one, other, documented in (("R1", "R3", 0.29), ("R1", "R4", 0.36), ("R3", "R4", 0.26), ("R1", "R2", 0.22)):
        assert share(out[one], out[other]) == pytest.approx(documented, abs=0.03), (one, other)


def test_swiglu_schedules_are_as_far_apart_as_documented() -> None:
    gate, up = random((256, 1024), torch.bfloat16), random((256, 1024), torch.bfloat16, 1)
    out = {code: ops.gated_act(gate, up, "silu", *fields, "rne") for code, fields in SWIGLU.items()}
    for one, other, documented in (("S1", "S3", 0.27), ("S1", "S5", 0.34)):
        assert share(out[one], out[other]) == pytest.approx(documented, abs=0.03), (one, other)


def test_norm_schedules_are_as_far_apart_as_documented() -> None:
    x, residual = random((256, 2048), torch.bfloat16), random((256, 2048), torch.bfloat16, 1)
    weight = random((2048,), torch.bfloat16, 2)
    out = {
        code: ops.add_rms_norm(x, residual, weight, EPS, *fields, True, None, "rne", torch.bfloat16)[0]
        for code, fields in NORM.items()
    }
    pairs = {"N1 N2": 0.26, "N1 N3": 0.34, "N1 N4": 0.20, "N2 N3": 0.23, "N3 N4": 0.26, "N2 N5": 0.01}
    for pair, documented in pairs.items():
        one, other = pair.split()
        assert share(out[one], out[other]) == pytest.approx(documented, abs=0.03 if documented > 0.1 else 0.01), pair


# -- registration -----------------------------------------------------------------------------------------------------


def samples() -> list[tuple[object, tuple[object, ...]]]:
    """Calls that cover every combination of dtypes an op meets, and layouts that are not contiguous."""
    bf16 = torch.bfloat16
    cos, sin = tables(torch.arange(3), 8)
    weight = random((8,), bf16, 2)

    def x(layout: str = "contiguous", dtype: torch.dtype = bf16) -> Tensor:
        return laid_out(random((2, 2, 3, 8), dtype), layout).requires_grad_()

    def wide(layout: str = "contiguous") -> Tensor:
        return x(layout, torch.float32)

    def qk(layout: str, norm_round: bool, out_round: bool) -> tuple[object, ...]:
        weights = [random((8,), bf16, seed).requires_grad_() for seed in (3, 4)]
        rope = (cos, sin, "bf16", "bf16", "rtz", bf16)
        return (x(layout), x("transposed")[:, :1], *weights, EPS, norm_round, out_round, "rne", *rope)

    norm_calls = [
        (x("transposed"), None, weight, EPS, "before_var", True, True, None, "rne", bf16),
        (wide(), None, weight, EPS, "never", False, True, False, "rne", bf16),
        (x(), wide("transposed"), weight, EPS, "never", True, True, True, "rtz", bf16),
        (wide(), wide(), weight, EPS, "never", True, False, False, "rne", bf16),
    ]
    return [
        (ops.rope, (x("transposed"), x("transposed")[:, :1], cos, sin, "bf16", "bf16", "rne", bf16)),
        (ops.rope, (wide(), wide("sliced"), cos, sin, "fp32", "fp32", "rtz", bf16)),
        (ops.gated_act, (x("sliced"), x("transposed"), "silu", False, "fp32", "rne")),
        *((ops.add_rms_norm, call) for call in norm_calls),
        (ops.qk_norm_rope, qk("transposed", True, True)),
        (ops.qk_norm_rope, qk("sliced", False, False)),
        (ops.residual_add, (x(), wide("transposed"), True, "rne", bf16)),
        (ops.residual_add, (wide(), wide(), False, "rne", bf16)),
        (ops.round_to, (wide("sliced"), "rne", bf16)),
        (ops.round_to, (x(), "rne", bf16)),
    ]


@pytest.mark.parametrize("number", range(len(samples())))
def test_op_is_registered_correctly(number: int) -> None:
    op, arguments = samples()[number]
    torch.library.opcheck(op, arguments)


@dtypes
@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, LAYOUTS)], ids="-".join)
def test_layouts_change_no_bit_and_are_kept(dtype: torch.dtype, layouts: tuple[str, str]) -> None:
    """Outputs and gradients have their first argument's strides, as the fake kernels promise the compiler."""
    plain = [random((2, 3, 4, 16), dtype, seed) for seed in (0, 1)]
    weight, grad = random((16,), dtype, 2), random((2, 3, 4, 16), dtype, 3)

    def run(first: Tensor, second: Tensor) -> list[Tensor]:
        first, second = first.detach().requires_grad_(), second.detach().requires_grad_()
        gated_out = ops.gated_act(first, second, "silu", True, "fp32", "rne")
        normed, carry, _ = ops.add_rms_norm(first, second, weight, EPS, "never", False, True, True, "rne", dtype)
        added = ops.residual_add(first, second, True, "rne", dtype)
        outputs = [gated_out, normed, carry, added]
        return outputs + list(torch.autograd.grad(outputs, (first, second), [grad] * 4))

    inputs = [laid_out(x, layout) for x, layout in zip(plain, layouts, strict=True)]
    for number, (actual, expected) in enumerate(zip(run(*inputs), run(*plain), strict=True)):
        assert torch.equal(actual, expected)
        if number < 4:
            assert actual.stride() == torch.empty_like(inputs[0]).stride()
