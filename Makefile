.DEFAULT_GOAL := help
.PHONY: help setup setup-dev quickstart tiny test test-fast test-chaos lint format type goldens bench clean

run := .venv/bin/python

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: ## create .venv with what a run needs; does nothing when it is up to date
	@tools/setup.sh core

setup-dev: ## the same with what the tests need
	@tools/setup.sh dev

quickstart: setup ## teach SmolLM2-135M-Instruct to add, on the CPU, in a few minutes
	@.venv/bin/posttrain experiment=quickstart

tiny: setup ## three steps of a random model, in seconds
	@.venv/bin/posttrain experiment=tiny

test: setup-dev ## every check: lint, types, tests
	@$(MAKE) --no-print-directory lint type
	$(run) -m pytest

test-fast: setup-dev ## without the slow tests
	$(run) -m pytest -m "not slow and not chaos"

test-chaos: setup-dev ## kill runs at twenty random points each and compare; about an hour
	$(run) -m pytest -m chaos tests/e2e/test_resume.py

lint: setup-dev ## ruff
	$(run) -m ruff check .
	$(run) -m ruff format --check .

format: setup-dev ## let ruff rewrite what it can
	$(run) -m ruff check --fix .
	$(run) -m ruff format .

type: setup-dev ## pyright
	$(run) -m pyright

goldens: setup-dev ## rewrite the resolved experiments that the tests compare with
	$(run) -m tests.config.update_goldens

bench: setup-dev ## the benchmarks, with the peer beside each figure
	$(run) benchmarks/logprob_memory.py
	$(run) benchmarks/packing.py
	$(run) benchmarks/checkpoint.py
	$(run) benchmarks/grpo_step.py

clean: ## remove run outputs and caches; keeps .venv
	rm -rf outputs multirun .pytest_cache .ruff_cache .hypothesis
