"""How the result depends on what is dithered, and by how much: `python experiments/drift/dithers.py MODEL TOKENS REPLICATES`.

Systematic variance between R1 S1 N1 and R3 S3 N3, both our own ops, with the embeddings dithered by one, two and four ulps, and
with the weights of one layer dithered instead, which leaves the roundings before it as they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tripoint.drift.dither import EMBEDDING, ULP, Dithering, Replicates, read_weights, seeds, untied
from tripoint.drift.estimate import systematic
from tripoint.drift.expectation import steady
from tripoint.drift.neutral import neutral_rollouts
from tripoint.drift.systematic import aligned
from tripoint.models import resolve_model
from tripoint.schedule import RoundingSchedule
from tripoint.stacks.hf import HFStack

SCHEDULES = ("R1 S1 N1", "R3 S3 N3")


def main(model_name: str, tokens: int, replicates: int) -> None:
    torch.set_num_threads(1)
    with untied(resolve_model(model_name)) as model:
        stack = HFStack(model)
        dithering = Dithering(read_weights(model), neutral_rollouts(model, stack.vocab_size, tokens)[0])
        layers = stack.model.config.num_hidden_layers
        matrices = [(EMBEDDING, ULP * factor) for factor in (1, 2, 4)]
        matrices += [(f"model.layers.{layer}.mlp.down_proj.weight", ULP) for layer in (0, layers // 3, 2 * layers // 3)]
        rows = []
        for matrix, amplitude in matrices:
            pair: list[Replicates] = []
            for code in SCHEDULES:
                with aligned(stack, RoundingSchedule.parse(code)):
                    own = seeds(0, f"{code} {matrix} {amplitude}", replicates)
                    pair.append(dithering.score(stack, own, matrix=matrix, amplitude=amplitude))
            estimate = systematic(pair[0], pair[1], tokens=steady(pair))
            row = {
                "matrix": matrix,
                "ulps": amplitude / ULP,
                "noise_rms": [p.noise_rms() for p in pair],
                "variance": estimate.value,
                "stderr": estimate.stderr,
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    Path(__file__).with_name(f"dithers-{Path(model_name).name}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
