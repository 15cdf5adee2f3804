"""The main job on real input: SmolLM2-135M, transformers against a real vLLM, through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tripoint.profiles import resolve_target

TRIPOINT = Path(sys.executable).with_name("tripoint")


def heed_interrupts() -> None:
    """Undo what a shell does to jobs in the background: they ignore Ctrl-C, and so would everything they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_diagnose_with_a_real_engine(tmp_path: Path) -> None:
    """Uncompiled, since that starts five times faster; `make demo` is the same with the compiled default."""
    command = [TRIPOINT, "diagnose", "--engine", "vllm:eager", "--tokens", "800", "--replicates", "4", "--quick"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())

    # Same weights, same tokens, raw logprobs on both sides: rounding is all that is left, here between 0.03 and 0.05 nats.
    assert 0.01 < report["mismatch"]["mean_abs"] < 0.1
    assert 0.01 < report["aligned"]["mismatch"]["mean_abs"] < 0.1
    assert report["mismatch"]["ess"] > 0.98

    target = resolve_target("vllm/eager")
    assert report["aligned"]["schedule"] == str(target.schedule)
    sites = {op["op"]: (op["before"], op["after"], op["sites"]) for op in report["aligned"]["ops"]}
    assert sites["rope"] == ("R1", target.schedule.rope.code, 30)
    assert sites["norm.final"] == ("N1", target.schedule.norm.final.code, 1)

    assert report["engine"]["conditions"]["compile"] is False
    assert "vllm" in report["engine"]["versions"]
    assert "chat template" in report["source"]
    assert report["summary"] in " ".join(done.stdout.split())
    assert "scoring with hf, aligned" in done.stderr


@pytest.mark.parametrize(
    ("interrupted", "code", "said"),
    [("engine", 3, "stack `vllm:eager` died during `sample`. The end of its log"), ("command", 130, "")],
)
def test_an_end_halfway(interrupted: str, code: int, said: str) -> None:
    """vLLM is killed, or the user presses Ctrl-C, while tokens are sampled: the right exit code, and no process left."""
    command = [TRIPOINT, "drift", "--engine", "vllm:eager", "--tokens", "4000"]
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
        while "sampling from vllm" not in seen and (character := process.stderr.read(1)):
            seen += character
        (engine,) = psutil.Process(process.pid).children()
        below = engine.children(recursive=True)
        if interrupted == "engine":
            engine.kill()
        else:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out == ""
    assert said in err
    assert "Traceback" not in err
    assert psutil.wait_procs([engine, *below], timeout=10)[1] == []
