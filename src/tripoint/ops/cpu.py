"""The ops on CPUs: builds `cpu_kernels.cpp` once into the user's cache directory and calls it.

The library is built with the machine's C++ compiler at first use (a few seconds) for the instruction set ATen itself runs
with. Every process compares it with the reference on a small sample before using it: ATen's own build decides some bits
(which multiply-adds are contracted, in which order sums run), and a library that gives others is not used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from tripoint.models import cache_dir
from tripoint.ops import reference
from tripoint.ops.backend import BackendError
from tripoint.ops.layout import laid_out_like, rows_like, whole_rows

_SOURCE = Path(__file__).with_name("cpu_kernels.cpp")

_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off")
# By ATen's name for the instruction set: the one its kernels were chosen for is the one whose bits we want.
_INSTRUCTIONS = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mavx2", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "DEFAULT": (),
}

# The enumerations of cpu_kernels.cpp.
_DTYPES_16 = {torch.bfloat16: 0, torch.float16: 1}
_DTYPES = _DTYPES_16 | {torch.float32: 2}
_CASTS = {"rne": 0, "rtz": 1}
_COMPUTES = {"bf16": 0, "bf16_fma": 1, "fp32": 2}
_SUM_ROUNDS = {"before_var": 0, "after_var": 1, "never": 2}


class _Rows(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("stride", c_int64 * 3), ("wide", c_int64))


class _RopeArgs(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("x", "cos", "sin", "out")),
        ("size", c_int64 * 3),
        ("head_dim", c_int64),
        *((name, c_int32) for name in ("dtype", "compute", "cast", "backward")),
    )


class _GatedArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("grad", "gate", "up", "out", "grad_gate", "grad_up")),
        ("numel", c_int64),
        *((name, c_int32) for name in ("dtype", "round_act", "bf16_sigmoid", "cast")),
    )


class _NormArgs(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("x", "residual", "grad_out", "grad_carry")),
        *((name, _Rows) for name in ("out", "carry", "grad_x", "grad_residual", "rstd")),
        *((name, c_void_p) for name in ("weight", "grad_weight")),
        ("size", c_int64 * 3),
        ("hidden", c_int64),
        ("eps", c_float),
        *((name, c_int32) for name in ("dtype", "weight_wide", "sum_round", "norm_round", "stepwise", "cast")),
    )


class _AddArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "residual", "out")),
        ("numel", c_int64),
        *((name, c_int32) for name in ("dtype", "x_wide", "residual_wide", "out_wide", "cast")),
    )


# -- building ---------------------------------------------------------------------------------------------------------


def prepare(device_type: str) -> None:
    """Build or load the kernels. Raises BackendError if they cannot serve tensors of this device."""
    if device_type != "cpu":
        raise BackendError("they are for CPU tensors")
    _library()
    differing = _differing_ops()
    if differing:
        raise BackendError(f"bits differ from the reference's in {', '.join(differing)}")


@functools.cache
def _library() -> ctypes.CDLL:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _INSTRUCTIONS:
        raise BackendError(f"instruction set {capability} is not supported")
    flags = (*_FLAGS, f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}", *_INSTRUCTIONS[capability])
    build = (torch.__version__, torch.__config__.show(), *flags, _SOURCE.read_text())
    key = hashlib.sha256("\0".join(build).encode()).hexdigest()[:16]
    path = cache_dir() / "kernels" / f"cpu-{key}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                built = Path(scratch) / path.name
                _compile(built, flags)
                os.replace(built, path)
        return _open(path)
    except OSError as error:
        raise BackendError(str(error)) from error


def _compile(path: Path, flags: tuple[str, ...]) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BackendError("no C++ compiler: install g++, or name one in CXX")
    torch_dir = Path(torch.__file__).parent
    files = (f"-I{torch_dir / 'include'}", str(_SOURCE), "-o", str(path))
    libraries = (f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10")
    done = subprocess.run((compiler, *flags, *files, *libraries), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        raise BackendError(f"{Path(compiler).name} failed: {'; '.join(errors[:2])}")


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in ("rope", "gated_act", "gated_act_backward", "add_rms_norm", "add_rms_norm_backward", "add"):
        getattr(library, f"tripoint_{name}").restype = None
    return library


def _differing_ops() -> list[str]:
    """The ops whose bits on a small sample are not the reference's."""
    generator = torch.Generator().manual_seed(0)

    def sample(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).mul(3).to(dtype)

    bf16, fp32 = torch.bfloat16, torch.float32
    x, residual, grad = (sample(bf16, 40, 612) for _ in range(3))
    wide, wider = (sample(fp32, 40, 612) for _ in range(2))
    weight, table = sample(bf16, 612), sample(fp32, 40, 612)
    # Every number, twice: enough products for a different last bit of silu to show.
    gate = torch.arange(2**16, device="cpu").to(torch.int16).view(torch.float16)
    gate = gate[gate.isfinite()].expand(2, -1)
    up = sample(torch.float16, *gate.shape)
    n1 = ("before_var", True, True)
    rstd = reference.add_rms_norm(x, residual, weight, 1e-5, *n1, True, "rne", bf16)[2]
    # In FP32 no rounding hides a different last bit.
    calls: list[tuple[str, tuple[object, ...]]] = [
        *(("rope", (x, residual, table, table, "bf16", compute, "rne", bf16)) for compute in _COMPUTES),
        ("rope", (wide, wider, table, table, "fp32", "fp32", "rne", fp32)),
        *(("gated_act", (gate, up, "silu", sig == "bf16", sig, "rne")) for sig in ("fp32", "bf16")),
        ("gated_act_backward", (up, gate, up, "silu", False, "fp32", "rne")),
        ("add_rms_norm", (x, residual, weight, 1e-5, "never", False, False, False, "rne", bf16)),
        ("add_rms_norm_backward", (grad, grad, x, residual, weight, rstd, *n1, "rne", bf16)),
        ("add_rms_norm_backward", (wider, None, wide, None, weight.float(), rstd, "never", False, False, "rne", fp32)),
        ("qk_norm_rope", (x, residual, weight, weight, 1e-5, True, True, "rne", table, table, "fp32", "fp32", "rne", bf16)),
        ("residual_add", (x, wide, True, "rne", bf16)),
        ("cast_to", (wide, bf16, "rtz")),
    ]

    def same(mine: Tensor | tuple[Tensor, ...], theirs: Tensor | tuple[Tensor, ...]) -> bool:
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            return torch.equal(mine, theirs)
        return all(map(torch.equal, mine, theirs))

    differ = {name for name, args in calls if not same(globals()[name](*args), getattr(reference, name)(*args))}
    return sorted(differ)


# -- the ops ----------------------------------------------------------------------------------------------------------


def _run(kernel: str, *args: ctypes.Structure | None) -> None:
    getattr(_library(), f"tripoint_{kernel}")(*(None if a is None else ctypes.byref(a) for a in args))


def _supported(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    """Whether every tensor is in the compute dtype or FP32: what the kernels read."""
    return dtype in _DTYPES and all(t is None or t.dtype in (dtype, torch.float32) for t in tensors)


def _wide(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float32


class _Outer:
    """The outer dimensions of a kernel's tensors (at most three), in the order in which `x` has them in memory."""

    def __init__(self, x: Tensor) -> None:
        stride = x.stride()
        self._order = sorted(range(x.dim() - 1), key=lambda dim: -stride[dim])
        self._padding = (0,) * (4 - x.dim())
        self._kept: list[Tensor] = []
        self.size = (c_int64 * 3)(*(1 for _ in self._padding), *(x.shape[dim] for dim in self._order))

    def rows(self, tensor: Tensor | None) -> _Rows:
        """A kernel's view of `tensor`, which lives as long as this object."""
        if tensor is None:
            return _Rows()
        tensor = whole_rows(tensor)
        self._kept.append(tensor)
        stride = tensor.stride()
        return _Rows(tensor.data_ptr(), (*self._padding, *(stride[dim] for dim in self._order)), _wide(tensor))


def rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, table: str, compute: str, cast: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.rope`."""
    if not _rotatable(query, key, cos, sin, dtype):
        return reference.rope(query, key, cos, sin, table, compute, cast, dtype)
    tables = _tables(cos, sin, table, cast, dtype)
    return _rotate(query, *tables, dtype, dtype, compute, cast), _rotate(key, *tables, dtype, dtype, compute, cast)


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
    if not _rotatable(grad_query, grad_key, cos, sin, dtype):
        return reference.rope_backward(grad_query, grad_key, cos, sin, table, compute, cast, dtype, x_dtype)
    stepwise = compute == "bf16" and x_dtype == dtype
    settings = (*_tables(cos, sin, table, cast, dtype), dtype, x_dtype, "bf16" if stepwise else "fp32", "rne", True)
    return _rotate(grad_query, *settings), _rotate(grad_key, *settings)


def _rotatable(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> bool:
    return _supported(dtype, query, key) and cos.dtype == sin.dtype == torch.float32 and query.dim() == key.dim() <= 4


def _tables(cos: Tensor, sin: Tensor, table: str, cast: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (cast_to(cos, dtype, cast), cast_to(sin, dtype, cast)) if table == "bf16" else (cos, sin)


def _rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    compute: str,
    cast: str,
    backward: bool = False,
) -> Tensor:
    out = rows_like(x, out_dtype)
    if out.numel() > 0:
        outer = _Outer(x)
        tensors = (outer.rows(t) for t in (x, cos.expand(x.shape), sin.expand(x.shape), out))
        settings = (_DTYPES[dtype], _COMPUTES[compute], _CASTS[cast], backward)
        _run("rope", _RopeArgs(*tensors, outer.size, x.shape[-1], *settings))
    return laid_out_like(x, out)


def gated_act(gate: Tensor, up: Tensor, act: str, silu_round: bool, sig: str, cast: str) -> Tensor:
    """See `reference.gated_act`."""
    dtype = gate.dtype
    if act != "silu" or dtype not in _DTYPES_16 or up.dtype != dtype:
        # ATen's gelu is oneDNN's, whose last bits nobody else has.
        return reference.gated_act(gate, up, act, silu_round, sig, cast)
    gates, ups = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gates)
    _run(
        "gated_act",
        _GatedArgs(
            *(None, gates.data_ptr(), ups.data_ptr(), out.data_ptr(), None, None, out.numel()),
            *(_DTYPES[dtype], silu_round, sig == "bf16", _CASTS[cast]),
        ),
    )
    return laid_out_like(gate, out)


def gated_act_backward(
    grad: Tensor, gate: Tensor, up: Tensor, act: str, silu_round: bool, sig: str, cast: str
) -> tuple[Tensor, Tensor]:
    """See `reference.gated_act_backward`."""
    dtype = gate.dtype
    if act != "silu" or dtype not in _DTYPES_16 or not up.dtype == grad.dtype == dtype:
        return reference.gated_act_backward(grad, gate, up, act, silu_round, sig, cast)
    grads, gates, ups = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gates), torch.empty_like(ups)
    _run(
        "gated_act_backward",
        _GatedArgs(
            *(grads.data_ptr(), gates.data_ptr(), ups.data_ptr(), None, grad_gate.data_ptr(), grad_up.data_ptr()),
            *(gates.numel(), _DTYPES[dtype], silu_round, sig == "bf16", _CASTS[cast]),
        ),
    )
    return laid_out_like(gate, grad_gate), laid_out_like(up, grad_up)


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
    """See `reference.add_rms_norm`."""
    if not _supported(dtype, x, residual, weight) or x.dim() > 4:
        return reference.add_rms_norm(x, residual, weight, eps, sum_round, norm_round, out_round, carry_round, cast, dtype)
    weight = weight.contiguous()
    out = rows_like(x, dtype if out_round else torch.float32)
    carry = None if carry_round is None else rows_like(x, dtype if carry_round else torch.float32)
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    outer = _Outer(x)
    _run(
        "add_rms_norm",
        _NormArgs(
            x=outer.rows(x),
            residual=outer.rows(residual),
            out=outer.rows(out),
            carry=outer.rows(carry),
            rstd=outer.rows(rstd),
            weight=weight.data_ptr(),
            size=outer.size,
            hidden=x.shape[-1],
            eps=eps,
            dtype=_DTYPES[dtype],
            weight_wide=_wide(weight),
            sum_round=_SUM_ROUNDS[sum_round],
            norm_round=norm_round,
            cast=_CASTS[cast],
        ),
        None,
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
    """See `reference.add_rms_norm_backward`."""
    if not _supported(dtype, grad_out, grad_carry, x, residual, weight) or x.dim() > 4:
        return reference.add_rms_norm_backward(
            grad_out, grad_carry, x, residual, weight, rstd, sum_round, norm_round, out_round, cast, dtype
        )
    weight = weight.contiguous()
    grad_x, grad_weight = rows_like(x, x.dtype), torch.empty_like(weight)
    # One tensor stands for both gradients where the inputs share a dtype.
    grad_residual = None if residual is None or residual.dtype == x.dtype else rows_like(residual, residual.dtype)
    # The weight's gradient is summed over rows in the order that the gradient at the output has in memory.
    outer = _Outer(grad_out)
    _run(
        "add_rms_norm_backward",
        _NormArgs(
            x=outer.rows(x),
            residual=outer.rows(residual),
            grad_out=outer.rows(grad_out),
            grad_carry=outer.rows(grad_carry),
            grad_x=outer.rows(grad_x),
            grad_residual=outer.rows(grad_residual),
            rstd=outer.rows(rstd),
            weight=weight.data_ptr(),
            grad_weight=grad_weight.data_ptr(),
            size=outer.size,
            hidden=x.shape[-1],
            dtype=_DTYPES[dtype],
            weight_wide=_wide(weight),
            sum_round=_SUM_ROUNDS[sum_round],
            norm_round=norm_round,
            stepwise=sum_round == "before_var" and norm_round and out_round,
            cast=_CASTS[cast],
        ),
        None,
    )
    out = laid_out_like(x, grad_x)
    if residual is None:
        return out, x.new_empty(0), grad_weight
    return out, laid_out_like(residual, grad_x if grad_residual is None else grad_residual), grad_weight


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
    """See `reference.qk_norm_rope`."""
    if not _rotatable(query, key, cos, sin, dtype) or not _supported(dtype, query_weight, key_weight):
        return reference.qk_norm_rope(
            query, key, query_weight, key_weight, eps, norm_round, out_round, norm_cast, cos, sin, table, compute, cast, dtype
        )
    tables = _tables(cos, sin, table, cast, dtype)

    def of(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight, out, rstd = weight.contiguous(), rows_like(x, dtype), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        outer = _Outer(x)
        norm = _NormArgs(
            x=outer.rows(x),
            out=_Rows(wide=not out_round),
            rstd=outer.rows(rstd),
            weight=weight.data_ptr(),
            size=outer.size,
            hidden=x.shape[-1],
            eps=eps,
            dtype=_DTYPES[dtype],
            weight_wide=_wide(weight),
            sum_round=_SUM_ROUNDS["before_var"],
            norm_round=norm_round,
            cast=_CASTS[norm_cast],
        )
        rows = (outer.rows(None if t is None else t.expand(x.shape)) for t in (None, *tables, out))
        settings = (_DTYPES[dtype], _COMPUTES[compute], _CASTS[cast], False)
        _run("add_rms_norm", norm, _RopeArgs(*rows, outer.size, x.shape[-1], *settings))
        return laid_out_like(x, out), rstd

    (rotated_query, query_rstd), (rotated_key, key_rstd) = of(query, query_weight), of(key, key_weight)
    return rotated_query, rotated_key, query_rstd, key_rstd


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
    """See `reference.qk_norm_rope_backward`."""
    inputs = (grad_query, grad_key, query, key, query_weight, key_weight)
    if not _rotatable(query, key, cos, sin, dtype) or not _supported(dtype, *inputs):
        return reference.qk_norm_rope_backward(
            *inputs, query_rstd, key_rstd, norm_round, out_round, norm_cast, cos, sin, table, compute, cast, dtype
        )
    tables = _tables(cos, sin, table, cast, dtype)

    def of(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        weight = weight.contiguous()
        grad_x, grad_weight = rows_like(x, x.dtype), torch.empty_like(weight)
        # In the order that the gradient at the norm's output would have in memory.
        outer = _Outer(torch.empty_like(grad, device="meta"))
        norm = _NormArgs(
            x=outer.rows(x),
            grad_out=_Rows(wide=not out_round),
            grad_x=outer.rows(grad_x),
            rstd=outer.rows(rstd),
            weight=weight.data_ptr(),
            grad_weight=grad_weight.data_ptr(),
            size=outer.size,
            hidden=x.shape[-1],
            dtype=_DTYPES[dtype],
            weight_wide=_wide(weight),
            sum_round=_SUM_ROUNDS["before_var"],
            norm_round=norm_round,
            stepwise=norm_round and out_round,
            cast=_CASTS[norm_cast],
        )
        rows = (outer.rows(None if t is None else t.expand(x.shape)) for t in (grad, *tables, None))
        settings = (_DTYPES[dtype], _COMPUTES["bf16" if compute == "bf16" and out_round else "fp32"], _CASTS["rne"], True)
        _run("add_rms_norm_backward", norm, _RopeArgs(*rows, outer.size, x.shape[-1], *settings))
        return laid_out_like(x, grad_x), grad_weight

    query_grad, query_weight_grad = of(grad_query, query, query_weight, query_rstd)
    key_grad, key_weight_grad = of(grad_key, key, key_weight, key_rstd)
    return query_grad, key_grad, query_weight_grad, key_weight_grad


def residual_add(x: Tensor, residual: Tensor, rounded: bool, cast: str, dtype: torch.dtype) -> Tensor:
    """See `reference.residual_add`."""
    if not _supported(dtype, x, residual):
        return reference.residual_add(x, residual, rounded, cast, dtype)
    return _add(x, residual, dtype, dtype if rounded else torch.float32, cast)


def cast_to(x: Tensor, dtype: torch.dtype, cast: str) -> Tensor:
    """See `rounding.cast_to`."""
    return _add(x, None, dtype, dtype, cast) if _supported(dtype, x) else reference.cast_to(x, dtype, cast)


def _add(x: Tensor, residual: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype, cast: str) -> Tensor:
    xs = x.contiguous()
    residuals = None if residual is None else residual.contiguous()
    out = torch.empty_like(xs, dtype=out_dtype)
    _run(
        "add",
        _AddArgs(
            *(xs.data_ptr(), None if residuals is None else residuals.data_ptr(), out.data_ptr(), out.numel()),
            *(_DTYPES[dtype], _wide(xs), _wide(residuals), _wide(out), _CASTS[cast]),
        ),
    )
    return laid_out_like(x, out)
