"""Stack `mlx` computes in BF16, whatever the checkpoint's file and the weights given to it are held in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny import tiny
from tripoint.stacks import Rollout
from tripoint.stacks.mlx import MlxStack

ROLLOUTS = [Rollout((5, 9), (40, 2, 8)), Rollout((6,), (7,))]


def stack(directory: Path, dtype: torch.dtype) -> MlxStack:
    model = tiny(dtype=torch.float32, tie_word_embeddings=False)
    # The tests' models hold FP32 values that BF16 does not.
    assert not torch.equal(model.lm_head.weight, model.lm_head.weight.bfloat16().float())
    model.to(dtype).save_pretrained(directory)
    return MlxStack(directory)


def held(mlx_stack: MlxStack) -> set[str]:
    from mlx.utils import tree_flatten

    return {str(array.dtype) for _, array in tree_flatten(mlx_stack.model.parameters())}


@pytest.mark.usefixtures("one_thread")
def test_an_fp32_checkpoint_is_run_in_bf16_and_stays_so(tmp_path: Path) -> None:
    fp32, bf16 = stack(tmp_path / "fp32", torch.float32), stack(tmp_path / "bf16", torch.bfloat16)
    assert held(fp32) == held(bf16) == {"mlx.core.bfloat16"}
    assert fp32.conditions()["dtype"] == "bfloat16"
    before = fp32.score(ROLLOUTS)
    assert before == bf16.score(ROLLOUTS)
    fp32.load_weights(tiny(dtype=torch.float32, tie_word_embeddings=False).named_parameters())
    assert held(fp32) == {"mlx.core.bfloat16"}
    assert fp32.score(ROLLOUTS) == before
