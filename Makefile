# make demo   set up .venv on first use and train a small model, with a report
# make test   set up likewise and run the tests
# make check  lint and types
# make gpu    the tests that need a GPU, in the environment of $(PYTHON)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check gpu format clean

demo: $(VENV)/.ready
	$(BIN)/tigon train recipes/quickstart.yaml

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/.ready
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests

gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/ops tests/models tests/nn

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.ready: pyproject.toml tools/setup_venv.sh
	PYTHON=$(PYTHON) sh tools/setup_venv.sh $(VENV)
