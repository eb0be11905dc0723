# Everything lives in the checkout: .venv, node_modules, .demo. Safe to run twice.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint chaos test-nvrx bench-recovery bench-gpu image image-test synth cost ami preflight clean

PYTHON ?= python3
PROFILE ?= p5
NVRX ?= 0.7.0
NVRX_TESTS ?= $(addprefix tests/payload/test_,recovery.py in_process.py in_job.py launcher.py checkpoint.py memory.py memory_runs.py runs.py)
GPUS ?= 1
VARIANT ?= cpu
PY := .venv/bin/python

export JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION := 20
export CDK_DISABLE_CLI_TELEMETRY := true

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: .venv/.ready ## Python and Node dependencies, inside the checkout

.venv/.ready: requirements.txt package.json .ci/setup
	@PYTHON="$(PYTHON)" bash .ci/setup

demo: setup ## train, break, recover, report: every arm on this machine
	@$(PY) -m payload demo

test: setup ## lint, types and all tests
	@$(MAKE) --no-print-directory lint
	@$(PY) -m pytest -q -m "not chaos"

lint: setup ## ruff and strict mypy
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check -q .
	@.venv/bin/mypy

chaos: setup ## long fault schedules (about half an hour)
	@$(PY) -m pytest -q -m chaos

test-nvrx: setup ## the recovery and checkpoint tests on another NVRx: make test-nvrx NVRX=0.7.0
	@PYTHONPATH="$$($(PY) -m tests.nvrx $(NVRX))" $(PY) -m pytest -q -m "not chaos" $(NVRX_TESTS)

bench-recovery: setup ## recoveries, saves and the disk on this machine (CPU): RESULTS=file
	@$(PY) -m payload bench recovery --out $(or $(RESULTS),.demo/bench-recovery.json)
	@$(PY) -m payload bench-table $(or $(RESULTS),.demo/bench-recovery.json)

bench-gpu: setup ## the same with NCCL on GPUS=n GPUs of this machine, and the article's schedule
	@$(PY) -m payload bench recovery --profile bench-gpu --ranks_per_node $(GPUS) --set training.global_batch_size=$$((4 * $(GPUS))) --out .demo/bench-gpu.json
	@$(PY) -m payload bench article --profile bench-gpu --ranks_per_node $(GPUS) --set training.global_batch_size=$$((4 * $(GPUS))) --out .demo/bench-gpu-article.json
	@$(PY) -m payload bench-table .demo/bench-gpu.json
	@$(PY) -m payload bench-table .demo/bench-gpu-article.json

image: setup ## the image, by docker, podman or buildah, whichever is there: VARIANT=cpu|deploy|reproduce
	@$(PY) docker/build.py --variant $(VARIANT)

image-test: setup ## builds the CPU image without an engine and trains inside it, one fault included (needs root, buildah, debootstrap)
	@$(PY) -m tests.image.run

synth: setup ## templates of every profile, with the time of each
	@$(PY) -m stacks.synth_all

cost: setup ## hourly cost by part, and an upper bound for the run: make cost PROFILE=p5
	@$(PY) -m stacks.cost --profile $(PROFILE)

ami: setup ## the newest node image beside the pinned one: make ami PROFILE=p5
	@$(PY) -m stacks.ami --profile $(PROFILE)

preflight: setup ## quotas, zones, reservations, limits, with your credentials
	@$(PY) -m stacks.preflight --profile $(PROFILE)

clean: ## removes what set-up and runs left in the checkout
	rm -rf .venv node_modules .demo .image .nvrx cdk.out .mypy_cache .ruff_cache .pytest_cache
