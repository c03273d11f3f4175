# Every target does its own set-up: a virtual environment in .venv, once.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest
# More than the two cores of CI: the tests wait for about half of their time.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint format schemas docs-settings sim walk chaos recovery-times bench bench-quick clean setup

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

demo: .venv/.installed ## Two services share the limits of six tenants, through a killed worker and a restarted holder
	@$(BIN)/python -m examples.api_calls

# A deadline that a busy machine missed is tried once more, and told; a rule that was broken never is.
# worksteal: who has nothing left takes over half of what the other still has, so that both end together.
test: .venv/.installed-dev ## All tests, with real services
	@$(PYTEST) -n $(WORKERS) --dist worksteal --reruns 1 --only-rerun 'not (ended )?within [0-9.]+ s|[Tt]imed out'

test-fast: .venv/.installed-dev ## The tests that start no service, no worker, no dispatcher and no holder
	@$(PYTEST) tests/unit tests/simulation -m "not postgresql and not kafka and not redis and not processes"

lint: .venv/.installed-dev ## Format, lint, types and import contracts
	@failed=0; \
	for step in "ruff format --check ." "ruff check ." mypy lint-imports; do $(BIN)/$$step || failed=1; done; \
	exit $$failed

format: .venv/.installed-dev ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

schemas: .venv/.installed-dev ## Write the JSON Schemas of the messages to topics/
	@$(BIN)/python -m celery_durable.kafka.schemas topics/schemas

docs-settings: .venv/.installed-dev ## Write docs/settings.md from the settings models
	@$(BIN)/python -m docs.generate_settings

sim: .venv/.installed-dev ## Seeds of the simulation, on all cores: make sim N=10000; replay one with its log: make sim SEED=7
	@$(BIN)/python -m tests.simulation.run $(if $(SEED),--seed $(SEED),--count $(or $(N),1000))

walk: .venv/.installed-dev ## A longer random walk over the two pure cores alone: make walk SEEDS=10000
	@$(BIN)/python -m tests.simulation.walk --seeds $(or $(SEEDS),1000)

chaos: .venv/.installed-dev ## Real services and processes under drawn faults: make chaos MINUTES=10 SEED=7 BROKER=rabbitmq
	@$(BIN)/python -m tests.chaos $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) \
		$(if $(BROKER),--broker $(BROKER)) $(if $(PROTOCOL),--protocol $(PROTOCOL))

recovery-times: .venv/.installed-dev ## How long a lost worker, a lost holder and a lost Kafka stop what
	@$(BIN)/python -m tests.chaos.recovery_times $(if $(TIMES),--times $(TIMES))

bench: .venv/.installed-bench ## Measure beside Celery, DBOS and Procrastinate, store it, write docs/performance.md: make bench NAMES="end-to-end release"
	@$(BIN)/python -m benchmarks $(NAMES)

bench-quick: .venv/.installed-bench ## The few ratios that matter, in at most 3 minutes, beside those of the last stored run
	@$(BIN)/python -m benchmarks --quick $(NAMES)

clean: ## Remove everything that make and the tests made
	rm -rf .venv .cache .durable .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: .venv/.installed-dev ## Only the set-up

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or later is needed, and $(PYTHON) is not: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) has no venv: apt-get install python3-venv (or your system's package of it)" >&2; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@$(PIP) install -c constraints.txt pip
	@touch $@

.venv/.installed: pyproject.toml constraints.txt | .venv/.made
	@echo "Installing celery-durable and what it runs on into .venv (Celery, confluent-kafka, SQLAlchemy, …)"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	@echo "Installing what tests and lint need into .venv (pytest, hypothesis, ruff, mypy, Flower, psycopg, …)"
	@$(PIP) install -c constraints.txt -e '.[postgresql,redis,flower]' --group test --group lint --group docs
	@touch $@

.venv/.installed-bench: .venv/.installed-dev
	@echo "Installing what the benchmarks compare with into .venv (DBOS, Procrastinate, matplotlib, py-spy)"
	@$(PIP) install -c constraints.txt --group bench
	@touch $@
