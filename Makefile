# make demo   set up .venv on first use and train a small model, with a report
# make test   set up .venv, with DeepSpeed if there is a C++ compiler, and run the tests: each behaviour once
# make test-all  every test, those too that prove the same thing a second time
# make check  lint and types; make setup: only set up .venv
# make docs   the tests of the pages and of examples/
# make release-check  build the wheel and the sdist, check them, and use the wheel in a fresh environment
# make workflows      lint .github/workflows
# make nightly        every test, with a report for make nightly-issue, which writes what failed into an issue
# make numeric  run the numerical tests with the instruction sets of older x86 CPUs
# make pages  write docs/ again: measured parts from the records in benchmarks/results, examples by running them
# make pictures  draw terminals and take pictures of pages for docs/
# make site   build the site of docs/ into build/site
# make notebooks  run examples/notebooks and keep their outputs; make check-notebooks: run them with nbmake
# make trl-versions  run the tests of TRL's trainers with the oldest TRL, 1.15 and the newest
# make gpu    run the tests that need a GPU, with $(PYTHON); make sanitize: run kernels under NVIDIA's checkers

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# OpenMP's threads spin while they wait. With another busy program on the machine this made a step 10 times slower.
# Sleeping at once costs a third of the speed on an idle machine. Spinning 10,000 times costs nothing measurable.
export GOMP_SPINCOUNT ?= 10000

.PHONY: demo test test-all setup check lint types docs numeric pages site notebooks gpu sanitize format release-check
.PHONY: trl-versions workflows clean pictures check-notebooks nightly nightly-issue

demo: $(VENV)/.ready
	$(BIN)/tigon train recipes/quickstart.yaml

# One core per process. tests/second_proofs.py marks what `make test` leaves out. The tests start many processes, which
# read tigon's bytecode instead of compiling 500 files each.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
test: $(VENV)/.engines
	$(PYTEST) -m "not second_proof"

test-all: $(VENV)/.engines
	$(PYTEST)

# The workflow "Nightly" sets PRERELEASES=1, so that the newest pre-releases of the dependencies are installed.
NIGHTLY := build/nightly.xml
nightly: $(VENV)/.engines
	mkdir -p build && rm -f $(NIGHTLY)
	$(PYTEST) --junitxml=$(NIGHTLY)

RUN_URL ?=
nightly-issue:
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) tools/nightly_issue.py $(NIGHTLY) --run "$(RUN_URL)"

# PyTorch and oneDNN choose their loops by the CPU's instruction set, and different loops round differently. An error
# bound that holds on this machine by luck fails with one of these sets. Kernels are left out, because Triton's
# interpreter uses numpy and gives the same result with each set. `make test` uses the machine's own instruction set.
NUMERIC := tests/ops tests/nn tests/convergence tests/models/test_parity.py tests/medusa/test_heads_loss.py
numeric: $(VENV)/.ready
	for isa in default:SSE41 avx2:AVX2; do \
	    ATEN_CPU_CAPABILITY=$${isa%:*} ONEDNN_MAX_CPU_ISA=$${isa#*:} OMP_NUM_THREADS=1 \
	    $(BIN)/python -m pytest -n 2 --dist worksteal -k "not kernel" $(NUMERIC) || exit; \
	done

# The oldest TRL that `fuse` knows; the first whose models have a forward with log-probabilities; the newest.
TRL_VERSIONS ?= 1.8.0 1.15.0 1.16.0
trl-versions: $(VENV)/.ready
	sh tools/trl_versions.sh $(VENV) $(TRL_VERSIONS)

setup: $(VENV)/.ready

check: lint types

PYTHON_FOLDERS := src tests benchmarks examples tools
lint: $(VENV)/.ready
	$(BIN)/ruff check $(PYTHON_FOLDERS)
	$(BIN)/ruff format --check $(PYTHON_FOLDERS)

types: $(VENV)/.ready
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix $(PYTHON_FOLDERS)
	$(BIN)/ruff format $(PYTHON_FOLDERS)

docs: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/docs tests/examples

pages: $(VENV)/.ready
	$(BIN)/python -m benchmarks.pages.study --into docs
	$(BIN)/python -m benchmarks.pages.medusa
	$(BIN)/python -m benchmarks.pages.duel
	$(BIN)/python -m benchmarks.pages.front_page
	$(BIN)/python -m benchmarks.pages.small_data
	$(BIN)/python -m benchmarks.pages.sums
	$(BIN)/python -m benchmarks.pages.post_training_recipes
	$(BIN)/python -m benchmarks.pages.head_accuracy
	$(BIN)/python -m benchmarks.pages.base_offload
	$(BIN)/python -m benchmarks.pages.support
	$(BIN)/python -m benchmarks.pages.exports
	$(BIN)/python -m benchmarks.pages.engine_pairs
	$(BIN)/python -m benchmarks.pages.several_cards
	$(BIN)/python -m benchmarks.pages.techniques
	$(BIN)/python -m benchmarks.pages.recipe_keys
	PYTHONPATH=tests $(BIN)/python tests/integrations/trainers_page.py
	PYTHONPATH=tests $(BIN)/python tests/compat/liger_page.py
	PYTHONPATH=.:tests $(BIN)/python tests/docs/page_examples.py

# Terminals as docs/img/terminal/*.svg and pages as docs/img/pages/*.png. The pages need Chromium.
pictures: $(VENV)/.ready
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --editable '.[pictures]'
	rm -rf build/pictures
	$(BIN)/python tools/terminal_pictures.py
	$(BIN)/tigon train recipes/quickstart.yaml --set train.steps=60 --set train.eval_steps=20 --set train.save_steps=60 \
	    --set comparison.steps=0 --set output.folder=build/pictures --set output.name=report
	$(BIN)/tigon profile recipes/quickstart.yaml --set train.batch_size=16 --set model.kernels=none \
	    --beside-set model.kernels=tigon --out build/pictures/profile
	PYTHONPATH=tests $(BIN)/python tests/docs/page_pictures.py report=build/pictures/report/report.html \
	    profile=build/pictures/profile/profile.html

# The site in build/site. Every link and anchor is checked.
site: $(VENV)/.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.site: $(VENV)/.ready
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --editable '.[docs]'
	touch $@

notebooks: $(VENV)/.notebooks
	$(BIN)/python tools/run_notebooks.py examples/notebooks/*.ipynb

# Each notebook in a kernel of its own, as a reader runs it. An error or a failed assertion in a cell fails.
check-notebooks: $(VENV)/.notebooks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --nbmake examples/notebooks

$(VENV)/.notebooks: $(VENV)/.ready pyproject.toml
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --editable '.[notebooks]'
	touch $@

gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/ops tests/nn tests/models tests/convergence tests/integration tests/bench

# Every kernel of the accuracy tests under NVIDIA's memory checker and race detector.
sanitize:
	for tool in memcheck racecheck; do \
	    PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 3 \
	    $(PYTHON) -m pytest tests/ops/test_accuracy.py -k "twice and kernel and fp16" || exit; \
	done

release-check:
	PYTHON=$(PYTHON) sh tools/release_check.sh build/release

workflows:
	PYTHON=$(PYTHON) sh tools/lint_workflows.sh build/workflows

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.ready: pyproject.toml tools/setup_venv.sh
	PYTHON=$(PYTHON) sh tools/setup_venv.sh $(VENV)

$(VENV)/.engines: $(VENV)/.ready tools/setup_engines.sh
	sh tools/setup_engines.sh $(VENV)
