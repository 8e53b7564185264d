PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# Compile only imported modules to bytecode, on their first import, and keep it: a quarter of the packages' modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install run test lint types bench bench-check gpu wheel openapi ui ui-check screenshots

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || { \
	    echo "$(PYTHON) is not Python 3.11 to 3.14 ($$($(PYTHON) --version 2>&1)). Choose one that is, for example:" >&2; \
	    echo "    make run PYTHON=python3.13" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --no-compile -e '.[dev]'
	$(BIN)/pip install --no-deps lorax-client==0.6.3  # its bound on huggingface-hub excludes transformers' version, but it works
	@touch $@

install: $(VENV)/.installed ## Create .venv and install loraserve into it

run: $(VENV)/.installed ## Serve the demo model, or another one: make run ARGS="<model> --port 9000"
	$(BIN)/loraserve serve $(ARGS)

test: $(VENV)/.installed-dev ## Run all tests; kernel and browser tests in processes of their own
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/kernels
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests --ignore=tests/kernels --ignore=tests/browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/browser

lint: $(VENV)/.installed-dev ## Check style, formatting and the import layers
	$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/lint-imports

types: $(VENV)/.installed-dev ## Check types
	$(BIN)/basedpyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed-dev ## Measure loraserve and its rivals; only some: ARGS="--only <goal>"; with vLLM: "--vllm-python <its python>"
	$(BIN)/python benchmarks/bench_rivals.py $(ARGS)
	$(BIN)/python benchmarks/bench_report.py

bench-check: $(VENV)/.installed-dev ## Measure again and flag ratios that fell since the committed result
	$(BIN)/python benchmarks/bench_check.py $(ARGS)

gpu: ## Run GPU tests and benchmarks (needs an NVIDIA GPU, but no installation); only some: ARGS="--only tests"
	PYTHONPATH=.:kernels:adapters $(PYTHON) benchmarks/gpu_suite.py $(ARGS)

openapi: $(VENV)/.installed ## Write docs/openapi.json after a change to the API
	$(BIN)/loraserve openapi > docs/openapi.json

wheel: $(VENV)/.installed ## Build a release's wheel into dist, with compiled CPU kernels for this architecture
	LORASERVE_PREBUILD=1 $(BIN)/pip wheel --no-deps --wheel-dir dist .

ui: ## Build the console into the package after a change to admin_ui or the API (needs Node 20.19)
	cd admin_ui && npm ci && npm run api && npm run build

ui-check: ## Fail unless the committed console matches its sources and docs/openapi.json
	cd admin_ui && npm ci && npm run check

screenshots: $(VENV)/.installed-dev ## Take the console's pictures for the documentation (needs Chromium)
	$(BIN)/python scripts/screenshots.py docs/images
