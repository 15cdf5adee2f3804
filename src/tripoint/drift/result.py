"""`measure_drift`: everything that is known about one trainer and one engine, put together.

Two kinds of tokens are scored. The engine's own, sampled or recorded, show what RL frameworks log and what is not rounding.
Neutral ones, chosen by neither stack, show what is systematic.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tripoint.drift.attribution import Site
from tripoint.drift.compare import PROFILE_MODES
from tripoint.drift.dither import Dithering, Replicates, read_weights, seeds, untied
from tripoint.drift.estimate import Estimate
from tripoint.drift.expectation import NoiseOnly, noise_only
from tripoint.drift.findings import Finding, find_causes, prefill_against_decode
from tripoint.drift.mismatch import Measured, measure
from tripoint.drift.neutral import neutral_rollouts
from tripoint.drift.prompts import prompt_ids
from tripoint.drift.systematic import (
    FULL_SECONDS,
    QUICK_SECONDS,
    Stage,
    SystematicDrift,
    aligned,
    as_transformers,
    measure_systematic,
    unwatched,
)
from tripoint.errors import UsageError
from tripoint.models import resolve_model
from tripoint.profiles import resolve_target
from tripoint.schedule import RoundingSchedule
from tripoint.stacks import Rollout, Stack, open_stack, parse_stack
from tripoint.stacks.hf import HFStack
from tripoint.stacks.rollouts import read_rollouts

NEUTRAL_TOKENS = 2000
SAMPLED_TOKENS = 1000
NOISE_REPLICATES = 3
CLEAR = 2.0  # standard errors, from which on a share of something is worth giving


@dataclass(frozen=True)
class DriftResult:
    """What was measured. `withheld` says why the systematic drift was not attributed to operations, if it was not."""

    mismatch: Measured
    expected: NoiseOnly
    systematic: SystematicDrift
    findings: tuple[Finding, ...]
    withheld: str | None

    def to_json(self) -> dict[str, Any]:
        """The JSON of `drift`, keys as in the documentation; variances in nats squared."""
        result = self.systematic
        attribution = result.attribution
        return {
            "tokens": result.tokens,
            "sequences": result.sequences,
            "replicates": result.replicates,
            "mismatch": asdict(self.mismatch.mismatch),
            "noise_rms": {who: _number(value) for who, value in result.noise_rms.items()},
            "expected_k3_from_noise": self.expected.k3,
            "systematic": _variance(result.total) | {"rms": result.total.rms, "p_value": result.total.p_value},
            "attribution": [_site(site, result.removed) for site in attribution.sites]
            if attribution and result.removed
            else [],
            "interaction": _variance(attribution.interaction) if attribution else None,
            "unexplained": _variance(result.aligned) if result.aligned else None,
            "control": _variance(result.controls.zero),
            "findings": [finding.to_dict() for finding in self.findings],
        }


def measure_drift(
    model: str,
    engine: str,
    trainer: str = "hf",
    *,
    to: str | None = None,
    tokens: int = NEUTRAL_TOKENS,
    quick: bool = False,
    replicates: int | None = None,
    seed: int = 0,
    stage: Stage = unwatched,
) -> DriftResult:
    """Measure the drift of `trainer` against `engine`: how much, how much of it systematic, from which operation, and what of
    it is not rounding.

    `model`: a directory, a hub id, or `smollm2`. `engine`, `trainer`: STACKs; the engine may be `rollouts:FILE`. `to`: how the
    engine rounds, as a target; without it nothing is attributed. `tokens`: how many neutral tokens. `quick`: without
    attribution. `replicates`: of each stack; by default as many as `QUICK_SECONDS` or `FULL_SECONDS` allow in all. Raises
    UsageError for bad input and MeasurementError where nothing can be measured.
    """
    started = time.monotonic()
    name = parse_stack(engine)
    if parse_stack(trainer).kind not in ("hf", "emulated"):
        raise UsageError(f"trainer `{trainer}` cannot be dithered: it must be hf, hf:compile, hf:autocast or emulated:TARGET")
    schedules = None if to is None else (_trainer_schedule(trainer), resolve_target(to).schedule)
    checkpoint = resolve_model(model)
    with ExitStack() as opened:
        directory = opened.enter_context(untied(checkpoint))
        stack = opened.enter_context(open_stack(trainer, directory))
        assert isinstance(stack, HFStack)
        running: Stack | None = None
        if name.kind == "rollouts":
            sampled = neutral = list(read_rollouts(Path(name.detail), stack.vocab_size))
        else:
            running = opened.enter_context(open_stack(engine, checkpoint if name.kind == "http" else directory))
            sampled = _sample(running, directory, seed, stage)
            neutral, _ = neutral_rollouts(directory, stack.vocab_size, tokens)
        weights = read_weights(directory)
        own, dithering = Dithering(weights, sampled), Dithering(weights, neutral)
        logprobs = [rollout.logprobs for rollout in sampled if rollout.logprobs is not None]
        with stage("scoring the engine's tokens", len(sampled)) as progress:
            mismatch = measure(logprobs, stack.score(sampled, progress=progress))

        dithers = running if name.kind not in ("rollouts", "http") else None
        with stage("rounding noise on the engine's tokens", 0):
            noise = own.score(stack, seeds(seed, "trainer on its tokens", NOISE_REPLICATES))
            if dithers is not None:
                engine_noise = own.score(dithers, seeds(seed, "engine on its tokens", NOISE_REPLICATES))
            elif schedules is not None:
                with aligned(stack, schedules[1]):
                    engine_noise = own.score(stack, seeds(seed, "engine on its tokens", NOISE_REPLICATES))
            else:
                engine_noise = noise
            expected = noise_only(noise, engine_noise)
        with stage("looking for causes other than rounding", 0):
            with as_transformers(stack) as plain:
                bos = plain.config.bos_token_id
                findings = find_causes(plain, sampled, expected, bos=bos, autocast=stack.mode == "autocast")
            if running is not None:
                findings += prefill_against_decode(running, sampled, expected)
        withheld = None
        if findings:
            withheld = f"the drift is not only rounding ({', '.join(finding.cause for finding in findings)})"
        elif schedules is None:
            withheld = "how the engine rounds is not known"
        elif quick:
            withheld = "left out because of `quick`"
        recorded = dithering.score_once(running) if running else Replicates(np.concatenate(logprobs)[None], own.lengths)
        systematic = measure_systematic(
            dithers or recorded,
            stack,
            dithering,
            schedules,
            full=withheld is None,
            replicates=replicates,
            budget=max((QUICK_SECONDS if quick else FULL_SECONDS) - (time.monotonic() - started), 1.0),
            seed=seed,
            stage=stage,
        )
    return DriftResult(mismatch, expected, systematic, tuple(findings), withheld)


def _trainer_schedule(trainer: str) -> RoundingSchedule:
    """How a trainer of ours rounds: what is documented, and for an emulation what it was told."""
    name = parse_stack(trainer)
    target = name.detail if name.kind == "emulated" else name.kind + PROFILE_MODES[name.detail]
    return resolve_target(target).schedule


def _sample(engine: Stack, model: Path, seed: int, stage: Stage) -> list[Rollout]:
    prompts, _ = prompt_ids(model, engine.vocab_size)
    length = -(-SAMPLED_TOKENS // len(prompts))
    with stage(f"sampling from {engine.name}", len(prompts)) as progress:
        return engine.sample(prompts, max_tokens=length, seed=seed, progress=progress)


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


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
