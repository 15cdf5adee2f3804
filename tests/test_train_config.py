"""Configurations, arms and tasks of `tripoint train`: what they accept, what they refuse and how, and what they mean."""

from __future__ import annotations

import json
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
        ({"engine": "http://localhost:1"}, "cannot be given new weights"),
        ({"weights": "fp32"}, "weights='fp32'; nearest: fp32-masters"),
        ({"weights": "bf16", "arm": "fp16"}, "weights must be 'fp32-masters'"),
        ({"arm": "bitwise", "engine": "vllm"}, "engine must be 'emulated:TARGET'"),
        ({"grpo": {"learning_rate": 1.0}}, "[grpo] learning_rate: decided by `lr`"),
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
        ("file:x", "it is 1,042 in all", "1042", 1.0),
        ("file:x", "I do not know", "42", 0.0),
    ],
)
def test_rewards(task: str, completion: str, answer: str, right: float) -> None:
    assert reward(task, completion, answer) == right


def test_a_file_of_problems(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n")
    assert [problem.answer for problem in problems(f"file:{path}", shots=2)] == ["2"]
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


def test_without_a_complete_checkpoint_a_run_begins_anew(tmp_path: Path) -> None:
    records = begun(tmp_path)
    records.write(record(1), {"completion_ids": [[1]]})
    assert run_directory(tmp_path).begin() is None
    assert records.steps() == []


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    begun(tmp_path, lr=1e-4)
    with pytest.raises(UsageError, match=r"holds a run with lr=0\.0001, not 0\.001"):
        run_directory(tmp_path, lr=1e-3)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="holds something else than a run"):
        RunDirectory(tmp_path / "other", TrainConfig(**LEAST))


def test_a_summary_gives_the_slope_with_its_error_and_the_collapse() -> None:
    config = TrainConfig(**LEAST)
    rising = summarise(config, [record(i + 1, reward=0.1 + 0.01 * i + 0.02 * (-1) ** i) for i in range(40)])
    assert rising["slope"] == pytest.approx(0.01, abs=3 * rising["slope_stderr"])
    assert 0 < rising["slope_stderr"] < 0.001
    assert rising["collapsed_at"] is None
    # 60 steps at 0.8, then 0: the mean of the last 50 is below 0.4 at the 26th zero.
    fallen = summarise(config, [record(i + 1, reward=0.8 if i < 60 else 0.0) for i in range(120)])
    assert fallen["collapsed_at"] == 86
