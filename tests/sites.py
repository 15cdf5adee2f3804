"""What goes into and comes out of every site of a model in one forward pass, and what the independent oracle says of it.

Names are those of modules in the decoder: `layers.0.self_attn.q_proj`, `norm`, ... with `layers.0.self_attn.query` and
`.key` for what attention gets after RoPE, and `layers.0.mlp.product` for what `down_proj` gets.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import oracle
from tiny import same
from tripoint.schedule import RoundingSchedule

GEMMS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Everything between the sites: what these give is what the sites get."""

OWNERS = {
    "rope": ("cos", "sin", "query", "key"),
    "swiglu": ("product",),
    "norm.input": ("input_layernorm",),
    "norm.post_attention": ("post_attention_layernorm",),
    "norm.final": ("norm",),
    "norm.qk": ("q_norm", "k_norm"),
}
"""The outputs of each site."""

FREEDOM = {"silu": 2, "gelu": 12, "gelu_tanh": 8}
"""FP32 units in the last place by which torch's exp, erf and tanh are off at most."""

FORMATS = {torch.bfloat16: oracle.BF16, torch.float16: oracle.FP16}


@torch.no_grad()
def record(model: Any, ids: Tensor, forced: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Run `model` once. Modules named in `forced` pass on that tensor, after their own output was recorded."""
    seen: dict[str, Tensor] = {}
    decoder = model.model

    def hook(module: nn.Module, args: Any, output: Any, *, name: str) -> Any:
        if name == "rotary_emb":
            seen["cos"], seen["sin"] = output
            return output
        seen[name] = output
        if name.endswith("down_proj"):
            seen[name.replace("down_proj", "product")] = args[0]
        return (forced or {}).get(name, output)

    class Attention(TorchFunctionMode):
        layer = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is nn.functional.scaled_dot_product_attention:
                groups = args[0].shape[1] // decoder.config.num_key_value_heads
                enabled = (kwargs or {}).get("enable_gqa", False)
                seen[f"layers.{self.layer}.self_attn.query"] = args[0].transpose(1, 2)
                seen[f"layers.{self.layer}.self_attn.key"] = args[1][:, :: 1 if enabled else groups].transpose(1, 2)
                self.layer += 1
            return func(*args, **(kwargs or {}))

    hooked = [*GEMMS, *OWNERS["norm.qk"], "input_layernorm", "post_attention_layernorm", "norm", "rotary_emb"]
    handles = [
        module.register_forward_hook(functools.partial(hook, name=name))
        for name, module in decoder.named_modules()
        if name.split(".")[-1] in hooked
    ]
    try:
        with Attention():
            decoder(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def site_of(name: str) -> str | None:
    """The site whose output `name` is, None for a GEMM's."""
    return next((site for site, names in OWNERS.items() if name.split(".")[-1] in names), None)


def changed(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> set[str]:
    """The sites with an output that differs."""
    assert left.keys() == right.keys()
    return {site for name in left if (site := site_of(name)) is not None and not same(left[name], right[name])}


def mismatches(model: Any, seen: Mapping[str, Tensor], schedule: RoundingSchedule, ids: Tensor) -> list[str]:
    """Recorded site outputs that are not the oracle's bits, given the recorded GEMM outputs. Empty if all are."""
    decoder = model.model
    config = decoder.config
    dtype = seen["embed_tokens"].dtype
    fmt = FORMATS[dtype]
    weights = {name: array(parameter.to(dtype)) for name, parameter in decoder.named_parameters()}
    values = {name: array(tensor) for name, tensor in seen.items()}
    wrong: list[str] = []

    def check(name: str, bits: oracle.Bits) -> None:
        if not np.array_equal(seen[name].contiguous().view(torch.int16).numpy().view(np.uint16), bits):
            wrong.append(name)

    def norm(name: str, x: oracle.F32, residual: oracle.F32 | None, code: str, cast: str, rounds: bool = True) -> oracle.Norm:
        given = functools.partial(
            oracle.add_rms_norm, x, residual, weights[f"{name}.weight"], config.rms_norm_eps, code, fmt, cast
        )
        by_var = given().total
        if code in ("N1", "N2"):
            by_var = oracle.rounded(by_var, fmt, cast)
        # The order of the sum over the hidden size is torch's; everything after it is the oracle's.
        variance = torch.from_numpy(by_var).pow(2).mean(-1, keepdim=True)
        out = given(rstd=torch.rsqrt(variance + config.rms_norm_eps).numpy())
        if rounds:
            check(name, oracle.bits(out.out, fmt, cast))
        elif not np.array_equal(values[name], out.out) or seen[name].dtype != torch.float32:
            wrong.append(name)
        return out

    def carried(out: oracle.Norm, add: int, cast: str) -> oracle.F32:
        rounds = {"bf16": True, "fp32": False, "layer": add % 2 == 1}
        if isinstance(schedule.carry, str):
            rounded = rounds[schedule.carry]
        else:
            rounded = (add + 1) % schedule.carry == 0 if isinstance(schedule.carry, int) else add in schedule.carry
        return oracle.rounded(out.total, fmt, cast) if rounded else out.total

    rope, swiglu, sites = schedule.rope, schedule.swiglu, schedule.norm
    cos, sin = values["cos"][:, :, None], values["sin"][:, :, None]
    own = type(decoder.rotary_emb)(config=config)(torch.empty(0), torch.arange(ids.shape[1])[None])
    for name, part in zip(("cos", "sin"), own, strict=True):
        # Every other order of operations moves the last bits of some angles.
        if same(seen[name], part) != (rope.angle == "pos*inv") or not torch.allclose(seen[name], part, atol=1e-5):
            wrong.append(name)

    residual = values["embed_tokens"]
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        if index == 0:
            norm(f"{layer}.input_layernorm", residual, None, sites.input.code, sites.input.cast)
        else:
            x = values[f"layers.{index - 1}.mlp.down_proj"]
            out = norm(f"{layer}.input_layernorm", x, residual, sites.input.code, sites.input.cast)
            residual = carried(out, 2 * index - 1, sites.input.cast)

        for part in "qk":
            x = values[f"{layer}.self_attn.{part}_proj"].reshape(*ids.shape, -1, decoder.layers[index].self_attn.head_dim)
            if config.model_type == "qwen3":
                name = f"{layer}.self_attn.{part}_norm"
                code = "N1" if sites.qk.norm_round else "N2"
                norm(name, x, None, code, sites.qk.cast, rounds=sites.qk.out_round)
                x = values[name]
            rotated = oracle.rope(x, cos, sin, rope.code, fmt, rope.cast)
            check(f"{layer}.self_attn.{'query' if part == 'q' else 'key'}", rotated)

        x = values[f"{layer}.self_attn.o_proj"]
        out = norm(f"{layer}.post_attention_layernorm", x, residual, sites.post_attention.code, sites.post_attention.cast)
        residual = carried(out, 2 * index, sites.post_attention.cast)

        act = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}[config.hidden_act]
        gate, up = values[f"{layer}.mlp.gate_proj"], values[f"{layer}.mlp.up_proj"]
        given = functools.partial(oracle.gated_act, gate, up, act, swiglu.code, fmt, swiglu.cast)
        name = f"{layer}.mlp.product"
        exact = oracle.values(given(), fmt)
        # Another exp, erf or tanh may be off by some units in the last place of FP32.
        low, high = (oracle.values(given(nudge=nudge), fmt) for nudge in (-FREEDOM[act], FREEDOM[act]))
        within = (np.minimum(low, high) <= values[name]) & (values[name] <= np.maximum(low, high))
        if not np.all(within | (values[name] == exact)) or np.mean(values[name] != exact) > 0.05:
            wrong.append(name)
    norm("norm", values[f"layers.{config.num_hidden_layers - 1}.mlp.down_proj"], residual, sites.final.code, sites.final.cast)
    return wrong


def array(tensor: Tensor) -> oracle.F32:
    return tensor.detach().float().numpy()
