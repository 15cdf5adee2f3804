"""The vocabulary: where a stack rounds to BF16 in RoPE, SwiGLU and residual + RMSNorm.

A `RoundingSchedule` is the one type every part of Tripoint speaks: profiles document it, fingerprints measure it, the ops
compute under it, alignment imposes it, two of them are compared field by field. In text it is a line of codes,
`R3 S3 N3 carry=layer`, which `parse` reads and `str()` prints in one canonical form.

Grammar: `R1..R4 S1|S3|S5 N1..N6`, then any of `carry=bf16|layer|fp32|PERIOD|[i,j,...]`, `qk=both|out|none|norm`,
`angle=pos*inv|pos/timescale|exp2|powscale`, `cast=rne|rtz` or `cast=rope:rtz,norm.final:rtz`, and per-site norm codes
`N.input=`, `N.post_attention=`, `N.final=`.

Residual adds are numbered over the depth: add 2*i is the attention output's in layer i, add 2*i + 1 the MLP output's.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, Self, get_args

from tripoint.errors import UsageError

Table = Literal["bf16", "fp32"]
RopeCompute = Literal["bf16", "bf16_fma", "fp32"]
Angle = Literal["pos*inv", "pos/timescale", "exp2", "powscale"]
Sigmoid = Literal["fp32", "bf16"]
SumRound = Literal["before_var", "after_var", "never"]
Cast = Literal["rne", "rtz"]
Op = Literal["rope", "swiglu", "norm"]

OPS: tuple[Op, ...] = ("rope", "swiglu", "norm")
NORM_SITES: tuple[str, ...] = ("input", "post_attention", "final")

_ROPE_CODES: dict[str, tuple[Table, RopeCompute]] = {
    "R1": ("bf16", "bf16"),
    "R2": ("bf16", "bf16_fma"),
    "R3": ("bf16", "fp32"),
    "R4": ("fp32", "fp32"),
}
_SWIGLU_CODES: dict[str, tuple[bool, Sigmoid]] = {"S1": (True, "fp32"), "S3": (False, "fp32"), "S5": (True, "bf16")}
_NORM_CODES: dict[str, tuple[SumRound, bool]] = {
    "N1": ("before_var", True),
    "N2": ("before_var", False),
    "N3": ("never", False),
    "N4": ("never", True),
    "N5": ("after_var", False),
}
_QK_CODES: dict[str, tuple[bool, bool]] = {
    "both": (True, True),
    "out": (False, True),
    "none": (False, False),
    "norm": (True, False),
}


def _check(where: str, value: object, allowed: tuple[object, ...]) -> None:
    # `==` alone would let 1 pass for True.
    if not any(value == option and type(value) is type(option) for option in allowed):
        raise UsageError(f"{where}: {value!r} is not one of {', '.join(map(str, allowed))}")


def suggest(word: str, known: list[str]) -> str:
    """`; nearest: A, B` for an unknown word, or all that is known where nothing is near."""
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(near)}" if near else f"; known: {', '.join(known)}"


@dataclass(frozen=True)
class RopeRounding:
    """Rounding points of rotary position embedding."""

    table: Table
    compute: RopeCompute
    angle: Angle = "pos*inv"
    cast: Cast = "rne"

    def __post_init__(self) -> None:
        _check("rope.table", self.table, get_args(Table))
        _check("rope.compute", self.compute, get_args(RopeCompute))
        _check("rope.angle", self.angle, get_args(Angle))
        _check("rope.cast", self.cast, get_args(Cast))
        if (self.table, self.compute) not in _ROPE_CODES.values():
            raise UsageError(
                f"rope.table=fp32 with rope.compute={self.compute} cannot exist: a BF16 product needs BF16 operands; "
                "use compute=fp32 (R4) or table=bf16"
            )

    @property
    def code(self) -> str:
        return _code_of(_ROPE_CODES, (self.table, self.compute))


@dataclass(frozen=True)
class SwigluRounding:
    """Rounding points of the gated activation, act(gate) * up."""

    silu_round: bool
    sig: Sigmoid = "fp32"
    cast: Cast = "rne"

    def __post_init__(self) -> None:
        _check("swiglu.silu_round", self.silu_round, (True, False))
        _check("swiglu.sig", self.sig, get_args(Sigmoid))
        _check("swiglu.cast", self.cast, get_args(Cast))
        if (self.silu_round, self.sig) not in _SWIGLU_CODES.values():
            raise UsageError(
                "swiglu.sig=bf16 with swiglu.silu_round=false cannot exist: a BF16 sigmoid makes x*sigma a BF16 product; "
                "use silu_round=true (S5)"
            )

    @property
    def code(self) -> str:
        return _code_of(_SWIGLU_CODES, (self.silu_round, self.sig))


@dataclass(frozen=True)
class NormRounding:
    """Rounding points of one residual + RMSNorm site."""

    sum_round: SumRound
    norm_round: bool
    cast: Cast = "rne"

    def __post_init__(self) -> None:
        _check("norm.sum_round", self.sum_round, get_args(SumRound))
        _check("norm.norm_round", self.norm_round, (True, False))
        _check("norm.cast", self.cast, get_args(Cast))
        if (self.sum_round, self.norm_round) not in _NORM_CODES.values():
            raise UsageError(
                "norm.sum_round=after_var with norm.norm_round=true: no known kernel rounds so; use norm_round=false (N5)"
            )

    @property
    def code(self) -> str:
        return _code_of(_NORM_CODES, (self.sum_round, self.norm_round))


@dataclass(frozen=True)
class QkNormRounding:
    """Rounding points of a QK-norm: the normalised value, and the output on its way into RoPE."""

    norm_round: bool
    out_round: bool
    cast: Cast = "rne"

    def __post_init__(self) -> None:
        _check("norm.qk.norm_round", self.norm_round, (True, False))
        _check("norm.qk.out_round", self.out_round, (True, False))
        _check("norm.qk.cast", self.cast, get_args(Cast))
        if not (self.norm_round or self.out_round):
            # Nothing is rounded, so the kind of rounding has no effect: one form for both.
            object.__setattr__(self, "cast", "rne")

    @property
    def code(self) -> str:
        return _code_of(_QK_CODES, (self.norm_round, self.out_round))


@dataclass(frozen=True)
class NormSites:
    """The norm of each site; `qk` is None where nothing is said about a QK-norm (the model may have none)."""

    input: NormRounding
    post_attention: NormRounding
    final: NormRounding
    qk: QkNormRounding | None = None


Carry = str | int | tuple[int, ...]


def _normal_carry(carry: Carry) -> Carry:
    """The one form of a set of rounding adds: 'bf16', 'layer', 'fp32', a period above 2, or a sorted non-empty list."""
    if isinstance(carry, str):
        _check("carry", carry, ("bf16", "layer", "fp32"))
        return carry
    if isinstance(carry, int) and not isinstance(carry, bool):
        if carry < 1:
            raise UsageError(f"carry={carry}: a period of residual adds is 1 or more")
        return {1: "bf16", 2: "layer"}.get(carry, carry)
    if isinstance(carry, tuple) and all(isinstance(add, int) and not isinstance(add, bool) for add in carry):
        if any(add < 0 for add in carry):
            raise UsageError(f"carry={list(carry)}: residual adds are numbered from 0")
        return tuple(sorted(set(carry))) or "fp32"
    raise UsageError(f"carry={carry!r} is neither bf16, layer, fp32, a period nor a list of residual adds")


@dataclass(frozen=True)
class RoundingSchedule:
    """The ordered BF16 rounding points of the three operations in one stack.

    `carry` is the set of residual adds whose sum is rounded before the next add sees it: "bf16" (all), "layer" (the
    last of each decoder layer), "fp32" (none), a period n (every n-th), or a tuple of add numbers.

    Raises UsageError for a value or a combination that cannot exist.
    """

    rope: RopeRounding
    swiglu: SwigluRounding
    norm: NormSites
    carry: Carry = "bf16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "carry", _normal_carry(self.carry))
        # The final norm's sum goes nowhere else, and under carry=layer the add in front of an input norm is rounded:
        # elsewhere a sum that the norm sees rounded is the sum the next add sees.
        unrounded = [site for site in ("input", "post_attention") if not self._always_rounds(site)]
        for site in unrounded:
            if getattr(self.norm, site).sum_round == "before_var":
                raise UsageError(
                    f"carry={_carry_text(self.carry)} with norm.{site}.sum_round=before_var cannot exist: the residual sum "
                    "is rounded before the norm; use carry=bf16, or N3, N4 or N5 there"
                )

    def _always_rounds(self, site: str) -> bool:
        return self.carry == "bf16" or (self.carry == "layer" and site == "input")

    def carry_rounds(self, add: int) -> bool:
        """Whether the residual sum of add number `add` is rounded before the next add."""
        carry = self.carry
        if isinstance(carry, tuple):
            return add in carry
        if carry == "fp32":
            return False
        period = {"bf16": 1, "layer": 2}[carry] if isinstance(carry, str) else carry
        return (add + 1) % period == 0

    # -- text ---------------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a line of codes such as `R3 S3 N3 carry=layer qk=none`. Raises UsageError naming the unknown word."""
        words = text.split()
        codes: dict[str, str] = {}
        settings: dict[str, str] = {}
        for word in words:
            key, equals, value = word.partition("=")
            if equals:
                if key not in _SETTINGS:
                    raise UsageError(f"schedule {text!r}: unknown setting {key!r}{suggest(key, list(_SETTINGS))}")
                if key in settings:
                    raise UsageError(f"schedule {text!r}: {key} is given twice; give it once")
                settings[key] = value
            else:
                if word not in CODES:
                    raise UsageError(f"schedule {text!r}: unknown code {word!r}{suggest(word.upper(), list(CODES))}")
                if word[0] in codes:
                    raise UsageError(f"schedule {text!r}: {codes[word[0]]} and {word} are both given; give one of them")
                codes[word[0]] = word
        missing = [f"{letter} ({op})" for letter, op in zip("RSN", OPS, strict=True) if letter not in codes]
        if missing:
            raise UsageError(f"schedule {text!r}: no code for {', '.join(missing)}; write for example 'R3 S3 N3 carry=layer'")

        casts = _parse_casts(text, settings.get("cast", "rne"))
        table, compute = _ROPE_CODES[codes["R"]]
        silu_round, sig = _SWIGLU_CODES[codes["S"]]
        carry = _parse_carry(text, settings["carry"]) if "carry" in settings else "bf16"
        if codes["N"] == "N6":
            if settings.get("carry", "fp32") != "fp32":
                raise UsageError(f"schedule {text!r}: N6 means N3 carry=fp32; write N3 for another carry")
            carry = "fp32"
        sites: dict[str, NormRounding] = {}
        for site in NORM_SITES:
            code = settings.get(f"N.{site}", "N3" if codes["N"] == "N6" else codes["N"])
            if code not in _NORM_CODES:
                raise UsageError(f"schedule {text!r}: N.{site}={code!r} is not a norm code{suggest(code, list(_NORM_CODES))}")
            sites[site] = NormRounding(*_NORM_CODES[code], cast=casts[f"norm.{site}"])
        qk = None
        if "qk" in settings:
            _check(f"schedule {text!r}: qk", settings["qk"], tuple(_QK_CODES))
            qk = QkNormRounding(*_QK_CODES[settings["qk"]], cast=casts["norm.qk"])
        return cls(
            rope=RopeRounding(table, compute, settings.get("angle", "pos*inv"), casts["rope"]),  # type: ignore[arg-type]
            swiglu=SwigluRounding(silu_round, sig, casts["swiglu"]),
            norm=NormSites(sites["input"], sites["post_attention"], sites["final"], qk),
            carry=carry,
        )

    def __str__(self) -> str:
        site_codes = {site: getattr(self.norm, site).code for site in NORM_SITES}
        base = Counter(site_codes.values()).most_common(1)[0][0]
        words = [self.rope.code, self.swiglu.code, base]
        words += [f"N.{site}={code}" for site, code in site_codes.items() if code != base]
        if self.carry != "bf16":
            words.append(f"carry={_carry_text(self.carry)}")
        if self.norm.qk is not None:
            words.append(f"qk={self.norm.qk.code}")
        if self.rope.angle != "pos*inv":
            words.append(f"angle={self.rope.angle}")
        cast = self._cast_text()
        return " ".join(words + ([f"cast={cast}"] if cast else []))

    def _cast_text(self) -> str:
        truncated = {place for place, cast in self._casts().items() if cast == "rtz"}
        if truncated >= set(self._casts()):
            return "rtz"
        norms = {place for place in self._casts() if place.startswith("norm.")}
        if norms <= truncated:
            truncated = (truncated - norms) | {"norm"}
        return ",".join(f"{place}:rtz" for place in _CAST_PLACES if place in truncated)

    def _casts(self) -> dict[str, Cast]:
        """The cast of every place that rounds."""
        casts = {"rope": self.rope.cast, "swiglu": self.swiglu.cast}
        casts |= {f"norm.{site}": getattr(self.norm, site).cast for site in NORM_SITES}
        if self.norm.qk is not None and self.norm.qk.code != "none":
            casts["norm.qk"] = self.norm.qk.cast
        return casts

    # -- dictionaries (JSON, TOML) ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The `schedule` object of the `fingerprint` JSON."""
        out = asdict(self)
        if isinstance(self.carry, tuple):
            out["carry"] = list(self.carry)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "schedule") -> Self:
        """Inverse of `to_dict`. Raises UsageError naming the missing, unknown or impossible key."""

        def read(kind: type[Any], value: object, path: str) -> Any:
            if not isinstance(value, Mapping):
                raise UsageError(f"{path}: expected a table of fields, found {value!r}")
            known = [f.name for f in fields(kind)]
            for key in value:
                if key not in known:
                    raise UsageError(f"{path}: unknown field {key!r}{suggest(str(key), known)}")
            try:
                return kind(**value)
            except TypeError:
                needed = [f.name for f in fields(kind) if f.name not in value]
                raise UsageError(f"{path}: missing field, one of {', '.join(needed)}") from None

        if not isinstance(data, Mapping):
            raise UsageError(f"{where}: expected a table of fields, found {data!r}")
        parts = dict(data)
        for key, kind in (("rope", RopeRounding), ("swiglu", SwigluRounding)):
            if key in parts:
                parts[key] = read(kind, parts[key], f"{where}.{key}")
        if "norm" in parts:
            if not isinstance(parts["norm"], Mapping):
                raise UsageError(f"{where}.norm: expected a table of sites, found {parts['norm']!r}")
            sites = dict(parts["norm"])
            for site in NORM_SITES:
                if site in sites:
                    sites[site] = read(NormRounding, sites[site], f"{where}.norm.{site}")
            if sites.get("qk") is not None:
                sites["qk"] = read(QkNormRounding, sites["qk"], f"{where}.norm.qk")
            parts["norm"] = read(NormSites, sites, f"{where}.norm")
        if isinstance(parts.get("carry"), list):
            parts["carry"] = tuple(parts["carry"])
        schedule: Self = read(cls, parts, where)
        return schedule

    # -- comparing ----------------------------------------------------------------------------------------------------

    @cached_property
    def flat(self) -> dict[str, object]:
        """Every field by its dotted name, `rope.table` ... `norm.final.cast`, `carry`; QK fields only where stated."""
        out: dict[str, object] = {}
        for name, part in (("rope", self.rope), ("swiglu", self.swiglu)):
            out |= {f"{name}.{key}": value for key, value in asdict(part).items()}
        for site in (*NORM_SITES, "qk"):
            part = getattr(self.norm, site)
            if part is not None:
                out |= {f"norm.{site}.{key}": value for key, value in asdict(part).items()}
        out["carry"] = self.carry
        return out

    def moved(self, towards: RoundingSchedule, ops: tuple[Op, ...]) -> RoundingSchedule:
        """This schedule with the operations `ops` taken from another; `norm` takes its sites, QK-norm and carry along."""
        for op in ops:
            _check("operation", op, OPS)
        out = self
        if "rope" in ops:
            out = replace(out, rope=towards.rope)
        if "swiglu" in ops:
            out = replace(out, swiglu=towards.swiglu)
        if "norm" in ops:
            out = replace(out, norm=towards.norm, carry=towards.carry)
        return out


@dataclass(frozen=True)
class Difference:
    """One field in which two schedules differ."""

    field: str
    left: object
    right: object

    @property
    def op(self) -> Op:
        return "norm" if self.field == "carry" else self.field.split(".")[0]  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{self.field}: {value_text(self.left)} | {value_text(self.right)}"


def diff(left: RoundingSchedule, right: RoundingSchedule) -> list[Difference]:
    """The fields in which two schedules differ; its length is their distance.

    QK-norm fields count only where both schedules state them: a model without a QK-norm rounds nowhere in it.
    """
    shared = [name for name in left.flat if name in right.flat]
    return [Difference(name, left.flat[name], right.flat[name]) for name in shared if left.flat[name] != right.flat[name]]


CODES: tuple[str, ...] = (*_ROPE_CODES, *_SWIGLU_CODES, *_NORM_CODES, "N6")
_SETTINGS: tuple[str, ...] = ("carry", "qk", "angle", "cast", *(f"N.{site}" for site in NORM_SITES))
_CAST_PLACES: tuple[str, ...] = ("rope", "swiglu", "norm", *(f"norm.{site}" for site in NORM_SITES), "norm.qk")


def _code_of(codes: Mapping[str, tuple[Any, ...]], values: tuple[Any, ...]) -> str:
    return next(code for code, known in codes.items() if known == values)


def _carry_text(carry: Carry) -> str:
    return f"[{','.join(map(str, carry))}]" if isinstance(carry, tuple) else str(carry)


def value_text(value: object) -> str:
    """A field's value as the grammar writes it."""
    return _carry_text(value) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)


def _parse_carry(text: str, word: str) -> Carry:
    if word in ("bf16", "layer", "fp32"):
        return word
    if re.fullmatch(r"\d+", word):
        return int(word)
    if re.fullmatch(r"\[(\d+(,\d+)*)?\]", word):
        return tuple(int(add) for add in word[1:-1].split(",") if add)
    raise UsageError(f"schedule {text!r}: carry={word!r} is not bf16, layer, fp32, a period such as 4, or a list such as [1,5]")


def _parse_casts(text: str, word: str) -> dict[str, Cast]:
    """`rtz` for all, or `place:cast,...` where `norm` stands for all its sites."""
    casts: dict[str, Cast] = {place: "rne" for place in _CAST_PLACES}
    items = [item.split(":") for item in word.split(",")] if ":" in word else [["", word]]
    for item in items:
        if len(item) != 2:
            raise UsageError(f"schedule {text!r}: cast={word!r} is not rne, rtz or a list such as rope:rtz,norm.final:rtz")
        place, cast = item
        _check(f"schedule {text!r}: cast", cast, get_args(Cast))
        if place and place not in _CAST_PLACES:
            raise UsageError(f"schedule {text!r}: cast of unknown place {place!r}{suggest(place, list(_CAST_PLACES))}")
        for known in _CAST_PLACES:
            if known == place or known.startswith(f"{place}.") or not place:
                casts[known] = cast  # type: ignore[assignment]
    return casts
