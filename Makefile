PYTHON ?= python3
TORCH := torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed
HALF := .venv/.installing

# An environment that is absent or does not start is made anew, whatever its stamp says.
ifneq ($(shell $(BIN)/python -c "print(1)" 2>/dev/null),1)
.PHONY: $(STAMP)
endif

.PHONY: help install demo ui test test-all lint format clean
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## install everything into .venv; again only when the requirements changed

# Python compiles what is used when it is first used: a third of the time that installing takes.
# The mark is there from before the first package until after the last: a cut-short install shows.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing into .venv; this takes a few minutes, once"
	@test ! -e $(HALF) && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@rm -f $@ && touch $(HALF)
	@$(BIN)/python -m pip install --quiet --no-compile $(TORCH) -e '.[dev]' -c constraints.txt
	@mv $(HALF) $@

demo: install ## teach the shipped small base a style on a CPU, in minutes; ends with a picture
	@$(BIN)/python -m stages.sample +experiment=flat_style

ui: install ## show the record of all runs in a browser; the first use installs MLflow's pages
	@$(BIN)/python -c "import flask" 2>/dev/null || $(BIN)/python -m pip install --quiet -e '.[ui]' -c constraints.txt
	@MLFLOW_DISABLE_TELEMETRY=true $(BIN)/mlflow ui --host 127.0.0.1 --backend-store-uri sqlite:///mlflow.db

test: lint ## format, lint, contracts, types, tests
	@$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not nightly"

test-all: lint ## the same with the tests marked nightly, mostly longer variants: half an hour
	@$(BIN)/python -m pytest -q -n auto --dist worksteal

lint: install ## everything that `make test` checks without running the code
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted; run make format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/codespell
	@$(BIN)/lint-imports
	@$(BIN)/pyright

format: install ## format and sort imports
	@$(BIN)/ruff check --quiet --select I --fix . && $(BIN)/ruff format --quiet .

clean: ## remove caches and build outputs; store/, outputs/ and .venv stay
	@rm -rf build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find lib stages tests examples -name __pycache__ -prune -exec rm -rf {} +
