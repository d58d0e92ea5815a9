# The only entry points. `make demo` and `make test` need nothing but python3 (>= 3.10) and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-full check bench figures clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.runtime
	$(BIN)/oled-moe demo

# Files share two processes, in the order that conftest.py gives: most tests wait, or use one core.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed
	$(PYTEST)

# Every cell of every product of cases, and more drawn examples: tests/products.py.
test-full: $(VENV)/.installed
	$(PYTEST) --full

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_import_rule.py

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/simulation.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/serving.py

figures: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[plot]'
	$(BIN)/python experiments/02_policies_on_demo/plot.py
	$(BIN)/python -m experiments.04_calibrated_reuse.plot
	$(BIN)/python -m experiments.05_prefetch.plot
	$(BIN)/python -m experiments.07_speed.plot
	$(BIN)/python -m experiments.09_lossy_sharing.plot
	for plot in experiments/paper/fig_*/plot.py; do $(BIN)/python -m experiments.paper.$$(basename $$(dirname $$plot)).plot || exit 1; done

# torch goes in first and at exactly the pinned version: a machine that already has that
# build at hand (a CPU build, say) takes it, and no later step replaces it.
$(VENV)/.runtime: pyproject.toml constraints.txt setup.py src/oled_moe/kernels/native.c
	@$(PYTHON) -c "import sys; sys.exit('oled-moe needs Python 3.10 or newer, this is ' + sys.version.split()[0]) if sys.version_info < (3, 10) else None"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the project into $(VENV); this takes a minute or two the first time."
	@$(BIN)/python -m pip install --disable-pip-version-check -q "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .
	@touch $@

# What tests and checks need besides.
$(VENV)/.installed: $(VENV)/.runtime
	@echo "Installing what the tests need; this takes another minute."
	@$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info
