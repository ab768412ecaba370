# `make quickstart` and `make test` need nothing but Python 3.11 or newer and make.
# Where the tests' CPU build of PyTorch cannot be had from TORCH_INDEX, any torch does: run
# `.venv/bin/pip install -e '.[dev,torch]' && touch .venv/torch-installed` before `make test`.
PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/quickstart
EXTRAS ?= dev
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0$(if $(filter Linux,$(shell uname)),+cpu)

.PHONY: quickstart test test-slow lint clean

quickstart: $(VENV)/installed
	$(VENV)/bin/python -m aogpt_jax.main --config=configs/quickstart.py --workdir=$(RUN)

test: $(VENV)/torch-installed
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/torch-installed
	$(VENV)/bin/python -m pytest -m slow

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .

# The stamp is made last: an installation that was interrupted starts over.
$(VENV)/installed: setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is %s" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

# PyTorch reads and writes the authors' checkpoints; only the tests need it. The newest build of the
# package index has CUDA, 5 GB with its libraries: the CPU build is named in full, and comes first.
$(VENV)/torch-installed: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --index-url $(TORCH_INDEX) '$(TORCH)'
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS),torch]'
	touch $@

clean:
	rm -rf $(VENV) runs
