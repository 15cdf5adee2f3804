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
    """A field that is another one than when the fingerprint was saved; None where it was or is not determined."""

    field: str
    was: object
    now: object


@dataclass(frozen=True)
class Changes:
    """What a stack answers otherwise than when its fingerprint was saved; false if it is nothing.

    `appeared` and `gone` are findings of now and of then only; `answers` names the questions whose answers are others.
    """

    fields: tuple[Change, ...]
    appeared: tuple[str, ...]
    gone: tuple[str, ...]
    answers: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.fields or self.appeared or self.gone or self.answers)


def changes(saved: Fingerprint, now: Fingerprint) -> Changes:
    """What changed. Of two fingerprints that were asked the same questions everything is compared, down to the answers that fit
    no known rounding: a stack that is only known to be unknown can be checked too.

    Raises MeasurementError where the questions were others (another version of Tripoint wrote the file), no field tells a
    change, and not all was settled then and now.
    """
    was, is_now = (found.fields if found.schedule is None else found.schedule.flat for found in (saved, now))
    same_questions = saved.questions == now.questions
    names = dict.fromkeys([*was, *is_now]) if same_questions else [name for name in was if name in is_now]
    found = Changes(
        fields=tuple(Change(name, was.get(name), is_now.get(name)) for name in names if was.get(name) != is_now.get(name)),
        appeared=tuple(finding for finding in now.findings if finding not in saved.findings),
        gone=tuple(finding for finding in saved.findings if finding not in now.findings),
        answers=tuple(
            f"{then['subject']} ({then['place']})"
            for then, again in zip(saved.answers, now.answers, strict=False)
            if same_questions and then != again
        ),
    )
    if not same_questions and not found.fields and (None in (saved.schedule, now.schedule) or found):
        open_then, open_now = (", ".join([*f.undetermined, *f.findings]) or "nothing" for f in (saved, now))
        raise MeasurementError(
            f"stack `{now.stack}` cannot be compared with a fingerprint that other questions gave, unless all is settled (open "
            f"then: {open_then}; now: {open_now}): save it anew with the engine as it was"
        )
    return found


def check_dict(saved: Fingerprint, now: Fingerprint, changed: Changes) -> dict[str, Any]:
    """The JSON of `check`."""
    return {
        "stack": now.stack,
        "code": now.code,
        "saved": {"stack": saved.stack, "code": saved.code, "versions": saved.versions},
        "changed": [vars(change) for change in changed.fields],
        "findings_appeared": list(changed.appeared),
        "findings_gone": list(changed.gone),
        "answers_changed": list(changed.answers),
        "conditions_changed": {
            name: {"was": saved.conditions[name], "now": value}
            for name, value in now.conditions.items()
            if name in saved.conditions and saved.conditions[name] != value
        },
        "findings": list(now.findings),
        "versions": now.versions,
        "seconds": round(now.seconds, 1),
    }


def render_check(saved: Fingerprint, now: Fingerprint, changed: Changes) -> RenderableType:
    report = check_dict(saved, now, changed)
    parts: list[RenderableType] = [
        Text(f"{when}  {found.stack}: {found.code or 'no known schedule'}")
        for when, found in (("saved", saved), ("now  ", now))
    ]
    if changed.fields:
        table = Table("field", "was", "is now", show_lines=True)
        table.columns[0].no_wrap = True
        for change in changed.fields:
            table.add_row(change.field, *(_cell(change.field, value) for value in (change.was, change.now)))
        parts.append(table)
    elif changed.answers:
        parts.append(Text(f"answered otherwise: {', '.join(changed.answers)}"))
    parts += [
        Text(f"condition changed: {name} was {values['was']}, is now {values['now']}", style="dim")
        for name, values in report["conditions_changed"].items()
    ]
    for finding in now.findings:
        how = "found now, and not then" if finding in changed.appeared else "found then and now"
        parts.append(Text(f"{how}: {finding}", style="yellow"))
    parts += [Text(f"found then, and not now: {finding}", style="yellow") for finding in changed.gone]
    return Group(*parts, Text("It does not round as it did." if changed else "It rounds as it did.", style="bold"))


def _cell(field: str, value: object) -> str:
    return "not determined" if value is None else f"{value_text(value)}: {meaning(field, value)}"
