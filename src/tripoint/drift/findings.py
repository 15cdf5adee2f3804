"""What a mismatch comes from when it is not rounding: a bisector over the settings in which two stacks can differ.

Each suspect is put to the test by changing the trainer's own computation and scoring the engine's tokens again. The change
under which the engine's log-probabilities fit best is kept and the search goes on from there, so that two causes at once are
found one after the other. What is left and far above rounding noise is named by its shape. Nothing here needs the engine to
be running: recorded rollouts are enough.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tripoint.align import align
from tripoint.drift.dither import Floats
from tripoint.drift.estimate import student_tail
from tripoint.drift.expectation import NoiseOnly
from tripoint.drift.groups import group_numbers, group_sums
from tripoint.drift.mismatch import MIN_SEQUENCES
from tripoint.errors import MeasurementError, UsageError
from tripoint.stacks import Rollout, Stack

CERTAIN = 1e-6  # the probability of a fit by chance below which a cause is named
MATERIAL = 0.03  # the share of the misfit that a cause has to remove
MATERIAL_READOUT = 0.1  # the same where a free parameter could take up anything
CLEAR = 0.3  # the same where much stays unexplained all the same
FAR_ABOVE = 1.5  # times the k3 that noise alone hardly ever exceeds
FEW = 0.02  # of the tokens
RARE = 1e-3  # of the tokens, or two, that may fall either way without having shown it in their noise
MANY_STEPS = 8.0  # of the noise, from which on a token is wild
QUIET = 1e-3  # nats, below which noise is as good as none
AUDIBLE = 0.15  # times the noise, from which on that of rounded logits can be told from it
SWAPPED = 3.0  # of the noise, up to which two tokens may be the other way round in the engine
MAX_CAUSES = 4
BATCH_TOKENS = 4096
ROWS = 256  # positions whose FP32 logits exist at a time

TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TOP_K = (1, 2, 5, 8, 10, 20, 30, 40, 50, 64, 100, 200)
THETAS = (1e4, 1e5, 5e5, 1e6)
THETA_FACTORS = (0.01, 0.1, 0.5, 2.0, 10.0, 100.0)
LINEAR_FACTORS = (2.0, 4.0, 8.0)
# Rounding schedules that agree in none of the operations.
DECORRELATED = ("R1 S1 N1", "R3 S3 N3", "R4 S1 N2 carry=bf16", "R2 S3 N4")


@dataclass(frozen=True)
class Finding:
    """One cause: its evidence in words and numbers, its size, and the setting to change.

    `nats`: the root mean square over tokens of the log-probability difference that it makes. For `sampling_*` that is between
    the distribution the tokens were drawn from and the recorded one. `rounding`: the cause is rounding noise, only in a place
    where it looks like something else, and no reason to withhold anything.
    """

    cause: str
    evidence: str
    nats: float
    setting: str
    rounding: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As in the JSON of `drift`."""
        return {name: value for name, value in asdict(self).items() if name != "rounding"}


@dataclass(frozen=True)
class Readout:
    """How log-probabilities are made of logits: divided by `temperature`, then the `top_k` largest kept, or as many as hold
    `top_p` of the mass. `late` is by how many tokens the recorded values lag behind the tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    late: int = 0


@dataclass(frozen=True)
class Suspect:
    """A change of what the trainer computes. Those of one `cause` exclude each other."""

    cause: str
    what: str
    setting: str
    change: Callable[[], AbstractContextManager[object]] | None = None
    prompt: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None


class Evidence:
    """The engine's log-probabilities next to what the trainer says of the same tokens."""

    def __init__(self, model: Any, rollouts: Sequence[Rollout], expected: NoiseOnly, autocast: bool) -> None:
        """`model`: the trainer's, not aligned, run under `autocast` to BF16 or as it is. `rollouts`: with the engine's
        log-probabilities. `expected`: what noise alone would show on them."""
        self.model = model
        self.autocast = autocast
        self.rollouts = list(rollouts)
        self.engine = np.concatenate([np.asarray(r.logprobs, np.float64) for r in self.rollouts])
        lengths = [len(r.completion_ids) for r in self.rollouts]
        self.sequences = np.repeat(np.arange(len(lengths)), lengths)
        self.owners = np.repeat(group_numbers(self.rollouts), lengths)
        if (groups := len(np.unique(self.owners))) < MIN_SEQUENCES:
            raise MeasurementError(
                f"rollouts of {groups} prompts are too few to tell causes from chance; give at least {MIN_SEQUENCES}"
            )
        self.targets = torch.tensor([token for r in self.rollouts for token in r.completion_ids])
        self.expected = expected
        self.noise = max(expected.rms, QUIET)

    @torch.no_grad()
    def logits(self, suspects: Sequence[Suspect]) -> torch.Tensor:
        """(tokens, vocabulary) of every completion token under all of `suspects`, in the dtype the model gives."""
        with self.changed(suspects):
            return self._run(suspects, self.model, "logits")

    @contextmanager
    def changed(self, suspects: Sequence[Suspect]) -> Iterator[None]:
        """The model as `suspects` would have it; their prompts are for `_run` to change."""
        with ExitStack() as stack:
            for suspect in suspects:
                if suspect.change:
                    stack.enter_context(suspect.change())
            yield

    def _run(self, suspects: Sequence[Suspect], module: Any, output: str) -> torch.Tensor:
        """What `module` puts out where each completion token is predicted: (tokens, ...)."""
        sequences = []
        for rollout in self.rollouts:
            prompt = rollout.prompt_ids
            for suspect in suspects:
                prompt = suspect.prompt(prompt) if suspect.prompt else prompt
            sequences.append([*prompt, *rollout.completion_ids])
        alike: dict[int, list[int]] = defaultdict(list)
        for index, ids in enumerate(sequences):
            alike[len(ids)].append(index)
        found: dict[int, torch.Tensor] = {}
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.autocast):
            for length, indices in alike.items():
                rows = max(1, BATCH_TOKENS // length)
                for start in range(0, len(indices), rows):
                    batch = indices[start : start + rows]
                    inputs = torch.tensor([sequences[i] for i in batch], device=self.model.device)
                    out = getattr(module(input_ids=inputs, use_cache=False), output)
                    for row, index in enumerate(batch):
                        count = len(self.rollouts[index].completion_ids)
                        found[index] = out[row, length - count - 1 : length - 1].cpu()
        return torch.cat([found[index] for index in range(len(sequences))])

    @torch.no_grad()
    def unrounded(self, suspects: Sequence[Suspect], readout: Readout) -> tuple[Floats, Floats]:
        """(tokens,) both: the trainer's log-probabilities with the logits computed in FP32, and the variance that rounding the
        logits to BF16 would add to them; NaN where none would be recorded. `changed` is in force."""
        weight = self.model.get_output_embeddings().weight.detach().cpu().float().T
        hidden = self._run(suspects, self.model.get_decoder(), "last_hidden_state")
        values, variances = [], []
        for chunk, targets in _rows(hidden, self.targets):
            logits = chunk.float() @ weight
            logprobs = (logits / readout.temperature).log_softmax(-1)
            rounding, probabilities = (_step(logits) / readout.temperature) ** 2 / 12, logprobs.exp()
            own, p = (x.gather(-1, targets[:, None])[:, 0] for x in (rounding, probabilities))
            values.append(self._read(logprobs, targets, readout))
            # A log-probability is its own logit less the mean of all, weighted by probability.
            variances.append((own * (1 - 2 * p) + (probabilities**2 * rounding).sum(-1)).double())
        found = (torch.cat(x).double().numpy() for x in (values, variances))
        return tuple(self.delayed(x, readout.late) for x in found)  # type: ignore[return-value]

    def trainer(self, logits: torch.Tensor, readout: Readout) -> Floats:
        """The trainer's log-probabilities as `readout` would record them: (tokens,), NaN where it would record none."""
        parts = []
        for chunk, targets in _rows(logits, self.targets):
            logprobs = (chunk.float() / readout.temperature).log_softmax(-1)
            parts.append(self._read(logprobs, targets, readout))
        return self.delayed(torch.cat(parts).double().numpy(), readout.late)

    def _read(self, logprobs: torch.Tensor, targets: torch.Tensor, readout: Readout) -> torch.Tensor:
        """What is recorded of rows of log-probabilities: (rows,)."""
        values = logprobs.gather(-1, targets[:, None])[:, 0]
        if readout.top_k or readout.top_p < 1:
            values = values - _kept(logprobs, [readout])[:, 0]
        return values

    def misfit(self, d: Floats) -> Floats:
        """(tokens,): grows like the square of d in the noise and like its logarithm beyond, so that no few tokens decide."""
        return np.log1p((d / self.noise) ** 2 / 2)

    def better(self, before: Floats, after: Floats) -> tuple[float, float]:
        """The share of the misfit that vanishes, and the probability that so much would by chance (prompts apart)."""
        gain = np.nan_to_num(before - after)
        sums = group_sums(gain, self.owners)
        error = sums.std(ddof=1) / math.sqrt(len(sums))
        share = float(gain.sum() / max(np.nansum(before), 1e-300))
        if error == 0:
            return share, 0.0 if share > 0 else 1.0
        return share, student_tail(float(sums.mean() / error), len(sums) - 1)

    def delayed(self, values: Floats, late: int) -> Floats:
        """`values` (tokens,) moved `late` places within each sequence, NaN where nothing moves in."""
        if not late:
            return values
        out = np.full_like(values, np.nan)
        rows = np.arange(len(values))
        source = rows - late
        inside = (source >= 0) & (source < len(values))
        inside[inside] &= self.sequences[source[inside]] == self.sequences[rows[inside]]
        out[inside] = values[source[inside]]
        return out


def find_causes(
    model: Any,
    rollouts: Sequence[Rollout],
    expected: NoiseOnly,
    *,
    bos: int | None = None,
    sampled: bool = True,
    autocast: bool = False,
) -> list[Finding]:
    """Causes other than rounding for the difference between `model`, the trainer, and the engine's `rollouts`, largest first.

    `model`: a transformers model, not aligned, run under `autocast` to BF16 or as it is. `rollouts`: a few thousand tokens,
    because the logits of all are held. `expected`: what rounding noise alone would show on these tokens. `bos`: the id of the
    beginning-of-sequence token, None if there is none. `sampled`: whether the engine chose the tokens itself.

    Raises MeasurementError for rollouts of fewer than `MIN_SEQUENCES` prompts.
    """
    evidence = Evidence(model, rollouts, expected, autocast)
    chosen: list[Suspect] = []
    readout = Readout()
    logits = evidence.logits([])
    d = evidence.trainer(logits, readout) - evidence.engine
    # Where noise explains it all, a dozen passes with other settings would find nothing.
    loud = _k3(d[_ordinary(d, expected)]) > FAR_ABOVE * expected.k3_limit
    found: list[tuple[float, Finding]] = []
    for _ in range(MAX_CAUSES):
        best = None
        for named, suspects, candidate in _candidates(evidence, chosen, readout, logits, d, bos, loud):
            new_logits = evidence.logits(suspects) if suspects != chosen else logits
            new_d = evidence.trainer(new_logits, candidate) - evidence.engine
            share, chance = evidence.better(evidence.misfit(d), evidence.misfit(new_d))
            material = MATERIAL if candidate == readout else MATERIAL_READOUT
            if chance < CERTAIN and share > material and (best is None or share > best[0]):
                best = share, named, suspects, candidate, new_logits, new_d
        if best is None:
            break
        share, (cause, what, setting), chosen, readout, logits, new_d = best
        both = ~np.isnan(d) & ~np.isnan(new_d)
        was, now = _rms(d[both]), _rms(new_d[both])
        text = f"{what}: rms d falls from {was:.3g} to {now:.3g} nats ({share:.0%} of the misfit)"
        found.append((share, Finding(cause, text, math.sqrt(max(was**2 - now**2, 0.0)), setting)))
        d = new_d
    unexplained = _residual(evidence, logits, d, readout.temperature)
    if any(finding.cause in ("weights", "tokenizer") for finding in unexplained):
        # Small gains are then what a free parameter makes of a difference that is not its own, and what the engine would
        # have drawn cannot be known.
        findings = [finding for share, finding in found if share > CLEAR] + unexplained
    else:
        findings = [finding for _, finding in found] + unexplained
        findings += _sampler(evidence, logits, readout) if sampled else []
        findings += _precision(evidence, logits, readout, chosen)
    return sorted(findings, key=lambda finding: -finding.nats)


Named = tuple[str, str, str]
"""Cause, what was found in words, and the setting to change."""


def _rows(values: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`ROWS` tokens at a time."""
    for start in range(0, len(targets), ROWS):
        yield values[start : start + ROWS], targets[start : start + ROWS]


def _candidates(
    evidence: Evidence,
    chosen: list[Suspect],
    readout: Readout,
    logits: torch.Tensor,
    d: Floats,
    bos: int | None,
    loud: bool,
) -> Iterator[tuple[Named, list[Suspect], Readout]]:
    """One step further from what is assumed so far: what it would mean, and the assumptions with it."""
    if readout.temperature == 1:
        t = _best_temperature(evidence, logits, readout)
        what = f"the engine's log-probabilities are those of temperature {t:.3g}"
        setting = f"divide the trainer's logits by {t:.3g}, or have the engine return raw log-probabilities"
        yield ("temperature", what, setting), chosen, replace(readout, temperature=t)
    # Keeping fewer tokens makes the kept ones likelier: no use to look unless the engine's are.
    if readout.top_p == 1 and not readout.top_k and float(np.nanmean(np.clip(d, -1, 1))) < 0:
        found = _best_truncation(evidence, logits, readout)
        which = f"top_k={found.top_k}" if found.top_k else f"top_p={found.top_p:g}"
        what = f"the engine's log-probabilities are renormalised over {which}"
        setting = f"sample without {which}, or have the engine return raw log-probabilities"
        yield ("truncation", what, setting), chosen, found
    if not readout.late:
        for late in (-1, 1):
            what = f"the engine's log-probability of a token stands one place too {'late' if late > 0 else 'early'}"
            yield ("shifted", what, "line up token ids and log-probabilities"), chosen, replace(readout, late=late)
    for suspect in _suspects(evidence, bos, loud):
        if suspect.cause not in {other.cause for other in chosen}:
            yield (suspect.cause, suspect.what, suspect.setting), [*chosen, suspect], readout


def _best_temperature(evidence: Evidence, logits: torch.Tensor, readout: Readout) -> float:
    def misfit(t: float) -> float:
        d = evidence.trainer(logits, replace(readout, temperature=t)) - evidence.engine
        return float(np.nanmean(evidence.misfit(d)))

    return _minimum(misfit, TEMPERATURES)


def _minimum(function: Callable[[float], float], grid: Sequence[float]) -> float:
    """Where `function` is least, to about 0.1 %: the best point of the grid, then golden sections between its neighbours."""
    values = [function(x) for x in grid]
    best = int(np.argmin(values))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 2e-3 * low:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2


def _best_truncation(evidence: Evidence, logits: torch.Tensor, readout: Readout) -> Readout:
    options = [*(replace(readout, top_p=p) for p in TOP_P), *(replace(readout, top_k=k) for k in TOP_K)]
    plain = evidence.trainer(logits, replace(readout, late=0))
    kept = torch.cat(
        [_kept((c.float() / readout.temperature).log_softmax(-1), options) for c, _ in _rows(logits, evidence.targets)]
    )
    misfits = [
        float(np.nanmean(evidence.misfit(evidence.delayed(plain - mass, readout.late) - evidence.engine)))
        for mass in kept.double().numpy().T
    ]
    return options[int(np.argmin(misfits))]


def _kept(logprobs: torch.Tensor, readouts: Sequence[Readout]) -> torch.Tensor:
    """Log of the mass that top-k or top-p keeps in each row: (rows, readouts)."""
    ordered = logprobs.exp().sort(-1, descending=True).values.cumsum(-1)
    columns = []
    for readout in readouts:
        if readout.top_k:
            last = torch.full((len(ordered), 1), readout.top_k - 1)
        else:
            last = (ordered < readout.top_p).sum(-1, keepdim=True)
        columns.append(ordered.gather(-1, last.clamp(max=ordered.shape[-1] - 1))[:, 0].log())
    return torch.stack(columns, 1)


# -- changes of the trainer -------------------------------------------------------------------------------------------


def _suspects(evidence: Evidence, bos: int | None, loud: bool) -> Iterator[Suspect]:
    """`loud`: the mismatch is above noise, as it is where positions or prompts differ; merging an adapter does no more than
    round differently."""
    if loud:
        yield from _bos(evidence, bos)
        yield from _rope(evidence)
        yield from _window(evidence)
    yield from _adapters(evidence)


def _bos(evidence: Evidence, bos: int | None) -> Iterator[Suspect]:
    if bos is None:
        return
    begins = [r.prompt_ids[0] == bos for r in evidence.rollouts]
    if all(begins) and all(len(r.prompt_ids) > 1 for r in evidence.rollouts):
        what = f"the engine's prompts lack the BOS token {bos} that the trainer's begin with"
        yield Suspect("bos", what, "add the BOS token in the engine, or drop the trainer's", prompt=lambda ids: ids[1:])
    what = f"the engine's prompts begin with a BOS token {bos} that the trainer's lack"
    yield Suspect("bos", what, "drop the engine's BOS token, or add it in the trainer", prompt=lambda ids: (bos, *ids))


def _rope(evidence: Evidence) -> Iterator[Suspect]:
    decoder = evidence.model.get_decoder()
    whole = dict(decoder.config.rope_parameters)
    if "rope_theta" in whole:
        yield from _other_ropes(decoder, whole, None)
        return
    for layers, own in whole.items():  # by type of layer, some of which may have none
        if own:
            yield from _other_ropes(decoder, own, layers)


def _other_ropes(decoder: Any, own: dict[str, Any], layers: str | None) -> Iterator[Suspect]:
    """`own`: the parameters to vary, of the layers of type `layers`, or of all (None)."""
    where = f" in the {layers.replace('_', ' ')} layers" if layers else ""
    theta, kind = float(own["rope_theta"]), own.get("rope_type", "default")
    others: dict[str, dict[str, Any]] = {}
    for value in sorted({*THETAS, *(factor * theta for factor in THETA_FACTORS)} - {theta}):
        others[f"rope_theta={value:g}"] = own | {"rope_theta": value}
    if kind != "default":
        others["no RoPE scaling"] = {"rope_type": "default", "rope_theta": theta}
    for factor in LINEAR_FACTORS:
        if kind == "default" or (kind == "linear" and own.get("factor") != factor):
            linear = {"rope_type": "linear", "rope_theta": theta, "factor": factor}
            others[f"linear RoPE scaling by {factor:g}"] = linear
    for name, parameters in others.items():
        yield Suspect(
            "rope",
            f"the engine computes with {name}{where}, the trainer with rope_theta={theta:g}, rope_type={kind}",
            "give both the same rope_parameters",
            change=_swapping_rope(decoder, decoder.config.rope_parameters | {layers: parameters} if layers else parameters),
        )


def _swapping_rope(decoder: Any, parameters: dict[str, Any]) -> Callable[[], AbstractContextManager[object]]:
    @contextmanager
    def change() -> Iterator[None]:
        own = decoder.rotary_emb
        config = copy.deepcopy(decoder.config)
        config.rope_parameters = parameters
        decoder.rotary_emb = type(own)(config).to(decoder.device)
        try:
            yield
        finally:
            decoder.rotary_emb = own

    return change


def _window(evidence: Evidence) -> Iterator[Suspect]:
    config = evidence.model.get_decoder().config
    window = getattr(config, "sliding_window", None)
    longest = max(len(r.prompt_ids) + len(r.completion_ids) for r in evidence.rollouts)
    if window is None or longest <= window:
        return

    @contextmanager
    def change() -> Iterator[None]:
        layers = getattr(config, "layer_types", None)
        # Either a list of kinds of layers decides, or the number alone.
        altered = {"layer_types": ["full_attention"] * len(layers)} if layers else {"sliding_window": None}
        saved = {name: getattr(config, name) for name in altered}
        for name, value in altered.items():
            setattr(config, name, value)
        try:
            yield
        finally:
            for name, value in saved.items():
                setattr(config, name, value)

    what = f"the engine attends to all tokens, the trainer to the last {window}"
    yield Suspect("sliding_window", what, "switch the sliding window on in the engine", change=change)


def _adapters(evidence: Evidence) -> Iterator[Suspect]:
    """Adapters of peft, recognised by what they can do, so that peft need not be installed."""
    layers = [
        m
        for m in evidence.model.modules()
        if hasattr(m, "enable_adapters") and hasattr(m, "merge") and hasattr(m, "base_layer")
    ]
    if not layers:
        return

    @contextmanager
    def off() -> Iterator[None]:
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    @contextmanager
    def merged() -> Iterator[None]:
        saved = [layer.base_layer.weight.detach().clone() for layer in layers]
        for layer in layers:
            layer.merge()
        try:
            yield
        finally:
            for layer, weight in zip(layers, saved, strict=True):
                layer.unmerge()
                # Merging rounds, and unmerging rounds again.
                layer.base_layer.weight.data.copy_(weight)

    what = "the engine computes without the LoRA adapter"
    yield Suspect("lora", what, "load the adapter into the engine, or merge it into the weights it is given", change=off)
    if not any(layer.merged for layer in layers):
        what = "the engine holds the LoRA adapter merged into its weights, the trainer beside them"
        yield Suspect("lora", what, "merge it on both sides or on neither", change=merged)


# -- how the tokens were chosen ---------------------------------------------------------------------------------------


def _sampler(evidence: Evidence, logits: torch.Tensor, readout: Readout) -> list[Finding]:
    """Whether the tokens were drawn from the distribution whose log-probabilities are recorded.

    Likelihoods of the tokens under other ways to draw them, against drawing from that distribution. If no token ever falls
    outside a nucleus, each one makes a draw from inside it likelier by one over its mass.
    """
    drawn = replace(readout, late=0)
    findings: list[Finding] = []
    for _ in range(2):
        recorded = _likelihood(evidence, logits, drawn)
        offers: list[tuple[float, str, str, Readout]] = []
        if "sampling_temperature" not in {finding.cause for finding in findings}:
            offer = _likeliest_temperature(evidence, logits, drawn)
            if abs(offer.temperature / drawn.temperature - 1) > 0.03:
                text = f"temperature {offer.temperature:.3g}"
                offers.append((_likelihood(evidence, logits, offer) - recorded, "sampling_temperature", text, offer))
        if drawn.top_p == 1 and not drawn.top_k:
            above, rank = _above(evidence, logits, drawn.temperature)
            p, k = float(np.nextafter(above.max(), 2)), int(rank.max()) + 1
            for text, offer in (
                (f"top_p={p:.3g}", replace(drawn, top_p=p)),
                (f"top_k={k}", replace(drawn, top_k=k)),
            ):
                offers.append((_likelihood(evidence, logits, offer) - recorded, "sampling_truncation", text, offer))
        likelier, cause, text, offer = max(offers, key=lambda offer: offer[0], default=(0.0, "", "", drawn))
        if likelier < -math.log(CERTAIN):
            break
        apart = evidence.trainer(logits, offer) - evidence.trainer(logits, drawn)
        drawn = offer
        evidence_text = (
            f"the tokens are e^{likelier:.0f} times as likely to have been drawn with {text} as from the distribution whose "
            "log-probabilities are recorded"
        )
        setting = f"sample without it, or record and train on the log-probabilities of {text}"
        findings.append(Finding(cause, evidence_text, _rms(apart), setting))
    return findings


def _likelihood(evidence: Evidence, logits: torch.Tensor, drawn: Readout) -> float:
    """The log of the likelihood of all tokens if drawn as `drawn` says. One that would have been cut off costs as much as
    rounding noise at the edge of what is kept may."""
    values = evidence.trainer(logits, drawn)
    if drawn.top_k or drawn.top_p < 1:
        above, rank = _above(evidence, logits, drawn.temperature)
        outside = rank >= drawn.top_k if drawn.top_k else above >= drawn.top_p
        values = np.where(outside, math.log(CERTAIN), values)
    return float(values.sum())


def _likeliest_temperature(evidence: Evidence, logits: torch.Tensor, drawn: Readout) -> Readout:
    def unlikely(t: float) -> float:
        return -_likelihood(evidence, logits, replace(drawn, temperature=t))

    return replace(drawn, temperature=_minimum(unlikely, (0.05, 0.2, *TEMPERATURES)))


def _above(evidence: Evidence, logits: torch.Tensor, temperature: float) -> tuple[Floats, NDArray[np.int64]]:
    """For each token the mass and the number of the tokens clearly likelier than it: what noise may have swapped is not."""
    masses, ranks = [], []
    for chunk, targets in _rows(logits, evidence.targets):
        scaled = chunk.float() / temperature
        likelier = scaled > scaled.gather(-1, targets[:, None]) + SWAPPED * evidence.noise / temperature
        masses.append((scaled.softmax(-1) * likelier).sum(-1).double())
        ranks.append(likelier.sum(-1))
    return torch.cat(masses).numpy(), torch.cat(ranks).numpy()


# -- what is left -----------------------------------------------------------------------------------------------------


def _residual(evidence: Evidence, logits: torch.Tensor, d: Floats, temperature: float) -> list[Finding]:
    """Name what is far above noise and was put down to no setting by its shape. `temperature`: by which logits, and so their
    noise, were divided."""
    expected = evidence.expected.at(temperature)
    limit = FAR_ABOVE * expected.k3_limit
    recorded = ~np.isnan(d)
    ordinary = _ordinary(d, expected)
    k3, calm = _k3(d[recorded]), _k3(d[ordinary])
    size = np.where(recorded, np.abs(d), 0.0)
    if calm <= limit:
        if k3 <= limit:
            return []
        other = recorded & ~ordinary
        text = (
            f"{other.sum()} of {recorded.sum()} tokens differ by up to {size[other].max():.3g} nats, as where roundings decide "
            f"between two ways to go on; with them k3 is {k3:.3g}, without them {calm:.3g}, no more than noise"
        )
        setting = "nothing to change: so few tokens may well be that"
        return [Finding("unsteady_tokens", text, _share(d, other), setting, rounding=True)]
    counted = recorded & expected.steady
    wild = counted & (size > MANY_STEPS * max(expected.rms, QUIET))
    rest = counted & ~wild
    calm = _k3(d[rest]) if rest.any() else math.inf
    if wild.sum() <= FEW * counted.sum() and calm <= limit:
        ids, counts = np.unique(evidence.targets.numpy()[wild], return_counts=True)
        common = ids[counts.argmax()]
        who = f", {counts.max()} of them token id {common}" if counts.max() > wild.sum() / 2 else ""
        text = (
            f"{wild.sum()} of {counted.sum()} tokens differ by up to {size[wild].max():.3g} nats{who}; without them k3 is "
            f"{calm:.3g}"
        )
        setting = "look at these tokens: stop tokens, masks, tool output, token ids"
        return [Finding("wild_tokens", text, _share(d, wild), setting)]
    k3, rms = _k3(d[ordinary]), _rms(d[ordinary])
    times = f"k3 is {k3:.3g}, {k3 / expected.k3:.3g} times what rounding noise gives"
    # How likely the same tokens look to the trainer where they do not belong.
    shuffled = np.random.default_rng(0).permutation(len(d))
    elsewhere = copy.copy(evidence)
    elsewhere.targets = evidence.targets[torch.from_numpy(shuffled)]
    baseline = float(elsewhere.trainer(logits, Readout()).mean())
    trainer, engine = float(evidence.trainer(logits, Readout()).mean()), float(evidence.engine.mean())
    if trainer - baseline < 0.2 * (engine - baseline):
        text = (
            f"the engine's tokens have a mean log-probability of {engine:.3g} in the engine and {trainer:.3g} in the trainer, "
            f"where tokens in the wrong places have {baseline:.3g}: to the trainer they are noise"
        )
        return [Finding("tokenizer", text, rms, "use one tokenizer and one model on both sides, and compare token ids")]
    spread = np.mean(size[ordinary] > evidence.noise)
    correlation = float(np.corrcoef((d + evidence.engine)[ordinary], evidence.engine[ordinary])[0, 1])
    text = f"{times}, spread over {spread:.0%} of the tokens (correlation {correlation:.3f})"
    return [Finding("weights", text, rms, "the engine computes with other weights: check the checkpoint and the weight sync")]


def _precision(evidence: Evidence, logits: torch.Tensor, readout: Readout, chosen: list[Suspect]) -> list[Finding]:
    """Whether logits or log-probabilities went through BF16 on one side only."""
    nonzero = evidence.engine[evidence.engine != 0]
    coarse = torch.from_numpy(nonzero).to(torch.bfloat16).double().numpy() == nonzero
    if len(nonzero) >= 50 and coarse.mean() > 0.99:
        step = float(np.sqrt(np.mean((2.0 ** np.floor(np.log2(np.abs(nonzero))) * 2.0**-7) ** 2) / 12))
        text = f"{coarse.mean():.0%} of the engine's log-probabilities are BF16 numbers: each was rounded after the softmax"
        return [Finding("logprobs_bf16", text, step, "record log-probabilities in FP32")]
    rounds = _rounds_logits(evidence, chosen, readout)
    trainer_rounds = logits.dtype == torch.bfloat16 or bool(torch.equal(logits, logits.bfloat16().to(logits.dtype)))
    if rounds is None:
        return []
    share, stderr = rounds
    if abs(share - 0.5) < 3 * stderr or trainer_rounds == (share > 0.5):
        return []
    who = ("engine", "trainer") if share > 0.5 else ("trainer", "engine")
    own = logits.gather(-1, evidence.targets[:, None])[:, 0].float()
    step = float(_step(own).pow(2).mean().div(12).sqrt())
    text = (
        f"the {who[0]}'s logits are rounded to BF16, the {who[1]}'s are not: of the variance that this rounding gives, the "
        f"engine shows {share:.2f} ± {stderr:.2f}"
    )
    return [Finding("logits_precision", text, step, "compute the lm_head in the same precision on both sides")]


def _rounds_logits(evidence: Evidence, chosen: list[Suspect], readout: Readout) -> tuple[float, float] | None:
    """How much of the variance that rounding logits to BF16 adds is in the engine's log-probabilities, all (1) or none (0), and
    its standard error.

    The larger a logit, the coarser its rounding. The engine's squared distance from the mean of several trainers, less the
    trainers' own variance, is regressed on the variance of the rounding; the trainers have FP32 logits, and each rounds by
    another schedule, which decorrelates what they share with the engine. The engine's noise need not be as large as theirs,
    so that their variance is a second regressor. None where alignment does not know the model, or where other noise drowns
    that of the logits.
    """
    trainers = []
    try:
        with evidence.changed(chosen):
            for schedule in DECORRELATED:
                record = align(evidence.model, to=schedule)
                try:
                    trainers.append(evidence.unrounded(chosen, readout))
                finally:
                    record.undo()
    except UsageError:
        return None
    values, variances = (np.stack(columns) for columns in zip(*trainers, strict=True))
    there = ~np.isnan(values[0])
    owners, engine = evidence.owners[there], evidence.engine[there]
    values, variances = values[:, there], variances[:, there]
    noise, rounding = values.var(axis=0, ddof=1), variances.mean(axis=0)
    if np.median(rounding) < AUDIBLE * noise.mean():
        return None
    apart = (engine - values.mean(axis=0)) ** 2
    # Weighted by what each token is worth: the variance of a square is its square.
    weight = 1 / (np.median(noise) + noise + rounding) ** 2
    weight *= apart < MANY_STEPS**2 * (np.median(noise) + rounding)
    excess = apart - noise * (1 + 1 / len(trainers))
    columns = np.stack([rounding, noise], axis=1)
    inverse = np.linalg.inv(columns.T @ (weight[:, None] * columns))
    slopes = inverse @ (columns.T @ (weight * excess))
    scores = group_sums(weight * (excess - columns @ slopes) * columns.T, owners).T @ inverse
    n = len(scores)
    return float(slopes[0]), float(np.sqrt((scores[:, 0] ** 2).sum() * n / (n - 1)))


def _step(logits: torch.Tensor) -> torch.Tensor:
    """The distance between BF16 numbers of the size of each logit."""
    return torch.ldexp(torch.ones_like(logits), torch.frexp(logits).exponent - 8)


def _k3(d: Floats) -> float:
    return float((np.expm1(d) - d).mean())


def _rms(d: Floats) -> float:
    return float(np.sqrt((d**2).mean()))


def _share(d: Floats, some: NDArray[np.bool_]) -> float:
    """What `some` of the tokens add to the rms of d over all of them."""
    return float(np.sqrt((d[some] ** 2).sum() / (~np.isnan(d)).sum()))


def _ordinary(d: Floats, expected: NoiseOnly) -> NDArray[np.bool_]:
    """The tokens whose k3 can be held against that of noise: (tokens,). Not those without a value or with a noise of whole
    nats, nor one or two that are far off without having shown such noise: few dithers need not show it."""
    counted = ~np.isnan(d) & expected.steady
    near = counted & (np.abs(d) <= MANY_STEPS * max(expected.rms, QUIET))
    rare = (counted & ~near).sum() <= max(2, RARE * counted.sum())
    return near if rare and near.any() else counted


def prefill_against_decode(engine: Stack, rollouts: Sequence[Rollout], expected: NoiseOnly) -> list[Finding]:
    """Whether the engine, scoring its own completions as prompts, says what it said when it sampled them, up to noise."""
    rescored = np.concatenate([np.asarray(row, np.float64) for row in engine.score(rollouts)])
    d = rescored - np.concatenate([np.asarray(r.logprobs, np.float64) for r in rollouts])
    ordinary = d[_ordinary(d, expected)]
    k3 = _k3(ordinary)
    if k3 <= FAR_ABOVE * expected.k3_limit:
        return []
    text = f"scoring its own completions again, the engine has k3 = {k3:.3g} to itself; rounding noise gives {expected.k3:.3g}"
    setting = "compare the engine's attention backends, KV cache precision and chunked prefill"
    return [Finding("prefill_decode", text, _rms(ordinary), setting)]
