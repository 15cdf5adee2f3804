"""Tripoint finds, measures and aligns the BF16 rounding points where an RL trainer and its inference engine disagree."""

from tripoint.align import align
from tripoint.errors import MeasurementError, UsageError
from tripoint.schedule import RoundingSchedule

__all__ = ["MeasurementError", "RoundingSchedule", "UsageError", "align"]
