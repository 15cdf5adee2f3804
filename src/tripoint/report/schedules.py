"""The report of `diff`: the fields in which two schedules differ, with what each value does, in words."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tripoint.profiles import Target
from tripoint.schedule import Difference, diff, value_text

MEANING: dict[str, dict[object, str]] = {
    "rope.table": {"bf16": "cos and sin are rounded before use", "fp32": "cos and sin stay FP32"},
    "rope.compute": {
        "bf16": "both products and their sum are rounded",
        "bf16_fma": "the sin product is rounded, the cos product is fused into the sum",
        "fp32": "only the result is rounded",
    },
    "rope.angle": {
        "pos*inv": "position times inverse frequency",
        "pos/timescale": "position divided by a time scale",
        "exp2": "inverse frequency from exp2",
        "powscale": "a running product of powers of the scale",
    },
    "swiglu.silu_round": {True: "the activated gate is rounded before the product", False: "only the product is rounded"},
    "swiglu.sig": {"fp32": "the sigmoid is computed in FP32", "bf16": "every step of the sigmoid is rounded"},
    "sum_round": {
        "before_var": "variance and normalisation see the rounded residual sum",
        "after_var": "the variance sees the FP32 sum, the normalisation the rounded one",
        "never": "variance and normalisation see the FP32 residual sum",
    },
    "norm_round": {
        True: "the normalised value is rounded before the weight",
        False: "the normalised value stays FP32 up to the weight",
    },
    "out_round": {True: "the QK-norm's output is rounded before RoPE", False: "the QK-norm's output enters RoPE in FP32"},
    "cast": {"rne": "rounds to nearest even", "rtz": "rounds toward zero (truncates)"},
    "carry": {
        "bf16": "every residual sum is rounded before the next add",
        "layer": "the residual sum stays FP32 inside a layer and is rounded at its end",
        "fp32": "the residual sum stays FP32 over the whole depth",
    },
}


def meaning(field: str, value: object) -> str:
    """What it does that `field` (dotted, as in `Difference.field`) has this value."""
    if isinstance(value, tuple):
        return f"the residual sum is rounded after adds {list(value)} only"
    if field == "carry" and isinstance(value, int):
        return f"the residual sum is rounded after every {value} adds"
    return (MEANING.get(field) or MEANING[field.rpartition(".")[2]])[value]


def diff_dict(left: Target, right: Target) -> dict[str, Any]:
    """The JSON of `diff`."""
    return {
        **{
            side: {"target": target.name, "code": str(target.schedule), "detail": target.detail}
            for side, target in (("left", left), ("right", right))
        },
        "distance": len(found := diff(left.schedule, right.schedule)),
        "differences": [_difference_dict(difference) for difference in found],
    }


def _difference_dict(difference: Difference) -> dict[str, Any]:
    return {
        "field": difference.field,
        "left": difference.left,
        "right": difference.right,
        "left_means": meaning(difference.field, difference.left),
        "right_means": meaning(difference.field, difference.right),
    }


def render_diff(left: Target, right: Target) -> RenderableType:
    head = Text(f"left   {left.name}: {left.detail}\nright  {right.name}: {right.detail}\n")
    found = diff(left.schedule, right.schedule)
    if not found:
        return Group(head, Text("They round at the same points."))
    # The norm sites mostly differ in the same way: they share a row.
    rows: dict[tuple[str, ...], list[str]] = {}
    for difference in found:
        sides = (difference.left, difference.right)
        cells = tuple(f"{value_text(side)}: {meaning(difference.field, side)}" for side in sides)
        rows.setdefault(cells, []).append(difference.field)
    table = Table("field", "left", "right", show_lines=True)
    table.columns[0].no_wrap = True
    for cells, names in rows.items():
        table.add_row("\n".join(names), *cells)
    return Group(head, table)
