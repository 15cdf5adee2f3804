"""The report of `drift` and `diagnose`: one look for a person, in the terminal or as report.html, and report.json."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tripoint.drift.compare import Aligned, Drift, Side
from tripoint.drift.mismatch import plus_minus

HTML_WIDTH = 120

ROWS = {
    "mean_abs": "mean |dlogp| (nats)",
    "rms": "rms dlogp (nats)",
    "max_abs": "max |dlogp| (nats)",
    "k1": "k1 = -mean dlogp (nats)",
    "k3": "k3 (nats)",
    "ess": "effective sample size",
    "max_ratio": "largest importance ratio",
    "exact_fraction": "tokens exactly equal",
    "rollout_probs_diff_mean": "verl rollout_probs_diff_mean",
    "rollout_probs_diff_max": "verl rollout_probs_diff_max",
    "token_mult_prob_error": "NeMo-RL token_mult_prob_error",
}


def render(drift: Drift, *, detailed: bool) -> RenderableType:
    """The report. `detailed` (`diagnose`) adds what alignment changed and under which conditions it was measured."""
    parts: list[RenderableType] = [_header(drift), _mismatch_table(drift)]
    if detailed:
        if drift.aligned is not None:
            parts.append(_alignment_table(drift.aligned))
        parts += [_conditions("engine", drift.engine), _conditions("trainer", drift.trainer)]
        parts.append(Text("seconds: " + ", ".join(f"{what} {spent:.0f}" for what, spent in drift.seconds.items())))
    parts += [Text(), Text(drift.summary, style="bold")]
    return Group(*parts)


def write_report(drift: Drift, directory: Path) -> list[Path]:
    """Write report.json and report.html into `directory`, which is made if need be. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_html = directory / "report.json", directory / "report.html"
    as_json.write_text(to_json(drift) + "\n", encoding="utf-8")
    console = Console(record=True, width=HTML_WIDTH, quiet=True)
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
    table = Table(title="trainer against engine, dlogp = logp_trainer - logp_engine, ± standard error", title_justify="left")
    table.add_column()
    table.add_column("before" if drift.aligned else "mismatch", justify="right")
    if drift.aligned:
        table.add_column("aligned", justify="right")
        table.add_column("change", justify="right")
    for name, label in ROWS.items():
        cells = [plus_minus(asdict(drift.before.mismatch)[name], drift.before.stderr[name])]
        if drift.aligned:
            after, change = drift.aligned.measured, drift.aligned.change[name]
            cells += [plus_minus(asdict(after.mismatch)[name], after.stderr[name]), plus_minus(change.value, change.stderr)]
        table.add_row(label, *cells)
    return table


def _alignment_table(aligned: Aligned) -> Table:
    before, after = aligned.alignment.before, aligned.alignment.schedule
    table = Table(title=f"what alignment changed: {before} -> {after}", title_justify="left")
    for heading in ("operation", "before", "after"):
        table.add_column(heading)
    table.add_column("sites", justify="right")
    for row in aligned.ops():
        unchanged = row["before"] == row["after"]
        table.add_row(row["op"], row["before"], row["after"], str(row["sites"]), style="dim" if unchanged else "")
    for note in aligned.alignment.notes:
        table.caption = f"{table.caption or ''}\nnote: {note}".strip()
    return table


def _conditions(who: str, side: Side) -> Text:
    words = [f"{package} {version}" for package, version in side.versions.items()]
    words += [f"{name} {value}" for name, value in side.conditions.items()]
    return Text(f"{who}: {', '.join(words) or 'recorded, conditions unknown'}", style="dim")
