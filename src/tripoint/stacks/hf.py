"""transformers, the trainer: eager BF16 (`hf`), compiled (`hf:compile`), or FP32 parameters under autocast (`hf:autocast`).

How sequences are batched for scoring: only sequences of one length share a forward pass, so there is no padding and no
attention mask. Masks and lengths alter bits. On SmolLM2-135M in BF16 (CPU, sdpa), batches of 2 to 16 sequences of one length
give exactly the logits of one-by-one passes, while 20 tokens of padding move log-probabilities by up to 0.16 nats on the right
(rms 0.01, at 150 tokens) and up to 0.30 on the left (rms 0.01 to 0.05): as large as what is to be measured. When sampling,
prompts are prefilled in the same way, then decoded together for speed, the KV caches of shorter ones padded on the left and
masked: as in an engine, decoding is arithmetic of its own anyway.

Log-probabilities are the FP32 log-softmax of the model's own logits, at completion tokens only.
All passes run without gradients: `hf:compile` is the graph that Inductor makes for inference.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from tripoint.errors import MeasurementError, UsageError
from tripoint.stacks.base import Progress, Rollout, Stack, end_tokens, vocab_size

BATCH_TOKENS = 4096  # per scoring pass: bounds the BF16 logits, 400 MB for a vocabulary of 49152
BATCH_ROWS = 64  # sequences that are sampled together
RECOMPILE_LIMIT = 64  # graphs differ by batches of one and of more, prompts of one token and of more, with and without cache
SOFTMAX_ROWS = 256  # positions whose FP32 logits exist at a time


class HFStack(Stack):
    """A causal language model of transformers. `model` is the live module, which `tripoint.align` may change."""

    model: transformers.PreTrainedModel

    def __init__(self, model: Path, *, mode: str = "", device: str | None = None, dtype: str = "bfloat16") -> None:
        """Load the checkpoint in directory `model`. `mode` is "", "compile" or "autocast"; but for the last, weights
        are held in `dtype`.

        Raises UsageError if transformers cannot load it.
        """
        self.name = f"hf:{mode}" if mode else "hf"
        self.mode = mode
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                model, dtype="float32" if mode == "autocast" else dtype
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(f"transformers cannot load the checkpoint in `{model}`: {reason}") from error
        self.model = loaded.to(self.device)
        self.vocab_size = vocab_size(model)
        self.end_tokens = torch.tensor(end_tokens(model), device=self.device)
        # Graphs that fit all lengths, so that no sequence is computed by other kernels than the rest.
        self._call: Callable[..., Any] = torch.compile(self.model, dynamic=True) if mode == "compile" else self.model

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        seed: int,
        temperature: float = 1.0,
        progress: Progress | None = None,
    ) -> list[Rollout]:
        self._check(prompts)
        rollouts: dict[int, Rollout] = {}
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # the least padding
        for start in range(0, len(prompts), BATCH_ROWS):
            batch = by_length[start : start + BATCH_ROWS]
            sampled = self._sample_batch([prompts[i] for i in batch], [seed + i for i in batch], max_tokens, temperature)
            rollouts.update(zip(batch, sampled, strict=True))
            if progress:
                progress(len(batch))
        return [rollouts[i] for i in range(len(prompts))]

    def score(self, rollouts: Sequence[Rollout], *, progress: Progress | None = None) -> list[list[float]]:
        self._check([*rollout.prompt_ids, *rollout.completion_ids] for rollout in rollouts)
        scores: dict[int, list[float]] = {}
        lengths = [len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts]
        for batch in equal_lengths(lengths, lambda length: max(1, BATCH_TOKENS // length)):
            scores.update(zip(batch, self._score_batch([rollouts[i] for i in batch]), strict=True))
            if progress:
                progress(len(batch))
        return [scores[i] for i in range(len(rollouts))]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by its checkpoint name, in the dtype and on the device it is held; tied weights once."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                yield name, tensor

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights_complete = False
        held = self.model.state_dict()
        missing = {name for name, _ in self.weights()}
        for name, tensor in weights:
            if name not in held:
                raise MeasurementError(f"stack `{self.name}`: the model has no weight `{name}`")
            if held[name].shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)}, the model's {tuple(held[name].shape)}"
                raise MeasurementError(f"stack `{self.name}`: weight `{name}` is {shapes}")
            held[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise MeasurementError(f"stack `{self.name}`: {len(missing)} weights were not given, such as `{min(missing)}`")
        self.weights_complete = True

    def conditions(self) -> dict[str, Any]:
        return {
            "layers": self.model.config.num_hidden_layers,
            "tp": 1,
            "batch": "sequences of equal length, no padding, no mask",
            "compile": self.mode == "compile",
            "device": _device_name(self.device),
            "dtype": "float32 under bfloat16 autocast"
            if self.mode == "autocast"
            else str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            "threads": torch.get_num_threads(),
        }

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": str(torch.__version__)}

    def _forward(self, ids: torch.Tensor, **options: Any) -> Any:
        context: AbstractContextManager[Any] = nullcontext()
        if self.mode == "autocast":
            context = torch.autocast(self.device.type, torch.bfloat16)
        elif self.mode == "compile":
            # Past its limit the compiler would silently run the model eagerly, which rounds elsewhere.
            context = torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True)
        with context:
            return self._call(input_ids=ids, **options)

    @torch.no_grad()
    def _score_batch(self, rollouts: list[Rollout]) -> list[list[float]]:
        """Rollouts whose prompt + completion have one length."""
        ids = torch.tensor([[*r.prompt_ids, *r.completion_ids] for r in rollouts], device=self.device)
        counts = [len(r.completion_ids) for r in rollouts]
        longest = max(counts)
        # The last of these positions predicts nothing that is asked; the completions' rows are the ones before it.
        logits = self._forward(ids, use_cache=False, logits_to_keep=longest + 1).logits
        owner = torch.tensor([i for i, n in enumerate(counts) for _ in range(n)], device=self.device)
        row = torch.tensor([position for n in counts for position in range(longest - n, longest)], device=self.device)
        token = torch.tensor([token for r in rollouts for token in r.completion_ids], device=self.device)
        flat: list[float] = []
        for start in range(0, len(token), SOFTMAX_ROWS):
            part = slice(start, start + SOFTMAX_ROWS)
            logprobs = logits[owner[part], row[part]].float().log_softmax(-1)
            flat += logprobs.gather(-1, token[part, None])[:, 0].tolist()
        remaining = iter(flat)
        return [list(islice(remaining, n)) for n in counts]

    @torch.no_grad()
    def _sample_batch(
        self, prompts: list[Sequence[int]], seeds: list[int], max_tokens: int, temperature: float
    ) -> list[Rollout]:
        """Prefill prompts of one length at a time, decode all together with a KV cache."""
        uniform = torch.stack(
            [torch.rand(max_tokens, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]
        ).to(self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        logits, cache = self._prefill(prompts)
        mask = None
        if (lengths != lengths.max()).any():
            mask = torch.arange(int(lengths.max()), device=self.device) >= lengths.max() - lengths[:, None]
        running = torch.ones(len(prompts), dtype=torch.bool, device=self.device)
        tokens, logprobs, counts = [], [], torch.zeros_like(lengths)
        for step in range(max_tokens):
            token = _draw(logits, temperature, uniform[:, step])
            tokens.append(token)
            logprobs.append(logits.log_softmax(-1).gather(-1, token[:, None])[:, 0])
            counts += running
            running &= ~torch.isin(token, self.end_tokens)
            if not running.any() or step == max_tokens - 1:
                break
            if mask is not None:
                mask = torch.nn.functional.pad(mask, (0, 1), value=True)
            logits = self._next_logits(token[:, None], cache, attention_mask=mask, position_ids=(lengths + step)[:, None])
        rows = zip(prompts, torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), counts.tolist(), strict=True)
        return [Rollout(tuple(prompt), tuple(token[:n]), tuple(logprob[:n])) for prompt, token, logprob, n in rows]

    def _prefill(self, prompts: list[Sequence[int]]) -> tuple[torch.Tensor, transformers.DynamicCache]:
        """FP32 logits (batch, vocabulary) after each prompt, and the KV cache of all, zeros on the left of the shorter ones."""
        parts: list[tuple[list[int], torch.Tensor, transformers.DynamicCache]] = []
        for group in equal_lengths([len(prompt) for prompt in prompts], lambda length: max(1, BATCH_TOKENS // length)):
            ids = torch.tensor([list(prompts[i]) for i in group], device=self.device)
            part = transformers.DynamicCache(config=self.model.config)
            parts.append((group, self._next_logits(ids, part), part))
        if len(parts) == 1:
            return parts[0][1:]
        order = torch.tensor([i for group, _, _ in parts for i in group], device=self.device).argsort()
        longest = max(map(len, prompts))

        def together(tensors: list[torch.Tensor]) -> torch.Tensor:  # (batch, KV heads, length, head_dim) each
            padded = [torch.nn.functional.pad(t, (0, 0, longest - t.shape[-2], 0)) for t in tensors]
            return torch.cat(padded)[order]

        cache = transformers.DynamicCache(config=self.model.config)
        for layer in range(len(parts[0][2].layers)):
            layers: list[Any] = [part.layers[layer] for _, _, part in parts]
            cache.update(together([kv.keys for kv in layers]), together([kv.values for kv in layers]), layer)
        return torch.cat([logits for _, logits, _ in parts])[order], cache

    def _next_logits(self, ids: torch.Tensor, cache: transformers.DynamicCache, **options: Any) -> torch.Tensor:
        """FP32 logits (batch, vocabulary) for the token after `ids` (batch, new tokens), which are added to `cache`."""
        out = self._forward(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **options)
        return out.logits[:, -1].float()


def _draw(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> torch.Tensor:
    """One token for each row of `logits` (batch, vocabulary), by inverting its distribution function at `uniform` (batch)."""
    if temperature == 0:
        return logits.argmax(-1)
    below = (logits / temperature).softmax(-1).double().cumsum(-1)
    return torch.searchsorted(below, uniform[:, None] * below[:, -1:], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def equal_lengths(lengths: Sequence[int], rows: Callable[[int], int]) -> Iterator[list[int]]:
    """The indices of `lengths` in batches of one length each, at most `rows(length)` together."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        groups[length].append(index)
    for length, group in groups.items():
        for start in range(0, len(group), rows(length)):
            yield group[start : start + rows(length)]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
