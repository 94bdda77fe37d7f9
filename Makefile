# Every target sets up what it needs; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all cuda-check test-ray fuzz lint type format figures recipes lock ledger clean
.PHONY: bench bench-serving bench-victim bench-replay bench-hit-rate bench-host-replay bench-host-soak bench-host-cost bench-hook-cost bench-host-tier bench-server-bars bench-split bench-memory bench-kernels bench-fleet-index bench-events bench-gateway bench-traffic bench-validate bench-speculation bench-view bench-explain soak-fleet bench-fleet bench-fleet-servers bench-fleet-traces

VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
FIGURES := $(VENV)/.figures
RAY     := $(VENV)/.ray
PYTHON  ?= python3
ARGS    ?=

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

test: setup  ## the tests of every change, exactness among them, under 10 minutes on 2 cores (ARGS="-k ...")
	$(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

test-all: setup  ## the tests that `make test` leaves out: more servers, soaks, benchmarks, kernels (some 30 minutes)
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

cuda-check: $(if $(CUDA_PYTHON),,setup)  ## all that needs a Hopper card, in 8 minutes (PART=kernels,servers,speed; ARGS="--list"; CUDA_PYTHON=python3: no setup)
	$(or $(CUDA_PYTHON),$(BIN)/python) benchmark/cuda_check.py $(if $(PART),--part $(PART)) $(ARGS)

test-ray: $(RAY)  ## the tests of Ray Serve, two replicas of a small model among them (some minutes)
	$(BIN)/python -m pytest test/router/ray_serve $(ARGS)

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

bench: bench-victim bench-replay bench-host-cost bench-serving  ## every benchmark that needs no data

bench-serving: setup  ## SGLang's bench_serving against stock and marconi, side by side
	$(BIN)/python benchmark/serving.py $(ARGS)

bench-victim: setup  ## what one eviction costs as the tree grows, each victim checked
	$(BIN)/python benchmark/victim.py $(ARGS)

bench-explain: setup  ## what explaining a request costs the thread that serves it
	$(BIN)/python benchmark/explain_cost.py $(ARGS)

bench-view: setup  ## what a snapshot of a tree and the page of `marconi view` cost up to 100,000 nodes
	$(BIN)/python benchmark/view.py $(ARGS)

bench-replay: setup  ## requests a second of a replay on one core
	$(BIN)/python benchmark/replay.py $(ARGS)

bench-host-replay: setup  ## a trace through the server's real cache, without a model (ARGS="--backend marconi ...")
	$(BIN)/python benchmark/host_replay.py $(ARGS)

bench-host-soak: setup  ## 50,000 random requests through the server's real cache: nothing may be lost
	$(BIN)/python benchmark/host_soak.py $(ARGS)

bench-host-cost: setup  ## what match, extension and eviction cost in stock's caches and ours, side by side
	$(BIN)/python benchmark/host_cost $(ARGS)

bench-hook-cost: setup  ## host time that keeping states adds to a recurrent layer, beside SGLang's own, without a card
	$(BIN)/python benchmark/hook_cost.py $(ARGS)

bench-gateway: setup  ## what a router adds to a request, and how many streams it holds
	$(BIN)/python benchmark/gateway $(ARGS)

bench-traffic: setup  ## cached tokens over what could be, for ordinary shapes of traffic, stock and marconi
	$(BIN)/python benchmark/traffic $(ARGS)

bench-validate: setup  ## cached tokens beside what a replay of the same requests predicts, for those shapes of traffic
	$(BIN)/python benchmark/validate.py $(ARGS)

bench-speculation: setup  ## cached tokens of chats with and without speculative decoding, stock and marconi
	$(BIN)/python benchmark/speculation.py $(ARGS)

soak-fleet: setup  ## 1,000 random schedules of faults before a router: nothing lost, nothing wrong (some minutes)
	MARCONI_SCHEDULES=1000 $(BIN)/python -m pytest -q -s --timeout 3600 test/router/gateway/test_schedules.py $(ARGS)

bench-server-bars: setup  ## a server with this project's cache against stock on recorded traces (ARGS="TRACE...")
	$(BIN)/python benchmark/server_bars.py $(ARGS)

bench-fleet-index: setup  ## what a router's index costs at a million blocks and 64 workers
	$(BIN)/python benchmark/fleet_index.py $(ARGS)

bench-events: setup  ## what telling a router costs the scheduler's thread, and the interpreter that it shares
	$(BIN)/python benchmark/events.py $(ARGS)

bench-fleet: setup  ## rules of routing before simulated fleets, over shapes of traffic and loads (ARGS="--small")
	$(BIN)/python benchmark/fleet_shapes.py $(ARGS)

bench-fleet-servers: setup  ## rules of routing before real servers on this machine: chats under one system prompt
	$(BIN)/python benchmark/fleet_servers.py $(ARGS)

bench-fleet-traces: setup  ## rules of routing before simulated fleets on recorded traces (ARGS="FOLDER")
	$(BIN)/python benchmark/fleet.py $(ARGS)

bench-kernels: setup  ## exact checkpoints beside the prefill that they are taken from; on a CPU, the references
	$(BIN)/python benchmark/kernels $(ARGS)

bench-hit-rate: setup  ## hit rates of every policy and bound on recorded traces (ARGS="FOLDER")
	$(BIN)/python benchmark/hit_rate.py $(ARGS)

bench-host-tier: setup  ## a host tier by worth against stock's, seconds of prefill and loading (ARGS="FOLDER")
	$(BIN)/python benchmark/host_tier.py $(ARGS)

bench-memory: $(FIGURES)  ## tokens that a server computes over its memory, with and without a host tier (ARGS="TRACE... --plot FILE.png")
	$(BIN)/python benchmark/memory.py $(ARGS)

bench-split: setup  ## which division of memory suits which traffic, and what a wrong one costs (ARGS="TRACE|generate:WORKLOAD...")
	$(BIN)/python benchmark/split.py $(ARGS)

recipes: setup  ## which launch configurations are served, to docs/recipes.md (ARGS="FILE", a JSON list of them)
	$(BIN)/python benchmark/recipes.py --page docs/recipes.md $(ARGS)

lock: | $(UV)  ## compile requirements.lock anew
	$(UV) pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-annotate \
		--no-emit-package sgl-kernel-ext --all-extras --group dev --group figures \
		--custom-compile-command 'make lock' --output-file requirements.lock pyproject.toml

ledger: setup  ## write down what is changed of SGLang (UPSTREAM.md) and the signatures of what is used
	SGLANG_PLATFORM=marconi_cpu PYTHONPATH=test $(BIN)/python -m engine.ledger

clean:  ## remove what the targets made
	rm -rf $(VENV) .uv .demo .mypy_cache .ruff_cache build dist
