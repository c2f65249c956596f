# Every target does its own set-up: it needs only make, git and a Python from 3.10 to 3.13.
# Another interpreter: make test PYTHON=/path/to/python3

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup quickstart test test-slow test-real test-lowest test-newest benchmark docs lint format clean

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTEST := $(VENV_PYTHON) -m pytest -q
# Neighbours stay together, because tests of a file share what is expensive to build.
PARALLEL := -n auto --maxprocesses 4 --dist worksteal
# What `make test-lowest` and `make test-newest` run; doctests show one version's way of printing.
TESTS := tests
RESOLUTION_lowest := lowest-direct
RESOLUTION_newest := highest
SOURCES := he_keras he_keras_cli.py tools configs tests setup.py
# A Python of a supported version that can create a virtual environment.
USABLE := import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3.10 python3 python; do \
	if $$candidate -c "$(USABLE)" 2>/dev/null; then command -v $$candidate; break; fi; done)

export TF_CPP_MIN_LOG_LEVEL ?= 3

help:
	@echo "make quickstart  trains, attacks and exports a small model; report in runs/quickstart/"
	@echo "make test        the fast tests and the examples in the docstrings"
	@echo "make test-slow   the slow tests, tens of minutes on two cores"
	@echo "make test-real   prepares CIFAR-10, MNIST and Fashion-MNIST, and runs the tests on them"
	@echo "make test-lowest the fast tests with the lowest versions that setup.py allows"
	@echo "make test-newest the fast tests with the newest versions; TESTS=FILES: some of them"
	@echo "make benchmark   speeds of training and the stored ones, as runs/benchmark.json"
	@echo "make docs        the documentation as a site, in site/; ends with an error for a broken link"
	@echo "make lint        format, lint and type checks;  make format  repairs what it can"
	@echo "make clean       removes the virtual environment and the caches"

setup: $(STAMP)

$(VENV_PYTHON):
	@"$(PYTHON)" -c "$(USABLE)" 2>/dev/null || { echo "make: no usable Python: install Python 3.10 to 3.13 with its venv module (Debian, Ubuntu: apt install python3-venv), or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Creating $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv $(VENV)

$(STAMP): setup.py constraints.txt | $(VENV_PYTHON)
	@echo "Installing he_keras and its dependencies into $(VENV): a few minutes, once"
	@$(VENV_PYTHON) -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

quickstart: $(STAMP)
	@$(VENV_PYTHON) tools/quickstart.py

test: $(STAMP)
	$(PYTEST) $(PARALLEL) --doctest-modules tests he_keras

# In two runs: the workers of a single one would need all memory of a machine with 24 GB.
test-slow: $(STAMP)
	$(PYTEST) $(PARALLEL) -m slow tests/attacks tests/cpu
	$(PYTEST) $(PARALLEL) -m slow --ignore=tests/attacks --ignore=tests/cpu tests

test-real: export TFDS_DATA_DIR := $(or $(TFDS_DATA_DIR),$(CURDIR)/.tfds)
test-real: $(STAMP)
	$(VENV_PYTHON) tests/prepare_real_data.py --data_dir="$$TFDS_DATA_DIR"
	$(PYTEST) -m real_data tests

.venv-%/.installed: setup.py
	@"$(PYTHON)" -c "$(USABLE)"
	@echo "Installing the $* versions of all dependencies into .venv-$*: a few minutes, once"
	@"$(PYTHON)" -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install -qq --disable-pip-version-check uv
	@.venv-$*/bin/uv pip install -q --python .venv-$*/bin/python --resolution $(RESOLUTION_$*) -e ".[dev]"
	@touch $@

test-lowest test-newest: test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest -q $(PARALLEL) $(TESTS)

benchmark: $(STAMP)
	@mkdir -p runs
	$(VENV_PYTHON) tools/benchmark.py guard --tools=torch:channels-last --rounds=2 --output=runs/benchmark.json

# Beside the development tools, because the reference is read from the imported package.
$(VENV)/.docs: setup.py constraints.txt | $(STAMP)
	@echo "Installing MkDocs into $(VENV): half a minute, once"
	@$(VENV_PYTHON) -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev,docs]"
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --quiet --strict

lint: $(STAMP)
	$(VENV_PYTHON) -m ruff format --check $(SOURCES)
	$(VENV_PYTHON) -m ruff check $(SOURCES)
	$(VENV_PYTHON) -m mypy

format: $(STAMP)
	$(VENV_PYTHON) -m ruff format $(SOURCES)
	$(VENV_PYTHON) -m ruff check --fix $(SOURCES)

clean:
	rm -rf $(VENV) .venv-* build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find he_keras tools configs tests -type d -name __pycache__ -prune -exec rm -rf {} +
