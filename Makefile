# Two commands do everything on a fresh machine, set-up included:  make demo  ·  make test
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin

# Several processes share few cores: one thread each.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test slow-test lint format wheel clean

help:
	@echo "make demo       train a small GPT-2 on four processes, beside the single device"
	@echo "make test       run the tests (make slow-test: the long ones too)"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make format     let ruff rewrite what it can"
	@echo "make wheel      build the wheel and import it from elsewhere"

setup: $(VENV)/.installed

# Once, and again when the dependencies may have changed.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment: $(PYTHON) needs the venv module" \
	  "(on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -e ".[hf,dev]" "$(TORCH)"
	touch $@

demo: setup
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt2.py --out demo_out

test: setup
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(PYTEST_ARGS)

slow-test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: setup
	rm -rf build dist
	$(BIN)/python -m build --wheel
	$(BIN)/python .ci/check_wheel.py dist/*.whl

clean:
	rm -rf $(VENV) build dist demo_out *.egg-info
