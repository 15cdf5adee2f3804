"""Each cause that is not rounding is named on made data, on top of real rounding drift, and clean data gives none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoConfig, AutoModelForCausalLM

import made_cases
from tripoint.drift.dither import Dithering, Replicates, read_weights, seeds
from tripoint.drift.expectation import NoiseOnly, noise_only
from tripoint.drift.findings import Evidence, Finding, _rope, find_causes, prefill_against_decode
from tripoint.drift.systematic import aligned
from tripoint.errors import MeasurementError
from tripoint.schedule import RoundingSchedule
from tripoint.stacks import Rollout, open_stack
from tripoint.stacks.hf import HFStack


def expectation(directory: Path, rollouts: list[Rollout]) -> NoiseOnly:
    stack = HFStack(directory)
    dithering = Dithering(read_weights(directory), rollouts)
    trainer = dithering.score(stack, seeds(0, "trainer", 3))
    with aligned(stack, RoundingSchedule.parse(made_cases.ENGINE)):
        return noise_only(trainer, dithering.score(stack, seeds(0, "engine", 3)))


def found(tmp_path: Path, seed: int, *cases: str) -> tuple[list[Finding], str]:
    model = made_cases.trainer_model(seed)
    model.save_pretrained(tmp_path)
    rollouts, about = made_cases.rollouts(model, cases, seed)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    findings = find_causes(model, rollouts, expectation(tmp_path, rollouts), bos=made_cases.BOS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return findings, f"{about}: {findings}"


@pytest.mark.parametrize("seed", [0, 1])
def test_clean_rollouts_give_no_finding(tmp_path: Path, seed: int) -> None:
    findings, about = found(tmp_path, seed)
    assert not findings, about


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_token_that_falls_either_way_is_noted_and_is_no_cause(tmp_path: Path, tokens: int) -> None:
    """As real models have them: off by whole nats, which a handful of dithers need not show."""
    model = made_cases.trainer_model(0)
    model.save_pretrained(tmp_path)
    rollouts, _ = made_cases.rollouts(model, (), 0)
    expected = expectation(tmp_path, rollouts)
    off = made_cases.off(rollouts, 3.0, tokens)
    (finding,) = find_causes(model, off, expected, bos=made_cases.BOS)
    assert (finding.cause, finding.rounding) == ("unsteady_tokens", True)
    assert re.match(rf"{tokens} of 1536 tokens differ by up to (2\.9|3)", finding.evidence)
    assert finding.nats == pytest.approx(3 * np.sqrt(tokens / 1536), rel=0.1)
    assert [f.cause for f in find_causes(model, made_cases.off(rollouts, 3.0, 8), expected)] == ["wild_tokens"]


def test_a_token_known_to_be_unsteady_hides_nothing_else(tmp_path: Path) -> None:
    model = made_cases.trainer_model(8)
    model.save_pretrained(tmp_path)
    rollouts, _ = made_cases.rollouts(model, ("weights",), 8)
    expected = expectation(tmp_path, rollouts)
    assert [finding.cause for finding in find_causes(model, made_cases.off(rollouts, 3.0, 2), expected)] == ["weights"]
    clean, _ = made_cases.rollouts(model, (), 8)
    off = made_cases.off(clean, 3.0, 8)
    expected = expectation(tmp_path, clean)
    assert [finding.cause for finding in find_causes(model, off, expected)] == ["wild_tokens"]
    moved = np.concatenate([a.logprobs for a in off]) != np.concatenate([b.logprobs for b in clean])
    (finding,) = find_causes(model, off, replace(expected, steady=expected.steady & ~moved))
    assert (finding.cause, finding.rounding) == ("unsteady_tokens", True)


def test_few_long_completions_do(tmp_path: Path) -> None:
    model = made_cases.trainer_model(9)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(3, made_cases.VOCABULARY, (8, 1031)).tolist()
    rollouts = [Rollout((row[0],), tuple(row[1:])) for row in ids]
    weights = read_weights(tmp_path)
    with open_stack(f"emulated:{made_cases.ENGINE}", tmp_path) as engine:
        engine.load_weights((weights | {"lm_head.weight": 2 * weights["lm_head.weight"]}).items())
        rollouts = [replace(r, logprobs=tuple(row)) for r, row in zip(rollouts, engine.score(rollouts), strict=True)]
    expected = expectation(tmp_path, rollouts)
    findings = find_causes(model, rollouts, expected, sampled=False)
    assert [finding.cause for finding in findings] == ["temperature"], findings
    assert "temperature 0.5" in findings[0].evidence
    with pytest.raises(MeasurementError, match="rollouts of 7 prompts"):
        find_causes(model, rollouts[:7], expected)


def test_completions_of_one_prompt_make_nothing_surer(tmp_path: Path) -> None:
    """What eight sequences do not tell from chance, eight copies of them do not either."""
    model = made_cases.trainer_model(10)
    model.save_pretrained(tmp_path)
    rollouts, _ = made_cases.rollouts(model, (), 10, sequences=8)
    evidence = Evidence(model, rollouts, expectation(tmp_path, rollouts), autocast=False)
    grouped = [replace(r, group=r.prompt_ids) for r in rollouts]
    many = Evidence(model, grouped * 8, evidence.expected, autocast=False)
    before, after = np.random.default_rng(0).normal(size=(2, len(evidence.engine)))
    before += 0.1
    share, chance = evidence.better(before, after)
    assert many.better(np.tile(before, 8), np.tile(after, 8)) == pytest.approx((share, chance))


def test_rope_is_varied_by_type_of_layer(tmp_path: Path) -> None:
    """As Gemma 3 has it: each type of layer has a theta of its own."""
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    rollouts = [Rollout((3,), (4, 5), (-1.0, -1.0), group=(i,)) for i in range(8)]
    evidence = Evidence(model, rollouts, NoiseOnly(1e-3, 1e-3, 0.03, np.ones(16, bool)), autocast=False)
    suspects = {suspect.what: suspect for suspect in _rope(evidence)}
    logits = evidence.logits([])
    for layers, theta in (("sliding", "10000"), ("full", "1e+06")):
        what = (
            f"the engine computes with rope_theta=500000 in the {layers} attention layers, the trainer with rope_theta={theta}"
        )
        (suspect,) = (suspect for name, suspect in suspects.items() if name.startswith(what))
        assert not torch.equal(evidence.logits([suspect]), logits)
    assert torch.equal(evidence.logits([]), logits)


@pytest.mark.parametrize("case", ["sampling_temperature", "sampling_truncation"])
def test_sizes_are_of_one_unit(tmp_path: Path, case: str) -> None:
    """What is drawn and what is recorded differ by as much as the trainer and an engine that records what it draws."""
    model = made_cases.trainer_model(11)
    model.save_pretrained(tmp_path)
    (raw,), _ = found(tmp_path, 11, case)
    (processed,), _ = found(tmp_path, 11, case.removeprefix("sampling_"))
    assert raw.cause.removeprefix("sampling_") == processed.cause
    assert raw.nats == pytest.approx(processed.nats, rel=0.3)


@pytest.mark.parametrize("case", list(made_cases.CASES))
def test_each_cause_is_named(tmp_path: Path, case: str) -> None:
    findings, about = found(tmp_path, 3, case)
    assert [finding.cause for finding in findings] == [case], about
    assert findings[0].nats > 0
    assert findings[0].evidence
    assert findings[0].setting


@pytest.mark.parametrize(
    "cases",
    [("temperature", "bos"), ("rope", "wild_tokens"), ("shifted", "truncation"), ("sliding_window", "sampling_temperature")],
)
def test_two_causes_at_once_are_both_named(tmp_path: Path, cases: tuple[str, str]) -> None:
    findings, about = found(tmp_path, 4, *cases)
    assert {finding.cause for finding in findings} == set(cases), about


@pytest.mark.parametrize(("engine", "cause"), [("without", "lora"), ("merged", "lora"), ("beside", None)])
def test_an_adapter_on_one_side_only_is_named(tmp_path: Path, engine: str, cause: str | None) -> None:
    """The trainer holds a LoRA adapter beside its weights. That merging rounds them takes some thousand tokens to see."""
    model = made_cases.trainer_model(5)
    model.save_pretrained(tmp_path)
    adapted = made_cases.trainer_model(5)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=4, target_modules=linear), adapted)
    adapted.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    layers = {name: module for name, module in adapted.named_modules() if hasattr(module, "lora_B")}
    with torch.no_grad():
        for layer in layers.values():
            for weight in (layer.lora_A.default.weight, layer.lora_B.default.weight):
                weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    sampler: Any = adapted if engine == "beside" else model
    if engine == "merged":
        for name, layer in layers.items():
            merged = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
            sampler.get_submodule(name).weight.data.copy_(merged)
    rollouts, _ = made_cases.rollouts(sampler, (), 5, sequences=32 if engine == "without" else 90)
    findings = find_causes(adapted, rollouts, expectation(tmp_path, rollouts), bos=made_cases.BOS)
    assert [finding.cause for finding in findings] == ([cause] if cause else []), findings


def test_an_engine_that_contradicts_itself_is_named(tmp_path: Path) -> None:
    model = made_cases.trainer_model(6)
    model.save_pretrained(tmp_path)
    rollouts, _ = made_cases.rollouts(model, (), 6)
    expected = expectation(tmp_path, rollouts)
    with open_stack(f"emulated:{made_cases.ENGINE}", tmp_path) as engine:
        # Decoded without a window of 24 tokens in one case: what a wrong KV cache would do.
        assert not prefill_against_decode(engine, rollouts, expected)
        wrong, _ = made_cases.rollouts(model, ("sliding_window",), 6)
        found = prefill_against_decode(engine, wrong, expected)
    assert [finding.cause for finding in found] == ["prefill_decode"]


def test_noise_alone_is_the_yardstick(tmp_path: Path) -> None:
    """The same difference is a finding where noise is small, and none where it is as large."""
    model = made_cases.trainer_model(7)
    model.save_pretrained(tmp_path)
    rollouts, _ = made_cases.rollouts(model, ("weights",), 7)
    quiet = expectation(tmp_path, rollouts)
    stack = HFStack(tmp_path)
    d = np.concatenate(stack.score(rollouts)) - np.concatenate([r.logprobs for r in rollouts if r.logprobs])
    lengths = tuple(len(r.completion_ids) for r in rollouts)
    rng = np.random.default_rng(0)
    loud = noise_only(*(Replicates(d * rng.choice([-1, 1], size=(3, len(d))), lengths) for _ in range(2)))
    assert [finding.cause for finding in find_causes(model, rollouts, quiet)] == ["weights"]
    assert not [finding for finding in find_causes(model, rollouts, loud) if finding.cause == "weights"]
