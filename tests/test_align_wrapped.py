"""Alignment under, over and between what others do to a model: torch.compile, accelerate, FSDP, DDP, kernel libraries."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from tiny import Step, differing, logits, same, step, tiny, tokens
from tripoint import align
from tripoint.align.forwards import aligned
from tripoint.align.model import Alignment
from tripoint.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

ENGINE = "R3 S3 N3 carry=layer qk=none"
FP32_TABLE = "R4 S3 N2"
BF16 = torch.bfloat16


@functools.cache
def expected(target: str | None) -> Step:
    """What a plain tiny qwen3 gives under `target`, unaligned if that is None."""
    model = tiny("qwen3")
    if target is not None:
        align(model, target)
    return step(model, tokens(), use_cache=False)


def gives(model: nn.Module, target: str | None) -> bool:
    return same(logits(model, tokens(), use_cache=False), expected(target).logits)


# -- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole(model: Any, **options: Any) -> Any:
    return torch.compile(model, **options)


def in_place(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return model


def layer_by_layer(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(**options)
    return model


def layers_wrapped(model: Any, **options: Any) -> Any:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, **options)
    return model


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [whole, in_place, layer_by_layer, layers_wrapped])
def test_no_graph_outlives_an_alignment(compiled: Callable[..., Any]) -> None:
    """Aligned underneath; each move, also one of a single field, is compiled anew, and so is what undo brings back."""
    backend = CompileCounterWithBackend("eager")
    plain, model, ids = tiny("qwen3", num_hidden_layers=1), tiny("qwen3", num_hidden_layers=1), tokens()
    outer = compiled(model, backend=backend)
    before = logits(plain, ids, use_cache=False)
    assert same(logits(outer, ids, use_cache=False), before)
    for target in ("R1 S1 N1 cast=rope:rtz", "R1 S1 N1", "R1 S1 N2 qk=none", ENGINE):
        graphs = backend.frame_count
        align(plain, target)
        alignment = align(model if target == ENGINE else outer, target)
        # What a compiler made of the model before is not known; of the aligned ops it can make nothing.
        assert any("was compiled" in note for note in alignment.notes) == (target == "R1 S1 N1 cast=rope:rtz")
        assert same(logits(outer, ids, use_cache=False), logits(plain, ids, use_cache=False))
        assert backend.frame_count > graphs
    alignment.undo()
    assert same(logits(outer, ids, use_cache=False), before)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("target", "graphs"), [(None, 1), ("R1 S1 N1", 1), (ENGINE, 2), ("R3 S3 N4 carry=fp32 N.final=N1", 3)])
def test_layers_share_a_compiled_graph(target: str | None, graphs: int) -> None:
    """Only the first layer, which gets the embedding, and one before another norm are different."""
    model = tiny("llama", num_hidden_layers=12)
    if target is not None:
        align(model, target)
    backend = CompileCounterWithBackend("eager")
    layer_by_layer(model, backend=backend)
    step(model, tokens(), use_cache=False)
    assert backend.frame_count == graphs


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "autocast"])
def test_a_compiled_aligned_model_trains_as_the_eager_one(dtype: torch.dtype) -> None:
    """In one graph, forward and backward. (sdpa's own backward is another one in a graph, also in the unaligned model.)"""
    model, ids = tiny("qwen3", dtype=dtype, attention="eager", num_hidden_layers=2), tokens()
    align(model, ENGINE)
    with torch.autocast("cpu", dtype=BF16, enabled=dtype == torch.float32):
        eager = step(model, ids)
        model.compile(backend="aot_eager", fullgraph=True)
        assert differing(step(model, ids), eager) == []


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_moves_no_rounding_of_an_aligned_model() -> None:
    """It does in the unaligned one, which is the control."""
    model, ids = tiny("llama", num_hidden_layers=1), tokens()
    eager = logits(model, ids, use_cache=False)
    outer = torch.compile(model, fullgraph=True)
    assert not same(logits(outer, ids, use_cache=False), eager)
    align(outer, ENGINE)
    compiled = logits(outer, ids, use_cache=False)
    assert same(compiled, logits(model, ids, use_cache=False))
    assert not same(compiled, eager)


# -- accelerate -------------------------------------------------------------------------------------------------------


def hooked(model: PreTrainedModel, folder: Path) -> None:
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))


def dispatched(model: PreTrainedModel, folder: Path) -> None:
    dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def offloaded(model: PreTrainedModel, folder: Path) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)


def offloaded_to_disk(model: PreTrainedModel, folder: Path) -> None:
    placed = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    dispatch_model(model, placed | {"model.layers": "disk"}, main_device="cpu", offload_dir=folder)


PLACEMENTS = (hooked, dispatched, offloaded, offloaded_to_disk)


def clean(model: nn.Module) -> bool:
    """Whether every module runs what its class says."""
    forwards = [(module, vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]
    return all(getattr(forward, "__func__", None) is type(module).forward for module, forward in forwards)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_alignment_after_hooks(place: Callable[..., None], tmp_path: Path) -> None:
    model = tiny("qwen3")
    place(model, tmp_path)
    assert gives(model, None)
    for target in (ENGINE, FP32_TABLE):
        alignment = align(model, target)
        assert gives(model, target)
    alignment.undo()
    assert gives(model, None)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_alignment_before_hooks(place: Callable[..., None], tmp_path: Path) -> None:
    model = tiny("qwen3")
    align(model, FP32_TABLE)
    place(model, tmp_path)
    assert gives(model, FP32_TABLE)
    alignment = align(model, ENGINE)
    assert gives(model, ENGINE)
    alignment.undo()
    assert gives(model, None)


@pytest.mark.parametrize("align_first", [True, False])
@pytest.mark.parametrize("undo_first", [True, False])
def test_hooks_and_alignment_come_off_in_every_order(align_first: bool, undo_first: bool, tmp_path: Path) -> None:
    model = tiny("qwen3")
    if not align_first:
        hooked(model, tmp_path)
    alignment = align(model, ENGINE)
    if align_first:
        hooked(model, tmp_path)
    assert differing(step(model, tokens(), use_cache=False), expected(ENGINE)) == []
    if undo_first:
        alignment.undo()
        assert gives(model, None)
        remove_hook_from_module(model, recurse=True)
    else:
        remove_hook_from_module(model, recurse=True)
        assert gives(model, ENGINE)
        alignment.undo()
    assert gives(model, None)
    assert clean(model)


def test_offloaded_fp32_weights_under_autocast(tmp_path: Path) -> None:
    model = tiny("qwen3", dtype=torch.float32)
    offloaded(model, tmp_path)
    align(model, ENGINE)
    with torch.autocast("cpu", dtype=BF16):
        assert gives(model, ENGINE)


# -- several processes ------------------------------------------------------------------------------------------------


def sharded(model: PreTrainedModel, **policy: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh}
    if policy:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=BF16, **policy)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()}


def trains_as(model: nn.Module, target: str | None) -> bool:
    """Logits and all gradients; every process has the same batch, and two halves of one gradient add up to it exactly."""
    out = model(input_ids=tokens(), labels=tokens(), use_cache=False)
    out.loss.backward()
    grads = {name.removeprefix("module."): grad for name, grad in full_gradients(model).items()}
    return differing(Step(out.logits.detach(), out.loss.detach(), grads), expected(target)) == []


def both_orders(wrap: Callable[[Any], Any], target: str, dtype: torch.dtype = BF16) -> Iterator[tuple[Any, Alignment]]:
    for align_first in (True, False):
        model = tiny("qwen3", dtype=dtype)
        if align_first:
            alignment = align(model, target)
            yield wrap(model) or model, alignment
        else:
            outer = wrap(model) or model
            yield outer, align(outer, target)


def check_fsdp2() -> None:
    for model, alignment in both_orders(sharded, ENGINE):
        assert trains_as(model, ENGINE)
        align(model, FP32_TABLE)
        assert gives(model, FP32_TABLE)
        alignment.undo()
        assert gives(model, None)


def check_fsdp2_checkpointing() -> None:
    for model, _ in both_orders(sharded, ENGINE):
        model.train()
        model.gradient_checkpointing_enable()
        assert trains_as(model, ENGINE)


def check_fsdp2_mixed_precision() -> None:
    """FP32 residuals and tables must arrive as they are; where the schedule has none, casting inputs does no harm."""
    for target, why in ((ENGINE, "the residual sum"), (FP32_TABLE, "the RoPE table"), ("R3 S1 N2", None), ("R1 S1 N1", None)):
        for casts in (True, False):
            for model, _ in both_orders(lambda m, c=casts: sharded(m, cast_forward_inputs=c), target, torch.float32):
                if why is not None and casts:
                    with pytest.raises(RuntimeError, match=rf"{why} arrived in torch.bfloat16.*cast_forward_inputs=False"):
                        gives(model, target)
                else:
                    assert gives(model, target)
    model = tiny("qwen3", dtype=torch.float32)
    align(model, "R3 S3 N3 carry=layer N.input=N2")
    sharded(model, cast_forward_inputs=False, output_dtype=BF16)
    with pytest.raises(RuntimeError, match=r"model\.norm: the residual sum arrived in torch.bfloat16"):
        logits(model, tokens(), use_cache=False)


def check_fsdp1() -> None:
    def wrapped(model: PreTrainedModel, use_orig_params: bool, mixed: bool) -> Any:
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
            mixed_precision=MixedPrecision(param_dtype=BF16) if mixed else None,
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen3DecoderLayer}),
        )

    for original in (True, False):
        for mixed in (True, False):
            wrap = functools.partial(wrapped, use_orig_params=original, mixed=mixed)
            for model, alignment in both_orders(wrap, ENGINE, torch.float32 if mixed else BF16):
                assert gives(model, ENGINE)
                alignment.undo()
                assert gives(model, None)


def check_ddp() -> None:
    for model, alignment in both_orders(DistributedDataParallel, ENGINE):
        assert trains_as(model, ENGINE)
        alignment.undo()
        assert gives(model, None)


CHECKS = (check_fsdp2, check_fsdp2_checkpointing, check_fsdp2_mixed_precision, check_fsdp1, check_ddp)


def _run_checks(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for check in CHECKS:
        check()
    dist.destroy_process_group()


def test_sharded_and_replicated_models(tmp_path: Path) -> None:
    """The checks above, in two processes."""
    torch.multiprocessing.spawn(_run_checks, args=(2, str(tmp_path / "store")), nprocs=2)


# -- kernel libraries -------------------------------------------------------------------------------------------------

# As Liger does it: whole classes and the rotation replaced in transformers' module, or methods bound to instances.
LIGER = """
import torch
class LigerRMSNorm(torch.nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps
    def forward(self, hidden_states):
        raise AssertionError("their kernel ran")
class LigerSwiGLUMLP(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
    def forward(self, x):
        raise AssertionError("their kernel ran")
def liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    raise AssertionError("their kernel ran")
"""


KERNEL = """
import torch
class Kernel(torch.nn.Module):
    def forward(self, *args):
        raise AssertionError("their kernel ran")
"""


def package(name: str, code: str) -> Any:
    module = types.ModuleType(name)
    exec(code, vars(module))
    return module


@contextmanager
def liger_in_transformers() -> Iterator[Any]:
    liger = package("liger_kernel.transformers.all", LIGER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", liger.liger_rotary_pos_emb)
        patch.setattr(modeling_qwen3, "Qwen3RMSNorm", liger.LigerRMSNorm)
        patch.setattr(modeling_qwen3, "Qwen3MLP", liger.LigerSwiGLUMLP)
        yield liger


def bind(module: nn.Module, cls: Any) -> None:
    module.forward = types.MethodType(cls.forward, module)


def check_taken_over(model: PreTrainedModel, modules: int) -> None:
    theirs = [vars(module).get("forward") for module in model.modules()]
    alignment = align(model, ENGINE)
    assert gives(model, ENGINE)
    assert alignment.notes == (f"model: taken over from liger_kernel: {modules} modules",)
    by_name = {site.module: site.before for site in alignment.sites}
    assert by_name["model.layers.0.self_attn"] == "liger_kernel's"
    assert by_name["model.layers.0"] == "carry=bf16"
    align(model, FP32_TABLE)
    assert gives(model, FP32_TABLE)
    alignment.undo()
    assert [vars(module).get("forward") for module in model.modules()] == theirs
    with pytest.raises(AssertionError, match="their kernel ran"):
        logits(model, tokens())


def test_a_model_built_from_ligers_classes_is_taken_over() -> None:
    with liger_in_transformers() as liger:
        model = tiny("qwen3")
        assert isinstance(model.model.norm, liger.LigerRMSNorm)
        check_taken_over(model, 3 * (1 + 2 + 1 + 2) + 1)


def test_a_model_whose_instances_liger_patched_is_taken_over() -> None:
    model = tiny("qwen3")
    with liger_in_transformers() as liger:
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                bind(module, liger.LigerRMSNorm)
            elif type(module).__name__ == "Qwen3MLP":
                bind(module, liger.LigerSwiGLUMLP)
        check_taken_over(model, 3 * (1 + 2 + 1 + 2) + 1)


def test_hub_kernels_are_refused_by_the_name_of_their_package() -> None:
    """`kernelize` binds a kernel's forward to the instance, and makes a module of the rotation for that purpose."""
    kernel = package("rmsnorm_0a1b.layers", KERNEL).Kernel
    model = tiny("qwen3")
    bind(model.model.layers[2].input_layernorm, kernel)
    with pytest.raises(UsageError, match=r"model\.layers\.2\.input_layernorm \(.*Qwen3RMSNorm\) runs code of rmsnorm_0a1b"):
        align(model, ENGINE)
    assert not any(aligned(module) for module in model.modules())
    # What it leaves where it has no kernel for the device.
    bind(model.model.layers[2].input_layernorm, type(model.model.norm))
    align(model, ENGINE)
    assert gives(model, ENGINE)

    class Function(nn.Module):
        def forward(self, *args: Any) -> Any:
            return rotation(*args)

    rotation = modeling_qwen3.apply_rotary_pos_emb
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3, "apply_rotary_pos_emb", Function())
        align(model, FP32_TABLE)
        assert gives(model, FP32_TABLE)
        bind(modeling_qwen3.apply_rotary_pos_emb, kernel)
        with pytest.raises(UsageError, match=r"model\.layers\.0\.self_attn \(.*Qwen3Attention\) runs code of rmsnorm_0a1b"):
            align(model, ENGINE)
