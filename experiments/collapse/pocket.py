"""The pocket model: a transformers decoder of 0.2M parameters whose GEMMs and attention leave nothing to chance.

Linears and attention accumulate in FP64 and round once, to the dtype of their inputs, on both sides. A GEMM's result then
depends neither on the kernel nor on the shape of the batch, decoding with a KV cache gives the bits of one pass over the
whole sequence, and the only differences left between a trainer and an engine are the schedules of the three operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tripoint.rl.exact import make_exact

VOCABULARY = 20
LAYERS = 4
HEAD_DIM = 32
KEY_PAIRS = (4, 8)
"""The rotary pairs with large keys. At theta 1e4 they turn by 0.1 and 0.01 rad per token: over this task's 22 positions their
cosines leave 1, as those of slower pairs do over thousands of positions in a large model."""

CONSTANT = 2.0
"""What every embedding holds in coordinate 0 where keys are large by their weights: too little to dominate a norm."""

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "llama": {"model_type": "llama", "head_dim": HEAD_DIM},
    "mistral": {"model_type": "mistral", "head_dim": HEAD_DIM, "sliding_window": None},
    "geglu": {"model_type": "qwen2", "hidden_act": "gelu_pytorch_tanh"},
}
"""Model families by the name a configuration gives them. Only qwen2's layout has biases in its key projections."""

_NO_SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def build(shape: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of family `shape` in `dtype`, weights arbitrary."""
    config = AutoConfig.for_model(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        **_NO_SPECIAL_TOKENS,
        **SHAPES[shape],
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    make_exact(model)
    return model.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def initialise(model: Any, key_size: float, seed: int) -> None:
    """Fresh weights with keys of magnitude `key_size` in the rotary pairs `KEY_PAIRS` of every layer.

    Where key projections have biases, the keys are large by them, in a direction drawn for each layer and pair. Elsewhere
    by their weights: the rows of those pairs read one constant direction of the residual stream, which is how models without
    biases make them.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif parameter.dim() == 1:
            parameter.zero_()
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    embedding: Tensor = model.get_input_embeddings().weight
    embedding.copy_(torch.randn(embedding.shape, generator=generator))
    for layer in model.model.layers:
        key = layer.self_attn.k_proj
        for pair in KEY_PAIRS:
            angle = 2 * torch.pi * torch.rand((), generator=generator)
            direction = key_size * torch.stack((angle.cos(), angle.sin()))
            rows = [pair, pair + HEAD_DIM // 2]
            if key.bias is not None:
                key.bias[rows] = direction
            else:
                key.weight[rows, 0] = direction / CONSTANT
    if model.model.layers[0].self_attn.k_proj.bias is None:
        embedding[:, 0] = CONSTANT


def copy_weights(target: PreTrainedModel, weights: list[Tensor]) -> None:
    """Write `weights`, in the order of `parameters()`, into `target`, rounded to its dtype."""
    with torch.no_grad():
        torch._foreach_copy_(list(target.parameters()), weights)
