"""What a dithered pass costs next to a plain forward pass: `python experiments/drift/cost.py TOKENS PASSES`.

CPU seconds of one thread on SmolLM2-135M, the two in turn; plain passes in the same batches, with nothing but the log-softmax
of the tokens asked for. Writes cost.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from tripoint.drift.dither import Dithering, read_weights, seeds, untied
from tripoint.drift.neutral import neutral_rollouts
from tripoint.models import resolve_model
from tripoint.stacks.hf import BATCH_TOKENS, HFStack

TURNS = 2


@torch.no_grad()
def plain(stack: HFStack, ids: torch.Tensor) -> None:
    for batch in ids.split(max(1, BATCH_TOKENS // ids.shape[1])):
        logits = stack.model(input_ids=batch, use_cache=False).logits
        for row, tokens in zip(logits, batch, strict=True):
            row[:-1].float().log_softmax(-1).gather(-1, tokens[1:, None])


def main(tokens: int, passes: int) -> None:
    torch.set_num_threads(1)
    with untied(resolve_model()) as model:
        stack = HFStack(model)
        rollouts, _ = neutral_rollouts(model, stack.vocab_size, tokens)
        dithering = Dithering(read_weights(model), rollouts)
        ids = torch.tensor([[*r.prompt_ids, *r.completion_ids] for r in rollouts])
        plain(stack, ids)
        spent = {"plain": 0.0, "dithered": 0.0}
        for turn in range(TURNS):
            for what in spent:
                start = time.process_time()
                if what == "plain":
                    for _ in range(passes):
                        plain(stack, ids)
                else:
                    dithering.score(stack, seeds(turn, "cost", passes))
                spent[what] += time.process_time() - start
    out = {name: seconds / passes / TURNS for name, seconds in spent.items()} | {"tokens": tokens, "passes": passes}
    out["ratio"] = spent["dithered"] / spent["plain"]
    print(json.dumps(out))
    Path(__file__).with_suffix(".json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
