# Two commands: `make run` flies the first flight, `make test` passes the tests. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help run test lint format clean benchmark study-first-flight

help:
	@echo "make run                 set up, calibrate this machine, predict, train and report the first flight"
	@echo "make test                set up and run the tests"
	@echo "make lint                formatting, style, types, import contracts, spelling"
	@echo "make benchmark           ratios against peers and predictions against this machine"
	@echo "make study-first-flight  300 steps of FP8 against FP32 (about 20 minutes; resumes)"
	@echo "make clean               remove what the above made, but not runs/"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,report,dev]'
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
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps torchao==0.18.0
	$(BIN)/python benchmarks/step_vs_torchao.py
	$(BIN)/python benchmarks/first_flight_accuracy.py

study-first-flight: $(STAMP)
	$(BIN)/python studies/first_flight_parity.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
