# Two commands for a new user: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test lint types check clean

demo: $(VENV)/.installed
	$(BIN)/meshrl demo

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types test

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

clean:
	rm -rf $(VENV) outputs .mypy_cache .ruff_cache .pytest_cache .hypothesis
