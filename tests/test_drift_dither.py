"""Dithers move embeddings by one ulp, permutations leave the function alone, and a stack has its weights back afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tiny import ARCHITECTURES, VOCABULARY, tiny, tokens
from tripoint.drift.dither import EMBEDDING, HEAD, Dithering, dithered, permutable, permuted, read_weights, seeds, untied
from tripoint.errors import UsageError
from tripoint.stacks import Rollout
from tripoint.stacks.hf import HFStack

ROLLOUTS = [Rollout((5,), tuple(range(6, 6 + n))) for n in (7, 9, 7)]


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    tiny("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def neighbours(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distance in BF16 numbers, for numbers of one sign."""
    return (x.view(torch.int16).int() - y.view(torch.int16).int()).abs()


def test_a_dither_moves_two_thirds_of_the_elements_by_one_ulp() -> None:
    matrix = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    moved = dithered(matrix, 1)
    apart = neighbours(matrix, moved)
    assert moved.dtype == torch.bfloat16
    assert set(apart.unique().tolist()) == {0, 1}
    assert apart.float().mean() == pytest.approx(2 / 3, abs=0.02)
    up = (moved.float().abs() > matrix.float().abs()).float().mean()
    assert up == pytest.approx(1 / 3, abs=0.02)


def test_a_dither_is_made_again_from_its_seed_and_no_other() -> None:
    matrix = torch.randn(20, 30).bfloat16()
    assert torch.equal(dithered(matrix, 7), dithered(matrix, 7))
    assert not torch.equal(dithered(matrix, 7), dithered(matrix, 8))
    assert torch.equal(dithered(matrix, 7, amplitude=0.0), matrix)


def test_seeds_of_stacks_and_runs_are_all_different() -> None:
    drawn = [seed for run in (0, 1) for stack in ("trainer", "engine") for seed in seeds(run, stack, 8)]
    assert len(set(drawn)) == 32
    assert seeds(0, "trainer", 4) == seeds(0, "trainer", 8)[:4]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_permuted_model_is_the_same_function(architecture: str) -> None:
    # In FP64, but transformers' norms go through FP32 all the same, whose roundings the order of a sum does move.
    model = tiny(architecture, dtype=torch.float64, tie_word_embeddings=False)
    ids = tokens()
    before = model(input_ids=ids).logits
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(permuted(weights, 3))
    moved = [name for name, weight in model.state_dict().items() if not torch.equal(weight, weights[name])]
    untouched = {
        name
        for name in weights
        if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias", "q_norm.weight", "k_norm.weight"))
    }
    assert set(moved) == set(weights) - untouched
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=3e-5)


def test_a_permutation_that_forgets_one_weight_is_another_function() -> None:
    model = tiny("llama", dtype=torch.float64, tie_word_embeddings=False)
    ids = tokens()
    before = model(input_ids=ids).logits
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"):
        model.load_state_dict(permuted(weights, 3) | {name: weights[name]})
        assert (model(input_ids=ids).logits - before).abs().max() > 1e-3


def test_a_weight_of_unknown_channels_is_refused_by_name() -> None:
    weights = {EMBEDDING: torch.zeros(3, 4), "model.layers.0.mlp.experts.weight": torch.zeros(4, 4)}
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp\.experts\.weight"):
        permuted(weights, 0)
    assert not permutable(weights)
    assert permutable({EMBEDDING: weights[EMBEDDING]})


def test_what_transformers_does_not_load_is_no_weight(tied: Path, tmp_path: Path) -> None:
    weights = read_weights(tied)
    for file in tied.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # as Llama 2's files hold it
    save_file(weights | table, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_file({"tok_embeddings.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors")  # as Mistral's do
    assert read_weights(tmp_path).keys() == weights.keys()
    with untied(tmp_path) as copied:
        assert read_weights(copied).keys() == {*weights, HEAD}
        assert HFStack(copied).score(ROLLOUTS) == HFStack(tied).score(ROLLOUTS)


def test_an_untied_copy_gives_the_tied_checkpoint_s_bits(tied: Path) -> None:
    with untied(tied) as copied:
        assert HEAD in read_weights(copied)
        assert HFStack(copied).score(ROLLOUTS) == HFStack(tied).score(ROLLOUTS)
        with untied(copied) as again:
            assert again == copied
    assert not copied.exists()
    assert HEAD not in read_weights(tied)


def test_a_tied_checkpoint_may_hold_its_head_all_the_same(tied: Path, tmp_path: Path) -> None:
    weights = read_weights(tied)
    for file in tied.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    save_file(weights | {HEAD: weights[EMBEDDING].clone()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with untied(tmp_path) as copied:
        assert copied != tmp_path  # whose head would follow a dithered embedding
        model = HFStack(copied).model
        assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
        assert HFStack(copied).score(ROLLOUTS) == HFStack(tied).score(ROLLOUTS)
    save_file(weights | {HEAD: weights[EMBEDDING] * 2}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="stored and differ"), untied(tmp_path):
        pass


def test_dithering_refuses_tied_weights(tied: Path) -> None:
    with pytest.raises(UsageError, match="untie"):
        Dithering(read_weights(tied), ROLLOUTS)


@pytest.mark.parametrize("how", ["dither", "permutation"])
def test_replicates_differ_and_the_stack_has_its_bits_back(tied: Path, how: str) -> None:
    # Many tokens: reordering the short sums of so small a model moves few of its log-probabilities.
    ids = np.random.default_rng(0).integers(3, VOCABULARY, size=(40, 21)).tolist()
    rollouts = [Rollout((row[0],), tuple(row[1:])) for row in ids]
    with untied(tied) as model:
        stack = HFStack(model)
        dithering = Dithering(read_weights(model), rollouts)
        before = stack.score(rollouts)
        replicates = dithering.score(stack, [1, 2, 1], how=how)  # type: ignore[arg-type]
        assert stack.score(rollouts) == before
    assert replicates.values.shape == (3, 800)
    assert replicates.lengths == (20,) * 40
    assert np.array_equal(replicates.values[0], replicates.values[2])
    assert not np.array_equal(replicates.values[0], replicates.values[1])
    assert not np.array_equal(replicates.values[0], np.concatenate(before))


def test_a_stack_that_loads_whole_checkpoints_is_dithered_alike(tied: Path) -> None:
    with untied(tied) as model:
        stack, weights = HFStack(model), read_weights(model)
        in_place = Dithering(weights, ROLLOUTS).score(stack, [5]).values[0]
        used = torch.tensor(sorted({token for r in ROLLOUTS for token in (*r.prompt_ids, *r.completion_ids)}))
        embedding = weights[EMBEDDING].clone()
        embedding[used] = dithered(weights[EMBEDDING][used], 5)
        stack.load_weights((weights | {EMBEDDING: embedding}).items())
        assert np.array_equal(in_place, np.concatenate(stack.score(ROLLOUTS)))
