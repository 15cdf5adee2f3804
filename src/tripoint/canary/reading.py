"""Reads answers: a fingerprint where they are exactly those that one schedule gives, and what is wrong where they are not.

Nothing here knows how a question was made. A question is settled by the candidates whose expected answers are the observed
ones, every one of them; where there is none, the place is unknown, and never called by the nearest name.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import tomli_w

from tripoint.canary.checkpoint import Canary
from tripoint.canary.questions import Prompt, Question
from tripoint.canary.shape import CanaryShape
from tripoint.errors import UsageError
from tripoint.schedule import Carry, RoundingSchedule

Token = int


@dataclass(frozen=True)
class Observed:
    """The tokens that a stack generated greedily: one for each of `canary.prompts`.

    `decoded`: two for each of `canary.decode_prompts`, asked with their `decode`. `alone`: one for each of those, asked with
    their `tokens` in a batch of its own. None where the stack was not asked so.
    """

    prefill: Sequence[Token]
    decoded: Sequence[Sequence[Token]] | None = None
    alone: Sequence[Token] | None = None


@dataclass(frozen=True)
class Fingerprint:
    """The schedule that a stack was measured to have.

    `fields` holds what is settled, by dotted name; `schedule` is None unless that is everything and can exist. `undetermined`
    names the other fields. `findings` says, one line each, which places fit no known rounding and what disagreed with itself;
    `notes` what has no effect here. `problem` says why the canary could not be read at all.
    `answers` are those of each question as a string of `<`, `=`, `>`, and `?` for a token that is no answer. `shape` and `seed`
    are the canary's; `questions` is a digest of what it asked: answers to other questions cannot be compared.
    """

    stack: str
    fields: dict[str, Any]
    schedule: RoundingSchedule | None
    undetermined: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str | None = None
    answers: tuple[dict[str, str], ...] = ()
    evidence: tuple[dict[str, Any], ...] = ()
    shape: CanaryShape = field(default_factory=CanaryShape)
    seed: int = 0
    questions: str = ""
    conditions: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def code(self) -> str | None:
        """The schedule in one line, None where it is not known."""
        return None if self.schedule is None else str(self.schedule)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `tripoint fingerprint`. Fields that are not settled are null."""
        settled = _nested(self.fields | dict.fromkeys(self.undetermined))
        return {
            "stack": self.stack,
            "code": self.code,
            "schedule": settled if self.schedule is None else self.schedule.to_dict(),
            "undetermined": list(self.undetermined),
            "findings": list(self.findings),
            "notes": list(self.notes),
            "problem": self.problem,
            "answers": list(self.answers),
            "evidence": list(self.evidence),
            "shape": self.shape.to_dict(),
            "seed": self.seed,
            "questions": self.questions,
            "conditions": self.conditions,
            "versions": self.versions,
            "seconds": round(self.seconds, 1),
        }

    def to_toml(self) -> str:
        """As `to_dict`, without the evidence of each prompt; what is null there is left out."""
        return tomli_w.dumps(_without_none({k: v for k, v in self.to_dict().items() if k != "evidence"}))

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """What `to_toml` wrote. Raises UsageError for a file that is none."""
        data = _toml(path)
        if wrong := [name for name, fits in _ENTRIES.items() if name not in data or not fits(data[name])]:
            raise UsageError(
                f"{path}: not a fingerprint (missing or damaged: {', '.join(wrong)}); "
                "save one with `tripoint fingerprint STACK --save`"
            )
        complete = "code" in data
        schedule = RoundingSchedule.from_dict(data["schedule"], where=f"{path}: schedule") if complete else None
        return cls(
            stack=data["stack"],
            fields=dict(schedule.flat) if schedule else _flat(data["schedule"]),
            schedule=schedule,
            undetermined=tuple(data["undetermined"]),
            findings=tuple(data["findings"]),
            notes=tuple(data["notes"]),
            problem=data.get("problem"),
            answers=tuple(data["answers"]),
            shape=CanaryShape.from_dict(data["shape"], where=f"{path}: shape"),
            seed=data["seed"],
            questions=data["questions"],
            conditions=data["conditions"],
            versions=data["versions"],
            seconds=data["seconds"],
        )


def shape_in(path: Path) -> CanaryShape | None:
    """The shape in which the stack was asked whose fingerprint is in this TOML file; None if it holds a bare schedule.

    Raises UsageError for a file that is damaged.
    """
    data = _toml(path)
    return CanaryShape.from_dict(data["shape"], where=f"{path}: shape") if "shape" in data else None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not a TOML file: {error}") from None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _tables_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, dict) and item.keys() == {"subject", "place", "answers"} and _texts([*item.values()]) for item in value
    )


# What a saved fingerprint holds, and whether a value there can be it.
_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "stack": lambda value: isinstance(value, str),
    "schedule": lambda value: isinstance(value, dict),
    "undetermined": _texts,
    "findings": _texts,
    "notes": _texts,
    "answers": _tables_of_texts,
    "shape": lambda value: True,  # which reads itself
    "seed": lambda value: isinstance(value, int),
    "questions": lambda value: isinstance(value, str),
    "conditions": lambda value: isinstance(value, dict),
    "versions": lambda value: isinstance(value, dict),
    "seconds": lambda value: isinstance(value, int | float),
}


def read(canary: Canary, observed: Observed, stack: str = "?") -> Fingerprint:
    """What the answers to a canary say. Pure: it asks nobody."""
    reading = _Reading(canary, observed)
    problem = _problem(canary, reading, observed.prefill)
    if problem is None:
        reading.settle_all()
    schedule = reading.schedule() if problem is None else None
    return Fingerprint(
        stack=stack,
        fields=reading.fields,
        schedule=schedule,
        undetermined=tuple(reading.undetermined),
        findings=tuple(reading.findings),
        notes=tuple(reading.notes),
        problem=problem,
        answers=tuple(
            {"subject": q.subject, "place": q.place, "answers": "".join(_SIGNS[a] for a in reading.prefill(q))}
            for q in canary.questions
        ),
        evidence=tuple(_evidence(canary, observed)),
        shape=canary.shape,
        seed=canary.seed,
        questions=_digest(canary),
    )


_SIGNS: dict[int | None, str] = {-1: "<", 0: "=", 1: ">", None: "?"}


class _Reading:
    """Settles the questions of one canary one after the other, collecting fields and findings."""

    def __init__(self, canary: Canary, observed: Observed) -> None:
        self.canary = canary
        self.fields: dict[str, Any] = {}
        self.undetermined: list[str] = []
        self.findings: list[str] = []
        self.notes: list[str] = []
        answer = canary.answers.get
        self._prefill = {p.tokens: answer(t) for p, t in zip(canary.prompts, observed.prefill, strict=True)}
        self._again: dict[str, dict[tuple[int, ...], int | None]] = {}
        repeated = canary.decode_prompts
        if observed.decoded is not None:
            # A first token that is not the one pointed to means that the second answers nothing.
            self._again["decode"] = {
                p.tokens: answer(pair[1]) if len(pair) == 2 and pair[0] == p.tokens[-1] else None
                for p, pair in zip(repeated, observed.decoded, strict=True)
            }
        if observed.alone is not None:
            self._again["a batch of one"] = {p.tokens: answer(t) for p, t in zip(repeated, observed.alone, strict=True)}

    def prefill(self, question: Question) -> list[int | None]:
        return [self._prefill[prompt.tokens] for prompt in question.prompts]

    def settle_all(self) -> None:
        subjects = dict.fromkeys(question.subject for question in self.canary.questions)
        for subject in subjects:
            questions = [question for question in self.canary.questions if question.subject == subject]
            if subject == "rope.angle":
                self._settle_angle(questions[0])
            elif subject != "control" and not subject.startswith("carry."):
                self._settle(subject, questions)
        if "rope.angle" not in subjects:
            self.fields["rope.angle"] = "pos*inv"
            self.notes.append(
                "rope.angle was not asked: it takes plain RoPE, and frequencies that every power function gives alike"
            )
        self._settle_carry([question for question in self.canary.questions if question.subject.startswith("carry.")])

    def _settle(self, subject: str, questions: Sequence[Question]) -> None:
        """The fields on which all candidates that fit at every place agree."""
        left = self._fitting(subject, questions)
        names = list(questions[0].candidates[0].fields)
        for name in names:
            values = {questions[0].candidates[i].fields[name] for i in left}
            if len(values) == 1:
                self.fields[name] = values.pop()
            else:
                self.undetermined.append(name)

    def _fitting(self, subject: str, questions: Sequence[Question]) -> set[int]:
        """The candidates that fit at every place; none if any place is unknown or two disagree."""
        fits = {question.place: _fits(question.prompts, self.prefill(question)) for question in questions}
        for question in questions:
            if not fits[question.place]:
                self.findings.append(_unknown(question, self.prefill(question)))
            self._compare_again(question, fits[question.place])
        everywhere = set.intersection(*fits.values())
        if all(fits.values()) and not everywhere:
            places = "; ".join(f"{place}: {_names(questions[0], fit)}" for place, fit in fits.items())
            self.findings.append(f"{subject} is not the same everywhere: {places}")
        return everywhere

    def _compare_again(self, question: Question, fit: set[int]) -> None:
        """Whether decode steps and batches of one agree with the batch that was prefilled."""
        for how, answers in self._again.items():
            prompts = [prompt for prompt in question.prompts if prompt.tokens in answers]
            differ = [p for p in prompts if answers[p.tokens] != self._prefill[p.tokens]]
            if differ:
                again = _fits(prompts, [answers[p.tokens] for p in prompts])
                says = f"as {_names(question, again)}" if again else "as no known rounding"
                self.findings.append(
                    f"{question.subject} ({question.place}): {how} answers {len(differ)} of {len(prompts)} prompts otherwise, "
                    f"{says}; the batch {_names(question, fit)}"
                )

    def _settle_angle(self, question: Question) -> None:
        """Among the candidates that agree with what is known of RoPE already."""
        name = "rope.angle"
        possible = {
            i
            for i, candidate in enumerate(question.candidates)
            if all(self.fields.get(key) == value for key, value in candidate.fields.items() if key != name)
        }
        fit = possible & _fits(question.prompts, self.prefill(question))
        angles = [str(question.candidates[i].fields[name]) for i in sorted(fit)]
        if fit:
            self._compare_again(question, fit)
        elif possible:
            self.findings.append(_unknown(question, self.prefill(question), possible))
        if len(angles) > 1:
            self.notes.append(f"{name}: {', '.join(angles)} give the same answers here (theta, table, length)")
        # Where the usual order and another one give the same answers, the other has no effect.
        if len(angles) == 1 or "pos*inv" in angles:
            self.fields[name] = angles[0]
        else:
            self.undetermined.append(name)

    def _settle_carry(self, questions: Sequence[Question]) -> None:
        """The set of residual adds that round, and whether they round like the norm behind them."""
        rounding: list[int] = []
        known = True
        for add, question in enumerate(questions):
            fit = self._fitting(question.subject, [question])
            names = {str(question.candidates[i]) for i in fit}
            known &= bool(names) and (names == {"unrounded"} or "unrounded" not in names)
            if names & {"rne", "rtz", "rounded"}:
                rounding.append(add)
            cast = self.fields.get("norm.input.cast" if add % 2 else "norm.post_attention.cast")
            if names in ({"rne"}, {"rtz"}) and cast is not None and cast not in names:
                self.findings.append(f"carry: add {add} rounds {names.pop()}, but the norm behind it {cast}")
        if known:
            self.fields["carry"] = carry_of(rounding, len(questions))
        else:
            self.undetermined.append("carry")
        if len(questions) < 2 * self.canary.shape.layers - 1:
            self.notes.append(f"carry was asked at the first {len(questions)} residual adds only")

    def schedule(self) -> RoundingSchedule | None:
        if self.undetermined:
            return None
        try:
            return RoundingSchedule.from_dict(_nested(self.fields))
        except UsageError as error:
            self.findings.append(f"no schedule has all these fields: {error}")
            return None


def carry_of(rounding: Sequence[int], adds: int) -> Carry:
    """The carry of which, among the first `adds` residual adds, just those in `rounding` round.

    A period is inferred from two adds or more; one that rounds alone is given as a list.
    """
    every: list[Carry] = ["bf16", "layer", *range(3, adds)]
    for period, carry in enumerate(every, start=1):
        expected = [add for add in range(adds) if (add + 1) % period == 0]
        if expected == list(rounding) and (period <= 2 or len(expected) > 1):
            return carry
    return tuple(rounding) or "fp32"


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by dotted name as tables in tables."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        *path, key = name.split(".")
        table = out
        for part in path:
            table = table.setdefault(part, {})
        table[key] = value
    return out


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `_nested`; a list, as TOML has it, becomes the tuple that a carry is."""
    out: dict[str, Any] = {}
    for key, value in tables.items():
        leaf = tuple(value) if isinstance(value, list) else value
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": leaf}
    return out


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _fits(prompts: Sequence[Prompt], answers: Sequence[int | None]) -> set[int]:
    """The candidates whose expected answers are exactly these."""
    candidates = range(len(prompts[0].expected)) if prompts else ()
    return {i for i in candidates if all(p.expected[i] == answer for p, answer in zip(prompts, answers, strict=True))}


def _names(question: Question, candidates: set[int]) -> str:
    return " or ".join(dict.fromkeys(str(question.candidates[i]) for i in sorted(candidates))) or "unknown"


def _unknown(question: Question, answers: Sequence[int | None], among: Iterable[int] | None = None) -> str:
    among = range(len(question.candidates)) if among is None else among
    mismatches = min(
        sum(prompt.expected[i] != answer for prompt, answer in zip(question.prompts, answers, strict=True)) for i in among
    )
    return f"{question.subject} ({question.place}): unknown, {mismatches} of {len(answers)} answers fit no known rounding"


def _problem(canary: Canary, reading: _Reading, tokens: Sequence[Token]) -> str | None:
    """Why these answers say nothing about rounding, by the controls, which every schedule answers alike."""
    tied = canary.circuit.tied_token
    if tied is not None and all(token == tied for token in tokens):
        return (
            "the stack uses the embedding as output head, although config.json says tie_word_embeddings=false; "
            "ask it with a canary of tied embeddings"
        )
    controls = {question.place: question for question in canary.questions if question.subject == "control"}
    failed = {
        place: [answer for prompt, answer in zip(q.prompts, reading.prefill(q), strict=True) if answer != prompt.expected[0]]
        for place, q in controls.items()
    }
    if failed["copies"]:
        total = len(controls["copies"].prompts)
        return (
            f"{len(failed['copies'])} of {total} controls that copy a value failed: the stack does not hold the canary's "
            "weights exactly (quantised, converted or another checkpoint), or it was not asked with the canary's token ids"
        )
    if failed["count"]:
        if all(answer == -1 for answer in failed["count"]):
            return "the stack sees more tokens than it was sent: switch off what it adds (a BOS token, a template)"
        return "the stack does not see all the tokens it was sent: it drops or replaces some"
    return None


def _digest(canary: Canary) -> str:
    asked = [[q.subject, q.place, [[p.tokens, p.expected] for p in q.prompts]] for q in canary.questions]
    return hashlib.sha256(json.dumps([canary.shape.to_dict(), asked]).encode()).hexdigest()[:16]


def _evidence(canary: Canary, observed: Observed) -> Iterable[dict[str, Any]]:
    tokens = iter(observed.prefill)
    for question in canary.questions:
        for prompt in question.prompts:
            token = next(tokens)
            yield {
                "field": question.subject,
                "place": question.place,
                "prompt_ids": list(prompt.tokens),
                "token": token,
                "answer": canary.circuit.words.get(token, "?"),
            }
