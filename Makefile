# One line for each daily command. `make up` is all that a new machine needs.
#   make up ARGS="--workers 2"          flags of `headrace up`
#   make up TORCH_INDEX=<address>       take torch from another package index: PyTorch's own has small CPU-only builds
#   make up PYTHON=python3.12           another interpreter (3.11, 3.12 or 3.13)

.PHONY: up test check format bench install clean
.DELETE_ON_ERROR:
.SILENT:

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
TORCH_INDEX ?=
IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c '$(IN_RANGE)' >/dev/null 2>&1 && { echo $$p; break; }; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

up: $(VENV)/.installed  ## build .venv, install, fetch the model, run
	exec $(BIN)/headrace up $(ARGS)

test: $(VENV)/.installed-dev check  ## every check and every test
	$(BIN)/pytest $(ARGS)

check: $(VENV)/.installed-dev  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.serve $(ARGS)

install: $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Stamps: without a change to what is to be installed, nothing is.

$(VENV)/.installed: pyproject.toml constraints.txt
	python="$(PYTHON)"; \
	  test -n "$$python" || { echo "headrace: no Python 3.11, 3.12 or 3.13 found; give one with PYTHON=" >&2; exit 1; }; \
	  $$python -c '' 2>/dev/null || { echo "headrace: cannot run $$python; give another with PYTHON=" >&2; exit 1; }; \
	  $$python -c '$(IN_RANGE)' || { echo "headrace: needs Python 3.11, 3.12 or 3.13, and $$python is $$($$python -V)" >&2; exit 1; }; \
	  $$python -c 'import ensurepip, venv' 2>/dev/null || { echo "headrace: $$python cannot make virtual environments; install its venv module (Debian: python3-venv)" >&2; exit 1; }; \
	  command -v c++ >/dev/null || echo "headrace: no C++ compiler (c++): CPU workers will run several times slower; install one (Debian: g++)" >&2; \
	  echo "headrace: installing into $(VENV); the first time takes minutes" >&2; \
	  $$python -m venv $(VENV)
ifneq ($(TORCH_INDEX),)
	$(PIP) install --no-deps --index-url $(TORCH_INDEX) $(TORCH)
else
	test "$$(uname -sm)" != "Linux x86_64" || command -v nvidia-smi >/dev/null || $(PIP) show -q torch 2>/dev/null || \
	  echo "headrace: no NVIDIA GPU here. Where the package index serves torch with CUDA (gigabytes), TORCH_INDEX=<PyTorch's CPU index> takes the small build" >&2
endif
	$(PIP) install -c constraints.txt -e '.[embedded]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt -e '.[embedded,dev]'
	touch $@
