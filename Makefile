# Everything runs in $(VENV), which each target sets up when it is not there or the lock has changed.
# The agents of examples and tests have an environment of their own, $(AGENTS), as agents do.
# What may be said: PYTHON=python3.12  VENV=.venv  WORKERS=3  ARGS="-k name" (for the tests)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV ?= .venv
AGENTS ?= .agents
# One more than the cores of a small machine: tests wait for processes more than they compute.
WORKERS ?= 3
ARGS ?=
LOCK_FLAGS ?=

FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(FITS)' 2>/dev/null && { echo "$$p"; break; }; done)
endif
SERIES := $(if $(PYTHON),$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null))

PY := $(VENV)/bin/python
# The series is in the name, so that another PYTHON makes the environment anew.
READY := $(VENV)/.ready-$(SERIES)
AGENTS_READY := $(AGENTS)/.ready-$(SERIES)
SDKS_READY := $(AGENTS)/.sdks-$(SERIES)
NODE_READY := tests/sdk/node/node_modules/.package-lock.json

.PHONY: help demo agents test check check-all proof-nemesis proof-chaos bench format lock

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## kill an agent and its sidecar at the worst moment, and see nothing happen twice
	@$(PY) -m sandbox.demo

agents: $(READY) $(AGENTS_READY) ## set up what the example agents are written with (docs/models.md)

test: $(READY) $(AGENTS_READY) ## the tests (but those that take minutes)
	$(PY) -m pytest -n $(WORKERS) $(ARGS)

check: $(READY) ## style, types, import contracts
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(PY) tests/canary/watch.py
	$(VENV)/bin/lint-imports --no-logo

check-all: check $(SDKS_READY) $(NODE_READY) ## check, and every test there is, however long it takes
	$(PY) -m pytest -n $(WORKERS) --tier all $(ARGS)

proof-nemesis: $(READY) ## ten minutes of killing everything; what came of it goes to bench/NEMESIS.txt
	@$(PY) -m bench.nemesis --seconds 600 --runs 4 --out bench/NEMESIS.txt

proof-chaos: $(READY) ## 200 refunds while workers, agents and sidecars are killed; what came of it goes to bench/CHAOS.txt
	@$(PY) -m bench.chaos --out bench/CHAOS.txt

bench: $(READY) ## measure; the figures go to bench/RESULTS.md
	@$(PY) -m bench

format: $(READY) ## put the code into the house style
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

lock: ## renew the lock files after a change of pyproject.toml (LOCK_FLAGS=--upgrade: newest releases)
	@[ -x build/lock/bin/uv ] || { $(PYTHON) -m venv build/lock && build/lock/bin/python -m pip install --quiet uv; }
	build/lock/bin/uv pip compile pyproject.toml --universal --generate-hashes --no-header --quiet $(LOCK_FLAGS) \
		--output-file requirements.lock
	build/lock/bin/uv pip compile pyproject.toml --group dev --group build --constraints requirements.lock \
		--universal --generate-hashes --no-header --quiet $(LOCK_FLAGS) --output-file requirements-dev.lock
	build/lock/bin/uv pip compile --group sdks \
		--universal --python-version 3.11 --generate-hashes --no-header --quiet $(LOCK_FLAGS) --output-file requirements-sdks.lock
	build/lock/bin/uv pip compile --group agents --constraints requirements-sdks.lock \
		--universal --python-version 3.11 --generate-hashes --no-header --quiet $(LOCK_FLAGS) --output-file requirements-agents.lock

# $(call environment,FOLDER,SERIES): a virtual environment of that Python, made anew where it is of another one.
environment = "$(PYTHON)" -c '$(FITS)' 2>/dev/null || { \
		echo "twiceshy needs Python 3.11, 3.12 or 3.13$(if $(PYTHON), and $(PYTHON) is none); name one: make PYTHON=python3.12 …" >&2; exit 2; }; \
	"$(1)/bin/python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(2)")' 2>/dev/null || { \
		echo "setting up $(1) with Python $(2)"; "$(PYTHON)" -m venv --clear "$(1)"; }
# $(call install,FOLDER,LOCK)
install = echo "installing what $(2) names into $(1)"; \
	"$(1)/bin/python" -m pip install --quiet --disable-pip-version-check --use-pep517 --require-hashes -r $(2)

$(VENV)/.ready-%: requirements-dev.lock pyproject.toml
	@$(call environment,$(VENV),$*)
	@$(call install,$(VENV),requirements-dev.lock)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(AGENTS)/.ready-%: requirements-agents.lock
	@$(call environment,$(AGENTS),$*)
	@$(call install,$(AGENTS),requirements-agents.lock)
	@touch $@

$(AGENTS)/.sdks-%: $(AGENTS)/.ready-% requirements-sdks.lock
	@$(call install,$(AGENTS),requirements-sdks.lock)
	@touch $@

# Without npm the tests of Node's clients are skipped, and say so.
$(NODE_READY): tests/sdk/node/package-lock.json
	@if command -v npm > /dev/null; then echo "installing what $< names"; npm ci --prefix $(<D) --no-audit --no-fund --silent; \
		else echo "npm is not here: the Node clients will be skipped"; fi
