"""Whether 95 % intervals contain the truth: `python experiments/drift/coverage.py`. Writes coverage.json.

A tiny random llama, its systematic variance known from many dithers of many sequences. Then 200 measurements as a user makes
them, each with dithers and sequences of its own, and the count of those whose interval contains it; for schedules that are
equal, and for the whole distance between transformers and R3 S3 N3 and its parts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from tiny import VOCABULARY, tiny
from tripoint.drift.dither import Dithering, Replicates, read_weights, seeds
from tripoint.drift.estimate import systematic
from tripoint.drift.systematic import aligned
from tripoint.schedule import RoundingSchedule
from tripoint.stacks import Rollout
from tripoint.stacks.hf import HFStack

REPETITIONS, REPLICATES, SEQUENCES, LENGTH = 200, 8, 24, 16
MANY_REPLICATES, MANY_SEQUENCES = 256, 512
TRAINER, OTHERS = "R1 S1 N1", ("R1 S1 N1", "R3 S1 N1", "R1 S3 N1", "R1 S1 N3", "R3 S3 N3")


def rollouts(seed: int, count: int) -> list[Rollout]:
    ids = np.random.default_rng(seed).integers(VOCABULARY, size=(count, LENGTH + 1)).tolist()
    return [Rollout((row[0],), tuple(row[1:])) for row in ids]


def main() -> None:
    torch.set_num_threads(1)
    out = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tiny("llama", tie_word_embeddings=False, max_position_embeddings=64).save_pretrained(directory)
        stack, weights = HFStack(directory), read_weights(directory)

        def score(dithering: Dithering, code: str, what: str, count: int) -> Replicates:
            with aligned(stack, RoundingSchedule.parse(code)):
                return dithering.score(stack, seeds(0, f"{what} {code}", count))

        many = Dithering(weights, rollouts(0, MANY_SEQUENCES))
        reference = score(many, TRAINER, "truth, trainer", MANY_REPLICATES)
        truths = {c: systematic(reference, score(many, c, "truth", MANY_REPLICATES)) for c in OTHERS}
        values: dict[str, list[float]] = {code: [] for code in OTHERS}
        hits = dict.fromkeys(OTHERS, 0)
        for repetition in range(REPETITIONS):
            few = Dithering(weights, rollouts(1000 + repetition, SEQUENCES))
            trainer = score(few, TRAINER, f"{repetition}, trainer", REPLICATES)
            for code in OTHERS:
                found = systematic(trainer, score(few, code, f"{repetition}", REPLICATES), seed=repetition)
                # Equal schedules have no distance, whatever the sequences.
                truth = 0.0 if code == TRAINER else truths[code].value
                hits[code] += found.low <= truth <= found.high
                values[code].append(found.value)
        for code in OTHERS:
            out[code] = {
                "truth": truths[code].value,
                "truth_stderr": truths[code].stderr,
                "mean": float(np.mean(values[code])),
                "mean_stderr": float(np.std(values[code], ddof=1) / np.sqrt(REPETITIONS)),
                "coverage": hits[code] / REPETITIONS,
            }
            print(code, json.dumps(out[code]), flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
