"""Hypothesis strategies: rounding schedules over the whole vocabulary, and tensors with awkward values and layouts."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tripoint.schedule import NormRounding, NormSites, QkNormRounding, RopeRounding, RoundingSchedule, SwigluRounding

CASTS = ("rne", "rtz")
ROPE = {"R1": ("bf16", "bf16"), "R2": ("bf16", "bf16_fma"), "R3": ("bf16", "fp32"), "R4": ("fp32", "fp32")}
SWIGLU = {"S1": (True, "fp32"), "S3": (False, "fp32"), "S5": (True, "bf16")}
NORM = {
    "N1": ("before_var", True),
    "N2": ("before_var", False),
    "N3": ("never", False),
    "N4": ("never", True),
    "N5": ("after_var", False),
}
QK = {"both": (True, True), "out": (False, True), "none": (False, False), "norm": (True, False)}
"""The fields of each code, written out once more so that tests do not ask the code under test."""

casts = st.sampled_from(CASTS)
ropes = st.builds(
    lambda code, angle, cast: RopeRounding(*ROPE[code], angle, cast),
    st.sampled_from(list(ROPE)),
    st.sampled_from(["pos*inv", "pos/timescale", "exp2", "powscale"]),
    casts,
)
swiglus = st.builds(lambda code, cast: SwigluRounding(*SWIGLU[code], cast), st.sampled_from(list(SWIGLU)), casts)
qks = st.none() | st.builds(lambda code, cast: QkNormRounding(*QK[code], cast), st.sampled_from(list(QK)), casts)
carries = st.one_of(
    st.sampled_from(["bf16", "layer", "fp32"]),
    st.integers(1, 64),
    st.lists(st.integers(0, 63), max_size=5).map(tuple),
)


def norms(codes: tuple[str, ...] = tuple(NORM)) -> st.SearchStrategy[NormRounding]:
    return st.builds(lambda code, cast: NormRounding(*NORM[code], cast), st.sampled_from(codes), casts)


@st.composite
def schedules(draw: st.DrawFn) -> RoundingSchedule:
    """Every schedule that can exist."""
    carry = draw(carries)
    # A sum that a norm sees rounded is rounded in the residual stream too.
    unrounded = ("N3", "N4", "N5")
    every_add_rounds = carry in ("bf16", 1)
    return RoundingSchedule(
        draw(ropes),
        draw(swiglus),
        NormSites(
            input=draw(norms() if every_add_rounds or carry in ("layer", 2) else norms(unrounded)),
            post_attention=draw(norms() if every_add_rounds else norms(unrounded)),
            final=draw(norms()),
            qk=draw(qks),
        ),
        carry,
    )


SPECIAL = (0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 65504.0, 1e-30, -1e-39, 6e-8, -1e-45, float("inf"), -float("inf"), float("nan"))


@st.composite
def tensors(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0, special: bool = True, strided: bool = True
) -> Tensor:
    """Normally distributed values over a drawn range of magnitudes, some of them special, in a drawn memory layout."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = scale * rng.standard_normal(shape) * 2.0 ** rng.integers(-draw(st.sampled_from([0, 4, 20])), 1, shape)
    if special and draw(st.booleans()):
        chosen = rng.random(shape) < 0.1
        values = np.where(chosen, rng.choice(np.array(SPECIAL), shape), values)
    x = torch.from_numpy(values).to(torch.float32).to(dtype)
    return laid_out(x, draw(st.sampled_from(LAYOUTS))) if strided else x


LAYOUTS = ("contiguous", "transposed", "sliced")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values: contiguous, as a view of [..., b, a, n] (queries after `transpose(1, 2)`), or half of a wider one."""
    if layout == "transposed" and x.dim() >= 3:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "sliced":
        return torch.cat((x, x), dim=-1)[..., : x.shape[-1]]
    return x.contiguous()
