"""Has verl's own FSDP2 engine build a tiny model with `align_actor`, on one CPU process: the bits of an aligned BF16 model?

    python experiments/grpo/verl/dry_run.py        (in an environment with tripoint and verl 0.9)

Of verl only what insists on a GPU is replaced: the device of the mesh, and its log of GPU memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import trl
from torch.distributed.device_mesh import init_device_mesh

from tripoint.rl.families import tiny_model
from tripoint.stacks.emulated import EmulatedStack

TARGET = "R3 S3 N3 carry=layer"

os.environ["TRIPOINT_TARGET"] = TARGET
sys.path.insert(0, str(Path(__file__).parent))  # verl imports `align_actor` by its name
if not hasattr(trl, "AutoModelForCausalLMWithValueHead"):  # newer TRL has dropped what verl 0.9 patches there
    trl.AutoModelForCausalLMWithValueHead = type("AutoModelForCausalLMWithValueHead", (), {})
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

import verl.utils.fsdp_utils as fsdp_utils  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402

model = tiny_model("qwen2", "sort")
settings = HFModelConfig(
    path=str(model),
    external_lib="align_actor",
    override_config={"attn_implementation": "sdpa"},
    use_remove_padding=False,
    enable_gradient_checkpointing=False,
)
engine_settings = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False)
engine = transformer_impl.FSDPEngineWithLMHead(settings, engine_settings, FSDPOptimizerConfig(lr=1e-6), CheckpointConfig())
engine.device_mesh = init_device_mesh("cpu", (1,))
transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
fsdp_utils.get_device_id = lambda: torch.device("cpu")
fsdp_utils.get_torch_device = lambda: torch.cpu

actor = engine._build_fsdp_module(engine._build_module())
ids = torch.randint(3, 33, (2, 12), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    sharded = actor(input_ids=ids).logits
    aligned = EmulatedStack(model, target=TARGET).model(input_ids=ids).logits
same = torch.equal(sharded, aligned)
print(f"{type(actor).__name__}: {'the same bits as' if same else 'NOT the bits of'} the BF16 model aligned to {TARGET}")
dist.destroy_process_group()
sys.exit(0 if same else 1)
