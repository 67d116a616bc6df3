PYTHON ?= python3
# STACK=newest takes the newest libraries instead of the pinned ones, in an environment of its own.
STACK ?= pinned
ifeq ($(STACK),newest)
VENV ?= .venv-newest
REQUIREMENTS = requirements-newest.txt
INSTALL = --no-deps -r requirements-newest.txt
INSTALL_TESTS = $(INSTALL)
else
VENV ?= .venv
REQUIREMENTS = requirements.txt
INSTALL = -r requirements.txt
INSTALL_TESTS = $(INSTALL) -r tests/requirements.txt
endif
export PATH := $(abspath $(VENV))/bin:$(PATH)

# They start first, so that both processes of `make test` end at about the same time.
LONGEST_TESTS = tests/training/test_checkpoints.py tests/training/test_safeguard.py tests/training/test_ranks.py \
                tests/fitting/test_compiling.py tests/test_killed_conversions.py tests/parts/test_ray.py \
                tests/test_learning.py

# Where the pictures of the documentation lie, and those of a run, which git ignores.
FIGURES = .
OUTPUT = results

.PHONY: smoke test test-long bench learn report figures clean

# Benchmark what is here: Stable Diffusion 2 base on every GPU, by the original's recipe and by the fastest, with the ratio
# of the two; or the tiny model on a CPU.
smoke: $(VENV)/installed
	python benchmarks/smoke.py

# What a change must not break.
test: $(VENV)/tests-installed
	ruff check .
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long" $(LONGEST_TESTS) tests

# The long proofs: trainings and conversions killed at many moments, learning, compiled models, hundreds of fuzzed inputs.
test-long: $(VENV)/tests-installed
	python -m pytest -n 2 --dist loadfile -m long tests

# Ratios on the CPU: loader, conversion, EMA and a full step against the original's recipe; needs 22 GB and about 7 minutes.
bench: $(VENV)/installed
	python benchmarks/loader.py
	python benchmarks/convert.py
	python benchmarks/ema.py
	python benchmarks/step.py

# Does it learn? Two phases of a small model by the real program, and what it then draws; ten minutes on two cores.
learn: $(VENV)/installed
	python benchmarks/learn.py $(OUTPUT)/learned.png

# The table and the figure of the published benchmark.
report: $(VENV)/installed
	mkdir -p $(OUTPUT)
	python report.py published.csv --figure $(OUTPUT)/days.png

# The pictures of the documentation anew.
figures: $(VENV)/installed
	python benchmarks/learn.py $(FIGURES)/learned.png
	python report.py published.csv --figure $(FIGURES)/days.png

$(VENV)/installed: $(REQUIREMENTS)
	$(PYTHON) -m venv $(VENV)
	python -m pip install $(INSTALL)
	touch $@

$(VENV)/tests-installed: $(VENV)/installed tests/requirements.txt
	python -m pip install $(INSTALL_TESTS)
	touch $@

clean:
	rm -rf $(VENV)
