# make install   the package and all it needs, into .venv
# make demo   train a small model from raw text on this machine
# make test   the test suite
# make test-long   the tests that take minutes each
# make faults   every fault of tests/fault_matrix.toml, injected; results in benchmarks/results/faults.json
# make gpu   all that wants a CUDA device, within 9 minutes; results in build/gpu
# make check  lint and types
# make docs   the documentation as a site, in build/site
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

# Compiled code is kept, so that each worker and each program that tests start does not compile everything anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test test-long faults gpu check docs clean

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/bessemer demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not long"

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m long -p no:hypothesispytest

faults: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal --faults=benchmarks/results/faults.json

# By the machine's own Python where nothing is installed: it has torch, and maybe no network.
gpu:
	$(if $(wildcard $(BIN)/bessemer),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py --out build/gpu

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks

docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "open build/site/index.html"

# The environment is made anew when what it was made from changes. torch goes first: with it there, nothing
# that needs it asks the index for another build.
$(INSTALLED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "bessemer needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 2; }
	@echo "installing PyTorch and the package into $(VENV): about two minutes, by the network"
	@$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all,dev]"
	@rm -f $(VENV)/.installed-*
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
