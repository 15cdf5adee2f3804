"""`fingerprint`, `check` and `diff` on the command line: what is asked, in which shape, what counts as changed, exit codes."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from test_cli import Ran, Run, one_line
from tripoint import RoundingSchedule, UsageError, cli
from tripoint.canary import Canary, CanaryShape, Fingerprint, Observed, asking, build, read
from tripoint.canary.questions import Prompt
from tripoint.cli import main

STACK = "emulated:R3 S3 N3 carry=[1,5]"
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "attention_factor": None}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main(list(arguments))
        return Ran(exit.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="module", autouse=True)
def _quick(one_thread: None) -> Iterator[None]:
    with torch.no_grad():
        yield


class Answers:
    """What transformers answers to a small canary, and what is read if some of the answers are others."""

    def __init__(self, directory: Path) -> None:
        self.canary: Canary = build(CanaryShape(hidden=128, layers=2, heads=2, intermediate=64))
        self.canary.save(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        self.tokens = asking._greedy(model, [prompt.tokens for prompt in self.canary.prompts])
        self.word = {value: token for token, value in self.canary.answers.items()}

    def swiglu(self) -> dict[Prompt, int]:
        """S3's answers to the prompts about SwiGLU in the first layer, where transformers has S1."""
        question = next(q for q in self.canary.questions if q.subject == "swiglu")
        s3 = [str(candidate) for candidate in question.candidates].index("S3")
        return {prompt: self.word[prompt.expected[s3]] for prompt in question.prompts}

    def unknown(self, prompt: int) -> dict[Prompt, int]:
        """S3's, but for one that is no answer."""
        answers = self.swiglu()
        return answers | {list(answers)[prompt]: self.canary.circuit.pad}

    def read(
        self,
        prefill: dict[Prompt, int] | None = None,
        decode: dict[Prompt, int] | None = None,
        alone: dict[Prompt, int] | None = None,
    ) -> Fingerprint:
        own = {p: (prefill or {}).get(p, token) for p, token in zip(self.canary.prompts, self.tokens, strict=True)}
        again = self.canary.decode_prompts
        decoded = [(p.tokens[-1], (decode or {}).get(p, own[p])) for p in again]
        observed = Observed([*own.values()], decoded, [(alone or {}).get(p, own[p]) for p in again])
        return read(self.canary, observed, "hf")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(tmp_path_factory.mktemp("canary"))


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Fingerprint], str]:
    def save(found: Fingerprint) -> str:
        path = tmp_path / "f.toml"
        path.write_text(found.to_toml())
        return str(path)

    return save


class Asked:
    """In place of a stack: answers with what it is given, and keeps how it was asked."""

    def __init__(self) -> None:
        self.answer: Fingerprint | None = None
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, stack: str, shape: CanaryShape, seed: int = 0, in_place: Path | None = None) -> Fingerprint:
        self.calls.append((stack, shape, seed, in_place))
        assert self.answer is not None, "nothing was to be measured"
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    stand_in = Asked()
    monkeypatch.setattr(cli, "_fingerprint", stand_in)
    return stand_in


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 600}
    config = AutoConfig.for_model("qwen3", **sizes, head_dim=32, num_hidden_layers=3, rope_parameters=YARN)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def said(done: Ran) -> str:
    return " ".join(done.out.replace("│", " ").split())


# -- a stack, asked and checked ---------------------------------------------------------------------------------------


def test_a_stack_is_asked_saved_and_checked(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "f.toml")
    done = run("fingerprint", STACK, "--save", file, "--json")
    assert done.code == 0
    documented = ["stack", "code", "schedule", "evidence", "undetermined", "conditions", "versions", "seconds"]
    assert set(documented) <= done.json.keys()
    assert (done.json["stack"], done.json["code"]) == (STACK, "R3 S3 N3 carry=[1,5]")
    assert done.json["schedule"] == json.loads(json.dumps(RoundingSchedule.parse(done.json["code"]).to_dict()))
    assert done.json["undetermined"] == []
    assert (done.json["conditions"]["layers"], done.json["conditions"]["in place"]) == (6, False)
    assert tomllib.loads(Path(file).read_text())["code"] == done.json["code"]

    done = run("check", file, "--engine", STACK)
    assert (done.code, "It rounds as it did." in done.out) == (0, True)

    done = run("check", file, "--engine", "emulated:R3 S1 N3", "--json")
    assert done.code == 1
    assert done.json["changed"] == [
        {"field": "swiglu.silu_round", "was": False, "now": True},
        {"field": "carry", "was": [1, 5], "now": "bf16"},
    ]

    done = run("diff", file, "hf", "--json")
    assert done.code == 1
    assert done.json["left"]["code"] == "R3 S3 N3 carry=[1,5]"
    assert "at 6 layers" in done.json["left"]["detail"]
    assert done.json["right"]["code"] == "R1 S1 N1"


def test_a_verdict_with_gaps_is_printed_saved_and_exit_code_3(run: Run, tmp_path: Path, answers: Answers, asked: Asked) -> None:
    asked.answer = answers.read(answers.unknown(0))
    file = tmp_path / "f.toml"
    done = run("fingerprint", "hf", "--save", str(file))
    assert done.code == 3
    assert "no known schedule" in done.out
    assert "unknown, 1 of" in done.out
    assert Fingerprint.from_toml(file).undetermined == ("swiglu.silu_round", "swiglu.sig", "swiglu.cast")


@pytest.mark.parametrize("target", ["gone/f.toml", "", "locked/f.toml", "x" * 300])
def test_a_file_that_cannot_be_written_is_known_before_anything_is_measured(
    run: Run, tmp_path: Path, asked: Asked, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")  # root may write everywhere
    done = run("fingerprint", "hf", "--save", str(tmp_path / target))
    assert (done.code, asked.calls) == (2, [])
    assert "cannot be written" in done.err
    assert one_line(done.err)


def test_what_was_measured_is_printed_even_if_it_cannot_be_saved(
    run: Run, tmp_path: Path, answers: Answers, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, text: str, encoding: str) -> int:
        raise OSError(28, "No space left on device")

    asked.answer = answers.read()
    monkeypatch.setattr(Path, "write_text", full)
    done = run("fingerprint", "hf", "--save", str(tmp_path / "f.toml"), "--json")
    assert (done.code, done.json["code"]) == (2, "R1 S1 N1")
    assert "f.toml: cannot be written: No space left on device" in done.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["hf", "--full-shape"], "--full-shape needs --like MODEL"),
        (["hf", "--in-place"], "--in-place needs --like MODEL"),
        (["hf", "--like", "MODEL", "--in-place", "--full-shape"], "leave out --full-shape"),
        (["http://127.0.0.1:1", "--like", "MODEL", "--in-place"], "cannot be replaced over HTTP"),
        (["rollouts:f.jsonl"], "is a recording and answers nothing"),
        (["vlm"], "did you mean `vllm`?"),
    ],
)
def test_what_cannot_be_asked_is_exit_code_2(run: Run, model: Path, asked: Asked, options: list[str], words: str) -> None:
    done = run("fingerprint", *(str(model) if option == "MODEL" else option for option in options))
    assert (done.code, done.out, asked.calls) == (2, "", [])
    assert words in done.err
    assert one_line(done.err)


# -- what counts as changed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["decode", "alone"])
def test_a_rounding_that_changed_only_in_decode_or_in_a_batch_of_one(
    run: Run, answers: Answers, asked: Asked, save: Callable[[Fingerprint], str], how: str
) -> None:
    file = save(answers.read())
    asked.answer = answers.read(**{how: answers.swiglu()})
    assert asked.answer.code == "R1 S1 N1"
    done = run("check", file, "--engine", "hf")
    assert done.code == 1
    assert "found now, and not then: swiglu (layer 0)" in said(done)
    assert "as S3; the batch S1" in said(done)
    assert "It does not round as it did." in done.out
    back = run("check", save(asked.answer), "--engine", "hf")
    assert (back.code, "found then and now: swiglu (layer 0)" in said(back)) == (0, True)
    asked.answer = answers.read()
    gone = run("check", file, "--engine", "hf", "--json")
    assert (gone.code, len(gone.json["findings_gone"])) == (1, 1)


def test_a_stack_that_fits_no_schedule_is_checked_by_its_answers(
    run: Run, answers: Answers, asked: Asked, save: Callable[[Fingerprint], str]
) -> None:
    before = answers.read(answers.unknown(0))
    file = save(before)
    asked.answer = answers.read(answers.unknown(0))
    assert run("check", file, "--engine", "hf").code == 0
    asked.answer = answers.read(answers.unknown(1))
    assert (asked.answer.fields, asked.answer.findings) == (before.fields, before.findings)
    done = run("check", file, "--engine", "hf", "--json")
    assert (done.code, done.json["changed"], done.json["answers_changed"]) == (1, [], ["swiglu (layer 0)"])
    assert "answered otherwise: swiglu (layer 0)" in run("check", file, "--engine", "hf").out


def test_a_field_that_cannot_be_determined_any_more_has_changed(
    run: Run, answers: Answers, asked: Asked, save: Callable[[Fingerprint], str]
) -> None:
    file = save(answers.read())
    asked.answer = answers.read(answers.unknown(0))
    done = run("check", file, "--engine", "hf", "--json")
    assert done.code == 1
    assert {"field": "swiglu.silu_round", "was": True, "now": None} in done.json["changed"]
    assert "not determined" in run("check", file, "--engine", "hf").out


def test_answers_to_other_questions_are_compared_only_where_all_is_settled(
    run: Run, answers: Answers, asked: Asked, save: Callable[[Fingerprint], str]
) -> None:
    """Such as those that another version of Tripoint asked."""
    whole, gap = answers.read(), answers.read(answers.unknown(0))
    asked.answer = whole
    assert run("check", save(replace(whole, questions="others", answers=())), "--engine", "hf").code == 0
    asked.answer = replace(whole, schedule=RoundingSchedule.parse("R1 S1 N2"))
    assert run("check", save(replace(whole, questions="others")), "--engine", "hf").code == 1
    for before, asked.answer in ((gap, gap), (whole, gap), (gap, whole), (whole, answers.read(decode=answers.swiglu()))):
        done = run("check", save(replace(before, questions="others")), "--engine", "hf")
        assert (done.code, done.out) == (3, "")
        assert "cannot be compared with a fingerprint that other questions gave" in done.err
        assert "swiglu" in done.err
        assert one_line(done.err)


def test_a_digest_tells_questions_apart(answers: Answers) -> None:
    shape = answers.canary.shape
    found = [read(canary, Observed([0] * len(canary.prompts))) for canary in (build(shape), build(shape, seed=1))]
    assert found[0].questions == answers.read().questions
    assert found[1].questions not in ("", found[0].questions)


# -- the shape in which it is asked -----------------------------------------------------------------------------------


def test_check_and_diff_ask_in_the_shape_of_the_file(
    run: Run, model: Path, answers: Answers, asked: Asked, save: Callable[[Fingerprint], str]
) -> None:
    shape = CanaryShape.like(model)
    assert shape != CanaryShape()
    asked.answer = answers.read()
    file = save(replace(asked.answer, shape=shape, seed=7))
    assert run("check", file, "--engine", "vllm").code == 0
    assert run("diff", "vllm", file).code == 0
    assert asked.calls == [("vllm", shape, 7, None), ("vllm", shape, 0, None)]


def test_in_place_asks_in_the_full_shape_of_the_model_and_of_no_other(
    run: Run, model: Path, answers: Answers, asked: Asked, save: Callable[[Fingerprint], str]
) -> None:
    full = CanaryShape.like(model, full=True)
    asked.answer = answers.read()
    assert run("fingerprint", "hf", "--like", str(model), "--in-place").code == 0
    assert run("check", save(replace(asked.answer, shape=full)), "--engine", "hf", "--in-place", str(model)).code == 0
    assert asked.calls == [("hf", full, 0, model)] * 2
    done = run("check", save(replace(asked.answer, shape=CanaryShape.like(model))), "--engine", "hf", "--in-place", str(model))
    assert (done.code, len(asked.calls)) == (2, 2)
    assert "was not measured in the full shape of" in done.err


def test_what_is_named_is_looked_up_before_anything_is_measured(run: Run, asked: Asked) -> None:
    done = run("diff", "hf", "gone.toml")
    assert (done.code, asked.calls) == (2, [])


def test_diff_says_what_disagreed_with_itself(run: Run, answers: Answers, asked: Asked) -> None:
    asked.answer = answers.read(decode=answers.swiglu())
    done = run("diff", "hf", "R1 S1 N1", "--json")
    assert done.code == 0
    assert "swiglu (layer 0): decode answers" in done.json["left"]["detail"]
    asked.answer = answers.read(answers.unknown(0))
    assert run("diff", "hf", "R1 S1 N1").code == 3


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"rope_parameters": YARN, "attention_bias": True, "eos_token_id": [7, 9]}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"rms_norm_eps": 1e-5}),
    ],
)
def test_a_shape_survives_json_and_toml(architecture: str, settings: dict[str, Any], full: bool) -> None:
    config = AutoConfig.for_model(architecture, **settings).to_dict()
    shape = CanaryShape.from_config(config, full)
    for text, back in ((json.dumps(shape.to_dict()), json.loads), (tomli_w.dumps(shape.to_dict()), tomllib.loads)):
        assert CanaryShape.from_dict(back(text)) == shape
    assert ("sliding_window" in shape.config) == ("sliding_window" in config)


def test_a_list_of_adds_survives_where_the_rest_is_not_settled(answers: Answers, tmp_path: Path) -> None:
    found = answers.read(answers.unknown(0))
    found = replace(found, fields=found.fields | {"carry": (1,)})
    (tmp_path / "f.toml").write_text(found.to_toml())
    back = Fingerprint.from_toml(tmp_path / "f.toml")
    assert (back.fields, back.schedule) == (found.fields, None)


# -- files that are none ----------------------------------------------------------------------------------------------


def damaged(found: Fingerprint, **entries: Any) -> str:
    """A saved fingerprint with other entries; None removes one."""
    data = tomllib.loads(found.to_toml()) | entries
    return tomli_w.dumps({key: value for key, value in data.items() if value is not None})


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"schedule": 3}, "missing or damaged: schedule"),
        ({"schedule": {"rope": 3}}, "schedule.rope: expected a table"),
        ({"undetermined": None, "answers": None}, "missing or damaged: undetermined, answers"),
        ({"findings": [3]}, "missing or damaged: findings"),
        ({"answers": [{"subject": "rope"}]}, "missing or damaged: answers"),
        ({"seconds": "fast"}, "missing or damaged: seconds"),
        ({"shape": None}, "missing or damaged: shape"),
        ({"shape": 3}, "shape: expected a table of sizes"),
        ({"shape": {"hidden": 256}}, "not as `tripoint fingerprint --save` writes it: act, architecture"),
        ({"shape": CanaryShape().to_dict() | {"layers": "six"}}, "writes it: layers"),
        ({"shape": CanaryShape().to_dict() | {"rope": {}}}, "writes it: rope"),
        ({"shape": CanaryShape().to_dict() | {"base": "{"}}, "base no JSON object"),
        ({"shape": CanaryShape().to_dict() | {"architecture": "lama"}}, "nearest: llama"),
    ],
)
def test_a_file_that_is_no_fingerprint_is_exit_code_2(
    run: Run, tmp_path: Path, answers: Answers, asked: Asked, entries: dict[str, Any], words: str
) -> None:
    file = tmp_path / "f.toml"
    file.write_text(damaged(answers.read(), **entries))
    done = run("check", str(file), "--engine", "hf")
    assert (done.code, done.out, asked.calls) == (2, "", [])
    assert words in done.err
    assert str(file) in done.err or "nearest" in words
    assert one_line(done.err)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object, found a list"),
        ('{"model_type": ["llama"]}', "no such layout"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "expected int, got str"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "its config is refused"),
    ],
)
def test_a_broken_config_is_refused_in_one_line(run: Run, tmp_path: Path, asked: Asked, config: str, words: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match=words) as caught:
        CanaryShape.like(tmp_path)
    assert "\n" not in str(caught.value)
    done = run("fingerprint", "hf", "--like", str(tmp_path))
    assert (done.code, asked.calls) == (2, [])
    assert one_line(done.err)


def test_a_rope_type_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="no RoPE type 'yrn'; nearest: yarn"):
        build(CanaryShape(rope={"rope_type": "yrn", "rope_theta": 1e4}))
