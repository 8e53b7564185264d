PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install run test lint types bench openapi

help: ## Show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -e '.[dev]'
	@touch $@

install: $(VENV)/.installed ## Create .venv and install loraserve into it

run: $(VENV)/.installed ## Serve the demo model, or whatever ARGS says: make run ARGS="<model> --port 9000"
	$(BIN)/loraserve serve $(ARGS)

test: $(VENV)/.installed-dev ## Run all tests; the kernels' in their own process
	$(BIN)/python -m pytest tests/kernels
	$(BIN)/python -m pytest tests --ignore=tests/kernels

lint: $(VENV)/.installed-dev ## Check style, formatting and the import layers
	$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/lint-imports

types: $(VENV)/.installed-dev ## Check types
	$(BIN)/basedpyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed ## Load-test a running server: make bench ARGS="--concurrency 16"
	$(BIN)/loraserve bench $(ARGS)

openapi: $(VENV)/.installed ## Write docs/openapi.json after a change of the API
	$(BIN)/loraserve openapi > docs/openapi.json
