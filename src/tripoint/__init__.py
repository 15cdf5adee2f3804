"""Tripoint finds, measures and aligns the BF16 rounding points where an RL trainer and its inference engine disagree."""

from typing import TYPE_CHECKING, Any

from tripoint.align import align
from tripoint.errors import MeasurementError, UsageError
from tripoint.schedule import RoundingSchedule

if TYPE_CHECKING:
    from tripoint.canary import fingerprint

__all__ = ["MeasurementError", "RoundingSchedule", "UsageError", "align", "fingerprint"]


def __getattr__(name: str) -> Any:
    """Import what needs torch at first use: the command line wants `tripoint` without it."""
    if name == "fingerprint":
        from tripoint.canary import fingerprint

        return fingerprint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
