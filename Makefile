# Every target sets up what it needs; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick test-all slowest cuda-check test-ray fuzz soak-fleet lint type format figures bench recipes lock ledger drill clean

VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
FIGURES := $(VENV)/.figures
RAY     := $(VENV)/.ray
PYTHON  ?= python3
ARGS    ?=
BENCH   ?=
# All of `benchmark` that has no target of its own; a file's first line describes it.
BENCHMARKS := $(filter-out $(foreach name,cuda_check pack_environment steps recipes figures/__init__ rig/__init__,benchmark/$(name).py),\
	$(wildcard benchmark/*.py benchmark/*/__init__.py))

# uv from the path if it is there, else one fetched into the tree.
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)

# Importing SGLang from source costs 30 s a process, from bytecode 14 s: let Python keep its bytecode.
unexport PYTHONDONTWRITEBYTECODE
export UV_LINK_MODE ?= hardlink

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## install the project and its pinned dependencies into .venv

$(STAMP): pyproject.toml requirements.lock sgl-kernel-ext/pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --python '>=3.11' $(VENV)
	$(UV) pip install --python $(BIN)/python --constraint requirements.lock \
		--editable sgl-kernel-ext --editable '.[server]' --group dev
	@touch $@

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet --disable-pip-version-check uv

demo: setup  ## serve a small hybrid model with and without Marconi and compare (ARGS="--json FILE", MODEL=...)
	$(BIN)/marconi demo $(if $(MODEL),--model-path $(MODEL)) $(ARGS)

test-quick: setup  ## the tests of what decides (tree, policies, lifecycle, costs), without SGLang, in a minute (ARGS="-k ...")
	$(BIN)/python -m pytest -n 2 -m "not slow" test/tree test/policy test/lifecycle test/model $(ARGS)

test: setup  ## the tests of every change, exactness among them, some 7 minutes on 2 cores (ARGS="-k ...")
	$(BIN)/python -m pytest -n 2 -m "not slow" --junitxml=.durations/quick.xml $(ARGS)

test-all: setup  ## the tests that `make test` leaves out: more servers, soaks, benchmarks, kernels (some 40 minutes)
	$(BIN)/python -m pytest -n 2 -m slow --junitxml=.durations/slow.xml $(ARGS)

slowest: setup  ## the folders, files and tests that took longest in the last `make test` and `make test-all`
	$(BIN)/python test/durations.py

cuda-check: $(if $(CUDA_PYTHON),,setup)  ## all that needs a Hopper card, in 8 minutes (PART=kernels,servers,speed; ARGS="--list"; CUDA_PYTHON=python3: no setup)
	$(or $(CUDA_PYTHON),$(BIN)/python) benchmark/cuda_check.py $(if $(PART),--part $(PART)) $(ARGS)

test-ray: $(RAY)  ## the tests of Ray Serve, two replicas of a small model among them (some minutes)
	$(BIN)/python -m pytest test/ray_serve $(ARGS)

fuzz: setup  ## 2,000 bodies near those that are answered, to a real server and to a router: none may end it (some minutes)
	MARCONI_FUZZ_BODIES=2000 $(BIN)/python -m pytest -q -s --timeout 3600 \
		test/engine/test_request_fuzz.py test/router/gateway/test_fuzz.py $(ARGS)

$(RAY): $(STAMP) | $(UV)
	$(UV) pip install --python $(BIN)/python --constraint requirements.lock --editable '.[ray]'
	@touch $@

format: setup  ## sort imports and format what ruff can
	$(BIN)/ruff check --select I --fix --quiet .
	$(BIN)/ruff format --quiet .

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup  ## mypy, strict
	$(BIN)/mypy

figures: $(FIGURES)  ## the papers' figures, from this replay, to docs/figures (ARGS="--only 7,8")
	$(BIN)/python benchmark/figures --out docs/figures $(ARGS)

$(FIGURES): $(STAMP) | $(UV)
	$(UV) pip install --python $(BIN)/python --constraint requirements.lock --group figures
	@touch $@

# The list needs no setup. Pictures of `memory` need what those of the papers do.
bench: $(if $(BENCH),$(if $(filter memory,$(BENCH)),$(FIGURES),setup))  ## the list of benchmarks; BENCH=NAME runs one of them (ARGS="...", mostly "--help" says which)
ifeq ($(BENCH),)
	@awk 'FNR == 1 { name = FILENAME; gsub("^benchmark/|/__init__|[.]py$$", "", name); gsub("_", "-", name); \
		gsub("\"\"\"", ""); printf "  BENCH=%-14s %s\n", name, $$0 }' $(BENCHMARKS)
else
	$(BIN)/python $(or $(patsubst %/__init__.py,%,$(filter $(addprefix benchmark/$(subst -,_,$(BENCH)),.py /__init__.py),$(BENCHMARKS))),\
		$(error BENCH must be one that `make bench` lists, got $(BENCH))) $(ARGS)
endif


soak-fleet: setup  ## 1,000 random schedules of faults before a router: nothing lost, nothing wrong (some minutes)
	MARCONI_SCHEDULES=1000 $(BIN)/python -m pytest -q -s --timeout 3600 test/router/gateway/test_schedules.py $(ARGS)

recipes: setup  ## which launch configurations are served, to docs/recipes.md (ARGS="FILE", another list of them)
	$(BIN)/python benchmark/recipes.py --page docs/recipes.md test/recipes/2026-11.json $(ARGS)

lock: | $(UV)  ## compile requirements.lock anew
	$(UV) pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-annotate \
		--no-emit-package sgl-kernel-ext --all-extras --group dev --group figures \
		--custom-compile-command 'make lock' --output-file requirements.lock pyproject.toml

ledger: setup  ## write down what is changed of SGLang (UPSTREAM.md) and the signatures of what is used
	SGLANG_PLATFORM=marconi_cpu PYTHONPATH=test $(BIN)/python -m engine.ledger

# SGLang alone: what it depends on is that of .venv.
drill: setup  ## what moved in another SGLang, by our files that use it: SGLANG=0.5.22, a version or a wheel
	$(if $(SGLANG),,$(error SGLANG must be a version or a wheel, as SGLANG=0.5.22, got none))
	$(UV) pip install --quiet --python $(BIN)/python --target $(VENV)/.drill/$(notdir $(SGLANG)) --no-deps \
		$(if $(wildcard $(SGLANG)),$(SGLANG),sglang==$(SGLANG))
	SGLANG_PLATFORM=marconi_cpu MARCONI_ALLOW_UNVERIFIED_SGLANG=1 PYTHONWARNINGS=ignore \
		PYTHONPATH=$(VENV)/.drill/$(notdir $(SGLANG)):test $(BIN)/python -m engine.ledger drill

clean:  ## remove what the targets made
	rm -rf $(VENV) .uv .demo .durations .mypy_cache .ruff_cache build dist
