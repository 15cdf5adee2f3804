"""How far a trainer's log-probabilities lie from an engine's, and how much of that is systematic."""

from tripoint.drift.mismatch import Measured, Mismatch, measure
from tripoint.drift.result import DriftResult, measure_drift

__all__ = ["DriftResult", "Measured", "Mismatch", "measure", "measure_drift"]
