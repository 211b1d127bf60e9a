# make test   the environment, lint and the five nets that need no GPU; SHARD=1/4 runs a quarter of each net
# make seconds  what the nets took when they last ran, for each op
# make demo   a small model trained with plain PyTorch and with tilewright, their curves in out/demo.png
# make site   the pages of docs/ as a site in out/site, every link checked
# make models every language model of transformers that can be built small, patched and compared; minutes, and resumable
# make gpu    the same properties on hardware, in resumable shards
PYTHON ?= python3
JOBS ?= 2
TORCH := torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input --quiet
OLD := .cache/triton36
PYTEST := -m pytest -q -p no:cacheprovider
SHARED := -n $(JOBS) --dist worksteal

# One thread each: the tests run side by side, and a BLAS that takes every core makes both slower.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
unexport TRITON_INTERPRET
# Each worker and each process that a test starts would compile all modules, and rewrite all asserts, anew: 9 of 22 seconds.
unexport PYTHONDONTWRITEBYTECODE

# What a net costs is counted in CPU seconds and held to the budgets of tests/seconds.py. More is a warning, and an error with
# TILEWRIGHT_BUDGETS=error (.ci/run). A slower machine sets SLOWER=2.
SHARD ?= 1/1
SLOWER ?= 1
export SLOWER
net = TILEWRIGHT_NET=$(1) TILEWRIGHT_SHARD=$(SHARD)

.PHONY: env lint test host interpreter aten compile smoke seconds models gpu demo docs site clean

env: $(VENV)/.ready $(OLD)/.ready

$(VENV)/.ready: requirements-dev.txt Makefile
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install $(TORCH) -r requirements-dev.txt
	touch $@

# Another Triton in a folder of its own: PYTHONPATH puts it before the environment's.
$(OLD)/.ready: | $(VENV)/.ready
	rm -rf $(OLD)
	$(PIP) install --no-deps --target $(OLD) triton==3.6.0
	touch $@

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check tilewright tests examples
	$(VENV)/bin/ruff format --check tilewright tests examples

test: lint host interpreter aten compile smoke
	PYTHONPATH=. $(PY) -m tests.seconds

host: $(VENV)/.ready
	$(call net,host) PYTHONPATH=. $(PY) $(PYTEST) $(SHARED) tests/host

interpreter: $(VENV)/.ready
	$(call net,interpreter) TRITON_INTERPRET=1 PYTHONPATH=. $(PY) $(PYTEST) $(SHARED) tests/interpreter

aten: $(VENV)/.ready
	$(call net,aten) TRITON_INTERPRET=1 PYTHONPATH=. $(PY) $(PYTEST) $(SHARED) tests/aten

compile: env
	$(call net,compile) PYTHONPATH=.:$(OLD) $(PY) $(PYTEST) $(SHARED) tests/compile

smoke: env
	$(call net,smoke) TRITON_INTERPRET=1 PYTHONPATH=.:$(OLD) $(PY) $(PYTEST) $(SHARED) -m smoke tests/interpreter

seconds: $(VENV)/.ready
	PYTHONPATH=. $(PY) -m tests.seconds

# Ends by writing the table of docs/huggingface.md, and fails if a row of it is wrong.
models: $(VENV)/.ready
	PYTHONPATH=. $(PY) -m tests.survey

# Without a GPU in the environment that the tests use; with one, PY=python3 takes the Python that has torch for it.
demo: $(if $(filter $(VENV)/%,$(PY)),$(VENV)/.ready)
	mkdir -p out
	PYTHONPATH=. $(PY) -m tilewright demo --out out/demo.png

# Ends by recording what has changed since it was last measured.
gpu:
	PYTHONPATH=. $(PYTHON) -m tests.gpu
	PYTHONPATH=. $(PYTHON) -m tilewright bench --stale --record

docs: $(VENV)/.ready
	PYTHONPATH=. $(PY) -m tilewright docs

SITE := .venv-site
site:
	test -x $(SITE)/bin/mkdocs || { $(PYTHON) -m venv $(SITE) && $(SITE)/bin/python -m pip --quiet install -r requirements-site.txt; }
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) $(SITE) .cache .ruff_cache .hypothesis .pytest_cache build dist out *.egg-info
	find tilewright tests -name __pycache__ -type d -prune -exec rm -rf {} +
