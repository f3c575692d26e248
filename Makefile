# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LAUNCH := $(BIN)/launch
# The demo runs on CPUs; its ladder takes minutes.
DATA   := data/demo
RUNS   := runs/demo
# The run to forecast; it takes several times the compute of the ladder's largest run.
LARGER := 500k

.PHONY: demo picture quick test gpu-test attack check install system clean clean-demo help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# ── install ──────────────────────────────────────────────────────────────────────────────────────

install: $(VENV)/.installed  ## create a virtual environment with pinned packages
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "isoflop needs Python 3.11 or newer; make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing the versions in constraints.txt: about four minutes"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test]'
	@# pip would compile on one core; some packages contain files that do not compile
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

system:  ## install the Debian packages that the tests use: a browser and SLURM
	@if command -v apt-get >/dev/null && ! { command -v chromium && command -v slurmctld && command -v ip; } >/dev/null; then \
	  SUDO=$$( [ "$$(id -u)" = 0 ] || echo sudo ); \
	  $$SUDO apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$SUDO apt-get install -qq -y --no-install-recommends \
	    chromium munge slurmctld slurmd slurm-client iproute2 procps util-linux; \
	fi

# ── demo ─────────────────────────────────────────────────────────────────────────────────────────

demo: install  ## corpus, a ladder, a law, a forecast, the larger run and its score, in minutes
	$(LAUNCH) data prepare --source python --out $(DATA) --vocab-size 1024 --valid-share 0.05
	$(LAUNCH) sweep run cpu --data $(DATA) --jobs 2 --out $(RUNS)
	$(LAUNCH) fit --runs $(RUNS)
	@# The forecast is registered once, before its run: a second `make demo` keeps it.
	[ -e $(RUNS)/forecast.json ] || { $(LAUNCH) forecast --runs $(RUNS) --size $(LARGER) --tokens 655360 --register --json > $(RUNS)/forecast.part && mv $(RUNS)/forecast.part $(RUNS)/forecast.json; }
	$(BIN)/$$($(BIN)/python -c 'import json; print(json.load(open("$(RUNS)/forecast.json"))["recipe"]["command"])') --set train.eval_every=100000 --set train.log_every=32 --nproc 2 --out $(RUNS)/$(LARGER) --resume
	$(LAUNCH) dashboard --runs $(RUNS) --static $(RUNS)/dashboard.html
	$(LAUNCH) score --runs $(RUNS)

picture: demo system  ## take the README's pictures of the demo's page
	$(BIN)/python tests/browser/picture.py $(RUNS)/dashboard.html docs/images
	$(BIN)/python -m tests.scaling.picture docs/images

# ── tests ────────────────────────────────────────────────────────────────────────────────────────

PYTEST := $(BIN)/python -m pytest --dist loadfile
CHECKS := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

quick: install  ## unit tests alone: under 90 seconds
	$(PYTEST) -n 2 -m 'not slow and not slurm and not browser and not gpu'

test: install  ## lint, types, layers and every test that needs no GPU
	@# Four workers for two cores: the tests of SLURM, MLflow and hanging ranks mostly wait.
	@# The checks run beside them, because mypy uses one core. The target fails if either fails.
	@{ $(CHECKS); } & $(PYTEST) -n 4 --no-loadscope-reorder -m 'not gpu'; \
	  failed=$$?; wait $$! || { echo "a check failed: make check"; failed=1; }; exit $$failed

gpu-test: install  ## tests that need a GPU
	$(BIN)/python -m pytest tests/gpu

attack: install  ## bad command lines, hostile files, damaged directories, open ports, signals
	$(PYTEST) -n 2 tests/attack tests/train/test_supervisor.py

check: install  ## lint, types and layers alone
	$(CHECKS)

clean:  ## remove caches; runs, data and the MLflow store stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache

clean-demo:  ## remove the demo's runs and data, but not mlflow.db, which all runs share
	rm -rf $(RUNS) $(DATA)
