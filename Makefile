# Each target sets up what it needs in .venv, from Python 3.11 or newer and the package index alone:
# everything comes as wheels, so no compiler is needed. `make clean` takes it all away again.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --prefer-binary

# The Python that makes .venv. Empty: the first one below that is new enough and has venv and pip.
PYTHON ?=
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11

# The CuPy that `make gpu-test` installs: cuda12 or cuda13, whichever the driver supports.
CUDA ?= cuda12

# How many processes run tests beside each other. Most tests wait for other processes, not for a core.
WORKERS ?= 3

# More arguments for pytest or the benchmarks, for example: make test ARGS='-k tape -x'
ARGS ?=

.PHONY: help demo test hosts-test lint docs bench package gpu-test cupy cupy-check guests guests-test \
  clean

help:
	@echo 'make demo      fit a small convolutional network on two replicas'
	@echo 'make test      run the tests and every example in the documentation'
	@echo 'make hosts-test  run the tests on several imitated hosts; needs root'
	@echo 'make lint      ruff (rules and format) and mypy --strict'
	@echo 'make docs      build the site of guides and reference: build/site/index.html'
	@echo 'make bench     measure; writes benchmarks/results'
	@echo 'make package   build the wheel and the source archive in dist, and try both in new environments'
	@echo 'make gpu-test  run the tests that need a GPU (CUDA=cuda12 or CUDA=cuda13)'
	@echo 'make cupy-check  compare our calls with CuPy 13, CuPy 14 and NCCL; needs no GPU'
	@echo 'make guests-test  run the tests with PyTorch and Keras; fetches 2.5 GB'
	@echo 'make clean     remove .venv, caches and build products'

demo: $(VENV)/ready
	$(PY) examples/fit_digits.py --strategy mirrored --replicas 2

test: $(VENV)/ready-test
	$(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# As root, with unshare, nsenter, ip, tc and sshd; where these are missing, tests are skipped.
hosts-test: $(VENV)/ready-test
	$(PY) -m pytest -m '' $(ARGS) tests/hosts

lint: $(VENV)/ready-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(VENV)/ready-docs
	$(PY) -m sphinx -W --keep-going -q -E -j 2 -b html -c docs/site -d build/doctrees . build/site

bench: $(VENV)/ready-bench
	$(PY) -m benchmarks.run_all --out benchmarks/results $(ARGS)

# Each archive is installed alone, and a program that uses it is typed and run from another folder.
package: $(VENV)/ready-test
	rm -rf dist && $(PIP) build && $(PY) -m build --outdir dist . >/dev/null
	for archive in dist/*.whl dist/*.tar.gz; do \
	  $(PY) -m venv --clear $(VENV)/installed && \
	  $(VENV)/installed/bin/python -m pip --disable-pip-version-check install --quiet $$archive mypy && \
	  cp tests/installed_program.py $(VENV)/installed/ && (cd $(VENV)/installed && \
	    bin/python -m mypy --strict installed_program.py && bin/python -I installed_program.py) \
	    || exit 1; \
	done

gpu-test: $(VENV)/ready-test
	$(PIP) --editable '.[$(CUDA)]'
	$(PY) -m pytest -m gpu $(ARGS)

# Every call that the tests on imitated GPUs make is compared with what CuPy 13, CuPy 14 and NCCL
# take, which needs no GPU. Their wheels lie beside the environment, where no other test finds them:
# 420 MB to fetch and 750 MB unpacked, in one minute; the two runs take another one.
CUPY_13 := 'cupy-cuda12x == 13.*' fastrlock
CUPY_14 := 'cupy-cuda12x == 14.*' cuda-pathfinder
CUPY_nccl := 'nvidia-nccl-cu12 == 2.19.3'

cupy: $(VENV)/cupy/13/ready $(VENV)/cupy/14/ready $(VENV)/cupy/nccl/ready

$(VENV)/cupy/%/ready: | $(VENV)/ready-test
	$(PIP) --no-deps --target $(@D) $(CUPY_$*)
	@touch $@

# The contract tests, of which the rows with GPUs run there.
ON_GPUS := tests/strategies tests/variables tests/optimizers tests/models/test_layers.py \
  tests/test_equivalence.py

cupy-check: cupy
	for version in 13 14; do \
	  export PYTHONPATH=$(VENV)/cupy/$$version:$(VENV)/cupy/nccl && \
	  $(PY) -W error -c 'import cupy.cuda.nccl as nccl; nccl.get_version()' && \
	  $(PY) -m pytest -m 'not gpu' --ignore tests/gpu/test_nccl_workers.py $(ARGS) tests/gpu && \
	  $(PY) -m pytest -m 'not gpu' -k gpu $(ARGS) $(ON_GPUS) \
	    || exit 1; \
	done

# Guests: modules and models of other libraries, in an environment of their own, because PyTorch's wheels
# with CUDA are 2.5 GB. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has small ones.
guests:
	$(MAKE) VENV=.venv-guests .venv-guests/ready-guests

guests-test: guests
	.venv-guests/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS) \
	  ndistribute/interop tests/interop tests/test_docs.py

$(VENV)/ready-guests: $(VENV)/ready-test
	$(PIP) --editable '.[torch,keras]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist docs/reference *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/ready: setup.cfg pyproject.toml $(VENV)/pyvenv.cfg
	$(PIP) --editable '.[examples]'
	@touch $@

$(VENV)/ready-test: setup.cfg pyproject.toml $(VENV)/pyvenv.cfg
	$(PIP) --editable '.[examples,mpi,test]'
	@touch $@

$(VENV)/ready-docs: setup.cfg pyproject.toml $(VENV)/pyvenv.cfg
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/ready-bench: setup.cfg pyproject.toml $(VENV)/pyvenv.cfg
	$(PIP) --editable '.[bench,mpi,test]'
	@touch $@

# The check is the whole of what is needed: version, venv, and the pip that venv puts inside.
$(VENV)/pyvenv.cfg:
	@for python in $(or $(PYTHON),$(CANDIDATES)); do \
	  if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	      >/dev/null 2>&1; then \
	    echo "$$python -m venv $(VENV)"; \
	    exec "$$python" -m venv --clear $(VENV); \
	  fi; \
	  tried="$$tried $$python"; \
	done; \
	echo 'No Python that can set this up was found. Needed: Python 3.11 or newer with venv and' >&2; \
	echo "ensurepip (on Debian and Ubuntu: apt-get install python3-venv). Tried:$$tried." >&2; \
	echo 'Name another: make PYTHON=/path/to/python3 TARGET' >&2; \
	exit 1
