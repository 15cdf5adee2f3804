"""Alignment against what only the full environment has: vLLM's own modules, and a pretrained model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import vllm_modules
from sites import GEMMS, record
from tiny import HEAD_DIM, counted, differing, same, step, tiny, tokens
from tripoint import align
from tripoint.models import resolve_model

SITES = {
    "query": "self_attn.query",
    "key": "self_attn.key",
    "silu": "mlp.product",
    "add_norm": "post_attention_layernorm",
}
"""Outputs of vLLM's modules and of ours in a layer."""


@pytest.mark.usefixtures("one_thread")
def test_aligned_sites_give_the_bits_of_vllms_own_modules() -> None:
    """Uncompiled on CPU, vLLM is R3 S1 N4."""
    model, ids = tiny("llama", rms_norm_eps=vllm_modules.EPS), tokens()
    layer = model.model.layers[1]
    residual: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        residual.append(kwargs["residual"])

    align(model, "R3 S1 N4")
    handle = layer.post_attention_layernorm.register_forward_pre_hook(keep, with_kwargs=True)
    seen = record(model, ids)
    handle.remove()

    def rows(seen: dict[str, Tensor], name: str) -> Tensor:
        """[tokens, all the rest]"""
        return seen[f"layers.1.{name}"].flatten(0, 1).flatten(1)

    theirs = vllm_modules.run(
        {
            "x": rows(seen, "self_attn.o_proj"),
            "residual": residual[0].flatten(0, 1),
            "weight": layer.post_attention_layernorm.weight.detach(),
            "gate_up": torch.cat((rows(seen, "mlp.gate_proj"), rows(seen, "mlp.up_proj")), -1),
            "query": rows(seen, "self_attn.q_proj"),
            "key": rows(seen, "self_attn.k_proj"),
            "positions": torch.arange(ids.shape[1]).repeat(ids.shape[0]),
            "head_dim": HEAD_DIM,
            "theta": 10000.0,
        }
    )

    def differing_sites(seen: dict[str, Tensor]) -> set[str]:
        return {name for name, ours in SITES.items() if not same(rows(seen, ours), theirs[name].flatten(1))}

    assert differing_sites(seen) == set()
    # A site that rounds elsewhere does not, given the same.
    forced = {name: tensor for name, tensor in seen.items() if name.split(".")[-1] in GEMMS}
    for other, names in {"R1 S1 N4": {"query", "key"}, "R3 S3 N4": {"silu"}, "R3 S1 N3": {"add_norm"}}.items():
        align(model, other)
        assert differing_sites(record(model, ids, forced)) == names


def test_transformers_own_schedule_changes_no_bit_of_smollm2() -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=torch.bfloat16)
    ids = torch.randint(0, model.config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    before = step(model, ids)
    align(model, "R1 S1 N1")
    with counted() as calls:
        after = step(model, ids)
    assert differing(after, before) == []
    layers = model.config.num_hidden_layers
    assert calls["rope"] == calls["rope_backward"] == layers
    assert calls["gated_act"] == calls["gated_act_backward"] == calls["residual_add"] == layers
    assert calls["add_rms_norm"] == calls["add_rms_norm_backward"] == 2 * layers + 1
