"""Prompts that every schedule answers alike: they tell a canary that was not loaded or asked as it is from an unusual stack."""

from __future__ import annotations

import numpy as np

from tripoint.canary.circuit import UNIT, Circuit
from tripoint.canary.emulator import bf16, ulp
from tripoint.canary.questions import Candidate, Prompt, Question, carry_source
from tripoint.canary.rope import VALUE, layers_asked


def controls(circuit: Circuit, rng: np.random.Generator) -> list[Question]:
    """Prompts that every schedule answers alike: copies through each kind of sub-block, and how many tokens are seen."""
    last = circuit.shape.layers - 1
    copies = []
    for add in sorted({0, 1, 2 * last, 2 * last + 1}):
        source = carry_source(circuit, add)
        for answer in (-1, 0, 1):
            value = float(bf16(rng.uniform(0.5, 0.99)))
            start = -float(value - answer * ulp(value))
            token = circuit.token(f"copy{add}.{answer}", {"one": UNIT, "self": UNIT, "result": start, source: value})
            copies.append(Prompt((token,), (answer,)))
    # Uniform attention divides the one value there is by the number of tokens.
    counts = []
    total = VALUE * len(layers_asked(circuit.shape.layers))
    for length in (1, 2, 4):
        token = circuit.token(f"count{length}", {"one": UNIT, "value": VALUE, "result": -total / length})
        counts.append(Prompt((circuit.pad,) * (length - 1) + (token,), (0,)))
    every = (Candidate((), {}),)
    return [Question("control", "copies", every, tuple(copies)), Question("control", "count", every, tuple(counts))]
