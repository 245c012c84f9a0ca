# The two commands a newcomer needs are `make demo` and `make test`; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.dev

.PHONY: demo test lint types tests test-slow test-browser soak fuzz results format setup clean

demo: $(STAMP)
	$(BIN)/feddumap demo

test: lint types tests

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

tests: $(DEV)
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

# Federations of real processes, Ray, kills, larger ONNX files, the C kernels under sanitizers, wheels, and
# what needs packages that the other tests do not.
test-slow: $(VENV)/.extras
	$(BIN)/pytest -m 'slow or extras' -n 2 --dist loadfile tests

# Runs killed at random moments and resumed: at most 200 kills and 15 minutes.
soak: $(DEV)
	$(BIN)/python tests/tools/soak.py --kills 200 --minutes 15

$(VENV)/.extras: $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[extras]'
	touch $(VENV)/.extras

# The report's page in a real browser. `make test` leaves tests/browser out (norecursedirs in pyproject.toml),
# because pip cannot install Chromium.
test-browser: $(VENV)/.browser
	$(BIN)/pytest tests/browser

$(VENV)/.browser: $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	touch $(VENV)/.browser

# The tables and figures of docs/results.md, and the pages in results/report, from results/runs.
REPORT := $(BIN)/feddumap report --no-figures
results: $(DEV)
	$(BIN)/python results/tables.py
	$(BIN)/python results/figures.py
	$(REPORT) results/runs/grid/lenet-* --title "LeNet5 on CIFAR-10" --out results/report/cifar10-lenet
	$(REPORT) results/runs/grid/cnn-* --title "CNN on CIFAR-10" --out results/report/cifar10-cnn
	$(REPORT) results/runs/cifar100/lenet-* --title "LeNet5 on CIFAR-100" --out results/report/cifar100-lenet
	$(REPORT) results/runs/cifar100/cnn-* --title "CNN on CIFAR-100" --out results/report/cifar100-cnn

# Every reader of what others may have written, with altered and coverage-guided inputs (atheris).
FUZZ_SECONDS ?= 300
fuzz: $(VENV)/.fuzz
	PYTHONPATH=. $(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)

$(VENV)/.fuzz: $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	touch $(VENV)/.fuzz

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(DEV)

# torch comes first and pinned, so that no other package can draw in another build of it
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/feddumap/training/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . plotly
	touch $(STAMP)

# what the tests need besides
$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(DEV)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
