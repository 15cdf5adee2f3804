"""The cost of alignment on this machine's CPU: each operation, whole training steps, and memory.

    python -m benchmarks [--only operations|step|compiled] [--rounds 10] [--threads 2] [--out benchmarks/results/NAME]

Unaligned is transformers as it is, aligned the same model or module under `R3 S3 N3 carry=layer`. Compiling takes minutes.
Exit codes: 0 every goal is reached, 1 one is not.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

import tripoint
from benchmarks.measure import HEADER, Record, compare, count, peak_bytes, saved_bytes
from tripoint import ops
from tripoint.models import resolve_model
from tripoint.ops.backend import backend_for

PARTS = ("operations", "step", "compiled")
SCHEDULE = "R3 S3 N3 carry=layer"
BATCH, TOKENS = 4, 512
BF16 = torch.bfloat16
Run = Callable[[], Any]
Model = Any  # a transformers causal language model, plain or compiled


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


def operations(config: Any, batch: int = BATCH, tokens: int = TOKENS) -> Iterator[tuple[str, Run, Run]]:
    """Name, unaligned and aligned forward + backward of each operation at the model's sizes."""
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head_dim = hidden // heads

    query, key = (random(batch, tokens, n, head_dim).transpose(1, 2).requires_grad_() for n in (heads, kv_heads))
    grads = [random(batch, n, tokens, head_dim) for n in (heads, kv_heads)]
    angles = torch.outer(torch.arange(tokens), 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)).repeat(1, 2)[None]
    cos, sin = angles.cos(), angles.sin()
    rounded = cos.to(BF16), sin.to(BF16)
    rope = ("bf16", "fp32", "rne", BF16)

    def rope_unaligned() -> Any:
        return torch.autograd.grad(apply_rotary_pos_emb(query, key, *rounded), (query, key), grads)

    def rope_aligned() -> Any:
        table = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.autograd.grad(ops.rope(query, key, *table, *rope), (query, key), grads)

    yield "RoPE of queries and keys", rope_unaligned, rope_aligned

    norms = [LlamaRMSNorm(head_dim, config.rms_norm_eps).to(BF16) for _ in range(2)]  # Qwen3's is the same
    # As projections leave them.
    projected = [random(batch, tokens, n, head_dim).requires_grad_() for n in (heads, kv_heads)]
    weights = [norm.weight for norm in norms]

    def qk_norm_rope_unaligned() -> Any:
        normed = (norm(x).transpose(1, 2) for norm, x in zip(norms, projected, strict=True))
        return torch.autograd.grad(apply_rotary_pos_emb(*normed, *rounded), (*projected, *weights), grads)

    def qk_norm_rope_aligned() -> Any:
        settings = (config.rms_norm_eps, False, False, "rne", cos.unsqueeze(1), sin.unsqueeze(1), *rope)
        rotated = ops.qk_norm_rope(*(x.transpose(1, 2) for x in projected), *weights, *settings)[:2]
        return torch.autograd.grad(rotated, (*projected, *weights), grads)

    yield "QK-norm + RoPE of queries and keys", qk_norm_rope_unaligned, qk_norm_rope_aligned

    mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
    gate, up = (random(batch, tokens, config.intermediate_size).requires_grad_() for _ in range(2))
    grad = random(batch, tokens, config.intermediate_size)

    def swiglu_unaligned() -> Any:
        return torch.autograd.grad(mlp.act_fn(gate) * up, (gate, up), grad)

    def swiglu_aligned() -> Any:
        return torch.autograd.grad(ops.gated_act(gate, up, "silu", False, "fp32", "rne"), (gate, up), grad)

    yield "SwiGLU", swiglu_unaligned, swiglu_aligned

    norm = LlamaRMSNorm(hidden, config.rms_norm_eps).to(BF16)
    x, residual = (random(batch, tokens, hidden).requires_grad_() for _ in range(2))
    grad_out, grad_sum = random(batch, tokens, hidden), random(batch, tokens, hidden)
    grad_carry = grad_sum.float()

    def norm_unaligned() -> Any:
        total = residual + x
        return torch.autograd.grad((norm(total), total), (x, residual, norm.weight), (grad_out, grad_sum))

    def norm_aligned() -> Any:
        n3 = ("never", False, True, False, "rne", BF16)
        out, carry, _ = ops.add_rms_norm(x, residual, norm.weight, norm.variance_epsilon, *n3)
        return torch.autograd.grad((out, carry), (x, residual, norm.weight), (grad_out, grad_carry))

    yield "residual add + RMSNorm", norm_unaligned, norm_aligned


def loss_of(model: Model, ids: Tensor) -> Callable[[], Tensor]:
    """The causal language modelling loss."""
    return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss


def step_of(model: Model, ids: Tensor) -> Run:
    """Forward and backward pass, the gradients thrown away."""
    loss = loss_of(model, ids)

    def run() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; can be given more than once")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of a training step, at least 10")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to record the run: NAME.json and NAME.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    record = Record(
        title="Cost of alignment on a CPU",
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        settings={
            "model": "SmolLM2-135M-Instruct",
            "dtype": "BF16",
            "tokens": f"{BATCH} x {TOKENS}",
            "threads": options.threads,
            "schedule": SCHEDULE,
            "backend": backend_for(torch.device("cpu")).__name__,
        },
        header=HEADER,
    )
    print(*HEADER, sep="\n")
    unaligned: Model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(), dtype=BF16)
    ids = torch.randint(unaligned.config.vocab_size, (BATCH, TOKENS))

    parts = options.only or PARTS
    if "operations" in parts:
        for name, stock, ours in operations(unaligned.config):
            record.add(compare(f"{name}, forward + backward", stock, ours, rounds=5 * options.rounds, at_most=0.5))
    aligned = copy.deepcopy(unaligned)
    tripoint.align(aligned, to=SCHEDULE)
    if "step" in parts:
        stock, ours = step_of(unaligned, ids), step_of(aligned, ids)
        record.add(compare("training step", stock, ours, options.rounds, at_most=1.0))
        before, after = (saved_bytes(loss_of(model, ids), [*model.parameters()]) for model in (unaligned, aligned))
        record.add(count("saved for backward", before, after, at_most=0.85))
        record.add(count("peak memory of a step", peak_bytes(stock), peak_bytes(ours), at_most=1.0))
    if "compiled" in parts:
        # Both models run the code of the same classes, whose cache of compiled code must hold both.
        torch._dynamo.config.cache_size_limit = 64
        stock, ours = (step_of(torch.compile(model), ids) for model in (unaligned, aligned))
        record.add(compare("training step, both compiled", stock, ours, options.rounds, at_most=1.05))
    if options.out is not None:
        record.write(options.out)
    return 0 if record.holds else 1


if __name__ == "__main__":
    sys.exit(main())
