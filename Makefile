# ds4-server: everything a contributor or a first-time user types. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The first interpreter that is new enough and can make environments.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# Flags for `make run`, and arguments for `make test`: make run ARGS="--port 9090 --front-ends 2"
ARGS ?=

.PHONY: help run test check lint model clients requirements settings clean audit chaos soak overload

help: ## show this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 22

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.11 or newer with venv is needed; on Debian and Ubuntu: apt-get install python3 python3-venv" >&2; exit 1; fi
	@echo "== environment: $(PYTHON) -m venv $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt pyproject.toml ds4/__init__.py | $(BIN)/python
	@echo "== install: ds4-server[cpu] with hash-pinned requirements into $(VENV)"
	@$(PIP) install --quiet --require-hashes -r requirements.txt
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable '.[cpu]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	@echo "== install: the development tools into $(VENV)"
	@$(PIP) install --quiet --require-hashes -r requirements-dev.txt
	@touch $@

model: $(VENV)/.installed ## fetch the embedded default model into the user's cache
	@echo "== model: smollm2-135m"
	@$(BIN)/python -c "from ds4.models import resolve_model; print(resolve_model('smollm2-135m', progress=True))"

run: $(VENV)/.installed ## install and serve the embedded model on 127.0.0.1:8080
	@echo "== serve: $(BIN)/ds4-server $(ARGS)"
	@exec $(BIN)/ds4-server $(ARGS)

test: $(VENV)/.installed-dev model ## install and run the tests
	@echo "== test: $(BIN)/python -m pytest -n 2 $(ARGS)"
	@$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(VENV)/.installed-dev ## formatting, lint, types, import contracts
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== mypy --strict"
	@$(BIN)/mypy
	@echo "== lint-imports"
	@$(BIN)/lint-imports --no-cache

check: lint audit model ## all that CI runs: lint, then the tests with coverage floors
	@echo "== test: pytest -n 2 with coverage"
	@rm -f .coverage .coverage.*
	@$(BIN)/python -m pytest -n 2 --cov=ds4.ring --cov=workers.scheduler --cov-branch --cov-report= $(ARGS)
	@echo "== coverage floors"
	@$(BIN)/coverage report --include='ds4/ring/*' --fail-under=92
	@$(BIN)/coverage report --include='workers/scheduler/*' --fail-under=95

# The tool that wrote these files is uv; its --universal makes one file for every Python and processor.
COMPILE := uv pip compile --universal --generate-hashes --no-emit-index-url --no-header --no-annotate \
	--python-version 3.11 --quiet pyproject.toml requirements-build.in --extra cpu
# package-lock.json is npm's: npm update --omit-lockfile-registry-resolved writes it without hosts.
requirements: ## write the hash-pinned requirements again (needs uv)
	$(COMPILE) --upgrade -o requirements.txt
	$(COMPILE) --upgrade --group dev -c requirements.txt -o requirements-dev.txt
	$(subst pyproject.toml requirements-build.in --extra cpu,$(CLIENT_TESTS)/requirements.in,$(COMPILE)) \
		--upgrade -o $(CLIENT_TESTS)/requirements.txt

settings: $(VENV)/.installed ## write the README's table and the env example from the settings table
	@$(BIN)/ds4-server config --env > configs/env/ds4-server.env.example
	@$(BIN)/ds4-server config --markdown > README.md.table
	@sed -i -e '/<!-- settings: begin -->/r README.md.table' -e '/<!-- settings: begin -->/,/<!-- settings: end -->/{/<!-- settings/!d}' README.md
	@rm README.md.table

audit: $(VENV)/.installed-dev ## list every installed version; fail where one is not the pinned one
	@echo "== audit: installed against requirements-dev.txt"
	@$(BIN)/python .ci/audit.py requirements-dev.txt

CLIENT_TESTS := tests/e2e/clients
CLIENTS ?= .clients
clients: ## install litellm, LangChain and npm's clients for DS4_TEST_CLIENTS=.clients make test
	@echo "== install: the clients into $(CLIENTS)"
	@mkdir -p $(CLIENTS)
	@cp $(CLIENT_TESTS)/package.json $(CLIENT_TESTS)/package-lock.json $(CLIENTS)
	@$(PYTHON) -m venv $(CLIENTS)/venv
	@$(CLIENTS)/venv/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
		--require-hashes -r $(CLIENT_TESTS)/requirements.txt
	@npm ci --prefix $(CLIENTS) --no-audit --no-fund --loglevel=error

chaos: $(VENV)/.installed-dev ## random blows to a real server under checked streams: make chaos ARGS="--seconds 600"
	@$(BIN)/python -m tests.stress.chaos $(ARGS)

overload: $(VENV)/.installed-dev ## ten times more clients than slots, with slow, idle and dribbling ones
	@$(BIN)/python -m tests.stress.overload $(ARGS)

soak: $(VENV)/.installed-dev ## 100,000 short requests with flat memory
	@$(BIN)/python -m tests.stress.soak $(ARGS)

clean: ## remove the environment and what the tools left
	rm -rf $(VENV) .clients .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* dist build
