"""Stack `http://...`: which model of a server it asks, what it sends, and what it makes of everything a server may answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tripoint.canary import CanaryShape, build
from tripoint.errors import MeasurementError, UsageError
from tripoint.stacks import Rollout, open_stack
from tripoint.stacks.http import HttpStack, wait_for

VOCABULARY = 50
Answer = Callable[[dict[str, Any]], Any]


class FakeServer(ThreadingHTTPServer):
    """Lists `models`, and sends what `answer` makes of a completion request: JSON, or a string as it is."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.models: Any = {"data": [{"id": "checkpoint"}]}
        self.key: str | None = None
        self.status = 200
        self.loading = False
        self.requests: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        allowed = self.server.key is None or self.headers["Authorization"] == f"Bearer {self.server.key}"
        self._send(503 if self.server.loading else 200 if allowed else 401, self.server.models)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self._send(self.server.status, self.server.answer(request))

    def _send(self, status: int, body: Any) -> None:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def logprob(position: int, token: int) -> float:
    return -(token + position / 16)


def completions(request: dict[str, Any]) -> dict[str, Any]:
    """As vLLM: after a prompt that ends with token t comes t + 1, and so on; the choices in no order."""
    choices = []
    for index, prompt in enumerate(request["prompt"]):
        ids = [*prompt, *range(prompt[-1] + 1, prompt[-1] + 1 + request["max_tokens"])]
        logprobs = [None, *(logprob(position, ids[position]) for position in range(1, len(ids)))]
        start = 0 if request["echo"] else len(prompt)
        found = {"tokens": [f"token_id:{i}" for i in ids[start:]], "token_logprobs": logprobs[start:]}
        choices.append({"index": index, "logprobs": found})
    return {"choices": choices[::-1]}


def sends(**logprobs: Any) -> Answer:
    return lambda request: {"choices": [{"index": 0, "logprobs": logprobs}]}


@contextmanager
def serving(answer: Answer = completions) -> Iterator[FakeServer]:
    with FakeServer(answer) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as running:
        yield running


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return checkpoint


@pytest.fixture
def stack(server: FakeServer, directory: Path) -> Iterator[HttpStack]:
    with open_stack(server.url, directory) as opened:
        assert isinstance(opened, HttpStack)
        yield opened


# --- what is asked, and what comes of it


PROMPTS = [[5, 9], [20], [7, 3, 30]]


def test_greedy_sampling_is_one_request_whose_choices_go_by_index(stack: HttpStack, server: FakeServer) -> None:
    done: list[int] = []
    sampled = stack.sample(PROMPTS, max_tokens=3, seed=0, temperature=0, progress=done.append)
    assert [r.prompt_ids for r in sampled] == [tuple(prompt) for prompt in PROMPTS]
    assert [r.completion_ids for r in sampled] == [(10, 11, 12), (21, 22, 23), (31, 32, 33)]
    assert sampled[0].logprobs == tuple(logprob(position, 8 + position) for position in (2, 3, 4))
    (request,) = server.requests
    assert request["prompt"] == PROMPTS
    assert (request["max_tokens"], request["temperature"], request["logprobs"]) == (3, 0, 0)
    assert (request["top_p"], request["top_k"], request["repetition_penalty"]) == (1, -1, 1)  # not generation_config's
    assert sum(done) == 3


def test_sampling_is_one_request_per_sequence_with_its_own_seed(stack: HttpStack, server: FakeServer) -> None:
    done: list[int] = []
    sampled = stack.sample(PROMPTS, max_tokens=2, seed=40, temperature=0.5, progress=done.append)
    assert [r.completion_ids for r in sampled] == [(10, 11), (21, 22), (31, 32)]
    requests = sorted(server.requests, key=lambda request: request["seed"])
    assert [(r["seed"], r["prompt"]) for r in requests] == [(40 + i, [prompt]) for i, prompt in enumerate(PROMPTS)]
    assert {r["temperature"] for r in requests} == {0.5}
    assert sum(done) == 3


def test_scoring_takes_the_completion_out_of_the_echo(stack: HttpStack, server: FakeServer) -> None:
    scores = stack.score([Rollout((5, 9), (40, 2, 8)), Rollout((6,), (7,))])
    assert scores == [[logprob(2, 40), logprob(3, 2), logprob(4, 8)], [logprob(1, 7)]]
    requests = sorted(server.requests, key=lambda request: len(request["prompt"][0]))
    assert [r["prompt"] for r in requests] == [[[6, 7]], [[5, 9, 40, 2, 8]]]
    assert all(r["echo"] and r["max_tokens"] == 1 for r in requests)


def test_a_server_that_does_not_echo_cannot_score(stack: HttpStack, server: FakeServer) -> None:
    server.answer = lambda request: completions(request | {"echo": False})
    with pytest.raises(MeasurementError, match="does not echo the log-probabilities of prompts"):
        stack.score([Rollout((5, 9), (40,))])


def test_a_server_that_puts_a_token_in_front_cannot_score(stack: HttpStack, server: FakeServer) -> None:
    server.answer = lambda request: completions(request | {"prompt": [[0, *prompt] for prompt in request["prompt"]]})
    with pytest.raises(MeasurementError, match="echoes 4 tokens of a prompt of 3: it adds its own"):
        stack.score([Rollout((5, 9), (40,))])


def test_a_refusal_is_shown_in_the_servers_words(stack: HttpStack, server: FakeServer) -> None:
    server.status, server.answer = 400, lambda request: {"error": {"message": "seed must\nbe small"}}
    with pytest.raises(MeasurementError, match=r"refused with HTTP 400: .*seed must\\nbe small"):
        stack.sample(PROMPTS, max_tokens=2, seed=40)


def test_weights_are_not_replaced(stack: HttpStack) -> None:
    with pytest.raises(MeasurementError, match="cannot be replaced over HTTP"):
        stack.load_weights([("weight", torch.ones(1))])


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (sends(tokens=[], token_logprobs=[]), '"tokens": []'),
        (sends(content=[{"token": "the", "logprob": -1.0}]), '"content"'),
        (sends(tokens=["token_id:5"], token_logprobs=[None]), "null"),
        (sends(tokens=["token_id:5"], token_logprobs=[-1.0, -2.0]), "-2.0"),
        (sends(tokens=[5], token_logprobs=[-1.0]), "[5]"),
        (lambda request: {"choices": [{"index": 0, "logprobs": None}]}, '"logprobs": null'),
        (lambda request: {"choices": [{"text": "the"}]}, '"text": "the"'),
        (lambda request: {"choices": []}, '"choices": []'),
        (lambda request: {"choices": [None]}, '"choices": [null]'),
        (lambda request: ["the"], '["the"]'),
        (lambda request: "<html>\nlog in" + " please" * 1000, "<html> log in please"),
    ],
)
def test_an_odd_answer_is_one_line_that_quotes_it(stack: HttpStack, server: FakeServer, answer: Answer, shown: str) -> None:
    server.answer = answer
    with pytest.raises(MeasurementError, match="did not send a completion with the log-probability of each token") as caught:
        stack.sample([[5]], max_tokens=1, seed=0)
    message = str(caught.value)
    assert shown in message
    assert "\n" not in message
    assert len(message) < 500


def test_an_echo_without_a_logprob_is_quoted(stack: HttpStack, server: FakeServer) -> None:
    """But for the first token's, which nothing precedes."""
    server.answer = sends(tokens=["token_id:5", "token_id:6"], token_logprobs=[None, None])
    with pytest.raises(MeasurementError, match=r"did not send .*\[null, null\]"):
        stack.score([Rollout((5,), (6,))])


# --- answers in text


def byte_level(*extra: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["the", "Ġthe", "Ã", "Â", *extra])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def read(stack: HttpStack, server: FakeServer, token: str) -> int:
    server.answer = sends(tokens=[token], token_logprobs=[-1.0])
    ((read_as,),) = (r.completion_ids for r in stack.sample([[5]], max_tokens=1, seed=0))
    return read_as


def test_text_is_the_token_that_decodes_to_it(stack: HttpStack, server: FakeServer, directory: Path) -> None:
    byte_level().save_pretrained(directory)
    assert [read(stack, server, token) for token in ("the", " the", "token_id:2")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("token", "meaning"),
    [("Ġthe", "no tokens"), ("the ", "no tokens"), ("zebra", "no tokens"), ("\N{REPLACEMENT CHARACTER}", "2 tokens")],
)
def test_text_that_is_not_one_token_is_refused(
    stack: HttpStack, server: FakeServer, directory: Path, token: str, meaning: str
) -> None:
    byte_level().save_pretrained(directory)
    with pytest.raises(MeasurementError, match=f"answers in text, and '{token}' is the text of {meaning}"):
        read(stack, server, token)


def test_a_space_in_front_is_ignored_only_where_no_token_has_one(stack: HttpStack, server: FakeServer, directory: Path) -> None:
    byte_level("zebra").save_pretrained(directory)
    assert read(stack, server, "zebra") == 4
    with pytest.raises(MeasurementError, match="' zebra' is the text of no tokens"):
        read(stack, server, " zebra")


def test_the_canarys_words_are_read_with_and_without_a_space(server: FakeServer, tmp_path: Path) -> None:
    canary = build(CanaryShape())
    canary.save(tmp_path)
    stack = HttpStack(server.url, tmp_path)
    for token in canary.answers:
        word = canary.words((token,))
        assert [read(stack, server, text) for text in (word, f" {word}")] == [token, token]


def test_text_without_a_tokenizer(stack: HttpStack, server: FakeServer, directory: Path) -> None:
    with pytest.raises(MeasurementError, match=r"no tokenizer in `.*checkpoint`"):
        read(stack, server, "the")


def test_text_with_a_tokenizer_that_cannot_be_read(stack: HttpStack, server: FakeServer, directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot read its tokenizer"):
        read(stack, server, "the")


# --- the server and its models


def listed(*models: str | tuple[str, str]) -> dict[str, Any]:
    return {"data": [{"id": m} if isinstance(m, str) else {"id": m[0], "root": m[1]} for m in models]}


@pytest.mark.parametrize(
    ("models", "chosen"),
    [
        (listed("other", "checkpoint"), "checkpoint"),
        (listed("other", "/elsewhere/checkpoint"), "/elsewhere/checkpoint"),
        (listed("other", ("alias", "/elsewhere/checkpoint")), "alias"),
        (listed("org/some-name"), "org/some-name"),
        (listed(("a", "/elsewhere/x"), ("b", "/elsewhere/x")), "a"),
    ],
)
def test_the_model_is_the_one_of_the_directorys_name_or_the_only_one(
    server: FakeServer, directory: Path, models: dict[str, Any], chosen: str
) -> None:
    server.models = models
    stack = HttpStack(f"{server.url}/v1/", directory)
    assert stack.conditions()["served"] == chosen
    stack.sample([[5]], max_tokens=1, seed=0)
    assert server.requests[0]["model"] == chosen


@pytest.mark.parametrize("models", [("one", "two"), ("here/checkpoint", "there/checkpoint")])
def test_several_models_that_might_be_meant_are_named(server: FakeServer, directory: Path, models: tuple[str, str]) -> None:
    server.models = listed(*models)
    with pytest.raises(UsageError, match=f"serves {', '.join(models)}: which of them is `.*`.* under the name `checkpoint`"):
        HttpStack(server.url, directory)


def test_nothing_served(server: FakeServer, directory: Path) -> None:
    server.models = listed()
    with pytest.raises(MeasurementError, match="or it serves no model"):
        HttpStack(server.url, directory)


@pytest.mark.parametrize("models", ["<html>", {"models": []}, {"data": [{"name": "checkpoint"}]}, {"data": ["checkpoint"]}, []])
def test_a_server_of_another_kind(server: FakeServer, directory: Path, models: Any) -> None:
    server.models = models
    with pytest.raises(UsageError, match="not as an OpenAI-compatible server"):
        HttpStack(server.url, directory)


def test_an_api_key_comes_from_the_environment(server: FakeServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "secret"
    for key in (None, "wrong"):
        if key:
            monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(UsageError, match=r"wants an API key \(HTTP 401\): set .* OPENAI_API_KEY"):
            HttpStack(server.url, directory)
        with pytest.raises(UsageError, match="wants an API key"):
            wait_for(server.url, directory)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    wait_for(server.url, directory)
    assert HttpStack(server.url, directory).served == "checkpoint"


@pytest.mark.parametrize("url", ["http://localhost:port", "http://", "http://[::1", "http://.a"])
def test_what_is_no_address_is_not_waited_for(directory: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")  # a proxy would be asked first
    for ask in (lambda: HttpStack(url, directory), lambda: wait_for(url, directory, 5.0)):
        with pytest.raises(UsageError, match="is not the address of a server"):
            ask()


def test_waiting_ends_when_the_model_is_served(server: FakeServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.models = listed("other")
    server.loading = True
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        server.loading = len(waited) < 2
        if len(waited) == 3:
            server.models = listed("other", ("alias", "/elsewhere/checkpoint"))

    monkeypatch.setattr("tripoint.stacks.http.time.sleep", sleep)
    wait_for(server.url, directory, math.inf)
    assert len(waited) == 3


@pytest.mark.parametrize(("models", "why"), [(listed("other"), "it serves other"), (None, "nothing answers there")])
def test_waiting_gives_up(server: FakeServer, directory: Path, models: Any, why: str) -> None:
    """The only model is not good enough here: the server may still run with the one before."""
    server.models = models
    url = "http://127.0.0.1:1" if models is None else server.url
    with pytest.raises(MeasurementError, match=why):
        wait_for(url, directory, 0.1)
