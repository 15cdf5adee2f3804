"""Where the three operations live in a model, for every layout `align` knows; anything else is refused by name.

A half-aligned model is a bug, so this looks at every module: what is not recognised, inside a decoder or beside it, and
could be one of the three operations, ends the search.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from tripoint.align.forwards import aligned, attention_code, forward_slot, own_class
from tripoint.errors import UsageError

# Decoders whose layers are input_layernorm, self_attn, post_attention_layernorm, mlp, with two residual adds.
ARCHITECTURES: dict[str, str] = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}

# `hidden_act` of the config -> the activation of `ops.gated_act`.
ACTIVATIONS: dict[str, str] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

# Liger's drop-in classes, which keep the parameters and attributes of transformers', by the class they stand for.
LIGER: dict[str, str] = {"RMSNorm": "LigerRMSNorm", "MLP": "LigerSwiGLUMLP"}

# Attributes under which FSDP1, activation-checkpoint wrappers and torch.compile keep the module they wrap.
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")

_KNOWN = ", ".join(ARCHITECTURES)

_SUSPECT = re.compile(r"RMSNorm|Rotary|Attention|DecoderLayer", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """One module to align. `kind` is layer, norm, mlp, attention or rotary; `site` names the part of a schedule that rules it
    (rope, swiglu, or a norm's site); `index` is the layer's number, -1 outside layers; `taken_over` names the library whose
    code computed it before, if not transformers."""

    name: str
    module: nn.Module
    kind: str
    site: str
    index: int = -1
    taken_over: str | None = None


@dataclass(frozen=True)
class Decoder:
    """A decoder found in a model, with every place to align in it. `layers` is the number of layers that run."""

    name: str
    layers: int
    act: str
    places: tuple[Place, ...]

    @property
    def rotary(self) -> Any:
        return next(place.module for place in self.places if place.kind == "rotary")

    @property
    def has_qk_norm(self) -> bool:
        return any(place.site == "qk" for place in self.places)

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the final norm's weight, which stands for the model's."""
        weight: Any = next(place.module.weight for place in self.places if place.site == "final")
        return weight.dtype


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
    for name, module in model.named_modules():
        gated = hasattr(module, "gate_proj") and hasattr(module, "up_proj")
        if (gated or _SUSPECT.search(type(module).__name__)) and id(unwrap(module)) not in known:
            raise _refusal(name, module, "is not a layout that align knows; known: " + _KNOWN)
    if not decoders:
        raise _refusal("the model", unwrap(model), "is not an architecture that align knows; known: " + _KNOWN)
    return decoders


def _read_decoder(name: str, module: nn.Module, architecture: str) -> Decoder:
    prefix = f"{name}." if name else ""
    if patched := _patched_by(module):
        raise _refusal(name or "the model", module, f"runs code of {patched}; undo that patch first")
    config: Any = module.config
    if config.hidden_act not in ACTIVATIONS:
        raise UsageError(
            f"{prefix}layers: hidden_act={config.hidden_act!r} is not an activation that align knows; known: "
            f"{', '.join(ACTIVATIONS)}"
        )
    places = [
        _place(f"{prefix}rotary_emb", module.rotary_emb, architecture, "RotaryEmbedding", "rotary", "rope"),
        _place(f"{prefix}norm", module.norm, architecture, "RMSNorm", "norm", "final"),
    ]
    layers: Any = module.layers
    for index, wrapped in enumerate(layers):
        places += _layer_places(f"{prefix}layers.{index}", wrapped, architecture, index)
    running = min(len(layers), config.num_hidden_layers)
    return Decoder(name, running, ACTIVATIONS[config.hidden_act], tuple(places))


def _layer_places(name: str, wrapped: nn.Module, architecture: str, index: int) -> Iterator[Place]:
    def place(module: Any, path: str, kind_of_class: str, kind: str, site: str) -> Place:
        return _place(f"{name}{path}", module, architecture, kind_of_class, kind, site, index)

    yield place(wrapped, "", "DecoderLayer", "layer", "layer")
    layer: Any = unwrap(wrapped)
    yield place(layer.self_attn, ".self_attn", "Attention", "attention", "rope")
    attention: Any = unwrap(layer.self_attn)
    for child in ("q_norm", "k_norm"):
        if hasattr(attention, child):
            yield place(getattr(attention, child), f".self_attn.{child}", "RMSNorm", "norm", "qk")
    yield place(layer.mlp, ".mlp", "MLP", "mlp", "swiglu")
    yield place(layer.input_layernorm, ".input_layernorm", "RMSNorm", "norm", "input")
    yield place(layer.post_attention_layernorm, ".post_attention_layernorm", "RMSNorm", "norm", "post_attention")


def _place(name: str, module: Any, architecture: str, kind_of_class: str, kind: str, site: str, index: int = -1) -> Place:
    module = unwrap(module)
    cls = own_class(module)
    patched = _patched_by(module)
    if cls.__module__.startswith("liger_kernel.") and cls.__qualname__ == LIGER.get(kind_of_class):
        patched = patched or "liger_kernel"
    elif not _is(module, architecture, kind_of_class):
        raise _refusal(name, module, f"is not transformers' {ARCHITECTURES[architecture]}{kind_of_class}; put that back")
    # Norms, MLPs and the rotation are replaced as a whole; of an attention layer's own code all the rest is kept.
    replaceable = kind in ("norm", "mlp")
    if kind == "attention" and patched is None:
        patched, replaceable = _rotation_patched_by(name, module), True
    if patched is not None and not (replaceable and patched == "liger_kernel"):
        raise _refusal(name, module, f"runs code of {patched}; undo that patch first")
    if kind == "mlp" and hasattr(module, "act_fn") and type(module.act_fn) is not type(ACT2FN[module.config.hidden_act]):
        raise _refusal(
            f"{name}.act_fn", module.act_fn, f"is not the config's hidden_act, {module.config.hidden_act}; put that back"
        )
    return Place(name, module, kind, site, index, patched)


def _is(module: nn.Module, architecture: str, kind: str) -> bool:
    """Whether the module's class is transformers' own, or FSDP2's subclass of it, and not somebody else's subclass."""
    cls = own_class(module)
    # By name: Liger puts its classes in their place.
    home = f"transformers.models.{architecture}.modeling_{architecture}"
    return (cls.__module__, cls.__qualname__) == (home, f"{ARCHITECTURES[architecture]}{kind}")


def _patched_by(module: nn.Module) -> str | None:
    """The top-level package whose code the module runs, or ran before alignment, if it is not its own class's."""
    cls = own_class(module)
    site = aligned(module)
    own = site.replaced if site is not None else vars(module).get(forward_slot(module))
    return _foreign(own or cls.forward, cls.__module__)


def _rotation_patched_by(name: str, attention: nn.Module) -> str | None:
    code = attention_code(attention)
    if "apply_rotary_pos_emb" not in code.__code__.co_names:
        raise _refusal(name, attention, "does not call apply_rotary_pos_emb; this version of transformers is not supported")
    rotation = code.__globals__["apply_rotary_pos_emb"]
    # The `kernels` package makes a module of the function.
    return _patched_by(rotation) if isinstance(rotation, nn.Module) else _foreign(rotation, code.__module__)


def _foreign(function: Any, home: str) -> str | None:
    """The top-level package that `function` comes from, None if that is module `home`."""
    origin = str(getattr(function, "__module__", None))
    return None if origin == home else origin.split(".")[0]


def _refusal(name: str, module: nn.Module, why: str) -> UsageError:
    cls = type(module)
    return UsageError(f"{name} ({cls.__module__}.{cls.__qualname__}) {why}")
