"""The run directory: what a run was asked, on what it ran, and one record per step, whatever kills it in between.

    config.toml               the run's settings
    about.json                target, schedules, fingerprints; versions and conditions of every session (start or resumption)
    steps/000001.parquet      one row: what was watched at that step
    rollouts/000001.parquet   one row per completion of that step; readable as the stack `rollouts:FILE`
    checkpoints/checkpoint-N  of the trainer; complete if it holds a file `complete`

A step's files appear whole or not at all and are named by the step. Resuming removes those after the last complete checkpoint,
so that each step is recorded exactly once.
"""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from tripoint.errors import UsageError
from tripoint.rl.config import TrainConfig

WATCHED: dict[str, str] = {
    "step": "int64",
    "reward": "float64",
    "reward_std": "float64",
    "entropy": "float64",
    "grad_norm": "float64",
    "loss": "float64",
    "length": "float64",
    "truncated": "float64",
    "tokens": "int64",
    "k1": "float64",
    "k3": "float64",
    "ess": "float64",
    "max_ratio": "float64",
    "max_abs": "float64",
    "weights": "string",
    "overflows": "int64",
    "loss_scale": "float64",
    "systematic_rms": "float64",
    "systematic_variance": "float64",
    "systematic_stderr": "float64",
    "gradient_bias": "float64",
    "gradient_bias_systematic": "float64",
    "gradient_bias_stderr": "float64",
    "rollout_seconds": "float64",
    "seconds": "float64",
}
"""The columns of a step's record, with their Arrow types. Null where nothing was measured.

`reward`, `reward_std`, `entropy` (nats per token), `grad_norm`, `loss`, `length` (tokens), `truncated` (share): TRL's.
`tokens`: those that the loss sees, of all completions. `k1`, `k3`, `ess`, `max_ratio`, `max_abs`: of
d = logp_trainer - logp_engine on these tokens, before the update. `weights`: a checksum of what the engine sampled with.
`overflows`: skipped updates so far, and `loss_scale`, with FP16.
`systematic_*` (nats, nats squared), `gradient_bias*` (relative to the gradient's norm): see `tripoint.drift`.
`rollout_seconds`, `seconds`: of the rollouts with the weight sync, and of the whole step.
"""


UNFINISHED = ".unfinished"
"""The suffix of a file until it is whole."""


class RunDirectory:
    """The records of one run, new or to be continued."""

    def __init__(self, path: Path, config: TrainConfig) -> None:
        """Reads only. Raises UsageError if `path` holds a run with other settings, or something else, or cannot be read."""
        self.path, self._config = path, config
        self._steps, self._rollouts, self.checkpoints = path / "steps", path / "rollouts", path / "checkpoints"
        self._settings, self._finished = path / "config.toml", path / "finished"
        with usable(path):
            began = self._settings.exists()
            settings = self._settings.read_bytes() if began else b""
            # A run that was killed while it wrote its settings left nothing but those.
            others = not began and path.exists() and any(entry.suffix != UNFINISHED for entry in path.iterdir())
        if began:
            try:
                before = tomllib.loads(settings.decode())
            except ValueError as error:  # no TOML, or not UTF-8
                raise UsageError(f"{self._settings} is damaged: {error}; give another `out`") from None
            now = config.to_dict()
            if differ := [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]:
                key = differ[0]
                raise UsageError(
                    f"{path} holds a run with {key}={before.get(key)!r}, not {now.get(key)!r}: "
                    "give another `out`, or remove that directory to begin anew"
                )
        elif others:
            raise UsageError(f"{path} holds something else than a run: give another `out`")

    def begin(self) -> Path | None:
        """Make the directory ready to be written to: whatever came after the last complete checkpoint is removed, of recorded
        steps with a line on stderr. Returns that checkpoint, None if there is none. A finished run stays as it is, whatever
        became of its checkpoints. Raises UsageError if it cannot be written."""
        if self.finished:
            return None
        with usable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # First, since it is what tells the directory of a run from others.
            _write_whole(self._settings, tomli_w.dumps(self._config.to_dict()).encode())
            for directory in (self._steps, self._rollouts, self.checkpoints):
                directory.mkdir(exist_ok=True)
        complete = 0
        for directory in self.checkpoints.glob("checkpoint-*"):
            if (directory / "complete").exists():
                complete = max(complete, _number(directory))
            else:
                shutil.rmtree(directory)
        recorded = [int(record.stem) for record in self._steps.glob("*.parquet")]
        if lost := sum(step > complete for step in recorded):
            print(f"{self.path}: {lost} steps after its last checkpoint are made anew", file=sys.stderr, flush=True)
        for record in [*self._steps.iterdir(), *self._rollouts.iterdir()]:
            if record.suffix != ".parquet" or int(record.stem) > complete:
                record.unlink()
        return self.checkpoints / f"checkpoint-{complete}" if complete else None

    def mark_complete(self, step: int) -> None:
        """To be called once the checkpoint of `step` is written."""
        (self.checkpoints / f"checkpoint-{step}" / "complete").touch()
        if step == self._config.steps:
            self._finished.touch()

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end, with the checkpoint of its last step."""
        return self._finished.exists()

    def write(self, record: Mapping[str, Any], rollouts: Mapping[str, Sequence[Any]]) -> None:
        """Keep one step: `record` with columns of `WATCHED`, and its completions, column by column."""
        import pyarrow as pa

        schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in WATCHED.items()])
        name = f"{record['step']:06}.parquet"
        # The step's own file last: where it is, the rollouts are.
        _write_parquet(self._rollouts / name, pa.table(dict(rollouts)))
        _write_parquet(self._steps / name, pa.Table.from_pylist([dict(record)], schema=schema))

    def steps(self) -> list[dict[str, Any]]:
        """Every record, in order."""
        import pyarrow.parquet as pq

        return [row for file in sorted(self._steps.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]

    @property
    def about(self) -> dict[str, Any]:
        """What about.json holds; empty for a new run."""
        path = self.path / "about.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def write_about(self, about: Mapping[str, Any]) -> None:
        _write_whole(self.path / "about.json", json.dumps(about, indent=2).encode())


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turns what keeps us from reading or writing `path` into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be used: {error.strerror}; give another `out`") from None


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _write_parquet(path: Path, table: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    _write_whole(path, sink.getvalue())


def _write_whole(path: Path, content: Any) -> None:
    unfinished = path.with_suffix(UNFINISHED)
    unfinished.write_bytes(content)
    unfinished.rename(path)
