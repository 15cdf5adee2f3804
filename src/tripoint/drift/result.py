"""`measure_drift`: everything that is known about one trainer and one engine, put together.

Two kinds of tokens are scored. The engine's own, sampled or recorded, show what RL frameworks log and what is not rounding.
Neutral ones, chosen by neither stack, show what is systematic.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tripoint.align import align
from tripoint.align.layouts import find_decoders
from tripoint.align.model import Alignment
from tripoint.drift.attribution import Bin, FieldPart, LocalError, Site, local_errors
from tripoint.drift.dither import Dithering, Replicates, read_weights, seeds, untied
from tripoint.drift.estimate import Estimate
from tripoint.drift.expectation import NoiseOnly, noise_only
from tripoint.drift.findings import Finding, find_causes, prefill_against_decode
from tripoint.drift.gradient_bias import Bias, GradientBias, gradient_bias
from tripoint.drift.groups import group_numbers, spread
from tripoint.drift.mismatch import Change, Measured, change, measure
from tripoint.drift.neutral import MIN_SEQUENCES, most_neutral, neutral_rollouts
from tripoint.drift.plan import plan
from tripoint.drift.prompts import prompt_ids
from tripoint.drift.systematic import (
    FULL_SECONDS,
    MIN_REPLICATES,
    QUICK_SECONDS,
    Stage,
    SystematicDrift,
    aligned,
    as_transformers,
    measure_systematic,
    odd_schedule,
    unwatched,
)
from tripoint.errors import MeasurementError, UsageError
from tripoint.models import empty_model, resolve_model
from tripoint.profiles import documented_stacks, resolve_target
from tripoint.schedule import RoundingSchedule
from tripoint.stacks import Rollout, Stack, StackName, open_stack, parse_stack
from tripoint.stacks.base import vocab_size
from tripoint.stacks.hf import HFStack
from tripoint.stacks.rollouts import read_rollouts

NEUTRAL_TOKENS, PILOT_TOKENS = 2000, 1000
SAMPLED_TOKENS, QUICK_SAMPLED_TOKENS = 1000, 500
MIN_COMPLETION, MAX_COMPLETION = 32, 128  # of sampled tokens, or most of a pass would be prompts
SEARCHED_TOKENS = 4096  # of recorded ones, for causes other than rounding: a few passes each
NOISE_REPLICATES = 3
GRADIENT_TOKENS, GRADIENT_REPLICATES = 1000, 4
LAYER_SEQUENCES = 4
LEAST_PRECISION = 1e-12
CLEAR = 2.0  # standard errors, from which on a share of something is worth giving
TRAINERS = ("hf", "emulated")
PROFILE_MODES = {"": "", "eager": "/eager", "compile": "/compiled", "autocast": "/autocast"}


@dataclass(frozen=True)
class Side:
    """One of the two stacks: as named by the user, with what its rounding may depend on and the versions that computed."""

    stack: str
    conditions: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class Aligned:
    """The trainer after alignment: the record of what changed, the raw mismatch then, and its paired change."""

    alignment: Alignment
    measured: Measured
    change: dict[str, Change]

    def ops(self) -> list[dict[str, Any]]:
        """What alignment changed, by op: rounding points before and after, and at how many modules."""
        counts = Counter((site.op, site.before, site.after) for site in self.alignment.sites)
        return [{"op": op, "before": before, "after": after, "sites": n} for (op, before, after), n in counts.items()]


@dataclass(frozen=True)
class GradientBiases:
    """The gradient bias of the trainer as it is and aligned (None where no target is known), on so many recorded tokens."""

    tokens: int
    sequences: int
    unaligned: GradientBias
    aligned: GradientBias | None

    def to_dict(self) -> dict[str, Any]:
        sides = {"unaligned": self.unaligned, "aligned": self.aligned}
        out: dict[str, Any] = {"tokens": self.tokens, "sequences": self.sequences}
        for name, side in sides.items():
            out[name] = side and {
                "total": _bias(side.total),
                "by_position": [_bias(part) for part in side.by_position],
            }
        if self.aligned is None:
            return out | {"lowered": None}
        square, stderr = self.unaligned.total.less(self.aligned.total)
        return out | {"lowered": {"square": square, "stderr": stderr}}


@dataclass(frozen=True)
class DriftResult:
    """What was measured.

    `source` and `neutral` say where the engine's and the neutral tokens are from. `findings` are causes other than rounding,
    `noted` what only looks like one. `aligned` is None where no target is known.
    `withheld` says why the systematic drift was not attributed to operations, if it was not; then `layers` is empty, as it is
    for a trainer whose weights are not BF16. `gradient_bias` is None where it was not asked for or there are no advantages to
    take it with.
    """

    model: str
    engine: Side
    trainer: Side
    source: str
    neutral: str
    mismatch: Measured
    aligned: Aligned | None
    expected: NoiseOnly
    systematic: SystematicDrift
    layers: tuple[LocalError, ...]
    findings: tuple[Finding, ...]
    noted: tuple[Finding, ...]
    withheld: str | None
    gradient_bias: GradientBiases | None
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The JSON of `drift`, keys as in the documentation; variances in nats squared. `fields` is there if asked for."""
        result = self.systematic
        attribution = result.attribution
        out = {
            "tokens": result.tokens,
            "sequences": result.sequences,
            "replicates": result.replicates,
            "mismatch": asdict(self.mismatch.mismatch),
            "noise_rms": {who: _number(value) for who, value in result.noise_rms.items()},
            "expected_k3_from_noise": self.expected.k3,
            "systematic": _variance(result.total)
            | {"rms": result.total.rms, "p_value": None if result.bound_only else result.total.p_value},
            "attribution": [_site(site, result.removed) for site in attribution.sites]
            if attribution and result.removed
            else [],
            "interaction": _variance(attribution.interaction) if attribution else None,
            "unexplained": _variance(result.aligned) if result.aligned and not self.findings else None,
            "control": _variance(result.controls.zero),
            "findings": [finding.to_dict() for finding in self.findings],
            "withheld": self.withheld,
            "bound_only": result.bound_only,
            "positive_control": _variance(result.controls.positive),
            "problem": result.controls.problem,
        }
        return out if result.fields is None else out | {"fields": [_field(part) for part in result.fields]}

    def to_report(self) -> dict[str, Any]:
        """The JSON of `diagnose`: that of `drift`, and everything else that is in the report."""
        result = self.systematic
        out = self.to_json() | {
            "model": self.model,
            "engine": vars(self.engine),
            "trainer": vars(self.trainer),
            "source": self.source,
            "neutral_source": self.neutral,
            "mismatch_tokens": self.mismatch.tokens,
            "mismatch_sequences": self.mismatch.sequences,
            "mismatch_stderr": dict(self.mismatch.stderr),
            "k3_limit_from_noise": self.expected.k3_limit,
            "systematic_interval": [result.total.low, result.total.high],
            "removed_by_alignment": _variance(result.removed) if result.removed and not self.findings else None,
            "fits": [
                {"schedule": fit.candidate, **_variance(fit.variance), "above_best": _variance(fit.above_best)}
                for fit in result.fits
            ],
            "by_permutation": _variance(result.ranged.permutation) if result.ranged else None,
            "by_permutation_aligned": _variance(result.ranged.left) if result.ranged and result.ranged.left else None,
            "by_position": [_bin(part) for part in result.attribution.by_position] if result.attribution else [],
            "by_probability": [_bin(part) for part in result.attribution.by_probability] if result.attribution else [],
            "by_layer": [vars(error) for error in self.layers],
            "wild_tokens": int(result.wild.sum()),
            "noted": [finding.to_dict() for finding in self.noted],
            "gradient_bias": self.gradient_bias.to_dict() if self.gradient_bias else None,
            "aligned": None,
            "passes": result.passes,
            "seconds": self.seconds,
        }
        if self.aligned is not None:
            record = self.aligned.alignment
            out["aligned"] = {
                "target": record.target.name,
                "detail": record.target.detail,
                "schedule_before": str(record.before),
                "schedule": str(record.schedule),
                "ops": self.aligned.ops(),
                "notes": list(record.notes),
                **self.aligned.measured.to_dict(),
                "change": {name: vars(change) for name, change in self.aligned.change.items()},
            }
        return out


def measure_drift(
    model: str,
    engine: str,
    trainer: str = "hf",
    *,
    to: str | None = None,
    tokens: int | None = None,
    quick: bool = False,
    fields: bool = False,
    replicates: int | None = None,
    precision: float | None = None,
    gradient: bool = False,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
    stage: Stage = unwatched,
) -> DriftResult:
    """Measure the drift of `trainer` against `engine`: how much, how much of it systematic, from which operation, and what of
    it is not rounding.

    `model`: a directory, a hub id, or `smollm2`. `engine`, `trainer`: STACKs; the engine may be `rollouts:FILE`. `to`: how the
    engine rounds, as a target; by default what is documented for it (`emulated:X`: X), and where nothing is, nothing is
    attributed. `tokens`: about how many neutral tokens, or recorded ones; by default `NEUTRAL_TOKENS`. `quick`: without
    attribution. `fields`: attribution to each field of the operations too. `replicates`: of each stack; by default as many as
    `QUICK_SECONDS` or `FULL_SECONDS` allow in all. `precision`: the standard error (nats squared) that the systematic variance
    is to have, from which tokens and replicates follow by a pilot; `say` is told what was planned. `gradient`: the
    gradient bias too, where recorded rollouts hold advantages that are not all zero, unless `quick` or the trainer is compiled.
    Raises UsageError for bad input and MeasurementError where nothing can be measured.
    """
    if quick and fields:
        raise UsageError("--quick leaves out the attribution that --fields asks for: give one of them")
    if precision is not None and (tokens is not None or replicates is not None):
        raise UsageError("--precision decides how many tokens and replicates there are: leave out --tokens and --replicates")
    if precision is not None and not precision > LEAST_PRECISION:
        raise UsageError(f"--precision {precision:g} is out of reach: give a standard error in nats squared, such as 1e-5")
    started = time.monotonic()
    seconds: dict[str, float] = {}
    name, trainer_name = parse_stack(engine), parse_stack(trainer)
    if trainer_name.kind not in TRAINERS:
        raise UsageError(f"trainer `{trainer}` cannot be aligned: it must be hf, hf:compile, hf:autocast or emulated:TARGET")
    unknown = "how the engine rounds is not known: give --to"
    if to is None:
        to, unknown = _documented_target(name, unknown)
    checkpoint = resolve_model(model)
    _check_alignable(checkpoint, to)  # before minutes of sampling
    wanted = tokens or (PILOT_TOKENS if precision else NEUTRAL_TOKENS)

    def lap(what: str) -> None:
        seconds[what] = time.monotonic() - started - sum(seconds.values())

    with ExitStack() as opened:
        directory = opened.enter_context(untied(checkpoint))
        running: Stack | None = None
        if name.kind == "rollouts":
            recorded, source = list(read_rollouts(Path(name.detail), vocab_size(checkpoint))), f"recorded in {name.detail}"
            neutral, neutral_source = spread(recorded, wanted, seed), "of the recorded ones, spread over the file"
            sampled = neutral if tokens is not None or quick else spread(recorded, SEARCHED_TOKENS, seed)
        else:
            neutral, neutral_source = neutral_rollouts(directory, vocab_size(checkpoint), wanted)
            running = opened.enter_context(open_stack(engine, checkpoint if name.kind == "http" else directory))
            few = QUICK_SAMPLED_TOKENS if quick else SAMPLED_TOKENS
            sampled, source = _sample(running, directory, min(wanted, few), seed, stage)
        lap("engine: start and sampling")
        stack = opened.enter_context(open_stack(trainer, directory))
        assert isinstance(stack, HFStack)
        schedules = None if to is None else _schedules(stack, trainer_name, to)
        weights = read_weights(directory)
        searched = spread(sampled, SEARCHED_TOKENS, seed)
        own, dithering = Dithering(weights, searched), Dithering(weights, neutral)
        logprobs = [rollout.logprobs for rollout in sampled if rollout.logprobs is not None]

        def mismatch_now(what: str) -> Measured:
            with stage(what, len(sampled)) as progress:
                return measure(logprobs, stack.score(sampled, progress=progress), group_numbers(sampled))

        mismatch = mismatch_now(f"scoring with {trainer}")
        after = None
        if to is not None:
            with aligned(stack, to) as record:
                measured = mismatch_now(f"scoring with {trainer}, aligned")
            after = Aligned(record, measured, change(mismatch, measured))
        lap("raw mismatch")

        dithers = running if name.kind not in ("rollouts", "http") else None

        def engine_on(dithering: Dithering) -> Stack | Replicates:
            """The engine itself where it can be dithered, otherwise one sample of it."""
            if dithers is not None:
                return dithers
            if running is not None:
                return dithering.score_once(running)
            return _recorded(dithering)

        with stage("rounding noise on the engine's tokens", 0):
            noise = own.score(stack, seeds(seed, "trainer on its tokens", NOISE_REPLICATES))
            if dithers is not None:
                engine_noise = own.score(dithers, seeds(seed, "engine on its tokens", NOISE_REPLICATES))
            else:
                with aligned(stack, schedules[1]) if schedules else nullcontext():
                    engine_noise = own.score(stack, seeds(seed, "engine on its tokens", NOISE_REPLICATES))
            expected = noise_only(noise, engine_noise)
        lap("expected noise")
        with stage("looking for causes other than rounding", 0):
            with as_transformers(stack) as plain:
                bos = plain.config.bos_token_id
                findings = find_causes(plain, searched, expected, bos=bos, autocast=stack.mode == "autocast")
            if running is not None:
                findings += prefill_against_decode(running, searched, expected)
            noted = [finding for finding in findings if finding.rounding]
            findings = [finding for finding in findings if not finding.rounding]
        lap("other causes")
        withheld = None
        if findings:
            withheld = f"the drift is not only rounding ({', '.join(finding.cause for finding in findings)})"
        elif schedules is None:
            withheld = unknown
        elif stack.mode == "compile":
            withheld = "a compiled trainer rounds where the compiler likes: its operations cannot be moved one by one"
        elif quick:
            withheld = "left out because of --quick"
        if precision is not None:
            pilot = measure_systematic(
                engine_on(dithering), stack, dithering, None, full=False, replicates=MIN_REPLICATES, seed=seed + 1, stage=stage
            )
            most = most_neutral(directory) if running else sum(len(rollout.completion_ids) for rollout in recorded)
            planned = plan(pilot, stderr=precision, most_tokens=most)
            say(planned.sentence(precision))
            replicates, few = planned.replicates, planned.tokens
            neutral = neutral_rollouts(directory, stack.vocab_size, few)[0] if running else spread(recorded, few, seed)
            dithering = Dithering(weights, neutral)
            lap("pilot")
        systematic = measure_systematic(
            engine_on(dithering),
            stack,
            dithering,
            schedules,
            full=withheld is None,
            fields=fields,
            candidates=_documented(stack) if schedules is None and not findings and not quick else (),
            replicates=replicates,
            budget=max((QUICK_SECONDS if quick else FULL_SECONDS) - (time.monotonic() - started), 1.0),
            seed=seed,
            stage=stage,
        )
        lap("dithered passes")
        layers: tuple[LocalError, ...] = ()
        if systematic.attribution and schedules and stack.model.dtype == torch.bfloat16:
            with stage("layer by layer", 0), as_transformers(stack) as plain:
                shortest = min(len(r.prompt_ids) + len(r.completion_ids) for r in neutral[:LAYER_SEQUENCES])
                ids = [[*r.prompt_ids, *r.completion_ids][:shortest] for r in neutral[:LAYER_SEQUENCES]]
                layers = tuple(local_errors(plain, torch.tensor(ids), *schedules))
            lap("layer by layer")
        biases = None
        # A group that is solved, or that nobody solves, has no advantages and no gradient.
        felt = [rollout for rollout in sampled if any(rollout.advantages or ())]
        if felt and gradient and running is None and not quick and stack.mode != "compile":
            with stage("gradient bias", 0):
                try:
                    biases = _gradient_biases(stack, Dithering(weights, spread(felt, GRADIENT_TOKENS, seed)), to, seed)
                except MeasurementError as error:
                    say(str(error))
            lap("gradient bias")
        engine_side, trainer_side = _side(engine, running), _side(trainer, stack)
    return DriftResult(
        model,
        engine_side,
        trainer_side,
        source,
        neutral_source,
        mismatch,
        after,
        expected,
        systematic,
        layers,
        tuple(sorted(findings, key=lambda finding: -finding.nats)),
        tuple(noted),
        withheld,
        biases,
        seconds,
    )


def _side(name: str, stack: Stack | None) -> Side:
    return Side(name, stack.conditions(), stack.versions()) if stack else Side(name, {}, {})


def _documented_target(engine: StackName, unknown: str) -> tuple[str | None, str]:
    """What is documented for an engine, as a target, or None and why: recorded rollouts and servers do not say what they run
    (`unknown`), and not every version is documented."""
    if engine.kind in ("rollouts", "http"):
        return None, unknown
    target = engine.detail if engine.kind == "emulated" else engine.kind + PROFILE_MODES[engine.detail]
    try:
        resolve_target(target)
    except UsageError as error:
        if engine.kind == "emulated":
            raise
        return None, f"{unknown} ({error})"
    return target, unknown


def _check_alignable(model: Path, to: str | None) -> None:
    """Raise UsageError if this checkpoint is none of a causal language model, or as `align` will for this target or for the
    odd schedule of the control, without loading a weight."""
    with torch.device("meta"):
        model_of_config = empty_model(model, dtype=torch.bfloat16)
        for target in (odd_schedule(model_of_config.config), *(() if to is None else (to,))):
            align(model_of_config, to=target)


def _schedules(stack: HFStack, trainer: StackName, to: str) -> tuple[RoundingSchedule, RoundingSchedule]:
    """How the trainer rounds (what is documented, or what an emulation was told) and how the engine does, in the terms of this
    model: without QK-norms nothing is said of them."""
    own = trainer.detail if trainer.kind == "emulated" else trainer.kind + PROFILE_MODES[trainer.detail]
    first, second = (resolve_target(target).schedule for target in (own, to))
    if not find_decoders(stack.model)[0].has_qk_norm:
        first, second = (dataclasses.replace(s, norm=dataclasses.replace(s.norm, qk=None)) for s in (first, second))
    return first, second


def _documented(stack: HFStack) -> list[RoundingSchedule]:
    """All schedules that are documented for some stack and that this model can be given, without what is said of QK-norms."""
    found: dict[RoundingSchedule, None] = {}
    with as_transformers(stack) as model:
        for documented in documented_stacks().values():
            for profile in documented.profiles:
                schedule = dataclasses.replace(profile.schedule, norm=dataclasses.replace(profile.schedule.norm, qk=None))
                try:
                    align(model, to=schedule).undo()
                except UsageError:
                    continue
                found[schedule] = None
    return list(found)


def _recorded(dithering: Dithering) -> Replicates:
    """What the tokens were sampled at: a single sample of the engine's roundings."""
    logprobs = np.concatenate([rollout.logprobs or () for rollout in dithering.rollouts])
    return Replicates(logprobs[None], dithering.lengths, dithering.groups)


def _gradient_biases(trainer: HFStack, dithering: Dithering, to: str | None, seed: int) -> GradientBiases:
    """On recorded rollouts, all of which have an advantage that is not zero."""
    advantages = [rollout.advantages or () for rollout in dithering.rollouts]

    def now() -> GradientBias:
        return gradient_bias(
            trainer, _recorded(dithering), dithering, advantages, seeds(seed, "gradient bias", GRADIENT_REPLICATES)
        )

    unaligned, after = now(), None
    if to is not None:
        with aligned(trainer, to):
            after = now()
    return GradientBiases(sum(dithering.lengths), len(dithering.lengths), unaligned, after)


def _sample(engine: Stack, model: Path, wanted: int, seed: int, stage: Stage) -> tuple[list[Rollout], str]:
    """About `wanted` tokens or more of the engine's own, and in words what they are."""
    prompts, source = prompt_ids(model, engine.vocab_size)
    length = min(max(MIN_COMPLETION, -(-wanted // len(prompts))), MAX_COMPLETION)
    rollouts: list[Rollout] = []
    found = 0
    while found < wanted:
        batch = prompts[: max(MIN_SEQUENCES - len(rollouts), -(-(wanted - found) // length))]
        with stage(f"sampling from {engine.name}", len(batch)) as progress:
            sampled = engine.sample(batch, max_tokens=length, seed=seed + len(rollouts), progress=progress)
        rollouts += [dataclasses.replace(rollout, group=rollout.prompt_ids) for rollout in sampled]
        found += sum(len(rollout.completion_ids) for rollout in sampled)
    return rollouts, f"sampled at temperature 1 from {source}"


def _variance(estimate: Estimate) -> dict[str, float]:
    return {"variance": estimate.value, "stderr": estimate.stderr}


def _site(site: Site, removed: Estimate) -> dict[str, Any]:
    return {
        "site": site.op,
        "from": site.before,
        "to": site.after,
        **_variance(site.shapley),
        # A share of what is not there has no meaning.
        "share": site.share.value if removed.value > CLEAR * removed.stderr else None,
        "moved_alone": _variance(site.moved_alone),
        "moved_away": _variance(site.moved_away),
    }


def _bin(part: Bin) -> dict[str, Any]:
    return {
        "low": part.low,
        "high": part.high,
        "tokens": part.tokens,
        "systematic": _variance(part.total) if part.total else None,
        "moved_alone": {op: _variance(estimate) for op, estimate in part.moved_alone.items()},
    }


def _bias(part: Bias) -> dict[str, float]:
    return {
        "low": part.low,
        "high": part.high,
        "one_step": part.one_step,
        "systematic": part.systematic,
        "stderr": part.stderr,
    }


def _field(part: FieldPart) -> dict[str, Any]:
    """Variance and error are None for a field that cannot be moved alone."""
    alone = part.moved_alone
    moved = _variance(alone) if alone else {"variance": None, "stderr": None}
    return {"field": part.field, "from": part.before, "to": part.after, **moved}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
