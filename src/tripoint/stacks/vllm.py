"""vLLM, the engine: `vllm` compiles as it does by default, `vllm:eager` runs with `enforce_eager`.

vLLM owns global state and may die, so it lives in a process of its own (`vllm_worker`), which is killed with all it started
when the stack is closed, when its start is interrupted, and when this process goes away. Its output is kept in a log file.

Scoring asks for the prompt log-probabilities of prompt + completion. vLLM batches sequences without padding, and which of them
share a step is its scheduler's choice.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from safetensors import safe_open
from safetensors.torch import save_file

from tripoint.errors import MeasurementError, UsageError
from tripoint.models import weight_files, writable_cache
from tripoint.stacks.base import EngineOptions, Progress, Rollout, Stack, end_tokens, vocab_size

LOG_TAIL = 15
KEPT_LOGS = 20
ENVIRONMENT = {  # set unless the user did
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less that can hang
    "HF_HUB_OFFLINE": "1",  # the checkpoint is a directory
}


class VllmStack(Stack):
    """A running vLLM engine. `log` is the file that holds its output."""

    log: Path

    def __init__(self, model: Path, *, eager: bool = False, options: EngineOptions) -> None:
        """Start vLLM on the checkpoint in directory `model`, which takes from 10 seconds (eager) to a few minutes (compiled).

        Raises UsageError if vLLM is not installed, a file of weights is missing or damaged, or the log cannot be written;
        MeasurementError (with the end of the log) if it does not start.
        """
        if importlib.util.find_spec("vllm") is None:
            raise UsageError("stack `vllm` is not installed here: `pip install 'tripoint[vllm]'`")
        self.name = "vllm:eager" if eager else "vllm"
        config = json.loads((model / "config.json").read_text())
        self.vocab_size = vocab_size(model)
        self._end_tokens = list(end_tokens(model))
        self._shapes = _checkpoint_shapes(model)
        self._tied = bool(config.get("tie_word_embeddings"))
        self._dtype = getattr(torch, options.dtype)
        if self._tied:
            self._shapes.pop("lm_head.weight", None)  # some checkpoints hold it all the same
        # One token more than anybody may use: scoring a full-length sequence still has to generate a token.
        self.max_tokens = min(options.max_model_len or 4096, config["max_position_embeddings"] - 1)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._launch()
            arguments = {
                "model": str(model),
                "dtype": options.dtype,
                "enforce_eager": eager,
                "max_model_len": self.max_tokens + 1,
                "max_num_seqs": options.max_num_seqs,
                "tensor_parallel_size": options.tensor_parallel_size,
                "gpu_memory_utilization": options.gpu_memory_utilization,
                "enable_prefix_caching": False,  # cached prefixes would have been computed in another batch
                "logprobs_mode": "raw_logprobs",
                "generation_config": "vllm",  # its own defaults, not the checkpoint's
                "skip_tokenizer_init": True,
            }
            about = self._start(arguments)
        except BaseException:  # Ctrl-C included
            self.close()
            raise
        self._conditions, self._versions = about["conditions"], about["versions"]

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        seed: int,
        temperature: float = 1.0,
        progress: Progress | None = None,
    ) -> list[Rollout]:
        self._check(prompts)
        self._check_lengths(len(prompt) + max_tokens for prompt in prompts)
        completions = self._ask(
            "sample",
            progress,
            prompts=[list(prompt) for prompt in prompts],
            max_tokens=max_tokens,
            seed=seed,
            temperature=temperature,
            end_tokens=self._end_tokens,
        )
        return [Rollout(tuple(prompt), *completion) for prompt, completion in zip(prompts, completions, strict=True)]

    def score(self, rollouts: Sequence[Rollout], *, progress: Progress | None = None) -> list[list[float]]:
        sequences = [[*rollout.prompt_ids, *rollout.completion_ids] for rollout in rollouts]
        self._check(sequences)
        self._check_lengths(map(len, sequences))
        starts = [len(rollout.prompt_ids) for rollout in rollouts]
        scores: list[list[float]] = self._ask("score", progress, sequences=sequences, prompt_lengths=starts)
        return scores

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights_complete = False
        given: set[str] = set()
        # The engine's workers read for themselves, and only when all is there: vLLM would say nothing of weights that were left
        # out, and stop half-way at one it does not know.
        with tempfile.TemporaryDirectory(prefix="tripoint-weights-", dir=self._memory()) as directory:
            for name, tensor in weights:
                if name == "lm_head.weight" and self._tied:
                    continue
                if name not in self._shapes:
                    raise MeasurementError(f"stack `{self.name}`: the model has no weight `{name}`")
                if self._shapes[name] != tuple(tensor.shape):
                    shapes = f"{tuple(tensor.shape)}, the model's {self._shapes[name]}"
                    raise MeasurementError(f"stack `{self.name}`: weight `{name}` is {shapes}")
                file = Path(directory) / f"{len(given):05}.safetensors"
                save_file({name: tensor.detach().to("cpu", self._dtype).contiguous()}, file)
                given.add(name)
            if missing := self._shapes.keys() - given:
                raise MeasurementError(f"stack `{self.name}`: {len(missing)} weights were not given, such as `{min(missing)}`")
            self._ask("load_weights", directory=directory)
        self.weights_complete = True

    def conditions(self) -> dict[str, Any]:
        return dict(self._conditions)

    def versions(self) -> dict[str, str]:
        return dict(self._versions)

    def close(self) -> None:
        if self._process is None:
            return
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self.closed = True

    def _memory(self) -> Path | None:
        """Where files live in memory, if all weights find room there; None where they have to go to the disk."""
        shared = Path("/dev/shm")
        size = self._dtype.itemsize * sum(math.prod(shape) for shape in self._shapes.values())
        return shared if shared.is_dir() and shutil.disk_usage(shared).free > 1.1 * size else None

    def _check_lengths(self, lengths: Iterable[int]) -> None:
        if (longest := max(lengths, default=0)) > self.max_tokens:
            raise UsageError(
                f"a sequence of {longest} tokens does not fit `{self.name}`, started for {self.max_tokens}: "
                "shorten it, or raise max_model_len if the model allows it"
            )

    def _launch(self) -> None:
        logs = writable_cache("logs")
        with suppress(FileNotFoundError):  # somebody else may be at it
            for old in sorted(logs.glob("*.log"), key=lambda log: log.stat().st_mtime)[: 1 - KEPT_LOGS]:
                old.unlink()
        self.log = logs / f"{self.name.replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        self._connection, far_end = Pipe()
        descriptor = far_end.fileno()
        with self.log.open("wb") as log, far_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tripoint.stacks.vllm_worker", str(descriptor), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT | os.environ,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C is ours to handle, and the engine's processes can be killed as one group
            )

    def _start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Start the engine, showing how long that takes and what it last said."""
        console, begun = Console(stderr=True), time.monotonic()
        label = escape(f"starting {self.name}, its log is {self.log}")
        if not console.is_terminal:
            console.print(label, soft_wrap=True)
        with console.status(label) as status:

            def show() -> None:
                said = escape(" ".join(self._log_end(1)))
                status.update(f"{label}: {time.monotonic() - begun:.0f} s [dim]{said}[/dim]")

            about: dict[str, Any] = self._ask("start", arguments=arguments, waiting=show)
        return about

    def _ask(
        self, method: str, progress: Progress | None = None, *, waiting: Callable[[], None] | None = None, **arguments: Any
    ) -> Any:
        """Have the worker do `method` and return what it answers. `waiting` is called four times a second meanwhile."""
        if self._process is None:
            raise MeasurementError(f"stack `{self.name}` has ended: open it again")
        try:
            self._connection.send((method, arguments))
            while True:
                while not self._connection.poll(0.25):
                    if waiting:
                        waiting()
                    if self._process.poll() is not None and not self._connection.poll():
                        raise EOFError
                kind, value = self._connection.recv()
                if kind == "done":
                    return value
                if kind == "failed":
                    break
                if progress:
                    progress(value)
        except (EOFError, OSError) as error:
            self.close()
            raise self._failure(f"died during `{method}`") from error
        except BaseException:  # such as Ctrl-C: the answer is still to come, and would be taken for that to the next question
            self.close()
            raise
        if method != "load_weights":  # which can be repeated, whereas requests left half done would mix with the next ones
            self.close()
        raise self._failure(f"failed during `{method}`: {value}")

    def _failure(self, what: str) -> MeasurementError:
        return MeasurementError(
            "\n".join([f"stack `{self.name}` {what}. The end of its log {self.log}:", *self._log_end(LOG_TAIL)])
        )

    def _log_end(self, lines: int) -> list[str]:
        if not self.log.exists():  # many others have been started since, and theirs are kept
            return []
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 16384))
            return log.read().decode(errors="replace").splitlines()[-lines:]


def _checkpoint_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight in the checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file, names in weight_files(model).items():
        with safe_open(file, framework="numpy") as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in names}
    return shapes
