"""The report of `drift` and `diagnose`: one look for a person, in the terminal or as report.html, and report.json."""

from __future__ import annotations

import base64
import json
from io import StringIO
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tripoint.drift.attribution import Bin, LocalError
from tripoint.drift.estimate import Estimate
from tripoint.drift.mismatch import plus_minus
from tripoint.drift.result import CLEAR, Aligned, DriftResult, GradientBiases, Side
from tripoint.drift.systematic import CONTROLS_AGREE
from tripoint.drift.verdict import headline, verdict
from tripoint.report.plots import plot

HTML_WIDTH = 120

ROWS = {
    "mean_abs": "mean |dlogp|",
    "rms": "rms dlogp",
    "max_abs": "max |dlogp|",
    "k1": "k1",
    "k3": "k3",
    "ess": "effective sample share",
    "max_ratio": "largest ratio",
    "exact_fraction": "share exactly equal",
    "rollout_probs_diff_mean": "rollout_probs_diff_mean",
    "rollout_probs_diff_max": "rollout_probs_diff_max",
    "token_mult_prob_error": "token_mult_prob_error",
}
LEGEND = (
    "dlogp = logp_trainer - logp_engine in nats, ± standard error; k1 = -mean(dlogp), k3 = mean(exp(dlogp) - 1 - dlogp); "
    "ratio = exp(dlogp); rollout_probs_diff as verl logs it, token_mult_prob_error as NeMo-RL does."
)
SCALE = 1e4  # variances are shown in 1e-4 nats²


def render(result: DriftResult, *, detailed: bool) -> RenderableType:
    """The report. `detailed` (`diagnose`) adds the raw mismatch before and after alignment, what alignment changed, where in
    the sequence and the vocabulary the drift is, and under which conditions it was measured."""
    parts: list[RenderableType] = [_header(result), _drift_table(result)]
    if result.findings:
        parts.append(_findings_table(result))
    parts += [Text(f"noted: {finding.evidence}") for finding in result.noted]
    if result.systematic.fits and (detailed or result.aligned is None):
        parts.append(_fits_table(result))
    if detailed:
        parts += [_mismatch_table(result), Text(LEGEND, style="dim")]
        if result.aligned is not None:
            parts += [
                Text(),
                Text(verdict(result.mismatch, result.aligned.measured).sentence),
                _alignment_table(result.aligned),
            ]
        if attribution := result.systematic.attribution:
            parts += [
                _bins_table("position", attribution.by_position),
                _bins_table("token probability", attribution.by_probability),
            ]
        if result.layers:
            parts.append(_layers_table(result.layers))
        if result.gradient_bias:
            parts.append(_gradient_table(result.gradient_bias))
        parts += [_conditions("engine", result.engine), _conditions("trainer", result.trainer)]
        parts.append(
            Text("seconds: " + ", ".join(f"{what} {spent:.0f}" for what, spent in result.seconds.items()), style="dim")
        )
    parts += [Text(), Text(headline(result), style="bold")]
    return Group(*parts)


def write_report(result: DriftResult, directory: Path) -> list[Path]:
    """Write report.json, report.html and drift.png into `directory`, which is made if need be. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_html, as_png = (directory / name for name in ("report.json", "report.html", "drift.png"))
    as_json.write_text(json.dumps(to_report(result), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    plot(result, as_png)
    console = Console(record=True, width=HTML_WIDTH, file=StringIO())
    console.print(render(result, detailed=True))
    image = base64.b64encode(as_png.read_bytes()).decode()
    html = console.export_html(inline_styles=True)
    as_html.write_text(html.replace("</body>", f'<img src="data:image/png;base64,{image}">\n</body>'), encoding="utf-8")
    return [as_json, as_html, as_png]


def to_report(result: DriftResult) -> dict[str, object]:
    """The JSON of `diagnose`."""
    words: dict[str, object] = {"summary": headline(result)}
    words["mismatch_summary"] = verdict(result.mismatch, result.aligned.measured if result.aligned else None).sentence
    return result.to_report() | words


def _header(result: DriftResult) -> RenderableType:
    found = result.systematic
    of_engine = "a single sample of the engine" if found.bound_only else f"{found.replicates} dithers of the engine"
    passes = f"{of_engine}, {2 * found.replicates} dithers of the trainer"
    chosen = "scored " if result.engine.stack.startswith("rollouts:") else "neutral"
    lines = [
        f"model    {result.model}",
        f"engine   {result.engine.stack}",
        f"trainer  {result.trainer.stack}",
        f"tokens   {result.mismatch.tokens} in {result.mismatch.sequences} sequences, {result.source}",
        f"{chosen}  {found.tokens} in {found.sequences} sequences, {result.neutral}; {passes}",
    ]
    if result.aligned is not None:
        target = result.aligned.alignment.target
        lines.append(f"target   {target.name}: {target.detail}")
    return Text("\n".join(lines))


def _drift_table(result: DriftResult) -> Table:
    """How large, how much of it noise, how much systematic, from which operation, and how sure."""
    found = result.systematic
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("trainer against engine", no_wrap=True)
    table.add_column("1e-4 nats²", justify="right", no_wrap=True)
    table.add_column("rms nats", justify="right", no_wrap=True)
    table.add_column("how sure, and what it says")
    raw = result.mismatch.mismatch
    noise = f"k3 {raw.k3:.2g}; noise alone gives {result.expected.k3:.2g}, hardly ever {result.expected.k3_limit:.2g}"
    table.add_row("mismatch, what frameworks log", f"{SCALE * raw.rms**2:.3g}", f"{raw.rms:.3f}", noise)
    for who in ("trainer", "engine"):
        if (rms := found.noise_rms[who]) == rms:  # not NaN
            table.add_row(f"rounding noise of the {who}", f"{SCALE * rms**2:.3g}", f"{rms:.3f}", "averages out")
    bound = "at most: holds the engine's noise" if found.bound_only else ""
    table.add_row("systematic", *_cells(found.total), bound or _sigmas(found.total), style="bold")
    if found.attribution:
        for site in found.attribution.sites:
            share = f"{site.share.value:.0%} ± {site.share.stderr:.0%} of what goes, " if _clear(found.removed) else ""
            table.add_row(f"  {site.op} {site.before} → {site.after}", *_cells(site.shapley), share + _alone(site.moved_alone))
            for part in (part for part in found.fields or () if part.op == site.op):
                what = f"    {part.field.removeprefix(f'{part.op}.')} {part.before} → {part.after}"
                if part.moved_alone:
                    table.add_row(what, *_cells(part.moved_alone), "moved alone")
                else:
                    table.add_row(what, "", "", "cannot be moved alone")
        table.add_row("  interaction", *_cells(found.attribution.interaction), "whole less the parts moved alone")
    elif result.withheld:
        table.add_row("  by operation", "", "", result.withheld, style="dim")
    if found.aligned and not result.findings:
        if found.removed:
            table.add_row("  removed by alignment", *_cells(found.removed), _sigmas(found.removed))
        table.add_row("  left: no operation explains it", *_cells(found.aligned), bound or _sigmas(found.aligned))
    if found.ranged:
        agrees = "differs from the dithers: take it as a range" if found.ranged.disagree else "agrees with the dithers"
        table.add_row("systematic, by permutations", *_cells(found.ranged.permutation), agrees)
        if left := found.ranged.left:
            table.add_row("  left when aligned, by permutations", *_cells(left), _sigmas(left))
    for what, control, must in (
        ("itself", found.controls.zero, "must be zero"),
        ("odd schedule", found.controls.positive, "must not"),
    ):
        table.add_row(f"control: trainer, {what}", *_cells(control), f"{must}; {_sigmas(control)}", style="dim")
    return table


def _fits_table(result: DriftResult) -> Table:
    """Paired differences, which hold for an engine that is a single sample as well."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("how well the trainer fits as", "1e-4 nats²", "above the best", ""):
        table.add_column(heading, justify="right" if "nats" in heading or "best" in heading else "left", no_wrap=True)
    for place, fit in enumerate(result.systematic.fits):
        told = "told apart" if fit.above_best.value > CONTROLS_AGREE * fit.above_best.stderr else "not told apart"
        table.add_row(fit.candidate, _cells(fit.variance)[0], *((_cells(fit.above_best)[0], told) if place else ("", "best")))
    return table


def _findings_table(result: DriftResult) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="not rounding, largest first", title_justify="left")
    for heading in ("cause", "nats", "evidence", "setting to change"):
        table.add_column(heading, justify="right" if heading == "nats" else "left")
    for finding in result.findings:
        table.add_row(finding.cause, f"{finding.nats:.2g}", finding.evidence, finding.setting)
    return table


def _cells(estimate: Estimate) -> tuple[str, str]:
    return f"{plus_minus(SCALE * estimate.value, SCALE * estimate.stderr)}".replace(" ± ", "±"), f"{estimate.rms:.3f}"


def _sigmas(estimate: Estimate) -> str:
    if estimate.stderr == 0:
        return "exactly" if estimate.value == 0 else "without error"
    sigmas = estimate.value / estimate.stderr
    told = "told from zero" if abs(sigmas) > CONTROLS_AGREE else "not told from zero"
    return f"{sigmas:.1f} se: {told}"


def _alone(estimate: Estimate) -> str:
    return f"moved alone {plus_minus(SCALE * estimate.value, SCALE * estimate.stderr).replace(' ± ', '±')}"


def _clear(removed: Estimate | None) -> bool:
    return removed is not None and removed.value > CLEAR * removed.stderr


def _mismatch_table(result: DriftResult) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("raw mismatch", no_wrap=True)
    for heading in ("before", "aligned", "change") if result.aligned else ("mismatch",):
        table.add_column(heading, justify="right")
    for name, label in ROWS.items():
        cells = [(getattr(result.mismatch.mismatch, name), result.mismatch.stderr[name])]
        if result.aligned:
            after, change = result.aligned.measured, result.aligned.change[name]
            cells += [(getattr(after.mismatch, name), after.stderr[name]), (change.value, change.stderr)]
        table.add_row(label, *(plus_minus(*cell).replace(" ± ", "±") for cell in cells))  # the table fits 80 columns
    return table


def _alignment_table(aligned: Aligned) -> Table:
    before, after = aligned.alignment.before, aligned.alignment.schedule
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("what alignment changed", str(before), str(after)):
        table.add_column(heading, no_wrap=True)
    table.add_column("sites", justify="right")
    for row in aligned.ops():
        unchanged = row["before"] == row["after"]
        table.add_row(row["op"], row["before"], row["after"], str(row["sites"]), style="dim" if unchanged else "")
    table.caption = "\n".join(aligned.alignment.notes) or None
    return table


def _bins_table(what: str, bins: tuple[Bin, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"systematic by {what}", no_wrap=True)
    ops = list(next((b.moved_alone for b in bins if b.moved_alone), {}))
    for heading in ("tokens", "1e-4 nats²", *(f"{op} alone" for op in ops)):
        table.add_column(heading, justify="right", no_wrap=True)
    for b in bins:
        cells = ["too few"] if b.total is None else [_cells(b.total)[0], *(_cells(b.moved_alone[op])[0] for op in ops)]
        table.add_row(f"{b.low:g} to {b.high:g}", str(b.tokens), *cells)
    return table


def _layers_table(errors: tuple[LocalError, ...]) -> Table:
    """One row per layer: all operations moved at once, then the relative error of each moved alone."""
    rows = {error.layer: error for error in errors if error.op is None}
    alone = {(error.layer, error.op): error for error in errors}
    ops = [error.op for error in errors if error.op is not None and error.layer == 0]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("layer, on one input", "changed", "ulps", "relative", *(f"{op} alone" for op in ops)):
        table.add_column(heading, justify="left" if heading.startswith("layer") else "right", no_wrap=True)
    for layer, error in rows.items():
        cells = [f"{error.changed:.0%}", f"{error.ulps:.2g}", f"{error.relative:.2g}"]
        table.add_row(str(layer), *cells, *(f"{alone[layer, op].relative:.2g}" for op in ops))
    table.caption = (
        "a layer's output under the engine's schedule against the trainer's: share of elements that change, "
        "their median distance in BF16 steps, rms difference over rms"
    )
    return table


def _gradient_table(biases: GradientBiases) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("gradient bias over the gradient", "one step", "systematic", "its square"):
        table.add_column(heading, justify="left" if heading.startswith("gradient") else "right", no_wrap=True)
    for what, bias in (("trainer as it is", biases.unaligned), ("trainer, aligned", biases.aligned)):
        if bias is None:
            continue
        parts = [(what, bias.total), *((f"  tokens {part.low} to {part.high}", part) for part in bias.by_position)]
        for label, part in parts:
            square = plus_minus(part.square, part.stderr).replace(" ± ", "±")
            table.add_row(label, f"{part.one_step:.2g}", f"{part.systematic:.2g}", square)
    if biases.aligned:
        lowered = plus_minus(*biases.unaligned.total.less(biases.aligned.total)).replace(" ± ", "±")
        table.add_row("  lowered by alignment (paired)", "", "", lowered)
    table.caption = (
        f"{biases.tokens} recorded tokens in {biases.sequences} sequences with their advantages; "
        "systematic at most: holds the engine's noise"
    )
    return table


def _conditions(who: str, side: Side) -> Text:
    words = [f"{package} {version}" for package, version in side.versions.items()]
    words += [f"{name} {value}" for name, value in side.conditions.items()]
    return Text(f"{who}: {', '.join(words) or 'recorded, conditions unknown'}", style="dim")
