"""Our own ops as a stack: transformers rounding wherever a schedule says, decoding with a KV cache as an engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tripoint.align import align
from tripoint.stacks.hf import HFStack


class EmulatedStack(HFStack):
    """`hf` with its model aligned to `target`. `alignment` is the record of what was changed."""

    def __init__(self, model: Path, *, target: str, device: str | None = None, dtype: str = "bfloat16") -> None:
        """As `HFStack`. Raises UsageError for a target that does not parse or a model that cannot be aligned."""
        super().__init__(model, device=device, dtype=dtype)
        self.name = f"emulated:{target}"
        self.alignment = align(self.model, to=target)

    def conditions(self) -> dict[str, Any]:
        return super().conditions() | {"schedule": self.name.removeprefix("emulated:")}
