"""Is every schedule read as itself? `python experiments/canary/exhaustive.py codes|covering` asks `emulated:` of all of them.

`codes`: every combination of RoPE and SwiGLU codes with every norm code and carry, on the llama and the qwen3 layout.
`covering`: a pairwise array over codes, angle, casts, norm codes by site, QK-norm, layout, head_dim, gate and RoPE type.

Writes codes.json or covering.json next to it: how many were asked, and each that was not read as exactly itself with nothing
undetermined.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from covering import Row, pairwise
from tripoint.align import align
from tripoint.canary import Canary, CanaryShape, ask, build
from tripoint.errors import UsageError
from tripoint.schedule import RoundingSchedule, diff
from tripoint.stacks.hf import HFStack

ROPE, SWIGLU = ("R1", "R2", "R3", "R4"), ("S1", "S3", "S5")
NORM = [*(("N1", "bf16"), ("N2", "bf16")), *product(("N3", "N4", "N5"), ("bf16", "layer", "fp32"))]
SITES = ("input", "post_attention", "final")
CAST_PLACES = ("rope", "swiglu", *(f"norm.{site}" for site in SITES))
SCALED = {
    "default": {"rope_type": "default", "rope_theta": 2e4},
    "large theta": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 1024},
}  # fmt: skip
FACTORS: dict[str, list[Any]] = {
    "layout": ["llama", "qwen2", "qwen3", "mistral"],
    "head_dim": [32, 64, 80, 128, 256],
    "kv_heads": [1, 2],
    "rope": list(SCALED),
    "tied": [False, True],
    "act": ["silu", "gelu_pytorch_tanh"],
    "R": list(ROPE),
    "S": list(SWIGLU),
    **{f"N.{site}": ["N1", "N2", "N3", "N4", "N5"] for site in SITES},
    "carry": ["bf16", "layer", "fp32", "3", "[2,7]"],
    "angle": ["pos*inv", "pos/timescale", "exp2", "powscale"],
    "qk": ["both", "out", "none", "norm"],
    **{f"cast.{place}": ["rne", "rtz"] for place in (*CAST_PLACES, "norm.qk")},
}


class Asked:
    """A canary held by transformers with our ops, which `emulated:` is; its schedule is changed instead of loading it again."""

    def __init__(self, shape: CanaryShape) -> None:
        self.canary: Canary = build(shape)
        with tempfile.TemporaryDirectory() as directory:
            self.canary.save(Path(directory))
            self.stack = HFStack(Path(directory), device="cpu")

    def mistake(self, schedule: RoundingSchedule) -> str | None:
        """What is wrong about what a stack of this schedule was read as: in batches, decoding, and one by one."""
        aligned = align(self.stack.model, to=schedule)
        try:
            found = ask(self.stack, self.canary)
        finally:
            aligned.undo()
        told = found.code == str(schedule)
        if found.schedule is not None and any(str(schedule.rope.angle) in note for note in found.notes):
            # Another order of the angle that the verdict itself says is not to be told here from the usual one.
            told = not {d.field for d in diff(found.schedule, schedule)} - {"rope.angle"}
        if told and not found.undetermined and not found.findings:
            return None
        return f"read as {found.code}; undetermined {found.undetermined}; {found.findings}"


def codes(qk: str) -> list[RoundingSchedule]:
    return [RoundingSchedule.parse(f"{r} {s} {n} carry={carry}{qk}") for r, s, (n, carry) in product(ROPE, SWIGLU, NORM)]


def schedule_of(row: Row) -> RoundingSchedule:
    places = [*CAST_PLACES, *(["norm.qk"] if row["layout"] == "qwen3" else [])]
    words = [row["R"], row["S"], "N3", *(f"N.{site}={row[f'N.{site}']}" for site in SITES)]
    words += [f"carry={row['carry']}", f"angle={row['angle']}"]
    words += ["cast=" + ",".join(f"{place}:{row[f'cast.{place}']}" for place in places)]
    return RoundingSchedule.parse(" ".join(words + ([f"qk={row['qk']}"] if row["layout"] == "qwen3" else [])))


def can_be_told(row: Row) -> bool:
    """Schedules that exist. A rounded table hides most of the angle, and so can a large theta; scaled RoPE has only one; there
    is no sigmoid in a gelu."""
    try:
        schedule_of(row)
    except UsageError:
        return False
    if row["act"] != "silu" and row["S"] == "S5":
        return False
    return bool(row["angle"] == "pos*inv" or (row["R"] == "R4" and row["rope"] == "default"))


def shape_of(row: Row) -> CanaryShape:
    sizes = {name: row[name] for name in ("head_dim", "kv_heads", "tied", "act")}
    return CanaryShape(architecture=row["layout"], rope=SCALED[row["rope"]], **sizes)


def wrong_codes() -> Iterator[dict[str, str | None]]:
    for layout, qk in (("llama", ""), ("qwen3", " qk=both")):
        stack = Asked(CanaryShape(architecture=layout))
        for schedule in codes(qk):
            yield {"layout": layout, "schedule": str(schedule), "mistake": stack.mistake(schedule)}


def wrong_in_covering() -> Iterator[dict[str, str | None]]:
    for row in pairwise(FACTORS, can_be_told):
        schedule = schedule_of(row)
        yield {"row": str(row), "schedule": str(schedule), "mistake": Asked(shape_of(row)).mistake(schedule)}


def main(part: str) -> None:
    torch.set_num_threads(1)
    start = time.time()
    asked = list({"codes": wrong_codes, "covering": wrong_in_covering}[part]())
    wrong = [one for one in asked if one["mistake"] is not None]
    result = {"asked": len(asked), "wrong": wrong, "seconds": round(time.time() - start)}
    Path(__file__).with_name(f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
