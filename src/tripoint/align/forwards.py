"""What an aligned module runs instead of its class's `forward`.

One class per kind of module. A bound `forward` of its instance sits in the module's `__dict__`, so the module's class, its
parameters, its hooks and every other instance stay as they were. Bound methods rather than closures, because
`copy.deepcopy` and pickle carry them along with the model; rather than callable objects, because Dynamo lets layers that
differ in nothing else share one compiled graph.

Between decoder layers the residual sum travels unrounded (FP32) wherever the next norm must see it so; that norm's site
rounds what the next add sees. In FP32 models without autocast there is nothing to round, and every module runs what it ran
before.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tripoint import ops
from tripoint.ops.reference import rope_angles
from tripoint.schedule import NormRounding, QkNormRounding, RoundingSchedule

# transformers moved gradient checkpointing from the layer's `__call__` into a wrapper of its class's `forward`, which an
# instance's own `forward` replaces: there it is ours to do.
_CHECKPOINTS_IN_CALL = "__call__" in vars(GradientCheckpointingLayer)

# What a layer that is checkpointed gets instead: a cache would be written a second time when the layer is replayed.
_NO_CACHE: dict[str, Any] = {"cache": None, "past_key_values": None, "use_cache": False}


def compute_dtype(held: torch.dtype, x: Tensor) -> torch.dtype | None:
    """What a module that holds its numbers in dtype `held` rounds to: `held`, or the autocast dtype where that is FP32.

    None if that is no 16-bit dtype: then nothing is rounded. `x` tells the device.
    """
    device = x.device.type
    if held == torch.float32 and torch.is_autocast_enabled(device):
        held = torch.get_autocast_dtype(device)
    return held if held in (torch.bfloat16, torch.float16) else None


def _in_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight if weight.dtype == dtype else ops.round_to(weight, "rne", dtype)


class AlignedForward:
    """Base: holds the module with its name in the model, what it ran before, and the schedule it runs under now.

    `replaced` is the instance's own `forward` from before alignment, None if it ran its class's.
    """

    def __init__(self, module: nn.Module, name: str, replaced: Callable[..., Any] | None, schedule: RoundingSchedule) -> None:
        self.module = module
        self.name = name
        self.replaced = replaced
        self.schedule = schedule

    def unaligned(self, *args: Any, **kwargs: Any) -> Any:
        """What the module ran before."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class Carry:
    """Where a norm puts the residual sum for the next add, `rounded` or not, so that the module still returns one tensor to
    whoever hooks it. Not a list: accelerate and FSDP copy those on their way into a module."""

    total: Tensor

    def __init__(self, rounded: bool) -> None:
        self.rounded = rounded


class AlignedNorm(AlignedForward):
    """RMSNorm, alone or after a residual add. `site` is input, post_attention, final or qk; `after_add` says that its input is
    the sum of an add in the layer before, which that layer rounds only where this site's schedule says so."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        replaced: Callable[..., Any] | None,
        schedule: RoundingSchedule,
        site: str,
        after_add: bool,
    ) -> None:
        super().__init__(module, name, replaced, schedule)
        rounding: NormRounding | QkNormRounding = getattr(schedule.norm, site)
        self.norm_round, self.cast = rounding.norm_round, rounding.cast
        if isinstance(rounding, QkNormRounding):
            self.sum_round, self.out_round = "before_var", rounding.out_round  # there is no sum in front of it to round
        else:
            self.sum_round, self.out_round = rounding.sum_round, True  # it goes into a GEMM
        self.needs_fp32 = after_add and self.sum_round != "before_var"

    def forward(self, hidden_states: Tensor, *, residual: Tensor | None = None, carry: Carry | None = None) -> Tensor:
        """The normalised `hidden_states + residual`. `residual` is a keyword argument so that hooks which replace a module's
        input replace `hidden_states` alone."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        dtype = compute_dtype(weight.dtype, hidden_states)
        if dtype is None:
            if carry is not None:
                raise RuntimeError(
                    f"{self.name}: {weight.dtype} weight in a layer that rounds to 16 bits; give all norms one dtype"
                )
            return self.unaligned(hidden_states)
        if self.needs_fp32:
            _require_fp32(hidden_states, self.name, "the residual sum")
        out, total, _ = ops.add_rms_norm(
            hidden_states,
            residual,
            _in_dtype(weight, dtype),
            self.module.variance_epsilon,  # type: ignore[arg-type]
            self.sum_round,
            self.norm_round,
            self.out_round,
            None if carry is None else carry.rounded,
            self.cast,
            dtype,
        )
        if carry is not None:
            carry.total = total
        return out


class AlignedGatedMLP(AlignedForward):
    """down_proj(act(gate) * up)."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        replaced: Callable[..., Any] | None,
        schedule: RoundingSchedule,
        act: str,
    ) -> None:
        super().__init__(module, name, replaced, schedule)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        if compute_dtype(x.dtype, x) is None:
            return self.unaligned(x)
        mlp: Any = self.module
        rounding = self.schedule.swiglu
        product = ops.gated_act(mlp.gate_proj(x), mlp.up_proj(x), self.act, rounding.silu_round, rounding.sig, rounding.cast)
        return mlp.down_proj(product)


class AlignedRotaryEmbedding(AlignedForward):
    """The cos and sin tables in FP32; whether they are rounded is decided where they are applied."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if compute_dtype(x.dtype, x) is None:
            return self.unaligned(x, position_ids)
        angle = self.schedule.rope.angle
        if angle == "pos*inv":
            # transformers' own table, which it casts to the dtype of its first argument.
            return self.unaligned(x.new_empty(0, dtype=torch.float32), position_ids)
        config: Any = self.module.config
        head_dim = 2 * len(self.module.inv_freq)  # type: ignore[arg-type]
        angles = rope_angles(position_ids, config.rope_parameters["rope_theta"], head_dim, angle)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class WithoutNorms:
    """An attention layer whose QK-norms pass on what they get; everything else is the layer's."""

    def __init__(self, attention: nn.Module) -> None:
        self.attention = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attention, name)

    @staticmethod
    def q_norm(x: Tensor) -> Tensor:
        return x

    k_norm = q_norm


class AlignedAttention(AlignedForward):
    """The attention layer's own code with our rotation in place of its global `apply_rotary_pos_emb`.

    Taking transformers' code as it stands keeps everything else about attention, in every version: masks, caches, sliding
    windows, attention implementations. QK-norms that nobody watches are computed with the rotation, in one operation.
    """

    def __init__(self, module: nn.Module, name: str, replaced: Callable[..., Any] | None, schedule: RoundingSchedule) -> None:
        super().__init__(module, name, replaced, schedule)
        self._build()

    def _build(self) -> None:
        original = attention_code(self.module)
        unaligned = original.__globals__["apply_rotary_pos_emb"]
        self._forward = _with_rotation(original, functools.partial(self._rotate, unaligned))
        self._norms_deferred = _with_rotation(original, self._norm_and_rotate)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_forward", "_norms_deferred")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._build()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._can_defer_norms():
            return self._norms_deferred(WithoutNorms(self.module), *args, **kwargs)
        return self._forward(self.module, *args, **kwargs)

    def _can_defer_norms(self) -> bool:
        """Whether there are QK-norms and calling them would do nothing but what we do: they are aligned, no hook sees them, and
        there is a dtype to round to."""
        attention: Any = self.module
        if not hasattr(attention, "q_norm") or _watched(attention.q_norm) or _watched(attention.k_norm):
            return False
        dtypes = {compute_dtype(norm.weight.dtype, norm.weight) for norm in (attention.q_norm, attention.k_norm)}
        return len(dtypes) == 1 and None not in dtypes

    def _rotate(
        self,
        unaligned: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[Tensor, Tensor]:
        # Where a QK-norm leaves query and key in FP32, its weight tells what the rotation rounds to.
        attention: Any = self.module
        held = attention.q_norm.weight if hasattr(attention, "q_norm") else query
        dtype = compute_dtype(held.dtype, query)
        if dtype is None:
            return unaligned(query, key, cos, sin, unsqueeze_dim)
        rounding = self.schedule.rope
        cos, sin = self._tables(cos, sin, unsqueeze_dim)
        return ops.rope(query, key, cos, sin, rounding.table, rounding.compute, rounding.cast, dtype)

    def _norm_and_rotate(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """`query` and `key` have not been normalised."""
        attention: Any = self.module
        dtype: Any = compute_dtype(attention.q_norm.weight.dtype, query)
        weights = (_in_dtype(norm.weight, dtype) for norm in (attention.q_norm, attention.k_norm))
        norm: Any = self.schedule.norm.qk
        rope = self.schedule.rope
        rotated_query, rotated_key, _, _ = ops.qk_norm_rope(
            query,
            key,
            *weights,
            attention.q_norm.variance_epsilon,
            norm.norm_round,
            norm.out_round,
            norm.cast,
            *self._tables(cos, sin, unsqueeze_dim),
            rope.table,
            rope.compute,
            rope.cast,
            dtype,
        )
        return rotated_query, rotated_key

    def _tables(self, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor]:
        rounding = self.schedule.rope
        if rounding.table == "fp32" or rounding.cast != "rne":
            _require_fp32(cos, self.name, "the RoPE table")
        return cos.float().unsqueeze(unsqueeze_dim), sin.float().unsqueeze(unsqueeze_dim)


def _with_rotation(code: types.FunctionType, rotate: Callable[..., tuple[Tensor, Tensor]]) -> types.FunctionType:
    """`code` with another `apply_rotary_pos_emb`."""
    # Without `__name__` Dynamo cannot mistake these globals for the module's own, where the unaligned rotation is.
    names = {key: value for key, value in code.__globals__.items() if key != "__name__"} | {"apply_rotary_pos_emb": rotate}
    function = types.FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    function.__kwdefaults__ = code.__kwdefaults__
    return function


def _watched(norm: nn.Module) -> bool:
    """Whether calling the norm does anything but `AlignedNorm.forward`."""
    hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    return any(hooks) or not isinstance(getattr(norm.forward, "__self__", None), AlignedNorm)


class AlignedDecoderLayer(AlignedForward):
    """Two residual adds, each fused with the norm that follows it; the second norm belongs to the next layer.

    `index` is the layer's place in the depth, `last` whether the final norm follows it.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        replaced: Callable[..., Any] | None,
        schedule: RoundingSchedule,
        index: int,
        last: bool,
    ) -> None:
        super().__init__(module, name, replaced, schedule)
        following = schedule.norm.final if last else schedule.norm.input
        self.first = index == 0
        self.rounds_incoming = schedule.carry_rounds(2 * index - 1)
        self.rounds_attention = schedule.carry_rounds(2 * index)
        self.rounds_outgoing = following.sum_round == "before_var"
        self.outgoing_cast = following.cast

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.module
        dtype = compute_dtype(layer.input_layernorm.weight.dtype, hidden_states)
        if dtype is None:
            return self.unaligned(hidden_states, *args, **kwargs)
        if not _CHECKPOINTS_IN_CALL and layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
            kwargs |= {name: value for name, value in _NO_CACHE.items() if name in kwargs}
            return layer._gradient_checkpointing_func(functools.partial(self._run, dtype, **kwargs), hidden_states, *args)
        return self._run(dtype, hidden_states, *args, **kwargs)

    def _run(self, dtype: torch.dtype, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        layer: Any = self.module
        if hidden_states.dtype != dtype and self.first:
            # FP32 embeddings under autocast: what the BF16 model would have looked up.
            hidden_states = ops.round_to(hidden_states, "rne", dtype)
        if hidden_states.dtype != dtype and self.rounds_incoming:
            carry = Carry(rounded=True)
            normed = layer.input_layernorm(hidden_states, carry=carry)
            residual = carry.total
        else:
            normed, residual = layer.input_layernorm(hidden_states), hidden_states
        attended, _ = layer.self_attn(hidden_states=normed, attention_mask=attention_mask, **kwargs)

        carry = Carry(rounded=self.rounds_attention)
        normed = layer.post_attention_layernorm(attended, residual=residual, carry=carry)
        return ops.residual_add(layer.mlp(normed), carry.total, self.rounds_outgoing, self.outgoing_cast, dtype)


def forward_slot(module: nn.Module) -> str:
    """The attribute that holds what a module computes: accelerate's hooks keep it behind a `forward` of their own."""
    return "_old_forward" if "_hf_hook" in vars(module) and "_old_forward" in vars(module) else "forward"


def aligned(module: nn.Module) -> AlignedForward | None:
    """What an aligned module runs, None for a module that is not."""
    owner = getattr(vars(module).get(forward_slot(module)), "__self__", None)
    return owner if isinstance(owner, AlignedForward) else None


def own_class(module: nn.Module) -> type[nn.Module]:
    """The module's class as its author wrote it: FSDP2 puts a subclass of its own in front."""
    return next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.distributed."))


def attention_code(module: nn.Module) -> types.FunctionType:
    """The `forward` of an attention layer's class without decorators, such as those that rename deprecated arguments."""
    return inspect.unwrap(own_class(module).forward)  # type: ignore[return-value]


def _require_fp32(tensor: Tensor, name: str, what: str) -> None:
    if tensor.dtype != torch.float32:
        raise RuntimeError(
            f"{name}: {what} arrived in {tensor.dtype}, but the schedule needs it in FP32; something cast it on the way "
            "(FSDP2: MixedPrecisionPolicy(cast_forward_inputs=False); DeepSpeed, accelerate: no casting of layer inputs)"
        )
