# Everything a newcomer needs. Only relative paths below, so that a checkout in a path with spaces works.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN = .venv/bin/python -m
INSTALLED = .venv/.installed

.PHONY: demo test test-fast lint bench install clean

demo: $(INSTALLED)  ## set up, run the whole loop, see the model learn
	$(RUN) recipes.arithmetic.demo

test: lint  ## set up, check style, types and floors, run every test
	$(RUN) pytest

test-fast: $(INSTALLED)  ## under two minutes: no Ray, and one shared record-only service
	$(RUN) pytest -m "not slow and not gpu"

lint: $(INSTALLED)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	.venv/bin/lint-imports

bench: $(INSTALLED)  ## every figure in docs/performance.md, each beside its reference
	$(RUN) benchmarks

install: $(INSTALLED)

$(INSTALLED): pyproject.toml harness/pyproject.toml constraints.txt
	"$(PYTHON)" -c 'import sys; sys.exit("Reef needs Python 3.11 or 3.12, found " + sys.version) if sys.version_info[:2] not in ((3, 11), (3, 12)) else None'
	"$(PYTHON)" -m venv .venv
	$(RUN) pip install --quiet --constraint constraints.txt --editable './harness[plot]' --editable '.[dev,wandb]'
	touch $(INSTALLED)

clean:  ## remove what was set up and what was made
	rm -rf .venv work build *.egg-info harness/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
