"""Asks stacks: builds a canary, has it answered, and reads the answers with the conditions they were given under."""

from __future__ import annotations

import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tripoint.canary.checkpoint import Canary, build
from tripoint.canary.reading import Fingerprint, Observed, read
from tripoint.canary.shape import CanaryShape
from tripoint.errors import MeasurementError
from tripoint.models import checkpoint_weights
from tripoint.stacks.base import Rollout, Stack


def fingerprint_stack(open_on: Callable[[Path], Stack], shape: CanaryShape = CanaryShape(), seed: int = 0) -> Fingerprint:  # noqa: B008
    """Where does the stack that `open_on` opens on a checkpoint directory round?

    Raises MeasurementError if it does not start, dies, or its answers are none (see `Fingerprint.problem`).
    """
    canary = build(shape, seed)
    with tempfile.TemporaryDirectory(prefix="tripoint-canary-") as directory:
        canary.save(Path(directory))
        with open_on(Path(directory)) as stack:
            return ask(stack, canary)


def fingerprint(load: Callable[[str], Any], shape: CanaryShape = CanaryShape(), seed: int = 0) -> Fingerprint:  # noqa: B008
    """Where does a trainer round? `load(checkpoint_dir)` is its own loading code.

    It returns anything that maps token ids [batch, sequence] to logits [batch, sequence, vocabulary], as a tensor, the first
    of a tuple, or an attribute `logits`. It is called as it is, with gradients if they are on, on batches of one length.
    Decoding with a KV cache is not asked. Raises MeasurementError if the answers are none (see `Fingerprint.problem`).
    """
    canary = build(shape, seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tripoint-canary-") as directory:
        canary.save(Path(directory))
        model = load(directory)
        observed = Observed(
            prefill=_greedy(model, [prompt.tokens for prompt in canary.prompts]),
            alone=[_greedy(model, [prompt.tokens])[0] for prompt in canary.decode_prompts],
        )
    found = read(canary, observed, "trainer")
    conditions = {
        "layers": shape.layers,
        "batch": "prompts of equal length, and one at a time",
        "grad": torch.is_grad_enabled(),
    }
    return _finished(found, canary, conditions, {"torch": str(torch.__version__)}, started)


def fingerprint_in_place(stack: Stack, model: Path, seed: int = 0) -> Fingerprint:
    """Where does a running stack round, in the full shape of the checkpoint in directory `model` that it holds?

    Canary weights, made tensor by tensor, go into it through its own weight sync, and the model's own back afterwards, however
    the asking ended. No checkpoint outlives the asking: a stack whose sync goes through files (`vllm`) deletes them at once.
    Its log-probabilities prove that all is as before: they must be what they were, bit by bit. `seconds` counts all of that.

    Raises MeasurementError if the stack fails, if its answers are none, or if the model's weights are not back. Where the
    asking failed and they are not back either, a note of the error says so, unless the stack has ended with them.
    """
    started = time.monotonic()
    canary = build(CanaryShape.like(model, full=True), seed)
    proof = stack.sample(_proof_prompts(stack), max_tokens=8, seed=0)
    before = stack.score(proof)
    try:
        stack.load_weights(canary.tensors())
        found = ask(stack, canary)
    except BaseException as error:  # Ctrl-C included
        if not stack.closed:
            try:
                _put_back(stack, model, proof, before)
            except Exception as failure:
                error.add_note(str(failure))
        raise
    _put_back(stack, model, proof, before)
    return replace(found, conditions=found.conditions | {"in place": True}, seconds=time.monotonic() - started)


def ask(stack: Stack, canary: Canary) -> Fingerprint:
    """Ask a stack that holds the canary's weights: all prompts in one batch, then some of them while decoding, and one by one.

    Raises MeasurementError if the answers are none (see `Fingerprint.problem`).
    """
    started = time.monotonic()

    doubtful = 0

    def generate(prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[int, ...]]:
        nonlocal doubtful
        rollouts = stack.sample(prompts, max_tokens=tokens, seed=0, temperature=0.0)
        doubtful += sum(not rollout.logprobs[-1] > -0.01 for rollout in rollouts if rollout.logprobs)
        return [rollout.completion_ids for rollout in rollouts]

    observed = Observed(
        prefill=[ids[0] for ids in generate([prompt.tokens for prompt in canary.prompts], 1)],
        decoded=generate([prompt.decode for prompt in canary.decode_prompts if prompt.decode], 2),
        alone=[generate([prompt.tokens], 1)[0][0] for prompt in canary.decode_prompts],
    )
    found = read(canary, observed, stack.name)
    if doubtful:  # the output weights are so large that every answer is certain
        finding = f"{doubtful} answers were not certain by the stack's own logprobs: is something done to its logits?"
        found = replace(found, findings=(*found.findings, finding))
    return _finished(found, canary, stack.conditions(), stack.versions(), started)


def _finished(
    found: Fingerprint, canary: Canary, conditions: dict[str, Any], versions: dict[str, str], started: float
) -> Fingerprint:
    if found.problem is not None:
        raise MeasurementError(f"stack `{found.stack}` cannot be fingerprinted: {found.problem}")
    shape = canary.shape
    own = {
        "architecture": shape.architecture,
        "hidden": shape.hidden,
        "head_dim": shape.head_dim,
        "heads": f"{shape.heads} query, {shape.kv_heads} key-value",
        "intermediate": shape.intermediate,
        "layers": shape.layers,
        "full shape": shape.full,
        "in place": False,
        "prompts": len(canary.prompts),
        "machine": platform.machine(),
    }
    notes = found.notes
    if not shape.full:
        notes += (
            f"measured in the canary's own depth of {shape.layers} layers and vocabulary of {shape.vocab}: what a compiler "
            "fuses (carry first of all) can differ in a model's; --full-shape or --in-place asks there",
        )
    told = {name: value for name, value in conditions.items() if value is not None or name not in own}
    return replace(found, notes=notes, conditions=own | told, versions=versions, seconds=time.monotonic() - started)


def _greedy(model: Any, prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """The most likely next token of each prompt, those of one length in one call."""
    device = next((parameter.device for parameter in model.parameters()), None) if hasattr(model, "parameters") else None
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    tokens = [0] * len(prompts)
    for indices in by_length.values():
        out = model(torch.tensor([prompts[i] for i in indices], device=device))
        out = getattr(out, "logits", out)
        logits = out[0] if isinstance(out, tuple) else out
        for index, token in zip(indices, logits[:, -1].argmax(-1).tolist(), strict=True):
            tokens[index] = token
    return tokens


# -- in place ---------------------------------------------------------------------------------------------------------


def _proof_prompts(stack: Stack) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(stack.vocab_size, (4, 16), generator=generator).tolist()


def _put_back(stack: Stack, model: Path, proof: Sequence[Rollout], before: list[list[float]]) -> None:
    warning = f"stack `{stack.name}` does not hold its model's weights any more: restart it on `{model}` before you use it"
    try:
        stack.load_weights(checkpoint_weights(model))
        after = stack.score(proof)
    except Exception as error:  # whatever it was, the weights are not back
        raise MeasurementError(f"{warning}. {error}") from error
    if after != before:
        raise MeasurementError(f"{warning}. Its log-probabilities are not what they were before the canary")
