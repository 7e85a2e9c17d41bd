# Every target sets up what it needs: a virtual environment in .venv with the package and its tools, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.specmm-installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test quality format bench

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## create .venv and install everything

demo: $(STAMP)  ## real pictures, plain and accelerated, side by side in out/demo
	$(BIN)/specmm demo $(ARGS)

test: $(STAMP)  ## the whole test suite (ARGS="-k name" for a part)
	$(BIN)/python -m pytest $(ARGS)

quality: $(STAMP)  ## ruff check, ruff format --check, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure everything in benchmarks/ (hours on two cores)
	$(BIN)/python -m benchmarks.run $(ARGS)

$(STAMP): pyproject.toml setup.py
	@command -v $(PYTHON) >/dev/null || { echo "specmm needs Python 3.11 or newer, found no $(PYTHON): install it or run make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "specmm needs Python 3.11 or newer, got $$($(PYTHON) -V): run make PYTHON=/path/to/python3.11"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: install it (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "installing specmm into $(VENV); the first time takes a few minutes" >&2
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[dev,fid]"
	@touch $@
