# make demo    set up .venv, compare eviction methods with the built-in model in seconds, write tables and a page
# make install    set up .venv with all that tasks and tests need; then '. .venv/bin/activate'
# make test    set up .venv, then formatting, types and tests
# make gate    compare the built-in model's answers with results/baselines/ci.json (docs/ci.md)
# make gpu-check    on a GPU machine: tests that need the GPU, then decoding speeds; writes results/speed/GPU.md (docs/speed.md)
#
# PYTHON picks the interpreter (3.11 or newer), PIP_ARGS is handed to pip, for example to name an index with CPU builds of torch.

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check $(if $(CI),-qq) $(PIP_ARGS) -c constraints/cpu.txt
NEEDED := .venv/.needed
INSTALLED := .venv/.installed

.PHONY: help demo test gate gpu-check install clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -7

install: $(INSTALLED)

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; give PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

$(NEEDED): pyproject.toml constraints/cpu.txt | .venv/bin/python
	@echo "installing kvbench and the libraries that it needs (torch is the largest) into .venv; the first time takes minutes"
	@$(PIP) -e '.[report]'
	@touch $@

$(INSTALLED): pyproject.toml constraints/cpu.txt | .venv/bin/python
	@echo "installing kvbench, its libraries and the tools of its tests into .venv; the first time takes minutes"
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps kvpress
	@touch $(NEEDED) $@

demo: $(NEEDED)
	$(BIN)/kvbench run --suite first --run-name first
	@$(BIN)/kvbench report first --html results/first/report/index.html >/dev/null

# OMP_WAIT_POLICY: threads that spin while they wait for others would starve the tests beside them.
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2

GATE := OMP_NUM_THREADS=1 $(BIN)/kvbench
gate: $(INSTALLED)
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
	$(GATE) run --suite results/baselines/ci.toml --out "$$out" --run-name today --quiet && \
	$(GATE) compare results/baselines/ci.json "$$out/today" --gate results/baselines/gate.toml

gpu-check:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/tools/gpu_check.py $(SECONDS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
