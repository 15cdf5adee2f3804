"""The `tripoint` command: reads arguments, calls the library, prints the result, and turns errors into exit codes.

Exit codes: 0 it holds; 1 it was measured and does not hold; 2 bad input; 3 it could not be measured; 130 interrupted.
Everything heavy is imported inside the command that needs it, so that `tripoint --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tripoint.errors import MeasurementError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tripoint.canary import CanaryShape, Fingerprint
    from tripoint.drift import DriftResult
    from tripoint.profiles import Target

PLAIN_WIDTH = 100  # columns of text that goes to a file or a pipe

app = typer.Typer(
    help="Finds, measures and aligns the BF16 rounding points where an RL trainer and its inference engine disagree.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# The common base of everything that typer raises about a command line; it has no public name of its own there.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]

STACKS = "hf, hf:compile, hf:autocast, vllm, vllm:eager, mlx, http://HOST:PORT, emulated:TARGET"

Model = Annotated[str, typer.Argument(help="A directory, a hub id, or `smollm2`, which needs no hub.")]
Engine = Annotated[str, typer.Option(metavar="STACK", help=f"What samples: {STACKS}, or rollouts:FILE.")]
Trainer = Annotated[str, typer.Option(metavar="STACK", help="What trains: hf, hf:compile, hf:autocast or emulated:TARGET.")]
To = Annotated[
    str | None,
    typer.Option(metavar="TARGET", help="What to align the trainer to. [default: what is documented for the engine]"),
]
Tokens = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="About how many neutral (or recorded) tokens to measure on. [default: 2000]"),
]
Replicates = Annotated[
    int | None,
    typer.Option(min=3, metavar="K", help="How often to score them with each stack. [default: what 5 or 15 minutes allow]"),
]
Precision = Annotated[
    float | None,
    typer.Option(metavar="NATS2", help="The standard error wanted, in nats squared, in place of --tokens and --replicates."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Leave out which operation it is from: under 5 minutes, not 15.")]
Fields = Annotated[bool, typer.Option("--fields", help="Also which fields of the operations: doubles the number of passes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Side = Annotated[
    str,
    typer.Argument(
        metavar="STACK_OR_TARGET",
        help="A STACK, which is measured, or a code line, a .toml file, or a profile with its version as in vllm@0.32/cuda.",
    ),
]
Asked = Annotated[str, typer.Argument(metavar="STACK", help=f"What is asked: {STACKS}.")]
Like = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Ask in the shapes of this model: heads, sizes, rope, QK-norm, biases.")
]
FullShape = Annotated[
    bool, typer.Option("--full-shape", help="With --like: its depth, MLP and vocabulary too. The checkpoint is as large.")
]
InPlace = Annotated[
    bool,
    typer.Option("--in-place", help="With --like: start the stack on the model, lend it canary weights, put its own back."),
]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tripoint {version('tripoint')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def drift(
    engine: Engine,
    model: Model = "smollm2",
    trainer: Trainer = "hf",
    to: To = None,
    tokens: Tokens = None,
    replicates: Replicates = None,
    precision: Precision = None,
    quick: Quick = False,
    fields: Fields = False,
    as_json: AsJson = False,
) -> None:
    """Measure the drift: how large, how much of it systematic, from which operation. Exits with 3 if a control fails."""
    from tripoint.report.drift import render

    result = _measure(
        model,
        engine,
        trainer,
        to=to,
        tokens=tokens,
        replicates=replicates,
        precision=precision,
        quick=quick,
        fields=fields,
    )
    if as_json:
        print(json.dumps(result.to_json(), indent=2, allow_nan=False))
    else:
        _show(render(result, detailed=False))
    _exit_by_controls(result)


@app.command()
def diagnose(
    engine: Engine,
    model: Model = "smollm2",
    trainer: Trainer = "hf",
    to: To = None,
    tokens: Tokens = None,
    replicates: Replicates = None,
    precision: Precision = None,
    quick: Quick = False,
    fields: Fields = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write report.json, report.html and drift.png there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure, align, measure again: the full report. Exits with 3 if a control fails."""
    from tripoint.report.drift import render, to_report, write_report
    from tripoint.report.plots import check_plots

    if out is not None:
        check_plots()
        try:
            if out.exists() and not out.is_dir():
                raise UsageError(f"--out {out} is a file: give a directory")
            out.mkdir(parents=True, exist_ok=True)  # now, not after minutes of measuring
            with TemporaryFile(dir=out):
                pass
        except OSError as error:
            raise UsageError(f"--out {out} cannot be written: {error.strerror}") from None
    result = _measure(
        model,
        engine,
        trainer,
        to=to,
        tokens=tokens,
        replicates=replicates,
        precision=precision,
        quick=quick,
        fields=fields,
        gradient=True,
    )
    if as_json:
        print(json.dumps(to_report(result), indent=2, allow_nan=False))
    else:
        _show(render(result, detailed=True))
    for path in write_report(result, out) if out is not None else ():
        print(f"wrote {path}", file=sys.stderr)
    _exit_by_controls(result)


@app.command()
def fingerprint(
    stack: Asked,
    like: Like = None,
    full_shape: FullShape = False,
    in_place: InPlace = False,
    save: Annotated[
        Path | None, typer.Option(metavar="F.toml", help="Save it, as a target of `align` and for `check`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a stack where it rounds. Exits with 3 if a field could not be determined."""
    from tripoint.canary import CanaryShape
    from tripoint.models import resolve_model
    from tripoint.report.fingerprint import render_fingerprint

    _check_asked(stack, in_place)
    if like is None and (full_shape or in_place):
        raise UsageError(f"{'--full-shape' if full_shape else '--in-place'} needs --like MODEL, the model whose shape is meant")
    if full_shape and in_place:
        raise UsageError("--in-place asks in the model's full shape as it is: leave out --full-shape")
    if save is not None:
        _check_writable(save)
    model = None if like is None else resolve_model(like, weights=in_place)
    shape = CanaryShape() if model is None else CanaryShape.like(model, full_shape or in_place)
    found = _fingerprint(stack, shape, in_place=model if in_place else None)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _show(render_fingerprint(found))
    if save is not None:
        _write(save, found.to_toml())
    raise typer.Exit(3 if found.schedule is None else 0)


@app.command()
def check(
    saved: Annotated[Path, typer.Argument(metavar="F.toml", help="What `fingerprint --save` wrote.")],
    engine: Annotated[str, typer.Option(metavar="STACK", help=f"What is asked: {STACKS}.")],
    in_place: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Start the engine on this model, lend it the canary, put its own back.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask an engine, in the shape of F.toml, whether it still rounds as it did. Exits with 1 if it answers otherwise."""
    from tripoint.canary import CanaryShape, Fingerprint
    from tripoint.models import resolve_model
    from tripoint.report.fingerprint import changes, check_dict, render_check

    _check_asked(engine, in_place is not None)
    before = Fingerprint.from_toml(saved)
    model = None if in_place is None else resolve_model(in_place)
    if model is not None and CanaryShape.like(model, full=True) != before.shape:
        raise UsageError(
            f"{saved} was not measured in the full shape of `{in_place}`, so --in-place {in_place} would ask something else: "
            "give its own model, or save another fingerprint with --in-place"
        )
    now = _fingerprint(engine, before.shape, before.seed, model)
    changed = changes(before, now)
    if as_json:
        print(json.dumps(check_dict(before, now, changed), indent=2))
    else:
        _show(render_check(before, now, changed))
    raise typer.Exit(1 if changed else 0)


@app.command()
def diff(left: Side, right: Side, as_json: AsJson = False) -> None:
    """Compare two stacks or schedules field by field. Exits with 1 if they differ.

    A stack is asked in the shape of the fingerprint that it is compared with, where that is a file.
    """
    from tripoint.report.schedules import diff_dict, render_diff

    targets = _measured_or_named(left, right)
    found = diff_dict(*targets)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(render_diff(*targets))
    raise typer.Exit(1 if found["distance"] else 0)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What to train, on what, how: see docs/train.md.")],
    arm: Annotated[str | None, typer.Option(metavar="ARM", help="Instead of the file's.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Instead of the file's.")] = None,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="How many runs at a time, where there are several.")] = 1,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Make the runs on this Ray cluster.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything that needs no weights, engine or GPU.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make or resume GRPO runs with one arm of the comparison each. Exits with 3 if a run failed."""
    from tripoint.rl.config import read_config
    from tripoint.rl.records import RunDirectory
    from tripoint.rl.runs import plan_all, train_all, train_one
    from tripoint.rl.summary import summarise, summary_table

    configs = read_config(config, arm, seed)
    if dry_run:
        plans = list(plan_all(configs))
        texts = ["".join(f"{what:<10} {said}\n" for what, said in plan.items()) for plan in plans]
        print(json.dumps(plans, indent=2) if as_json else "\n".join(texts))
        return
    complete = configs
    if len(configs) == 1 and ray is None:
        train_one(configs[0])
        if os.environ.get("RANK", "0") != "0":  # one of several processes of `accelerate launch`, whose first one tells
            return
    else:
        complete = []
        for run, reason in train_all(configs, config, workers, ray):
            _say(f"{run.name}: {f'failed: {reason}' if reason else 'complete'}")
            complete += [] if reason else [run]
    summaries = [summarise(run, RunDirectory(run.directory, run).steps()) for run in complete]
    print(json.dumps(summaries, indent=2) if as_json else summary_table(summaries))
    raise typer.Exit(3 if len(complete) < len(configs) else 0)


def _measured_or_named(left: str, right: str) -> tuple[Target, Target]:
    """Targets as they are, stacks by their fingerprints; what is named is looked up before anything is measured."""
    from tripoint.canary import CanaryShape
    from tripoint.canary.reading import shape_in
    from tripoint.profiles import Target, resolve_target
    from tripoint.stacks import is_stack

    named = {side: resolve_target(side) for side in (left, right) if not is_stack(side)}
    shapes = [shape_in(Path(side.strip())) for side in named if side.strip().endswith(".toml")]
    shape = next((shape for shape in shapes if shape is not None), CanaryShape())

    def measured(stack: str) -> Target:
        _check_asked(stack, in_place=False)
        found = _fingerprint(stack, shape)
        if found.schedule is None:
            raise MeasurementError(
                f"stack `{stack}`: no known schedule; {'; '.join(found.findings) or 'see tripoint fingerprint'}"
            )
        detail = "; ".join([f"measured now at {shape.layers} layers, {found.seconds:.1f} s", *found.findings])
        return Target(found.schedule, stack, detail)

    first, second = (named.get(side) or measured(side) for side in (left, right))
    return first, second


def _check_asked(stack: str, in_place: bool) -> None:
    """Raise UsageError unless `stack` is one that can be asked so."""
    from tripoint.stacks import parse_stack

    kind = parse_stack(stack).kind
    if kind == "rollouts":
        raise UsageError(f"stack `{stack}` is a recording and answers nothing: fingerprint the engine that wrote it")
    if kind == "http" and in_place:
        raise UsageError(
            f"the weights of {stack} cannot be replaced over HTTP: leave out --in-place, and restart it when asked"
        )


def _fingerprint(stack: str, shape: CanaryShape, seed: int = 0, in_place: Path | None = None) -> Fingerprint:
    """Ask `stack`, saying on stderr what is being waited for: on a checkpoint of ours, or `in_place` of the model in that
    directory, whose full shape `shape` is."""
    from tripoint.canary import fingerprint_in_place, fingerprint_stack
    from tripoint.stacks import Stack, open_stack, parse_stack

    name = parse_stack(stack)
    if in_place is not None:
        with open_stack(stack, in_place) as running:
            return fingerprint_in_place(running, in_place, seed)
    _say(f"canary checkpoint of {shape.size / 1e6:,.0f} MB")

    def open_on(directory: Path) -> Stack:
        if name.kind == "http":
            from tripoint.stacks.http import wait_for

            _say(
                f"Start your server on it, with your own options and no prefix caching, for example\n"
                f"    vllm serve {directory} --dtype bfloat16 --no-enable-prefix-caching\n"
                f"Waiting for {stack} to serve {directory.name} (Ctrl-C to give up) ..."
            )
            wait_for(name.detail, directory)
        return open_stack(stack, directory)

    return fingerprint_stack(open_on, shape, seed)


def _check_writable(path: Path) -> None:
    """Raise UsageError if nothing can be written at `path`, so that this is known before anything is measured."""
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # raises what newer Pythons' `is_dir` and `exists` keep to themselves
        if path.is_dir():
            raise UsageError(f"{path}: cannot be written: it is a directory")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: cannot be written: there is no directory {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{path}: cannot be written: permission denied")
    except OSError as error:  # of a directory on the way there
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _measure(model: str, engine: str, trainer: str, **options: Any) -> DriftResult:
    from tripoint.drift import measure_drift
    from tripoint.report.progress import stage

    return measure_drift(model, engine, trainer, **options, say=_say, stage=stage)


def _exit_by_controls(result: DriftResult) -> None:
    if problem := result.systematic.controls.problem:
        raise MeasurementError(f"this measurement does not say anything yet: {problem}")


def _show(what: RenderableType) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(what)


def _run(arguments: list[str] | None) -> int:
    try:
        return app(arguments, prog_name="tripoint", standalone_mode=False) or 0
    except CommandLineError as error:
        return _fail(f"{error.format_message().rstrip('.')}; see `tripoint --help`", 2)  # type: ignore[attr-defined]
    except UsageError as error:
        return _fail(str(error), 2)
    except MeasurementError as error:
        return _fail(str(error), 3)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of stdout has gone; the interpreter must not try to flush to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # not what 1 means, that it was measured and does not hold
        traceback.print_exc()
        return _fail("this is an error in Tripoint: nothing was measured", 3)


def _fail(message: str, code: int) -> int:
    print(f"tripoint: {message}", file=sys.stderr)
    return code


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run and exit with the contract's code."""
    sys.exit(_run(arguments))
