# Everything a fresh machine needs is done here: `make chat` ends in a conversation, `make test` runs all that can run.
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,$(if $(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo ok),$(p))))

.PHONY: chat serve page test test-fast lint install install-dev postgres chromium clean

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
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need..."
	@$(PIP) --no-build-isolation --editable ".[dev]"
	@touch $@

lint: install-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The store is tested on PostgreSQL too: only the server's programs are needed, the tests start one of their own
APT := DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::http::Timeout=20
POSTGRES := postgresql --yes --no-install-recommends

postgres:
	@if command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing PostgreSQL for the store's tests (once)..."; mkdir -p $(VENV); \
		{ $(APT) install $(POSTGRES) || { $(APT) update && $(APT) install $(POSTGRES); }; } >$(VENV)/postgres.log 2>&1 \
			&& rm $(VENV)/postgres.log \
			|| { tail -n 5 $(VENV)/postgres.log; echo "!!! PostgreSQL could not be installed: the store is tested on SQLite alone."; }; \
	else \
		echo "!!! No PostgreSQL server here: the store is tested on SQLite alone (Debian: apt install postgresql)."; \
	fi

# The page is tested in a real browser
CHROMIUM := chromium fonts-dejavu-core --yes --no-install-recommends

chromium:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing Chromium for the page's tests (once)..."; mkdir -p $(VENV); \
		{ $(APT) install $(CHROMIUM) || { $(APT) update && $(APT) install $(CHROMIUM); }; } >$(VENV)/chromium.log 2>&1 \
			&& rm $(VENV)/chromium.log \
			|| { tail -n 5 $(VENV)/chromium.log; echo "!!! Chromium could not be installed: the page is not tested in a browser."; }; \
	else \
		echo "!!! No Chromium here: the page is not tested in a browser (Debian: apt install chromium)."; \
	fi

test: lint postgres chromium
	@$(PY) web/build.py || echo "!!! The page could not be built: it is not tested."
	$(VENV)/bin/pytest -n 2 --durations=25

test-fast: install-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pytest -n 2 -m "not slow"

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
