"""The shape of a canary: everything of a model's config that kernels or rounding may depend on."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from tripoint.canary.emulator import ACTIVATIONS, Rotary
from tripoint.errors import UsageError
from tripoint.schedule import suggest

ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
CARRY_LAYERS = 6  # the least depth that tells carries apart
LIKE_INTERMEDIATE = 4096
VOCABULARY = 1024


@dataclass(frozen=True)
class CanaryShape:
    """Sizes are those of the config fields of the same names. `full` says that depth, MLP and vocabulary are the model's too.

    `base` holds config entries that are taken over from the model as they are, `reserved` token ids that mean something
    to an engine (its end-of-sequence and padding tokens) and so are not used.
    """

    architecture: str = "llama"
    hidden: int = 256
    layers: int = CARRY_LAYERS
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    vocab: int = VOCABULARY
    act: str = "silu"
    eps: float = 1e-6
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 2e4})
    max_positions: int = 4096
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    full: bool = False
    reserved: frozenset[int] = frozenset()
    base: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"canary of shape {self.architecture}"
        if self.architecture not in ARCHITECTURES:
            raise UsageError(f"{where}: no such layout{suggest(self.architecture, list(ARCHITECTURES))}")
        if self.act not in ACTIVATIONS:
            raise UsageError(f"{where}: hidden_act={self.act} is not a gate we emulate{suggest(self.act, list(ACTIVATIONS))}")
        least = {"hidden_size": (self.hidden, 64), "head_dim": (self.head_dim, 32), "num_hidden_layers": (self.layers, 1)}
        for name, (value, needed) in (least | {"max_position_embeddings": (self.max_positions, 16)}).items():
            if value < needed:
                raise UsageError(f"{where}: {name} is {value}; a canary needs {needed} or more")

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "qwen3"

    @classmethod
    def like(cls, model: Path, full: bool = False) -> Self:
        """The shape of the checkpoint in directory `model`: of its kernels, or with `full` of all its weights."""
        path = model / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(f"`{model}` has no config.json: give the directory of a checkpoint") from None
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{path}: not JSON: {error}") from None
        if not isinstance(config, dict):
            raise UsageError(f"{path}: not a model's config: expected an object, found a {type(config).__name__}")
        return cls.from_config(config, full)

    @classmethod
    def from_config(cls, config: dict[str, Any], full: bool = False) -> Self:
        """As `like`, from the contents of a config.json."""
        from transformers import AutoConfig

        architecture = str(config.get("model_type", "?"))
        if architecture not in ARCHITECTURES:
            raise UsageError(
                f"canary like a {architecture!r} model: no such layout{suggest(architecture, list(ARCHITECTURES))}"
            )
        # transformers knows every default; what follows from the depth it works out again.
        entries = {k: v for k, v in config.items() if k not in ("layer_types", "quantization_config")}
        try:
            known: Any = AutoConfig.for_model(**entries)
        except Exception as error:  # of many types, and of several lines
            raise UsageError(
                f"canary like a {architecture} model: its config is refused: {' '.join(str(error).split())}"
            ) from None
        intermediate = known.intermediate_size
        ends = known.eos_token_id if isinstance(known.eos_token_id, list) else [known.eos_token_id]
        special = {i for i in (known.bos_token_id, known.pad_token_id, *ends) if i is not None}
        windows = ("sliding_window", "use_sliding_window", "max_window_layers")
        return cls(
            architecture=architecture,
            hidden=known.hidden_size,
            layers=known.num_hidden_layers if full else CARRY_LAYERS,
            heads=known.num_attention_heads,
            kv_heads=known.num_key_value_heads,
            head_dim=getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads,
            intermediate=intermediate if full else min(intermediate, LIKE_INTERMEDIATE),
            vocab=known.vocab_size if full else VOCABULARY,
            act=known.hidden_act,
            eps=known.rms_norm_eps,
            rope={key: value for key, value in known.rope_parameters.items() if value is not None},
            max_positions=known.max_position_embeddings,
            attention_bias=bool(getattr(known, "attention_bias", False)),
            mlp_bias=bool(getattr(known, "mlp_bias", False)),
            tied=known.tie_word_embeddings,
            full=full,
            reserved=frozenset(special) if full else frozenset(),
            base={key: copy.deepcopy(config[key]) for key in windows if key in config},
        )

    def to_dict(self) -> dict[str, Any]:
        """Its fields as JSON and TOML hold them: `base` as JSON text, because a null in it means something."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
            "reserved": sorted(self.reserved),
            "base": json.dumps(self.base),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "shape") -> Self:
        """Inverse of `to_dict`. Raises UsageError for anything else."""
        if not isinstance(data, Mapping):
            raise UsageError(f"{where}: expected a table of sizes, found {data!r}")
        plain = cls().to_dict()
        wrong = {name for name in plain.keys() | data.keys() if type(data.get(name)) is not type(plain.get(name))}
        if "rope" not in wrong and not plain["rope"].keys() <= data["rope"].keys():
            wrong.add("rope")
        if wrong:
            raise UsageError(f"{where}: not as `tripoint fingerprint --save` writes it: {', '.join(sorted(wrong))}")
        try:
            read = {"reserved": frozenset(data["reserved"]), "base": dict(json.loads(data["base"]))}
        except (TypeError, ValueError):
            raise UsageError(f"{where}: reserved is no list of token ids, or base no JSON object") from None
        return cls(**{**data, **read})

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of the canary, with every entry that engines would otherwise guess."""
        plain = self.rope["rope_type"] == "default"
        return {
            **self.base,
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "hidden_act": self.act,
            "rms_norm_eps": self.eps,
            "rope_parameters": self.rope,
            "rope_theta": self.rope["rope_theta"],
            "rope_scaling": None if plain else self.rope,
            "max_position_embeddings": self.max_positions,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_cache": True,
        }

    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight of the checkpoint, by name."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv_bias = self.attention_bias or self.architecture == "qwen2"
        o_bias = self.attention_bias and self.architecture != "qwen2"
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            for name, rows, columns, bias in (
                ("self_attn.q_proj", q, hidden, qkv_bias),
                ("self_attn.k_proj", kv, hidden, qkv_bias),
                ("self_attn.v_proj", kv, hidden, qkv_bias),
                ("self_attn.o_proj", hidden, q, o_bias),
                ("mlp.gate_proj", self.intermediate, hidden, self.mlp_bias),
                ("mlp.up_proj", self.intermediate, hidden, self.mlp_bias),
                ("mlp.down_proj", hidden, self.intermediate, self.mlp_bias),
            ):
                shapes[f"{prefix}.{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}.{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes[f"{prefix}.self_attn.q_norm.weight"] = shapes[f"{prefix}.self_attn.k_norm.weight"] = (self.head_dim,)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}.{name}.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, hidden)
        return shapes

    @property
    def size(self) -> int:
        """Bytes of the checkpoint's weights."""
        return 2 * sum(math.prod(shape) for shape in self.weights().values())

    @property
    def rotary(self) -> Rotary:
        """The frequencies of the rotary pairs, for scaled RoPE as transformers works them out."""
        if self.rope["rope_type"] == "default":
            return Rotary.plain(self.head_dim, self.rope["rope_theta"])
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if self.rope["rope_type"] not in ROPE_INIT_FUNCTIONS:
            raise UsageError(
                f"canary of shape {self.architecture}: no RoPE type {self.rope['rope_type']!r}"
                f"{suggest(str(self.rope['rope_type']), list(ROPE_INIT_FUNCTIONS))}"
            )
        config = AutoConfig.for_model(**self.config)
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[self.rope["rope_type"]](config, device="cpu")
        return Rotary(self.head_dim, None, tuple(inv_freq.float().tolist()), float(scaling))
