# make demo | test | lint | docs | replications | clean
#
# Each target makes its own virtual environment in $(VENV), installs what it needs (again only when
# pyproject.toml changed), and runs. Nothing is installed outside $(VENV).

PYTHON ?= python3
VENV ?= .venv
PYTEST_JOBS ?= 2
# A test module stays on one worker, so that what it compiles is compiled once.  PyTensor does not
# record where each variable was made, which would take a fifth of the time.
PYTEST_MARKS ?= not slow and not exhaustive
PYTEST_TESTS ?=
PYTEST_ARGS ?= -n $(PYTEST_JOBS) --dist loadfile --timeout 900 -m "$(PYTEST_MARKS)" $(PYTEST_TESTS)
# What tests compile is kept here; by default in a folder that is empty and goes with the tests.
TEST_CACHE ?=
export TEST_CACHE

# Notebooks of the documentation draw as much as they should, or just enough to run ("reduced").
DOCS_DRAWS ?= full

# Private steps compile with Numba. An empty cxx keeps PyTensor 2 from calling (or from missing) a
# C++ compiler for the small functions around them, so that results do not depend on having one.
PYTENSOR_FLAGS ?= cxx=
export PYTENSOR_FLAGS
# One thread per test worker and chain: they are the parallel unit.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

VENV_PYTHON := $(VENV)/bin/python
PIP_INSTALL := $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --no-input

.PHONY: help demo test lint docs replications clean

help:
	@echo "make demo    run the quickstart on real data; results go to quickstart_output/"
	@echo "make test    run the tests that are not marked slow"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the documentation, with its notebooks run, in docs/_build/html"
	@echo "make replications    the papers' tables with few repeats, a few minutes each"
	@echo "make clean   remove the virtual environment and caches"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) DOCS_DRAWS=$(DOCS_DRAWS) PYTEST_ARGS='...'"

demo: $(VENV)/.installed-demo
	$(VENV_PYTHON) examples/quickstart.py

test: $(VENV)/.installed-test
	[ -n "$$TEST_CACHE" ] || { TEST_CACHE=$$(mktemp -d) && trap 'rm -rf "$$TEST_CACHE"' EXIT; } && \
	NUMBA_CACHE_DIR="$$TEST_CACHE/numba" \
	PYTENSOR_FLAGS="$$PYTENSOR_FLAGS,traceback__limit=0,base_compiledir=$$TEST_CACHE/pytensor" \
	$(VENV_PYTHON) -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

# Warnings are errors, unknown references and links that lead nowhere included.
docs: $(VENV)/.installed-docs
	PYMC_DP_DOCS_DRAWS=$(DOCS_DRAWS) $(VENV_PYTHON) -m sphinx -n -W --keep-going -q docs docs/_build/html
	$(VENV_PYTHON) docs/check_links.py docs/_build/html

PAPERS := $(basename $(notdir $(wildcard replications/results/*.json)))
replications: $(VENV)/.installed-test
	for paper in $(PAPERS); do \
	    timeout 600 $(VENV_PYTHON) -m replications $$paper --quick || exit; \
	done

$(VENV)/.installed-demo: EXTRAS = examples
$(VENV)/.installed-test: EXTRAS = test,accounting,distributed,owners
$(VENV)/.installed-lint: EXTRAS = lint
$(VENV)/.installed-docs: EXTRAS = docs,accounting,owners

$(VENV)/.installed-%: pyproject.toml $(VENV)/.created
	@echo "Installing pymc_dp[$(EXTRAS)] into $(VENV) (minutes the first time)"
	@$(PIP_INSTALL) --editable ".[$(EXTRAS)]"
	@touch $@

# The stamp is written last: an interrupted creation starts afresh.
$(VENV)/.created:
	@PYTHON="$(PYTHON)" sh .ci/check-python
	@echo "Creating $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv --clear "$(VENV)"
	@touch $@

clean:
	rm -rf "$(VENV)" build dist docs/_build docs/api/generated .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path './.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
