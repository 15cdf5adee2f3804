"""What the raw mismatch before and after alignment means, in words chosen by the measured numbers and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tripoint.drift.mismatch import Change, Measured, change, plus_minus

SIGMAS = 3
"""A change of the mean |dlogp| counts as one when it is more than this many standard errors from zero."""


class Outcome(Enum):
    """How the mean |dlogp| stands, and how alignment moved it."""

    NOT_ALIGNED = "not aligned"
    IDENTICAL = "identical"
    VANISHED = "vanished"
    LOWERED = "lowered"
    UNCHANGED = "unchanged"
    RAISED = "raised"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    sentence: str


def verdict(before: Measured, after: Measured | None) -> Verdict:
    """Judge a measurement before and (unless None) after alignment, of the same rollouts."""
    outcome = _outcome(before, after)
    then = plus_minus(before.mismatch.mean_abs, before.stderr["mean_abs"])
    match outcome:
        case Outcome.NOT_ALIGNED:
            text = f"The mean |dlogp| is {then} nats; give --to, the target for the trainer, to see what alignment does to it."
        case Outcome.IDENTICAL:
            how = ", with and without alignment" if after else ""
            text = f"Engine and trainer agree on all {before.tokens} tokens to the last bit{how}."
        case Outcome.VANISHED:
            text = (
                f"Alignment removed the mismatch: the mean |dlogp| was {then} nats, and now all {before.tokens} tokens agree "
                "to the last bit."
            )
        case _:
            assert after is not None
            text = _moved(outcome, before, after, then)
    return Verdict(outcome, text)


def _outcome(before: Measured, after: Measured | None) -> Outcome:
    was, now = before.mismatch.mean_abs, None if after is None else after.mismatch.mean_abs
    if was == 0 and not now:
        return Outcome.IDENTICAL
    if after is None:
        return Outcome.NOT_ALIGNED
    if now == 0:
        return Outcome.VANISHED
    if was == 0:
        return Outcome.RAISED  # all tokens were equal and now some are not: no error bar is needed to see that
    moved = change(before, after)["mean_abs"]
    if not _significant(moved):
        return Outcome.UNCHANGED
    return Outcome.LOWERED if moved.value < 0 else Outcome.RAISED


def _significant(moved: Change) -> bool:
    assert moved.stderr is not None
    return abs(moved.value) > SIGMAS * moved.stderr


def _moved(outcome: Outcome, before: Measured, after: Measured, then: str) -> str:
    moved = change(before, after)
    by = plus_minus(moved["mean_abs"].value, moved["mean_abs"].stderr)
    now = plus_minus(after.mismatch.mean_abs, after.stderr["mean_abs"])
    match outcome:
        case Outcome.LOWERED:
            text = (
                f"Alignment lowered the mean |dlogp| from {then} to {now} nats (change {by}), so part of the mismatch came "
                "from the rounding points that it moved, as systematic drift or as their own rounding noise, which raw "
                "mismatch cannot tell apart (a target that just rounds less lowers it too); what remains is rounding noise "
                "and any difference elsewhere."
            )
        case Outcome.UNCHANGED:
            text = (
                f"Alignment did not measurably move the mean |dlogp|: {then} before, {now} nats after (change {by}, "
                f"within {SIGMAS} standard errors), which does not show that it did nothing: in BF16 one ulp anywhere "
                "decorrelates all later roundings, so raw mismatch has a floor of rounding noise under which a systematic "
                "part can come and go."
            )
        case _:
            text = (
                f"Alignment raised the mean |dlogp| from {then} to {now} nats (change {by}): either the engine does not round "
                "where this target says (check its version, device and mode), or rounding as it says is noisier, which "
                "raw mismatch cannot tell apart."
            )
    rms = moved["rms"]
    if _significant(rms) and _significant(moved["mean_abs"]) and rms.value * moved["mean_abs"].value < 0:
        text += " The rms, ruled by a few large differences, moved the other way."
    return text
