"""Each cause that is not rounding is named on made data, on top of real rounding drift, and clean data gives none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

import made_cases
from tripoint.drift.dither import Dithering, Replicates, read_weights, seeds
from tripoint.drift.expectation import NoiseOnly, noise_only
from tripoint.drift.findings import Finding, find_causes, prefill_against_decode
from tripoint.drift.systematic import aligned
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
