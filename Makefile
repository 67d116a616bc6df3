PYTHON ?= python3
VENV ?= .venv
export PATH := $(abspath $(VENV))/bin:$(PATH)

# They start first, so that both processes of `make test` end at about the same time.
LONGEST_TESTS = tests/harness/test_checkpoints.py tests/harness/test_compiling.py tests/harness/test_ranks.py \
                tests/test_encode.py tests/test_report.py

.PHONY: smoke test bench report clean

# Benchmark what is here: Stable Diffusion 2 base on every GPU, or the tiny model on a CPU.
smoke: $(VENV)/installed
	gpus=$$(python -c 'import torch; print(torch.cuda.device_count())') && \
	if [ $$gpus -gt 0 ]; then \
	    composer benchmark.py --use_synth_data --use_ema --batch_size $$((64 * gpus)); \
	else \
	    composer -n 1 benchmark.py --use_synth_data --use_ema --model_name tiny --image_size 64 --batch_size 4; \
	fi

test: $(VENV)/tests-installed
	ruff check .
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(LONGEST_TESTS) tests

# Ratios on the CPU: loader, conversion, EMA and a full step against the original's recipe; needs 22 GB and about 7 minutes.
bench: $(VENV)/installed
	python benchmarks/loader.py
	python benchmarks/convert.py
	python benchmarks/ema.py
	python benchmarks/step.py

# The README's table and figure of the published benchmark.
report: $(VENV)/installed
	python report.py published.csv --figure days.png

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	python -m pip install -r requirements.txt
	touch $@

$(VENV)/tests-installed: $(VENV)/installed tests/requirements.txt
	python -m pip install -r requirements.txt -r tests/requirements.txt
	touch $@

clean:
	rm -rf $(VENV)
