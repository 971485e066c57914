SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The Python that makes the environment: the first of these that is 3.11 or newer.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)

BIN   := .venv/bin
STAMP := .venv/set-up.stamp

MODEL_DIR   := .cache/models
MODEL       := $(MODEL_DIR)/SmolLM2-135M-Instruct.Q4_1.gguf
STUBS       := clients/python/pagedkv/v1
PROTO_FILES := $(wildcard protos/pagedkv/v1/*.proto)

# Conversions of GGUF files, kept between runs.
export PAGEDKV_EXECUTOR_MODEL_CACHE ?= $(CURDIR)/.cache/converted

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMP) ## make .venv and install everything; once, and again when pyproject.toml's dependencies change

$(STAMP): pyproject.toml .ci/set_up.py
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) .ci/set_up.py $@

.PHONY: model
model: $(MODEL) ## fetch SmolLM2-135M-Instruct (93 MB), once

$(MODEL): | $(STAMP)
	$(BIN)/gpu-executor fetch-model $(MODEL_DIR)

.PHONY: protos
protos: $(STAMP) ## generate the Python stubs from protos/
	$(BIN)/python .ci/stubs.py write

.PHONY: check
check: $(STAMP) ## ruff, mypy, import-linter, buf lint, stubs up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/python .ci/stubs.py check

.PHONY: test
test: $(STAMP) $(MODEL) ## every test; ARGS="tests/core -k fork" for some
	$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),--check-skips)

.PHONY: coverage-core
coverage-core: $(STAMP) ## that the core's tests reach every branch of the core; fails below 100 %
	$(BIN)/python -m pytest -q tests/core --hypothesis-seed=0 -p no:cacheprovider \
		--cov=block_manager_svc.core --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

.PHONY: walk
walk: $(STAMP) ## random walk of the core with its record; COMMANDS=10000000 for longer
	$(BIN)/python tests/core/core_walk.py --commands $(or $(COMMANDS),1000000) --record docs/records

.PHONY: world
world: $(STAMP) ## every state of small worlds of the core, with its record
	$(BIN)/python tests/core/core_world.py --record docs/records

.PHONY: mutate
mutate: $(STAMP) ## change the core one thing at a time, and count what its tests notice; hours, ARGS="--seconds 3600"
	nice -n 19 $(BIN)/python .ci/mutate.py $(ARGS)

.PHONY: demo
demo: $(STAMP) $(MODEL) ## eight prompts at once through real processes, as they stream
	$(BIN)/python clients/python/examples/demo.py --model $(MODEL)

.PHONY: bench
bench: $(STAMP) $(MODEL) ## every figure that the README states
	$(BIN)/python -m benchmarks --model $(MODEL)

.PHONY: bench-core
bench-core: $(STAMP) ## the page table beside vLLM, LMDeploy and SGLang (fetched once, 0.5 GB); writes docs/benchmarks.md
	$(BIN)/python -m benchmarks.core --write

.PHONY: test-compose
test-compose: $(STAMP) ## bring the compose project up on the running Docker engine, try it, take it down
	$(BIN)/python -m pytest -v -s tests/compose

.PHONY: clean
clean: ## remove caches and build outputs; the environment and the model stay
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage mutants dist build
	find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
