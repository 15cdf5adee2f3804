"""A server that somebody else runs: `http://host:port`, OpenAI-compatible completions (vLLM, SGLang, ...).

Prompts are sent as token ids, so no tokenizer of the server's is in the way. Its weights cannot be replaced from here, and
what it does with a request (batching, a token in front, processed log-probabilities) is its own business. A server that wants
an API key gets the environment's `OPENAI_API_KEY`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import torch

from tripoint.errors import MeasurementError, UsageError
from tripoint.models import read_tokenizer
from tripoint.stacks.base import Progress, Rollout, Stack, vocab_size

CONCURRENT = 16  # requests under way at a time
TIMEOUT = 600.0  # seconds for one answer
# Everything a server might take from the checkpoint's generation_config instead.
RAW = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_TOKEN_ID = "token_id:"


class HttpStack(Stack):
    """A running server that holds the checkpoint in directory `model`."""

    def __init__(self, url: str, model: Path) -> None:
        """Find the model among those that the server at `url` serves: the one of the directory's name, else the only one.

        Raises MeasurementError if the server does not answer, UsageError if it serves several models of other names, wants
        another API key, or is not OpenAI-compatible.
        """
        self.name = url
        self.url = _base(url)
        self.vocab_size = vocab_size(model)
        self._tokenizer_dir = model
        self._client = _client()
        served = served_models(self.url, self._client)
        if not served:
            raise MeasurementError(
                f"no server answers at {self.url}/v1/models, or it serves no model: is it running, and is this its address?"
            )
        found = _called(model, served) or served
        # Several names of one model (vLLM's `--served-model-name a b`) have one root.
        if len(set(found.values())) > 1:
            raise UsageError(
                f"{url} serves {', '.join(found)}: which of them is `{model}`? Have it serve that one alone, "
                f"or under the name `{model.name}`"
            )
        self.served = next(iter(found))

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
            answers = self._complete([list(p) for p in prompts], max_tokens=max_tokens, temperature=0.0)
            if progress:
                progress(len(prompts))
        else:

            def one(index: int) -> tuple[list[str], list[float]]:
                prompt = [list(prompts[index])]
                (answer,) = self._complete(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed + index)
                if progress:
                    progress(1)
                return answer

            with ThreadPoolExecutor(CONCURRENT) as pool:
                answers = list(pool.map(one, range(len(prompts))))
        return [
            Rollout(tuple(prompt), tuple(map(self._token_id, tokens)), tuple(logprobs))
            for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True)
        ]

    def score(self, rollouts: Sequence[Rollout], *, progress: Progress | None = None) -> list[list[float]]:
        sequences = [[*rollout.prompt_ids, *rollout.completion_ids] for rollout in rollouts]
        self._check(sequences)

        def one(index: int) -> list[float]:
            ids, asked = sequences[index], len(rollouts[index].completion_ids)
            ((tokens, logprobs),) = self._complete([ids], max_tokens=1, temperature=0.0, echo=True)
            if len(tokens) < len(ids):
                raise MeasurementError(f"{self.name} does not echo the log-probabilities of prompts, so it cannot score tokens")
            if len(tokens) > len(ids) + 1:  # then which logprob is whose?
                raise MeasurementError(
                    f"{self.name} echoes {len(tokens) - 1} tokens of a prompt of {len(ids)}: it adds its own"
                )
            if progress:
                progress(1)
            return logprobs[len(ids) - asked : len(ids)]

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

    def _complete(self, prompts: list[list[int]], *, echo: bool = False, **options: Any) -> list[tuple[list[str], list[float]]]:
        """The tokens, as the server writes them, and the logprobs (nats) that answer each of `prompts`, in their order.

        With `echo` the prompt's come first, and NaN is the logprob of the first token, which nothing precedes. Raises
        MeasurementError with the server's own words if it refuses or sends anything else.
        """
        # vLLM then writes tokens as `token_id:N`; servers that do not know the field write them as text.
        wanted = {"logprobs": 0, "return_tokens_as_token_ids": True}
        body = {"model": self.served, "prompt": prompts, "echo": echo, **wanted, **RAW, **options}
        try:
            answer = self._client.post(f"{self.url}/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise MeasurementError(f"{self.name} died or does not answer: {error or type(error).__name__}") from error
        said = " ".join(answer.text.split())[:300]
        if answer.status_code != 200:
            raise MeasurementError(f"{self.name} refused with HTTP {answer.status_code}: {said}")
        try:
            choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
            if [choice["index"] for choice in choices] != list(range(len(prompts))):
                raise ValueError("not one completion for each prompt")
            return [_tokens_and_logprobs(choice["logprobs"], echo) for choice in choices]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MeasurementError(
                f"{self.name} did not send a completion with the log-probability of each token for each prompt, but: {said}"
            ) from error

    def _token_id(self, token: str) -> int:
        number = token.removeprefix(_TOKEN_ID)
        if number != token and number.isdecimal():
            return int(number)
        found = self._ids_of_text.get(token, [])
        if len(found) != 1:
            raise MeasurementError(
                f"{self.name} answers in text, and {token!r} is the text of {len(found) or 'no'} tokens of the checkpoint's "
                "tokenizer: it takes a server that knows `return_tokens_as_token_ids`, such as vLLM"
            )
        return found[0]

    @cached_property
    def _ids_of_text(self) -> dict[str, list[int]]:
        """The token ids that each text may stand for."""
        tokenizer = read_tokenizer(self._tokenizer_dir)
        if tokenizer is None:
            raise MeasurementError(
                f"{self.name} answers in text, and there is no tokenizer in `{self._tokenizer_dir}` to read it with"
            )
        ids: defaultdict[str, list[int]] = defaultdict(list)
        for i in tokenizer.get_vocab().values():
            ids[str(tokenizer.decode([i]))].append(i)
        if not any(text.startswith(" ") for text in ids):
            # Whole words, as in a canary: a space in front is no part of the token, but where a server put words together.
            ids |= {f" {text}": found for text, found in ids.items()}
        return dict(ids)


def _tokens_and_logprobs(sent: Any, echo: bool) -> tuple[list[str], list[float]]:
    """`logprobs` of one choice. Raises ValueError, KeyError, TypeError or AttributeError if it is anything else."""
    tokens, logprobs = list(sent["tokens"]), list(sent["token_logprobs"])
    if echo and logprobs and logprobs[0] is None:
        logprobs[0] = math.nan
    if not tokens or len(tokens) != len(logprobs) or not all(isinstance(token, str) for token in tokens):
        raise ValueError("no tokens, or not one log-probability for each")
    return tokens, [float(logprob) for logprob in logprobs]


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _client() -> httpx.Client:
    key = os.environ.get("OPENAI_API_KEY")
    return httpx.Client(timeout=TIMEOUT, headers={"Authorization": f"Bearer {key}"} if key else {})


def served_models(url: str, client: httpx.Client) -> dict[str, str]:
    """The models that the server at `url` lists, by id, with what each was loaded from; none if it does not answer, or not
    yet: while they load a model, servers and the proxies in front of them say 502 to 504.

    Raises UsageError if it wants another API key or is not OpenAI-compatible, or if `url` is none.
    """
    try:
        answer = client.get(f"{url}/v1/models", timeout=5.0)
        if answer.status_code in (401, 403):
            raise UsageError(
                f"{url} wants an API key (HTTP {answer.status_code}): "
                "set the environment variable OPENAI_API_KEY to one that it accepts"
            )
        if answer.status_code in (502, 503, 504):
            return {}
        if answer.status_code == 200:
            return {str(model["id"]): str(model.get("root") or model["id"]) for model in answer.json()["data"]}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError):
        pass
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:  # the last of a host like `.a`
        raise UsageError(f"{url} is not the address of a server ({error}): write http://HOST:PORT") from error
    except httpx.TransportError:
        return {}
    raise UsageError(f"{url} answers, but not as an OpenAI-compatible server: GET {url}/v1/models failed")


def _called(directory: Path, served: dict[str, str]) -> dict[str, str]:
    """Those of the `served` models that are called as the checkpoint in `directory` is, wherever the server keeps its copy."""
    return {name: root for name, root in served.items() if directory.name in (Path(name).name, Path(root).name)}


def wait_for(url: str, directory: Path, seconds: float = math.inf) -> None:
    """Return when the server at `url` serves the checkpoint in `directory` (or a copy of it, by the directory's name).

    Raises MeasurementError after `seconds` without it, and UsageError as `served_models` does.
    """
    url = _base(url)
    deadline = time.monotonic() + seconds
    with _client() as client:
        while not _called(directory, served := served_models(url, client)):
            if time.monotonic() > deadline:
                serves = f"it serves {', '.join(served)}" if served else "nothing answers there"
                raise MeasurementError(f"{url} did not come to serve the canary in {seconds:.0f} s: {serves}")
            time.sleep(1.0)
