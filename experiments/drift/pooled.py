"""smollm2-emulated and smollm2-emulated-more as one measurement of 4,000 tokens: `python experiments/drift/pooled.py`.
Run both first. Writes pooled.json.

A dither of the first 2,000 tokens is not that of the others, which share nothing through it then; the errors see that.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tripoint.drift.dither import Replicates
from tripoint.drift.estimate import Systematic, systematic
from tripoint.drift.expectation import steady
from tripoint.drift.systematic import ODD

SCORES = Path("out/drift")
LENGTHS = (100,) * 40


def pooled(what: str, count: int) -> Replicates:
    files = [SCORES / part / f"{what}, {count} dithers.npy" for part in ("smollm2", "smollm2-more")]
    return Replicates(np.concatenate([np.load(file) for file in files], axis=1), LENGTHS)


def main() -> None:
    engine, trainer = pooled("engine emulated:R3 S3 N3", 8), pooled("trainer R1 S1 N1", 16)
    aligned, odd = pooled("trainer R3 S3 N3", 8), pooled(f"trainer {ODD}", 8)
    kept = steady([engine, trainer, aligned])
    joint = Systematic(engine, {"before": trainer, "aligned": aligned}, tokens=kept)
    halves = [Replicates(trainer.values[part::2], LENGTHS) for part in (0, 1)]
    estimates = {
        "total": joint.combine({"before": 1.0}),
        "aligned": joint.combine({"aligned": 1.0}),
        "removed": joint.combine({"before": 1.0, "aligned": -1.0}),
        "control_zero": systematic(*halves, tokens=kept),
        "control_odd": systematic(trainer, odd, tokens=kept),
    }
    out = {name: asdict(e) | {"p": e.p_value, "sigmas": e.value / e.stderr} for name, e in estimates.items()}
    print(json.dumps(out, indent=1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
