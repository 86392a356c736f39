# What one types in a clone; `make` alone lists it. Knows nothing of the code beyond its entry points.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# One compute thread per process: ranks set their own number, and small matrices lose time to thread pools.
export OMP_NUM_THREADS := 1

PYTHON ?= python3
# An extra package index to look for torch in, such as one of CPU builds; the default build for Linux may bring CUDA along.
TORCH_INDEX ?=
# Of pytest, beside the ranks that tests start.
TEST_PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PROTOS := $(wildcard proto/outrider/v1/*.proto)
# google/api and google/rpc lie as .proto files beside their stubs, where googleapis-common-protos is installed.
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto \
	-I "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# What gateways may speak, and the details of its errors, with all that these import.
GATEWAY_PROTOS := outrider/v1/inference.proto outrider/v1/operator.proto google/rpc/error_details.proto

.PHONY: help install demo test test-all lint format protos wheel clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(INSTALLED) ## Create .venv from requirements.lock, with the source tree installed in place

# torch goes first and alone, so that its build is settled before another package asks for torch: of one version pip
# prefers the build with a local name, such as 2.13.0+cpu.
$(INSTALLED): requirements.lock pyproject.toml
	@echo "installing the packages of requirements.lock into $(VENV), torch first; this takes minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_INDEX:%=--extra-index-url %) \
		"$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

demo: $(INSTALLED) ## Start everything on this machine, stream a completion, compare speculation settings
	$(BIN)/outrider demo

test: $(INSTALLED) ## Run the tests that every change must pass
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup -m "not full and not gpu"

test-all: $(INSTALLED) ## Run every test that needs no GPU, file by file; a rerun goes on where the last one stopped
	$(BIN)/python .ci/test_all.py

lint: $(INSTALLED) ## Check style, format, import directions and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(INSTALLED) ## Rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(INSTALLED) ## Regenerate the gRPC stubs beside the .proto files, and Envoy's descriptors
	$(PROTOC) --python_out=proto --grpc_python_out=proto --pyi_out=proto $(PROTOS)
	$(PROTOC) --include_imports --descriptor_set_out=deploy/envoy/outrider.pb $(GATEWAY_PROTOS)

wheel: $(INSTALLED) ## Build dist/outrider-*.whl
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

clean: ## Remove .venv, build results and writable state
	rm -rf $(VENV) dist build .outrider
