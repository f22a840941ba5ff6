# hetplan: `make demo` and `make test` do everything on a fresh machine with Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
CPU_LIMIT ?= 3

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow coverage freeze same oracle bench fuzz audit lint format schemas docs clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hetplan needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) --version). Say make PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) -m venv failed; on Debian or Ubuntu: apt install python3-venv"; exit 2; }

# The stamps hold what was installed for which version of these files.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

install: $(VENV)/.installed ## make the environment in .venv

demo: $(VENV)/.installed ## the whole loop on this machine: profile, fit, plan, train, compare
	$(BIN)/hetplan demo

# ruff and mypy run beside the tests; their output comes at the end.
define lint_beside
@trap 'kill $$lint 2>/dev/null' INT TERM; \
{ $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy; } >$(VENV)/lint.log 2>&1 & lint=$$!; \
$(1); tests=$$?; \
wait $$lint; lint=$$?; cat $(VENV)/lint.log; \
test $$tests -eq 0 && test $$lint -eq 0
endef

test: $(VENV)/.installed-dev ## lint, types and every fast test
	$(call lint_beside,$(BIN)/pytest -n $(WORKERS) --dist loadgroup -m "not slow" --cpu-limit $(CPU_LIMIT))

test-slow: $(VENV)/.installed-dev ## the slow tier: kills, emulation, schedulers, many random cases
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup -m slow

coverage: $(VENV)/.installed-dev ## branches of cost and search that their tests take
	$(BIN)/pytest -q -n $(WORKERS) --dist loadgroup -m "not slow" \
	  --cov=hetplan/cost --cov=hetplan/search --cov-branch --cov-report=term:skip-covered \
	  tests/cost tests/search tests/oracle

oracle: $(VENV)/.installed-dev ## every plan of 2,000 small jobs against the search
	$(BIN)/pytest -q -n $(WORKERS) tests/oracle/test_oracle_price.py
	$(BIN)/python tests/oracle/oracle_judge.py --workers $(WORKERS)

bench: $(VENV)/.installed ## speed of the cost model, its bounds, predictions against measured runs; REFERENCE=DIR
	$(BIN)/python -m evaluation cost $(if $(REFERENCE),--reference $(REFERENCE))
	$(BIN)/python -m evaluation accuracy $(if $(REFERENCE),--reference $(REFERENCE))

fuzz: $(VENV)/.installed-dev ## every reader and emitted form against a million broken inputs; CASES, SEED
	$(BIN)/python tests/fuzz/fuzz_run.py --cases $(or $(CASES),1000000) --seed $(or $(SEED),0)

audit: ## known vulnerabilities of constraints.txt, secrets in the files; says what it has to skip
	$(PYTHON) tests/house/audit.py

freeze: $(VENV)/.installed ## record plans, bounds, prices and emitted arguments; REFERENCE=DIR: the evaluation's tables
	$(BIN)/python tests/freeze/freeze.py record $(if $(REFERENCE),--reference $(REFERENCE))

same: $(VENV)/.installed ## compare with what `make freeze` recorded
	$(BIN)/python tests/freeze/freeze.py compare $(if $(REFERENCE),--reference $(REFERENCE))

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schemas: $(VENV)/.installed ## write configs/schemas anew from the file forms
	$(BIN)/python -m hetplan.job.schemas configs/schemas

docs: $(VENV)/.installed-dev $(VENV)/.installed-docs ## write anew what is generated in docs/, and the site into site/
	$(BIN)/python tests/house/reference_pages.py
	$(BIN)/python tests/library/notebook_cells.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the environment and caches
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-out
