PYTHON ?= python3
BIN := .venv/bin
TRAINING := .venv-training/bin/python
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

.PHONY: demo test test-training record-training coverage bench clean

demo: .venv/cpu  ## Fuse a bundled model and show the report.
	mkdir -p build
	$(BIN)/attnfuse optimize models/bundled/bert__dyn18__sdpa.onnx -o build/demo.onnx

test: .venv/dev  ## Everything CI checks.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/pytest --numprocesses auto

test-training: .venv-training/done  ## Attention in the real ORTModule, on the CPU; installs 3 GB, then some minutes.
	$(TRAINING) -m pytest -W default tests/training/ortmodule

record-training: .venv-training/done  ## Gradient graphs for the ordinary tests, recorded anew.
	$(TRAINING) -m tests.training.record

coverage: .venv/models  ## Export the zoo, fuse all of it, compare the outputs.
	$(BIN)/python -m models.export --out build/zoo
	$(BIN)/python -m models.coverage build/zoo

bench: .venv/models  ## Speed and memory beside the other tools, into benchmarks/results; half an hour.
	$(BIN)/python benchmarks/fusing.py

clean:
	rm -rf .venv .venv-training build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/cpu: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[cpu]'
	touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[cpu,torch,dev]'
	touch $@

.venv-training/done: pyproject.toml constraints-training.txt tests/training/build_extensions.py
	$(PYTHON) -m venv .venv-training
	$(TRAINING) -m pip install --quiet --constraint constraints-training.txt --requirement constraints-training.txt
	$(TRAINING) -m pip install --quiet --no-deps --editable .
	$(TRAINING) tests/training/build_extensions.py
	touch $@

.venv/models: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[cpu,models]'
	touch $@
