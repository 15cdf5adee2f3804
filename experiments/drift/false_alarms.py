"""How often rounding noise alone is taken for another cause, on recorded scores of a real model.

`python experiments/drift/false_alarms.py`, after the runs of SmolLM2. Draws a replicate of the trainer and one of the engine as
if they were what the two gave the same tokens, judges the expected noise from three others of each, and asks the gate that
every finding about k3 has to pass.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tripoint.drift.dither import Replicates
from tripoint.drift.expectation import noise_only
from tripoint.drift.findings import prefill_against_decode
from tripoint.stacks import Rollout

SCORES = Path("out/drift/smollm2")
ENGINES = ("emulated:R3 S3 N3", "vllm:eager", "vllm")
DRAWS, LENGTHS = 400, (100,) * 20


def main() -> None:
    trainer = np.load(SCORES / "trainer R1 S1 N1, 16 dithers.npy")
    starts = np.cumsum(LENGTHS)[:-1]
    for name in ENGINES:
        engine = np.load(SCORES / f"engine {name}, 8 dithers.npy")
        rng = np.random.default_rng(0)
        alarms = 0
        for _ in range(DRAWS):
            mine, theirs = trainer[rng.permutation(len(trainer))[:4]], engine[rng.permutation(len(engine))[:4]]
            expected = noise_only(Replicates(mine[1:], LENGTHS), Replicates(theirs[1:], LENGTHS))
            rollouts = [Rollout((0,), (0,) * len(row), logprobs=tuple(row)) for row in np.split(theirs[0], starts)]
            scored = np.split(mine[0], starts)
            stack: Any = SimpleNamespace(score=lambda _, scored=scored: scored)
            alarms += bool(prefill_against_decode(stack, rollouts, expected))
        print(f"{name}: {alarms} of {DRAWS}", flush=True)


if __name__ == "__main__":
    main()
