"""A server that somebody else runs: `http://host:port`, OpenAI-compatible completions (vLLM, SGLang, ...).

Prompts are sent as token ids, so no tokenizer of the server's is in the way. Its weights cannot be replaced from here, and
what it does with a request (batching, a token in front, processed log-probabilities) is its own business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from tripoint.errors import MeasurementError, UsageError
from tripoint.stacks.base import Progress, Rollout, Stack, vocab_size

CONCURRENT = 16  # requests under way at a time
TIMEOUT = 600.0  # seconds for one answer
# Everything a server might take from the checkpoint's generation_config instead.
RAW = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_TOKEN_ID = "token_id:"


class HttpStack(Stack):
    """A running server that holds the checkpoint in directory `model`."""

    def __init__(self, url: str, model: Path) -> None:
        """Find the model that the server at `url` serves. Raises MeasurementError if it does not answer."""
        self.name = url
        self.url = url.rstrip("/").removesuffix("/v1")
        self.vocab_size = vocab_size(model)
        self._tokenizer_dir = model
        self._ids: dict[str, int] | None = None
        self._client = httpx.Client(timeout=TIMEOUT)
        served = served_models(self.url, self._client)
        if not served:
            raise MeasurementError(f"no server answers at {self.url}/v1/models: is it running, and is this its address?")
        self.served = served[0]["id"]

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
        if temperature == 0:  # nothing random: one request, one batch for the server
            choices = self._complete([list(p) for p in prompts], max_tokens=max_tokens, temperature=0.0, logprobs=0)
            if progress:
                progress(len(prompts))
        else:

            def one(index: int) -> dict[str, Any]:
                options = {"max_tokens": max_tokens, "temperature": temperature, "logprobs": 0, "seed": seed + index}
                (choice,) = self._complete([list(prompts[index])], **options)
                if progress:
                    progress(1)
                return choice

            with ThreadPoolExecutor(CONCURRENT) as pool:
                choices = list(pool.map(one, range(len(prompts))))
        rollouts = []
        for prompt, choice in zip(prompts, choices, strict=True):
            found = choice["logprobs"]
            ids = tuple(self._token_id(token) for token in found["tokens"])
            rollouts.append(Rollout(tuple(prompt), ids, tuple(map(float, found["token_logprobs"]))))
        return rollouts

    def score(self, rollouts: Sequence[Rollout], *, progress: Progress | None = None) -> list[list[float]]:
        sequences = [[*rollout.prompt_ids, *rollout.completion_ids] for rollout in rollouts]
        self._check(sequences)

        def one(index: int) -> list[float]:
            ids, asked = sequences[index], len(rollouts[index].completion_ids)
            (choice,) = self._complete([ids], max_tokens=1, temperature=0.0, logprobs=0, echo=True)
            echoed = choice["logprobs"]["token_logprobs"]
            if len(echoed) < len(ids):
                raise MeasurementError(f"{self.name} does not echo the log-probabilities of prompts, so it cannot score tokens")
            if progress:
                progress(1)
            return [float(logprob) for logprob in echoed[len(ids) - asked : len(ids)]]

        with ThreadPoolExecutor(CONCURRENT) as pool:
            return list(pool.map(one, range(len(rollouts))))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise MeasurementError(f"the weights of {self.name} cannot be replaced over HTTP: use `vllm`, or a server of your own")

    def conditions(self) -> dict[str, Any]:
        return {"layers": None, "tp": None, "batch": "the server's", "compile": None, "device": None, "served": self.served}

    def versions(self) -> dict[str, str]:
        try:
            answer = self._client.get(f"{self.url}/version").json()
        except (httpx.HTTPError, ValueError):
            return {}
        return {"server": str(answer["version"])} if isinstance(answer, dict) and "version" in answer else {}

    def close(self) -> None:
        self._client.close()

    def _complete(self, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
        """The choices for `prompts`, in their order. Raises MeasurementError with the server's own words if it refuses."""
        # vLLM then writes tokens as `token_id:N`; servers that do not know the field write them as text.
        body = {"model": self.served, "prompt": prompts, "return_tokens_as_token_ids": True, **RAW, **options}
        try:
            answer = self._client.post(f"{self.url}/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise MeasurementError(f"{self.name} died or does not answer: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            said = " ".join(answer.text.split())[:300]
            raise MeasurementError(f"{self.name} refused with HTTP {answer.status_code}: {said}")
        choices: list[dict[str, Any]] = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        if len(choices) != len(prompts) or any(not choice.get("logprobs") for choice in choices):
            raise MeasurementError(
                f"{self.name} sent {len(choices)} answers to {len(prompts)} prompts, or no log-probabilities"
            )
        return choices

    def _token_id(self, token: str) -> int:
        if token.startswith(_TOKEN_ID):
            return int(token.removeprefix(_TOKEN_ID))
        if self._ids is None:
            from transformers import AutoTokenizer

            self._ids = AutoTokenizer.from_pretrained(self._tokenizer_dir).get_vocab()
        if (found := self._ids.get(token, self._ids.get(token.strip()))) is None:
            raise MeasurementError(f"{self.name} answers in text, and {token!r} is not one token of the model's tokenizer")
        return found


def served_models(url: str, client: httpx.Client) -> list[dict[str, Any]]:
    """What the server at `url` lists, nothing if it does not answer. Raises UsageError if it is not OpenAI-compatible."""
    try:
        answer = client.get(f"{url}/v1/models", timeout=5.0)
        models = answer.json()["data"] if answer.status_code == 200 else None
    except (httpx.TransportError, httpx.InvalidURL):
        return []
    except (ValueError, KeyError, TypeError):
        models = None
    if models is None:
        raise UsageError(f"{url} answers, but not as an OpenAI-compatible server: GET {url}/v1/models failed")
    return list(models)


def wait_for(url: str, directory: Path, seconds: float = math.inf) -> None:
    """Return when the server at `url` serves the checkpoint in `directory` (or a copy of it, by the directory's name).

    Raises MeasurementError after `seconds` without it.
    """
    url = url.rstrip("/").removesuffix("/v1")
    deadline = time.monotonic() + seconds
    with httpx.Client() as client:
        while True:
            names = [str(model.get(key)) for model in served_models(url, client) for key in ("id", "root")]
            if any(Path(name).name == directory.name for name in names):
                return
            if time.monotonic() > deadline:
                serves = f"it serves {names[0]}" if names else "nothing answers there"
                raise MeasurementError(f"{url} did not come to serve the canary in {seconds:.0f} s: {serves}")
            time.sleep(1.0)
