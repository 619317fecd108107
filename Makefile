# Everything that the project runs. Each target sets up .venv by itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Shards of your own for the demo: make demo DATA='c4/*.json.gz'
DATA ?=

# How many test files at a time, each with processes of its own.
WORKERS ?= 2

.PHONY: install demo test check format lint types bench services storm faults floor clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) || { \
	  echo "Debian keeps venv in a package of its own; installing python3-venv" >&2; \
	  apt-get install -y -q python3-venv && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[hf,mpi,dev]'
	touch $@

demo: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m sgt_ds.demo $(if $(DATA),--data '$(DATA)')

# A test process that is killed fails the run at once: with another in its place, pytest-xdist waits
# forever at the end.
test: $(STAMP) services
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest \
	  --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# What some tests run against: a real Prometheus, sshd, MPI. Says what it can't install.
services:
	sh tests/install_services.sh

check: lint types test

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# Every fault on two hosts (of namespaces: needs root), as a table; 20 minutes on 2 cores.
faults: $(STAMP) services
	PATH="$(abspath $(BIN)):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python tests/faults.py $(FAULTS)

# Exports with the oldest transformers that pyproject.toml allows, in a .venv of its own.
FLOOR := .venv-floor
floor:
	$(MAKE) VENV=$(FLOOR) install
	$(FLOOR)/bin/python -m pip install --quiet 'transformers==5.23.*'
	PATH="$(abspath $(FLOOR)/bin):$$PATH" $(FLOOR)/bin/python -m pytest \
	  --numprocesses $(WORKERS) --dist loadfile $$(grep -lE 'transformers|convert|inference|lm_eval' tests/test_*.py)

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/sgt-ds bench step --preset demo --variants sgt:2 --rounds 20

# Kills training runs at chosen moments and compares every resume (tests/training_storm.py).
storm: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/training_storm.py --kills 100 --seed 0

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
