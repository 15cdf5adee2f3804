"""Canary checkpoints: a stack tells where it rounds, by its own greedy tokens.

A canary (`build`) is an ordinary checkpoint whose next token after a known prompt depends on where the stack rounds; `read`
turns the answers into a `Fingerprint`. `fingerprint` asks a trainer's own loading code, `fingerprint_stack` any stack,
`fingerprint_in_place` a running one.

`emulator` predicts, `circuit` wires, `questions`, `rope` and `controls` ask, `checkpoint` puts together, `reading` reads.
"""

from tripoint.canary.asking import ask, fingerprint, fingerprint_in_place, fingerprint_stack
from tripoint.canary.checkpoint import Canary, build
from tripoint.canary.reading import Fingerprint, Observed, read
from tripoint.canary.shape import CanaryShape

__all__ = [
    "Canary",
    "CanaryShape",
    "Fingerprint",
    "Observed",
    "ask",
    "build",
    "fingerprint",
    "fingerprint_in_place",
    "fingerprint_stack",
    "read",
]
