"""Alignment against what only the full environment has: vLLM's own modules, and a pretrained model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import vllm_modules
from sites import record
from tiny import HEAD_DIM, counted, differing, same, step, tiny, tokens
from tripoint import align
from tripoint.models import resolve_model


def aligned_sites(schedule: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What goes into the sites of one layer of an aligned llama, as `vllm_modules` takes it, and what comes out."""
    model, ids = tiny("llama", rms_norm_eps=vllm_modules.EPS), tokens()
    align(model, schedule)
    layer = model.model.layers[1]
    residual: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        residual.append(kwargs["residual"])

    layer.post_attention_layernorm.register_forward_pre_hook(keep, with_kwargs=True)
    seen = record(model, ids)

    def rows(name: str) -> Tensor:
        """[tokens, all the rest]"""
        return seen[f"layers.1.{name}"].flatten(0, 1).flatten(1)

    inputs = {
        "x": rows("self_attn.o_proj"),
        "residual": residual[0].flatten(0, 1),
        "weight": layer.post_attention_layernorm.weight.detach(),
        "gate_up": torch.cat((rows("mlp.gate_proj"), rows("mlp.up_proj")), -1),
        "query": rows("self_attn.q_proj"),
        "key": rows("self_attn.k_proj"),
        "positions": torch.arange(ids.shape[1]).repeat(ids.shape[0]),
        "head_dim": HEAD_DIM,
        "theta": 10000.0,
    }
    outputs = {
        "add_norm": rows("post_attention_layernorm"),
        "silu": rows("mlp.product"),
        "query": rows("self_attn.query"),
        "key": rows("self_attn.key"),
    }
    return inputs, outputs


@pytest.mark.usefixtures("one_thread")
def test_aligned_sites_give_the_bits_of_vllms_own_modules() -> None:
    """Uncompiled on CPU, vLLM is R3 S1 N4."""
    inputs, outputs = aligned_sites("R3 S1 N4")
    theirs = vllm_modules.run(inputs)
    for name, ours in outputs.items():
        assert same(ours, theirs[name].view_as(ours)), name
    # A site that rounds elsewhere does not.
    for other, names in {"R1 S1 N4": ("query", "key"), "R3 S3 N4": ("silu",), "R3 S1 N3": ("add_norm",)}.items():
        inputs, outputs = aligned_sites(other)
        theirs = vllm_modules.run(inputs)
        wrong = [name for name, ours in outputs.items() if not same(ours, theirs[name].view_as(ours))]
        assert wrong == list(names) or set(wrong) == set(names)


def test_transformers_own_schedule_changes_no_bit_of_smollm2() -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.bfloat16)
    ids = torch.randint(0, model.config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    before = step(model, ids)
    align(model, "R1 S1 N1")
    with counted() as calls:
        after = step(model, ids)
    assert differing(after, before) == []
    layers = model.config.num_hidden_layers
    assert calls["rope"] == calls["rope_backward"] == 2 * layers
    assert calls["gated_act"] == calls["gated_act_backward"] == calls["residual_add"] == layers
    assert calls["add_rms_norm"] == calls["add_rms_norm_backward"] == 2 * layers + 1
