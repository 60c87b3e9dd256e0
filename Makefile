# make serve    make the virtual environment, install, serve the built-in model
# make test     the same, and run the tests
# Flags go in ARGS:  make serve ARGS="--port 8123"

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: serve test lint fmt clients

serve: $(STAMP)
	@$(BIN)/python -m gateway serve $(ARGS) || test $$? -eq 130

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Clients of other people that the tests run; they want an environment of their own.
CLIENTS ?= .venv-clients
clients: $(CLIENTS)/.installed

$(CLIENTS)/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -r $<
	touch $@

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m engine.worker.cpu
	touch $@
