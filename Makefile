# The one door to every chore; CI and the pre-commit hooks come in through it too. `make` lists the targets.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
TAG := manylinux_2_28_x86_64
READY := $(VENV)/.ready
PYTEST_ARGS ?=
COMPAT ?= 5.0.0 newest
TRITON ?= 3.3.1
PY_PATHS := python tests benches examples scripts
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs' -o -name Cargo.toml)

.DEFAULT_GOAL := help
.PHONY: help build quickstart test test-rust test-python test-full valgrind compat compat-triton lint lint-python lint-rust format stubtest \
        licenses wheel check-wheel table bench doc hooks clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# An editable install: Python edits need no rebuild, and a changed Rust file rebuilds through this rule.
$(READY): pyproject.toml .ci/constraints.txt $(RUST_SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c .ci/constraints.txt -e '.[dev]'
	cargo fetch --quiet --locked
	touch $@

build: $(READY) ## Make the environment and build the package into it

quickstart: $(READY) ## Install, then run examples/quickstart.py
	$(PY) examples/quickstart.py

test: test-rust test-python ## Run every test: Rust first, then Python

test-rust: $(READY)
	cargo test --workspace --locked

# A worker a core with one thread each: torch's threads of several processes wait for each other by spinning.
test-python: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto $(PYTEST_ARGS)

# valgrind knows no AVX-512: its processor has AVX2, so that this and the portable way run under it. It runs one thread
# at a time, and those of large layers wait for each other by spinning.
valgrind: ## Run the tests of the CPU experts under valgrind
	PROPTEST_CASES=12 CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER='valgrind -q --error-exitcode=9' \
	    cargo test -p routed-experts-core --release --locked --test experts --test quantized_experts \
	    -- --test-threads=1 --skip large_layers

test-full: $(READY) ## Run the full oracle grid too (minutes)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto -m 'full_grid or not full_grid' $(PYTEST_ARGS)

compat: $(READY) ## Smoke tests beside transformers' oldest and newest 5.x (or COMPAT='VERSION ...')
	set -e; for version in $(COMPAT); do PYTHON=$(abspath $(PY)) tests/compat/run.sh $$version; done

# Compiled for a GPU that is not here: what only the newest Triton understands is found without one.
compat-triton: $(READY) ## Compile the kernels by the oldest Triton that is supported (or TRITON=VERSION)
	test -d .venv-triton/$(TRITON) || $(PY) -m pip install --quiet --no-deps --target .venv-triton/$(TRITON) triton==$(TRITON)
	set -e; for kernels in kernels gradients quantized; do \
	    PYTHONPATH=$(abspath .venv-triton/$(TRITON)) $(PY) tests/compile_$$kernels.py 90 >/dev/null; done

lint: lint-python lint-rust licenses table ## Check format, types, clippy, licences and generated tables

lint-python: $(READY)
	$(PY) -m ruff check $(wildcard $(PY_PATHS))
	$(PY) -m ruff format --check $(wildcard $(PY_PATHS))
	$(PY) -m mypy

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

format: $(READY) ## Format both languages, fix what can be fixed, refresh the tables
	$(PY) -m ruff check --fix $(wildcard $(PY_PATHS))
	$(PY) -m ruff format $(wildcard $(PY_PATHS))
	cargo fmt --all
	$(PY) scripts/backends_table.py --write
	$(PY) scripts/regret_table.py --write

stubtest: $(READY) ## Compare _core.pyi with the built module
	$(PY) -m mypy.stubtest routed_experts._core

licenses: $(READY) ## Check the licences of the dependencies, offline
	$(PY) scripts/check_licenses.py

table: $(READY)
	$(PY) scripts/backends_table.py --check
	$(PY) scripts/regret_table.py --check

# Zig's linker binds to an old glibc whatever the build machine has; maturin refuses a tag that is not true.
wheel: $(READY) ## Build the wheel that is released into dist/
	rm -rf dist
	PATH="$(abspath $(VENV)/bin):$$PATH" $(PY) -m maturin build --release --locked --zig \
	    --compatibility $(TAG:_x86_64=) --out dist

check-wheel: wheel ## Check that wheel, and run it in an environment of its own
	$(PY) scripts/check_wheel.py --tag $(TAG) dist/*.whl
	$(PY) scripts/fresh_install.py dist/*.whl examples/quickstart.py

bench: $(READY) ## Run the benchmarks of benches/
	cargo bench -p routed-experts-core
	set -e; for file in benches/bench_*.py; do $(PY) $$file; done

doc: $(READY) ## Build the documentation site and the reference of the Rust core (site/, target/doc/); warnings fail
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --clean --quiet

hooks: $(READY) ## Install the pre-commit hooks
	$(PY) -m pre_commit install

clean: ## Remove everything that was built, the environment included
	rm -rf $(VENV) .venv-compat .venv-triton dist site target python/routed_experts/_core*.so
