# Two commands for a new user: `make demo` and `make test`.
# `python3`, unless it was compiled without profiles, as pyenv does by default, and the system's own is new enough: such a Python takes a
# sixth longer for the tests. It needs pip for the environment, and headers for what torch compiles.
PLAIN := import sysconfig; exit("--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""))
FITS := import ensurepip, os, sys, sysconfig; exit(sys.version_info < (3, 11) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
PYTHON ?= $(shell if python3 -c '$(PLAIN)' && /usr/bin/python3 -c '$(FITS)'; then echo /usr/bin/python3; else echo python3; fi 2> /dev/null)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test test-quick test-gpu test-vllm test-sglang lint types docs check clean

demo: $(VENV)/.installed
	$(BIN)/meshrl demo

# Files of tests run side by side, the slow ones first; `make test TEST_WORKERS=0` runs one after the other. What fails beside others
# runs once more, alone: it has to pass then, and is named at the end. Bytecode is kept, even where the environment forbids it: many tests
# start processes.
TEST_WORKERS ?= 2
RESULTS := $(VENV)/test-results
ENVIRONMENT := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST := $(ENVIRONMENT) $(BIN)/python -m pytest -o addopts="-q --strict-markers"
MANY_PROCESSES := special_e2e special_distributed special_standalone controller
SIDE_BY_SIDE := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev
	@$(ENVIRONMENT) $(BIN)/python tests/run_tests.py $(RESULTS) $(SIDE_BY_SIDE) --durations=20

# The rooms that need neither many processes nor a model's engine, without the slow tests: for a first look after a change. What it leaves
# out is run by its folder: `pytest tests/rollout`.
LEFT_OUT := $(MANY_PROCESSES) engines models rewards rollout
test-quick: $(VENV)/.installed-dev
	@$(ENVIRONMENT) $(BIN)/python tests/run_tests.py $(RESULTS) $(SIDE_BY_SIDE) -m "not slow" $(LEFT_OUT:%=--ignore=tests/%)

# What needs a GPU, and the layouts of weight sync, rollout, FSDP and Megatron over NCCL; ranks share a GPU where there are too few.
OVER_NCCL := weight_sync pool_sync rollout_tensor_parallel split_rollout fsdp_engine megatron_engine
test-gpu: $(VENV)/.installed-dev
	@found=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())') || exit 1; \
		if [ "$$found" = 0 ]; then echo "SKIPPED: torch sees no GPU here"; exit; fi; \
		$(PYTEST) -m gpu; first=$$?; \
		MESHRL_TEST_DEVICE=cuda $(PYTEST) $(OVER_NCCL:%=tests/special_distributed/test_%.py) && exit $$first

# The real engines, each in an environment of its own; SKIPPED where one cannot be installed, unless REQUIRED=1.
test-vllm test-sglang: test-%:
	@PYTHON=$(PYTHON) REQUIRED=$(REQUIRED) tests/special_standalone/run.sh $*

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# The site, into site/; anything that mkdocs warns of is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint types docs test

# A stamp is written only after everything is in place. Without one, whatever a failed install left is thrown away.
$(VENV)/.installed: $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshrl needs Python 3.11 or newer, this is " + sys.version)'
	@test -e $@ || rm -rf $(VENV)
	@test -e $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing meshrl into $(VENV) (a few minutes the first time)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed $(INPUTS)
	@echo "installing what the tests need"
	@$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed $(INPUTS)
	@echo "installing what the site needs"
	@$(PIP) -e '.[docs]'
	@touch $@

clean:
	rm -rf site $(VENV) .venv-vllm* .venv-sglang* outputs .mypy_cache .ruff_cache .pytest_cache .hypothesis
