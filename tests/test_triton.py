"""The Triton kernels: in the interpreter against the reference, and compiled for a GPU nobody needs to have.

`interpreted_triton.py` holds the comparisons; they need a process of their own, whose Triton interprets from the start.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from strategies import NORM, QK, ROPE, SWIGLU
from tripoint.ops import triton_kernels as kernels
from tripoint.ops.backend import BackendError
from tripoint.ops.triton import prepare

HOPPER = GPUTarget("cuda", 90, 32)


def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRIPOINT_BACKEND": "triton", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted_triton.py"]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_cpu_tensors_need_the_interpreter() -> None:
    with pytest.raises(BackendError, match="they need a GPU"):
        prepare("cpu")
    prepare("cuda")


# -- machine code -----------------------------------------------------------------------------------------------------


def ptx(kernel: Any, pointers: dict[str, str], fusion: bool = False, **settings: Any) -> str:
    """`kernel` compiled for sm_90, its pointers and strides aligned as they are in practice, its batch of one."""
    settings = {"size1": 1, "BITS": False} | settings
    signature: dict[str, str] = {}
    constants, attributes = {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in settings:
            signature[name], constants[(number,)] = "constexpr", settings[name]
            continue
        signature[name] = pointers.get(name) or ("fp32" if name == "eps" else "i32")
        if name in pointers or "stride" in name or name in ("hidden", "width", "numel"):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options={"enable_fp_fusion": fusion, "num_warps": 4})
    text: str = compiled.asm["ptx"]
    return text


def instructions(text: str) -> Counter[str]:
    return Counter(re.findall(r"^\s+(?:@\S+ )?([a-z]+\.[\w.:]+)", text, re.MULTILINE))


def fused(text: str) -> int:
    """Multiply-adds but for libdevice's, which flush subnormals."""
    return sum(
        count for name, count in instructions(text).items() if name.startswith(("fma.rn.f", "fma.rn.b")) and "ftz" not in name
    )


def check(text: str, pointer: str, cast: str, multiply_adds: int = 0) -> None:
    names = instructions(text)
    assert fused(text) == multiply_adds
    # What names its rounding ptxas does not contract either.
    arithmetic = [name for name in names if re.match(r"(add|sub|mul)\.(\w+\.)*b?f(16|32|64)", name)]
    assert arithmetic
    assert all(".rn." in name for name in arithmetic)
    # Memory moves in the largest pieces there are.
    assert names["ld.global.v4.b32"] > 0
    assert names["st.global.v4.b32"] > 0
    narrow = {"*bf16": "bf16", "*fp16": "f16"}[pointer]
    rounding = [name for name in names if re.match(rf"cvt\.\w+\.{narrow}(x2)?\.f32", name)]
    assert rounding
    assert all(name.startswith("cvt.rn.") for name in rounding)
    if cast == "rtz" and pointer == "*bf16":
        assert names["and.b32"] > 0


formats = pytest.mark.parametrize(
    ("pointer", "dtype", "cast"),
    [("*bf16", tl.bfloat16, "rne"), ("*bf16", tl.bfloat16, "rtz"), ("*fp16", tl.float16, "rne")],
    ids=["bf16", "bf16-rtz", "fp16"],
)


def rope_ptx(code: str, pointer: str, dtype: Any, cast: str, backward: bool = False, fusion: bool = False) -> str:
    table, compute = ROPE[code]
    settings = {"HALF": 64, "BLOCK_HALF": 64, "BLOCK_QUERY_HEADS": 32, "BLOCK_KEY_HEADS": 8}
    settings |= {"TABLE_ROUND": table == "bf16", "TABLE_CAST": cast, "BACKWARD": backward}
    settings |= {"COMPUTE": compute, "DTYPE": dtype, "CAST": cast}
    pointers = dict.fromkeys(("query", "query_out", "key", "key_out"), pointer) | dict.fromkeys(("cos", "sin"), "*fp32")
    return ptx(kernels.rope, pointers, fusion, **settings)


@formats
@pytest.mark.parametrize("code", ROPE)
@pytest.mark.parametrize("backward", [False, True])
def test_rope_compiles_without_contraction(pointer: str, dtype: Any, cast: str, code: str, backward: bool) -> None:
    check(rope_ptx(code, pointer, dtype, cast, backward), pointer, cast)


def test_contraction_would_be_noticed() -> None:
    assert fused(rope_ptx("R3", "*bf16", tl.bfloat16, "rne", fusion=True)) > 0


@formats
@pytest.mark.parametrize("code", ROPE)
@pytest.mark.parametrize("mode", QK)
def test_qk_norm_and_rope_compile_without_contraction(pointer: str, dtype: Any, cast: str, code: str, mode: str) -> None:
    (table, compute), (norm_round, out_round) = ROPE[code], QK[mode]
    settings = {"HALF": 64, "BLOCK_HALF": 64, "BLOCK_QUERY_HEADS": 16, "BLOCK_KEY_HEADS": 8}
    settings |= {"NORM_ROUND": norm_round, "OUT_ROUND": out_round, "NORM_CAST": cast, "DTYPE": dtype}
    settings |= {"TABLE_ROUND": table == "bf16", "TABLE_CAST": cast}
    heads = [f"{x}{part}" for x in ("query", "key") for part in ("", "_weight", "_out", "_grad")]
    pointers = dict.fromkeys([*heads, "grad_query", "grad_key"], pointer)
    sums = ("query_rstd", "key_rstd", "query_weight_grads", "key_weight_grads")
    pointers |= dict.fromkeys(("cos", "sin", *sums), "*fp32")
    check(ptx(kernels.qk_norm_rope, pointers, COMPUTE=compute, CAST=cast, **settings), pointer, cast)
    compute = compute if compute == "bf16" and out_round else "fp32"
    check(ptx(kernels.qk_norm_rope_backward, pointers, COMPUTE=compute, **settings), pointer, cast)


@formats
@pytest.mark.parametrize("code", SWIGLU)
def test_swiglu_compiles_without_contraction(pointer: str, dtype: Any, cast: str, code: str) -> None:
    rounded, sigmoid = SWIGLU[code]
    settings = {"BLOCK": 1024, "ACT": "silu", "DTYPE": dtype, "CAST": cast}
    pointers = dict.fromkeys(("gate", "up", "out"), pointer)
    check(ptx(kernels.gated_act, pointers, **settings, ROUND=rounded, BF16_SIGMOID=sigmoid == "bf16"), pointer, cast)
    pointers = dict.fromkeys(("grad", "gate", "up", "grad_gate", "grad_up"), pointer)
    # One multiply-add is meant, in silu's gradient; each of 128 threads has 8 elements.
    check(ptx(kernels.gated_act_backward, pointers, **settings, STEPWISE=code == "S1"), pointer, cast, multiply_adds=8)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_geglu_compiles(act: str) -> None:
    settings = {"BLOCK": 1024, "ACT": act, "DTYPE": tl.bfloat16, "CAST": "rne"}
    pointers = dict.fromkeys(("grad", "gate", "up", "out", "grad_gate", "grad_up"), "*bf16")
    ptx(kernels.gated_act, pointers, **settings, ROUND=True, BF16_SIGMOID=False)
    ptx(kernels.gated_act_backward, pointers, **settings, STEPWISE=True)


NORM_CASES = [
    *(
        ("*bf16", tl.bfloat16, "rne", *rest)
        for rest in [(None, None), ("*bf16", "*fp32"), ("*bf16", "*bf16"), ("*fp32", "*fp32")]
    ),
    ("*bf16", tl.bfloat16, "rtz", "*bf16", "*bf16"),
    ("*fp16", tl.float16, "rne", "*fp16", "*fp16"),
]


@pytest.mark.parametrize("code", NORM)
@pytest.mark.parametrize(("pointer", "dtype", "cast", "residual", "carry"), NORM_CASES)
def test_norm_compiles_without_contraction(
    pointer: str, dtype: Any, cast: str, residual: str | None, carry: str | None, code: str
) -> None:
    def arguments(**kinds: str | None) -> tuple[dict[str, str], dict[str, Any]]:
        """Pointers that are there, and those that are not, which the kernel gets as constants."""
        there = {name: kind for name, kind in kinds.items() if kind is not None}
        return there, {name: None for name in kinds if name not in there}

    sum_round, norm_round = NORM[code]
    settings = {"BLOCK": 1024, "SUM_ROUND": sum_round, "NORM_ROUND": norm_round, "DTYPE": dtype, "CAST": cast}
    settings |= {"HAS_RESIDUAL": residual is not None, "HAS_CARRY": carry is not None}
    same = {"x": pointer, "weight": pointer, "residual": residual, "rstds": "*fp32"}
    pointers, missing = arguments(**same, out=pointer, carry=carry)
    check(ptx(kernels.add_rms_norm, pointers, **settings, **missing), pointer, cast)

    grad_residual = None if residual == pointer else residual
    grads = {
        "grad_out": pointer,
        "grad_carry": carry,
        "grad_residual": grad_residual,
        "grad_x": pointer,
        "grad_weights": "*fp32",
    }
    pointers, missing = arguments(**same, **grads)
    settings |= {"HAS_GRAD_RESIDUAL": grad_residual is not None, "STEPWISE": code == "N1"}
    check(ptx(kernels.add_rms_norm_backward, pointers, **settings, **missing), pointer, cast)


@pytest.mark.parametrize("cast", ["rne", "rtz"])
def test_adding_and_rounding_compile(cast: str) -> None:
    pointers = {"x": "*bf16", "residual": "*fp32", "out": "*bf16"}
    text = ptx(kernels.add, pointers, BLOCK=2048, HAS_RESIDUAL=True, CAST=cast)
    check(text, "*bf16", cast)
