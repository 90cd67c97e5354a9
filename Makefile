# The index of habits. `make quickstart` and `make test` do all their set-up themselves.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# PyTorch's public CPU index, for machines without GPU: TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
TORCH_INDEX_URL ?=
# What is downloaded is kept here between environments, as pip does by default.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help quickstart install test check lint slurm-install clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

quickstart: $(VENV)/.installed  ## Prepare text, train, interrupt, resume, generate: in a few minutes on 2 cores
	@PATH="$(abspath $(BIN)):$$PATH" examples/quickstart.sh

install: $(VENV)/.installed  ## Create the environment and install the package into it

test: $(VENV)/.installed-dev slurm-install  ## Install everything and run all the tests, on a real Slurm too
	$(BIN)/python -m pytest $(PYTEST_ARGUMENTS)

check: $(VENV)/.installed-dev  ## The quick part: lint, types, layers, unit tests
	$(BIN)/python -m pytest -m "not slurm and not end_to_end" $(PYTEST_ARGUMENTS)

lint: $(VENV)/.installed-dev  ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

slurm-install:  ## Install Slurm from the distribution's packages, where this user may
	@tests/support/install_slurm.sh

clean:  ## Remove environments and caches, not data and runs
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(BIN)/python constraints.txt
	$(PIP) install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) --constraint constraints.txt torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.installed
