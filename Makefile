# make install   install the package and its dependencies into .venv
# make demo      train a small model from raw text on this machine
# make test      run the test suite
# make test-long run the tests that take minutes each
# make faults    inject every fault of tests/fault_matrix.toml; results in benchmarks/results/faults.json
# make gpu       run all checks that need a CUDA device, within 9 minutes; results in build/gpu
# make check     check lint and types
# make docs      build the documentation site in build/site
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

# Byte code is kept, so that the processes that tests start do not compile everything again.
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

# Without an installation this uses the machine's own Python, which has torch but maybe no network.
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

# The environment is rebuilt when its inputs change. torch is installed first, so that no package that needs it
# fetches another build.
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
