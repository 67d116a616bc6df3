# The environment. STACK=newest takes the newest libraries instead of the pinned ones, in an environment of its own.
ifndef STACK
CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -n | tail -1)
ifeq ($(shell test "$(basename $(CAPABILITY))" -ge 10 2>/dev/null && echo newer),newer)
STACK = newest
$(info STACK=newest: a GPU of compute capability $(CAPABILITY) has no kernels in torch 2.7; STACK=pinned takes that anyway)
endif
endif
ifeq ($(STACK),newest)
VENV ?= .venv-newest
LOCK = requirements-newest.lock
else
VENV ?= .venv
LOCK = requirements.lock
endif
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PYTHONDONTWRITEBYTECODE :=# Python keeps what it has compiled, or each start would compile all libraries anew

# Processes of pytest: on two cores a third one works while the others wait for a file or a process.
TEST_PROCESSES ?= 3

# Where the pictures of the documentation lie, and those of a run, which git ignores.
FIGURES = docs
OUTPUT = pictures

# Where the records of `make proof` go.
FOLDER ?= results/proof

.DEFAULT_GOAL := help
.PHONY: help smoke proof test test-long bench learn report figures forecasts lock clean

help:  ## Print this list.
	@sed -n 's/^\([a-z-]*\):.*##\(.*\)/\1 \2/p' Makefile | awk '{printf "make %-10s", $$1; $$1 = ""; print}'

smoke: $(VENV)/installed  ## A first measurement: SD2 base on every GPU, by two recipes; or the tiny model on a CPU.
	@python -m benchmarks.smoke

proof: $(VENV)/installed  ## All checks and speeds of the GPUs here, into FOLDER=results/...: half an hour on an H100; MINUTES=5 for less.
	@python -m benchmarks.proof $(FOLDER) $(if $(MINUTES),--minutes $(MINUTES))

test: $(VENV)/installed  ## ruff, and all tests but the long ones: 75 seconds on two cores of an Intel Xeon, 2 minutes of a slow AMD EPYC.
	ruff check .
	python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not long" tests

test-long: $(VENV)/installed  ## The long proofs: kills at many moments, launchers, learning, compiled models.
	python -m pytest -n 2 --dist worksteal -m long tests

bench: $(VENV)/installed  ## Ratios on the CPU: loader, EMA, a full step; needs 22 GB and 4 minutes.
	python -m benchmarks.loader
	python -m benchmarks.ema_update
	python -m benchmarks.step

learn: $(VENV)/installed  ## Does it learn? Two phases of a small model, and what it then draws; three minutes on two cores.
	python -m benchmarks.learn $(OUTPUT)/learned.png

report: $(VENV)/installed  ## The table and the figure of the published benchmark.
	mkdir -p $(OUTPUT)
	python report.py published.csv --figure $(OUTPUT)/days.png

figures: $(VENV)/installed  ## The pictures of the documentation anew, and what its notebook prints and draws.
	python -m benchmarks.learn $(FIGURES)/learned.png
	python -m benchmarks.forecast $(FIGURES)/forecast.png
	python report.py published.csv docs/scaling.jsonl --figure $(FIGURES)/days.png
	python -m benchmarks.notebook docs/walk.ipynb

FORECAST_GPUS = A100-SXM4-80GB H100-80GB NVIDIA-H200 B200
forecasts: $(VENV)/installed  ## The forecasts of the front page: its table and its figures; seven minutes on two cores.
	rm -f docs/plan.jsonl docs/plan-eager.jsonl docs/scaling.jsonl
	for latents in 1 ""; do LATENTS=$$latents GPU="$(FORECAST_GPUS)" PHASE_FLAGS=@recipes/fastest.txt PLAN=docs/plan.jsonl \
	    sh recipes/stable-diffusion-2.sh plan || exit; done
	LATENTS=1 GPU="A100-SXM4-80GB H100-80GB" PHASE_FLAGS='@recipes/fastest.txt --no-compile' PLAN=docs/plan-eager.jsonl \
	    sh recipes/stable-diffusion-2.sh plan
	python report.py docs/plan.jsonl @recipes/plan.txt @recipes/prices-on-demand.txt --figure $(FIGURES)/plan.png
	python benchmark.py @recipes/fastest.txt --use_ema --dry_run 8 16 32 64 128 256 --gpu $(FORECAST_GPUS) \
	    --results docs/scaling.jsonl
	python -m benchmarks.savings $(FIGURES)/savings.png

COMPILE = uv pip compile --quiet --generate-hashes --python-version 3.11
lock: $(VENV)/installed  ## Write both lock files anew from the requirements.
	$(COMPILE) --universal requirements.txt tests/requirements.txt --output-file requirements.lock
	$(COMPILE) --python-platform linux --no-deps requirements-newest.txt --output-file requirements-newest.lock
	sed -i 's/^xformers==[^ ]*/&; platform_machine == "x86_64"/' requirements-newest.lock  # uv drops the marker

clean:  ## Remove the environment.
	rm -rf $(VENV)

$(VENV)/installed: $(LOCK) install.sh
	@sh install.sh $(VENV) $(LOCK)
	@touch $@
