"""Which implementation of the ops runs: the fused one for the tensor's device, or the one `TRIPOINT_BACKEND` names.

Every backend is a module with the functions of `reference`, their arguments and their results.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from types import ModuleType

import torch

from tripoint.errors import UsageError
from tripoint.ops import reference

BACKENDS: tuple[str, ...] = ("reference", "cpu", "triton")
_DEFAULTS = {"cpu": "cpu", "cuda": "triton"}


class BackendError(Exception):
    """A fused backend cannot run here; the message says why."""


def backend_for(device: torch.device) -> ModuleType:
    """The module whose functions serve tensors on `device`. Raises UsageError if `TRIPOINT_BACKEND` names none.

    A fused backend that cannot run is replaced by `reference`, slower and with the same results, with one warning.
    """
    return _load(os.environ.get("TRIPOINT_BACKEND") or _DEFAULTS.get(device.type, "reference"), device.type)


@functools.cache
def _load(name: str, device_type: str) -> ModuleType:
    if name == "reference":
        return reference
    if name not in BACKENDS:
        raise UsageError(f"TRIPOINT_BACKEND={name}: unknown backend; set it to one of {', '.join(BACKENDS)}, or unset it")
    try:
        backend = importlib.import_module(f"tripoint.ops.{name}")
        backend.prepare(device_type)
    except (BackendError, ImportError) as error:
        warnings.warn(
            f"tripoint: no {name} kernels for {device_type} tensors, the slower reference operations run instead ({error})",
            RuntimeWarning,
            stacklevel=2,
        )
        return reference
    return backend
