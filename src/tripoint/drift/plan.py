"""How many replicates and tokens a wanted precision takes, or a budget allows, judged from a small measurement.

The squared error of a systematic variance falls with the number of tokens N. Of its two parts, what tokens differ in stays as
it is however many replicates K there are, and what noise adds falls with K^2:

    stderr^2 = (a + c / K^2) / N

where c is read off the control, in which there is nothing but noise. Scoring costs K * N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tripoint.drift.systematic import MAX_REPLICATES, MIN_REPLICATES, SystematicDrift

FEWEST_TOKENS = 400


@dataclass(frozen=True)
class Plan:
    """Replicates of each stack, tokens, and the standard error (nats squared) of the systematic variance to be expected."""

    replicates: int
    tokens: int
    stderr: float


def plan(pilot: SystematicDrift, *, most_tokens: int, stderr: float | None = None, token_passes: float | None = None) -> Plan:
    """The cheapest measurement that reaches `stderr` (nats squared), or the best one with `token_passes` = replicates * tokens.

    Give one of the two. Where `stderr` is out of reach, the plan is the largest there is, and says what it will reach.
    """
    if (stderr is None) == (token_passes is None):
        raise ValueError("give either the standard error wanted or the passes allowed")
    k, n = pilot.replicates, pilot.tokens
    # The trainer has twice the replicates of the control's halves, the engine as many.
    noise = pilot.controls.zero.stderr**2 * (0.75**2) * n
    fixed = max(pilot.total.stderr**2 * n - noise, 0.0)

    def expected(replicates: int, tokens: int) -> float:
        return math.sqrt((fixed + noise * (k / replicates) ** 2) / tokens)

    options = []
    for replicates in range(MIN_REPLICATES, MAX_REPLICATES + 1):
        if token_passes is not None:
            tokens = int(token_passes / replicates)
        else:
            assert stderr is not None
            tokens = math.ceil(expected(replicates, 1) ** 2 / stderr**2)
        tokens = min(max(tokens, FEWEST_TOKENS), most_tokens)
        options.append(Plan(replicates, tokens, expected(replicates, tokens)))
    if token_passes is not None:
        affordable = [o for o in options if o.replicates * o.tokens <= token_passes] or options[:1]
        return min(affordable, key=lambda option: option.stderr)
    reached = [option for option in options if option.stderr <= float(stderr or 0) * (1 + 1e-9)]
    return min(reached, key=lambda o: o.replicates * o.tokens) if reached else min(options, key=lambda o: o.stderr)
