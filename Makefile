# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LAUNCH := $(BIN)/launch
# the demo is for CPUs: ladders of seconds, not hours
DATA   := data/demo
RUNS   := runs/demo
SIZES  := tiny 500k 1m

.PHONY: demo picture test check install system clean help

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# ── install ──────────────────────────────────────────────────────────────────────────────────────

install: $(VENV)/.installed  ## a virtual environment with everything pinned
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "isoflop needs Python 3.11 or newer; make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing what constraints.txt pins: about four minutes"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip would take one core; some packages carry files that are no Python
	touch $@

system:  ## Debian packages that the tests use: a browser, and a SLURM to start on this host
	@if command -v apt-get >/dev/null && ! { command -v chromium && command -v slurmctld && command -v ip; } >/dev/null; then \
	  SUDO=$$( [ "$$(id -u)" = 0 ] || echo sudo ); \
	  $$SUDO apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$SUDO apt-get install -qq -y --no-install-recommends \
	    chromium munge slurmctld slurmd slurm-client iproute2 procps util-linux; \
	fi

# ── the main job ─────────────────────────────────────────────────────────────────────────────────

demo: install  ## corpus, three sizes, a fitted law, a page: the whole way in minutes
	$(LAUNCH) data prepare --source python --out $(DATA) --vocab-size 1024 --valid-share 0.05
	@set -e; for size in $(SIZES); do \
	  echo; echo "+ launch pretrain --size $$size --data $(DATA) --config configs/scaling/demo.toml --nproc 2 --out $(RUNS)/$$size --resume"; \
	  $(LAUNCH) pretrain --size $$size --data $(DATA) --config configs/scaling/demo.toml --nproc 2 --out $(RUNS)/$$size --resume; \
	done
	$(LAUNCH) fit --runs $(RUNS)
	$(LAUNCH) dashboard --runs $(RUNS) --static $(RUNS)/dashboard.html

picture: demo system  ## the README's picture, from the demo's page
	$(BIN)/python tests/browser/picture.py $(RUNS)/dashboard.html docs/images
	$(BIN)/python -m tests.scaling.picture docs/images

# ── proof ────────────────────────────────────────────────────────────────────────────────────────

test: install check  ## lint, types, layers and every test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: install  ## lint, types and layers alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## what runs and tests leave behind
	rm -rf $(RUNS) $(DATA) mlruns mlflow.db .pytest_cache .mypy_cache .ruff_cache
