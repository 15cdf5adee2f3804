"""An aligned model is used as any other: caches, masks, packing, checkpointing, adapters, heads, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, DynamicCache, PreTrainedModel

from sites import mismatches, record
from tiny import ARCHITECTURES, HIDDEN, counted, differing, logits, same, step, tiny, tokens
from tripoint import align
from tripoint.align.forwards import aligned
from tripoint.schedule import RoundingSchedule

pytestmark = pytest.mark.usefixtures("one_thread")

OWN, ENGINE = "R1 S1 N1", "R3 S3 N3 carry=layer qk=none"

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
attentions = pytest.mark.parametrize("attention", ["sdpa", "eager"])


# -- generation and masks ---------------------------------------------------------------------------------------------


def generate(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Greedy tokens with a KV cache, and the logits they were chosen from."""
    out = model.generate(
        ids, max_new_tokens=6, do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True, **inputs
    )
    return out.sequences, torch.stack(out.logits, 1)


@torch.no_grad()
def roll_out(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a cache: the whole sequence again for every token."""
    steps = []
    for _ in range(6):
        steps.append(model(input_ids=ids, use_cache=False).logits[:, -1].float())
        ids = torch.cat((ids, steps[-1].argmax(-1)[:, None]), 1)
    return ids, torch.stack(steps, 1)


@architectures
@attentions
@pytest.mark.parametrize("target", [None, OWN, ENGINE, "R4 S1 N4 carry=fp32"])
def test_generation_with_a_cache_is_the_rollout_without(architecture: str, attention: str, target: str | None) -> None:
    """Bit for bit, as in the unaligned model: sums over masked positions add zeros."""
    model, ids = tiny(architecture, attention=attention), tokens(9)
    before = generate(model, ids)
    if target is not None:
        align(model, target)
    (cached, cached_logits), (uncached, uncached_logits) = generate(model, ids), roll_out(model, ids)
    assert torch.equal(cached, uncached)
    assert torch.equal(cached_logits, uncached_logits)
    assert torch.equal(cached_logits, before[1]) == (target in (None, OWN))


@architectures
@attentions
def test_left_padding(architecture: str, attention: str) -> None:
    model, ids = tiny(architecture, attention=attention), tokens(12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    before = step(model, ids, **inputs)
    generated = generate(model, ids, attention_mask=mask)

    align(model, OWN)
    assert differing(step(model, ids, **inputs), before) == []
    assert all(map(torch.equal, generate(model, ids, attention_mask=mask), generated))

    align(model, ENGINE)
    padded = logits(model, ids, **inputs)
    assert not same(padded, before.logits)
    assert same(padded[:1, 5:], logits(model, ids[:1, 5:]))
    assert same(padded[1:], logits(model, ids[1:]))
    sequences, _ = generate(model, ids, attention_mask=mask)
    assert torch.equal(sequences[1:], generate(model, ids[1:])[0])


@architectures
def test_packed_sequences(architecture: str) -> None:
    """Two sequences in one row, told apart by position ids alone."""
    model, ids = tiny(architecture, attention="eager"), tokens(17, batch=1)
    positions = torch.cat((torch.arange(7), torch.arange(10)))[None]
    before = step(model, ids, position_ids=positions, use_cache=False)
    align(model, OWN)
    assert differing(step(model, ids, position_ids=positions, use_cache=False), before) == []
    align(model, ENGINE)
    packed = logits(model, ids, position_ids=positions, use_cache=False)
    assert not same(packed, before.logits)
    assert same(packed[:, :7], logits(model, ids[:, :7]))
    assert same(packed[:, 7:], logits(model, ids[:, 7:]))


@attentions
def test_sliding_windows(attention: str) -> None:
    for architecture, settings in {
        "mistral": {"sliding_window": 5},
        "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    }.items():
        model, ids = tiny(architecture, attention=attention, **settings), tokens(15)
        assert not same(logits(model, ids), logits(tiny(architecture, attention=attention), ids))
        before = step(model, ids)
        align(model, OWN)
        assert differing(step(model, ids), before) == []


def test_hidden_states_and_attentions_are_returned_as_before() -> None:
    model, ids = tiny("qwen3", attention="eager"), tokens()
    before = model(input_ids=ids, output_hidden_states=True, output_attentions=True)
    align(model, OWN)
    after = model(input_ids=ids, output_hidden_states=True, output_attentions=True)
    for left, right in ((before.hidden_states, after.hidden_states), (before.attentions, after.attentions)):
        assert len(left) == len(right)
        assert all(map(same, left, right))


# -- training ---------------------------------------------------------------------------------------------------------


@architectures
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_bit(architecture: str, dtype: torch.dtype, reentrant: bool) -> None:
    model, ids = tiny(architecture, dtype=dtype), tokens()

    def trained() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32), counted() as calls:
            return step(model, ids), calls["gated_act"]

    for target in (OWN, ENGINE):
        align(model, target)
        plain, once = trained()
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        checkpointed, twice = trained()
        assert differing(checkpointed, plain) == []
        assert twice == 2 * once
        model.gradient_checkpointing_disable()
        model.eval()


def test_generation_from_a_model_in_training_mode_is_what_it_was() -> None:
    """Older transformers drops the cache there, which the tokens show."""
    model, ids = tiny("qwen3"), tokens(9)
    model.train()
    model.gradient_checkpointing_enable()
    before = generate(model, ids)
    align(model, OWN)
    assert all(map(torch.equal, generate(model, ids), before))


def test_a_cache_given_to_a_checkpointed_model_is_left_alone_as_before() -> None:
    model, ids = tiny("qwen3"), tokens()
    model.train()
    model.gradient_checkpointing_enable()
    steps = []
    for target in (None, OWN):
        if target is not None:
            align(model, target)
        cache = DynamicCache(config=model.config)
        steps.append(step(model, ids, past_key_values=cache))
        assert cache.get_seq_length() == 0
    assert differing(*steps) == []


@architectures
def test_tied_embeddings(architecture: str) -> None:
    model, ids = tiny(architecture, tie_word_embeddings=True), tokens()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = step(model, ids)
    align(model, OWN)
    assert differing(step(model, ids), before) == []
    align(model, ENGINE)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert differing(step(model, ids), before)


def adapted(model: PreTrainedModel) -> Any:
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


@architectures
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
def test_lora_before_and_after_alignment_and_merged(architecture: str, dtype: torch.dtype) -> None:
    ids = tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        unaligned = adapted(tiny(architecture, dtype=dtype))
        before = step(unaligned, ids)
        if dtype == torch.bfloat16:
            align(unaligned, OWN)
            assert differing(step(unaligned, ids), before) == []

        early, late = tiny(architecture, dtype=dtype), adapted(tiny(architecture, dtype=dtype))
        alignment = align(early, ENGINE)
        early = adapted(early)
        align(late, ENGINE)
        assert differing(step(early, ids), step(late, ids)) == []
        assert differing(step(late, ids), before)

        alignment.undo()
        assert differing(step(early, ids), before) == []
        merged, plain = late.merge_and_unload(), early.merge_and_unload()
        align(plain, ENGINE)
        assert same(logits(merged, ids), logits(plain, ids))


# -- heads and copies -------------------------------------------------------------------------------------------------


class WithValueHead(nn.Module):
    """What RL libraries put around a policy."""

    def __init__(self, pretrained_model: PreTrainedModel) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model
        self.mlp_head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1)).to(torch.bfloat16)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        out = self.pretrained_model(input_ids=input_ids, output_hidden_states=True)
        return out.logits, self.mlp_head(out.hidden_states[-1])


def test_value_heads_on_top() -> None:
    ids = tokens()
    policy, alone = WithValueHead(tiny("qwen3")), tiny("qwen3")
    before = policy(ids)
    align(policy, OWN)
    assert all(map(same, policy(ids), before))
    alignment = align(policy, ENGINE)
    align(alone, ENGINE)
    assert same(policy(ids)[0], logits(alone, ids))
    assert alignment.sites[0].module.startswith("pretrained_model.model.")


@architectures
@pytest.mark.parametrize("auto_class", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_reward_and_value_models_of_transformers(architecture: str, auto_class: Any) -> None:
    model, ids = tiny(architecture, auto_class=auto_class), tokens()
    before = logits(model, ids)
    align(model, OWN)
    assert same(logits(model, ids), before)
    align(model, ENGINE)
    assert not same(logits(model, ids), before)


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@architectures
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_copies_are_aligned_and_stand_alone(architecture: str, copied: Callable[[nn.Module], Any]) -> None:
    model, ids = tiny(architecture), tokens()
    unaligned = logits(model, ids)
    align(model, ENGINE)
    expected = step(model, ids)
    other = copied(model)
    assert differing(step(other, ids), expected) == []
    assert all(site.module is module for module in other.modules() if (site := aligned(module)) is not None)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert differing(step(other, ids), expected) == []
    align(other, OWN).undo()
    assert same(logits(other, ids), unaligned)
    assert aligned(model.model.norm) is not None


def test_layers_taken_off_the_end() -> None:
    """Fewer layers than the module list holds: the final norm follows the last that runs."""
    model, ids = tiny("llama"), tokens(5)
    model.config.num_hidden_layers = 2
    schedule = "R3 S3 N3 N.input=N2 carry=layer"
    align(model, schedule)
    seen = record(model, ids)
    assert "layers.2.mlp.down_proj" not in seen
    assert mismatches(model, seen, RoundingSchedule.parse(schedule), ids) == []
