"""What a run would do, found out without weights, an engine or a GPU (`tripoint train CONFIG.toml --dry-run`)."""

from __future__ import annotations

from typing import Any

import torch

from tripoint.errors import UsageError
from tripoint.models import empty_model, resolve_model
from tripoint.profiles import Target, resolve_target
from tripoint.rl.arms import STOCK
from tripoint.rl.config import TrainConfig
from tripoint.rl.families import build, check_tiny, make_tokenizer
from tripoint.rl.grpo import grpo_config
from tripoint.rl.policy import prepare
from tripoint.rl.tasks import problems
from tripoint.stacks import parse_stack


def plan(config: TrainConfig) -> dict[str, str]:
    """What is settled, by what it is about: completions, TRL's settings, schedules, the aligned model on the meta device.

    Raises UsageError for whatever would end the run before its first step.
    """
    settings = grpo_config(config, config.directory)
    made = problems(config.task, shots=0)
    arm = config.how
    target, why = _target(config)
    # Until the engine has been asked, whatever schedule tells which operations can be aligned at all.
    schedule = arm.schedule(target.schedule if target is not None else STOCK)
    with torch.device("meta"):
        model = _empty(config)
    prepare(model, config, schedule)
    size = sum(parameter.numel() for parameter in model.parameters())
    if schedule is None:
        trainer = "FP32, rounds nowhere"
    elif target is None and arm.aligned:
        trainer = f"{', '.join(arm.aligned)} as the engine answers"
    else:
        trainer = str(schedule)
    return {
        "run": f"{config.name} in {config.directory}",
        "model": f"{config.model}: {type(model).__name__}, {model.config.num_hidden_layers} layers, {size / 1e6:,.1f}M "
        f"parameters, weights {config.weights}, computes in {arm.trainer_dtype}",
        "step": f"{config.prompts} prompts x {config.generations} completions of up to {config.max_completion} tokens, "
        f"{settings.gradient_accumulation_steps} passes of {settings.per_device_train_batch_size}, {config.steps} steps, "
        f"lr {settings.learning_rate:g}, loss {settings.loss_type}",
        "task": f"{config.task}: {len(made)} problems",
        "engine": f"{config.engine}, {arm.engine_dtype}",
        "target": why if target is None else f"{target.schedule}  ({target.detail})",
        "trainer": trainer,
        "correction": arm.correction or "none",
    }


def _target(config: TrainConfig) -> tuple[Target | None, str]:
    """The target as given, else what is documented for the engine, which the run itself will ask.

    None, with a line that says why, if nothing is documented.
    """
    if config.target is not None:
        return resolve_target(config.target), ""
    engine = parse_stack(config.engine)
    if engine.kind == "emulated":
        return resolve_target(engine.detail), ""
    try:
        return resolve_target("/".join(part for part in (engine.kind, engine.detail) if part)), ""
    except UsageError as error:
        return None, f"the engine will be asked at the start ({error})"


def _empty(config: TrainConfig) -> Any:
    """The model without its weights, from its configuration alone."""
    family = config.model.removeprefix("tiny:")
    if family != config.model:
        check_tiny(family, config.task)
        return build(family, len(make_tokenizer()))
    return empty_model(resolve_model(config.model, weights=False))
