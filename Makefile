# The one task runner: people, .ci/run and .github/workflows all call these targets.
# Needs Python 3.10 or newer with venv, a Rust toolchain with rustfmt and clippy, and access to PyPI and crates.io.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WHEELS := target/wheels
DIST := target/dist
SITE := target/site
# Cargo's profile of the wheel; Cargo.toml says what each is for.
WHEEL_PROFILE ?= release
# Holds numpy and the wheel alone, to show that planning a graph file needs nothing else.
BARE := target/bare-venv

# Cargo warns of make's job server, which recipes that do not run make cannot reach.
CARGO := MAKEFLAGS= cargo

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PYO3_PYTHON := $(abspath $(BIN))/python
# Where it is set, each of the hundreds of processes that tests start compiles PyTorch's sources anew.
unexport PYTHONDONTWRITEBYTECODE

# Each process begins with neighbouring files, so that few fixtures of modules are made twice. One
# that is done takes over half of what another has left.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal

.PHONY: help install install-wheel wheel dependencies demo quick test-planner test canaries durations rust-build rust-test nightly fuzz sweep hard-limit wheel-test bench bench-compare gpu gpu-test docs site lint lint-python lint-rust lint-workflows format lock release ci clean

help:
	@echo "make install     the release wheel and everything that tests need, into VENV ($(VENV))"
	@echo "make demo        install; plan GPT-2 XL's whole step; train a small GPT-2 eagerly and by its plan"
	@echo "make ci          install, lint and tests: what continuous integration runs"
	@echo "make quick       the Python tests that take little time, against what is installed: what one runs while working"
	@echo "make test-planner  the planner's Python tests, which need no torch"
	@echo "make test        the Python tests, against what is installed; of each, as many cases as fit in half a second"
	@echo "make canaries    what roam uses and changes of PyTorch's private side, one test for each name"
	@echo "make durations   the Python tests, of those with many cases one in eight; keeps how long each takes, by which make quick and make test choose"
	@echo "make rust-test   the planner's tests; its benchmarks run once each"
	@echo "make nightly     100,000 random graphs and as many layouts, against brute force and the verifier; all cases of the planner's tests"
	@echo "make fuzz        2,000 random modules and steps, by their plan and eagerly, bits compared"
	@echo "make sweep       all cases of all Python tests: every sample of PyTorch's operators, every optimizer and module"
	@echo "make hard-limit  a step with a memory budget in a process that the system gives no more"
	@echo "make wheel-test  the wheel in an empty environment, without torch and mip"
	@echo "make bench       the planner's benchmarks"
	@echo "make bench-compare BASE=commit   the same, here and at another commit: names what became slower, and then fails"
	@echo "make gpu         what only a GPU can show, next to eager PyTorch and others, as files in target/gpu"
	@echo "make gpu-test    the tests that need a GPU; without one they are skipped"
	@echo "make docs        install; the documents as a site, warnings being errors, in $(SITE)"
	@echo "make site        the same, against what is installed"
	@echo "make lint        rustfmt, clippy, ruff, mypy, stubtest, and the workflows' linters"
	@echo "make format      let rustfmt and ruff rewrite the sources"
	@echo "make lock        pin the newest Python packages that work together, in constraints.txt"
	@echo "make release     a wheel for any Linux (x86_64) and the source distribution, both tried, into $(DIST)"
	@echo "make clean       remove what these targets made"

$(BIN)/maturin:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt 'maturin>=1.9,<2' uv

wheel: $(BIN)/maturin
	rm -rf $(WHEELS)
	MAKEFLAGS= $(BIN)/maturin build --quiet --profile $(WHEEL_PROFILE) --locked --out $(WHEELS)

# uv unpacks packages in parallel, into a folder on the same disk, and links them from there. It does not read pip's
# settings: where it cannot reach an index, pip installs.
# Python compiles a module when it is first imported; most of those of the packages never are.
dependencies: $(BIN)/maturin
	mkdir -p target
	$(BIN)/python .ci/dependencies.py zoo dev > target/dependencies.txt
	UV_CACHE_DIR=target/uv $(BIN)/uv pip install --python $(BIN)/python \
		--quiet --constraint constraints.txt --requirement target/dependencies.txt || \
		$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --requirement target/dependencies.txt
	rm -rf target/uv

# One core builds the planner while another unpacks packages. An older build of the same version is replaced. The
# benchmarks run where they lie, built by the setuptools that is installed.
install: $(BIN)/maturin
	$(MAKE) --no-print-directory --jobs 2 wheel dependencies
	$(MAKE) --no-print-directory install-wheel

install-wheel:
	$(BIN)/pip install --quiet --no-deps --force-reinstall $(WHEELS)/*.whl
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable benches

demo: install
	$(BIN)/roam plan gpt2-xl
	$(BIN)/python examples/train_gpt2.py

PLANNER_TESTS := $(addprefix tests/planner/test_,$(addsuffix .py,exact formats graph layout plans streams)) \
	tests/benches/test_bench.py tests/benches/test_bench_compare.py

quick:
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-planner:
	$(BIN)/python -m pytest $(PARALLEL) --without-torch $(PLANNER_TESTS)

test:
	$(BIN)/python -m pytest $(PARALLEL) --brief

# What roam uses and changes of PyTorch's private side, one test for each name.
canaries:
	$(BIN)/python -m pytest tests/torch_compat/test_torch_compat.py

durations:
	mkdir -p target
	$(BIN)/python -m pytest $(PARALLEL) --junit-xml=target/tests.xml
	$(BIN)/python benches/durations.py target/tests.xml

rust-build:
	$(CARGO) test --locked --quiet --profile checked --no-run

rust-test:
	$(CARGO) test --locked --quiet --profile checked
	$(CARGO) test --locked --quiet --profile checked --benches

# ROAM_CASES says how many cases a sweep has.
nightly: export ROAM_SWEEP_EVERY = 1
nightly:
	$(CARGO) test --locked --profile checked --test all -- --include-ignored

# ROAM_FUZZ_EXAMPLES says how many.
fuzz: export ROAM_FUZZ_EXAMPLES ?= 2000
fuzz:
	$(BIN)/python -m pytest tests/runs/test_fuzz.py --hypothesis-show-statistics

sweep: export ROAM_SWEEP_EVERY = 1
sweep:
	$(BIN)/python -m pytest $(PARALLEL)

hard-limit: export ROAM_HARD_LIMIT = 1
hard-limit:
	$(BIN)/python -m pytest tests/runtime/test_memory_limit.py tests/runtime/test_paging.py -k the_system_may_give

wheel-test:
	$(PYTHON) -m venv --clear $(BARE)
	$(BARE)/bin/pip install --quiet numpy
	$(BARE)/bin/pip install --quiet --no-deps $(WHEELS)/*.whl
	$(BARE)/bin/python tests/check_wheel.py

bench:
	$(CARGO) bench --locked

# BASE names the commit; OPTIONS goes to benches/compare.py, for example OPTIONS='--quick --filter gpt2-xl'.
bench-compare:
	$(BIN)/python benches/compare.py $(or $(BASE),$(error BASE is not set: say which commit to compare with)) $(OPTIONS)

# Runs what is installed in VENV: no Rust, no network.
gpu:
	mkdir -p target
	$(BIN)/python benches/gpu.py target/gpu

gpu-test:
	$(BIN)/python -m pytest -rs tests/runs/test_gpu.py

docs: install
	$(BIN)/pip install --quiet --constraint constraints.txt "$$(echo $(WHEELS)/*.whl)[docs]"
	$(MAKE) --no-print-directory site

site:
	rm -rf $(SITE)
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --quiet --no-deps --package roam-core --target-dir target
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs $(SITE)
	cp -r target/doc $(SITE)/rust
	test -f $(SITE)/rust/roam_core/index.html

# Each by itself, so that `make ci` fills both cores with them; `make lint` runs one after the other.
lint: lint-python lint-rust lint-workflows

lint-rust:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --quiet --workspace --all-targets -- -D warnings

lint-python:
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest roam._core

lint-workflows:
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(BIN)/zizmor --offline --quiet .github

format:
	$(CARGO) fmt --all
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

lock:
	$(BIN)/pip install --quiet uv
	mkdir -p target
	$(BIN)/python .ci/dependencies.py zoo dev bench docs release > target/dependencies.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.10 --upgrade \
		--no-header --no-annotate target/dependencies.txt --output-file constraints.txt

# zig's linker makes the wheel run on every Linux since 2014, whatever this machine's C library; the source distribution
# is unpacked and built where there is no git.
release:
	$(BIN)/pip install --quiet --constraint constraints.txt ziglang auditwheel
	rm -rf $(DIST)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/maturin build --quiet --release --locked --zig --compatibility manylinux_2_17 --out $(DIST)
	$(BIN)/maturin sdist --out $(DIST)
	$(BIN)/auditwheel show $(DIST)/*.whl
	for made in $(DIST)/*.whl $(DIST)/*.tar.gz; do \
		$(PYTHON) -m venv --clear $(BARE) && $(BARE)/bin/pip install --quiet numpy && \
		(cd $(DIST) && $(abspath $(BARE))/bin/pip install --quiet --no-deps $$(basename $$made)) && \
		$(BARE)/bin/python tests/check_wheel.py || exit 1; \
	done
	ls -l $(DIST)

# While packages arrive, a core compiles the planner and its tests, in one profile, so that most packages serve both. While
# mypy thinks, clippy and the planner's tests run. The Python tests have the machine to themselves.
ci: export CARGO_INCREMENTAL = 0
ci: export WHEEL_PROFILE = checked
ci:
	$(MAKE) --no-print-directory --jobs 2 --output-sync wheel dependencies rust-build
	$(MAKE) --no-print-directory install-wheel
	$(MAKE) --no-print-directory --jobs 2 --output-sync lint rust-test wheel-test
	$(MAKE) --no-print-directory test

clean:
	$(CARGO) clean --quiet
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache benches/build benches/*.egg-info
