"""Puts a rounding schedule into a live transformers model, instance by instance, and takes it out again."""

from tripoint.align.model import AlignedSite, Alignment, align

__all__ = ["AlignedSite", "Alignment", "align"]
