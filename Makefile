# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n auto

.PHONY: help demo test test-all lint format bench gpu-check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "stepgraph needs Python 3.10 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch and the tools into $(VENV); this takes a few minutes, once"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,lint]' -c constraints.txt
	touch $@

demo: $(STAMP)  ## train a small GPT on real text, verified against eager, in about two minutes; BUDGET=40MB for a memory budget
	$(BIN)/python examples/train_gpt.py $(if $(BUDGET),--budget $(BUDGET))

test: $(STAMP)  ## the tests, under 15 minutes on two cores
	$(PYTEST) -m 'not slow'

test-all: $(STAMP)  ## every test, the slow ones included
	$(PYTEST)

lint: $(STAMP)  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	mkdir -p $(VENV)/typing && ln -sfn ../.. $(VENV)/typing/stepgraph  # the root is the package, whatever its folder is called
	MYPYPATH=$(VENV)/typing $(BIN)/mypy

format: $(STAMP)  ## rewrite the sources as `make lint` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## step time, capture time, the runtime's own time, the update, plans against peaks, the planner's clock, 16-bit precision; an hour on a quiet machine
	$(BIN)/python benchmarks/call_overhead.py
	$(BIN)/python benchmarks/capture_time.py
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/update_tail.py
	$(BIN)/stepgraph calibrate --threads 1
	for model in llama gpt2 bert t5 vit resnet; do $(BIN)/python benchmarks/recompute.py --model $$model; done
	$(BIN)/python benchmarks/clock.py
	$(BIN)/python benchmarks/precision.py

gpu-check: $(STAMP)  ## what only a GPU can show, in at most six minutes; writes docs/gpu.md
	$(BIN)/python benchmarks/gpu_check.py

clean:  ## remove what the other targets made
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
	rm -rf $(VENV) *.egg-info build dist runs benchmarks/results .pytest_cache .mypy_cache .ruff_cache
