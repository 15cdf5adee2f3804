"""One systematic-drift measurement as a config says: `python experiments/drift/run.py experiments/drift/NAME.toml`.

Writes NAME.json next to the config. Every stack's scores are kept under out/drift, by what was computed: an interrupted run
goes on where it stopped, the statistics can be made again without scoring again, and engines that are measured with the same
trainer, tokens and seed share the trainer's scores.
"""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tripoint.drift.attribution import fits, local_errors
from tripoint.drift.dither import Dithering, Replicates, read_weights, untied
from tripoint.drift.estimate import Estimate
from tripoint.drift.neutral import neutral_rollouts
from tripoint.drift.systematic import ODD, measure_systematic
from tripoint.models import resolve_model
from tripoint.schedule import RoundingSchedule
from tripoint.stacks import Stack, open_stack
from tripoint.stacks.hf import HFStack


class Kept(Dithering):
    """Dithering that writes what it scored, and reads what an earlier run had written. `what` is being scored now."""

    directory: Path
    what: str

    def score(self, stack: Stack, seeds: Sequence[int], **options: Any) -> Replicates:
        file = self.directory / f"{self.what}, {len(seeds)} {options.get('how', 'dither')}s.npy"
        if file.exists():
            return Replicates(np.load(file), self.lengths)
        start, cpu = time.time(), time.process_time()
        scored = super().score(stack, seeds, **options)
        np.save(file, scored.values)
        spent = f"{time.time() - start:.0f} s, {time.process_time() - cpu:.0f} CPU s"
        print(f"  {len(seeds)} passes in {spent}, noise {scored.noise_rms():.4f}", flush=True)
        return scored


def scheduled(what: str, schedules: tuple[RoundingSchedule, RoundingSchedule], engine: str) -> str:
    """What a stage scores, by its schedule where it is the trainer, so that no two things have one name."""
    if what.startswith("engine"):
        return f"engine {engine}"
    if "odd" in what:
        return f"trainer {ODD}"
    _, _, moved = what.split(",")[0].removesuffix(" moved").partition(" with ")
    ops: Any = tuple(moved.split("+")) if moved else ()
    return f"trainer {schedules[0].moved(schedules[1], ops)}"


def plain(value: Any) -> Any:
    """Results as JSON values, estimates with their interval."""
    if isinstance(value, Estimate):
        return asdict(value) | {"p": value.p_value}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__ if name not in ("scores", "wild")}
    return value


def main(path: Path) -> None:
    config = tomllib.loads(path.read_text())
    torch.set_num_threads(config.get("threads", 1))
    schedules = RoundingSchedule.parse(config["trainer_schedule"]), RoundingSchedule.parse(config["engine_schedule"])
    with untied(resolve_model(config.get("model"))) as model:
        trainer = open_stack(config.get("trainer", "hf"), model)
        assert isinstance(trainer, HFStack)
        rollouts, source = neutral_rollouts(model, trainer.vocab_size, config["tokens"])
        rollouts = rollouts[config.get("skip", 0) :]
        dithering = Kept(read_weights(model), rollouts)
        dithering.directory = Path("out/drift") / config["scores"]
        dithering.directory.mkdir(parents=True, exist_ok=True)

        @contextmanager
        def stage(what: str, total: int) -> Iterator[Any]:
            print(time.strftime("%H:%M:%S"), what, flush=True)
            dithering.what = scheduled(what, schedules, config["engine"])
            yield lambda done: None

        with open_stack(config["engine"], model) as engine:
            about = {"conditions": engine.conditions(), "versions": engine.versions()}
            result = measure_systematic(
                engine,
                trainer,
                dithering,
                schedules,
                full=config.get("full", True),
                replicates=config["replicates"],
                seed=config["seed"],
                stage=stage,
            )
        candidates = {
            file.name.split(", ")[0].removeprefix("trainer "): Replicates(np.load(file), dithering.lengths)
            for file in sorted(dithering.directory.glob("trainer *dithers.npy"))
        }
        ids = torch.tensor([[*r.prompt_ids, *r.completion_ids] for r in rollouts[:8]])
        local = local_errors(trainer.model, ids, *schedules)
    out = plain(result) | {"wild": np.flatnonzero(result.wild).tolist(), "source": source, "config": config, "engine": about}
    out["fits"] = plain(fits(result.scores["engine"], candidates, ~result.wild, seed=config["seed"]))
    out["local"] = [asdict(error) for error in local]
    path.with_suffix(".json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
