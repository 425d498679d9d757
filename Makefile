# Two commands: `make run` flies the first flight, `make test` passes the tests. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
STUDIES := study-parity study-outliers study-amax study-accumulation study-precision-law
.PHONY: help run test lint format clean benchmark benchmark-gpu study-first-flight $(STUDIES)

help:
	@echo "make run                 set up, calibrate this machine, predict, train and report the first flight"
	@echo "make test                set up and run the tests"
	@echo "make lint                formatting, style, types, import contracts, spelling"
	@echo "make benchmark           ratios against peers and predictions against this machine"
	@echo "make benchmark-gpu       the CUDA kernels on this machine's GPU: right, and how fast (under 8 minutes)"
	@echo "make study-first-flight  300 steps of FP8 against FP32 (about 20 minutes; resumes, as all studies do)"
	@echo "make study-parity        every recipe against FP32, dense and experts, three seeds (hours)"
	@echo "make study-outliers      injected SwiGLU outliers: per-tensor, smoothed, blocks (half an hour)"
	@echo "make study-amax          amax of tensors and blocks in training, and the advice drawn from it (20 minutes)"
	@echo "make study-accumulation  what an H100 loses in long sums, and what promotion buys (a minute)"
	@echo "make study-precision-law a scaling law from FP32 to FP4 and its best precision (an hour or two)"
	@echo "make clean               remove what the above made, but not runs/"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,report,fit,dev]'
	@touch $@

run: $(STAMP)
	$(BIN)/greylag calibrate --ranks 2
	$(BIN)/greylag simulate jobs/first_flight.toml
	$(BIN)/greylag train jobs/first_flight.toml
	@echo "report: $$($(BIN)/greylag report runs/first_flight)"

test: $(STAMP)
	$(BIN)/pytest

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell greylag tests benchmarks studies jobs README.md CONTRIBUTING.md CHANGELOG.md

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: $(STAMP)
	$(BIN)/python benchmarks/quantize_vs_torchao.py
	$(BIN)/python benchmarks/step_vs_torchao.py
	$(BIN)/python benchmarks/telemetry_cost.py
	$(BIN)/python benchmarks/local_accuracy.py

benchmark-gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py

study-first-flight: $(STAMP)
	$(BIN)/python studies/first_flight_parity.py

$(STUDIES): study-%: $(STAMP)
	$(BIN)/python studies/$(subst -,_,$*).py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
