"""Causes that are not rounding, on blinded made data: `python experiments/drift/blinded.py`. Writes blinded.json.

Tiny engines with real rounding drift (R3 S3 N3 against transformers), one made fault or two, or none (tests/made_cases.py).
What was made is drawn from a seed, `find_causes` sees the rollouts and the trainer only, and its answer is written down before
the two are compared.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import made_cases
from tripoint.drift.dither import Dithering, read_weights, seeds
from tripoint.drift.expectation import NoiseOnly, noise_only
from tripoint.drift.findings import find_causes
from tripoint.drift.systematic import aligned
from tripoint.schedule import RoundingSchedule
from tripoint.stacks import Rollout
from tripoint.stacks.hf import HFStack

CLEAN, EACH = 200, 5
# Other weights and other tokens leave nothing to find a second cause in.
DROWNING = ("weights", "tokenizer")
# Faults that set one and the same thing, or whose recorded values would be minus infinity.
EXCLUSIVE = {
    ("temperature", "sampling_temperature"),
    ("truncation", "sampling_truncation"),
    ("sampling_temperature", "truncation"),
}


def expectation(model: Any, rollouts: list[Rollout]) -> NoiseOnly:
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        stack, dithering = HFStack(Path(directory)), Dithering(read_weights(Path(directory)), rollouts)
        trainer = dithering.score(stack, seeds(0, "trainer", 3))
        with aligned(stack, RoundingSchedule.parse(made_cases.ENGINE)):
            return noise_only(trainer, dithering.score(stack, seeds(0, "engine", 3)))


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(20261130)
    names = list(made_cases.CASES)
    pairs = [pair for pair in combinations(names, 2) if not set(pair) & set(DROWNING) and pair not in EXCLUSIVE]
    made = [()] * CLEAN + [(name,) for name in names for _ in range(EACH)]
    made += pairs
    rows = []
    for number, index in enumerate(rng.permutation(len(made))):
        seed = 20_000 + number
        model = made_cases.trainer_model(seed)
        rollouts, about = made_cases.rollouts(model, made[index], seed)
        findings = find_causes(model, rollouts, expectation(model, rollouts), bos=made_cases.BOS)
        causes = [finding.cause for finding in findings if not finding.rounding]
        rows.append({"made": made[index], "about": about, "found": causes})
        print(number, json.dumps(rows[-1]), flush=True)
    right = Counter(tuple(row["made"]) for row in rows if set(row["made"]) == set(row["found"]))
    total = Counter(tuple(row["made"]) for row in rows)
    summary = {
        "clean": total[()],
        "false_alarms": total[()] - right[()],
        "single": {name: f"{right[(name,)]}/{total[(name,)]}" for name in names},
        "pairs": f"{sum(right[pair] for pair in pairs)}/{sum(total[pair] for pair in pairs)}",
        "pairs_with_both_named": sum(len(r["made"]) == 2 and set(r["made"]) <= set(r["found"]) for r in rows),
        "wrong": [row for row in rows if set(row["made"]) != set(row["found"])],
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
