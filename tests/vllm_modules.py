"""Runs vLLM's own modules, no engine, in a process of their own: importing vLLM patches Inductor and sets global state.

As a program: `python vllm_modules.py INPUTS OUTPUTS`, two files of `torch.save`; `run` is the way to call it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EPS = 1e-6


def run(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """`inputs`: x, residual [tokens, hidden], weight [hidden]; gate_up [tokens, 2 * intermediate]; query, key [tokens, heads
    * head_dim], positions [tokens], head_dim, theta. All tensors in one 16-bit dtype but for the positions.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "inputs.pt", Path(folder) / "outputs.pt"
        torch.save(inputs, given)
        environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run([sys.executable, __file__, given, made], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs: dict[str, Tensor] = torch.load(made)
        return outputs


def modules(inputs: dict[str, Any]) -> dict[str, Tensor]:
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.config.compilation import CompilationMode

    # What `enforce_eager` sets: nothing compiled, every module runs its own platform's implementation.
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE, custom_ops=["all"]))
    with set_current_vllm_config(config):
        from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.layers.rotary_embedding import get_rope

        x, residual, weight, gate_up = (inputs[name] for name in ("x", "residual", "weight", "gate_up"))
        norm = RMSNorm(len(weight), EPS, dtype=weight.dtype)
        norm.weight.data.copy_(weight)
        head_dim, theta = inputs["head_dim"], inputs["theta"]
        last = int(inputs["positions"].max()) + 1
        parameters = {"rope_type": "default", "rope_theta": theta}
        rotary = get_rope(head_dim, max_position=last, rope_parameters=parameters, dtype=x.dtype)

        out = {"norm": norm(x.clone()), "silu": SiluAndMul()(gate_up), "gelu": GeluAndMul()(gate_up)}
        out["gelu_tanh"] = GeluAndMul(approximate="tanh")(gate_up)
        out["add_norm"], out["carry"] = norm(x.clone(), residual.clone())
        out["query"], out["key"] = rotary(inputs["positions"], inputs["query"].clone(), inputs["key"].clone())

        # The C++ kernels of the same operations, which no module of the CPU platform calls today.
        kernels = torch.ops._C
        out["kernel_silu"] = torch.empty_like(out["silu"])
        kernels.silu_and_mul(out["kernel_silu"], gate_up)
        out["kernel_norm"] = torch.empty_like(x)
        kernels.rms_norm(out["kernel_norm"], x, weight, EPS)
        out["kernel_add_norm"], out["kernel_carry"] = x.clone(), residual.clone()
        kernels.fused_add_rms_norm(out["kernel_add_norm"], out["kernel_carry"], weight, EPS)
    return {name: tensor.detach() for name, tensor in out.items()}


if __name__ == "__main__":
    torch.save(modules(torch.load(sys.argv[1])), sys.argv[2])
