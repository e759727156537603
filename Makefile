# Every target sets up what it needs in .venv and build/, says what it does, and ends with an error when something failed.
# `make demo` and `make test` are the first two commands to type.
PYTHON ?= python3
SHELL := /bin/sh
VENV_PYTHON := .venv/bin/python
# What Python has compiled is kept: without it each of the many processes of the tests compiles whole frameworks again.
unexport PYTHONDONTWRITEBYTECODE
# Bench: more options, as in BENCH="collectives --ranks 2".
BENCH ?=
# Gpu: more options, as in GPU="--kills 100 --ranks 2 4".
GPU ?=
# Fuzz: for how many seconds.
FUZZ ?= 3600
# Chaos: how often each cell of the fault table runs; SEED=... replays the random part.
N ?= 1
SEED ?=

# Coverage: FOLDERS="unit ranks" for those alone.
FOLDERS ?=
# Release: STRICT=1 refuses what may not be published; PUBLISH=1 uploads what was built and checked.
STRICT ?=
PUBLISH ?=
# mypy reads the types of the frameworks.
CHECKED := build torch jax spark wheel bench test lint docs
TESTED := $(CHECKED) demo tensorflow
# The second torch: on x86_64 it is the newest, which make test has to run; elsewhere it is for the night.
SECOND := $(if $(filter x86_64,$(shell uname -m)),other-torch)

# Environments with gigabytes in them: `make clean` leaves them, as it leaves .venv.
KEPT := other-torch oldest mxnet

.PHONY: help demo check test nightly bench gpu chaos fuzz lint sanitize coverage wheel release clean

help:
	@echo "make demo      train on handwritten digits with 1 and with 2 processes, beside DDP"
	@echo "make check     style, types, rules, C++ tests, unit tests, ranks as threads: before every commit"
	@echo "make test      make check, and every other test"
	@echo "make nightly   thread sanitizer, oldest frameworks, an hour of fuzzing, make chaos"
	@echo "make bench     everything beside Gloo, MPI and memcpy, with the targets; BENCH=--quick: a minute"
	@echo "make gpu       CUDA tensors of ranks that share this machine's GPUs; PYTHON: one that has torch for CUDA"
	@echo "make chaos     kill ranks everywhere, N=10 times each; random faults in elastic jobs, SEED=... replays"
	@echo "make fuzz      an hour of fuzzing, of the wire and of whole engines with a hostile rank; FUZZ=60: a minute"
	@echo "make lint      style, types, and the rules of the repository: a part of make check"
	@echo "make sanitize  C++ tests under address, undefined behaviour and thread sanitizers"
	@echo "make coverage  how much of Python and of C++ the tests run"
	@echo "make wheel     wheels for x86_64 and aarch64, and one tried in a bare environment"
	@echo "make release   sdist, wheels, notes, bill of materials, all checked; PUBLISH=1 uploads them"
	@echo "make clean     remove what was built (the virtual environments stay)"

demo:
	@$(PYTHON) scripts/build.py check
	@$(PYTHON) scripts/environment.py build demo torch
	@$(VENV_PYTHON) scripts/build.py library
	@$(VENV_PYTHON) scripts/demo.py

check:
	@$(PYTHON) scripts/build.py check
	@$(PYTHON) scripts/environment.py $(CHECKED)
	@$(VENV_PYTHON) scripts/check.py

test:
	@$(PYTHON) scripts/build.py check
	@$(PYTHON) scripts/environment.py build
	@$(VENV_PYTHON) scripts/test.py $(TESTED) $(SECOND) mxnet

nightly:
	@$(PYTHON) scripts/build.py check
	@$(PYTHON) scripts/environment.py $(TESTED) other-torch oldest mxnet
	@$(VENV_PYTHON) scripts/build.py tests
	@$(VENV_PYTHON) scripts/nightly.py $(N)

bench:
	@$(PYTHON) scripts/build.py check
	@$(PYTHON) scripts/environment.py build torch bench
	@$(VENV_PYTHON) scripts/build.py library
	@$(VENV_PYTHON) -m farandole.tools.bench --json build/bench/result.json --plots build/bench --compare bench $(BENCH)

# Not in .venv: torch for CUDA has gigabytes, and who has a GPU has it installed.
gpu:
	@mkdir -p build && cmake -S . -B build/gpu -DPython_EXECUTABLE="$$(command -v $(PYTHON))" >build/gpu.log
	@cmake --build build/gpu -j >>build/gpu.log
	@$(PYTHON) bench/gpu.py $(GPU)

chaos:
	@$(PYTHON) scripts/build.py check
	@$(PYTHON) scripts/environment.py build torch test
	@$(VENV_PYTHON) scripts/build.py tests
	@CHAOS_N=$(N) $(if $(SEED),CHAOS_SEED=$(SEED)) $(VENV_PYTHON) -m pytest -q -p no:cacheprovider tests/chaos/test_streams.py tests/chaos/test_endings.py tests/chaos/more.py tests/ranks/test_faults.py \
		tests/ranks/test_elastic_rows.py tests/ranks/test_elastic_hosts.py tests/unit/elastic/test_checkpoint.py \
		tests/frameworks/test_torch_elastic_faults.py
	@$(VENV_PYTHON) tests/chaos/elastic_faults.py --cells $$((300 * $(N))) --hosts $$((60 * $(N))) --faults $$((60 * $(N))) \
		--nested $$((20 * $(N))) --saves $$((1000 * $(N))) --partitions $$((30 * $(N))) --soak $$((40 * $(N))) $(if $(SEED),--seed $(SEED)) --json build/chaos/elastic.json

fuzz:
	@$(PYTHON) scripts/build.py check
	@$(PYTHON) scripts/environment.py build
	@$(VENV_PYTHON) scripts/fuzz.py $(FUZZ)

lint:
	@$(PYTHON) scripts/environment.py $(CHECKED)
	@$(VENV_PYTHON) scripts/lint.py

sanitize:
	@$(PYTHON) scripts/build.py check
	@$(PYTHON) scripts/environment.py build
	@$(VENV_PYTHON) scripts/sanitize.py

coverage:
	@$(PYTHON) scripts/build.py check
	@$(PYTHON) scripts/environment.py $(TESTED) coverage
	@$(VENV_PYTHON) scripts/covered.py $(FOLDERS)

wheel:
	@$(PYTHON) scripts/environment.py build wheel
	@$(VENV_PYTHON) scripts/wheel.py

release:
	@$(PYTHON) scripts/build.py check
	@$(PYTHON) scripts/environment.py build wheel release
	@$(VENV_PYTHON) scripts/release.py $(if $(STRICT),--strict) $(if $(PUBLISH),--publish)

clean:
	find build -mindepth 1 -maxdepth 1 $(KEPT:%=! -name %) -exec rm -rf {} + 2>/dev/null || true
	rm -rf dist src/farandole/engine/_native src/farandole/engine/bridge.abi3.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
