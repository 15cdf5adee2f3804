"""GRPO runs on a tiny model with an emulated engine: what the arms do, what is recorded, noticed, and survives a kill."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tomli_w
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig

from tripoint.cli import main
from tripoint.drift.dither import read_weights
from tripoint.errors import MeasurementError
from tripoint.rl import families
from tripoint.rl.config import DECIDED, TrainConfig
from tripoint.rl.policy import build_policy, fsdp2_policy
from tripoint.rl.records import WATCHED, RunDirectory
from tripoint.rl.runs import prepare_for_trl, train_one
from tripoint.rl.summary import summarise, summary_table
from tripoint.rl.sync import WeightSync
from tripoint.rl.watch import systematic
from tripoint.schedule import RoundingSchedule
from tripoint.stacks.emulated import EmulatedStack
from tripoint.stacks.rollouts import read_rollouts
from tripoint.stacks.vllm import VllmStack

prepare_for_trl()
import trl  # noqa: E402

from tripoint.rl.grpo import TwoStackTrainer, grpo_config  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

ENGINE = "R3 S3 N3"


def settings(out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny:qwen2",
        "task": "sort",
        "engine": f"emulated:{ENGINE}",
        "out": str(out),
        "steps": 2,
        "prompts": 4,
        "generations": 4,
        "max_completion": 8,
        "lr": 1e-4,
        "checkpoint_every": 2,
    } | changes


def run(out: Path, **changes: Any) -> list[dict[str, Any]]:
    """The records of a run made in this process."""
    config = TrainConfig(**settings(out, **changes))
    train_one(config)
    return RunDirectory(config.directory, config).steps()


@pytest.fixture(scope="module")
def model() -> Path:
    return families.tiny_model("qwen2", "sort")


# -- arms -------------------------------------------------------------------------------------------------------------


STOCK: dict[str, Any] = {"arm": "none", "watch_every": 2}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of the stock trainer was made."""
    out = tmp_path_factory.mktemp("stock")
    train_one(TrainConfig(**settings(out, **STOCK)))
    return out


def test_a_run_records_every_step_whole(stock: Path) -> None:
    records = RunDirectory(stock / "none-seed0", TrainConfig(**settings(stock, **STOCK)))
    steps = records.steps()
    assert [step["step"] for step in steps] == [1, 2]
    measured = {name for name, value in steps[0].items() if value is not None}
    assert {"reward", "entropy", "grad_norm", "length", "k1", "k3", "ess", "max_ratio", "weights", "seconds"} <= measured
    assert steps[0]["weights"] != steps[1]["weights"]

    about = records.about
    assert about["fingerprints"]["engine"]["code"] == ENGINE
    assert about["fingerprints"]["trainer"]["code"] == "R1 S1 N1"
    assert about["fingerprints"]["trainer"]["conditions"]["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert about["target"] == ENGINE
    assert set(about["sessions"][0]["versions"]) >= {"torch", "transformers", "trl"}

    # The engine's own samples, as `tripoint drift --engine rollouts:FILE` reads them.
    rollouts = list(read_rollouts(stock / "none-seed0" / "rollouts" / "000001.parquet", vocab_size=33))
    assert len(rollouts) == 16
    assert sum(len(rollout.completion_ids) for rollout in rollouts) == steps[0]["tokens"]
    # The stock trainer differs from the engine, and at the second step it was measured how.
    assert steps[0]["k3"] > 1e-7
    assert steps[0]["systematic_rms"] is None
    assert {name for name in WATCHED if name not in ("overflows", "loss_scale") and steps[1][name] is None} == set()
    assert steps[1]["systematic_stderr"] > 0
    assert steps[1]["gradient_bias"] > 0


def test_without_a_gradient_there_is_no_bias_to_measure(model: Path) -> None:
    schedule = RoundingSchedule.parse("R1 S1 N1")
    with EmulatedStack(model, target=ENGINE) as engine:
        prompts = [[17, 18, 16], [19, 17, 16]] * 4
        rollouts = engine.sample(prompts, max_tokens=8, seed=0)
        measured = systematic(engine, model, read_weights(model), schedule, rollouts, [0.0] * 8, seed=0)
    assert set(measured) == {"systematic_rms", "systematic_variance", "systematic_stderr"}


@pytest.mark.parametrize("weights", ["fp32-masters", "bf16"])
def test_an_aligned_trainer_rounds_like_the_engine(tmp_path: Path, weights: str) -> None:
    """TRL's head and FP32 masters included: what is left is the last bits of FP32 log-softmaxes."""
    steps = run(tmp_path, arm="all", weights=weights, lr=1e-3)
    assert all(step["k3"] < 1e-10 for step in steps)
    assert steps[0]["weights"] != steps[1]["weights"]


def test_a_step_whose_completions_are_all_masked_has_no_mismatch(tmp_path: Path) -> None:
    config = TrainConfig(**settings(tmp_path, steps=1, max_completion=1, grpo={"mask_truncated_completions": True}))
    train_one(config)
    [step] = RunDirectory(config.directory, config).steps()
    assert (step["tokens"], step["k3"], step["max_abs"], step["truncated"]) == (0, None, None, 1.0)
    summary = summarise(config, [step])
    assert summary["k3"] is None
    assert summary_table([summary]).splitlines()[1].split() == ["none-seed0", "1", "0.000", "0.000", "no"]


def test_padding_neither_moves_positions_nor_changes_bits(tmp_path: Path) -> None:
    """Prompts of different lengths, which TRL pads on the left."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{"abcdef"[:n]}>", "answer": "{"abcdef"[:n]}"}}\n' for n in (2, 6, 3, 5, 4)))
    config = TrainConfig(
        **settings(tmp_path, arm="all", task=f"file:{problems}", model=str(families.tiny_model("qwen2", "sort")))
    )
    train_one(config)
    for step in RunDirectory(config.directory, config).steps():
        assert step["k3"] < 1e-6


def test_the_full_stack_arm_matches_bit_for_bit(tmp_path: Path) -> None:
    for step in run(tmp_path, arm="bitwise"):
        assert step["max_abs"] == 0.0


def test_a_full_stack_arm_that_does_not_match_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripoint.rl.grpo.make_exact", lambda model: None)  # the engine keeps its own kernels
    with pytest.raises(MeasurementError, match="step 1: arm='bitwise' must match the engine bit for bit"):
        run(tmp_path, arm="bitwise")


def test_fp16_scales_the_loss_and_counts_overflows(tmp_path: Path) -> None:
    steps = run(tmp_path, arm="fp16", steps=4)
    # GradScaler begins at 2^16, which is too much for the first gradients of some models, and halves it when it was.
    assert steps[-1]["loss_scale"] == 2.0 ** (16 - steps[-1]["overflows"])
    assert [step["overflows"] for step in steps] == sorted(step["overflows"] for step in steps)
    assert steps[-1]["overflows"] < 4
    assert len({step["weights"] for step in steps}) == 1 + sum(
        after["overflows"] == before["overflows"] for before, after in zip([{"overflows": 0}, *steps], steps[:-1], strict=False)
    )


def test_an_fp32_trainer_differs_from_the_engine_by_the_engines_roundings(tmp_path: Path) -> None:
    assert all(step["k3"] > 1e-7 for step in run(tmp_path, arm="fp32-trainer"))


def test_corrections_are_trls(stock: Path, tmp_path: Path) -> None:
    """Ratios near 1, truncated at 0.5, halve every token's gradient."""
    plain = RunDirectory(stock / "none-seed0", TrainConfig(**settings(stock, **STOCK))).steps()
    halved = run(tmp_path / "halved", steps=1, arm="tis", grpo={"vllm_importance_sampling_clip_max": 0.5})
    masked = run(tmp_path / "masked", steps=1, arm="mis", grpo={"vllm_importance_sampling_clip_max": 0.5})
    assert halved[0]["reward"] == plain[0]["reward"]
    assert halved[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"] / 2, rel=1e-2)
    assert masked[0]["grad_norm"] == 0.0


def test_a_fixed_baseline_replaces_the_groups(tmp_path: Path) -> None:
    """With baseline 1 and the mean over all tokens as loss, only failures count, each token the same."""
    [step] = run(tmp_path, steps=1, baseline=1.0)
    rollouts = pq.read_table(tmp_path / "none-seed0" / "rollouts" / "000001.parquet").to_pydict()
    lengths = [len(ids) for ids in rollouts["completion_ids"]]
    weighted = sum(length * (1 - reward) for length, reward in zip(lengths, rollouts["reward"], strict=True))
    assert step["loss"] == pytest.approx(weighted / sum(lengths), rel=1e-3)


@pytest.mark.parametrize("arm", ["none", "all", "bitwise"])
def test_the_reference_of_the_kl_term_rounds_like_the_policy(tmp_path: Path, arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first step they have the same weights, and so no KL divergence at all."""
    logged: list[dict[str, float]] = []

    def log(self: TwoStackTrainer, logs: dict[str, float], *args: Any) -> None:
        real(self, logs, *args)
        logged.append(logs)

    real = TwoStackTrainer.log
    monkeypatch.setattr(TwoStackTrainer, "log", log)
    run(tmp_path, arm=arm, lr=1e-3, grpo={"beta": 0.1})
    assert logged[0]["kl"] == 0.0
    assert logged[1]["kl"] > 0.0


# -- settings ---------------------------------------------------------------------------------------------------------


def test_what_a_run_relies_on_is_a_setting_of_trls_that_the_file_must_leave_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DECIDED.keys() <= {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    given: dict[str, Any] = {}
    monkeypatch.setattr(trl, "GRPOConfig", dataclasses.make_dataclass("Given", []))
    monkeypatch.setattr(trl.GRPOConfig, "__init__", lambda self, **settings: given.update(settings))
    grpo_config(TrainConfig(**settings(tmp_path, arm="tis")), tmp_path)
    assert given.keys() - DECIDED.keys() == {"lr_scheduler_type", "gradient_checkpointing", "report_to"}


# -- weight sync ------------------------------------------------------------------------------------------------------


def test_the_run_notices_a_single_skipped_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_weights(self: EmulatedStack, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        calls.append(None)
        if len(calls) != 3:
            real(self, weights)

    real = EmulatedStack.load_weights
    monkeypatch.setattr(EmulatedStack, "load_weights", load_weights)
    with pytest.raises(MeasurementError, match="step 3: the weights did not reach engine"):
        run(tmp_path, steps=4, arm="all")
    config = TrainConfig(**settings(tmp_path, steps=4, arm="all"))
    assert [step["step"] for step in RunDirectory(config.directory, config).steps()] == [1, 2]


@pytest.mark.vllm
def test_with_vllm_weights_arrive_and_a_skipped_sync_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_weights(self: VllmStack, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        calls.append(None)
        if len(calls) != 3:
            real(self, weights)

    real = VllmStack.load_weights
    monkeypatch.setattr(VllmStack, "load_weights", load_weights)
    with pytest.raises(MeasurementError, match="step 3: the weights did not reach engine `vllm:eager`"):
        run(tmp_path, steps=4, arm="all", engine="vllm:eager")
    config = TrainConfig(**settings(tmp_path, steps=4, arm="all", engine="vllm:eager"))
    records = RunDirectory(config.directory, config)
    assert [step["step"] for step in records.steps()] == [1, 2]
    assert records.about["fingerprints"]["trainer"]["code"] == records.about["fingerprints"]["engine"]["code"] == "R3 S1 N4"


class Sync:
    """A WeightSync of an emulated engine, with weights to push and a way to lose or spoil them."""

    def __init__(self, model: Path) -> None:
        self.engine = EmulatedStack(model, target=ENGINE)
        self.weights = {name: weight.clone() for name, weight in self.engine.weights()}
        self.sync = WeightSync(self.engine, self.weights.items(), [[17, 18, 16], [19, 17, 16]], 6, torch.bfloat16)

    def push(self) -> None:
        self.sync.push(self.weights.items())


@pytest.fixture
def sync(model: Path) -> Sync:
    return Sync(model)


def test_an_engine_that_never_takes_weights_is_noticed(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync.engine, "load_weights", lambda weights: None)
    sync.push()  # the weights it holds: nothing to be noticed
    sync.weights["model.layers.0.mlp.up_proj.weight"] *= 1.01
    with pytest.raises(MeasurementError, match="did not reach engine"):
        sync.push()


def test_an_engine_that_is_one_sync_late_is_noticed(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    late = [{name: weight.clone() for name, weight in sync.weights.items()}]
    real = sync.engine.load_weights

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        late.append({name: weight.clone() for name, weight in weights})
        real(late[-2].items())

    monkeypatch.setattr(sync.engine, "load_weights", load_weights)
    sync.weights["model.layers.0.mlp.up_proj.weight"] *= 1.01
    with pytest.raises(MeasurementError, match="did not reach engine"):
        sync.push()


def test_a_sync_that_spoils_weights_is_noticed(sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sync.engine.load_weights
    monkeypatch.setattr(
        sync.engine, "load_weights", lambda weights: real((n, w * (0.5 if n == "lm_head.weight" else 1)) for n, w in weights)
    )
    with pytest.raises(MeasurementError, match="answers otherwise after it was given the very weights it held"):
        sync.push()


def test_an_update_that_no_answer_depends_on_is_no_skipped_sync(sync: Sync) -> None:
    used = {token for rollout in sync.sync._probe for token in (*rollout.prompt_ids, *rollout.completion_ids)}
    unused = next(token for token in range(sync.engine.vocab_size) if token not in used)
    before = sync.sync.digest
    sync.weights["model.embed_tokens.weight"][unused] += 1
    sync.push()
    assert sync.sync.digest != before


def test_weights_that_round_to_the_same_need_no_change(sync: Sync) -> None:
    before = sync.sync.digest
    sync.weights = {name: weight.float() * (1 + 2.0**-12) for name, weight in sync.weights.items()}
    sync.push()
    assert sync.sync.digest == before


# -- a killed run -----------------------------------------------------------------------------------------------------


def command(config: Path) -> list[str]:
    return [sys.executable, "-c", "from tripoint.cli import main; main()", "train", str(config)]


def write(directory: Path, **changes: Any) -> Path:
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(settings(directory / "out", **changes)))
    return path


WITHOUT_CLOCK = ("seconds", "rollout_seconds")


def what_happened(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in step.items() if name not in WITHOUT_CLOCK} for step in steps]


def test_a_killed_run_resumes_and_records_every_step_once_as_if_nothing_had_happened(tmp_path: Path) -> None:
    changes = {"steps": 7, "checkpoint_every": 2, "arm": "all"}
    path = write(tmp_path, **changes)
    directory = tmp_path / "out" / "all-seed0"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(path), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (directory / "steps" / "000005.parquet").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()

    train_one(TrainConfig(**settings(tmp_path / "out", **changes)))
    config = TrainConfig(**settings(tmp_path / "out", **changes))
    records = RunDirectory(directory, config)
    assert records.about["sessions"][1]["resumed_from"] in ("checkpoint-4", "checkpoint-6")
    assert [step["step"] for step in records.steps()] == list(range(1, 8))
    uninterrupted = run(tmp_path / "other", **changes)
    assert what_happened(records.steps()) == what_happened(uninterrupted)


def test_a_complete_run_is_not_made_again(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tripoint.rl.grpo.open_stack", None)
    assert len(run(stock, **STOCK)) == 2


# -- several runs -----------------------------------------------------------------------------------------------------


def test_a_failed_run_does_not_lose_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, arm=["none", "rope"], steps=1)
    (tmp_path / "out" / "none-seed0").mkdir(parents=True)
    (tmp_path / "out" / "none-seed0" / "thesis.tex").touch()  # which makes a run refuse to begin
    with pytest.raises(SystemExit) as end:
        main(["train", str(path)])
    assert end.value.code == 3
    told = capsys.readouterr()
    assert "none-seed0: failed: exit code 2" in told.err
    assert "holds something else than a run" in told.err
    assert "rope-seed0: complete" in told.err
    assert "rope-seed0" in told.out


def test_without_ray_an_address_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as end:
        main(["train", str(write(tmp_path)), "--ray", "auto"])
    assert end.value.code == 2
    assert "--ray needs Ray" in capsys.readouterr().err


def test_of_several_processes_the_first_samples_records_and_tells(tmp_path: Path) -> None:
    """As `accelerate launch` starts them: one engine, each step recorded once, results on stdout once."""
    path = write(tmp_path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [*command(path), "--json"],
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    (out, said), (no_out, not_said) = (process.communicate(timeout=300) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], said + not_said
    assert [summary["steps"] for summary in json.loads(out)] == [2]
    assert "step 2/2" in said
    assert no_out == ""
    assert "step 2/2" not in not_said
    assert len(json.loads((tmp_path / "out" / "none-seed0" / "about.json").read_text())["sessions"]) == 1


# -- dry runs ---------------------------------------------------------------------------------------------------------


def planned(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any, str]:
    """Exit code, the plans and what is said on stderr."""
    with pytest.raises(SystemExit) as end:
        main(["train", str(path), "--dry-run", "--json", *options])
    told = capsys.readouterr()
    return int(str(end.value.code)), json.loads(told.out or "null"), told.err


def test_a_plan_is_json_if_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, [none, all_], _ = planned(write(tmp_path, arm=["none", "all"]), capsys)
    assert code == 0
    assert (none["trainer"], all_["trainer"]) == ("R1 S1 N1 qk=both", ENGINE)
    assert all_["step"].startswith("4 prompts x 4 completions of up to 8 tokens")


def test_where_an_engine_is_not_installed_its_schedule_is_left_to_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("tripoint.profiles.importlib.metadata.version", version)
    code, plans, _ = planned(write(tmp_path, engine="vllm", arm=["none", "rope", "fp32-trainer"]), capsys)
    assert code == 0
    assert [plan["trainer"] for plan in plans] == ["R1 S1 N1 qk=both", "rope as the engine answers", "FP32, rounds nowhere"]
    assert all(plan["target"].startswith("the engine will be asked at the start (profile 'vllm'") for plan in plans)
    code, _, said = planned(write(tmp_path, engine="vllm", target="vlm@0.32"), capsys)
    assert (code, said.count("\n")) == (2, 1)  # what the user names must be there


def test_a_plan_needs_a_models_configuration_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append(options)
        AutoConfig.for_model(**SHAPES["qwen2.5-1.5b"]).save_pretrained(tmp_path / "snapshot")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    code, [plan], _ = planned(write(tmp_path, model="Qwen/Qwen2.5-1.5B"), capsys)
    assert code == 0
    assert "28 layers, 1,543.7M" in plan["model"]
    assert [options["allow_patterns"] for options in asked] == [["config.json"]]


def test_a_plan_refuses_what_the_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    code, _, said = planned(write(tmp_path, task=f"file:{problems}"), capsys)
    assert code == 2
    assert "model `tiny:qwen2` is warmed up on a task that is made here" in said


# -- recipes ----------------------------------------------------------------------------------------------------------

RECIPES = Path(__file__).parents[1] / "experiments" / "grpo"
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize(("recipe", "parameters"), [("qwen2.5-1.5b", "1,543.7M"), ("qwen3-1.7b", "1,720.6M")])
def test_the_published_setting_is_planned_in_full_size(
    recipe: str, parameters: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All arms of the recipe, aligned on the meta device, with the model's shape in place of its weights."""
    AutoConfig.for_model(**SHAPES[recipe]).save_pretrained(tmp_path / "model")
    (tmp_path / "math.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    data = tomllib.loads((RECIPES / f"{recipe}.toml").read_text()) | {"model": "model", "target": "vllm@0.32/cuda/compiled/tp1"}
    Path("run.toml").write_text(tomli_w.dumps(data))
    with pytest.raises(SystemExit) as end:
        main(["train", "run.toml", "--dry-run"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert told.count("28 layers, " + parameters) == 15
    assert told.count("trainer    R3 S3 N3 carry=layer qk=none") == 3
    assert told.count("64 prompts x 8 completions of up to 3072 tokens, 128 passes of 4") == 15


def test_a_model_that_predicts_no_next_token_is_refused_by_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit) as end:
        main(["train", str(write(tmp_path, model=str(tmp_path / "model"))), "--dry-run"])
    assert end.value.code == 2
    assert "no causal language model of type t5" in capsys.readouterr().err


def test_under_fsdp2_nothing_is_cast_between_layers(model: Path) -> None:
    """One process, sharded with FP32 masters: the bits of the BF16 model."""
    config = TrainConfig(**settings(Path("unused"), arm="all"))
    schedule = RoundingSchedule.parse("R3 S3 N3 carry=layer")
    ids = torch.randint(3, 33, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = build_policy(model, replace(config, weights="bf16"), schedule)(input_ids=ids).logits
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = build_policy(model, config, schedule)
        for layer in policy.model.layers:
            fully_shard(layer, mp_policy=fsdp2_policy(config))
        fully_shard(policy, mp_policy=fsdp2_policy(config))
        out = policy(input_ids=ids).logits
        assert torch.equal(out, wanted)
        out.float().sum().backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in policy.parameters())
    finally:
        dist.destroy_process_group()


# -- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_can_be_planned(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", str(write(tmp_path, model=f"tiny:{family}", arm="all")), "--dry-run"])
    assert end.value.code == 0
    assert f"trainer    {ENGINE}" in capsys.readouterr().out


def test_a_family_is_warmed_up_until_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPOINT_CACHE", str(tmp_path))
    monkeypatch.setattr(families, "WARM", 0.002)  # by chance: 16**-6
    made = families.tiny_model("llama", "sort")
    assert families.tiny_model("llama", "sort") == made
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert families.tiny_model("llama", "sort") == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
