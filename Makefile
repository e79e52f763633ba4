# Each target sets up .venv by itself; that is done again only when what is installed, or the C code, has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(wildcard src/tensorprobe/*/*.c src/tensorprobe/*/*.h)
# Most of the time goes into processes that tests start: two workers keep two cores busy.
WORKERS ?= 2
DEMO := demo-output/run

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench sweep wheel sanitize clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## record a small training and look at the record
	@echo "== Record three training steps of a script that knows nothing of tensorprobe"
	$(BIN)/tensorprobe capture -o $(DEMO) --overwrite -- $(BIN)/python examples/train_gpt.py
	@echo
	@echo "== What the run holds"
	$(BIN)/tensorprobe inspect $(DEMO)
	@echo
	@echo "== One call of it"
	$(BIN)/tensorprobe inspect $(DEMO) Functional.softmax.0.forward
	@echo
	@echo "== Go on with"
	@echo "  $(BIN)/tensorprobe inspect $(DEMO) --step 2                  the calls of step 2"
	@echo "  $(BIN)/tensorprobe inspect $(DEMO) Functional.linear.1       a call and its gradients"
	@echo "  $(BIN)/tensorprobe export $(DEMO) demo-output/npy --to npy   its tensors as files for numpy"
	@echo "  $(BIN)/tensorprobe inspect $(DEMO) --verify                  every byte checked"

test: lint ## lint, then all tests
ifdef ARGS
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup $(ARGS)
else # the simulated device, once enabled, stays for the life of a process: its tests have processes of their own
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup tests/sim
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup --ignore tests/sim
endif

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## measure capture beside plain training and the published peer; ARGS="--help" for options
	$(BIN)/python bench/capture.py $(ARGS)

sweep: $(READY) ## compare the simulated device with the CPU over torch's operator database
	$(BIN)/python bench/sim_sweep.py $(ARGS)

wheel: $(READY) ## build sdist and wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

sanitize: $(READY) ## the C code under the address and undefined-behaviour sanitizers
	tools/sanitize.sh $(BIN)/python

clean: ## remove everything that was made, but not .venv
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	rm -f src/tensorprobe/*/*.so $(READY)
	find src tests bench examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml setup.py constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "make: Python 3.10 or newer is needed; $(PYTHON) is not. Name one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq -c constraints.txt -e '.[test,lint]'
	@touch $@
