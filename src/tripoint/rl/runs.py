"""Runs of arms x seeds: one in this process, several each in a process of its own, here or on a Ray cluster."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tripoint.errors import UsageError
from tripoint.models import resolve_model
from tripoint.rl.config import TrainConfig
from tripoint.rl.families import tiny_model
from tripoint.rl.records import RunDirectory, usable
from tripoint.rl.tasks import check_task

POLL_SECONDS = 0.2


def model_of(config: TrainConfig) -> Path:
    """The checkpoint that a run starts from. Raises UsageError if there is none."""
    if config.model.startswith("tiny:"):
        return tiny_model(config.model.removeprefix("tiny:"), config.task)
    return resolve_model(config.model)


def train_one(config: TrainConfig) -> None:
    """Make or resume one run in this process. Raises UsageError and MeasurementError."""
    check_task(config.task)
    RunDirectory(config.directory, config)
    prepare_for_trl()
    from tripoint.rl.grpo import train

    train(config, model_of(config))


def plan_all(configs: Sequence[TrainConfig]) -> Iterator[dict[str, str]]:
    """`tripoint.rl.plan.plan` of each run."""
    prepare_for_trl()
    from tripoint.rl.plan import plan

    return map(plan, configs)


def prepare_for_trl() -> None:
    """Raises UsageError if TRL is not installed."""
    if importlib.util.find_spec("trl") is None:
        raise UsageError("training needs TRL: `pip install 'tripoint[rl]'`")
    # TRL would import vLLM, which changes torch's settings for the process that trains. Our engine has a process of its own.
    utilities: Any = importlib.import_module("trl.import_utils")
    utilities.is_vllm_available = lambda min_version=None: False


def train_all(
    configs: Sequence[TrainConfig], path: Path, workers: int, ray: str | None
) -> Iterator[tuple[TrainConfig, str | None]]:
    """Make the runs of file `path`, each in a process of its own, and yield each when it ends, with why it failed if it did.

    `workers` of them at a time on this machine; on the cluster at address `ray`, if given, as many as it has room for, one
    GPU each where it has GPUs. `out` must then be a directory that all its machines share. A run that fails takes no other
    with it. Raises UsageError if Ray is not installed.
    """
    prepare_for_trl()
    check_task(configs[0].task)
    if ray is None:
        model_of(configs[0])  # a tiny model is warmed up once, before its runs start
        yield from _here(configs, path, workers)
    else:
        yield from _on_ray(configs, path, ray)


def _here(configs: Sequence[TrainConfig], path: Path, workers: int) -> Iterator[tuple[TrainConfig, str | None]]:
    waiting = deque(configs)
    running: dict[subprocess.Popen[bytes], TrainConfig] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                config = waiting.popleft()
                running[_start(config, path)] = config
            for process in [process for process in running if process.poll() is not None]:
                config = running.pop(process)
                yield config, _failure(config, process.returncode)
            time.sleep(POLL_SECONDS)
    finally:  # interrupted, no run outlives this process and none begins
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _train_apart(config: TrainConfig, path: Path) -> str | None:
    """Make a run in a process of its own; why it failed, None if it did not."""
    return _failure(config, _start(config, path).wait())


def _start(config: TrainConfig, path: Path) -> subprocess.Popen[bytes]:
    """A process that makes the run of `config` in file `path`, its output in the run's log. Raises UsageError if there can be
    none."""
    command = [sys.executable, "-c", "from tripoint.cli import main; main()", "train", str(path)]
    command += ["--arm", config.arm, "--seed", str(config.seed)]
    log = _log(config)
    with usable(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _failure(config: TrainConfig, code: int) -> str | None:
    if code == 0:
        return None
    log = _log(config)
    last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
    return f"exit code {code}, its log {log} ends with: {last}"


def _log(config: TrainConfig) -> Path:
    return Path(config.out) / f"{config.name}.log"


def _on_ray(configs: Sequence[TrainConfig], path: Path, address: str) -> Iterator[tuple[TrainConfig, str | None]]:
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--ray needs Ray: `pip install ray`, or leave it out to run on this machine")
    import ray

    ray.init(address=address)
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    remote: Callable[..., object] = ray.remote(num_gpus=gpus, max_retries=0)(_train_apart).remote
    waiting = {remote(config, path.resolve()): config for config in configs}
    while waiting:
        [done], _ = ray.wait(list(waiting))
        config = waiting.pop(done)
        try:
            yield config, ray.get(done)
        except ray.exceptions.RayError as error:
            yield config, f"lost by Ray: {error}"
