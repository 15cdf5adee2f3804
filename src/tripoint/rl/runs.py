"""Runs of arms x seeds: one in this process, several each in a process of its own, here or on a Ray cluster."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tripoint.errors import UsageError
from tripoint.models import resolve_model
from tripoint.rl.config import TrainConfig
from tripoint.rl.families import tiny_model
from tripoint.rl.records import RunDirectory
from tripoint.rl.tasks import check_task


def model_of(config: TrainConfig) -> Path:
    """The checkpoint that a run starts from. Raises UsageError if there is none."""
    if config.model.startswith("tiny:"):
        return tiny_model(config.model.removeprefix("tiny:"), config.task)
    return resolve_model(config.model)


def train_one(config: TrainConfig) -> None:
    """Make or resume one run in this process. Raises UsageError and MeasurementError."""
    check_task(config.task)
    RunDirectory(config.directory, config)
    _prepare_for_trl()
    from tripoint.rl.grpo import train

    train(config, model_of(config))


def plan_all(configs: Sequence[TrainConfig]) -> Iterator[list[str]]:
    """`tripoint.rl.plan.plan` of each run."""
    _prepare_for_trl()
    from tripoint.rl.plan import plan

    return map(plan, configs)


def _prepare_for_trl() -> None:
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
    _prepare_for_trl()
    check_task(configs[0].task)
    if ray is None:
        model_of(configs[0])  # a tiny model is warmed up once, before its runs start
        with ThreadPoolExecutor(workers) as pool:
            futures = {pool.submit(_train_apart, config, path): config for config in configs}
            for future in as_completed(futures):
                yield futures[future], future.result()
    else:
        yield from _on_ray(configs, path, ray)


def _train_apart(config: TrainConfig, path: Path) -> str | None:
    """Make a run in a process of its own, its output in the run's directory; why it failed, None if it did not."""
    command = [sys.executable, "-c", "from tripoint.cli import main; main()", "train", str(path)]
    command += ["--arm", config.arm, "--seed", str(config.seed)]
    log = Path(config.out) / f"{config.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False).returncode
    if code == 0:
        return None
    last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
    return f"exit code {code}, its log {log} ends with: {last}"


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
