# Everything a contributor runs. Each target sets up what it needs in .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Tests start hundreds of processes: where bytecode is not kept, each of them compiles our packages anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-slow lint protos dist clean

# constraints-dev.txt pins torch for development only, so that everybody's tests run the same kernels.
# Without --no-compile half of the time goes into bytecode of torch that nobody imports.
$(STAMP): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Starlings needs Python 3.11 or newer: make PYTHON=python3.11 setup")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints-dev.txt -e '.[dev]'
	@touch $@

# What only `lint` and `test-slow` need.
$(VENV)/.ready-%: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints-dev.txt -e '.[dev,$*]'
	@touch $@

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/starlings demo $(ARGS)

# Most tests wait for something most of the time: three at a time fill two cores. tests/conftest.py spreads those that
# start whole swarms.
test: $(STAMP)
ifdef ARGS
	$(BIN)/python -m pytest -m 'not slow' $(ARGS)
else
	$(BIN)/python -m pytest -m 'not slow' -n 3 --dist loadfile --no-loadscope-reorder
endif

test-slow: $(VENV)/.ready-fuzz
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32
	$(BIN)/mypy --platform darwin

# The generated code is committed; tests/protos checks that it is current.
protos: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--python_out=protos --mypy_out=protos --grpc_python_out=protos \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=protos \
		protos/starlings_protos/*.proto

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) dist
