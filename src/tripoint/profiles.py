"""Documented schedules of known stacks, and the one grammar by which every command and function names a target.

A target is a line of codes (`R3 S3 N3 carry=layer`), a fingerprint file (`.toml`), a `RoundingSchedule`, or a profile
`NAME@VERSION/DEVICE/MODE/tpN` such as `vllm@0.32/cuda/compiled/tp1`, whose parts may be left out: the version is then the
installed package's, the device this machine's, the mode the stack's usual one, the tensor-parallel size 1.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from tripoint.errors import UsageError
from tripoint.schedule import CODES, RoundingSchedule, suggest

DEVICES: tuple[str, ...] = ("cpu", "cuda", "metal")


@dataclass(frozen=True)
class Profile:
    """What is documented for one stack, in some versions, on some devices, in one mode."""

    stack: str
    versions: SpecifierSet
    devices: tuple[str, ...]
    mode: str
    tp: SpecifierSet
    schedule: RoundingSchedule
    source: str
    note: str


@dataclass(frozen=True)
class DocumentedStack:
    """A stack that has profiles: the packages that tell its version, the mode meant where none is given."""

    name: str
    packages: tuple[str, ...]
    mode: str
    profiles: tuple[Profile, ...]

    def offered(self, attribute: str) -> list[str]:
        """The devices or modes that its profiles cover, each once, in the file's order."""
        values = [getattr(profile, attribute) for profile in self.profiles]
        return list(dict.fromkeys(v for value in values for v in ((value,) if isinstance(value, str) else value)))


@dataclass(frozen=True)
class Target:
    """A schedule with how it was named and one printable line that says where it comes from."""

    schedule: RoundingSchedule
    name: str
    detail: str


@cache
def documented_stacks() -> dict[str, DocumentedStack]:
    """Every stack of profiles.toml by name."""
    data = tomllib.loads(files("tripoint").joinpath("profiles.toml").read_text(encoding="utf-8"))
    return {
        name: DocumentedStack(
            name,
            tuple(entry["packages"]),
            entry["mode"],
            tuple(
                Profile(
                    stack=name,
                    versions=SpecifierSet(profile["versions"]),
                    devices=tuple(profile["devices"]),
                    mode=profile["mode"],
                    tp=SpecifierSet(profile["tp"]),
                    schedule=RoundingSchedule.parse(profile["schedule"]),
                    source=profile["source"],
                    note=" ".join(profile["note"].split()),
                )
                for profile in entry["profile"]
            ),
        )
        for name, entry in data["stack"].items()
    }


def profile_names() -> list[str]:
    """Every stack with each of its modes, as one may type it: `vllm/compiled`, `vllm/eager`, `hf/eager`, ..."""
    return [f"{stack.name}/{mode}" for stack in documented_stacks().values() for mode in stack.offered("mode")]


def resolve_target(to: str | Path | RoundingSchedule) -> Target:
    """Read a target; see the module's docstring for its forms.

    Raises UsageError where it is unknown, ambiguous, or not covered by what is documented.
    """
    if isinstance(to, RoundingSchedule):
        return Target(to, str(to), f"schedule {to}")
    text = str(to).strip()
    if isinstance(to, Path) or text.endswith(".toml"):
        return _from_file(Path(text))
    name = re.split("[@/]", text)[0]
    if name in documented_stacks():
        return _from_profile(text, documented_stacks()[name])
    if any(word.partition("=")[1] or re.fullmatch(r"[A-Za-z]\d", word) for word in text.split()):
        schedule = RoundingSchedule.parse(text)
        return Target(schedule, str(schedule), f"schedule {schedule}")
    known = [*documented_stacks(), *profile_names(), *CODES]
    raise UsageError(f"target {text!r} is not a schedule, a .toml file or a known profile{suggest(text, known)}")


def _from_file(path: Path) -> Target:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; save a fingerprint there with `tripoint fingerprint STACK --save`") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # tomllib names line and column; a file that is not UTF-8 ends here too
        raise UsageError(f"{path}: not a TOML file: {error}") from None
    if "schedule" not in data:
        raise UsageError(f"{path}: no [schedule] table; save a fingerprint with `tripoint fingerprint STACK --save`")
    if isinstance(left := data.get("undetermined"), list) and left:
        raise UsageError(
            f"{path}: this fingerprint of {data.get('stack', 'a stack')} left {', '.join(map(str, left))} undetermined, "
            "so it is no target; its findings say why"
        )
    try:
        schedule = RoundingSchedule.from_dict(data["schedule"])
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    origin = f", measured on {data['stack']}" if "stack" in data else ""
    conditions = data.get("conditions")
    if origin and isinstance(conditions, dict) and "layers" in conditions:
        origin += f" at {conditions['layers']} layers"  # of which carry speaks
    return Target(schedule, str(path), f"schedule {schedule} from {path}{origin}")


def _from_profile(text: str, stack: DocumentedStack) -> Target:
    version_text, device, mode, tp = _parts(text, stack)
    version, package = _version(text, stack, version_text)
    device, device_why = (device, "as given") if device else _device(stack, package)

    candidates = [profile for profile in stack.profiles if profile.mode == mode and device in profile.devices]
    if not candidates:
        offers = [f"{d}/{p.mode}" for p in stack.profiles for d in p.devices]
        raise UsageError(f"profile {text!r}: nothing documented for {device}/{mode}; known: {', '.join(dict.fromkeys(offers))}")
    for profile in candidates:
        if profile.versions.contains(version, prereleases=True) and profile.tp.contains(str(tp)):
            chosen = f"{stack.name}@{version}/{device}/{mode}/tp{tp}"
            how = f"version {f'of installed {package}' if package else 'as given'}, device {device_why}"
            note = f"; note: {profile.note}" if profile.note else ""
            detail = f"schedule {profile.schedule} of {chosen} ({how}); source: {profile.source}{note}"
            return Target(profile.schedule, text, detail)
    ranges = dict.fromkeys(f"{p.versions or 'any'} with tp {p.tp or 'any'}" for p in candidates)
    raise UsageError(
        f"profile {text!r}: {stack.name} {version} with tp {tp} on {device} in mode {mode} is not documented (versions "
        f"{'; '.join(ranges)}); name a version of those, or measure it with `tripoint fingerprint`"
    )


def _parts(text: str, stack: DocumentedStack) -> tuple[str | None, str | None, str, int]:
    """Version and device where given, mode and tensor-parallel size."""
    head, *rest = text.split("/")
    _, _, version = head.partition("@")
    modes = stack.offered("mode")
    found: dict[str, str] = {}
    for part in rest:
        if part in DEVICES:
            kind = "device"
        elif part in modes:
            kind = "mode"
        elif re.fullmatch(r"tp[1-9]\d*", part):
            kind = "tensor-parallel size"
        else:
            raise UsageError(f"profile {text!r}: unknown part {part!r}{suggest(part, [*modes, *DEVICES, 'tp1'])}")
        if kind in found:
            raise UsageError(f"profile {text!r}: two values for the {kind}, {found[kind]} and {part}; give one")
        found[kind] = part
    tp = int(found.get("tensor-parallel size", "tp1")[2:])
    return version or None, found.get("device"), found.get("mode", stack.mode), tp


def _version(text: str, stack: DocumentedStack, given: str | None) -> tuple[Version, str | None]:
    """The version, and the installed package that told it where none was given."""
    if given is not None:
        try:
            return Version(given), None
        except InvalidVersion:
            raise UsageError(f"profile {text!r}: {given!r} is not a version; write for example {stack.name}@0.32") from None
    for package in stack.packages:
        try:
            return Version(importlib.metadata.version(package)), package
        except importlib.metadata.PackageNotFoundError:
            continue
    rest = text.removeprefix(stack.name).removeprefix("@")
    raise UsageError(
        f"profile {text!r}: {' or '.join(stack.packages)} is not installed here, so the version must be given, "
        f"for example {stack.name}@{_example_version(stack)}{rest}"
    )


def _example_version(stack: DocumentedStack) -> str:
    """A version that some profile of the stack names, else 1.0."""
    named = [spec.version.removesuffix(".*") for profile in stack.profiles for spec in profile.versions if spec.operator != "<"]
    return named[0] if named else "1.0"


def _device(stack: DocumentedStack, package: str | None) -> tuple[str, str]:
    """The device where none is given, and what decided it."""
    offered = stack.offered("devices")
    if len(offered) == 1:
        return offered[0], f"the only one documented for {stack.name}"
    if package is not None and package.endswith("-cpu"):
        return "cpu", f"of {package}"
    if "metal" in offered and sys.platform == "darwin":
        return "metal", "of this machine"
    if "cuda" not in offered:
        return "cpu", f"the one documented for {stack.name} on {sys.platform}"
    import torch

    return ("cuda", "of this machine") if torch.cuda.is_available() else ("cpu", "of this machine, which has no CUDA")
