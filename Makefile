SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first interpreter that runs and is new enough; override with `make PYTHON=... install`.
PYTHON ?= $(shell for candidate in python3 python3.13 python3.12 python3.11; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$candidate; break; }; done)
VENV := .venv
STAMP := $(VENV)/.installed
# Targets that install nothing run with the environment where there is one, else with the machine's own Python.
RUN = $(if $(wildcard $(STAMP)),$(VENV)/bin/python,python3)

.PHONY: help install demo test lint test-gpu bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(STAMP) ## Create .venv with everything (only Python 3.11+ is needed)

$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.11 or later found; install one or set PYTHON=/path/to/python3" >&2; exit 1; }
	[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install ## Spectrum of the embedded model on the shipped text, into runs/demo (under 3 minutes)
	@# Passive: on a busy machine threads that spin while they wait make a product several times slower.
	OMP_WAIT_POLICY=passive $(VENV)/bin/flashbob-curv spectrum --out runs/demo
	@echo
	@echo "The plot:   $(CURDIR)/runs/demo/spectrum.png"
	@echo "The report: $(CURDIR)/runs/demo/report.html"

test: lint ## Install what is missing, lint, run the tests (under 15 minutes on 2 cores)
	$(VENV)/bin/python -m pytest -n 2 --timeout=900 --durations=10

lint: install ## ruff check, ruff format --check, mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test-gpu: ## The tests marked gpu, from the tree, installing nothing
	python3 -m pytest -m gpu

bench: ## Attention and model benchmarks sized for this machine, into runs/bench (small ones on a CPU)
	$(RUN) -m cli bench attention --out runs/bench/attention.json
	$(RUN) -m cli bench model --out runs/bench/model.json --budget-seconds 240

clean: ## Remove .venv, caches and build products (keeps runs/)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
