"""vLLM and MLX say where they round, and a trainer aligned to what they said gives the same answers, word by word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tripoint.align import align
from tripoint.canary import Canary, CanaryShape, asking, build, fingerprint_in_place
from tripoint.stacks import EngineOptions, Stack, open_stack
from tripoint.stacks.hf import HFStack

OPTIONS = EngineOptions(max_model_len=512, max_num_seqs=256)


@pytest.fixture(scope="module", params=[("vllm:eager", "llama"), ("vllm:eager", "qwen3"), ("mlx", "llama")], ids="-".join)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Canary, Path, Stack]]:
    stack, architecture = request.param
    canary = build(CanaryShape(architecture=architecture))
    directory = tmp_path_factory.mktemp(architecture)
    canary.save(directory)
    with open_stack(stack, directory, options=OPTIONS) as engine:
        yield canary, directory, engine


def test_a_trainer_aligned_to_the_engine_answers_as_it_does(asked: tuple[Canary, Path, Stack], tmp_path: Path) -> None:
    canary, directory, engine = asked
    of_engine = asking.ask(engine, canary)
    assert (of_engine.undetermined, of_engine.findings) == ((), ())
    file = tmp_path / "engine.toml"
    file.write_text(of_engine.to_toml())

    trainer = HFStack(directory, device="cpu")
    before = asking.ask(trainer, canary)
    align(trainer.model, to=file)
    after = asking.ask(trainer, canary)
    assert before.code != of_engine.code
    # Without findings, decode steps and batches of one answer as the batch does.
    assert (after.code, after.findings) == (of_engine.code, ())
    assert after.evidence == of_engine.evidence


def test_a_running_engine_is_asked_in_place(asked: tuple[Canary, Path, Stack], tmp_path: Path) -> None:
    """In the place of random weights of the same shape, which are back afterwards."""
    canary, _, engine = asked
    config = AutoConfig.for_model(**replace(canary.shape, full=True).config)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    engine.load_weights(asking.checkpoint_weights(tmp_path))
    found = fingerprint_in_place(engine, tmp_path)
    assert (found.undetermined, found.findings) == ((), ())
    assert found.conditions["in place"]
