"""A canary tells every rounding schedule, by greedy tokens alone, and says so when there is none to tell."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from covering import Row, pairwise
from tripoint.align import align
from tripoint.canary import (
    Canary,
    CanaryShape,
    Observed,
    asking,
    build,
    emulator,
    fingerprint,
    fingerprint_in_place,
    fingerprint_stack,
    read,
)
from tripoint.canary.questions import choose
from tripoint.canary.reading import Fingerprint, carry_of
from tripoint.errors import MeasurementError, UsageError
from tripoint.ops import backend, reference
from tripoint.schedule import RoundingSchedule, diff
from tripoint.stacks import open_stack
from tripoint.stacks.hf import HFStack

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
SMALL = {"hidden": 128, "layers": 2, "heads": 2, "intermediate": 64}


def load(directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def random_model(architecture: str, **settings: Any) -> Any:
    """A model as a user has one: small, random weights, tied embeddings."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 600}
    config = AutoConfig.for_model(architecture, **(sizes | settings), tie_word_embeddings=True, max_position_embeddings=300)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Held:
    """A canary in a live transformers model."""

    def __init__(self, shape: CanaryShape, directory: Path) -> None:
        self.canary = build(shape)
        self.canary.save(directory)
        self.model = load(directory)

    def ask(self) -> list[int]:
        return asking._greedy(self.model, [prompt.tokens for prompt in self.canary.prompts])

    def read(self) -> Fingerprint:
        return read(self.canary, Observed(self.ask()))

    def under(self, schedule: RoundingSchedule) -> Fingerprint:
        aligned = align(self.model, to=schedule)
        try:
            return self.read()
        finally:
            aligned.undo()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Held]:
    kept: dict[str, Held] = {}

    def hold(architecture: str, **sizes: Any) -> Held:
        key = str((architecture, sizes))
        if key not in kept:
            kept[key] = Held(CanaryShape(architecture=architecture, **sizes), tmp_path_factory.mktemp("canary"))
        return kept[key]

    return hold


def assert_reads(found: Fingerprint, expected: str) -> None:
    assert (found.code, found.problem, found.undetermined, found.findings) == (expected, None, (), ())


# -- modules we did not write -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_rounds_as_documented(architecture: str) -> None:
    qk = " qk=both" if architecture == "qwen3" else ""
    assert_reads(fingerprint(load, CanaryShape(architecture=architecture)), f"R1 S1 N1{qk}")


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_transformers_under_autocast_rounds_only_what_goes_into_a_gemm(architecture: str) -> None:
    class UnderAutocast(nn.Module):
        def __init__(self, directory: str) -> None:
            super().__init__()
            self.model = load(directory, torch.float32)

        def forward(self, ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                logits: Tensor = self.model(ids).logits
                return logits

    qk = " qk=norm" if architecture == "qwen3" else ""
    assert_reads(fingerprint(UnderAutocast, CanaryShape(architecture=architecture)), f"R4 S1 N3 carry=fp32{qk}")


def test_compiled_gated_mlps_round_once() -> None:
    def with_compiled_mlps(directory: str) -> Any:
        model = load(directory)
        for layer in model.model.layers:
            layer.mlp.forward = torch.compile(layer.mlp.forward, dynamic=True)
        return model

    assert_reads(fingerprint(with_compiled_mlps, CanaryShape(**SMALL)), "R1 S3 N1")


def test_a_stack_is_asked_while_it_decodes_and_alone_too(held: Callable[..., Held], tmp_path: Path) -> None:
    canary = held("llama").canary
    canary.save(tmp_path)
    with open_stack("hf", tmp_path, device="cpu") as stack:
        found = asking.ask(stack, canary)
    assert_reads(found, "R1 S1 N1")
    assert found.conditions["layers"] == 6
    assert found.versions["transformers"]


# -- every schedule ---------------------------------------------------------------------------------------------------


def schedule_of(row: Row) -> RoundingSchedule:
    casts = ",".join(f"{place}:{row[place]}" for place in row if place in CAST_PLACES) or "rne"
    words = [row["R"], row["S"], "N3", *(f"N.{site}={row[f'N.{site}']}" for site in SITES)]
    words += [f"carry={row['carry']}", f"angle={row['angle']}", f"cast={casts}"]
    return RoundingSchedule.parse(" ".join(words + ([f"qk={row['qk']}"] if "qk" in row else [])))


SITES = ("input", "post_attention", "final")
CAST_PLACES = ("rope", "swiglu", *(f"norm.{site}" for site in (*SITES, "qk")))
FACTORS: dict[str, Sequence[Any]] = {
    "R": ["R1", "R2", "R3", "R4"],
    "S": ["S1", "S3", "S5"],
    **{f"N.{site}": ["N1", "N2", "N3", "N4", "N5"] for site in SITES},
    "carry": ["bf16", "layer", "fp32", "3", "[2,7]"],
    "angle": ["pos*inv", "pos/timescale", "exp2", "powscale"],
    **{place: ["rne", "rtz"] for place in CAST_PLACES[:-1]},
}
QK_FACTORS: dict[str, Sequence[Any]] = {"qk": ["both", "out", "none", "norm"], "norm.qk": ["rne", "rtz"]}


def can_be_told(row: Row) -> bool:
    try:
        schedule_of(row)
    except UsageError:
        return False
    return row["R"] == "R4" or row["angle"] == "pos*inv"  # a rounded table hides most of the angle


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_every_schedule_is_read_as_itself(architecture: str, held: Callable[..., Held]) -> None:
    stack = held(architecture)
    factors = {**FACTORS, **(QK_FACTORS if architecture == "qwen3" else {})}
    rows = pairwise(factors, can_be_told)
    assert all({row[name] for row in rows} == set(values) for name, values in factors.items())
    for row in rows:
        assert_reads(stack.under(schedule_of(row)), str(schedule_of(row)))


def test_one_rounding_moved_moves_one_field(held: Callable[..., Held]) -> None:
    stack = held("qwen3")
    base = RoundingSchedule.parse("R4 S1 N3 carry=fp32 qk=both")
    before = stack.under(base).schedule
    assert before is not None
    for changed in (
        "R4 S3 N3 carry=fp32 qk=both",
        "R4 S1 N3 carry=layer qk=both",
        "R4 S1 N3 N.input=N4 carry=fp32 qk=both",
        "R4 S1 N3 N.post_attention=N5 carry=fp32 qk=both",
        "R4 S1 N3 N.final=N2 carry=fp32 qk=both",
        "R4 S1 N3 carry=fp32 qk=out",
        "R4 S1 N3 carry=fp32 qk=norm",
        "R4 S1 N3 carry=fp32 qk=both angle=exp2",
        "R3 S1 N3 carry=fp32 qk=both",
        *(f"R4 S1 N3 carry=fp32 qk=both cast={place}:rtz" for place in CAST_PLACES),
    ):
        wanted = RoundingSchedule.parse(changed)
        after = stack.under(wanted).schedule
        assert after is not None
        assert diff(before, after) == diff(base, wanted), changed
        assert len(diff(before, after)) == 1, changed


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("code", ["S1", "S3"])
def test_gelu_gates_are_read_too(act: str, code: str, held: Callable[..., Held]) -> None:
    assert_reads(held("mistral", act=act, **SMALL).under(RoundingSchedule.parse(f"R1 {code} N1")), f"R1 {code} N1")


@pytest.mark.parametrize(
    ("rounding", "carry"),
    [(range(11), "bf16"), ([1, 3, 5, 7, 9], "layer"), ([], "fp32"), ([2, 5, 8], 3), ([2, 6, 10], (2, 6, 10)), ([7], (7,))],
)
def test_carry_is_the_shortest_description_of_the_adds_that_round(rounding: Sequence[int], carry: object) -> None:
    assert carry_of(list(rounding), 11) == carry


# -- shapes -----------------------------------------------------------------------------------------------------------

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "max_window_layers": 21,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_ROPE,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Mistral-7B": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "smallest": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "yarn": {
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "rope_scaling": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
        "max_position_embeddings": 131072,
    },
    "longrope": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 96,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "short_factor": [1.0 + 0.01 * pair for pair in range(48)],
            "long_factor": [1.0 + pair for pair in range(48)],
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_of_known_models(name: str, tmp_path: Path) -> None:
    shape = CanaryShape.from_config({"hidden_act": "silu", "num_hidden_layers": 32, "vocab_size": 128000, **CONFIGS[name]})
    assert shape.layers == 6
    stack = Held(replace(shape, layers=3, intermediate=64), tmp_path)  # memory
    qk = " qk=both" if shape.qk_norm else ""
    assert_reads(stack.read(), f"R1 S1 N1{qk}")
    assert_reads(stack.under(RoundingSchedule.parse(f"R3 S3 N3 carry=layer{qk}")), f"R3 S3 N3 carry=layer{qk}")


def test_the_default_checkpoint_is_small_and_a_large_one_bearable() -> None:
    assert CanaryShape().size < 10e6
    mistral = CanaryShape.from_config({"hidden_act": "silu", "num_hidden_layers": 32, **CONFIGS["Mistral-7B"]})
    assert mistral.size < 1.5e9


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_fingerprint_takes_at_most_256_prompts(architecture: str) -> None:
    for layers in (1, 6, 32, 126):
        assert 64 < len(build(CanaryShape(architecture=architecture, hidden=1024, layers=layers)).prompts) <= 256


def test_full_shape_is_the_models_own() -> None:
    model = random_model("qwen2", num_hidden_layers=3, bos_token_id=0, eos_token_id=2, pad_token_id=2)
    shape = CanaryShape.from_config(model.config.to_dict(), full=True)
    ours = {name: tuple(tensor.shape) for name, tensor in build(shape).tensors()}
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert ours == theirs
    assert not {0, 2} & set(build(shape).circuit.words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma"}, "no such layout"),
        ({"act": "relu"}, "hidden_act=relu is not a gate"),
        ({"hidden": 32}, "hidden_size is 32; a canary needs 64 or more"),
        ({"vocab": 100}, "vocabulary 100: too small"),
        ({"hidden": 64, "layers": 24}, "hidden size 64: too small for 24 layers"),
    ],
)
def test_shapes_without_room_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(CanaryShape(**change))


# -- the checkpoint ---------------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_checkpoint(tmp_path: Path) -> None:
    canary = build(CanaryShape(**SMALL), seed=3)
    canary.save(tmp_path)
    again = dict(build(CanaryShape(**SMALL), seed=3).tensors())
    assert again.keys() == load_file(tmp_path / "model.safetensors").keys()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor, again[name])
    other = dict(build(CanaryShape(**SMALL), seed=4).tensors())
    assert any(not torch.equal(other[name], tensor) for name, tensor in again.items())


def test_prompts_and_answers_are_words(held: Callable[..., Held], tmp_path: Path) -> None:
    canary = held("llama").canary
    canary.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for prompt in canary.prompts:
        assert tokenizer(canary.words(prompt.tokens)).input_ids == list(prompt.tokens)
    assert [tokenizer.decode([token]) for token in canary.answers] == ["less", "equal", "greater"]


def test_a_projection_adds_up_at_most_one_product(held: Callable[..., Held]) -> None:
    """So that every GEMM is exact, whatever its kernel: for the coordinates that a prompt's last token sets."""
    stack = held("qwen3")
    weights = {name: tensor for name, tensor in stack.canary.tensors() if name.endswith("proj.weight")}
    embedding = dict(stack.canary.tensors())["model.embed_tokens.weight"]
    questions = torch.tensor(sorted({token for prompt in stack.canary.prompts for token in prompt.tokens}))
    used = (embedding[questions] != 0).float()
    for name, weight in weights.items():
        if "o_proj" not in name and "down_proj" not in name:
            assert (used @ (weight != 0).float().T).max() <= 1, name
        powers = weight[weight != 0].float().abs().log2()
        assert torch.equal(powers, powers.round()), name


def test_bf16_is_torchs_bf16() -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=100000) * np.exp2(np.arange(100000) % 40 - 20)).float()
    assert torch.equal(torch.from_numpy(emulator.bf16(x.numpy())), x.bfloat16().double())
    truncated = (x.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(torch.from_numpy(emulator.bf16(x.numpy(), "rtz")), truncated.double())


def test_a_margin_is_the_distance_from_a_boundary() -> None:
    x = np.array([1.0, 1 + 1 / 256, 1 + 1 / 512, 1 + 3 / 512])
    for cast, expected in (("rne", [0.5, 0.0, 0.25, 0.25]), ("rtz", [np.inf, 0.5, 0.25, 0.25])):
        rounded = emulator.Rounding(cast, 4)
        rounded(x)
        assert rounded.margin.tolist() == expected


def test_choosing_tells_all_apart_as_often_as_asked() -> None:
    expected = np.random.default_rng(0).integers(-1, 2, (200, 12)).astype(np.int8)
    for times in (1, 3):
        picked = expected[choose(expected, times)]
        for i in range(12):
            for j in range(i):
                assert (picked[:, i] != picked[:, j]).sum() >= times
    assert len(choose(expected, 1)) < len(choose(expected, 3)) < 20


# -- robustness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_no_seed_matters(seed: int) -> None:
    found = fingerprint(load, CanaryShape(architecture="qwen3" if seed % 4 == 0 else "llama", **SMALL), seed)
    assert_reads(found, "R1 S1 N1 qk=both" if seed % 4 == 0 else "R1 S1 N1")


@pytest.mark.parametrize("batch", [1, 7, 256])
@pytest.mark.parametrize("threads", [1, 2])
def test_neither_batch_nor_threads_matter(batch: int, threads: int, held: Callable[..., Held]) -> None:
    stack = held("llama", **SMALL)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        prompts = [prompt.tokens for prompt in stack.canary.prompts]
        tokens = [t for i in range(0, len(prompts), batch) for t in asking._greedy(stack.model, prompts[i : i + batch])]
    finally:
        torch.set_num_threads(before)
    assert_reads(read(stack.canary, Observed(tokens)), "R1 S1 N1")


@pytest.mark.parametrize(
    "code",
    [
        "R1 S1 N1 qk=both",
        "R2 S5 N5 carry=layer qk=norm",
        "R3 S3 N3 carry=fp32 qk=none",
        "R4 S3 N4 qk=out",
        "R4 S1 N3 carry=fp32 qk=norm cast=rtz",
    ],
)
def test_noise_in_front_of_every_rounding_does_not_matter(
    code: str, held: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(x: Tensor) -> Tensor:
        """Up to 2e-6 of what has to be rounded: reduction order, FMA, fast math. What is exact stays so."""
        noise = torch.rand(x.shape, generator=generator) * 4e-6 - 2e-6
        return torch.where(x == x.bfloat16().to(x.dtype), x, x * (1 + noise))

    exact_cast, exact_round = reference.cast_to, reference.round_to
    monkeypatch.setenv("TRIPOINT_BACKEND", "reference")
    monkeypatch.setattr(reference, "cast_to", lambda x, dtype, cast: exact_cast(noisy(x), dtype, cast))
    monkeypatch.setattr(reference, "round_to", lambda x, dtype, cast: exact_round(noisy(x), dtype, cast))
    backend._load.cache_clear()
    for _ in range(3):
        assert_reads(held("qwen3").under(RoundingSchedule.parse(code)), str(RoundingSchedule.parse(code)))


# -- what is no schedule ----------------------------------------------------------------------------------------------


def test_a_rounding_outside_the_vocabulary_is_unknown(held: Callable[..., Held], monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated MLP that rounds up, in a stack that is otherwise known."""

    def rounds_up(gate: Tensor, up: Tensor, *_: Any) -> Tensor:
        exact = torch.nn.functional.silu(gate.float()) * up.float()
        return torch.where(exact == exact.bfloat16(), exact, exact * (1 + 2**-8)).bfloat16()

    monkeypatch.setenv("TRIPOINT_BACKEND", "reference")
    monkeypatch.setattr(reference, "gated_act", rounds_up)
    backend._load.cache_clear()
    found = held("llama").under(RoundingSchedule.parse("R3 S3 N3"))
    assert (found.code, found.schedule) == (None, None)
    assert found.undetermined == ("swiglu.silu_round", "swiglu.sig", "swiglu.cast")
    assert len(found.findings) == 3
    assert all(f.startswith("swiglu (layer") and "answers fit no known rounding" in f for f in found.findings)
    assert found.fields["rope.compute"] == "fp32"
    assert found.fields["carry"] == "bf16"


def test_layers_that_disagree_are_reported(held: Callable[..., Held], monkeypatch: pytest.MonkeyPatch) -> None:
    stack = held("llama")
    mlp: Any = stack.model.model.layers[-1].mlp

    def rounds_once(x: Tensor) -> Tensor:
        gated = torch.nn.functional.silu(mlp.gate_proj(x).float()) * mlp.up_proj(x).float()
        projected: Tensor = mlp.down_proj(gated.bfloat16())
        return projected

    monkeypatch.setattr(mlp, "forward", rounds_once)
    found = stack.read()
    assert found.schedule is None
    assert found.findings == ("swiglu is not the same everywhere: layer 0: S1; layer 2: S1; layer 5: S3",)


def test_decoding_and_batches_of_one_that_round_otherwise_are_reported(held: Callable[..., Held]) -> None:
    stack = held("llama")
    canary = stack.canary
    prefill = stack.ask()
    by_tokens = {prompt.tokens: token for prompt, token in zip(canary.prompts, prefill, strict=True)}
    alone = [by_tokens[prompt.tokens] for prompt in canary.decode_prompts]
    aligned = align(stack.model, to="R1 S3 N1")
    decoded = [
        (prompt.tokens[-1], token)
        for prompt, token in zip(
            canary.decode_prompts, asking._greedy(stack.model, [p.tokens for p in canary.decode_prompts]), strict=True
        )
    ]
    aligned.undo()
    found = read(canary, Observed(prefill, decoded, alone))
    assert found.code == "R1 S1 N1"
    assert [finding.split(" answers")[0] for finding in found.findings] == [
        f"swiglu (layer {layer}): decode" for layer in (0, 2, 5)
    ]
    assert all(finding.endswith("as S3; the batch S1") for finding in found.findings)


# -- stacks that cannot be asked --------------------------------------------------------------------------------------


class Spoiled(nn.Module):
    """A model whose input ids are changed on the way in."""

    def __init__(self, directory: str, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = load(directory)
        self.change = change

    def forward(self, ids: Tensor) -> Any:
        return self.model(self.change(ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: torch.nn.functional.pad(ids, (1, 0), value=0), "more tokens than it was sent"),
        (lambda ids: torch.nn.functional.pad(ids, (1, 0), value=77), "more tokens than it was sent"),
        (lambda ids: ids[:, 1:] if ids.shape[1] > 1 else ids, "does not see all the tokens"),
        (lambda ids: ids[:, :-1] if ids.shape[1] > 1 else ids, "does not see all the tokens"),
    ],
    ids=["adds padding", "adds a token", "drops the first", "drops the last"],
)
def test_a_stack_that_rewrites_its_input(change: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(MeasurementError, match=message):
        fingerprint(lambda directory: Spoiled(directory, change), CanaryShape(**SMALL))


def test_a_stack_that_ties_the_embeddings() -> None:
    def tied(directory: str) -> Any:
        model = load(directory)
        model.lm_head.weight = model.model.embed_tokens.weight
        return model

    with pytest.raises(MeasurementError, match="uses the embedding as output head"):
        fingerprint(tied, CanaryShape(**SMALL))


def test_a_stack_that_quantises_the_weights() -> None:
    def noisy(directory: str) -> Any:
        model = load(directory)
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.copy_(parameter.float() * (1 + noise))
        return model

    with pytest.raises(MeasurementError, match="does not hold the canary's weights exactly"):
        fingerprint(noisy, CanaryShape(**SMALL))


def test_a_stack_that_refuses_the_checkpoint() -> None:
    def without_this_layout(directory: Path) -> HFStack:
        config = directory / "config.json"
        config.write_text(config.read_text().replace('"llama"', '"lama"'))
        return HFStack(directory, device="cpu")

    with pytest.raises(UsageError, match="cannot load the checkpoint"):
        fingerprint_stack(without_this_layout, CanaryShape(**SMALL))


# -- in place ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path: Path) -> HFStack:
    random_model("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    return HFStack(tmp_path, device="cpu")


def test_a_running_stack_is_asked_and_left_as_it_was(running: HFStack, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in running.weights()}
    found = fingerprint_in_place(running, tmp_path)
    assert_reads(found, "R1 S1 N1")
    assert (found.conditions["in place"], found.conditions["full shape"], found.conditions["layers"]) == (True, True, 4)
    for name, tensor in running.weights():
        assert torch.equal(tensor, before[name])


def test_a_stack_left_with_canary_weights_says_so(running: HFStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    sync = running.load_weights

    def fails_the_second_time(weights: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MeasurementError("the connection broke")
        sync(weights)

    monkeypatch.setattr(running, "load_weights", fails_the_second_time)
    with pytest.raises(MeasurementError, match=r"does not hold its model's weights any more: restart it.*the connection broke"):
        fingerprint_in_place(running, tmp_path)


def test_why_the_asking_ended_is_what_is_raised(running: HFStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a note if the weights are not back, too."""
    before = {name: tensor.clone() for name, tensor in running.weights()}

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(asking, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        fingerprint_in_place(running, tmp_path)
    assert not hasattr(caught.value, "__notes__")
    assert all(torch.equal(tensor, before[name]) for name, tensor in running.weights())

    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(KeyboardInterrupt) as caught:
        fingerprint_in_place(running, tmp_path)
    (note,) = caught.value.__notes__
    assert "does not hold its model's weights any more" in note
    assert "has no *.safetensors" in note


def test_a_stack_that_died_gets_no_weights_back(running: HFStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []

    def dies(*args: Any) -> None:
        running.closed = True
        raise MeasurementError("the engine died")

    monkeypatch.setattr(asking, "ask", dies)
    monkeypatch.setattr(running, "load_weights", lambda weights: loaded.append(1))
    with pytest.raises(MeasurementError, match="the engine died"):
        fingerprint_in_place(running, tmp_path)
    assert len(loaded) == 1


def test_files_that_transformers_does_not_load_do_not_go_back(running: HFStack, tmp_path: Path) -> None:
    weights = load_file(tmp_path / "model.safetensors")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # as Llama 2's files hold it
    save_file(weights | table, tmp_path / "model.safetensors", {"format": "pt"})
    save_file({"tok_embeddings.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors")  # as Mistral's do
    assert_reads(fingerprint_in_place(running, tmp_path), "R1 S1 N1")


def test_weights_that_come_back_changed_are_noticed(running: HFStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = asking.checkpoint_weights
    monkeypatch.setattr(asking, "checkpoint_weights", lambda model: ((n, t * 1.01) for n, t in checkpoint(model)))
    with pytest.raises(MeasurementError, match="log-probabilities are not what they were"):
        fingerprint_in_place(running, tmp_path)


def test_a_stack_whose_answers_are_none_gets_its_weights_back(
    running: HFStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: tensor.clone() for name, tensor in running.weights()}
    canary = Canary.tensors
    monkeypatch.setattr(Canary, "tensors", lambda self: ((n, t * 1.01) for n, t in canary(self)))
    with pytest.raises(MeasurementError, match="does not hold the canary's weights exactly"):
        fingerprint_in_place(running, tmp_path)
    for name, tensor in running.weights():
        assert torch.equal(tensor, before[name])


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["R4 S1 N3 carry=[2,7]", "R3 S3 N3 N.final=N4 carry=layer"])
def test_a_saved_fingerprint_is_a_target(code: str, held: Callable[..., Held], tmp_path: Path) -> None:
    stack = held("llama")
    found = stack.under(RoundingSchedule.parse(code))
    file = tmp_path / "f.toml"
    file.write_text(found.to_toml())
    assert replace(Fingerprint.from_toml(file), fields={}, evidence=()) == replace(found, fields={}, evidence=())
    assert str(align(stack.model, to=file).schedule) == code
    aligned = stack.read()
    align(stack.model, to=code).undo()
    assert aligned.code == code


def test_the_json_of_a_fingerprint(held: Callable[..., Held]) -> None:
    stack = held("llama")
    found = stack.read().to_dict()
    assert found["code"] == "R1 S1 N1"
    assert found["schedule"] == RoundingSchedule.parse("R1 S1 N1").to_dict()
    assert len(found["evidence"]) == len(stack.canary.prompts)
    assert found["evidence"][0].keys() == {"field", "place", "prompt_ids", "token", "answer"}
    assert {entry["answer"] for entry in found["evidence"]} == {"less", "equal", "greater"}


def test_what_is_not_settled_is_null_in_json_and_no_target(held: Callable[..., Held], tmp_path: Path) -> None:
    stack = held("llama")
    swiglu = {prompt.tokens for q in stack.canary.questions if q.subject == "swiglu" for prompt in q.prompts}
    tokens = [
        stack.canary.circuit.pad if p.tokens in swiglu else token
        for p, token in zip(stack.canary.prompts, stack.ask(), strict=True)
    ]
    found = read(stack.canary, Observed(tokens))
    assert found.to_dict()["schedule"]["swiglu"] == {"silu_round": None, "sig": None, "cast": None}
    assert "code" not in tomllib.loads(found.to_toml())
    file = tmp_path / "f.toml"
    file.write_text(found.to_toml())
    assert Fingerprint.from_toml(file).undetermined == found.undetermined
    with pytest.raises(UsageError):
        align(stack.model, to=file)
