"""Configurations, arms and tasks of `tripoint train`: what they accept, what they refuse and how, and what they mean."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tripoint.cli import main
from tripoint.errors import UsageError
from tripoint.rl.arms import ARMS, STOCK
from tripoint.rl.config import TrainConfig, read_config
from tripoint.rl.records import WATCHED, RunDirectory
from tripoint.rl.summary import summarise
from tripoint.rl.tasks import CHARACTERS, MADE, problems, reward
from tripoint.schedule import RoundingSchedule

LEAST: dict[str, Any] = {"model": "tiny:qwen2", "task": "sort", "engine": "emulated:R3 S3 N3", "out": "runs"}


def write(directory: Path, **settings: Any) -> Path:
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(LEAST | settings))
    return path


# -- config -----------------------------------------------------------------------------------------------------------


def test_arms_and_seeds_in_lists_are_all_combinations_balanced_over_arms(tmp_path: Path) -> None:
    configs = read_config(write(tmp_path, arm=["none", "all"], seed=[0, 1]))
    assert [config.name for config in configs] == ["none-seed0", "all-seed0", "none-seed1", "all-seed1"]
    assert len({config.directory for config in configs}) == 4


def test_arguments_replace_the_files_arm_and_seed(tmp_path: Path) -> None:
    [config] = read_config(write(tmp_path, arm=["none", "all"], seed=[0, 1]), arm="rope", seed=7)
    assert (config.arm, config.seed) == ("rope", 7)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stepz": 3}, "unknown key 'stepz'; nearest: steps"),
        ({"steps": "3"}, "steps='3': expected int"),
        ({"steps": True}, "steps=True: expected int"),
        ({"steps": 0}, "steps=0: give 1 or more"),
        ({"generations": 1}, "generations=1: give 2 or more"),
        ({"lr": 0}, "lr=0.0: give a positive number"),
        ({"microbatch": 7}, "microbatch=7 does not divide the 128 completions"),
        ({"arm": "rop"}, "unknown arm 'rop'; nearest: rope"),
        ({"arm": []}, "arm=[]: give each once"),
        ({"engine": "vlm"}, "unknown stack `vlm`"),
        ({"arm": [["none"]]}, "arm=['none']: expected str"),
        ({"seed": {"a": 1}}, "seed={'a': 1}: expected int"),
        ({"seed": [0, 0]}, "seed=[0, 0]: give each once"),
        ({"seed": -1}, "seed=-1: give 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296: give 0 to 4294967295"),
        ({"engine": "http://localhost:1"}, "is none for training: use vllm, vllm:eager, mlx or emulated:TARGET"),
        ({"engine": "hf:compile"}, "is none for training: use vllm, vllm:eager, mlx or emulated:TARGET"),
        ({"engine": "mlx", "arm": "fp16"}, "needs an engine in float16: engine must be vllm or emulated:TARGET"),
        ({"weights": "fp32"}, "weights='fp32'; nearest: fp32-masters"),
        ({"weights": "bf16", "arm": "fp16"}, "weights must be 'fp32-masters'"),
        ({"arm": "bitwise", "engine": "vllm"}, "engine must be 'emulated:TARGET'"),
        ({"grpo": {"learning_rate": 1.0}}, "[grpo] learning_rate: decided by `lr`; leave it out"),
        ({"grpo": {"save_strategy": "no"}}, "[grpo] save_strategy: decided by `checkpoint_every`"),
        ({"grpo": {"top_k": 1}}, "[grpo] top_k: decided by `engine`"),
        ({"grpo": {"logging_steps": 2}}, "[grpo] logging_steps: decided by the run's records"),
        ({"grpo": {"use_liger_kernel": True}}, "[grpo] use_liger_kernel: decided by `arm`"),
        ({"engine_options": {"max_num_seq": 3}}, "[engine_options] unknown key 'max_num_seq'; nearest: max_num_seqs"),
        ({"engine_options": {"dtype": "float16"}}, "[engine_options] dtype: decided by `arm`"),
        ({"watch_every": 5, "arm": "fp16"}, "drift is measured between BF16 stacks"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file_and_the_key(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    path = write(tmp_path, **settings)
    with pytest.raises(UsageError) as error:
        read_config(path)
    assert said in str(error.value)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_what_a_run_needs_is_named_when_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "smollm2"\n')
    with pytest.raises(UsageError, match="no `task`; a run needs model, task, engine and out"):
        read_config(path)


def test_the_command_refuses_a_bad_file_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", str(write(tmp_path, stepz=3))])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# -- arms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "trainer"),
    [
        ("none", "R1 S1 N1 qk=both"),
        ("rope", "R3 S1 N1 qk=both"),
        ("swiglu", "R1 S3 N1 qk=both"),
        ("norm", "R1 S1 N3 carry=layer qk=none"),
        ("all", "R3 S3 N3 carry=layer qk=none"),
        ("bitwise", "R3 S3 N3 carry=layer qk=none"),
        ("fp16", "R1 S1 N1 qk=both"),
        ("tis", "R1 S1 N1 qk=both"),
        ("fp32-trainer", None),
    ],
)
def test_an_arm_aligns_what_it_is_named_after(arm: str, trainer: str | None) -> None:
    schedule = ARMS[arm].schedule(RoundingSchedule.parse("R3 S3 N3 carry=layer qk=none"))
    assert schedule == (None if trainer is None else RoundingSchedule.parse(trainer))


def test_corrections_leave_the_trainer_stock() -> None:
    for arm in ("tis", "mis", "sequence-tis", "sequence-mis"):
        assert ARMS[arm].correction is not None
        assert ARMS[arm].schedule(RoundingSchedule.parse("R3 S3 N3")) == STOCK


# -- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", MADE)
def test_a_made_task_is_the_same_every_time_and_its_answers_are_right(task: str) -> None:
    made = problems(task, shots=2)
    assert made == problems(task, shots=2)
    assert len({problem.prompt for problem in made}) > 1000
    for problem in made[:50]:
        asked = problem.prompt.splitlines()[-1]
        if task == "addition":
            a, b = (int(word) for word in asked.removesuffix(" =").split(" + "))
            assert problem.answer == str(a + b)
        elif task == "sort":
            assert problem.answer == "".join(sorted(asked.removesuffix(">")))
        else:
            assert problem.answer == asked.removesuffix("<")[::-1]
        assert set(problem.prompt + problem.answer) <= {*CHARACTERS, "\n"}


def test_shots_are_solved_problems_of_the_task() -> None:
    *shots, _ = problems("addition", shots=2)[0].prompt.splitlines()
    for shot in shots:
        asked, _, answer = shot.partition(" = ")
        assert eval(asked) == int(answer)
    assert len(shots) == 2


@pytest.mark.parametrize(
    ("task", "completion", "answer", "right"),
    [
        ("addition", " 42\n1 + 1 = 3", "42", 1.0),
        ("addition", " 421", "42", 0.0),
        ("addition", "", "42", 0.0),
        ("sort", "abc", "abc", 1.0),
        ("file:x", "so \\boxed{1}, no: \\boxed{42}", "42", 1.0),
        ("file:x", "\\boxed{7} and 42", "42", 0.0),
        ("file:x", "so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}", 1.0),
        ("file:x", "\\boxed{1} or \\boxed{\\frac{1}{2}}", "1", 0.0),
        ("file:x", "\\boxed{42}, so \\boxed{4", "42", 1.0),  # cut off in the second
        ("file:x", "it is 1,042 in all", "1042", 1.0),
        ("file:x", "it is 1,042 in all", "1,042", 1.0),
        ("file:x", "it is 1042,", "1,042", 1.0),
        ("file:x", "the pair 10,42", "1042", 0.0),
        ("file:x", "\\boxed{1,042}", "1042", 1.0),
        ("file:x", "I do not know", "42", 0.0),
    ],
)
def test_rewards(task: str, completion: str, answer: str, right: float) -> None:
    assert reward(task, completion, answer) == right


def test_a_file_of_problems(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n")
    assert [problem.answer for problem in problems(f"file:{path}", shots=2)] == ["2"]
    # Separators of lines that JSON allows in its strings separate no lines of the file; empty ones hold no problem.
    path.write_text('{"prompt": "a\u2028b\x85c", "answer": "2"}\n\n{"prompt": "d", "answer": "3"}\n', encoding="utf-8")
    assert [problem.prompt for problem in problems(f"file:{path}", shots=2)] == ["a\u2028b\x85c", "d"]
    path.write_text('{"prompt": "1+1?"}\n')
    with pytest.raises(UsageError, match="line 1: give an object with the strings"):
        problems(f"file:{path}", shots=2)
    with pytest.raises(UsageError, match="unknown task 'sorte'; nearest: sort"):
        problems("sorte", shots=0)


# -- records ----------------------------------------------------------------------------------------------------------


def record(step: int, **values: Any) -> dict[str, Any]:
    return dict.fromkeys(WATCHED) | {"step": step, "reward": 0.5, "k3": 1e-4} | values


def run_directory(tmp_path: Path, **settings: Any) -> RunDirectory:
    return RunDirectory(tmp_path / "run", TrainConfig(**LEAST | settings))


def begun(tmp_path: Path, **settings: Any) -> RunDirectory:
    records = run_directory(tmp_path, **settings)
    assert records.begin() is None
    return records


def test_resuming_keeps_what_a_complete_checkpoint_holds_and_nothing_after_it(tmp_path: Path) -> None:
    records = begun(tmp_path)
    for step in range(1, 8):
        records.write(record(step), {"completion_ids": [[1, 2]]})
    for step in (2, 4, 6):
        (records.checkpoints / f"checkpoint-{step}").mkdir()
    records.mark_complete(2)
    records.mark_complete(4)  # the process died while it wrote the sixth
    (records.path / "steps" / "000008.unfinished").write_bytes(b"half a file")
    resumed = run_directory(tmp_path)
    assert resumed.begin() == records.checkpoints / "checkpoint-4"
    assert [row["step"] for row in resumed.steps()] == [1, 2, 3, 4]
    assert sorted(path.name for path in records.checkpoints.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert len(list((records.path / "rollouts").iterdir())) == 4
    assert len(list((records.path / "steps").iterdir())) == 4


def test_without_a_complete_checkpoint_a_run_begins_anew_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = begun(tmp_path)
    assert capsys.readouterr().err == ""
    records.write(record(1), {"completion_ids": [[1]]})
    assert run_directory(tmp_path).begin() is None
    assert records.steps() == []
    assert "1 steps after its last checkpoint are made anew" in capsys.readouterr().err


def test_a_finished_run_without_its_checkpoints_keeps_its_records(tmp_path: Path) -> None:
    records = begun(tmp_path, steps=2)
    for step in (1, 2):
        records.write(record(step), {"completion_ids": [[1]]})
    (records.checkpoints / "checkpoint-2").mkdir()
    records.mark_complete(2)
    shutil.rmtree(records.checkpoints)
    again = run_directory(tmp_path, steps=2)
    assert again.begin() is None
    assert again.finished
    assert [row["step"] for row in records.steps()] == [1, 2]
    assert len(list((records.path / "rollouts").iterdir())) == 2


def test_a_run_that_died_while_it_wrote_its_last_checkpoint_is_not_finished(tmp_path: Path) -> None:
    records = begun(tmp_path, steps=2)
    for step in (1, 2):
        records.write(record(step), {"completion_ids": [[1]]})
    (records.checkpoints / "checkpoint-2").mkdir()
    again = run_directory(tmp_path, steps=2)
    assert again.begin() is None
    assert not again.finished
    assert again.steps() == []


@pytest.mark.parametrize("last", ["run", "config.unfinished", "config.toml", "steps"])
def test_a_run_that_was_killed_while_it_began_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Killed as soon as `last` was made, in whatever way files and directories are made."""

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def make(path: Path, *args: Any, **options: Any) -> Any:
            made = real(path, *args, **options)
            if last in (path.name, *(arg.name for arg in args if isinstance(arg, Path))):
                raise KeyboardInterrupt
            return made

        return make

    with monkeypatch.context() as patched:
        for way in ("mkdir", "write_bytes", "rename"):
            patched.setattr(Path, way, dying(getattr(Path, way)))
        with pytest.raises(KeyboardInterrupt):
            run_directory(tmp_path).begin()
    begun(tmp_path)
    with pytest.raises(UsageError, match="holds a run with steps=100, not 3"):
        run_directory(tmp_path, steps=3)


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/run cannot be used: Not a directory; give another `out`"):
        run_directory(tmp_path / "file").begin()
    with pytest.raises(UsageError, match=r"file cannot be used: Not a directory; give another `out`"):
        RunDirectory(tmp_path / "file", TrainConfig(**LEAST))


@pytest.mark.parametrize("content", [b"steps = \n", b"\xff"], ids=["not TOML", "not UTF-8"])
def test_a_run_whose_settings_cannot_be_read_is_refused(content: bytes, tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "run" / "config.toml").write_bytes(content)
    with pytest.raises(UsageError, match=r"run/config.toml is damaged: .*; give another `out`"):
        run_directory(tmp_path)


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    begun(tmp_path, lr=1e-4)
    with pytest.raises(UsageError, match=r"holds a run with lr=0\.0001, not 0\.001"):
        run_directory(tmp_path, lr=1e-3)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="holds something else than a run"):
        RunDirectory(tmp_path / "other", TrainConfig(**LEAST))


# -- several runs -----------------------------------------------------------------------------------------------------

RUNS_FOREVER = """#!/bin/sh
echo $$ >> {pids}
exec sleep 60
"""


def test_an_interrupt_ends_all_runs_and_starts_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    python = tmp_path / "python"
    python.write_text(RUNS_FOREVER.format(pids=pids))
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr("tripoint.rl.runs.model_of", lambda config: None)

    def interrupt() -> None:
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.01)
        time.sleep(0.3)  # until the second one is waited for
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores Ctrl-C
    try:
        with pytest.raises(SystemExit) as end:
            main(["train", str(write(tmp_path, out=str(tmp_path / "out"), seed=[0, 1, 2, 3])), "--workers", "2"])
    finally:
        signal.signal(signal.SIGINT, heeded)
    assert end.value.code == 130
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# -- summary ----------------------------------------------------------------------------------------------------------


def test_a_summary_gives_the_slope_with_its_error_and_the_collapse() -> None:
    config = TrainConfig(**LEAST)
    rising = summarise(config, [record(i + 1, reward=0.1 + 0.01 * i + 0.02 * (-1) ** i) for i in range(40)])
    assert rising["slope"] == pytest.approx(0.01, abs=3 * rising["slope_stderr"])
    assert 0 < rising["slope_stderr"] < 0.001
    assert rising["collapsed_at"] is None
    # 60 steps at 0.8, then 0: the mean of the last 50 is below 0.4 at the 26th zero.
    fallen = summarise(config, [record(i + 1, reward=0.8 if i < 60 else 0.0) for i in range(120)])
    assert fallen["collapsed_at"] == 86
