"""How many replicates and tokens a wanted precision takes, judged from a small measurement.

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
ROUNDING = 1e-9


@dataclass(frozen=True)
class Plan:
    """Replicates of each stack, tokens, and the standard error (nats squared) of the systematic variance to be expected."""

    replicates: int
    tokens: int
    stderr: float

    def sentence(self, wanted: float) -> str:
        """What is planned and what it will reach, next to the standard error `wanted`."""
        size = f"{self.replicates} replicates of about {self.tokens} tokens"
        text = f"planned {size}, for a standard error of {self.stderr:.2g} nats²"
        return text if self.stderr <= wanted * (1 + ROUNDING) else f"{text}: the {wanted:.2g} asked for are out of reach"


def plan(pilot: SystematicDrift, *, stderr: float, most_tokens: int) -> Plan:
    """The cheapest measurement that reaches `stderr` (nats squared).

    Where that is out of reach, the plan is the most exact there is, and says what it will reach.
    """
    k, n = pilot.replicates, pilot.tokens
    # The trainer has twice the replicates of the control's halves, the engine as many.
    noise = pilot.controls.zero.stderr**2 * (0.75**2) * n
    fixed = max(pilot.total.stderr**2 * n - noise, 0.0)

    def expected(replicates: int, tokens: int) -> float:
        return math.sqrt((fixed + noise * (k / replicates) ** 2) / tokens)

    options = []
    for replicates in range(MIN_REPLICATES, MAX_REPLICATES + 1):
        tokens = math.ceil(expected(replicates, 1) ** 2 / stderr**2)
        tokens = min(max(tokens, FEWEST_TOKENS), most_tokens)
        options.append(Plan(replicates, tokens, expected(replicates, tokens)))
    reached = [option for option in options if option.stderr <= stderr * (1 + ROUNDING)]
    return min(reached, key=lambda o: o.replicates * o.tokens) if reached else min(options, key=lambda o: o.stderr)
