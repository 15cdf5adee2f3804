"""Tasks whose answers can be checked: made here from a seed, or read from a file; nothing is downloaded."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tripoint.errors import UsageError
from tripoint.schedule import suggest

LETTERS = "abcdefghijklmnop"
LENGTH = 6
PROBLEMS = 4096
"""How many problems a task that is made here has."""


@dataclass(frozen=True)
class Problem:
    """A prompt as text, exactly as the model sees it, and the text that answers it."""

    prompt: str
    answer: str


def _addition(rng: random.Random) -> Problem:
    a, b = rng.randint(10, 49), rng.randint(10, 49)
    return Problem(f"{a} + {b} =", str(a + b))


def _sort(rng: random.Random) -> Problem:
    letters = rng.choices(LETTERS, k=LENGTH)
    return Problem("".join(letters) + ">", "".join(sorted(letters)))


def _reverse(rng: random.Random) -> Problem:
    letters = rng.choices(LETTERS, k=LENGTH)
    return Problem("".join(letters) + "<", "".join(reversed(letters)))


MADE: dict[str, Callable[[random.Random], Problem]] = {"addition": _addition, "sort": _sort, "reverse": _reverse}

CHARACTERS = "".join(sorted({*LETTERS, *"0123456789 +=<>"}))
"""All that occurs in the tasks made here, but for the newline that ends an answer."""


def check_task(task: str) -> None:
    """Raises UsageError unless `task` is one that is made here or `file:PATH` with problems in it."""
    problems(task, shots=0)


def problems(task: str, shots: int) -> list[Problem]:
    """The problems of a task, the same every time.

    `task`: `addition` (of two-digit numbers), `sort`, `reverse` (letters), or `file:PATH`, JSONL with `prompt` and `answer`.
    With `shots` each prompt of a made task opens with so many solved problems, one a line, the same for all.
    Raises UsageError for an unknown task or a file that holds no problems.
    """
    kind, _, path = task.partition(":")
    if kind == "file" and path:
        return _read(Path(path))
    if task not in MADE:
        raise UsageError(f"unknown task {task!r}{suggest(task, [*MADE, 'file:PATH'])}")
    rng = random.Random(task)
    solved = "".join(f"{p.prompt} {p.answer}\n" for p in (MADE[task](rng) for _ in range(shots)))
    return [Problem(solved + p.prompt, p.answer) for p in (MADE[task](rng) for _ in range(PROBLEMS))]


def reward(task: str, completion: str, answer: str) -> float:
    """1.0 for a right completion, else 0.0.

    Tasks made here: the first line is the answer. Files: the last `\\boxed{...}` is, or the last number if nothing is boxed;
    commas between thousands do not count.
    """
    if task in MADE:
        return float(completion.split("\n")[0].strip() == answer)
    completion = _plain(completion)
    given = _boxed(completion) or re.findall(r"-?\d+(?:\.\d+)?", completion)
    return float(bool(given) and given[-1].strip() == _plain(answer).strip())


def _plain(text: str) -> str:
    """Without commas between thousands."""
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def _boxed(text: str) -> list[str]:
    """What stands in each `\\boxed{...}` that is closed, braces inside it being counted."""
    found = []
    for opening in re.finditer(r"\\boxed\{", text):
        depth = 1
        for end in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                found.append(text[opening.end() : end])
                break
    return found


def _read(path: Path) -> list[Problem]:
    found = []
    try:
        # Not splitlines(), which also splits at U+2028 and the like: JSON may hold those in its strings.
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not (isinstance(row, dict) and isinstance(row.get("prompt"), str) and isinstance(row.get("answer"), str)):
                raise UsageError(f"{path}, line {number}: give an object with the strings `prompt` and `answer`")
            found.append(Problem(row["prompt"], row["answer"]))
    except OSError as error:
        raise UsageError(f"task file {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise error if isinstance(error, UsageError) else UsageError(f"task file {path}: not JSONL: {error}") from None
    if not found:
        raise UsageError(f"task file {path} is empty")
    return found
