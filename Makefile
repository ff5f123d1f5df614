# What one does with a checkout of bridle. `make help` lists it. Needs Python 3.11 or newer and pip, nothing else.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8080
# Empty: SmolLM2-135M-Instruct, downloaded once.
MODEL ?=
ARGS ?=
# Real models that `make test-real` pulls, once, into REAL_FOLDER.
REAL ?= smollm2 gemma3:270m qwen2.5-coder:0.5b qwen2.5-coder:1.5b minilm
REAL_FOLDER ?= build/models

VENV := .venv
PY := $(VENV)/bin/python
# Installed sets are remembered by stamp files named after what they depend on: the project file, the pinned versions
# and where this checkout lies. A changed pin installs again; an unchanged one costs nothing.
KEY := $(shell (pwd; cat pyproject.toml constraints.txt) | cksum | tr ' ' '-')
STAMP := $(VENV)/.bridle-$(KEY)
# Where PyTorch's wheels without CUDA are, which machines without an NVIDIA driver get: megabytes instead of gigabytes.
# If it does not answer within seconds, or is empty, pip's own indexes decide.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
INSTALL = $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt \
	$$($(PY) scripts/torch_index.py '$(TORCH_INDEX)')
# An environment that came from elsewhere may lack pip.
NEED_PIP := $(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null 2>&1 || \
	$(PYTHON) -m pip --python $(PY) install --quiet pip

# Tests compute on one thread each, so that a busy machine changes their time and not their outcome. JOBS is the number
# of worker processes: four on two cores, because tests also wait. A worker without tests takes over half of another's.
JOBS ?= 4
export TOKENIZERS_PARALLELISM = false
PYTEST = $(PY) -m pytest -q -n $(JOBS) --dist worksteal --max-worker-restart 0
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help serve chat test test-all test-real check bench bench-all controllers kernels web docs install clean

help: ## list these targets
	@echo "make TARGET, where TARGET is one of:"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14
	@echo "Settings: MODEL=$(MODEL) HOST=$(HOST) PORT=$(PORT) PYTHON=$(PYTHON) JOBS=$(JOBS) ARGS='more flags'"
	@echo "  TORCH_INDEX=$(TORCH_INDEX) (PyTorch for machines without an NVIDIA driver)"

serve: $(STAMP)-core ## serve SmolLM2-135M-Instruct (or MODEL=...) on port 8080 (or PORT=...)
	@$(PY) -m bridle serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

chat: $(STAMP)-core ## talk to SmolLM2-135M-Instruct (or MODEL=...) in the terminal
	@$(PY) -m bridle chat $(MODEL) $(ARGS)

test: $(STAMP)-test ## run the tests that every change must pass (minutes)
	$(TEST_ENV) $(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: $(STAMP)-all ## run everything, with full example counts
	$(TEST_ENV) BRIDLE_FULL=1 $(PYTEST) $(ARGS)

# One process: two large models at once need more memory than many machines have.
test-real: $(STAMP)-real ## compare real models with transformers and llama.cpp (downloads 2 GB; REAL="smollm2 minilm" less)
	@for name in $(REAL); do BRIDLE_MODELS=$(REAL_FOLDER) $(PY) -m bridle pull $$name || exit 1; done
	$(TEST_ENV) BRIDLE_REAL_MODELS=$(REAL_FOLDER) $(PY) -m pytest -q tests/real $(ARGS)

check: $(STAMP)-dev ## format, lint, strict types, import rule, forbidden calls
	@VENV=$(VENV) scripts/check

bench: $(STAMP)-core ## run the engine benchmark (ARGS=--quick for a short one)
	@$(PY) -m bridle bench engine $(ARGS)

bench-all: $(STAMP)-dev ## run every benchmark, those of dev/ too (hours; ARGS=--quick for a short one)
	@for name in `$(PY) -m bridle bench | cut -d' ' -f1`; do \
		echo "== $$name"; $(PY) -m bridle bench $$name $(ARGS) || exit 1; done

controllers: $(STAMP)-controllers ## rebuild the standard controllers and compare (ARGS=--write ships them)
	@$(PY) -m dev.controllers.rebuild $(ARGS)

kernels: $(STAMP)-controllers ## compile the CPU kernels and compare (ARGS=--write ships them)
	@$(PY) -m dev.cpu_kernels.rebuild $(ARGS)

# Without scripts of packages: what is fetched is what the lock file has the hashes of, and none of it runs on installing.
web: ## build the playground from web/ (needs Node; ARGS=--check compares)
	@cd web && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && node build.mjs $(ARGS)

# A word of the theme's makers about their next program is left out. The site needs no network, but a server of files:
# its search runs in a worker, which browsers do not start from a disk.
docs: $(STAMP)-docs ## build the documentation as a site, in build/docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)
	@echo "Built. To read it: $(PY) -m http.server --bind 127.0.0.1 --directory build/docs"

install: $(STAMP)-core ## install bridle into .venv

clean: ## remove caches and the virtual environment
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find bridle dev tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Without the venv module's bundled pip (some systems split it off), the pip that is there installs one.
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "bridle needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`." \
			"Name another one: make PYTHON=python3.12" >&2; exit 2; }
	@echo "Creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || \
		{ rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
			$(PYTHON) -m pip --python $(PY) install --quiet pip; } || \
		{ rm -rf $(VENV); echo "$(PYTHON) cannot create a virtual environment: install its venv module" \
			"(Debian and Ubuntu: apt install python3-venv)." >&2; exit 2; }

$(STAMP)-core: | $(PY)
	@echo "Installing bridle into $(VENV) (minutes the first time) ..."
	@$(NEED_PIP)
	@$(INSTALL) -e '.[aici,cluster]'
	@touch $@

$(STAMP)-controllers: | $(PY)
	@echo "Installing bridle and the tool chains of its controllers into $(VENV) (minutes the first time) ..."
	@$(NEED_PIP)
	@$(INSTALL) -e '.[aici,controllers]'
	@touch $@ $(STAMP)-core

$(STAMP)-docs: | $(PY)
	@echo "Installing bridle and what its documentation is built with into $(VENV) (minutes the first time) ..."
	@$(NEED_PIP)
	@$(INSTALL) -e '.[docs]'
	@touch $@

$(STAMP)-test: | $(PY)
	@echo "Installing bridle and what its tests need into $(VENV) (minutes the first time) ..."
	@$(NEED_PIP)
	@$(INSTALL) -e '.[test]'
	@touch $@ $(STAMP)-core

# Triton is 200 MB to fetch: for those alone who run everything.
$(STAMP)-all: | $(PY)
	@echo "Installing bridle and what all of its tests need into $(VENV) (minutes the first time) ..."
	@$(NEED_PIP)
	@$(INSTALL) -e '.[test,bench,fused,browser,docs,notebook]'
	@touch $@ $(STAMP)-test $(STAMP)-core

$(STAMP)-real: | $(PY)
	@echo "Installing bridle, its tests and llama.cpp, which is compiled, into $(VENV) (minutes the first time) ..."
	@$(NEED_PIP)
	@$(INSTALL) -e '.[test,llamacpp]'
	@touch $@ $(STAMP)-test $(STAMP)-core

$(STAMP)-dev: | $(PY)
	@echo "Installing bridle and its development tools into $(VENV) (minutes the first time) ..."
	@$(NEED_PIP)
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(STAMP)-test $(STAMP)-core
