# `make run` and `make test` need Python ≥ 3.10 and nothing else; the environment is made on first use.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= runs/quickstart
# One thread a worker; compiled modules are kept, since tests start many processes.
SUITE  := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2

.PHONY: help install run test test-slow lint format bench benches docs tensorboard wheel clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

install: $(VENV)/.installed  ## create the environment in .venv

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

run: install  ## the main job: FedAvg, FedAU, FedAWE and MIFA where availability goes with the data, three seeds each
	$(BIN)/fedsim -m experiment=quickstart strategy=fedavg,fedau,fedawe,mifa out=$(OUT) resume=overwrite
	@echo
	$(BIN)/fedsim-plot $(OUT) --out $(OUT) --html $(OUT)/report.html

test: install  ## the test suite, without the slow tests
	$(SUITE) -m "not slow"

test-slow: install  ## the slow tests: runs killed at random moments, several ranks, bad input by the hundred
	$(SUITE) --dist loadscope -m slow

lint: install  ## ruff, mypy, the layers (imports only go down), and names that cannot be guessed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/bare_names.py

format: install  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## samples per second of every executor beside a raw PyTorch loop
	$(BIN)/python scripts/bench.py

benches: install  ## measure all figures of docs/performance.md again, on a quiet machine; a second call goes on
	$(BIN)/python scripts/benches.py

docs: install  ## write again what pages say of configurations, results and runs, and the site: open site/index.html
	$(BIN)/python scripts/config_reference.py
	$(BIN)/python scripts/algorithms_page.py
	$(BIN)/python scripts/metrics_page.py
	$(BIN)/python scripts/command_line_page.py
	$(BIN)/python scripts/gallery.py
	$(BIN)/python scripts/claims_page.py
	$(BIN)/python scripts/calibration_page.py
	$(BIN)/python scripts/performance_page.py
	$(BIN)/python scripts/printed_output.py
	$(BIN)/python scripts/notebook.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

tensorboard: install  ## look at the curves of the main job
	$(BIN)/tensorboard --logdir $(OUT)

wheel: install  ## build dist/*.whl
	$(BIN)/python -m build --wheel

clean:  ## remove what was built, keep runs
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
