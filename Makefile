# make serve      install what serving needs, then serve the built-in model
# make test       the tests of the product (ARGS="--cpu-report FILE" prints what they take)
# make test-rest  the other tests: fault injection, examples, other projects' clients and fuzzing
# make test-triton  the kernels with an older Triton
# make test-all   all tests
# make dist       build a wheel into dist/; pip install dist/*.whl is all that serving needs
# make lint       format, style, types, import contracts
#
# Flags go in ARGS:                  make serve ARGS="--port 8123"
# An index of PyTorch's CPU builds:  make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu
# (used by itself where there is no NVIDIA driver; TORCH_INDEX=none takes what pip finds)

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BIN := $(VENV)/bin
SERVING := $(VENV)/.serving
DEVELOPMENT := $(VENV)/.development
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal
# Without the plugins that only other tests use: each process would import them for two seconds.
FEW_PLUGINS := PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
	PYTEST_PLUGINS=xdist.plugin,pytest_asyncio.plugin,_hypothesis_pytestplugin

.PHONY: serve test test-rest test-triton test-all dist lint fmt clients flashinfer

serve: $(SERVING)
	@$(BIN)/podway serve $(ARGS) || test $$? -eq 130

test: $(DEVELOPMENT)
	$(FEW_PLUGINS) $(PYTEST) --tiers none $(ARGS)

test-rest: $(DEVELOPMENT)
	$(PYTEST) --tiers only $(ARGS)

test-all: $(DEVELOPMENT)
	$(PYTEST) $(ARGS)

# The kernels with the Triton of common GPU images, whose interpreter needs an older NumPy.
OLD_TRITON := .venv-triton
test-triton: $(OLD_TRITON)/.installed
	PYTHONPATH=$(OLD_TRITON) $(FEW_PLUGINS) $(PYTEST) --tiers none \
		-W "ignore:Conversion of an array:DeprecationWarning" \
		tests/engine/worker/cuda/kernels tests/engine/worker/cuda/model $(ARGS)

$(OLD_TRITON)/.installed: $(DEVELOPMENT)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $(OLD_TRITON) \
		"triton==3.6.*" "numpy<2.4"
	touch $@

dist: $(SERVING)
	rm -rf dist build
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

lint: $(DEVELOPMENT)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(DEVELOPMENT)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# LiteLLM, LlamaIndex and gradio pin packages that ours do not fit: an environment of their own.
# Beside them: aider, which pins all that it needs; two older versions of openai alone, for Python of the tests; and, if
# there is npm, the agents of tests/clients/package.json.
CLIENTS ?= .venv-clients
clients: $(CLIENTS)/.installed

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/aider.txt tests/clients/package.json
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -r $<
	$(PYTHON) -m venv $(CLIENTS)/aider
	$(CLIENTS)/aider/bin/python -m pip install --disable-pip-version-check -r tests/clients/aider.txt
	for major in 1 2; do $(CLIENTS)/bin/python -m pip install --disable-pip-version-check --no-deps \
		--upgrade --target $(CLIENTS)/openai-$$major "openai==$$major.*" sniffio || exit 1; done
	cp tests/clients/package.json $(CLIENTS)
	if command -v npm > /dev/null; then npm install --prefix $(CLIENTS) --no-audit --no-fund; fi
	touch $@

# FlashInfer's Python alone: tests run its wrappers on CPU tensors, with the compiled part replaced.
flashinfer: $(DEVELOPMENT)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r tests/adapters/attention/requirements.txt

$(SERVING): pyproject.toml .ci/constraints.txt gateway/install.py
	@echo "Podway is installed into $(VENV); this happens once."
	@$(PYTHON) -m venv $(VENV)
	@TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python gateway/install.py
	@$(BIN)/python -m engine.worker.cpu
	@touch $@

$(DEVELOPMENT): $(SERVING)
	@echo "The tools for development are installed into $(VENV)."
	@TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python gateway/install.py dev
	@$(BIN)/python -m engine.worker.cpu --in-process
	@touch $@
