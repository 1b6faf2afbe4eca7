# Both commands set everything up themselves: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint docs unit setup clean

demo: setup
	$(BIN)/ecoformer demo --out out/demo

test: lint docs unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

unit: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

setup: $(READY)

$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/ecoformer/ops/*.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
