"""Tiny random models of every known architecture, and what tests ask of a model: logits, loss, gradients, calls of our ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
VOCABULARY, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 50, 64, 96, 4, 2, 32, 3
TRAINED_LENGTH = 24  # `dynamic` and `longrope` change their frequencies beyond it

_PAIRS = HEAD_DIM // 2
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED_LENGTH},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * pair for pair in range(_PAIRS)],
        "long_factor": [2.0 + 0.3 * pair for pair in range(_PAIRS)],
        "original_max_position_embeddings": TRAINED_LENGTH,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED_LENGTH,
    },
}


def config(architecture: str, rope: str = "default", **settings: Any) -> Any:
    """A configuration of `architecture` with rope type `rope`; `head_dim=None` leaves it to the architecture."""
    longer = 4 if rope in ("yarn", "longrope", "llama3") else 1
    settings = {"head_dim": HEAD_DIM, "max_position_embeddings": longer * TRAINED_LENGTH} | settings
    if settings["head_dim"] is None:
        del settings["head_dim"]
    return AutoConfig.for_model(
        architecture,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rope_parameters={"rope_type": rope, "rope_theta": 10000.0, **ROPES[rope]},
        **{"num_hidden_layers": LAYERS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2} | settings,
    )


def tiny(
    architecture: str = "llama",
    rope: str = "default",
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "sdpa",
    auto_class: Any = AutoModelForCausalLM,
    **settings: Any,
) -> PreTrainedModel:
    """A random model, the same one for the same arguments. Rounded to BF16 or not, its weights are those of FP32."""
    # `dtype=` here, since a later `.to(dtype)` would round `inv_freq` too.
    model = auto_class.from_config(config(architecture, rope, **settings), attn_implementation=attention, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * values if "norm" in name else 0.2 * values)
    return model.eval()


def tokens(length: int = 19, batch: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


@dataclass
class Step:
    """Everything one forward and backward pass gives."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


def step(model: nn.Module, ids: Tensor, **inputs: Any) -> Step:
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, **inputs)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(out.logits.detach(), out.loss.detach(), grads)


def differing(left: Step, right: Step) -> list[str]:
    """What of two steps is not bitwise equal."""
    assert left.grads.keys() == right.grads.keys()
    pairs = {"logits": (left.logits, right.logits), "loss": (left.loss, right.loss)}
    pairs |= {name: (grad, right.grads[name]) for name, grad in left.grads.items()}
    return [name for name, (a, b) in pairs.items() if not same(a, b)]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, **inputs: Any) -> Tensor:
    return model(input_ids=ids, **inputs).logits


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tripoint":
            self.calls[func._schema.name.removeprefix("tripoint::")] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The calls of our ops inside, by name."""
    with _Counting() as mode:
        yield mode.calls
