PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
LOWEST := .venv-lowest
RELEASE := build/release
PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal

# The second one reaches the isolated build of this project, which newer versions of pip keep from the first.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo script test checks short-tests fairseq test-long test-lowest fuzz faults format docs pictures bench release-check constraints constraints-lowest clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ./captum_norm_models --editable '.[cluster,demo,serve,subword-nmt,tables]' --group dev
	$(BIN)/python -m pip install --quiet --no-deps --target .venv/hqq --group hqq
	touch $@

demo: $(INSTALLED) ## Explain a sentence with a small model; align a story with another
	$(BIN)/captum-norm demo
	$(BIN)/norm-align sweep --corpus alibi=blue-beard

SCRIPT := captum_norm/show/script
MODULES := $(SCRIPT)/node_modules/.package-lock.json
NPM := PATH="$(CURDIR)/$(BIN):$$PATH" npm --prefix $(SCRIPT)

$(MODULES): $(SCRIPT)/package-lock.json | $(INSTALLED)
	$(NPM) ci --no-audit --no-fund
	touch $@

script: $(MODULES) ## Check the pages' script and bundle it into captum_norm/show/assets
	$(NPM) run check
	$(NPM) test
	$(NPM) run build

test: checks short-tests ## Check style and types; run the short tests and the doctests (9 minutes on two cores)

checks: $(INSTALLED) $(MODULES)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(NPM) run check
	$(NPM) test

short-tests: TIER = -m "not long"
short-tests: $(INSTALLED) $(MODULES)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest $(TIER) $(PARALLEL)

fairseq: ## Make the environment of fairseq that some long tests use, which make it themselves otherwise
	$(PYTHON) -m tests.fairseq_environment

test-long: $(INSTALLED) ## Run the long tests: all families, kills, processes, fairseq, pages, documentation
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -m long $(PARALLEL)

$(LOWEST)/.installed: PIP_CONSTRAINT := constraints-lowest.txt
$(LOWEST)/.installed: PIP_BUILD_CONSTRAINT := constraints-lowest.txt
$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python -m pip install --quiet --editable ./captum_norm_models --editable '.[cluster,demo,serve,subword-nmt,tables]' --group docs --group ecosystem --group test
	touch $@

test-lowest: $(LOWEST)/.installed ## Run the short tests on the lowest versions that pyproject.toml admits
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(LOWEST)/bin/pytest -m "not long" $(PARALLEL)

# Cases per test are some hundreds in `make test`; here, FACTOR times as many.
fuzz: FACTOR ?= 40
fuzz: $(INSTALLED) ## Run the tests on generated inputs and damaged files at length (FACTOR=40)
	CAPTUM_NORM_FUZZ=$(FACTOR) HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -m fuzz $(PARALLEL) tests

faults: FACTOR ?= 30
faults: $(INSTALLED) ## Kill workers, nodes and drivers of a run on a cluster at random (FACTOR=30 times)
	CAPTUM_NORM_FAULTS=$(FACTOR) HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests/runs/test_faults.py

format: $(INSTALLED) $(MODULES) ## Format the code and repair what ruff can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(NPM) run format

docs: $(INSTALLED) ## Build the documentation into docs/_build/html
	$(BIN)/sphinx-build --fail-on-warning --keep-going docs docs/_build/html

pictures: $(INSTALLED) ## Take the pictures of the documentation's gallery
	$(BIN)/python -m benchmarks.pictures

bench: $(INSTALLED) ## Time the first minute, norms, methods, faithfulness scores, analyses and pages
	$(BIN)/python -m benchmarks.first_minutes
	$(BIN)/python -m benchmarks.norms
	$(BIN)/python -m benchmarks.methods
	$(BIN)/python -m benchmarks.analysis
	$(BIN)/python -m benchmarks.page

# Run once the version is in pyproject.toml, CITATION.cff and CHANGELOG.md. dist/ must be empty: what it then has is what
# was checked. The archives' times are those of the commit, so that they can be built again, bit for bit; those of the
# models have hatchling's own, so that the same version is the same bits in every release.
release-check: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
release-check: $(INSTALLED) ## Build a release into dist/, install it elsewhere and run it there (TAG=v1.2.3)
	test -z "$$(ls dist 2>/dev/null)"
	$(BIN)/python .ci/release.py $(TAG)
	$(BIN)/python -m build --outdir dist
	env -u SOURCE_DATE_EPOCH $(BIN)/python -m build --outdir dist captum_norm_models
	$(BIN)/python .ci/release.py $(TAG)
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet $(CURDIR)/dist/captum_norm_models-*.whl \
		"captum-norm[demo] @ file://$$(ls $(CURDIR)/dist/captum_norm-*.whl)"
	cd $(RELEASE) && bin/captum-norm doctor && bin/captum-norm demo && bin/norm-align sweep --corpus alibi=blue-beard

# torch stays at the version of which CI has a CPU build: any other brings gigabytes of CUDA libraries.
constraints: PIP_CONSTRAINT :=
constraints: PIP_BUILD_CONSTRAINT :=
constraints: ## Resolve all dependencies afresh and pin them in constraints.txt
	$(PYTHON) -m venv --clear build/venv
	build/venv/bin/python -m pip install --quiet --upgrade pip
	build/venv/bin/python -m pip install --quiet --editable ./captum_norm_models --editable '.[cluster,demo,serve,subword-nmt,tables]' --group dev --group hqq hatchling editables torch==2.13.0
	build/venv/bin/python -m pip freeze --all --exclude-editable | sed 's/+.*//' > constraints.txt

constraints-lowest: PIP_CONSTRAINT := build/lowest.txt
constraints-lowest: PIP_BUILD_CONSTRAINT := build/lowest.txt
constraints-lowest: ## Resolve anew with every lower bound of pyproject.toml, in constraints-lowest.txt
	mkdir -p build
	$(PYTHON) -m tests.lowest_versions > build/lowest.txt
	$(PYTHON) -m venv --clear build/venv
	build/venv/bin/python -m pip install --quiet --upgrade pip
	build/venv/bin/python -m pip install --quiet --editable ./captum_norm_models --editable '.[cluster,demo,serve,subword-nmt,tables]' --group docs --group ecosystem --group test hatchling editables
	build/venv/bin/python -m pip freeze --all --exclude-editable | sed 's/+.*//' > constraints-lowest.txt

clean: ## Remove everything that was installed, built or cached here
	rm -rf .venv $(LOWEST) $(SCRIPT)/node_modules .mypy_cache .pytest_cache .ruff_cache build dist docs/_build
	find alignment benchmarks captum_norm captum_norm_models docs tests -name __pycache__ -prune -exec rm -rf {} +
