# make demo   set up .venv on first use and train a small model, with a report
# make test   set up likewise, with DeepSpeed where there is a compiler, and run the tests
# make check  lint and types
# make numeric  the tests that compare numbers again, as older x86 CPUs would run them
# make pages  what docs/ shows again: measured parts from the records in benchmarks/results, examples by running them
# make gpu    the tests that need a GPU, in the environment of $(PYTHON); make sanitize: the kernels under its checkers

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# OpenMP's threads spin while they wait; beside another busy program that made a step 10 times slower. Sleeping at once
# costs a third of the speed of a quiet machine, 10,000 turns cost nothing measurable.
export GOMP_SPINCOUNT ?= 10000

.PHONY: demo test check numeric pages gpu sanitize format clean

demo: $(VENV)/.ready
	$(BIN)/tigon train recipes/quickstart.yaml

# A core for each of the two processes.
test: $(VENV)/.engines
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# PyTorch and oneDNN choose their loops by the CPU's instructions, and other loops round otherwise: a bound that holds by
# luck on this machine fails in one of these. Kernels stay out: Triton's interpreter is numpy, which is the same in all.
# The machine's own instructions are those of `make test`.
NUMERIC := tests/ops tests/nn tests/convergence tests/models/test_parity.py tests/medusa/test_heads_loss.py
numeric: $(VENV)/.ready
	for isa in default:SSE41 avx2:AVX2; do \
	    ATEN_CPU_CAPABILITY=$${isa%:*} ONEDNN_MAX_CPU_ISA=$${isa#*:} OMP_NUM_THREADS=1 \
	    $(BIN)/python -m pytest -n 2 --dist worksteal -k "not kernel" $(NUMERIC) || exit; \
	done

check: $(VENV)/.ready
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

pages: $(VENV)/.ready
	$(BIN)/python -m benchmarks.pages.study --into docs/study.md
	$(BIN)/python -m benchmarks.pages.medusa
	PYTHONPATH=tests $(BIN)/python tests/techniques/technique_pages.py
	$(BIN)/python tests/docs/page_examples.py

gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/ops tests/nn tests/models tests/convergence tests/integration tests/bench

# Every kernel of the accuracy tests under NVIDIA's memory checker and race detector.
sanitize:
	for tool in memcheck racecheck; do \
	    PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 3 \
	    $(PYTHON) -m pytest tests/ops/test_accuracy.py -k "twice and kernel and fp16" || exit; \
	done

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.ready: pyproject.toml tools/setup_venv.sh
	PYTHON=$(PYTHON) sh tools/setup_venv.sh $(VENV)

$(VENV)/.engines: $(VENV)/.ready tools/setup_engines.sh
	sh tools/setup_engines.sh $(VENV)
