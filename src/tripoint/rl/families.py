"""Tiny models of every known layout, warmed up on a task on this machine and kept as checkpoints (`tiny:FAMILY`).

0.2M parameters, one token per character, trained in FP32 so that no rounding schedule is favoured, until the model answers
`WARM` of fresh problems right when sampling.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripoint.errors import MeasurementError, UsageError
from tripoint.models import cache_dir, writable_cache
from tripoint.rl.tasks import CHARACTERS, MADE, Problem
from tripoint.schedule import suggest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "llama": {"model_type": "llama", "head_dim": 32},
    "mistral": {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
    "geglu": {"model_type": "qwen2", "hidden_act": "gelu_pytorch_tanh"},
}

PAD, END = "<pad>", "\n"
WARM = 0.3
BATCH, LR, EVERY, MOST_UPDATES = 128, 2e-3, 50, 4000


def tiny_model(family: str, task: str) -> Path:
    """The checkpoint of `family` warmed up on `task`, made in about a minute if it is not there yet.

    Raises UsageError for a family that is not known or a task that is not made here.
    """
    check_tiny(family, task)
    target = cache_dir() / "models" / f"tiny-{family}-{task}"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(prefix="warming-up-", dir=writable_cache("models")) as unfinished:
        made = Path(unfinished) / target.name
        tokenizer = make_tokenizer()
        _warm_up(family, task, tokenizer).bfloat16().save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process was faster, and its copy is as good
                raise
    return target


def check_tiny(family: str, task: str) -> None:
    """Raises UsageError unless `family` is known and `task` one that is made here."""
    if family not in FAMILIES:
        raise UsageError(f"model `tiny:{family}`: no such family{suggest(family, list(FAMILIES))}")
    if task not in MADE:
        raise UsageError(
            f"model `tiny:{family}` is warmed up on a task that is made here, not on {task!r}; give {', '.join(MADE)}"
        )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of the tasks; a newline ends a completion."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = [PAD, END, *CHARACTERS]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END
    )


def build(family: str, tokens: int) -> PreTrainedModel:
    """A random FP32 model of `family` with a vocabulary of `tokens`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        vocab_size=tokens,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
        **FAMILIES[family],
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def _warm_up(family: str, task: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    import torch
    from torch.nn.functional import cross_entropy

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(family, len(tokenizer))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        rng = random.Random(0)
        for update in range(MOST_UPDATES):
            made = [MADE[task](rng) for _ in range(BATCH)]
            if update % EVERY == 0 and _success(model, made, tokenizer) >= WARM:
                return model
            ids, answered = _encode(made, tokenizer)
            logits = model(input_ids=ids[:, :-1]).logits
            loss = cross_entropy(logits[answered[:, 1:]], ids[:, 1:][answered[:, 1:]])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    raise MeasurementError(f"`tiny:{family}` did not learn {task!r} in {MOST_UPDATES} updates of its warm-up")


def _encode(made: list[Problem], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (problems, length) of prompt, answer and newline, padded on the right, and where answer and newline are."""
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in made]
    whole = tokenizer([problem.prompt + problem.answer + END for problem in made], padding=True, return_tensors="pt")
    import torch

    position = torch.arange(whole["input_ids"].shape[1])
    starts = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    return whole["input_ids"], (position >= starts) & whole["attention_mask"].bool()


def _success(model: Any, made: list[Problem], tokenizer: Any) -> float:
    """The probability with which the model answers these problems right, on average."""
    import torch

    ids, answered = _encode(made, tokenizer)
    with torch.no_grad():
        logprobs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return float((logprobs * answered[:, 1:]).sum(1).exp().mean())
