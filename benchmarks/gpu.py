"""The fused operations on this machine's GPU: their bits under every schedule, then their speed as a share of a copy's.

    python -m benchmarks.gpu [--tokens 16384] [--rounds 30] [--out benchmarks/results/NAME]

Bits are compared with the reference operations on the same device. Speed is that of `R3 S3 N3`, beside a device-to-device copy
that moves the same number of bytes, torch.compile of transformers' own formulas and, if installed, Liger-Kernel. Exit codes: 0
all holds, 1 something does not, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from benchmarks.measure import Record, Spread
from tripoint import ops
from tripoint.ops import reference
from tripoint.ops.backend import backend_for
from tripoint.ops.rounding import cast_to, round_to
from tripoint.schedule import RoundingSchedule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6
Dtypes = tuple[torch.dtype, ...]
HIDDEN = (2048, 4096, 8192)
HEAD_DIM = 128
GOALS = {"forward": 0.9, "backward": 0.8}

ROPE, SWIGLU, NORM = ("R1", "R2", "R3", "R4"), ("S1", "S3", "S5"), ("N1", "N2", "N3", "N4", "N5")
QK = ("both", "out", "none", "norm")
CASTS = ("rne", "rtz")


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def tables(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 1e4 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, device=device), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def fields(code: str) -> tuple[Any, Any]:
    """The two settings of an operation that `code` stands for."""
    kind = {"R": "R1", "S": "S1", "N": "N1"} | {code[0]: code}
    schedule = RoundingSchedule.parse(" ".join(kind.values()))
    if code in ROPE:
        return schedule.rope.table, schedule.rope.compute
    if code in SWIGLU:
        return schedule.swiglu.silu_round, schedule.swiglu.sig
    return schedule.norm.input.sum_round, schedule.norm.input.norm_round


# -- bits -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """How one result of a fused operation compares with the reference's."""

    name: str
    differing: float  # share of the elements
    allowed: float
    near: bool  # where they differ, by no more than the freedom that is left in FP32

    @property
    def holds(self) -> bool:
        return self.near and self.differing <= self.allowed

    def row(self) -> str:
        return f"| {self.name} | {self.differing:.1e} | {self.allowed:.0e} | {'yes' if self.holds else 'no'} |"


CHECK_HEADER = ("| | share of bits that differ | allowed | holds |", "|---|---|---|---|")


def ordered(x: Tensor) -> Tensor:
    """Integers in the order of the numbers, neighbours one apart."""
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()]).long()
    return torch.where(bits < 0, torch.iinfo(torch.int16 if x.element_size() == 2 else torch.int32).min - bits, bits)


def check(name: str, mine: Tensor, theirs: Tensor, allowed: float = 0.0, ulps: int = 0, slack: float = 0.0) -> Check:
    """`slack`, of the largest element, is what a sum in another order may be off before rounding."""
    assert mine.dtype == theirs.dtype
    assert mine.shape == theirs.shape
    if mine.numel() == 0:
        return Check(name, 0.0, allowed, True)
    steps = (ordered(mine) - ordered(theirs)).abs()
    near = (steps <= ulps) | ((mine.double() - theirs.double()).abs() <= slack * theirs.double().abs().max())
    return Check(name, float((steps > 0).double().mean()), allowed, bool(near.all()))


def rope_checks(fused: Any, device: torch.device, rows: int, hidden: int, dtypes: Dtypes) -> Iterator[Check]:
    head_dim = min(HEAD_DIM, hidden)
    cos, sin = tables(rows, head_dim, device)
    for dtype, code, cast, wide in itertools.product(dtypes, ROPE, CASTS, (False, True)):
        x_dtype = FP32 if wide else dtype
        name = f"RoPE {code} {cast} {dtype} of {x_dtype}"
        heads = max(hidden // head_dim, 1)
        # As attention has them: transposed views.
        pair = [random((2, rows, n, head_dim), x_dtype, device, n).transpose(1, 2) for n in (heads, max(heads // 4, 1))]
        settings = (cos, sin, *fields(code), cast, dtype)
        outputs = zip(("query", "key"), fused.rope(*pair, *settings), reference.rope(*pair, *settings), strict=True)
        for which, mine, theirs in outputs:
            yield check(f"{name}, {which}", mine, theirs)
        backward = (*(x.to(dtype) for x in pair), *settings, x_dtype)
        grads = zip(("query", "key"), fused.rope_backward(*backward), reference.rope_backward(*backward), strict=True)
        for which, mine, theirs in grads:
            yield check(f"{name}, gradient of {which}", mine, theirs)


def swiglu_checks(fused: Any, device: torch.device, rows: int, hidden: int, dtypes: Dtypes) -> Iterator[Check]:
    for dtype, code, cast in itertools.product(dtypes, SWIGLU, CASTS):
        gate, up, grad = (random((rows, hidden), dtype, device, seed) for seed in range(3))
        settings = ("silu", *fields(code), cast)
        name = f"SwiGLU {code} {cast} {dtype}"
        # FP16 has more boundaries, and under S5 one gate whose exp lies at one moves every product that it is in.
        allowed = 5e-5 if dtype == BF16 and code != "S5" else 5e-4
        # One step of a rounded silu can be two of the product.
        ulps = 1 if code == "S3" else 4
        mine, theirs = fused.gated_act(gate, up, *settings), reference.gated_act(gate, up, *settings)
        yield check(f"{name}, forward", mine, theirs, allowed, ulps)
        backward = (grad, gate, up, *settings)
        grads = zip(("gate", "up"), fused.gated_act_backward(*backward), reference.gated_act_backward(*backward), strict=True)
        for which, one, other in grads:
            yield check(f"{name}, gradient of {which}", one, other, 1e-3, ulps, slack=2.0**-20)


def norm_checks(fused: Any, device: torch.device, rows: int, hidden: int, dtypes: Dtypes) -> Iterator[Check]:
    for dtype, code, cast in itertools.product(dtypes, NORM, CASTS):
        for residual_dtype, carry_round in ((None, None), (dtype, True), (dtype, False), (FP32, True)):
            x = random((rows, hidden), dtype, device)
            residual = None if residual_dtype is None else random((rows, hidden), residual_dtype, device, 1)
            weight, grad = random((hidden,), dtype, device, 2), random((rows, hidden), dtype, device, 3)
            settings = (EPS, *fields(code), True, carry_round, cast, dtype)
            out, carry, rstd = fused.add_rms_norm(x, residual, weight, *settings)
            _, their_carry, their_rstd = reference.add_rms_norm(x, residual, weight, *settings)
            name = f"norm {code} {cast} {dtype} residual {residual_dtype}"
            yield check(f"{name}, 1/rms", rstd, their_rstd, allowed=1.0, ulps=8)
            yield check(f"{name}, carry", carry, their_carry)
            # Given that number every other bit is determined.
            _, _, seen_by_norm = reference._norm_inputs(x, residual, fields(code)[0], cast, dtype)
            normalised = seen_by_norm * rstd
            if fields(code)[1]:
                normalised = round_to(normalised, dtype, cast)
            yield check(f"{name}, forward", out, cast_to(normalised * weight.float(), dtype, cast))
            grad_carry = None if carry_round is None else random((rows, hidden), carry.dtype, device, 4)
            backward = (grad, grad_carry, x, residual, weight, rstd, *fields(code), True, cast, dtype)
            mine, again = fused.add_rms_norm_backward(*backward), fused.add_rms_norm_backward(*backward)
            theirs = reference.add_rms_norm_backward(*backward)
            for which, one, two, other in zip(("x", "residual", "weight"), mine, again, theirs, strict=True):
                yield check(f"{name}, gradient of {which} again", two, one)
                if code == "N1":
                    # Rounded on the way, whatever its dtype: a sum on a boundary moves it by more than an FP32 ulp.
                    one, other = one.to(dtype), other.to(dtype)
                # FP32 shows the order of the sum itself.
                allowed, ulps = 1.0 if one.dtype == FP32 else 1e-2, 2 if code == "N1" else 1
                yield check(f"{name}, gradient of {which}", one, other, allowed, ulps, slack=2.0**-17)


def qk_norm_rope_checks(fused: Any, device: torch.device, rows: int, hidden: int, dtypes: Dtypes) -> Iterator[Check]:
    head_dim = min(HEAD_DIM, hidden)
    heads = max(hidden // head_dim, 1)
    angles = tables(rows, head_dim, device)
    # What else there is to RoPE is checked without the norm.
    for dtype, code, mode, cast in itertools.product(dtypes, ("R1", "R3"), QK, CASTS):
        qk = RoundingSchedule.parse(f"R1 S1 N1 qk={mode}").norm.qk
        assert qk is not None
        pair, grads = (
            [random((2, rows, n, head_dim), dtype, device, seed + n).transpose(1, 2) for n in (heads, max(heads // 4, 1))]
            for seed in (0, 100)
        )
        weights = [random((head_dim,), dtype, device, seed) for seed in (2, 3)]
        rope = (*angles, *fields(code), cast, dtype)
        name = f"QK-norm {mode} + RoPE {code} {cast} {dtype}"
        *rotated, query_rstd, key_rstd = fused.qk_norm_rope(*pair, *weights, EPS, qk.norm_round, qk.out_round, cast, *rope)
        theirs = reference.qk_norm_rope(*pair, *weights, EPS, qk.norm_round, qk.out_round, cast, *rope)
        # Given 1/rms every other bit is determined.
        normed = []
        for x, weight, rstd, other in zip(pair, weights, (query_rstd, key_rstd), theirs[2:], strict=True):
            yield check(f"{name}, 1/rms", rstd, other, allowed=1.0, ulps=8)
            normalised = x.float() * rstd
            if qk.norm_round:
                normalised = round_to(normalised, dtype, cast)
            normed.append(cast_to(normalised * weight.float(), dtype if qk.out_round else FP32, cast))
        for which, one, other in zip(("query", "key"), rotated, reference.rope(*normed, *rope), strict=True):
            yield check(f"{name}, {which}", one, other)
        backward = (*grads, *pair, *weights, query_rstd, key_rstd, qk.norm_round, qk.out_round, cast, *rope)
        mine, again = fused.qk_norm_rope_backward(*backward), fused.qk_norm_rope_backward(*backward)
        names = ("query", "key", "the query's weight", "the key's weight")
        for which, one, two, other in zip(names, mine, again, reference.qk_norm_rope_backward(*backward), strict=True):
            yield check(f"{name}, gradient of {which} again", two, one)
            yield check(f"{name}, gradient of {which}", one, other, 2e-2, 2 if mode == "both" else 1, slack=2.0**-17)


def checks(fused: Any, device: torch.device, rows: int, hidden: int, dtypes: Dtypes = (BF16, FP16)) -> Iterator[Check]:
    """Every operation under every schedule, forward and backward."""
    for of in (rope_checks, swiglu_checks, norm_checks, qk_norm_rope_checks):
        yield from of(fused, device, rows, hidden, dtypes)


# -- speed ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """An operation's inputs, and who computes it: functions of the inputs that return the outputs."""

    name: str
    inputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    moved: dict[str, int]  # bytes that have to be read or written, forward and backward
    implementations: Mapping[str, Callable[..., tuple[Tensor, ...]]]


def operations(hidden: int, tokens: int, device: torch.device, liger: bool) -> Iterator[Operation]:
    def leaf(*shape: int, seed: int = 0) -> Tensor:
        return random(shape, BF16, device, seed)

    def size(*tensors: Tensor) -> int:
        return sum(t.nbytes for t in tensors)

    heads, kv_heads = hidden // HEAD_DIM, max(hidden // HEAD_DIM // 4, 1)
    cos, sin = tables(tokens, HEAD_DIM, device)
    rounded = cos.to(BF16)[None], sin.to(BF16)[None]
    query, key = (leaf(1, tokens, n, HEAD_DIM).transpose(1, 2).requires_grad_() for n in (heads, kv_heads))

    def rope(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return ops.rope(query, key, cos, sin, "bf16", "fp32", "rne", BF16)

    def rope_transformers(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return apply_rotary_pos_emb(query, key, *rounded)

    moved = 2 * size(query, key) + size(cos, sin)
    rotations = {"tripoint": rope, "torch.compile": torch.compile(rope_transformers, dynamic=False)}
    if liger:
        from liger_kernel.ops.rope import LigerRopeFunction  # type: ignore[import-not-found]

        rotations["Liger"] = lambda query, key: LigerRopeFunction.apply(query, key, *rounded)
    grads = torch.randn_like(query), torch.randn_like(key)
    yield Operation("RoPE of queries and keys", (query, key), grads, {"forward": moved, "backward": moved}, rotations)

    projected = [leaf(1, tokens, n, HEAD_DIM).transpose(1, 2).requires_grad_() for n in (heads, kv_heads)]
    weights = [leaf(HEAD_DIM, seed=seed).requires_grad_() for seed in (2, 3)]
    head_norm = LlamaRMSNorm(HEAD_DIM, EPS).to(device, BF16)

    def qk_norm_rope(query: Tensor, key: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return ops.qk_norm_rope(query, key, *weights, EPS, False, False, "rne", cos, sin, "bf16", "fp32", "rne", BF16)[:2]

    def qk_norm_rope_transformers(query: Tensor, key: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        pair = zip((query, key), weights, strict=True)
        normed = (torch.func.functional_call(head_norm, {"weight": weight}, x) for x, weight in pair)
        return apply_rotary_pos_emb(*normed, *rounded)

    normed = {"tripoint": qk_norm_rope, "torch.compile": torch.compile(qk_norm_rope_transformers, dynamic=False)}
    passes = {"forward": moved, "backward": moved + size(query, key)}
    yield Operation("QK-norm + RoPE of queries and keys", (*projected, *weights), grads, passes, normed)

    gate, up = (leaf(tokens, 4 * hidden, seed=seed).requires_grad_() for seed in range(2))

    def swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (ops.gated_act(gate, up, "silu", False, "fp32", "rne"),)

    def swiglu_transformers(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (torch.nn.functional.silu(gate) * up,)

    activations = {"tripoint": swiglu, "torch.compile": torch.compile(swiglu_transformers, dynamic=False)}
    if liger:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found]

        activations["Liger"] = lambda gate, up: (LigerSiLUMulFunction.apply(gate, up),)
    passes = {"forward": 3 * gate.nbytes, "backward": 5 * gate.nbytes}
    yield Operation("SwiGLU", (gate, up), (torch.randn_like(gate),), passes, activations)

    x, residual = (leaf(tokens, hidden, seed=seed).requires_grad_() for seed in range(2))
    module = LlamaRMSNorm(hidden, EPS).to(device, BF16)
    weight = leaf(hidden, seed=2).requires_grad_()

    def norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return ops.add_rms_norm(x, residual, weight, EPS, "never", False, True, True, "rne", BF16)[:2]

    def norm_transformers(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = residual + x
        return torch.func.functional_call(module, {"weight": weight}, total), total

    norms = {"tripoint": norm, "torch.compile": torch.compile(norm_transformers, dynamic=False)}
    if liger:
        from liger_kernel.ops.fused_add_rms_norm import (  # type: ignore[import-not-found]
            LigerFusedAddRMSNormFunction,
        )

        norms["Liger"] = lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS)
    grads = torch.randn_like(x), torch.randn_like(x)
    passes = {"forward": 4 * x.nbytes, "backward": 5 * x.nbytes}
    yield Operation("residual add + RMSNorm", (x, residual, weight), grads, passes, norms)


def runs(operation: Operation, direction: str) -> dict[str, Callable[[], object]]:
    """Each implementation's forward or backward pass, on tensors of its own: Liger's kernels write into their inputs."""

    def own(function: Callable[..., tuple[Tensor, ...]]) -> Callable[[], object]:
        inputs = [x.detach().clone().requires_grad_() for x in operation.inputs]
        if direction == "forward":
            return lambda: function(*inputs)
        outputs, grads = function(*inputs), [grad.clone() for grad in operation.grads]
        return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

    return {name: own(function) for name, function in operation.implementations.items()}


def gpu_seconds(functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Device time of every function in every round, interleaved. Clearing a large buffer in front of each empties the cache,
    and takes longer than the launches: no wait for the CPU is timed."""
    scratch = torch.empty(2**32, dtype=torch.uint8, device=device)
    for function in functions.values():
        for _ in range(3):
            function()
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            scratch.zero_()
            start.record()
            function()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize(device)
    return {name: [1e-3 * start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


@dataclass(frozen=True)
class Speed:
    """Device time of one pass of an operation by every implementation, the copy of the same bytes among them."""

    name: str
    moved: int
    seconds: dict[str, Spread]
    at_least: float

    @property
    def share(self) -> float:
        """Of the copy's bandwidth."""
        return self.seconds["copy"].median / self.seconds["tripoint"].median

    @property
    def holds(self) -> bool:
        others = [spread.median for name, spread in self.seconds.items() if name == "Liger"]
        return self.share >= self.at_least and all(self.seconds["tripoint"].median <= other for other in others)

    def row(self) -> str:
        speeds = [self.seconds.get(name) for name in ("copy", "tripoint", "Liger", "torch.compile")]
        cells = [f"{1e-9 * self.moved / s.median:.0f}" if s else "-" for s in speeds]
        held = "yes" if self.holds else "no"
        return f"| {self.name} | {' | '.join(cells)} | {self.share:.2f} | {self.at_least:.2f} | {held} |"


HEADER = (
    "| | copy, GB/s | tripoint | Liger | torch.compile | share of the copy | goal | reached, and not slower than Liger |",
    "|---|---|---|---|---|---|---|---|",
)


def speeds(tokens: int, rounds: int, device: torch.device, liger: bool) -> Iterator[Speed]:
    for hidden in HIDDEN:
        for operation in operations(hidden, tokens, device, liger):
            for direction, at_least in GOALS.items():
                moved = operation.moved[direction]
                source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
                functions = {"copy": lambda t=target, s=source: t.copy_(s)} | runs(operation, direction)
                seconds = gpu_seconds(functions, rounds, device)
                name = f"{operation.name}, hidden {hidden}, {direction}"
                yield Speed(name, moved, {of: Spread.of(values) for of, values in seconds.items()}, at_least)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="where to record the run: NAME.json and NAME.md")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: no GPU that PyTorch can use; run it on a machine with one", file=sys.stderr)
        return 3
    started, device = time.perf_counter(), torch.device("cuda")
    fused = backend_for(device)
    liger = importlib.util.find_spec("liger_kernel") is not None
    # Backward passes are timed on a graph that is kept.
    torch._functorch.config.donated_buffer = False
    record = Record(
        title="Fused operations on a GPU",
        command=shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        settings={"device": torch.cuda.get_device_name(device), "tokens": options.tokens, "rounds": options.rounds},
        header=HEADER,
    )
    record.settings["backend"] = fused.__name__

    outcomes = [c for hidden in (576, 2048) for c in checks(fused, device, 200, hidden)]
    failed = [c for c in outcomes if not c.holds]
    print(*CHECK_HEADER, *(c.row() for c in failed), sep="\n")
    record.settings["comparisons of bits that hold"] = f"{len(outcomes) - len(failed)} of {len(outcomes)}"
    print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} comparisons with the reference hold\n", flush=True)

    print(*HEADER, sep="\n")
    for speed in speeds(options.tokens, options.rounds, device, liger):
        record.add(speed)
    record.settings["seconds"] = round(time.perf_counter() - started)
    if options.out is not None:
        record.write(options.out)
    return 0 if not failed and record.holds else 1


if __name__ == "__main__":
    sys.exit(main())
