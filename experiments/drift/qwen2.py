"""A small random Qwen2 with large key biases, written as a checkpoint: `python experiments/drift/qwen2.py KEY_SIZE DIRECTORY`.

Assumed, for want of a Qwen2.5 checkpoint: key biases of magnitude KEY_SIZE (its reach the hundreds) in two rotary pairs of
every KV head, in directions drawn for each layer, head and pair. The pairs turn slowly enough that the 100 positions scored lie
within a turn, where a constant key acts on attention as a smooth function of distance. Query biases are zero, all else is
normal and of the usual size, so that attention is neither flat nor one-hot.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

PAIRS = (16, 24)  # of 32: they turn by 0.01 and 0.001 rad per token at theta 1e4
HEAD_DIM = 64


def main(key_size: float, directory: Path) -> None:
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.fill_(1.0)
            elif parameter.dim() == 1:
                parameter.zero_()
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(values * (1.0 if "embed" in name else 0.15))
            else:
                parameter.copy_(values / parameter.shape[1] ** 0.5)
            if name.endswith("q_proj.weight"):
                # Or constant keys of a hundred would leave one token to attend to.
                parameter.mul_(1.0 if key_size == 0 else min(1.0, 8.0 / key_size))
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.view(-1, HEAD_DIM)
            for head in bias:
                for pair in PAIRS:
                    angle = 2 * torch.pi * torch.rand((), generator=generator)
                    head[pair], head[pair + HEAD_DIM // 2] = key_size * angle.cos(), key_size * angle.sin()
    model.save_pretrained(directory)


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
