"""The README's tables from the recorded results: `python experiments/drift/tables.py NAME...`, a column for each NAME.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCALE = 1e4  # variances in 1e-4 nats²
Cell = Callable[[dict[str, Any]], str]


def estimate(found: dict[str, Any] | None) -> str:
    return f"{SCALE * found['value']:.2f} ± {SCALE * found['stderr']:.2f}" if found else ""


def site(op: str) -> Cell:
    def cell(result: dict[str, Any]) -> str:
        sites = {one["op"]: one for one in (result["attribution"] or {"sites": []})["sites"]}
        if op not in sites:
            return "(same)"
        share = sites[op]["share"]
        parts = (estimate(sites[op]["moved_alone"]), estimate(sites[op]["shapley"]))
        return f"{', '.join(parts)} ({share['value']:.0%} ± {share['stderr']:.0%})"

    return cell


ROWS: dict[str, Cell] = {
    "tokens, sequences, K": lambda r: f"{r['tokens']}, {r['sequences']}, {r['replicates']}",
    "rounding noise rms, trainer / engine": lambda r: f"{r['noise_rms']['trainer']:.3f} / {r['noise_rms']['engine']:.3f}",
    "systematic": lambda r: estimate(r["total"]),
    "left when aligned": lambda r: estimate(r["aligned"]),
    "removed": lambda r: estimate(r["removed"]),
    **{f"{op}: alone, Shapley (share)": site(op) for op in ("rope", "swiglu", "norm")},
    "interaction": lambda r: estimate((r["attribution"] or {}).get("interaction")),
    "systematic, by permutations": lambda r: estimate((r["ranged"] or {}).get("permutation")),
    "left when aligned, by permutations": lambda r: estimate((r["ranged"] or {}).get("left")),
    "control, trainer against itself": lambda r: estimate(r["controls"]["zero"]),
    "control, odd schedule": lambda r: estimate(r["controls"]["positive"]),
}


def main(names: list[str]) -> None:
    results = [json.loads(Path(__file__).with_name(f"{name}.json").read_text()) for name in names]
    print(f"| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for label, cell in ROWS.items():
        print(f"| {label} | {' | '.join(map(cell, results))} |")
    for name, result in zip(names, results, strict=True):
        print(f"\n| {name}, fits as | variance | above the best |\n|---|---|---|")
        for fit in result["fits"]:
            print(f"| {fit['candidate']} | {estimate(fit['variance'])} | {estimate(fit['above_best'])} |")


if __name__ == "__main__":
    main(sys.argv[1:])
