# Two commands are enough: `make demo` runs the main job, `make test` checks everything.
# Each creates .venv from the lock file if it is missing. More arguments: make demo ARGS="--minutes 2"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
ROUNDS ?= 20

export HF_HUB_OFFLINE := 1

.PHONY: help demo test lint unit test-rdma fuzz bench lock clean setup setup-dev system-packages

help:
	@sed -n 's/^## //p' Makefile

## make demo             the whole line on this machine, at most 4 minutes, ends with a report
demo: setup
	$(BIN)/cachepilot demo $(ARGS)

## make test             lint, types, layers and all tests (PYTEST_ARGS="..." to narrow)
test: setup-dev system-packages lint unit $(if $(PYTEST_ARGS),,test-rdma)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: setup-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

## make test-rdma        RDMA over soft-RoCE in an emulated machine, and its times beside TCP's (RDMA_GUEST_DIR=... to keep them there)
test-rdma: setup-dev system-packages
	tests/rdma/run.sh

## make fuzz             what is tested with made examples, with new ones, ROUNDS times (20); PYTEST_ARGS="..." to narrow
fuzz: setup-dev system-packages
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile fuzz --count $(ROUNDS) $(PYTEST_ARGS)

## make bench            our figures beside the peers', in one run
bench: setup-dev system-packages
	scripts/install-peers.sh
	$(BIN)/cachepilot bench $(ARGS)

## make setup            .venv with the package alone; . .venv/bin/activate
## make lock             write requirements.lock anew
lock: setup-dev
	scripts/lock.sh

setup: $(VENV)/.runtime
setup-dev: $(VENV)/.dev

system-packages:
	scripts/install-system-packages.sh

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "cachepilot needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The lock holds one consistent set for the package and all its extras; as constraints, only what is asked for gets installed.
$(VENV)/.runtime: requirements.lock pyproject.toml | $(BIN)/python
	@echo "setting up $(VENV): a few minutes, about 2.3 GB"
	$(PIP) install -qq --constraint requirements.lock --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime scripts/install-libcachesim.sh
	$(PIP) install -qq --constraint requirements.lock --editable '.[dev]'
	scripts/install-libcachesim.sh $(BIN)/python
	touch $@

clean:
	rm -rf $(VENV) .peers .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info
