"""Pairwise covering arrays: few combinations in which every two values of two factors that can meet do meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], can_exist: Callable[[Row], bool], seed: int = 0) -> list[Row]:
    """Rows, one value per factor, for which `can_exist` holds. Pairs that no random row shows are taken for impossible."""
    rng = random.Random(seed)
    drawn = [{name: rng.choice(values) for name, values in factors.items()} for _ in range(20000)]
    pool = [row for row in drawn if can_exist(row)]
    left = set().union(*map(_pairs, pool))
    rows: list[Row] = []
    while left:
        best = max(rng.sample(pool, min(len(pool), 300)), key=lambda row: len(_pairs(row) & left))
        if not _pairs(best) & left:
            best = next(row for row in pool if _pairs(row) & left)
        rows.append(best)
        left -= _pairs(best)
    return rows


def _pairs(row: Row) -> set[tuple[str, Any, str, Any]]:
    return {(a, row[a], b, row[b]) for a, b in combinations(row, 2)}
