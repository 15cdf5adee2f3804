"""What a measurement means, in words chosen by the numbers and their errors: `headline` for all of it, `verdict` for the raw
mismatch before and after alignment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tripoint.drift.estimate import Estimate
from tripoint.drift.mismatch import Change, Measured, change, plus_minus
from tripoint.drift.plan import plan
from tripoint.drift.result import DriftResult

SIGMAS = 3
"""Something counts as there, or as changed, when it is more than this many standard errors from zero."""
MOST_TOKENS = 5000
"""Of the built-in text, in a measurement that is proposed."""
WORTHWHILE = 0.8
"""A longer measurement is proposed if it leaves at most this share of the error."""

_SAME_POINTS = (
    "The trainer rounds where the engine does, so that it is none of the three operations: attention, GEMMs, lm_head."
)


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


def headline(result: DriftResult) -> str:
    """How large, how much of it systematic, from which operation, what to do, and how sure, in a few sentences."""
    found = result.systematic
    if found.controls.problem:
        return f"This measurement does not say anything yet: {found.controls.problem}."
    sentences: list[str] = []
    if result.findings:
        worst = result.findings[0]
        sentences.append(
            f"The mismatch is not only rounding. First of all {worst.setting} ({worst.cause}, {worst.nats:.2g} nats); what "
            "rounding does can be judged after that."
        )
    elif found.bound_only:
        sentences.append(_single_sample(result))
    elif _there(found.total):
        sentences += _systematic(result)
    else:
        sentences += _not_told(result)
    return " ".join(sentences)


def systematic_share(result: DriftResult) -> float:
    """The systematic variance as a share of all that a single pass of both stacks shows on the neutral tokens."""
    total = max(result.systematic.total.value, 0.0)
    return total / (total + sum(noise**2 for noise in result.systematic.noise_rms.values()))


def _not_told(result: DriftResult) -> list[str]:
    found = result.systematic
    sentences = [
        f"No systematic drift is told from zero: it is below {_root(found.total.high):.2g} nats rms (95 %), next to noise "
        f"of {found.noise_rms['trainer']:.2g} (trainer) and {found.noise_rms['engine']:.2g} (engine), which averages out."
    ]
    if found.removed and result.aligned and _there(found.removed):
        # Paired, and so told more finely than the whole.
        removed = plus_minus(found.removed.value, found.removed.stderr)
        sentences.append(f"Alignment to {result.aligned.alignment.target.name} all the same removes {removed} nats² of it.")
    ahead = plan(found, most_tokens=MOST_TOKENS, stderr=found.total.stderr / 2)
    if ahead.stderr < WORTHWHILE * found.total.stderr:
        share = ahead.stderr / found.total.stderr
        sentences.append(f"For {share:.0%} of the error: --tokens {ahead.tokens} --replicates {ahead.replicates}.")
    return sentences


def _systematic(result: DriftResult) -> list[str]:
    found = result.systematic
    low, high = _root(found.total.low), _root(found.total.high)
    sentences = [
        f"{found.total.rms:.2g} nats rms (95 %: {low:.2g} to {high:.2g}) do not average out: {systematic_share(result):.0%} of "
        "the variance between the stacks is systematic, the rest is rounding noise."
    ]
    if found.ranged and found.ranged.disagree:
        other = found.ranged.permutation.rms
        sentences.append(f"Permutations in place of dithers give {other:.2g} nats: take the two as a range.")
    if found.attribution and found.removed and _there(found.removed):
        largest = max(found.attribution.sites, key=lambda site: site.shapley.value)
        sentences.append(
            f"The largest part of what alignment removes is due to {largest.op} ({largest.before} against {largest.after}, "
            f"{largest.share.value:.0%} ± {largest.share.stderr:.0%})."
        )
    if found.aligned is None or result.aligned is None:
        return [*sentences, "Give --to, the target for the trainer, to see what of it alignment removes."]
    if found.removed is None:
        return [*sentences, _SAME_POINTS]
    target, left = result.aligned.alignment.target.name, found.aligned
    if not _there(left):
        sentences.append(f"Align the trainer to {target}: then none is told from zero (below {_root(left.high):.2g} nats rms).")
    elif _there(found.removed):
        sentences.append(
            f"Align the trainer to {target}: that removes {found.removed.value / found.total.value:.0%} of the systematic "
            f"variance; {left.rms:.2g} nats rms remain, which none of the three operations explains."
        )
    elif found.removed.value < -SIGMAS * found.removed.stderr:
        sentences.append(f"Aligned to {target} it is larger: the engine does not round like that; ask it (fingerprint).")
    else:
        sentences.append(f"Alignment to {target} does not measurably change it: look at attention, GEMMs and the lm_head.")
    return sentences


def _single_sample(result: DriftResult) -> str:
    found = result.systematic
    text = (
        "The engine is a single sample of its roundings and its own noise cannot be taken off, so that the systematic part is "
        f"known only to be below {_root(found.total.high):.2g} nats rms."
    )
    if found.aligned is not None and found.removed is None:
        return f"{text} {_SAME_POINTS}"
    if found.removed is None or result.aligned is None:
        return f"{text} Give --to to compare schedules of the trainer, which needs no such knowledge."
    difference = plus_minus(found.removed.value, found.removed.stderr)
    target = result.aligned.alignment.target.name
    if _there(found.removed):
        return f"{text} Aligned to {target} the trainer is nearer to it by {difference} nats²: align it."
    if found.removed.value < -SIGMAS * found.removed.stderr:
        return f"{text} Aligned to {target} the trainer is farther from it, by {difference} nats²: that is not how it rounds."
    return f"{text} Whether the trainer is nearer to it aligned to {target} is not told ({difference} nats²)."


def _there(estimate: Estimate) -> bool:
    return estimate.value > SIGMAS * estimate.stderr


def _root(variance: float) -> float:
    return max(variance, 0.0) ** 0.5
