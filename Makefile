# `make` alone lists what can be done.
.DEFAULT_GOAL := help
.PHONY: help setup demo test soak bench lint format lock clean

BIN := .venv/bin
PYTEST_ARGS ?=
SOAK_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
# A run that hangs is ended, and says where it stood. A slow machine takes twice the usual time.
LIMIT := timeout --foreground --signal=INT --kill-after=60 65m

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1  \2/p' $(MAKEFILE_LIST)

setup:  ## build .venv from the lock, install Java, RabbitMQ and Redis where missing
	@scripts/setup

demo: setup  ## run a whole cluster here and check it (DEMO_ARGS=--keep leaves it running)
	@$(BIN)/umbel demo $(DEMO_ARGS)

test: setup lint  ## check everything: lint, types, layers, tests (PYTEST_ARGS="-k name")
	@$(LIMIT) $(BIN)/python -m pytest -q -m quiet $(if $(PYTEST_ARGS),,tests/integration tests/browser) $(PYTEST_ARGS) || [ $$? -eq 5 ]  # 5: none was chosen
	@$(LIMIT) $(BIN)/python -m pytest -n 4 --dist loadgroup -m "not quiet" $(PYTEST_ARGS); code=$$?; \
	if [ $$code -ne 1 ]; then [ $$code -eq 0 ] || [ $$code -eq 5 ]; exit; fi; \
	echo "Once more, one by one, what failed beside others:"; \
	$(LIMIT) $(BIN)/python -m pytest -x --last-failed -m "not quiet" $(PYTEST_ARGS)

soak: setup  ## 100,000 simulated clusters, 100,000 simulated workers (SOAK_ARGS="--nodes 9"); the long tests in full
	@$(BIN)/umbel sim --seeds 100000 $(SOAK_ARGS)
	@$(BIN)/umbel sim --what deliveries --seeds 100000 $(SOAK_ARGS)
	@SOAK=1 $(BIN)/python -m pytest --timeout 7200 -o faulthandler_timeout=0 $$(grep -rl "tests.sizes" tests --include="test_*.py")

bench: setup  ## measure Umbel and its peers, 25 minutes (BENCH_ARGS="--quick" for a first look)
	@scripts/bench-setup
	@$(BIN)/python -m benchmarks.runner $(BENCH_ARGS)

lint: setup  ## style, formatting, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## put the code into shape
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

lock: setup  ## pin the development environment anew (LOCK_ARGS=--upgrade for the newest)
	@scripts/lock $(LOCK_ARGS)

clean:  ## remove what was built, .venv included
	rm -rf .venv .venv-bench .umbel .make build dist src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
