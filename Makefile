# Everything a fresh machine needs is done here: `make chat` ends in a conversation, `make test` runs all that can run.
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,$(if $(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo ok),$(p))))

.PHONY: chat serve page test test-cluster test-fast lint mypy ruff layers install install-dev postgres chromium compiler clean

chat: install
	@$(VENV)/bin/palaver chat

serve: page
	@$(VENV)/bin/palaver serve

# The page, where its sources are newer than what was built; needs Node
page: install
	@$(PY) web/build.py

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(PY):
	@test -n "$(PYTHON)" || { echo "Palaver needs Python 3.11 or newer; none was found." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# torch first and pinned: a range would let pip take a build of several gigabytes
$(VENV)/.installed: pyproject.toml constraints.txt | $(PY)
	@echo "Installing Palaver into $(VENV) (once)..."
	@$(PIP) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	@$(PIP) hatchling editables setuptools  # what is built without isolation needs them
	@$(PIP) --no-build-isolation --editable .
	@$(PY) -m compileall -q src  # pip does so too, but not for editable packages
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need..."
	@$(PIP) --no-build-isolation --editable ".[dev]"
	@$(PIP) --no-deps mlx-vlm  # what it depends on is large, and not imported
	@touch $@

# mypy takes most of the time, and one core
lint: install-dev
	@$(MAKE) --no-print-directory --jobs 2 mypy ruff layers

mypy:
	$(VENV)/bin/mypy

ruff:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

layers:
	$(VENV)/bin/lint-imports

# What the tests want of the system: NAME, whether it is there, its packages, what is not shown without it
APT := DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::http::Timeout=20
INSTALL := $(APT) install --yes --no-install-recommends
define debian
	@if $(2); then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing $(1) for the tests (once)..."; mkdir -p $(VENV); \
		{ $(INSTALL) $(3) || { $(APT) update && $(INSTALL) $(3); }; } >$(VENV)/$@.log 2>&1 && rm $(VENV)/$@.log \
			|| { tail -n 5 $(VENV)/$@.log; echo "!!! $(1) could not be installed: $(4)."; }; \
	else \
		echo "!!! No $(1) here: $(4) (Debian: apt install $(3))."; \
	fi
endef

# Only the server's programs are needed, the tests start one of their own
postgres:
	$(call debian,PostgreSQL,command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1,postgresql,the store is tested on SQLite alone)

chromium:
	$(call debian,Chromium,command -v chromium >/dev/null || command -v chromium-browser >/dev/null,chromium fonts-dejavu-core,the page is not tested in a browser)

compiler:
	$(call debian,C compiler,command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null,gcc libc6-dev,compiled steps are not tested)

# A worker gets whole files, in order: their models and servers start once, and the browser's tests come last. Tests
# wait for processes and browsers, so three workers suit two cores
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder

test: lint postgres chromium compiler
	@$(PY) web/build.py || echo "!!! The page could not be built: it is not tested."
	$(VENV)/bin/pytest $(WORKERS) --durations=25 || { \
		echo "!!! What failed beside other tests is run again alone. What passes now depends on how busy the machine is: mend it."; \
		$(VENV)/bin/pytest -n 0 --last-failed --last-failed-no-failures none; }

# Replicas on a Ray cluster of the tests' own, which has only the loopback
test-cluster: install-dev
	@$(PIP) --no-build-isolation --editable ".[cluster]"
	$(VENV)/bin/pytest tests/engines/test_cluster.py tests/test_cluster_command.py

test-fast: install-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pytest $(WORKERS) -m "not slow"

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
