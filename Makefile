# make demo   set up and run the main example
# make test   set up and run the tests
# make test-gpu   the tests of the GPU kernels, on a GPU
# make lint types bench   the rest; TORCH= chooses the torch build, PYTHON= the interpreter.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# For a build of torch that brings none of its own.
TRITON ?= triton==3.6.0
VENV ?= .venv

BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
MYPY := $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache
# One stamp a torch build: another TORCH= on the make line installs again, the same one does not.
STAMP := $(VENV)/ready-$(subst /,_,$(subst =,-,$(TORCH)))

.PHONY: setup demo huggingface test test-gpu lint types bench clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed (PYTHON= chooses it)" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/ready-*
	@echo "installing $(TORCH) and dsa-compile into $(VENV)"
	@$(PIP) 'setuptools>=77' '$(TORCH)'
	@$(PIP) --no-build-isolation --editable '.[test,dev,examples]' '$(TORCH)'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) '$(TRITON)'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/two_level_indexer.py

huggingface: $(STAMP)
	@$(BIN)/python examples/huggingface.py

# `python -m pytest` would put this folder on the path, and transformers looks for a package named
# kernels. Triton reads whether to interpret its kernels once a process: they are tested in their own.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal $(ARGS) --ignore=tests/triton_kernels
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal tests/triton_kernels

# On a machine with a GPU, in the Python that has PyTorch and Triton for it (BIN= its folder).
test-gpu:
	$(BIN)/pytest tests/triton_kernels $(ARGS)
	$(BIN)/pytest -k "gpu or named" $(ARGS) tests/api/test_backend.py \
		tests/api/test_breakable.py tests/export/test_gpu_package.py tests/deep_kernels/test_gpu.py

lint: $(STAMP)
	$(BIN)/ruff check .

# mypy knows nothing of setuptools' package-dir: show it the package as it is when installed.
types: $(STAMP)
	@rm -rf build/types && mkdir -p build/types/dsa_compile
	@ln -s $(CURDIR)/dsa_compile/* $(CURDIR)/passes $(CURDIR)/kernels build/types/dsa_compile/
	cd build/types && $(MYPY) -p dsa_compile
	cd build/types && MYPYPATH=$(CURDIR)/build/types:$(CURDIR)/examples $(MYPY) $(CURDIR)/examples $(CURDIR)/benchmarks

bench: $(STAMP)
	@$(BIN)/python benchmarks/consumer_layer.py
	@$(BIN)/python benchmarks/passes.py

clean:
	rm -rf $(VENV) build dist *.egg-info
