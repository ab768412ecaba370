# `make quickstart` and `make test` need nothing but Python 3.11 or newer and make.
PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/quickstart
EXTRAS ?= dev

.PHONY: quickstart test test-slow lint clean

quickstart: $(VENV)/installed
	$(VENV)/bin/python -m aogpt_jax.main --config=configs/quickstart.py --workdir=$(RUN)

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest

test-slow: $(VENV)/installed
	$(VENV)/bin/python -m pytest -m slow

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .

# The stamp is made last: an installation that was interrupted starts over.
$(VENV)/installed: setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is %s" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) runs
