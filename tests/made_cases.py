"""Rollouts of tiny engines with a known fault, for what has to find it out.

The engine rounds differently from the trainer (R3 S3 N3 against R1 S1 N1), so that every case lies on top of real rounding
drift. `CASES` are the faults; each takes the engine as it is set up so far and changes one thing about it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tiny import config
from tripoint import align
from tripoint.stacks import Rollout

VOCABULARY, SEQUENCES, PROMPT, COMPLETION, WINDOW, BOS = 200, 32, 6, 48, 24, 0
LIFT, SPREAD = 100.0, 0.2
ENGINE = "R3 S3 N3"


@dataclass
class Engine:
    """How the engine computes, samples and records."""

    model: Any
    rng: np.random.Generator
    begin: tuple[int, ...] = ()
    sampling_temperature: float = 1.0
    recorded_temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    recorded_truncated: bool = True
    fp32_logits: bool = False
    relabel: bool = False
    late: int = 0
    bf16_logprobs: bool = False
    wild: float = 0.0
    about: list[str] = field(default_factory=list)


def trainer_model(seed: int) -> Any:
    """A tiny random Mistral with a sliding window, BF16.

    Its first channel is a constant that no layer reads or writes and that lifts all logits to about 20, as the logits of
    real models are: rounding them to BF16 then matters.
    """
    made = config("mistral", sliding_window=WINDOW, max_position_embeddings=256, tie_word_embeddings=False)
    made.vocab_size = VOCABULARY
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa", dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + SPREAD * values if "norm" in name else SPREAD * values)
            if "o_proj" in name or "down_proj" in name:
                parameter[0] = 0
            elif "_proj" in name:
                parameter[:, 0] = 0
            elif "embed" in name:
                parameter[:, 0] = 1.0
            elif "lm_head" in name:
                parameter[:, 0] = LIFT
    return model.eval()


def rollouts(model: Any, cases: tuple[str, ...], seed: int, sequences: int = SEQUENCES) -> tuple[list[Rollout], list[str]]:
    """What an engine with these faults would hand over, and what was done in words. `model` is left alone."""
    rng = np.random.default_rng(seed)
    engine = Engine(copy.deepcopy(model), rng)
    for case in cases:
        CASES[case](engine)
    align(engine.model, to=ENGINE)
    return _run(engine, seed, sequences), engine.about


def off(rollouts: list[Rollout], nats: float, tokens: int) -> list[Rollout]:
    """`rollouts` with so many tokens, each in a sequence of its own, said to be less likely by `nats`: the least likely."""
    out = list(rollouts)
    for index, rollout in enumerate(rollouts[:tokens]):
        logprobs = np.array(rollout.logprobs)
        logprobs[logprobs.argmin()] -= nats
        out[index] = replace(rollout, logprobs=tuple(logprobs.tolist()))
    return out


@torch.no_grad()
def _run(engine: Engine, seed: int, sequences: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCABULARY, (sequences, PROMPT), generator=generator)
    begin = torch.tensor(engine.begin, dtype=torch.long).expand(sequences, -1)
    ids = torch.cat([begin, prompts], 1)
    recorded = []
    for _ in range(COMPLETION):
        hidden = engine.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
        head = engine.model.lm_head
        logits = hidden.float() @ head.weight.float().T if engine.fp32_logits else head(hidden).float()
        drawn_from = _truncated(logits / engine.sampling_temperature, engine)
        token = torch.multinomial(drawn_from.softmax(-1), 1, generator=generator)
        seen = logits / engine.recorded_temperature
        seen = _truncated(seen, engine) if engine.recorded_truncated else seen
        recorded.append(seen.log_softmax(-1).gather(-1, token)[:, 0])
        ids = torch.cat([ids, token], 1)
    logprobs = torch.stack(recorded, 1)
    completions = ids[:, -COMPLETION:]
    if engine.bf16_logprobs:
        logprobs = logprobs.bfloat16().float()
    if engine.late:
        logprobs = torch.roll(logprobs, engine.late, 1)
    if engine.wild:
        hit = torch.rand(logprobs.shape, generator=generator) < engine.wild
        hit[0, :3] = True
        logprobs = torch.where(hit, logprobs.clamp(max=-1) * 3, logprobs)
    if engine.relabel:
        labels = torch.randperm(VOCABULARY, generator=generator)
        prompts, completions = labels[prompts], labels[completions]
    return [
        Rollout(tuple(p), tuple(c), tuple(v))
        for p, c, v in zip(prompts.tolist(), completions.tolist(), logprobs.tolist(), strict=True)
    ]


def _truncated(logits: torch.Tensor, engine: Engine) -> torch.Tensor:
    if engine.top_k:
        smallest = logits.topk(engine.top_k, -1).values[:, -1:]
        return logits.masked_fill(logits < smallest, -torch.inf)
    if engine.top_p < 1:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        # Those after the first at which the mass is reached.
        drop = ordered.cumsum(-1) - ordered >= engine.top_p
        return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    return logits


def _temperature(engine: Engine) -> None:
    t = float(engine.rng.choice([0.6, 0.7, 0.8, 0.9, 1.2, 1.5]))
    engine.sampling_temperature = engine.recorded_temperature = t
    engine.about.append(f"temperature {t}, processed")


def _sampling_temperature(engine: Engine) -> None:
    engine.sampling_temperature = float(engine.rng.choice([0.6, 0.7, 0.8, 1.3, 1.5]))
    engine.about.append(f"sampled at temperature {engine.sampling_temperature}, recorded raw")


def _truncate(engine: Engine) -> None:
    if engine.rng.random() < 0.5:
        engine.top_p = float(engine.rng.choice([0.7, 0.8, 0.9, 0.95]))
    else:
        engine.top_k = int(engine.rng.choice([5, 10, 20, 40]))
    engine.about.append(f"top_p={engine.top_p} top_k={engine.top_k}")


def _sampling_truncation(engine: Engine) -> None:
    _truncate(engine)
    engine.recorded_truncated = False
    engine.about[-1] += ", recorded raw"


def _weights(engine: Engine) -> None:
    size = float(engine.rng.choice([0.05, 0.1, 0.2]))
    generator = torch.Generator().manual_seed(int(engine.rng.integers(2**31)))
    with torch.no_grad():
        for parameter in engine.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.float() + size * SPREAD * noise)
    engine.about.append(f"weights off by {size:.0%}")


def _bos(engine: Engine) -> None:
    engine.begin = (BOS,)
    engine.about.append("extra BOS")


def _rope(engine: Engine) -> None:
    decoder = engine.model.get_decoder()
    changes: list[dict[str, Any]] = [{"rope_theta": 1e6}, {"rope_theta": 5e5}, {"rope_theta": 1e3}]
    changes += [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}]
    change = changes[engine.rng.integers(len(changes))]
    decoder.config.rope_parameters = decoder.config.rope_parameters | change
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config)
    engine.about.append(f"rope {change}")


def _window(engine: Engine) -> None:
    engine.model.get_decoder().config.sliding_window = None
    engine.about.append("no sliding window")


def _set(**values: Any) -> Callable[[Engine], None]:
    def change(engine: Engine) -> None:
        for name, value in values.items():
            setattr(engine, name, value)
        engine.about.append(str(values))

    return change


# By the cause that has to be named.
CASES: dict[str, Callable[[Engine], None]] = {
    "temperature": _temperature,
    "sampling_temperature": _sampling_temperature,
    "truncation": _truncate,
    "sampling_truncation": _sampling_truncation,
    "weights": _weights,
    "tokenizer": _set(relabel=True),
    "shifted": _set(late=1),
    "bos": _bos,
    "rope": _rope,
    "sliding_window": _window,
    "logits_precision": _set(fp32_logits=True),
    "logprobs_bf16": _set(bf16_logprobs=True),
    "wild_tokens": _set(wild=0.005),
}
