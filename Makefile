# `make demo` and `make test` set everything up by themselves in .venv, from constraints.txt.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-slow test-faults lint format bench docs clean

# Four variants from one seed, two at a time on two cores: about two minutes on an idle machine. Again: goes on, or shows.
demo: $(READY)
	@$(BIN)/scalelong compare digits --scalings none,uniform,cs,ls --seeds 1 --steps 600 --samples 200 --set validate.every=50 --set sample.every=150 --set monitor.every=5 --out runs/demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(READY)
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -m slow

# Needs the right to mount a small disk; about a quarter of an hour on a free core. Writes docs/reliability.md.
test-faults: $(READY)
	rm -f results/reliability.json
	HYPOTHESIS_PROFILE=search SCALELONG_RELIABILITY=results/reliability.json $(BIN)/python -m pytest tests/faults
	$(BIN)/python tests/faults/reliability_page.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/scalelong bench --growth --plot docs/performance-growth.png --out results/bench.json
	$(BIN)/python benchmarks/skip_scaling.py --json results/skip_scaling.json

docs: $(READY)
	$(BIN)/python docs/check.py

# Installed once; again when the project's requirements change.
$(READY): pyproject.toml constraints.txt requirements-nodeps.txt requirements-peers.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps -r requirements-nodeps.txt
	rm -rf $(VENV)/peers
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/peers -r requirements-peers.txt
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
