# make quickstart   a small selective transformer in a few minutes on two CPU cores
# make test         the tests (and the linter)
# make faults       a hundred faults in real training runs, each of which must come back exactly (about ten minutes)
# make slurm-test   the cluster's commands on a real SLURM, started for it on this machine
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
ARGS ?=

.PHONY: help quickstart install install-dev install-cluster test faults slurm-test lint format clean

help:
	@echo "make quickstart   build $(VENV) and train a small selective transformer (a few minutes, CPU)"
	@echo "make test         build $(VENV) with the dev extra and run the linter and the tests; ARGS='-k name' selects"
	@echo "make faults       strike real training runs a hundred times; the table goes into docs/RELIABILITY.md"
	@echo "make slurm-test   start a SLURM on this machine (as root) and test submission, preemption and sweeps on it"
	@echo "make install      only build $(VENV)"
	@echo "make format       format and fix the code"
	@echo "make clean        remove $(VENV)"

quickstart: install
	$(RUN) train.py experiment=quickstart attention=selective $(ARGS)

# Two test processes of one thread each: more threads than cores slow small models down many times.
test: lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 $(ARGS)

faults: install-dev
	$(RUN) -m tests.faults.campaign --report docs/RELIABILITY.md $(ARGS)

# Skips with the reason where no SLURM can be started.
slurm-test: install-cluster
	slurm/cluster/install.sh
	SELMODEL_SLURM_TEST=1 $(RUN) -m pytest -rs --timeout 900 tests/slurm $(ARGS)

lint: install-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: install-dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV)

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 ..."; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "error: $(PYTHON) cannot make virtual environments (Debian: install python3-venv)"; exit 2; }
	@touch $@

install-cluster: install-dev
	$(RUN) -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[dev,cluster]'

# The lock file holds every version, also those of dependencies; pyproject.toml says which are needed.
$(VENV)/.installed: $(VENV)/.created pyproject.toml requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check -c requirements.lock -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[dev]'
	@touch $(VENV)/.installed $@
