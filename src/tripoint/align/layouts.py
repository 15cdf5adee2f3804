"""Where the three operations live in a model, for every layout `align` knows; anything else is refused by name.

A half-aligned model is a bug, so this looks at every module: what is not recognised, inside a decoder or beside it, and
could be one of the three operations, ends the search.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from tripoint.align.forwards import AlignedForward, forward_slot, own_class
from tripoint.errors import UsageError

# Decoders whose layers are input_layernorm, self_attn, post_attention_layernorm, mlp, with two residual adds.
ARCHITECTURES: dict[str, str] = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}

# `hidden_act` of the config -> the activation of `ops.gated_act`.
ACTIVATIONS: dict[str, str] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

# Attributes under which FSDP1, activation-checkpoint wrappers and torch.compile keep the module they wrap.
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")

_SUSPECT = re.compile(r"RMSNorm|Rotary|MLP|Attention|DecoderLayer", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """One module to align. `kind` is layer, norm, mlp, attention or rotary; `site` names the part of a schedule that rules it
    (rope, swiglu, or a norm's site);
    `index` the layer's number, -1 outside layers; `taken_over` names the library that had patched it, if any."""

    name: str
    module: nn.Module
    kind: str
    site: str
    index: int = -1
    taken_over: str | None = None


@dataclass(frozen=True)
class Decoder:
    """A decoder found in a model, with every place to align in it."""

    name: str
    architecture: str
    layers: int
    act: str
    places: tuple[Place, ...]


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside wrappers of FSDP1, activation checkpointing and torch.compile."""
    while True:
        inner = next((vars(module)["_modules"].get(name) for name in _WRAPPED if name in vars(module)["_modules"]), None)
        if inner is None:
            return module
        module = inner


def find_decoders(model: nn.Module) -> list[Decoder]:
    """Every decoder in `model`, which may be wrapped, carry a value head, or be a PEFT model.

    Raises UsageError naming the first module whose layout is unknown.
    """
    decoders = []
    for name, module in model.named_modules():
        architecture = next((a for a in ARCHITECTURES if _is(module, a, "Model")), None)
        if architecture is not None:
            decoders.append(_read_decoder(name, module, architecture))
    known = {id(place.module) for decoder in decoders for place in decoder.places}
    inside = tuple(f"{place.name}." for decoder in decoders for place in decoder.places if place.kind != "layer")
    for name, module in model.named_modules():
        is_wrapper = unwrap(module) is not module
        if _SUSPECT.search(type(module).__name__) and id(module) not in known and not is_wrapper:
            if name.startswith(inside) and "RMSNorm" not in type(module).__name__:
                continue  # a part of something aligned, such as an activation
            raise _refusal(name, module, "is not a layout that align knows")
    if not decoders:
        raise _refusal("the model", unwrap(model), "is not an architecture that align knows")
    return decoders


def _read_decoder(name: str, module: nn.Module, architecture: str) -> Decoder:
    prefix = f"{name}." if name else ""
    config = module.config
    hidden_act = getattr(config, "hidden_act", None)
    if hidden_act not in ACTIVATIONS:
        raise UsageError(
            f"{prefix}layers: hidden_act={hidden_act!r} is not an activation that align knows; known: {', '.join(ACTIVATIONS)}"
        )
    places = [
        _place(f"{prefix}rotary_emb", module.rotary_emb, architecture, "RotaryEmbedding", "rotary", "rope"),
        _place(f"{prefix}norm", module.norm, architecture, "RMSNorm", "norm", "final"),
    ]
    layers = list(module.layers)  # type: ignore[arg-type]
    for index, wrapped in enumerate(layers):
        layer_name = f"{prefix}layers.{index}"
        layer = unwrap(wrapped)
        places.append(_place(layer_name, layer, architecture, "DecoderLayer", "layer", "layer", index))
        places += _layer_places(layer_name, layer, architecture, index)
    return Decoder(name, architecture, len(layers), ACTIVATIONS[hidden_act], tuple(places))


def _layer_places(name: str, layer: nn.Module, architecture: str, index: int) -> Iterator[Place]:
    attention = unwrap(layer.self_attn)  # type: ignore[arg-type]
    yield _place(f"{name}.self_attn", attention, architecture, "Attention", "attention", "rope", index)
    for child in ("q_norm", "k_norm"):
        if hasattr(attention, child):
            yield _place(f"{name}.self_attn.{child}", getattr(attention, child), architecture, "RMSNorm", "norm", "qk", index)
    yield _place(f"{name}.mlp", layer.mlp, architecture, "MLP", "mlp", "swiglu", index)
    for child, site in (("input_layernorm", "input"), ("post_attention_layernorm", "post_attention")):
        yield _place(f"{name}.{child}", getattr(layer, child), architecture, "RMSNorm", "norm", site, index)


def _place(name: str, module: object, architecture: str, kind_of_class: str, kind: str, site: str, index: int = -1) -> Place:
    assert isinstance(module, nn.Module)
    module = unwrap(module)
    patched = _patched_by(module)
    if _is(module, architecture, kind_of_class):
        if patched in (None, "liger_kernel", "kernels"):
            return Place(name, module, kind, site, index, patched)
        raise _refusal(name, module, f"has a forward of its own from {patched}; undo that patch first")
    # Liger replaces whole classes too; these keep transformers' parameters and attributes.
    if type(module).__module__.startswith("liger_kernel") and type(module).__name__ in ("LigerRMSNorm", "LigerSwiGLUMLP"):
        return Place(name, module, kind, site, index, "liger_kernel")
    raise _refusal(name, module, f"is not transformers' {ARCHITECTURES[architecture]}{kind_of_class}")


def _patched_by(module: nn.Module) -> str | None:
    """The top-level package of an instance's own `forward`, None if it has none or it is ours or accelerate's hook."""
    own = vars(module).get(forward_slot(module))
    if own is None or isinstance(own, AlignedForward):
        return None
    function = getattr(own, "__func__", own)
    if function is getattr(type(module), "forward", None):
        return None
    return str(getattr(function, "__module__", type(own).__module__)).split(".")[0]


def _is(module: nn.Module, architecture: str, kind: str) -> bool:
    """Whether the module's class is transformers' own, or FSDP2's subclass of it, and not somebody else's subclass."""
    modeling = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    expected = getattr(modeling, f"{ARCHITECTURES[architecture]}{kind}")
    return own_class(module) is expected


def _refusal(name: str, module: nn.Module, why: str) -> UsageError:
    cls = type(module)
    return UsageError(f"{name} ({cls.__module__}.{cls.__qualname__}) {why}; known: {', '.join(ARCHITECTURES)}")
