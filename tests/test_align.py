"""`align` and its record: which bits move, which must not, what is refused, and that nothing is left behind."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from tiny import ARCHITECTURES, LAYERS, ROPES, TRAINED_LENGTH, counted, differing, logits, same, step, tiny, tokens
from tripoint import align
from tripoint.errors import UsageError
from tripoint.schedule import RoundingSchedule

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OWN = "R1 S1 N1"
"""What transformers does by itself."""
ENGINE = "R3 S3 N3 carry=layer"
TARGETS = ("R1 S1 N1", "R3 S3 N3 carry=layer qk=none", "R4 S1 N4 carry=fp32 qk=norm", "R3 S3 N5 N.final=N2 carry=3")

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


def own_forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


# -- transformers' own schedule ---------------------------------------------------------------------------------------


@architectures
@pytest.mark.parametrize("rope", ROPES)
def test_transformers_own_schedule_changes_no_bit(architecture: str, rope: str) -> None:
    model = tiny(architecture, rope)
    assert model.model.rotary_emb.rope_type == rope
    within, beyond = tokens(TRAINED_LENGTH - 5), tokens(TRAINED_LENGTH + 16)
    before = [step(model, ids) for ids in (within, beyond, within)]

    model = tiny(architecture, rope)  # `dynamic` remembers the longest sequence it has seen
    align(model, OWN)
    for ids, expected in zip((within, beyond, within), before, strict=True):
        with counted() as calls:
            actual = step(model, ids)
        assert differing(actual, expected) == []
        norms, rope = 2 * LAYERS + 1, "qk_norm_rope" if architecture == "qwen3" else "rope"
        forward = {rope: LAYERS, "gated_act": LAYERS, "add_rms_norm": norms, "residual_add": LAYERS}
        # A residual add hands its gradient on as it is.
        backward = {f"{rope}_backward": LAYERS, "gated_act_backward": LAYERS, "add_rms_norm_backward": norms}
        assert calls == forward | backward
        rotary = model.model.rotary_emb
        if rope in ("dynamic", "longrope") and ids is beyond:  # or else these types were not put to the test
            assert not same(rotary.inv_freq, rotary.original_inv_freq)


@architectures
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_transformers_own_schedule_with_every_gate_and_format(architecture: str, dtype: torch.dtype, act: str) -> None:
    model, ids = tiny(architecture, dtype=dtype, hidden_act=act, head_dim=None), tokens()
    before = step(model, ids)
    align(model, OWN)
    assert differing(step(model, ids), before) == []


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=["fp32", "fp64"])
@architectures
def test_without_autocast_wide_weights_compute_as_before(architecture: str, dtype: torch.dtype) -> None:
    model, ids = tiny(architecture, dtype=dtype), tokens()
    before = step(model, ids)
    alignment = align(model, "R3 S3 N3 carry=layer angle=exp2 cast=rtz")
    with counted() as calls:
        assert differing(step(model, ids), before) == []
    assert not calls
    assert ("autocast" in str(alignment)) == (dtype == FP32)


# -- FP32 parameters under autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@architectures
def test_fp32_under_autocast_gives_the_bits_of_the_rounded_model(architecture: str, dtype: torch.dtype) -> None:
    """Norm weights included, and gradients reach the FP32 parameters."""
    wide, narrow, ids = tiny(architecture, dtype=FP32), tiny(architecture, dtype=dtype), tokens()
    assert all(
        not same(a, b.float()) and same(a.to(dtype), b) for a, b in zip(wide.parameters(), narrow.parameters(), strict=True)
    )
    for target in TARGETS:
        align(wide, target)
        align(narrow, target)
        with torch.autocast("cpu", dtype=dtype):
            actual = step(wide, ids)
        expected = step(narrow, ids)
        assert same(actual.logits, expected.logits)
        assert actual.grads.keys() == dict(wide.named_parameters()).keys()
        for name, grad in actual.grads.items():
            assert grad.dtype == FP32
            assert torch.nn.functional.cosine_similarity(grad.flatten(), expected.grads[name].float().flatten(), 0) > 0.99


@architectures
def test_bf16_weights_under_autocast_give_the_bits_they_give_without(architecture: str) -> None:
    model, ids = tiny(architecture), tokens()
    for target in TARGETS:
        align(model, target)
        with torch.autocast("cpu", dtype=BF16):
            under = logits(model, ids)
        assert same(under, logits(model, ids))


# -- undo, again, elsewhere, saved ------------------------------------------------------------------------------------


@architectures
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_undo_gives_back_the_old_bits_and_leaves_nothing(architecture: str, dtype: torch.dtype) -> None:
    model, ids = tiny(architecture, dtype=dtype), tokens()
    before, keys, attributes = step(model, ids), list(model.state_dict()), [set(vars(m)) for m in model.modules()]

    first = align(model, ENGINE)
    second = align(model, "R4 S1 N2")
    assert list(model.state_dict()) == keys
    if dtype == BF16:
        assert differing(step(model, ids), before)
    first.undo()
    assert differing(step(model, ids), before) == []
    assert own_forwards(model) == []
    assert [set(vars(m)) for m in model.modules()] == attributes
    second.undo()
    assert differing(step(model, ids), before) == []


def test_aligning_again_changes_nothing_and_moving_leaves_no_trace() -> None:
    model, ids = tiny("qwen3"), tokens()
    align(model, ENGINE)
    once = step(model, ids)
    again = align(model, ENGINE)
    assert differing(step(model, ids), once) == []
    assert all(site.before == site.after for site in again.sites)
    for target in TARGETS:
        align(model, target)
        moved, fresh = step(model, ids), tiny("qwen3")
        align(fresh, target)
        assert differing(moved, step(fresh, ids)) == []


def test_saving_and_reloading_gives_the_aligned_bits(tmp_path: Path) -> None:
    model, ids = tiny("qwen3"), tokens()
    before = logits(model, ids)
    align(model, ENGINE)
    aligned = logits(model, ids)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    assert same(logits(reloaded, ids), before)
    align(reloaded, ENGINE)
    assert same(logits(reloaded, ids), aligned)


# -- the record -------------------------------------------------------------------------------------------------------


def test_the_record_names_every_module_with_its_rounding_before_and_after() -> None:
    model = tiny("qwen3")
    alignment = align(model, "R3 S1 N3 carry=layer N.final=N2 cast=swiglu:rtz")
    assert {site.module for site in alignment.sites} == set(own_forwards(model))
    by_name = {site.module: (site.op, site.before, site.after) for site in alignment.sites}
    assert by_name["model.layers.1.self_attn"] == ("rope", "R1", "R3")
    assert by_name["model.layers.1.mlp"] == ("swiglu", "S1", "S1 cast=rtz")
    assert by_name["model.layers.1.input_layernorm"] == ("norm.input", "N1", "N3")
    assert by_name["model.layers.1.self_attn.k_norm"] == ("norm.qk", "both", "both")
    assert by_name["model.layers.1"] == ("residual adds", "carry=bf16", "carry=layer")
    assert by_name["model.norm"] == ("norm.final", "N1", "N2")
    text = str(alignment)
    assert "R3 S1 N3 N.final=N2 carry=layer qk=both cast=swiglu:rtz" in text
    assert "both (as before)         6 modules" in text
    assert not alignment.notes

    moved = align(model, "R4 S3 N3 carry=[1,3]")
    by_name = {site.module: (site.before, site.after) for site in moved.sites}
    assert by_name["model.layers.0.self_attn"] == ("R3", "R4")
    assert by_name["model.layers.0"] == ("carry=layer", "carry=[1,3]")


def test_the_record_speaks_of_qk_norms_only_where_there_are_any() -> None:
    without, having = align(tiny("llama"), ENGINE), align(tiny("qwen3"), ENGINE)
    assert (str(without.before), str(without.schedule)) == ("R1 S1 N1", ENGINE)
    assert (str(having.before), str(having.schedule)) == ("R1 S1 N1 qk=both", f"{ENGINE} qk=both")


def test_the_record_of_fp32_weights_starts_from_what_autocast_does() -> None:
    alignment = align(tiny("qwen3", dtype=FP32), "R3 S3 N3 carry=layer")
    assert alignment.before == RoundingSchedule.parse("R4 S1 N6 qk=norm")


def test_rounded_frequencies_are_noted() -> None:
    assert not align(tiny("llama"), OWN).notes
    (note,) = align(tiny("llama", dtype=FP32).to(BF16), OWN).notes
    assert "model: rotary_emb.inv_freq was rounded to torch.bfloat16" in note


def test_a_fingerprint_file_is_a_target(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    schedule = RoundingSchedule.parse("R3 S3 N3 carry=layer")
    file.write_text(tomli_w.dumps({"stack": "vllm", "schedule": _without_none(schedule.to_dict())}))
    one, other, ids = tiny("llama"), tiny("llama"), tokens()
    alignment = align(one, file)
    align(other, schedule)
    assert same(logits(one, ids), logits(other, ids))
    assert "engine.toml" in str(alignment)


def _without_none(data: dict[str, Any]) -> dict[str, Any]:
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in data.items() if v is not None}


def test_a_profile_is_a_target() -> None:
    model = tiny("llama")
    assert align(model, "vllm@0.32/cuda/compiled/tp1").schedule == RoundingSchedule.parse("R3 S3 N3 carry=layer qk=none")


# -- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_go_on_seeing_one_tensor_and_may_replace_it() -> None:
    model, ids = tiny("qwen3"), tokens()
    names = [
        "model.norm",
        "model.layers.1",
        *(f"model.layers.1.{n}" for n in ("mlp", "input_layernorm", "self_attn.k_norm", "post_attention_layernorm")),
    ]
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda module, args, name=name: seen[name].extend(args))
        module.register_forward_hook(lambda module, args, output, name=name: seen[name].append(output))
        module.register_full_backward_hook(lambda module, grads, _, name=name: seen[name].extend(grads))
    before = step(model, ids)
    for target in (OWN, ENGINE):
        for tensors in seen.values():
            tensors.clear()
        align(model, target)
        after = step(model, ids)
        assert (differing(after, before) == []) == (target == OWN)
        assert [len(tensors) for tensors in seen.values()] == [3] * len(names)
        assert all(isinstance(tensor, Tensor) for tensors in seen.values() for tensor in tensors)

    halved = model.model.layers[1].post_attention_layernorm.register_forward_hook(lambda module, args, output: output / 2)
    assert not same(logits(model, ids), after.logits)
    halved.remove()
    assert same(logits(model, ids), after.logits)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("target", [*TARGETS, "R2 S1 N1 qk=out cast=norm:rtz"])
def test_qk_norms_are_part_of_the_rotation_unless_somebody_watches_one(dtype: torch.dtype, target: str) -> None:
    """And then no bit is another."""
    model, ids = tiny("qwen3", dtype=dtype), tokens()
    align(model, target)

    def calls_and_step() -> tuple[set[str], Any]:
        with torch.autocast("cpu", dtype=BF16, enabled=dtype == FP32), counted() as calls:
            taken = step(model, ids)
        return {name for name in calls if "rope" in name}, taken

    together, expected = calls_and_step()
    assert together == {"qk_norm_rope", "qk_norm_rope_backward"}
    seen: list[Tensor] = []
    handles = [
        layer.self_attn.k_norm.register_forward_hook(lambda module, args, output: seen.append(output))
        for layer in model.model.layers
    ]
    apart, actual = calls_and_step()
    assert apart == {"rope", "rope_backward"}
    assert differing(actual, expected) == []
    assert len(seen) == LAYERS
    for handle in handles:
        handle.remove()
    assert calls_and_step()[0] == together


# -- refusals ---------------------------------------------------------------------------------------------------------


class MyMLP(LlamaMLP):
    pass


class SideRMSNorm(nn.Module):
    pass


def _gpt2() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2), dtype=BF16).eval()


def _subclass() -> PreTrainedModel:
    model = tiny("llama")
    own = MyMLP(model.config).to(BF16)
    own.load_state_dict(model.model.layers[1].mlp.state_dict())
    model.model.layers[1].mlp = own
    return model


def _side_norm() -> PreTrainedModel:
    model = tiny("llama")
    model.model.layers[2].self_attn.side = SideRMSNorm()
    return model


def _other_activation() -> PreTrainedModel:
    model = tiny("llama")
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    return model


def _patched_instance() -> PreTrainedModel:
    model = tiny("llama")
    norm = model.model.layers[1].input_layernorm
    norm.forward = types.MethodType(lambda self, x: type(self).forward(self, x), norm)
    return model


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str, str]] = {
    "architecture": (_gpt2, OWN, "transformer.h.0.attn (transformers.models.gpt2.modeling_gpt2.GPT2Attention)"),
    "subclass": (_subclass, OWN, "model.layers.1.mlp (test_align.MyMLP) is not transformers' LlamaMLP"),
    "stray norm": (_side_norm, OWN, "model.layers.2.self_attn.side (test_align.SideRMSNorm) is not a layout"),
    "replaced activation": (_other_activation, OWN, "model.layers.0.mlp.act_fn (torch.nn.modules.activation.Tanh) is not"),
    "patched": (_patched_instance, OWN, "LlamaRMSNorm) runs code of test_align; undo that patch first"),
    "hidden_act": (lambda: tiny("llama", hidden_act="relu"), OWN, "hidden_act='relu' is not an activation that align knows"),
    "S5 with gelu": (
        lambda: tiny("llama", hidden_act="gelu"),
        "R1 S5 N1",
        "(S5) is a sigmoid's rounding, but the gate here is gelu",
    ),
    "angle": (lambda: tiny("llama", "yarn"), "R4 S1 N1 angle=exp2", "angle=exp2 is defined for plain RoPE only"),
    "code": (lambda: tiny("llama"), "R9 S1 N1", "unknown code 'R9'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name_and_left_alone(case: str) -> None:
    build, target, message = REFUSED[case]
    model = build()
    before, ids = own_forwards(model), tokens()
    bits = logits(model, ids)
    with pytest.raises(UsageError) as error:
        align(model, target)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert own_forwards(model) == before
    assert same(logits(model, ids), bits)


def test_a_refused_move_keeps_the_alignment_there_was() -> None:
    model, ids = tiny("llama", "yarn"), tokens()
    align(model, ENGINE)
    bits = logits(model, ids)
    with pytest.raises(UsageError):
        align(model, "R4 S3 N3 angle=exp2")
    assert same(logits(model, ids), bits)


@architectures
def test_classes_patched_as_a_whole_are_refused(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(architecture)
    for cls in (type(model.model), type(model.model.layers[0]), type(model.model.layers[0].self_attn)):
        with monkeypatch.context() as patch:
            patch.setattr(cls, "forward", lambda self, *args, **kwargs: None)
            with pytest.raises(UsageError, match=rf"{cls.__name__}\) runs code of test_align"):
                align(model, OWN)
    align(model, OWN)


def test_norms_that_a_later_cast_split_are_refused_when_they_run() -> None:
    model = tiny("llama")
    align(model, OWN)
    model.model.layers[1].post_attention_layernorm.to(FP32)
    with pytest.raises(RuntimeError, match=r"layers\.1\.post_attention_layernorm: torch\.float32 weight"):
        logits(model, tokens())
