"""No gradient is further from the exact one than transformers' own, and none depends on chance.

The exact gradient is that of the formula in FP64, without a single rounding, at the same BF16 inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from bits import random
from strategies import NORM, QK, ROPE, SWIGLU
from tripoint import ops

BF16 = torch.bfloat16
EPS = 1e-6
Function = Callable[..., tuple[Tensor, ...]]


@pytest.fixture(scope="module", params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPOINT_BACKEND", request.param)
        yield


def gradients(function: Function, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """In FP64, at `inputs` in `dtype`, of a weighted sum of the outputs."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    outputs = function(*leaves)
    grads = [random(tuple(out.shape), BF16, 100 + i).to(out.dtype) for i, out in enumerate(outputs)]
    return [grad.double() for grad in torch.autograd.grad(outputs, leaves, grads)]


def assert_no_worse(ours: Function, theirs: Function, exact: Function, *inputs: Tensor) -> None:
    """Root mean square error of each gradient."""
    right = gradients(exact, inputs, torch.float64)
    errors = [
        [float((grad - r).square().mean().sqrt()) for grad, r in zip(gradients(f, inputs, BF16), right, strict=True)]
        for f in (ours, theirs)
    ]
    for mine, other in zip(*errors, strict=True):
        assert 0 < mine <= other


@pytest.mark.parametrize("code", ROPE)
def test_rope(code: str) -> None:
    angles = torch.outer(torch.arange(256.0), 1e4 ** (-torch.arange(0, 64, 2) / 64)).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def ours(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return ops.rope(query, key, cos, sin, *ROPE[code], "rne", BF16)

    def transformers(query: Tensor, key: Tensor, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
        return apply_rotary_pos_emb(query, key, cos[None].to(dtype), sin[None].to(dtype))

    def exact(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return transformers(query, key, torch.float64)

    assert_no_worse(ours, transformers, exact, random((2, 9, 256, 64)), random((2, 3, 256, 64), seed=1))


@pytest.mark.parametrize("code", ROPE)
@pytest.mark.parametrize("mode", QK)
def test_qk_norm_and_rope(code: str, mode: str) -> None:
    angles = torch.outer(torch.arange(256.0), 1e4 ** (-torch.arange(0, 256, 2) / 256)).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def ours(query: Tensor, key: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        rope = (cos, sin, *ROPE[code], "rne", BF16)
        return ops.qk_norm_rope(query, key, *weights, EPS, *QK[mode], "rne", *rope)[:2]

    def transformers(query: Tensor, key: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        norm = LlamaRMSNorm(256, EPS)
        pair = (torch.func.functional_call(norm, {"weight": w}, x) for x, w in zip((query, key), weights, strict=True))
        return apply_rotary_pos_emb(*pair, cos[None].to(BF16), sin[None].to(BF16))

    def exact(query: Tensor, key: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        pair = (
            w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) for x, w in zip((query, key), weights, strict=True)
        )
        return apply_rotary_pos_emb(*pair, cos[None].double(), sin[None].double())

    pair = random((1, 6, 256, 256)), random((1, 3, 256, 256), seed=1)
    assert_no_worse(ours, transformers, exact, *pair, random((256,), seed=2), random((256,), seed=3))


@pytest.mark.parametrize("code", SWIGLU)
def test_swiglu(code: str) -> None:
    def formula(gate: Tensor, up: Tensor) -> tuple[Tensor]:
        return (nn.functional.silu(gate) * up,)

    def ours(gate: Tensor, up: Tensor) -> tuple[Tensor]:
        return (ops.gated_act(gate, up, "silu", *SWIGLU[code], "rne"),)

    assert_no_worse(ours, formula, formula, random((256, 1536), scale=2.0), random((256, 1536), seed=1))


@pytest.mark.parametrize("code", NORM)
@pytest.mark.parametrize("carry_round", [True, False])
def test_residual_add_and_norm(code: str, carry_round: bool) -> None:
    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return ops.add_rms_norm(x, residual, weight, EPS, *NORM[code], True, carry_round, "rne", BF16)[:2]

    def transformers(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = residual + x
        return torch.func.functional_call(LlamaRMSNorm(len(weight), EPS), {"weight": weight}, total), total

    def exact(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = residual + x
        return weight * total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS), total

    assert_no_worse(ours, transformers, exact, random((512, 576)), random((512, 576), seed=1), random((576,), seed=2))
