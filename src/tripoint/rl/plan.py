"""What a run would do, found out without weights, an engine or a GPU (`tripoint train CONFIG.toml --dry-run`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tripoint.errors import UsageError
from tripoint.models import resolve_model
from tripoint.profiles import Target, resolve_target
from tripoint.rl.config import TrainConfig
from tripoint.rl.families import FAMILIES, build, make_tokenizer
from tripoint.rl.grpo import grpo_config
from tripoint.rl.policy import prepare
from tripoint.rl.tasks import problems
from tripoint.schedule import suggest
from tripoint.stacks import parse_stack


def plan(config: TrainConfig) -> list[str]:
    """One line for each thing that is settled: completions, TRL's settings, schedules, the aligned model on the meta device.

    Raises UsageError for whatever would end the run before its first step.
    """
    settings = grpo_config(config, config.directory)
    made = problems(config.task, shots=0)
    target = _target(config)
    schedule = config.how.schedule(target.schedule)
    with torch.device("meta"):
        model = _empty(config.model)
    prepare(model, config, schedule)
    size = sum(parameter.numel() for parameter in model.parameters())
    compute = config.how.trainer_dtype
    return [
        f"run        {config.name} in {config.directory}",
        f"model      {config.model}: {type(model).__name__}, {model.config.num_hidden_layers} layers, {size / 1e6:,.1f}M "
        f"parameters, weights {config.weights}, computes in {compute}",
        f"step       {config.prompts} prompts x {config.generations} completions of up to {config.max_completion} tokens, "
        f"{settings.gradient_accumulation_steps} passes of {settings.per_device_train_batch_size}, {config.steps} steps, "
        f"lr {settings.learning_rate:g}, loss {settings.loss_type}",
        f"task       {config.task}: {len(made)} problems",
        f"engine     {config.engine}, {config.how.engine_dtype}",
        f"target     {target.schedule}  ({target.detail})",
        f"trainer    {schedule if schedule is not None else 'FP32, rounds nowhere'}",
        f"correction {config.how.correction or 'none'}",
    ]


def _target(config: TrainConfig) -> Target:
    """The target as given, else what is documented for the engine, which the run itself will ask."""
    if config.target is not None:
        return resolve_target(config.target)
    engine = parse_stack(config.engine)
    if engine.kind == "emulated":
        return resolve_target(engine.detail)
    return resolve_target("/".join(part for part in (engine.kind, engine.detail) if part))


def _empty(model: str) -> Any:
    """The model without its weights, from its configuration alone."""
    family = model.removeprefix("tiny:")
    if family != model:
        if family not in FAMILIES:
            raise UsageError(f"model `{model}`: no such family{suggest(family, list(FAMILIES))}")
        return build(family, len(make_tokenizer()))
    directory = Path(model).expanduser()
    source = directory if (directory / "config.json").is_file() else resolve_model(model)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))  # type: ignore[no-untyped-call]
