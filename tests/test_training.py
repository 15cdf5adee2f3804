"""Training for real: optimizer steps of aligned models, alone and in several processes.

Every call of an op, forward and backward, is compared in place with the reference: whatever wraps the model, each op's bits
stay.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import bits
from tiny import logits, same, tiny, tokens
from tripoint import align
from tripoint.ops import cpu, library, reference

pytestmark = pytest.mark.usefixtures("one_thread")

ENGINE = "R3 S3 N3 carry=layer qk=none"
BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 3


class Checked:
    """The fused kernels, every call of which has to give the reference's bits."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = getattr(cpu, name)(*args)
            assert bits.same(result, getattr(reference, name)(*args)), name
            self.calls[name] += 1
            return result

        return call


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Checked:
    backend = Checked()
    monkeypatch.setattr(library, "backend_for", lambda device: backend)
    return backend


def train(model: nn.Module, autocast: bool = False) -> Iterator[Tensor]:
    """The logits of every step on the same batch; the one after the last is of the trained model."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            out = model(input_ids=tokens(), labels=tokens(), use_cache=False)
        yield out.logits.detach()
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        yield logits(model, tokens(), use_cache=False)


# -- one process ------------------------------------------------------------------------------------------------------


def plain(model: Any) -> Any:
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model)


def compiled_by_block(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile()
    return model


def checkpointed(model: Any) -> Any:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def checkpointed_reentrant(model: Any) -> Any:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


def with_lora(model: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


WRAPPERS = (plain, checkpointed, checkpointed_reentrant, with_lora)
# Compiling takes a while: once each.
CASES = [*itertools.product(WRAPPERS, (BF16, FP32)), (compiled, BF16), (compiled_by_block, FP32)]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("wrap", "dtype"), CASES)
def test_no_bit_of_an_op_changes_in_training(checked: Checked, wrap: Callable[[Any], Any], dtype: torch.dtype) -> None:
    model = tiny("qwen3", dtype=dtype, num_hidden_layers=2)
    align(model, ENGINE)
    outputs = list(train(wrap(model), autocast=dtype == FP32))
    # A layer has two norms, one rotation with QK-norms, one activation; the final norm comes on top. With adapters nothing that
    # is trained comes before the first norm.
    norms = 4 if wrap is with_lora else 5
    backward = {"qk_norm_rope_backward": 2, "gated_act_backward": 2, "add_rms_norm_backward": norms}
    assert {name: checked.calls[name] for name in backward} == {name: STEPS * n for name, n in backward.items()}
    forwards = STEPS * (2 if "checkpointed" in wrap.__name__ else 1) + 1
    assert checked.calls["gated_act"] == 2 * forwards
    assert not any(same(one, other) for one, other in itertools.pairwise(outputs))


def test_a_wrong_bit_would_be_noticed(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3", num_hidden_layers=1)
    align(model, ENGINE)
    monkeypatch.setattr(
        cpu,
        "gated_act_backward",
        lambda *args: tuple(x.nextafter(torch.ones((), dtype=BF16)) for x in reference.gated_act_backward(*args)),
    )
    with pytest.raises(AssertionError, match="gated_act_backward"):
        list(train(model))


def test_two_runs_of_training_give_the_same_bits() -> None:
    """With two threads, however they share the work."""
    torch.set_num_threads(2)
    models = [tiny("qwen3"), tiny("qwen3")]
    for model in models:
        align(model, ENGINE)
        list(train(model))
    torch.set_num_threads(1)
    state, again = (model.state_dict() for model in models)
    assert all(same(state[name], again[name]) for name in state)


# -- several processes ------------------------------------------------------------------------------------------------


def sharded(model: Any, **policy: Any) -> Any:
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if policy:
        options["mp_policy"] = MixedPrecisionPolicy(**policy)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def check_same_batch_same_bits(wrap: Callable[[Any], Any]) -> None:
    """Both processes have the single process's batch: two equal gradients have that gradient for their mean, exactly."""
    single, several = tiny("qwen3"), tiny("qwen3")
    align(single, ENGINE)
    align(several, ENGINE)
    for alone, together in zip(train(single), train(wrap(several)), strict=True):
        assert same(together, alone)


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def check_mixed_precision() -> None:
    """FP32 weights, sharded and updated; the forward pass is a BF16 model's with these weights rounded."""
    model = tiny("qwen3", dtype=FP32)
    align(model, ENGINE)
    sharded(model, param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=False)
    single = tiny("qwen3")
    align(single, ENGINE)
    for together in train(model):
        with torch.no_grad():
            for mine, theirs in zip(single.parameters(), model.parameters(), strict=True):
                mine.copy_(whole(theirs))
        assert same(together, logits(single, tokens(), use_cache=False))


def _run(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    library.backend_for = lambda device: Checked()  # type: ignore[assignment, return-value]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    check_same_batch_same_bits(sharded)
    check_same_batch_same_bits(DistributedDataParallel)
    check_mixed_precision()
    dist.destroy_process_group()


def test_two_processes_train_as_one(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(_run, args=(2, str(tmp_path / "store")), nprocs=2)
