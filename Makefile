# The virtual environment. STACK=newest uses the newest libraries instead of the pinned ones, in a separate environment.
ifndef STACK
CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -n | tail -1)
ifeq ($(shell test "$(basename $(CAPABILITY))" -ge 10 2>/dev/null && echo newer),newer)
STACK = newest
$(info STACK=newest: a GPU of compute capability $(CAPABILITY) has no kernels in torch 2.7; STACK=pinned uses torch 2.7 anyway)
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
export PYTHONDONTWRITEBYTECODE :=# Let Python write .pyc files, or each start would compile all libraries again.

# pytest processes. On two cores a third one is useful while the others wait for files or processes.
TEST_PROCESSES ?= 3

# The folder of the documentation's pictures, and the folder for other pictures, which git ignores.
FIGURES = docs
OUTPUT = pictures

# The folder for the records of `make proof`.
FOLDER ?= results/proof

.DEFAULT_GOAL := help
.PHONY: help install smoke proof test test-long bench learn report figures lock clean

help:  ## Print this list.
	@sed -n 's/^\([a-z-]*\):.*##\(.*\)/\1 \2/p' Makefile | awk '{printf "make %-10s", $$1; $$1 = ""; print}'

install: $(VENV)/installed  ## Install the pinned libraries into .venv; STACK=newest installs the newest into .venv-newest.

smoke: $(VENV)/installed  ## Measure SD2 base with two recipes on every GPU, into results.jsonl; without a GPU, the tiny model.
	@python -m benchmarks.proof --minutes 0

proof: $(VENV)/installed  ## Test speed, memory and exactness on this GPU, into FOLDER=results/...: 30 minutes on an H100; MINUTES=5 for less.
	@python -m benchmarks.proof $(FOLDER) $(if $(MINUTES),--minutes $(MINUTES))

test: $(VENV)/installed  ## Run ruff and the quick tests: 2 to 3 minutes on two cores.
	ruff check .
	python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not long" tests

test-long: $(VENV)/installed  ## Run the long tests: killed processes, launchers, learning, compiled models; 6 to 8 minutes.
	python -m pytest -n 2 --dist worksteal -m long tests

bench: $(VENV)/installed  ## Measure ratios on the CPU: data loader and EMA; needs 15 GB and a minute.
	python -m benchmarks.loader
	python -m benchmarks.ema_update

learn: $(VENV)/installed  ## Train a small model in two phases and check the images that it generates; 3 minutes on two cores.
	python -m benchmarks.learn $(OUTPUT)/learned.png

report: $(VENV)/installed  ## Print the table of the published benchmark and plot it.
	mkdir -p $(OUTPUT)
	python report.py published.csv --figure $(OUTPUT)/days.png

figures: $(VENV)/installed  ## Recreate the pictures of the documentation and its notebook.
	python -m benchmarks.learn $(FIGURES)/learned.png
	python -m benchmarks.forecast $(FIGURES)/forecast.png
	python report.py published.csv --figure $(FIGURES)/days.png
	python -m benchmarks.savings $(FIGURES)/savings.png
	python plan.py --gpu '8 H100-80GB' '8 B200' '16 L40S' '8 4090' --network_gbits 100 --images 100000000 --max_dollars 30000 \
		--max_days 42 --dollars_per_gpu_hour 4090=0 --figure $(FIGURES)/plan.png
	jupyter nbconvert --to notebook --execute --inplace docs/walk.ipynb  # pip install jupyterlab

COMPILE = uv pip compile --quiet --generate-hashes --python-version 3.11
lock: $(VENV)/installed  ## Recreate both lock files from the requirements.
	$(COMPILE) --universal requirements.txt tests/requirements.txt --output-file requirements.lock
	$(COMPILE) --python-platform linux --no-deps requirements-newest.txt --output-file requirements-newest.lock
	sed -i 's/^xformers==[^ ]*/&; platform_machine == "x86_64"/' requirements-newest.lock  # uv drops the marker

clean:  ## Remove the virtual environment.
	rm -rf $(VENV)

$(VENV)/installed: $(LOCK) install.sh
	@sh install.sh $(VENV) $(LOCK)
	@touch $@
