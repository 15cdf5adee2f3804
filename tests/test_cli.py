"""The command line: results on stdout, everything else on stderr, and exit codes that scripts can rely on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny import VOCABULARY, tiny
from tripoint.cli import main
from tripoint.drift.mismatch import MAXIMA, Mismatch
from tripoint.stacks import Rollout, open_stack

TRIPOINT = Path(sys.executable).with_name("tripoint")


def heed_interrupts() -> None:
    """Undo what a shell does to jobs in the background: they ignore Ctrl-C, and so would everything they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main(list(arguments))
        return Ran(exit.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama without a tokenizer, with room for prompt and completion."""
    path = tmp_path_factory.mktemp("llama")
    tiny("llama", max_position_embeddings=256).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes random rollouts with the log-probabilities that a stack gives them when it scores them as the trainer does."""

    def record(stack: str, sequences: int = 12) -> Path:
        drawn = np.random.default_rng(0).integers(3, VOCABULARY, (sequences, 40)).tolist()
        rows = [Rollout(tuple(ids[:10]), tuple(ids[10:])) for ids in drawn]
        path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
        with open_stack(stack, model) as opened, path.open("w") as file:
            for row, logprobs in zip(rows, opened.score(rows), strict=True):
                columns = {"prompt_ids": row.prompt_ids, "completion_ids": row.completion_ids, "logprobs": logprobs}
                print(json.dumps(columns), file=file)
        return path

    return record


def one_line(message: str) -> bool:
    return message.startswith("tripoint: ") and message.count("\n") == 1


# -- the command itself -----------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'pyarrow', 'rich'}"
    code = f"import sys, atexit; atexit.register(lambda: print({heavy} & set(sys.modules), file=sys.stderr))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; from tripoint.cli import main; main(['--help'])"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("drift", "diagnose", "diff"))
    assert done.stderr.strip() == "set()"


def test_version(run: Run) -> None:
    done = run("--version")
    assert (done.code, done.out) == (0, "tripoint 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing command"),
        (["drfit"], "Did you mean 'drift'?"),
        (["drift"], "Missing option '--engine'"),
        (["drift", "--engine", "hf", "--tokens", "many"], "--tokens"),
        (["drift", "--engine", "hf", "--tokens", "0"], "--tokens"),
        (["drift", "--engine", "hf", "--tokens", "1000000"], "ask for fewer"),
        (["drift", "--engine", "vlm"], "did you mean `vllm`?"),
        (["drift", "--engine", "emulated:R3 S3 N8"], "unknown code 'N8'"),
        (["drift", "--engine", "hf", "--trainer", "vllm"], "trainer `vllm` cannot be aligned"),
        (["drift", "--engine", "hf", "--to", "vlm"], "nearest: vllm"),
        (["drift", "no/such/model", "--engine", "hf"], "model `no/such/model`"),
        (["diff", "R1 S1 N1", "R1 S1"], "no code for N (norm)"),
        (["diff", "R1 S1 N1", "gone.toml"], "gone.toml: no such file"),
        (["diff", "R1 S1 N1"], "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert one_line(done.err)


def test_an_unknown_architecture_is_refused_before_anything_is_sampled(run: Run, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    done = run("drift", str(tmp_path), "--engine", "emulated:R3 S3 N3")
    assert done.code == 2
    assert "transformer.h.0.attn" in done.err
    assert "sampling" not in done.err


def test_out_that_is_a_file(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("diagnose", str(model), "--engine", "hf", "--out", str(tmp_path / "file"))
    assert done.code == 2
    assert "is a file" in done.err


def test_out_that_cannot_be_written(run: Run, model: Path, tmp_path: Path) -> None:
    """Said before anything is measured, which would be lost."""
    (tmp_path / "file").write_text("")
    for directory in (str(tmp_path / "file" / "report"), "/proc"):
        done = run("diagnose", str(model), "--engine", "hf", "--out", directory)
        assert done.code == 2
        assert one_line(done.err)
        assert f"--out {directory} cannot be written" in done.err


# -- diff -------------------------------------------------------------------------------------------------------------


def test_diff_of_equal_schedules(run: Run) -> None:
    done = run("diff", "R3 S3 N6", "R3 S3 N3 carry=fp32")
    assert done.code == 0
    assert "round at the same points" in done.out


def test_diff_says_what_each_field_does(run: Run) -> None:
    done = run("diff", "R1 S1 N1", "R3 S3 N1")
    assert done.code == 1
    said = " ".join(done.out.replace("│", " ").split())
    assert "rope.compute" in said
    assert "swiglu.silu_round" in said
    assert "norm" not in said
    assert "carry" not in said


def test_diff_as_json(run: Run) -> None:
    done = run("diff", "R3 S3 N3 carry=layer", "R3 S3 N3 carry=[1,5]", "--json")
    assert done.code == 1
    assert done.json["distance"] == 1
    assert done.json["differences"] == [
        {
            "field": "carry",
            "left": "layer",
            "right": [1, 5],
            "left_means": "the residual sum stays FP32 inside a layer and is rounded at its end",
            "right_means": "the residual sum is rounded after adds [1, 5] only",
        }
    ]


def test_every_value_of_every_field_has_words(run: Run) -> None:
    """Pairs that together take every field through all its values."""
    pairs = [
        ("R1 S1 N1 qk=both", "R3 S3 N3 carry=layer qk=none cast=rtz"),
        ("R2 S5 N4 carry=fp32 qk=out angle=exp2", "R4 S3 N5 carry=6 qk=norm angle=powscale"),
        ("R1 S1 N3 carry=[1]", "R1 S1 N1 angle=pos/timescale"),
    ]
    for pair in pairs:
        differences = run("diff", *pair, "--json").json["differences"]
        assert differences
        assert all(d["left_means"] != d["right_means"] for d in differences)


# -- drift and diagnose -----------------------------------------------------------------------------------------------


def test_json_of_drift_is_the_documented_one(run: Run, model: Path) -> None:
    options = ["--tokens", "800", "--replicates", "8", "--quick"]
    done = run("drift", str(model), "--engine", "emulated:R3 S3 N3 carry=layer", *options, "--json")
    assert done.code == 0
    found = done.json
    assert list(found) == [
        "tokens",
        "sequences",
        "replicates",
        "mismatch",
        "noise_rms",
        "expected_k3_from_noise",
        "systematic",
        "attribution",
        "interaction",
        "unexplained",
        "control",
        "findings",
        "withheld",
        "bound_only",
        "positive_control",
        "problem",
    ]
    assert list(found["mismatch"]) == list(Mismatch.__dataclass_fields__)
    assert (found["tokens"], found["sequences"], found["replicates"]) == (800, 16, 8)
    assert (found["attribution"], found["interaction"]) == ([], None)
    assert "quick" in found["withheld"]
    assert "sampling from emulated" in done.err


def test_the_table_of_drift(run: Run, model: Path) -> None:
    done = run("drift", str(model), "--engine", "emulated:R3 S3 N3", "--tokens", "800", "--replicates", "8")
    assert done.code == 0
    rows = ["mismatch", "rounding noise of the engine", "systematic", "rope R1 → R3", "swiglu S1 → S3", "norm N1 → N3"]
    rows += ["interaction", "removed by alignment", "left", "control: trainer, itself", "control: trainer, odd schedule"]
    places = [done.out.index(row) for row in rows]
    assert places == sorted(places)
    said = " ".join(done.out.split())
    assert "do not average out" in said
    assert "Align the trainer to R3 S3 N3: then none is told from zero" in said


def test_a_trainer_that_already_agrees(run: Run, model: Path, recorded: Callable[..., Path]) -> None:
    """No target differs, so that nothing is removed, and raw mismatch is exactly zero."""
    done = run("diagnose", str(model), "--engine", f"rollouts:{recorded('hf')}", "--to", "hf", "--replicates", "8")
    assert done.code == 0
    assert "agree on all 360 tokens to the last bit, with and without alignment" in done.out


def test_alignment_that_removes_the_mismatch(run: Run, model: Path, recorded: Callable[..., Path], tmp_path: Path) -> None:
    """Tokens scored by the same ops in the same batches: nothing but the schedule differs, and alignment removes all of it."""
    engine = ["--engine", f"rollouts:{recorded('emulated:R3 S3 N3 carry=layer')}", "--to", "R3 S3 N3 carry=layer"]
    done = run("diagnose", str(model), *engine, "--replicates", "6", "--quick", "--out", str(tmp_path))
    assert done.code == 0
    assert "Alignment removed the mismatch" in done.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [key for key in report["mismatch"] if report["mismatch_stderr"][key] is None] == list(MAXIMA)
    assert report["mismatch"]["mean_abs"] > 0
    assert report["aligned"]["mismatch"]["exact_fraction"] == 1
    assert report["aligned"]["mismatch"]["max_abs"] == 0
    assert report["aligned"]["schedule"].startswith("R3 S3 N3 carry=layer")
    assert {"op": "swiglu", "before": "S1", "after": "S3", "sites": 3} in report["aligned"]["ops"]
    assert report["noise_rms"]["engine"] is None
    assert report["bound_only"]
    html = (tmp_path / "report.html").read_text()
    assert "Alignment removed the mismatch" in html
    assert "rollout_probs_diff_mean" in html
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")


def test_alignment_to_the_wrong_schedule(run: Run, model: Path, recorded: Callable[..., Path]) -> None:
    engine = ["--engine", f"rollouts:{recorded('hf')}", "--to", "R3 S3 N3"]
    done = run("diagnose", str(model), *engine, "--replicates", "8", "--quick")
    assert done.code == 0
    assert "Alignment raised the mean |dlogp| from 0 to" in " ".join(done.out.split())


def test_rollouts_without_a_target(run: Run, model: Path, recorded: Callable[..., Path]) -> None:
    engine = f"rollouts:{recorded('emulated:R4 S3 N2')}"
    done = run("diagnose", str(model), "--engine", engine, "--replicates", "8", "--json")
    assert done.code == 0
    assert done.json["aligned"] is None
    assert done.json["unexplained"] is None
    assert done.json["systematic"]["p_value"] is None  # it holds the noise of a single sample
    # The tokens of this recording are random, not drawn from the model.
    assert [finding["cause"] for finding in done.json["findings"]] == ["sampling_temperature"]
    assert "sampling_temperature" in done.json["withheld"]


def test_no_more_recorded_tokens_are_measured_than_are_asked_for(run: Run, model: Path, recorded: Callable[..., Path]) -> None:
    engine = f"rollouts:{recorded('hf', 24)}"
    done = run("drift", str(model), "--engine", engine, "--tokens", "500", "--replicates", "8", "--json")
    assert (done.json["tokens"], done.json["sequences"]) == (500, 17)


def test_a_measurement_too_coarse_to_see_its_control_is_exit_code_3(run: Run, model: Path) -> None:
    """The result is printed all the same, with the reason."""
    done = run("drift", str(model), "--engine", "emulated:R3 S3 N3", "--tokens", "200", "--replicates", "3", "--quick")
    assert done.code == 3
    assert "does not say anything yet: a deliberately different schedule gives" in " ".join(done.out.split())


def test_a_damaged_rollouts_file(run: Run, model: Path, recorded: Callable[..., Path]) -> None:
    file = recorded("hf")
    file.write_bytes(file.read_bytes()[:-20])
    done = run("drift", str(model), "--engine", f"rollouts:{file}")
    assert done.code == 2
    assert "line 12 is cut off" in done.err
    assert one_line(done.err)


def test_a_server_that_is_not_there_is_exit_code_3(run: Run, model: Path) -> None:
    done = run("drift", str(model), "--engine", "http://127.0.0.1:1")
    assert (done.code, done.out) == (3, "")
    assert "127.0.0.1:1" in done.err


def test_too_few_sequences_is_exit_code_3(run: Run, model: Path, recorded: Callable[..., Path]) -> None:
    done = run("drift", str(model), "--engine", f"rollouts:{recorded('hf', 7)}")
    assert (done.code, done.out) == (3, "")
    assert "are too few to measure a mismatch" in done.err


def test_ctrl_c_is_exit_code_130_without_a_traceback(model: Path) -> None:
    command = [TRIPOINT, "drift", str(model), "--engine", "hf", "--tokens", "100000"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"TTY_COMPATIBLE": "1"},
        text=True,
        preexec_fn=heed_interrupts,
    ) as process:
        assert process.stderr is not None
        seen = ""
        while "sampling" not in seen and (character := process.stderr.read(1)):
            seen += character
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in seen + err
