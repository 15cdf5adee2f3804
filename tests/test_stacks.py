"""Every stack gives the logprobs of the model it holds: sampled, scored, with new weights, and not once it broke."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny import VOCABULARY, tiny
from tripoint.errors import MeasurementError, UsageError
from tripoint.stacks import EngineOptions, Rollout, Stack, end_tokens, open_stack, parse_stack
from tripoint.stacks import vllm as vllm_stack
from tripoint.stacks.hf import HFStack, _draw
from tripoint.stacks.vllm import VllmStack

END = (1, 40, 41)


def save_tiny(directory: Path, **settings: Any) -> Path:
    """A checkpoint whose own generation settings must never be used."""
    model = tiny(max_position_embeddings=128, eos_token_id=list(END), tie_word_embeddings=True, **settings)
    model.save_pretrained(directory)
    greedy = {"do_sample": True, "top_k": 1, "temperature": 0.01, "repetition_penalty": 5.0, "eos_token_id": 3}
    (directory / "generation_config.json").write_text(json.dumps(greedy))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other_weights(model: Path) -> dict[str, Tensor]:
    """Weights of the same shapes that are not BF16 numbers."""
    generator = torch.Generator().manual_seed(9)
    return {name: w.float() + 0.1 * torch.randn(w.shape, generator=generator) for name, w in weights_of(model).items()}


def weights_of(model: Path) -> dict[str, Tensor]:
    return load_file(model / "model.safetensors")


def prompts(count: int = 12, lengths: tuple[int, ...] = (2, 5, 9, 9, 14)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 40, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)]


def rollouts(count: int = 12) -> list[Rollout]:
    """To be scored: prompts and completions of many lengths, some of which add up to the same."""
    generator = torch.Generator().manual_seed(4)
    return [
        Rollout(tuple(prompt), tuple(torch.randint(3, VOCABULARY, (1 + i % 7,), generator=generator).tolist()))
        for i, prompt in enumerate(prompts(count))
    ]


@torch.no_grad()
def reference(model: torch.nn.Module, rollout: Rollout, context: Any = torch.no_grad) -> list[float]:
    """Logprobs by the plainest means: one sequence, all logits, a softmax of everything."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with context():
        logits = model(input_ids=ids).logits
    logprobs = logits[0].float().log_softmax(-1)
    start = len(rollout.prompt_ids)
    return [logprobs[start + i - 1, token].item() for i, token in enumerate(rollout.completion_ids)]


def gaps(left: list[list[float]], right: list[Any]) -> Tensor:
    return torch.tensor([a - b for one, two in zip(left, right, strict=True) for a, b in zip(one, two, strict=True)])


# --- names


@pytest.mark.parametrize(
    "name", ["hf", "hf:compile", "hf:autocast", "vllm", "vllm:eager", "emulated:R3 S3 N3 carry=layer", "rollouts:a/b.jsonl"]
)
def test_names_round_trip(name: str) -> None:
    assert str(parse_stack(name)) == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vlm", "did you mean `vllm`"),
        ("hf:compiled", "did you mean `hf:compile`"),
        ("rollout:x", "did you mean `rollouts`"),
        ("nonsense", "There are hf, hf:compile, hf:autocast, vllm, vllm:eager, "),
        ("emulated", "needs a schedule"),
        ("rollouts:", "needs a file"),
    ],
)
def test_unknown_names(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_stack(name)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recording_runs_no_model(model: Path) -> None:
    with pytest.raises(UsageError, match="runs no model"):
        open_stack("rollouts:run.jsonl", model)


def test_end_tokens_of_config_and_tokenizer(model: Path, tmp_path: Path) -> None:
    assert end_tokens(model) == END
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_tokens(tmp_path) == (7,)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "<end>"}, {"id": 8, "content": "<pad>"}]}')
    assert end_tokens(tmp_path) == (7, 9)
    (tmp_path / "config.json").write_text("{}")
    assert end_tokens(tmp_path) == (9,)


# --- transformers


@pytest.fixture(scope="module", params=["hf", "hf:autocast"])
def hf(request: pytest.FixtureRequest, model: Path) -> Stack:
    return open_stack(request.param, model, device="cpu")


def test_hf_scores_are_those_of_one_sequence_at_a_time(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    stack = open_stack("hf", model, device="cpu")
    assert stack.score(rollouts()) == [reference(loaded, rollout) for rollout in rollouts()]


def test_autocast_scores_are_those_of_fp32_parameters_under_autocast(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stack = open_stack("hf:autocast", model, device="cpu")
    assert {parameter.dtype for parameter in stack.model.parameters()} == {torch.float32}
    expected = [reference(loaded, r, lambda: torch.autocast("cpu", torch.bfloat16)) for r in rollouts()]
    assert stack.score(rollouts()) == expected
    assert expected != open_stack("hf", model, device="cpu").score(rollouts())


def test_scores_do_not_depend_on_what_else_is_scored(hf: Stack) -> None:
    together = hf.score(rollouts())
    assert together == [hf.score([rollout])[0] for rollout in rollouts()]
    assert hf.score(rollouts()[::-1]) == together[::-1]


def test_many_rows_are_scored_in_parts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = open_stack("hf", model, device="cpu")
    expected = stack.score(rollouts())
    monkeypatch.setattr("tripoint.stacks.hf.SOFTMAX_ROWS", 3)
    monkeypatch.setattr("tripoint.stacks.hf.BATCH_TOKENS", 20)
    assert stack.score(rollouts()) == expected


def test_compile_is_compiled_and_scores_alike(model: Path) -> None:
    torch._dynamo.reset()
    stack, eager = open_stack("hf:compile", model, device="cpu"), open_stack("hf", model, device="cpu")
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    sampled = stack.sample(prompts(2, (5,)), max_tokens=8, seed=0, temperature=0)
    assert graphs["unique_graphs"] == 3  # prefill, and decoding from the cache as prefill and as decoding left it
    scores = stack.score(sampled)
    assert gaps(scores, [r.logprobs for r in sampled]).abs().max() < 0.1
    assert 0 < gaps(scores, eager.score(sampled)).abs().max() < 0.3  # other rounding points, the same model
    stack.score([Rollout((5,) * 7, (6,) * 3)] * 2)
    before = graphs["unique_graphs"]
    stack.score([Rollout((5,) * 30, (6,) * 9)] * 3)
    assert graphs["unique_graphs"] == before


def test_compile_never_falls_back_to_eager(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    stack = HFStack(model, mode="compile", device="cpu")
    monkeypatch.setattr("tripoint.stacks.hf.RECOMPILE_LIMIT", 1)
    stack.score([Rollout((5,), (6,))])
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        stack.score([Rollout((5,), (6,))] * 2)


def test_sampled_logprobs_are_those_of_the_tokens(model: Path) -> None:
    """In FP32, where decoding and scoring agree closely: every position, mask and cached key is right."""
    stack = HFStack(model, device="cpu")
    stack.model.float()
    sampled = stack.sample(prompts(), max_tokens=9, seed=5)
    assert [list(r.prompt_ids) for r in sampled] == prompts()
    assert gaps(stack.score(sampled), [r.logprobs for r in sampled]).abs().max() < 1e-4
    assert [r.completion_ids for r in sampled] == [
        stack.sample([prompt], max_tokens=9, seed=5 + i)[0].completion_ids for i, prompt in enumerate(prompts())
    ]


def test_sliding_windows_survive_unequal_prompts(tmp_path: Path) -> None:
    tiny("mistral", sliding_window=6, max_position_embeddings=128).save_pretrained(tmp_path)
    stack = HFStack(tmp_path, device="cpu")
    stack.model.float()
    sampled = stack.sample(prompts(), max_tokens=9, seed=5)
    assert gaps(stack.score(sampled), [r.logprobs for r in sampled]).abs().max() < 1e-4


def test_draw_inverts_the_distribution() -> None:
    probabilities = torch.tensor([0.25, 0.0, 0.5, 0.25])
    uniform = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999], dtype=torch.float64)
    logits = probabilities.log().expand(6, 4)
    assert _draw(logits, 1.0, uniform).tolist() == [0, 0, 2, 2, 3, 3]
    assert _draw(logits, 0.0, uniform).tolist() == [2] * 6
    # At temperature 1/2 the odds are squared: 1/6, 0, 2/3, 1/6.
    assert _draw(logits, 0.5, torch.tensor([0.16, 0.17, 0.83, 0.84, 0.5, 0.5], dtype=torch.float64)).tolist() == [
        0,
        2,
        2,
        3,
        2,
        2,
    ]


def test_a_damaged_tokenizer_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    for config, tokenizer in (("{}", "version https://git-lfs"), ("[]", "{}"), ("{}", "{}")):
        (tmp_path / "tokenizer_config.json").write_text(config)
        (tmp_path / "tokenizer.json").write_text(tokenizer)
        with pytest.raises(UsageError, match=r"tokenizer\.json or tokenizer_config\.json is damaged"):
            end_tokens(tmp_path)


def test_unknown_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model", "vocab_size": 5}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match="transformers cannot load the checkpoint") as caught:
        open_stack("hf", tmp_path)
    assert "\n" not in str(caught.value)


def test_emulated_is_hf_under_another_schedule(model: Path) -> None:
    hf = open_stack("hf", model, device="cpu").score(rollouts())
    same, other = open_stack("emulated:R1 S1 N1", model, device="cpu"), open_stack("emulated:R3 S3 N3", model, device="cpu")
    assert same.score(rollouts()) == hf
    assert 0 < gaps(other.score(rollouts()), hf).abs().max() < 0.1
    assert other.conditions()["schedule"] == "R3 S3 N3"
    sampled = other.sample(prompts(), max_tokens=9, seed=5)
    assert gaps(other.score(sampled), [r.logprobs for r in sampled]).abs().max() < 0.1


# --- vLLM


OPTIONS = EngineOptions(max_model_len=64, max_num_seqs=8)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmStack]:
    with open_stack("vllm:eager", model, options=OPTIONS) as stack:
        assert isinstance(stack, VllmStack)
        yield stack


@pytest.mark.vllm
def test_vllm_scores_like_the_trainer(model: Path, engine: VllmStack) -> None:
    scores = engine.score(rollouts())
    assert [len(s) for s in scores] == [len(r.completion_ids) for r in rollouts()]
    assert 0 < gaps(scores, open_stack("hf", model, device="cpu").score(rollouts())).abs().max() < 0.3


@pytest.mark.vllm
def test_vllm_refuses_sequences_that_do_not_fit(engine: VllmStack) -> None:
    full = Rollout((5,), (6,) * 63)
    assert len(engine.score([full])[0]) == 63
    assert len(engine.sample([[5]], max_tokens=63, seed=0, temperature=0)[0].completion_ids) <= 63
    with pytest.raises(UsageError, match="65 tokens does not fit"):
        engine.score([Rollout((5,), (6,) * 64)])
    with pytest.raises(UsageError, match="65 tokens does not fit"):
        engine.sample([[5]], max_tokens=64, seed=0)


@pytest.mark.vllm
def test_vllm_not_installed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    with pytest.raises(UsageError, match="not installed") as caught:
        open_stack("vllm", model)
    assert "tripoint[vllm]" in str(caught.value)


@pytest.mark.vllm
def test_vllm_that_cannot_load_shows_its_log(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    save_file(weights_of(model), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "no_such_act"}))
    with pytest.raises(MeasurementError, match="failed during `start`") as caught:
        open_stack("vllm:eager", tmp_path, options=OPTIONS)
    assert "vllm-eager" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1 + vllm_stack.LOG_TAIL


@pytest.mark.vllm
def test_only_the_newest_logs_are_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for age in range(25):
        (logs / f"vllm-{age}.log").touch()
        os.utime(logs / f"vllm-{age}.log", (1e9 - age, 1e9 - age))

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("TRIPOINT_CACHE", str(tmp_path))
    monkeypatch.setattr(vllm_stack.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_stack("vllm", model)
    kept = {file.name for file in logs.iterdir()}
    assert len(kept) == vllm_stack.KEPT_LOGS == 20
    assert {f"vllm-{age}.log" for age in range(19)} < kept


@pytest.mark.vllm
def test_a_log_that_cannot_be_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIPOINT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=f"`{tmp_path}/file/logs` cannot be written"):
        open_stack("vllm", model)


@pytest.mark.vllm
def test_a_load_that_breaks_halfway_is_not_used(
    engine: VllmStack, other_weights: dict[str, Tensor], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.score(rollouts())

    def cut(tensors: dict[str, Tensor], path: Path) -> None:
        """Half of the file in the half that is read last."""
        save_file(tensors, path)
        os.truncate(path, path.stat().st_size // 2)

    monkeypatch.setattr(vllm_stack, "save_file", cut)
    with pytest.raises(MeasurementError, match="failed during `load_weights`"):
        engine.load_weights(other_weights.items())
    with pytest.raises(MeasurementError, match="load again"):
        engine.score(rollouts())
    with pytest.raises(MeasurementError, match="load again"):
        engine.sample(prompts(), max_tokens=2, seed=0)
    monkeypatch.undo()
    engine.load_weights(weights_of(model).items())
    assert engine.score(rollouts()) == before


def group_is_gone(leader: int, seconds: float = 10.0) -> bool:
    """No process of the group is left (zombies of dead parents are reaped by init)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.vllm
def test_vllm_killed_halfway(model: Path) -> None:
    stack = open_stack("vllm:eager", model, options=OPTIONS)
    assert isinstance(stack, VllmStack)
    assert stack._process is not None
    worker = stack._process.pid
    finished = []

    def kill(done: int) -> None:
        finished.append(done)
        os.kill(worker, signal.SIGKILL)

    with pytest.raises(MeasurementError, match="died during `sample`") as caught:
        stack.sample(prompts(200), max_tokens=50, seed=0, progress=kill)
    assert 0 < sum(finished) < 200
    assert stack.log.read_text().splitlines()[-1] in str(caught.value)
    assert group_is_gone(worker)
    assert stack.closed
    with pytest.raises(MeasurementError, match="has ended"):
        stack.score(rollouts())


PARENT = """
import os, sys, time
from pathlib import Path
from tripoint.stacks import EngineOptions, open_stack
if sys.argv[2] == "running":
    stack = open_stack("vllm:eager", Path(sys.argv[1]), options=EngineOptions(max_model_len=64))
    print(stack._process.pid, flush=True)
    stack.sample([[5]] * 100000, max_tokens=50, seed=0)
else:
    from tripoint.stacks import vllm
    popen = vllm.subprocess.Popen
    def report(*args, **kwargs):
        process = popen(*args, **kwargs)
        print(process.pid, flush=True)
        return process
    vllm.subprocess.Popen = report
    open_stack("vllm:eager", Path(sys.argv[1]))
"""


@pytest.mark.vllm
@pytest.mark.parametrize(("state", "ended_by"), [("starting", signal.SIGINT), ("running", signal.SIGKILL)])
def test_the_engine_does_not_outlive_us(model: Path, state: str, ended_by: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model), state], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(3)
        os.killpg(worker, 0)
        parent.send_signal(ended_by)
        parent.wait(20)
    assert group_is_gone(worker)


# --- what every stack promises


@pytest.fixture(params=["hf", "hf:autocast", "emulated:R3 S3 N3", pytest.param("vllm:eager", marks=pytest.mark.vllm)])
def stack(request: pytest.FixtureRequest, model: Path) -> Stack:
    if request.param == "vllm:eager":
        running: Stack = request.getfixturevalue("engine")
        return running
    return open_stack(request.param, model, device="cpu")


def test_logprobs_are_raw_whatever_the_temperature(stack: Stack) -> None:
    for temperature in (1.0, 0.5, 2.0):
        sampled = stack.sample(prompts(), max_tokens=6, seed=1, temperature=temperature)
        assert gaps(stack.score(sampled), [r.logprobs for r in sampled]).abs().max() < 0.1


def test_temperature_shapes_what_is_sampled(stack: Stack) -> None:
    def mean_logprob(temperature: float) -> float:
        sampled = stack.sample(prompts(30), max_tokens=6, seed=1, temperature=temperature)
        values = [logprob for r in sampled for logprob in r.logprobs or ()]
        return math.fsum(values) / len(values)

    assert mean_logprob(0.0) > mean_logprob(0.5) + 0.1 > mean_logprob(1.0) + 0.2 > mean_logprob(2.0) + 0.3


def test_a_seed_decides_and_belongs_to_the_sequence(stack: Stack) -> None:
    first = stack.sample(prompts(), max_tokens=6, seed=1)
    assert stack.sample(prompts(), max_tokens=6, seed=1) == first
    assert [r.completion_ids for r in stack.sample(prompts(), max_tokens=6, seed=100)] != [r.completion_ids for r in first]
    same_prompt = stack.sample([prompts()[0]] * 8, max_tokens=6, seed=1)
    assert len({r.completion_ids for r in same_prompt}) > 4
    assert stack.sample([prompts()[0]] * 4, max_tokens=6, seed=5) == same_prompt[4:] or stack.name != "vllm:eager"


def test_a_completion_ends_with_its_end_token(stack: Stack) -> None:
    sampled = stack.sample(prompts(60), max_tokens=12, seed=2, temperature=2.0)
    ended = [r for r in sampled if r.completion_ids[-1] in END]
    assert {r.completion_ids[-1] for r in ended} == set(END)
    assert not any(token in END for r in sampled for token in r.completion_ids[:-1])
    assert all(len(r.completion_ids) == 12 for r in sampled if r not in ended)
    assert any(3 in r.completion_ids[:-1] for r in sampled)  # generation_config's, not ours


def test_progress_counts_every_sequence(stack: Stack) -> None:
    done: list[int] = []
    sampled = stack.sample(prompts(), max_tokens=3, seed=0, progress=done.append)
    assert sum(done) == len(sampled)
    done.clear()
    stack.score(sampled, progress=done.append)
    assert sum(done) == len(sampled)


def test_nothing_to_do(stack: Stack) -> None:
    assert stack.sample([], max_tokens=3, seed=0) == []
    assert stack.score([]) == []


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_token_ids_outside_the_vocabulary(stack: Stack, token: int) -> None:
    with pytest.raises(UsageError, match=f"sequence 1 holds token id {token}, .* vocabulary of {VOCABULARY}"):
        stack.sample([[5], [5, token]], max_tokens=1, seed=0)
    with pytest.raises(UsageError, match=f"sequence 0 holds token id {token}"):
        stack.score([Rollout((5,), (token,))])


def test_replaced_weights_are_used_and_can_be_put_back(
    stack: Stack, model: Path, other_weights: dict[str, Tensor], tmp_path: Path
) -> None:
    before = stack.score(rollouts())
    stack.load_weights(other_weights.items())
    changed = stack.score(rollouts())
    assert gaps(changed, before).abs().max() > 0.5
    save_tiny(tmp_path)
    save_file(other_weights, tmp_path / "model.safetensors", {"format": "pt"})
    with open_stack(stack.name, tmp_path, options=OPTIONS, device="cpu") as fresh:
        assert changed == fresh.score(rollouts())
    stack.load_weights(weights_of(model).items())
    assert stack.score(rollouts()) == before


def without_last(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(list(weights.items())[:-1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_last, "1 weights were not given, such as `model.norm.weight`"),
        (lambda weights: weights | {"model.layers.9.mlp.up_proj.weight": torch.ones(2)}, "has no weight `model.layers.9"),
        (lambda weights: weights | {"model.norm.weight": torch.ones(3)}, r"`model.norm.weight` is \(3,\), the model's \(64,\)"),
    ],
)
def test_incomplete_weights_are_refused_until_complete(
    stack: Stack, model: Path, spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    before = stack.score(rollouts())
    with pytest.raises(MeasurementError, match=message):
        stack.load_weights(spoil(weights_of(model)).items())
    with pytest.raises(MeasurementError, match="load again"):
        stack.score(rollouts())
    with pytest.raises(MeasurementError, match="load again"):
        stack.sample(prompts(), max_tokens=1, seed=0)
    stack.load_weights({**weights_of(model), "lm_head.weight": weights_of(model)["model.embed_tokens.weight"]}.items())
    assert stack.score(rollouts()) == before


def test_conditions_and_versions_are_json(stack: Stack) -> None:
    conditions = json.loads(json.dumps(stack.conditions()))
    assert conditions["layers"] == 3
    assert conditions["tp"] == 1
    assert conditions["compile"] is False
    assert {"batch", "device", "dtype"} <= conditions.keys()
    assert "torch" in json.loads(json.dumps(stack.versions()))


def test_weights_of_the_trainer_are_the_checkpoint(model: Path) -> None:
    held = dict(HFStack(model, device="cpu").weights())
    assert held.keys() == weights_of(model).keys()
    assert all(torch.equal(held[name], w) for name, w in weights_of(model).items())
