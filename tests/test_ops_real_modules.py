"""The ops give the bits of modules that others wrote: transformers', torch's and vLLM's own.

Outputs and, where the schedule is transformers' own (R1 S1 N1), every gradient.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

import vllm_modules
from bits import random, same
from strategies import NORM, ROPE, SWIGLU, laid_out
from tiny import ARCHITECTURES, ROPES, config
from tripoint import ops
from tripoint.ops import reference

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = [torch.bfloat16, torch.float16]
ACTS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
EPS = 1e-6

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture(scope="module", params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for the readable formulas and for the fused kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPOINT_BACKEND", request.param)
        yield


def assert_same_with_gradients(
    ours: Callable[..., tuple[Tensor, ...]], theirs: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
) -> None:
    """Both functions of the same leaves give the same outputs and, for a random gradient, the same gradients."""
    results = []
    for function in (ours, theirs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        grads = [laid_out(random(tuple(out.shape), out.dtype, 100 + i), "sliced") for i, out in enumerate(outputs)]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    for number, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert same(actual, expected), f"result {number}: {int((actual != expected).sum())} of {actual.numel()} differ"


def of(architecture: str, name: str) -> Any:
    """`name`, or the architecture's class of that name, in transformers' module of the architecture."""
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    return getattr(module, name, None) or getattr(module, architecture.capitalize() + name)


def norm_module(architecture: str, weight: Tensor) -> nn.Module:
    norm = of(architecture, "RMSNorm")(len(weight), eps=EPS)
    norm.weight = nn.Parameter(weight)
    return norm


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, code: str, carry_round: bool = True) -> tuple[Tensor, Tensor]:
    out, carry, _ = ops.add_rms_norm(x, residual, weight, EPS, *NORM[code], True, carry_round, "rne", BF16)
    return out, carry


# -- transformers, eager, in BF16 and FP16: R1 S1 N1 ------------------------------------------------------------------


@dtypes
@architectures
@pytest.mark.parametrize("shape", [(2, 5, 64), (2, 7, 4, 32), (2, 700, 576)], ids=str)
def test_rms_norm_is_n1(architecture: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    norm = norm_module(architecture, random(shape[-1:], dtype))

    def theirs(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (torch.func.functional_call(norm, {"weight": weight}, (x,)),)

    def ours(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return ops.add_rms_norm(x, None, weight, EPS, *NORM["N1"], True, None, "rne", dtype)[:1]

    assert_same_with_gradients(ours, theirs, random(shape, dtype, 1, 3.0), random(shape[-1:], dtype, 2))


@dtypes
@architectures
def test_residual_add_and_rms_norm_is_n1(architecture: str, dtype: torch.dtype) -> None:
    """As in a decoder layer: the sum is normalised and also goes on to the next add."""
    norm = norm_module(architecture, random((64,), dtype))

    def theirs(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = residual + x
        return torch.func.functional_call(norm, {"weight": weight}, (total,)), total

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return ops.add_rms_norm(x, residual, weight, EPS, *NORM["N1"], True, True, "rne", dtype)[:2]

    shape = (2, 50, 64)
    assert_same_with_gradients(ours, theirs, random(shape, dtype, 1), random(shape, dtype, 2, 4.0), random((64,), dtype, 3))


@dtypes
@architectures
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_embedding_is_r1(architecture: str, dtype: torch.dtype, rope: str) -> None:
    """Every rope type, past the trained length too, where dynamic and longrope change their frequencies."""
    settings = config(architecture, rope)
    embedding, rotate = of(architecture, "RotaryEmbedding")(settings), of(architecture, "apply_rotary_pos_emb")
    length = 3 * settings.max_position_embeddings
    positions = torch.arange(length)[None]

    def theirs(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        return tuple(rotate(query, key, *embedding(query, positions)))

    def ours(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        cos, sin = (table.unsqueeze(1) for table in embedding(query.float(), positions))
        assert cos.dtype == FP32
        return ops.rope(query.transpose(1, 2), key.transpose(1, 2), cos, sin, *ROPE["R1"], "rne", dtype)

    head_dim = settings.head_dim
    assert_same_with_gradients(
        ours, theirs, random((2, length, 4, head_dim), dtype, 1), random((2, length, 2, head_dim), dtype, 2)
    )


def test_default_angles_are_transformers_own() -> None:
    settings = config("llama")
    positions = torch.arange(5000)
    cos, _ = of("llama", "RotaryEmbedding")(settings)(random((1,), FP32), positions[None])
    theta = settings.rope_parameters["rope_theta"]
    angles = reference.rope_angles(positions, theta, settings.head_dim, "pos*inv")
    assert same(angles.cos(), cos[0, :, : settings.head_dim // 2])


@dtypes
@architectures
@pytest.mark.parametrize("act", ACTS)
def test_mlp_is_s1(architecture: str, dtype: torch.dtype, act: str) -> None:
    mlp = of(architecture, "MLP")(config(architecture, hidden_act=act)).to(dtype)

    def theirs(x: Tensor) -> tuple[Tensor, ...]:
        return (mlp(x),)

    def ours(x: Tensor) -> tuple[Tensor, ...]:
        return (mlp.down_proj(ops.gated_act(mlp.gate_proj(x), mlp.up_proj(x), ACTS[act], *SWIGLU["S1"], "rne")),)

    assert_same_with_gradients(ours, theirs, random((2, 40, 64), dtype, 1, 3.0))


@dtypes
@pytest.mark.parametrize("act", ACTS)
def test_activation_of_every_gate_is_s1(dtype: torch.dtype, act: str) -> None:
    gate = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    if act == "gelu":
        # oneDNN computes it for BF16 and flushes inputs and results below the smallest normal number.
        gate = gate[(gate.abs() > 2 * torch.finfo(dtype).tiny) & gate.isfinite()]
    activation = ACT2FN[act]

    def theirs(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (activation(gate) * up,)

    def ours(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (ops.gated_act(gate, up, ACTS[act], *SWIGLU["S1"], "rne"),)

    assert_same_with_gradients(ours, theirs, gate, random(tuple(gate.shape), dtype, 1))


# -- OLMo2 and torch's own norm: R4 N2 --------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("of_torch", [False, True], ids=["olmo2", "torch"])
def test_olmo2_and_torch_norm_are_n2(dtype: torch.dtype, of_torch: bool) -> None:
    norm = norm_module("olmo2", random((64,), dtype))

    def theirs(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = residual + x
        if of_torch:
            return nn.functional.rms_norm(total, (64,), weight, EPS), total
        return torch.func.functional_call(norm, {"weight": weight}, (total,)), total

    x, residual, weight = random((2, 50, 64), dtype, 1), random((2, 50, 64), dtype, 2, 4.0), random((64,), dtype, 3)
    out, total = theirs(x, residual, weight)
    ours, carry, _ = ops.add_rms_norm(x, residual, weight, EPS, *NORM["N2"], True, True, "rne", dtype)
    assert same(ours, out)
    assert same(carry, total)


@dtypes
def test_olmo2_rope_is_r4(dtype: torch.dtype) -> None:
    settings = config("olmo2")
    embedding, rotate = of("olmo2", "RotaryEmbedding")(settings), of("olmo2", "apply_rotary_pos_emb")
    query, key = random((2, 4, 100, settings.head_dim), dtype, 1), random((2, 2, 100, settings.head_dim), dtype, 2)
    cos, sin = embedding(query, torch.arange(100)[None])
    rotated = ops.rope(query, key, cos[:, None], sin[:, None], *ROPE["R4"], "rne", dtype)
    assert same(rotated, rotate(query, key, cos, sin))


# -- transformers, FP32 parameters under autocast: R4 S1 N6, QK-norm `norm` -------------------------------------------


@pytest.fixture
def autocast() -> Any:
    with torch.no_grad(), torch.autocast("cpu", BF16):
        yield


@architectures
@pytest.mark.usefixtures("autocast")
def test_norm_under_autocast_is_n6(architecture: str) -> None:
    """The residual stream is FP32; what is compared is what the next projection casts its input to."""
    weight = random((64,))
    norm = norm_module(architecture, weight.float())
    attended, residual = random((2, 50, 64), BF16, 1), random((2, 50, 64), FP32, 2, 4.0)
    total = residual + attended
    out, carry = rms_norm(attended, residual, weight, "N3", carry_round=False)
    assert same(out, norm(total).to(BF16))
    assert same(carry, total)


@pytest.mark.usefixtures("autocast")
def test_qk_norm_and_rope_under_autocast() -> None:
    weight, settings = random((32,)), config("qwen3")
    norm = norm_module("qwen3", weight.float())
    embedding, rotate = of("qwen3", "RotaryEmbedding")(settings), of("qwen3", "apply_rotary_pos_emb")
    projected = random((2, 20, 4, 32), BF16, 1)
    cos, sin = embedding(random((1,), FP32), torch.arange(20)[None])
    normed = norm(projected)
    ours, _, _ = ops.add_rms_norm(projected, None, weight, EPS, "before_var", True, False, None, "rne", BF16)
    assert same(ours, normed)
    query = normed.transpose(1, 2)
    mine = ours.transpose(1, 2)
    rotated = ops.rope(mine, mine, cos[:, None], sin[:, None], *ROPE["R4"], "rne", BF16)
    assert same(rotated, tuple(x.to(BF16) for x in rotate(query, query, cos, sin)))


@architectures
@pytest.mark.usefixtures("autocast")
def test_rope_under_autocast_is_r4(architecture: str) -> None:
    settings = config(architecture)
    embedding, rotate = of(architecture, "RotaryEmbedding")(settings), of(architecture, "apply_rotary_pos_emb")
    query, key = random((2, 4, 20, 32), BF16, 1), random((2, 2, 20, 32), BF16, 2)
    cos, sin = embedding(random((1,), FP32), torch.arange(20)[None])
    rotated = ops.rope(query, key, cos[:, None], sin[:, None], *ROPE["R4"], "rne", BF16)
    assert same(rotated, tuple(x.to(BF16) for x in rotate(query, key, cos, sin)))


@architectures
@pytest.mark.usefixtures("autocast")
def test_mlp_under_autocast_is_s1(architecture: str) -> None:
    mlp = of(architecture, "MLP")(config(architecture)).float()
    x = random((2, 40, 64), FP32, 1, 3.0)
    assert same(mlp.down_proj(ops.gated_act(mlp.gate_proj(x), mlp.up_proj(x), "silu", *SWIGLU["S1"], "rne")), mlp(x))


# -- vLLM on CPU, uncompiled: R3 S1 N4, and its C++ kernels: S3, N5 ---------------------------------------------------

HIDDEN, INTERMEDIATE, HEAD_DIM, THETA, TOKENS = 1024, 512, 64, 1e6, 256


@pytest.fixture(scope="session")
def given() -> dict[str, Any]:
    return {
        "x": random((TOKENS, HIDDEN), BF16, 1),
        "residual": random((TOKENS, HIDDEN), BF16, 2, 2.0),
        "weight": random((HIDDEN,), BF16, 3),
        "gate_up": random((TOKENS, 2 * INTERMEDIATE), BF16, 4, 2.0),
        "query": random((TOKENS, 4 * HEAD_DIM), BF16, 5),
        "key": random((TOKENS, 2 * HEAD_DIM), BF16, 6),
        "positions": torch.randint(0, 32768, (TOKENS,), generator=torch.Generator().manual_seed(7)),
        "head_dim": HEAD_DIM,
        "theta": THETA,
    }


@pytest.fixture(scope="session")
def vllm(given: dict[str, Any]) -> dict[str, Tensor]:
    return vllm_modules.run(given)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Where FP32 leaves room, the order of a sum or a form of erf: 1 ulp in at most 5e-5 of the elements."""
    differ = actual != expected
    assert float(differ.double().mean()) <= 5e-5
    one, other = (x.contiguous().view(torch.int16)[differ].int() for x in (actual, expected))
    assert bool(((one - other).abs() <= 1).all())


def test_vllm_rotary_embedding_is_r3(given: dict[str, Any], vllm: dict[str, Tensor]) -> None:
    inv_freq = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2, dtype=FP32) / HEAD_DIM)
    angles = (given["positions"][:, None].float() * inv_freq).repeat(1, 2)[:, None]
    pair = (given[name].view(TOKENS, -1, HEAD_DIM) for name in ("query", "key"))
    query, key = ops.rope(*pair, angles.cos(), angles.sin(), *ROPE["R3"], "rne", BF16)
    assert same((query.flatten(1), key.flatten(1)), (vllm["query"], vllm["key"]))


@pytest.mark.parametrize(("name", "code"), [("silu", "S1"), ("gelu_tanh", "S1"), ("kernel_silu", "S3")])
def test_vllm_gated_activation(given: dict[str, Any], vllm: dict[str, Tensor], name: str, code: str) -> None:
    gate, up = given["gate_up"].chunk(2, dim=-1)
    assert same(ops.gated_act(gate, up, name.removeprefix("kernel_"), *SWIGLU[code], "rne"), vllm[name])


def test_vllm_gelu_is_s1_but_for_the_form_of_erf(given: dict[str, Any], vllm: dict[str, Tensor]) -> None:
    """torch takes ATen's erf for vLLM's strided gate, oneDNN's polynomial for a contiguous one; below -1 neither is good,
    since 1 + erf cancels."""
    gate, up = given["gate_up"].chunk(2, dim=-1)
    compared = gate > -1
    assert_near(ops.gated_act(gate, up, "gelu", *SWIGLU["S1"], "rne")[compared], vllm["gelu"][compared])


def test_vllm_rms_norm_is_n4(given: dict[str, Any], vllm: dict[str, Tensor]) -> None:
    """Bits, no ulps: its native implementation sums in the order of ATen's `mean`, as ours does."""
    x, residual, weight = given["x"], given["residual"], given["weight"]
    assert same(rms_norm(x, None, weight, "N4")[0], vllm["norm"])
    out, carry = rms_norm(x, residual, weight, "N4")
    assert same(out, vllm["add_norm"])
    assert same(carry, vllm["carry"])


def test_vllm_norm_kernels_are_n3_and_n5_but_for_the_order_of_the_sum(given: dict[str, Any], vllm: dict[str, Tensor]) -> None:
    x, residual, weight = given["x"], given["residual"], given["weight"]
    assert_near(rms_norm(x, None, weight, "N3")[0], vllm["kernel_norm"])
    out, carry = rms_norm(x, residual, weight, "N5")
    assert_near(out, vllm["kernel_add_norm"])
    assert same(carry, vllm["kernel_carry"])
    for code in NORM.keys() - {"N5"}:
        with pytest.raises(AssertionError):
            assert_near(rms_norm(x, residual, weight, code)[0], vllm["kernel_add_norm"])
