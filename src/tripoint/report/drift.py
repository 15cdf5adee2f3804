"""The report of `drift` and `diagnose`: one look for a person, in the terminal or as report.html, and report.json."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tripoint.drift.compare import Aligned, Drift, Side
from tripoint.drift.mismatch import plus_minus

HTML_WIDTH = 120

ROWS = {
    "mean_abs": "mean |dlogp|",
    "rms": "rms dlogp",
    "max_abs": "max |dlogp|",
    "k1": "k1",
    "k3": "k3",
    "ess": "effective sample share",
    "max_ratio": "largest ratio",
    "exact_fraction": "share exactly equal",
    "rollout_probs_diff_mean": "rollout_probs_diff_mean",
    "rollout_probs_diff_max": "rollout_probs_diff_max",
    "token_mult_prob_error": "token_mult_prob_error",
}
LEGEND = (
    "dlogp = logp_trainer - logp_engine in nats, ± standard error; k1 = -mean(dlogp), k3 = mean(exp(dlogp) - 1 - dlogp); "
    "ratio = exp(dlogp); rollout_probs_diff as verl logs it, token_mult_prob_error as NeMo-RL does."
)


def render(drift: Drift, *, detailed: bool) -> RenderableType:
    """The report. `detailed` (`diagnose`) adds what alignment changed and under which conditions it was measured."""
    parts: list[RenderableType] = [_header(drift), _mismatch_table(drift), Text(LEGEND, style="dim")]
    if detailed:
        if drift.aligned is not None:
            parts.append(_alignment_table(drift.aligned))
        parts += [_conditions("engine", drift.engine), _conditions("trainer", drift.trainer)]
        parts.append(Text("seconds: " + ", ".join(f"{what} {spent:.0f}" for what, spent in drift.seconds.items()), style="dim"))
    parts += [Text(), Text(drift.summary, style="bold")]
    return Group(*parts)


def write_report(drift: Drift, directory: Path) -> list[Path]:
    """Write report.json and report.html into `directory`, which is made if need be. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_html = directory / "report.json", directory / "report.html"
    as_json.write_text(to_json(drift) + "\n", encoding="utf-8")
    console = Console(record=True, width=HTML_WIDTH, file=StringIO())
    console.print(render(drift, detailed=True))
    as_html.write_text(console.export_html(inline_styles=True), encoding="utf-8")
    return [as_json, as_html]


def to_json(drift: Drift) -> str:
    return json.dumps(drift.to_dict(), indent=2, allow_nan=False)


def _header(drift: Drift) -> RenderableType:
    lines = [
        f"model    {drift.model}",
        f"engine   {drift.engine.stack}",
        f"trainer  {drift.trainer.stack}",
        f"tokens   {drift.before.tokens} in {drift.before.sequences} sequences, {drift.source}",
    ]
    if drift.aligned is not None:
        target = drift.aligned.alignment.target
        lines.append(f"aligned  to {target.name}: {target.detail}")
    return Text("\n".join(lines))


def _mismatch_table(drift: Drift) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("trainer against engine", no_wrap=True)
    for heading in ("before", "aligned", "change") if drift.aligned else ("mismatch",):
        table.add_column(heading, justify="right")
    for name, label in ROWS.items():
        cells = [(getattr(drift.before.mismatch, name), drift.before.stderr[name])]
        if drift.aligned:
            after, change = drift.aligned.measured, drift.aligned.change[name]
            cells += [(getattr(after.mismatch, name), after.stderr[name]), (change.value, change.stderr)]
        table.add_row(label, *(plus_minus(*cell).replace(" ± ", "±") for cell in cells))  # the table fits 80 columns
    return table


def _alignment_table(aligned: Aligned) -> Table:
    before, after = aligned.alignment.before, aligned.alignment.schedule
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("what alignment changed", str(before), str(after)):
        table.add_column(heading, no_wrap=True)
    table.add_column("sites", justify="right")
    for row in aligned.ops():
        unchanged = row["before"] == row["after"]
        table.add_row(row["op"], row["before"], row["after"], str(row["sites"]), style="dim" if unchanged else "")
    table.caption = "\n".join(aligned.alignment.notes) or None
    return table


def _conditions(who: str, side: Side) -> Text:
    words = [f"{package} {version}" for package, version in side.versions.items()]
    words += [f"{name} {value}" for name, value in side.conditions.items()]
    return Text(f"{who}: {', '.join(words) or 'recorded, conditions unknown'}", style="dim")
