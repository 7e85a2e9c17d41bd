# Every target sets up what it needs: a virtual environment in .venv with the package and its tools, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.specmm-installed
ARGS ?=
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal

# Tests are compiled once, not by each process of each run.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-portable mutants quality format bench docs

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## create .venv and install everything

demo: $(STAMP)  ## real pictures, plain and accelerated, side by side in out/demo
	$(BIN)/specmm demo $(ARGS)

test: $(STAMP)  ## what to run before each commit, minutes (ARGS="-k name" for a part)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(STAMP)  ## also compilers, processes, long samples; CI runs this, mutants and test-portable
	$(PYTEST) $(ARGS)

# A machine can hide what its processor has from PyTorch, oneDNN, MKL and NumPy's OpenBLAS.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 DNNL_MAX_CPU_ISA=AVX2 \
	MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell

test-portable: $(STAMP)  ## the numerical tests as on a processor with AVX2 alone, with two threads
	$(AVX2) OMP_NUM_THREADS=2 GOMP_SPINCOUNT=1000 $(BIN)/python -m pytest -m "numeric and not slow" $(ARGS)

mutants: $(STAMP)  ## break lines that exactness rests on, one at a time: the tests named for each must fail
	$(BIN)/python tests/mutants/run.py $(ARGS)

quality: $(STAMP)  ## ruff check, ruff format --check, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure everything in benchmarks/ (hours on two cores)
	$(BIN)/python -m benchmarks.run $(ARGS)

docs: $(STAMP)  ## the site in build/site, from docs/ and benchmarks/results; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

$(STAMP): pyproject.toml setup.py
	@command -v $(PYTHON) >/dev/null || { echo "specmm needs Python 3.11 or newer, found no $(PYTHON): install it or run make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "specmm needs Python 3.11 or newer, got $$($(PYTHON) -V): run make PYTHON=/path/to/python3.11"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: install it (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "installing specmm into $(VENV); the first time takes a few minutes" >&2
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[dev,fid]"
	@touch $@
