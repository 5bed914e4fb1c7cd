# What a contributor runs. Every target first makes the virtual environment it needs; `make` alone lists the targets.

PYTHON ?= python3
# `make test TORCH=2.15.0` works in an environment of its own, with that PyTorch (from PyPI: some gigabytes).
TORCH  ?=
VENV   := .venv$(if $(TORCH),-torch-$(TORCH))
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
AUDIT  := .venv-audit
SITE   := .venv-site

# A worker that has nothing left takes half of the tests that another has left.
PYTEST := $(BIN)/pytest -n 2 --dist worksteal
# Tests of one step through every room: capture, a plan, the program, two ranks.
QUICK := end_to_end/test_capture.py distributed/test_gradients.py distributed/test_labels.py

.DEFAULT_GOAL := help
.PHONY: help demo check durations test lint bench bench-foundation bench-pipelines bench-predictor bench-prediction bench-models bench-planning bench-alpa bench-codecs bench-consistency bench-faults campaign bench-checkpoints bench-products bench-pieces bench-jobs bench-serving bench-collectives bench-zero bench-large-batch bench-convolution bench-convolution-algorithms bench-message-driven bench-data bench-dry-runs bench-backend bench-export bench-placements bench-lectures bench-utilization conformance audit clusters matrix gpu gpu-wheels clean bench-ui bench-applications site bench-scaling bench-course

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## train a small GPT on this machine's cores and let it write
	@$(BIN)/meshwright demo

# The code is linted for the pinned PyTorch alone: its annotations change with every version.
test: $(if $(TORCH),$(STAMP),lint) ## everything that CI checks: lint, then the tests of every pair of choices
	@echo "==> pytest"
	@$(PYTEST) -m "not product and not clusters"

durations: $(STAMP) ## the tests of `make test`; write what their files take into docs/decisions/0039
	@$(PYTEST) -m "not product and not clusters" --write-times=docs/decisions/0039-what-the-suite-takes.md

check: lint ## the loop of a developer: lint, the tests without ranks, and a few with two ranks
	@echo "==> pytest, a part"
	@$(PYTEST) -m "not product and not clusters" -q tests/pure $(addprefix tests/,$(QUICK))

lint: $(STAMP) ## ruff, mypy and import-linter
	@echo "==> ruff check"
	@$(BIN)/ruff check
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check
	@echo "==> mypy"
	@$(BIN)/mypy
	@echo "==> lint-imports"
	@$(BIN)/lint-imports

# The tables of what is timed, at one commit. Predictions (`make bench-prediction`, 40 minutes) and parity (`make matrix`) do not fit in two hours.
MODELS := models --only quality speed compiled chosen memory
TIMED  := foundation pipelines zero models planning convolution collectives codecs large_batch
PARITY := dry_runs "models --only parity" "convolution --only convolution-parity"
# What `make matrix` writes.
PRODUCTS := matrix matrix-pipelines dry_runs models-parity convolution-parity

bench: $(STAMP) ## run what is timed beside peers at this commit, write its tables, and lint them (two hours on two quiet cores)
	@rc=0; for part in foundation pipelines zero "$(MODELS)" planning "convolution --only convolution" collectives codecs large_batch; \
	do $(BIN)/python -m benchmarks.$$part || rc=1; done; $(BIN)/python docs/generate.py; \
	$(BIN)/meshwright bench lint $(TIMED:%=benchmarks/results/%.json) || rc=1; exit $$rc

bench-foundation: $(STAMP) ## measure against eager PyTorch, DistributedDataParallel and parallelize_module
	@$(BIN)/python -m benchmarks.foundation

bench-applications: $(STAMP) ## train the applications in examples/ on two ranks: quality beside a trivial baseline, speed-up over one rank
	@$(BIN)/python -m benchmarks.applications

bench-codecs: $(STAMP) ## measure codecs beside a copy; sparse all-reduces, steps and choices of codecs on emulated links
	@$(BIN)/python -m benchmarks.codecs

bench-faults: $(STAMP) ## kill ranks and hosts: what a takeover from memory costs, losses beside a run without kills (10 minutes)
	@$(BIN)/python -m benchmarks.faults

bench-consistency: $(STAMP) ## slow replicas, slow links, kills, and parameter servers, under consistency rules (15 minutes, as root)
	@$(BIN)/python -m benchmarks.consistency

campaign: $(STAMP) ## inflict 1,000 faults of 70 kinds on tiny runs (hours, as root): no lost checkpoint, wrong loss, hang, unexplained end or leftover; goes on where it was stopped (FAULTS="--faults 200 --seed 1")
	@$(BIN)/python -m benchmarks.campaign $(FAULTS)

bench-checkpoints: $(STAMP) ## what saves stop, the disk's speed, memory of loads under other ranks, weights by slices (needs 5 GiB of disk)
	@$(BIN)/python -m benchmarks.checkpoints

bench-data: $(STAMP) ## loaders that fetch ahead beside torch's DataLoader, on a throttled disk; misses beside Belady's and LRU's
	@$(BIN)/python -m benchmarks.data

bench-products: $(STAMP) ## words of products on grids beside formulas and brute force; 4 ranks in two emulated boxes (as root)
	@$(BIN)/python -m benchmarks.products

bench-pieces: $(STAMP) ## products in pieces beside their plain form: 2 ranks in two emulated boxes (as root), and in shared memory
	@$(BIN)/python -m benchmarks.pieces

bench-jobs: $(STAMP) ## job graphs on Ray: makespans beside simulated ones; 100 kills of vertices, workers and the scheduler
	@$(BIN)/python -m benchmarks.jobs

bench-serving: $(STAMP) ## workflows on tiers beside brute force and published plans; runs beside their prediction (10 minutes, as root)
	@$(BIN)/python -m benchmarks.serving

bench-pipelines: $(STAMP) ## measure pipelines against torch.distributed.pipelining; kill ranks at random
	@$(BIN)/python -m benchmarks.pipelines

bench-predictor: $(STAMP) ## judge the predictor by published measurements in validation/ (FOLDERS=... for more tables)
	@$(BIN)/python -m benchmarks.predictor $(FOLDERS)

bench-prediction: $(STAMP) ## calibrate, predict and measure three models under several layouts; emulate; simulate
	@rc=0; for part in prediction memory; do $(BIN)/python -m benchmarks.$$part || rc=1; done; exit $$rc

bench-models: $(STAMP) ## check Hugging Face models against one process, time them beside PyTorch, weigh "auto"
	@$(BIN)/python -m benchmarks.models

bench-planning: $(STAMP) ## plan large models over up to 1,024 devices: seconds from the model to the plan file, memory, growth with layers; plans beside published ones, brute force and all uniform layouts; stages by speed beside uniform layouts, one box at half speed (after `meshwright calibrate`, on two quiet cores)
	@rc=0; for part in planning search placements exhaustive uniform unlike; do $(BIN)/python -m benchmarks.$$part || rc=1; done; exit $$rc

bench-alpa: $(STAMP) ## plan the models of Alpa's evaluation on up to 64 V100 with four planners each; predicted beside published (three hours; goes on where it was stopped at the same commit)
	@$(BIN)/python -m benchmarks.alpa

bench-collectives: $(STAMP) ## measure all-reduces beside gloo, Open MPI and copy-and-add
	@$(BIN)/python -m benchmarks.collectives

bench-zero: $(STAMP) ## measure ZeRO and data parallel beside fully_shard and DistributedDataParallel; memory beside the formulas; communication that stays exposed beside the simulation
	@$(BIN)/python -m benchmarks.zero

bench-large-batch: $(STAMP) ## train with batches of 8 and 256 over equal epochs: linear scaling, warm-up, LAMB
	@$(BIN)/python -m benchmarks.large_batch

bench-convolution: $(STAMP) ## images cut over ranks: parity, plans for 8 devices, speed and memory of a stack of 3x3 convolutions
	@$(BIN)/python -m benchmarks.convolution

bench-convolution-algorithms: $(STAMP) ## train AlexNet and ResNet-18 in an eighth of the workspace of convolutions, beside eager PyTorch
	@$(BIN)/python -m benchmarks.convolution_algorithms

bench-message-driven: $(STAMP) ## message-driven pipelines under jitter beside 1F1B and others, on emulated devices
	@$(BIN)/python -m benchmarks.message_driven

bench-backend: $(STAMP) ## measure DDP, FSDP2, tensor parallel and calls of torch.distributed on the backend "meshwright" beside gloo; 10,000 random collectives
	@$(BIN)/python -m benchmarks.backend

bench-export: $(STAMP) ## exports: losses of FSDP2 files beside ours on ten Hugging Face models, the packages' own parsers, runs on two ranks (network; 15 minutes)
	@$(BIN)/python -m benchmarks.export

bench-ui: $(STAMP) ## seconds of the explorer's views in a browser, for 1,024 ranks and 10,000 actions (Debian's chromium)
	@$(BIN)/python -m benchmarks.ui

conformance: $(STAMP) ## run PyTorch's own distributed tests on the backend "meshwright" beside gloo, on 2 to 4 ranks, and accelerate's scripts (half an hour)
	@$(BIN)/python -m benchmarks.conformance

bench-placements: $(STAMP) ## check the splits of all rules, and what they omit, by PyTorch's strategy_validation (half an hour)
	@$(BIN)/python -m benchmarks.placements_truth

bench-lectures: $(STAMP) ## compute the worked examples of lectures that capture, plan and train models; nothing is timed (2 minutes)
	@$(BIN)/python -m benchmarks.lectures

bench-utilization: $(STAMP) ## measure the parts of this machine's peak that tuned and naive products and steps reach (a quiet machine; 2 minutes)
	@$(BIN)/python -m benchmarks.utilization

bench-scaling: $(STAMP) ## measure strong, batch and model scaling of a GPT on 1, 2 and 4 ranks (a quiet machine; 15 minutes)
	@$(BIN)/python -m benchmarks.scaling

bench-course: $(STAMP) ## CPU seconds of the course's experiments: each under a minute, together under ten (4 minutes)
	@$(BIN)/python -m benchmarks.course

bench-dry-runs: $(STAMP) ## run the steps of all layouts and pipelines on fake GPUs; peak memory beside the predicted
	@$(BIN)/python -m benchmarks.dry_runs

audit: ## ask the advisory databases about every pinned package, with pip-audit in an environment of its own (network)
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT); \
	  $(AUDIT)/bin/python -m pip install -q --disable-pip-version-check "pip-audit>=2.7"; }
	@$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

site: $(SITE)/.installed ## build docs and an API reference as a site in build/site; a broken link is an error (MkDocs in an environment of its own)
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

$(SITE)/.installed: docs/site/requirements.txt
	@test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip install -q --disable-pip-version-check -r docs/site/requirements.txt
	@touch $@

clusters: $(STAMP) ## start a Slurm and a Ray of two nodes on this machine, and run the tests that need them and several hosts (as root; apt-get, ray)
	@$(BIN)/pytest -m clusters tests/clusters tests/end_to_end/test_hosts.py

# Any Python that has PyTorch with CUDA, and nothing that would have to be downloaded: benchmarks/gpu/needs.py says what it lacks.
GPU_PYTHON ?= 3.12

gpu: ## what holds on the GPUs here, in 9 minutes: tests, parity, speed beside PyTorch, predictions (PYTHON=..., GPU="--output DIR")
	@$(PYTHON) -m benchmarks.gpu $(GPU)

gpu-wheels: ## collect what `make gpu` needs beside PyTorch, for a machine without a network (GPU_PYTHON=3.12: its Python)
	@$(PYTHON) -m benchmarks.gpu.needs --python $(GPU_PYTHON)

matrix: $(STAMP) ## the tests of whole products and many random cases; every combination of techniques, and every model under every layout, against one process
	@rc=0; $(PYTEST) -m "(product or hypothesis) and not clusters" --hypothesis-profile=matrix --timeout=3600 || rc=1; \
	for part in matrix $(PARITY); do $(BIN)/python -m benchmarks.$$part || rc=1; done; \
	$(BIN)/meshwright bench lint $(PRODUCTS:%=benchmarks/results/%.json) || rc=1; exit $$rc

clean: ## remove caches and build products (.venv and runs/ stay)
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests $(wildcard benchmarks examples) -name __pycache__ -type d -prune -exec rm -rf {} +

# pip shows its progress on a terminal, and is quiet elsewhere.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -c "" 2>/dev/null || { echo "==> creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "==> installing into $(VENV) (the first time takes minutes)"
	@$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/',cat) constraints.txt > $(VENV)/constraints.txt
	@if [ -t 1 ]; then quiet=; else quiet=-q; fi; \
	  $(BIN)/python -m pip install $$quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[dev]"
	@touch $@
