"""Linears and attention whose result depends on neither kernel nor batch: the arm in which trainer and engine are one stack.

They accumulate in FP64 and round once, to the dtype of their inputs, so that decoding with a KV cache gives the bits of one
pass over the whole sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "tripoint_fp64"


def make_exact(model: PreTrainedModel) -> None:
    """Change every linear of `model` and its attention. Sequences must not be padded on the left: masks are not looked at."""
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    # FP32 weights stand for their rounding, as under autocast.
    bias = None if linear.bias is None else linear.bias.to(x.dtype).double()
    return nn.functional.linear(x.double(), linear.weight.to(x.dtype).double(), bias).to(x.dtype)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention of `query` [batch, heads, new, head_dim] over `key`, `value` [batch, KV heads, all, head_dim].

    Returns [batch, new, heads, head_dim].
    """
    batch, heads, new, head_dim = query.shape
    kv_heads, length = key.shape[1:3]
    grouped = query.double().reshape(batch, kv_heads, -1, head_dim)
    scores = (grouped @ key.double().transpose(2, 3)).view(batch, kv_heads, -1, new, length) * scaling
    if new > 1:
        future = torch.ones(new, length, dtype=torch.bool, device=query.device).triu(length - new + 1)
        scores = scores.masked_fill(future, -torch.inf)
    attended = scores.softmax(-1).view(batch, kv_heads, -1, length) @ value.double()
    return attended.view(batch, heads, new, head_dim).to(query.dtype).transpose(1, 2).contiguous(), None


# transformers looks attention functions up in a table of its own by the name in the model's configuration.
ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
