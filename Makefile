# `make repro` sets everything up and runs the pipeline; `make test` sets everything up and tests it.
# PIP_ARGS is handed to pip, for example: make repro PIP_ARGS="--index-url …"

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Stages are run as `python -m stages.…`, so the environment's python must come first.
RUN = PATH="$(CURDIR)/$(BIN):$$PATH"

.PHONY: help repro ui test test-fast test-soak bench bench-pipeline lint sync clean-work
.DEFAULT_GOAL := help

help:
	@echo "make repro      set up and run the whole pipeline (again: only what changed)"
	@echo "make ui         the MLflow UI on http://127.0.0.1:5000"
	@echo "make test       set up and run all tests"
	@echo "make test-fast  the tests that take seconds"
	@echo "make test-soak  the pipeline killed at least 40 times, at random and on purpose"
	@echo "make bench      this project and its peers side by side: hours (BENCH_ARGS=--quick: minutes)"
	@echo "make bench-pipeline  what the pipeline costs beside the training"
	@echo "make lint       formatting, lint, types"
	@echo "make sync       send to MLflow what could not be sent while training"
	@echo "make clean-work delete work in progress: interrupted trainings start over"

$(VENV)/run.stamp: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) --version); Python 3.11 or newer is needed: make PYTHON=python3.12 …"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -r requirements.txt
	touch $@

$(VENV)/dev.stamp: requirements-dev.txt $(VENV)/run.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -r requirements-dev.txt
	touch $@

repro: $(VENV)/run.stamp
	@$(RUN) python -m stages.repro

ui: $(VENV)/run.stamp
	@$(RUN) python -m stages.tracking.ui

test: $(VENV)/dev.stamp
	@$(RUN) python -m pytest

test-fast: $(VENV)/dev.stamp
	@$(RUN) python -m pytest -m "not slow"

test-soak: $(VENV)/dev.stamp
	@$(RUN) python -m pytest -m soak

bench: $(VENV)/run.stamp
	@$(RUN) python -m benchmarks.peers $(BENCH_ARGS)

bench-pipeline: $(VENV)/run.stamp
	@$(RUN) python -m benchmarks.pipeline $(BENCH_ARGS)

lint: $(VENV)/dev.stamp
	@$(RUN) ruff format --check .
	@$(RUN) ruff check .
	@$(RUN) mypy

sync: $(VENV)/run.stamp
	@$(RUN) python -m stages.tracking.sync

# The journals of runs stay: they may hold what MLflow has not been sent yet.
clean-work:
	@test ! -d .work || find .work -mindepth 1 -maxdepth 1 ! -name tracking -exec rm -rf {} +
