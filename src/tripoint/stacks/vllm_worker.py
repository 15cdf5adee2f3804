"""The process that owns a vLLM engine. `tripoint.stacks.vllm` starts it, and asks it over one connection until it hangs up.

Requests are `(method, arguments)`; each is answered by any number of `("progress", sequences)` and one `("done", result)` or
`("failed", reason)`. Standard output and error are the engine's log, never part of the answer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any


class Engine:
    """What can be asked of the engine; each public method is a request."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Start vLLM with these engine arguments; returns what `VllmStack.conditions` and `.versions` report of it."""
        import torch
        import transformers
        import vllm

        self._llm = vllm.LLM(**arguments)
        config = self._llm.llm_engine.vllm_config
        return {
            "conditions": {
                "layers": config.model_config.get_total_num_hidden_layers(),
                "tp": config.parallel_config.tensor_parallel_size,
                "batch": f"at most {config.scheduler_config.max_num_seqs} sequences, "
                f"{config.scheduler_config.max_num_batched_tokens} tokens",
                "compile": not config.model_config.enforce_eager,
                "device": vllm.platforms.current_platform.get_device_name(),
                "dtype": str(config.model_config.dtype).removeprefix("torch."),
            },
            "versions": {
                "vllm": vllm.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }

    def sample(
        self, prompts: list[list[int]], max_tokens: int, seed: int, temperature: float, end_tokens: list[int]
    ) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Completion ids and their logprobs, for each prompt."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=seed + index,
                ignore_eos=True,  # `end_tokens` says where to stop, and a stop token is part of the completion
                stop_token_ids=end_tokens,
                logprobs=0,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        completions = [request.outputs[0] for request in self._run(prompts, parameters)]
        return [
            (tuple(c.token_ids), tuple(at[token].logprob for token, at in zip(c.token_ids, c.logprobs, strict=True)))
            for c in completions
        ]

    def score(self, sequences: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        """The logprob of every token from `prompt_lengths` on, for each sequence."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        return [
            [at[token].logprob for token, at in zip(ids[start:], request.prompt_logprobs[start:], strict=True)]
            for ids, start, request in zip(
                sequences, prompt_lengths, self._run(sequences, [parameters] * len(sequences)), strict=True
            )
        ]

    def load_weights(self, directory: str) -> None:
        """Replace the weights by those of the safetensors files in `directory`, each worker reading for itself."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
        if self._llm.llm_engine.vllm_config.device_config.device_type == "cpu":
            self._llm.apply_model(_repack_output_weights)
        self._llm.reset_prefix_cache()

    def _run(self, sequences: list[list[int]], parameters: list[Any]) -> list[Any]:
        """The finished requests, in the order of `sequences`."""
        engine = self._llm.llm_engine
        for index, (ids, parameter) in enumerate(zip(sequences, parameters, strict=True)):
            engine.add_request(str(index), {"prompt_token_ids": ids}, parameter)
        finished = {}
        while engine.has_unfinished_requests():
            new = {int(request.request_id): request for request in engine.step() if request.finished}
            finished.update(new)
            if new:
                self._connection.send(("progress", len(new)))
        return [finished[index] for index in range(len(sequences))]


def _repack_output_weights(model: Any) -> None:
    """On a CPU the output projection multiplies with a packed copy of its weights, which a reload forgets if they are tied."""
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def serve(connection: Connection) -> None:
    """Answer requests until the other end hangs up."""
    engine = Engine(connection)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = ("done", getattr(engine, method)(**arguments))
        except Exception as error:
            traceback.print_exc()
            answer = ("failed", f"{type(error).__name__}: {error}")
        connection.send(answer)


def die_with(parent: int) -> None:
    """Kill this process and all it started as soon as process `parent` is gone, however that ended and whatever runs here."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    descriptor, parent_id = map(int, sys.argv[1:])
    threading.Thread(target=die_with, args=(parent_id,), daemon=True).start()
    serve(Connection(descriptor))
    os.killpg(0, signal.SIGKILL)  # what the engine started must not outlive it
