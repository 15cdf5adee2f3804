"""The benchmark commands: what they count is there, and what they cannot measure they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from benchmarks import gpu
from benchmarks.__main__ import loss_of, operations
from benchmarks.measure import count, interleaved, peak_bytes, saved_bytes

from tiny import tiny, tokens
from tripoint import align

ROOT = Path(__file__).parent.parent


def test_without_a_gpu_the_gpu_benchmark_says_so_in_one_line() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr == "benchmarks.gpu: no GPU that PyTorch can use; run it on a machine with one\n"


def test_a_comparison_of_bits_can_fail() -> None:
    x = torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=torch.bfloat16)
    off = x.clone()
    off[1] = -1.0078125  # one unit in the last place
    assert gpu.check("", x, x).holds
    assert not gpu.check("", off, x).holds
    assert gpu.check("", off, x, allowed=0.25, ulps=1).holds
    assert not gpu.check("", off, x, allowed=0.2, ulps=1).holds
    assert int(gpu.ordered(torch.tensor([1e-45])) - gpu.ordered(torch.tensor([-1e-45]))) == 2


def test_bytes_are_counted_exactly() -> None:
    x = torch.randn(1000, requires_grad=True)
    assert saved_bytes(lambda: (x * x).sin().sum(), []) == 8000  # x, once, and its square
    assert saved_bytes(lambda: (x * x).sin().sum(), [x]) == 4000
    assert peak_bytes(lambda: torch.empty(1000).fill_(1) + torch.empty(500).sum()) >= 8000


def test_runs_of_a_round_change_places() -> None:
    order: list[str] = []
    seconds = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, warmups=0)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(values) for values in seconds.values()] == [3, 3]


def test_alignment_saves_memory() -> None:
    """What the recorded run shows of a real model, of a tiny one."""
    plain, aligned, ids = tiny(), tiny(), tokens()
    align(aligned, "R3 S3 N3 carry=layer")
    before, after = (saved_bytes(loss_of(model, ids), [*model.parameters()]) for model in (plain, aligned))
    assert count("saved", before, after, at_most=0.95).holds


def test_operations_compute_the_same_gradients_but_for_roundings() -> None:
    for _, unaligned, aligned in operations(tiny().config, batch=1, tokens=5):
        for theirs, mine in zip(unaligned(), aligned(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)
