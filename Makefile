# Every target installs what it needs, so any target can be the first one.
#   make build    fetch, patch and build the test release, stock and patched
#   make check    verify the patches on the test release
#   make test     set up, build, and run the quick tests; make test-all runs every test
RELEASE ?= 0.3.9
BACKEND ?= cpu
PYTEST_ARGS ?=
CHECK_ARGS ?=
BENCH_ARGS ?=
MATRIX_ARGS ?=
DROPIN_ARGS ?=
QA_ARGS ?=

own = py=$$(tools/bootstrap.sh own $(1))
run = "$$py" -m pyllamakv.cli.main
# One pytest worker per core. The tests of a file share fixtures, so they run in one worker.
parallel = -n auto --dist loadfile

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help build test test-all check rpc server cuda vulkan matrix eras bench dropin qa wheel prebuilt docs lint clean distclean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | while IFS='	' read -r name text; do \
		printf '  make %-10s %s\n' "$$name" "$$text"; done
	@echo "RELEASE=$(RELEASE) BACKEND=$(BACKEND); variables with options for the commands: PYTEST_ARGS, CHECK_ARGS, MATRIX_ARGS, BENCH_ARGS, DROPIN_ARGS, QA_ARGS"

build: ## Fetch, patch and build the test release, stock and patched
	@py=$$(tools/bootstrap.sh here test) && \
	$(run) build $(RELEASE) --backend $(BACKEND) && \
	tools/bootstrap.sh hint "$$py"

test: ## Set up, build, and run the quick tests
	@$(call own,test) && \
	$(run) build $(RELEASE) --backend cpu && \
	PYLLAMAKV_REQUIRE_NATIVE=1 "$$py" -m pytest -m "not slow" $(parallel) $(PYTEST_ARGS)

test-all: ## Set up, build, and run every test
	@$(call own,test) && \
	$(run) build $(RELEASE) --backend cpu && \
	tools/bootstrap.sh peer "$$py" && \
	tools/bootstrap.sh clients "$$py" && \
	PYLLAMAKV_REQUIRE_NATIVE=1 "$$py" -m pytest $(parallel) $(PYTEST_ARGS)

check: ## Verify the patches on the test release
	@$(call own,test) && \
	$(run) build $(RELEASE) --backend $(BACKEND) && \
	$(run) check $(RELEASE) --backend $(BACKEND) $(CHECK_ARGS)

rpc: ## Verify the patches with caches in RPC servers on this machine
	@$(call own,test) && \
	$(run) build $(RELEASE) && \
	$(run) check $(RELEASE) --backend rpc $(CHECK_ARGS)

server: ## Verify llama-server over HTTP: stock against patched
	@$(call own,test) && $(run) check $(RELEASE) --server

cuda: ## Verify and measure on this machine's NVIDIA GPU
	@tools/cuda.sh

vulkan: ## Verify the patches on a Vulkan device
	@$(call own,test) && \
	$(run) build $(RELEASE) --backend vulkan && \
	$(run) check $(RELEASE) --backend vulkan $(CHECK_ARGS)

matrix: ## Verify every release, and compare with the expected verdicts
	@$(call own,test) && $(run) matrix $(MATRIX_ARGS)

eras: ## Verify one release per era in few settings
	@$(call own,test) && $(run) matrix run --sample --quick $(MATRIX_ARGS) && \
	PYLLAMAKV_SWEEP_RELEASES=eras "$$py" -m pytest -n auto tests/binding/test_arguments_sweep.py tests/qa/test_native_calls.py && \
	"$$py" -m pytest tests/repository/test_records.py tests/repository/test_readme.py -k "recorded_trees or memory_classes"

bench: ## Measure the main benchmarks
	@$(call own,test) && "$$py" -m qa bench $(BENCH_ARGS)

dropin: ## Run llama-cpp-python's own tests on stock and patched libraries
	@$(call own,test) && "$$py" -m qa peer $(DROPIN_ARGS)

qa: ## Stress-test: random operations, slips, fuzzing, faults, sanitizers, leaks
	@$(call own,test) && \
	tools/bootstrap.sh clang && \
	$(run) build $(RELEASE) && \
	"$$py" -m qa stress $(QA_ARGS)

wheel: ## Build the wheel, and test it outside the checkout
	@$(call own,test) && tools/wheel.sh "$$py" $(RELEASE)

prebuilt: ## Build wheels for machines without a compiler
	@$(call own,wheels) && tools/prebuilt.sh "$$py"

docs: ## Build the API reference from docstrings; warnings are errors
	@$(call own,docs) && "$$py" -m sphinx -q -W --keep-going docs/reference build/reference && \
	echo "$(CURDIR)/build/reference/index.html"

lint: ## Check style and types
	@$(call own,dev) && \
	"$$py" -m ruff check . && \
	"$$py" -m ruff format --check . && \
	"$$py" -m mypy

clean: ## Remove builds and caches; keep fetched releases
	rm -rf vendor/objects vendor/built vendor/servers vendor/trees vendor/results vendor/locks
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv and fetched releases as well
	rm -rf .venv vendor/store.git vendor/downloads vendor/.installed-*
