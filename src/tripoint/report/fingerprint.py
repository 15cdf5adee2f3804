"""The reports of `fingerprint` and `check`: where a stack rounds, in words, and what changed since a saved fingerprint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tripoint.canary import Fingerprint
from tripoint.errors import MeasurementError
from tripoint.report.schedules import meaning
from tripoint.schedule import value_text


def render_fingerprint(found: Fingerprint) -> RenderableType:
    """The verdict, every field with what its value does, findings, and the conditions it was measured under."""
    table = Table("field", "value", "which means", box=SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    # The sites of a norm mostly agree: fields of one meaning share a row.
    rows: dict[tuple[str, object], list[str]] = {}
    for name, value in found.fields.items():
        rows.setdefault((name.rpartition(".")[2], value), []).append(name)
    for names in rows.values():
        value = found.fields[names[0]]
        table.add_row("\n".join(names), value_text(value), meaning(names[0], value))
    for name in found.undetermined:
        table.add_row(name, "?", "not determined", style="yellow")
    versions = ", ".join(f"{package} {version}" for package, version in found.versions.items())
    conditions = ", ".join(f"{name} {value}" for name, value in found.conditions.items())
    return Group(
        Text(f"{found.stack} rounds as  {found.code or 'no known schedule (see below)'}", style="bold"),
        table,
        *(Text(f"found: {finding}", style="yellow") for finding in found.findings),
        *(Text(f"note: {note}", style="dim") for note in found.notes),
        Text(f"measured in {found.seconds:.1f} s with {versions or 'unknown versions'}; {conditions}", style="dim"),
    )


@dataclass(frozen=True)
class Change:
    """A field that a stack answers otherwise than when its fingerprint was saved."""

    field: str
    was: object
    now: object


def changes(saved: Fingerprint, now: Fingerprint) -> list[Change]:
    """The fields whose values differ. Raises MeasurementError if a field that is saved could not be determined now.

    QK-norm fields count where both have them: a saved fingerprint may be of a model without QK-norm.
    """
    lost = [name for name in saved.fields if name in now.undetermined]
    if lost:
        raise MeasurementError(
            f"stack `{now.stack}`: could not determine {', '.join(lost)}; {'; '.join(now.findings) or 'no finding says why'}"
        )
    return [
        Change(name, value, now.fields[name])
        for name, value in saved.fields.items()
        if name in now.fields and now.fields[name] != value
    ]


def check_dict(saved: Fingerprint, now: Fingerprint, changed: list[Change]) -> dict[str, Any]:
    """The JSON of `check`."""
    return {
        "stack": now.stack,
        "code": now.code,
        "saved": {"stack": saved.stack, "code": saved.code, "versions": saved.versions},
        "changed": [vars(change) for change in changed],
        "conditions_changed": {
            name: {"was": saved.conditions[name], "now": value}
            for name, value in now.conditions.items()
            if name in saved.conditions and saved.conditions[name] != value
        },
        "findings": list(now.findings),
        "versions": now.versions,
        "seconds": round(now.seconds, 1),
    }


def render_check(saved: Fingerprint, now: Fingerprint, changed: list[Change]) -> RenderableType:
    report = check_dict(saved, now, changed)
    parts: list[RenderableType] = [Text(f"saved  {saved.stack}: {saved.code}\nnow    {now.stack}: {now.code}")]
    if changed:
        table = Table("field", "was", "is now", show_lines=True)
        table.columns[0].no_wrap = True
        for change in changed:
            sides = (f"{value_text(value)}: {meaning(change.field, value)}" for value in (change.was, change.now))
            table.add_row(change.field, *sides)
        parts.append(table)
    parts += [
        Text(f"condition changed: {name} was {values['was']}, is now {values['now']}", style="dim")
        for name, values in report["conditions_changed"].items()
    ]
    parts += [Text(f"found: {finding}", style="yellow") for finding in now.findings]
    verdict = f"{len(changed)} fields changed: the engine's rounding is another one." if changed else "It rounds as it did."
    return Group(*parts, Text(verdict, style="bold"))
