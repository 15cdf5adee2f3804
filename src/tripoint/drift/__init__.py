"""How far a trainer's log-probabilities lie from an engine's."""

from tripoint.drift.compare import Drift, compare
from tripoint.drift.mismatch import Measured, Mismatch, measure

__all__ = ["Drift", "Measured", "Mismatch", "compare", "measure"]
