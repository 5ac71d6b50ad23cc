PYTHON ?= python3
BIN := .venv/bin
TRAINING := .venv-training/bin/python
TRAINING_NEWEST := .venv-training-newest/bin/python
LOWEST := .venv-lowest/bin
N ?= 10000
SEED ?= 1000000
JOBS ?= $(shell nproc)
MODELS ?= build/zoo
VERIFY ?= both
SWIFTSHADER := $(if $(wildcard /usr/lib/chromium/vk_swiftshader_icd.json),LD_LIBRARY_PATH=/usr/lib/chromium VK_ICD_FILENAMES=/usr/lib/chromium/vk_swiftshader_icd.json)
ON_PROVIDER = $(<:done=bin/python) -m pytest -s -W default tests/providers/models_on_a_provider.py
PACKAGES_openvino := onnxruntime-openvino==1.24.1
PACKAGES_qnn := onnxruntime==1.31.1 onnxruntime-qnn==2.7.0
PACKAGES_webgpu := onnxruntime-webgpu==1.27.0
LINT = $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports
QUICK := tests/graph tests/attention tests/language/test_matcher.py tests/language/test_equivalents.py tests/test_cases.py tests/cli/test_bad_input.py
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable
ARCHITECTURES := albert bart bert bloom clip_vision deberta_v2 distilbert gemma3 gpt2 llama_past modernbert opt phi3 qwen3_past roberta sam_vision swin t5 vit whisper_decoder

.PHONY: help demo quick test test-all test-lowest test-browser test-olive test-models test-genai test-openvino test-qnn test-webgpu test-web providers test-training training-modules record-training docs readme support reasons schemas provider-pages coverage gallery drift fuzz bench clean

help:  ## What can be made.
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "  %-18s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/cpu  ## Fuse a bundled model and show the report.
	mkdir -p build
	$(BIN)/attnfuse optimize models/bundled/bert__dyn18__sdpa.onnx -o build/demo.onnx --report build/demo.html

quick: .venv/dev  ## Format, lint, import contracts, and the tests that take the least time, in 20 seconds.
	$(LINT)
	$(BIN)/pytest --numprocesses auto --dist worksteal -m "not exhaustive" $(QUICK)

test: .venv/dev  ## Format, lint, types, import contracts, and a sample of every test, in ten minutes on two cores.
	$(LINT)
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pytest --numprocesses auto --dist worksteal -m "not exhaustive" tests patterns/gallery

test-all: test  ## The same with all cases of every test; the workflow `tests` runs these on every system.
	$(BIN)/pytest --numprocesses auto --dist worksteal -m exhaustive tests

test-lowest: .venv-lowest/done  ## The same sample with the oldest versions that pyproject.toml allows; CI runs this too.
	$(LOWEST)/python -m pip check
	$(LOWEST)/pytest -m "not newest and not exhaustive" --numprocesses auto --dist worksteal

test-browser: .venv/browser  ## The report's page in Chromium, with screenshots; needs chromium, or playwright install chromium.
	$(BIN)/pytest tests/browser/page_in_chromium.py

test-olive: .venv/olive  ## The example for Olive.
	$(BIN)/pytest tests/olive/pass_of_olive.py

test-models: .venv/dev .venv/models  ## Models of transformers: their exporter, and training on PyTorch with the gradients of every parameter.
	$(BIN)/pytest tests/bench/whole_models_of_transformers.py tests/docs/example_of_transformers.py tests/fusion/shared_cache/paged_of_transformers.py tests/fusion/shared_cache/served_of_transformers.py tests/mixers/mixers_of_transformers.py tests/training/pytorch/models_of_transformers.py

test-genai: .venv/genai  ## Decoders with a shared cache in onnxruntime-genai, token by token beside transformers; some minutes.
	$(BIN)/python -m benchmarks.genai_tokens --to benchmarks/results/genai_cpu.md

docs: .venv/docs  ## The documentation as a site, into build/docs; a link that leads nowhere is an error.
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs build/docs

readme: .venv/cpu  ## The session in README.md and the picture of it, run and drawn anew.
	$(BIN)/python docs/readme.py

support: .venv/cpu  ## The support matrix, docs/support.md, written anew from the records.
	$(BIN)/python docs/support_matrix.py

reasons: .venv/cpu  ## The index of reason codes, docs/reasons.md, written anew from the code.
	$(BIN)/python docs/reasons.py

schemas: .venv/dev  ## graph/schemas.txt anew, with what the installed onnx and onnxruntime have besides; what is new is not read.
	$(BIN)/python -m tests.support.operator_schemas

provider-pages: .venv/cpu  ## A page for each execution provider, docs/providers, written anew from records and tables.
	$(BIN)/python docs/provider_pages.py

test-openvino: .venv-openvino/done .venv/cpu  ## Bundled models on OpenVINO, with what it takes of them and how fast it is.
	ATTNFUSE_EP=openvino ATTNFUSE_PYTHON=$(BIN)/python $(ON_PROVIDER)

test-qnn: .venv-qnn/done .venv/cpu  ## The same on QNN's emulator of the HTP.
	ATTNFUSE_EP=qnn ATTNFUSE_PYTHON=$(BIN)/python $(ON_PROVIDER)

test-webgpu: .venv-webgpu/done .venv/cpu  ## The same on WebGPU; by SwiftShader where Debian's chromium is, else on the GPU.
	ATTNFUSE_EP=webgpu ATTNFUSE_PYTHON=$(BIN)/python $(SWIFTSHADER) $(ON_PROVIDER)

test-web: .venv/cpu  ## Bundled models in onnxruntime-web in Chromium, by WASM and by WebGPU on SwiftShader; needs node and chromium.
	npm --prefix tests/providers/web install --silent --no-package-lock
	for ep in wasm webgpu; do PYTHONPATH=. $(BIN)/python tests/providers/web/write_cases.py build/web/$$ep $$ep && node tests/providers/web/run.js build/web/$$ep $$ep || exit 1; done

providers: .venv-openvino/done .venv-qnn/done .venv-webgpu/done .venv/cpu  ## Exports in MODELS=build/zoo on OpenVINO, QNN, WASM and WebGPU beside what is written for them, into benchmarks/results.
	-for ep in openvino qnn; do $(BIN)/python -m benchmarks.providers --ep $$ep --python .venv-$$ep/bin/python $(MODELS) --to benchmarks/results/providers_$$ep.md; done
	npm --prefix tests/providers/web install --silent --no-package-lock
	-$(BIN)/python -m benchmarks.providers --ep wasm $(MODELS) --to benchmarks/results/providers_wasm.md
	-$(SWIFTSHADER) $(BIN)/python -m benchmarks.providers --ep webgpu --python .venv-webgpu/bin/python $(MODELS) --to benchmarks/results/providers_webgpu.md

test-training: .venv-training/done .venv-training-newest/done  ## Attention in the real ORTModule, on the CPU, with torch 2.4 and today's; installs 4 GB, then some minutes.
	$(TRAINING) -m pytest -W default tests/training/ortmodule
	$(TRAINING_NEWEST) -m pytest -W default tests/training/ortmodule

training-modules: .venv/dev .venv/models .venv-training/done .venv-training-newest/done  ## Modules in training with every back end and PyTorch, beside eager, into benchmarks/results; some minutes.
	PYTHONPATH=. $(BIN)/python -m benchmarks.training_modules torch=$(BIN)/python ortmodule=$(TRAINING) ortmodule=$(TRAINING_NEWEST)

record-training: .venv-training/done .venv-training-newest/done  ## Gradient graphs for the ordinary tests, recorded anew.
	$(TRAINING) -m tests.training.record
	$(TRAINING_NEWEST) -m tests.training.record

coverage: .venv/models  ## Export the zoo, fuse all of it, compare the outputs.
	$(BIN)/python -m models.export --out build/zoo
	$(BIN)/python -m models.coverage build/zoo

gallery: .venv/models  ## A page for each of twenty architectures, with a list, into build/gallery.
	$(BIN)/python -m models.export --out build/architectures --only "$$(printf '%s__dyn18__eager,' $(ARCHITECTURES))"
	$(BIN)/attnfuse optimize build/architectures --dry-run --ep cpu --report build/gallery

drift:  ## The zoo's small recipes and the bundled models over versions of onnx, onnxruntime, onnxscript and transformers, each in an environment of its own, into benchmarks/results; an hour.
	$(PYTHON) -m benchmarks.drift --to benchmarks/results/drift.md

fuzz: .venv/dev  ## N generated graphs, each held against itself fused; SEED, JOBS, VERIFY=sites|none|both, EP.
	$(BIN)/python -m tests.fuzz --graphs $(N) --seed $(SEED) --jobs $(JOBS) --verify $(VERIFY) $(if $(EP),--ep $(EP)) --out build/fuzz

bench: .venv/models  ## Speed and memory beside the other tools, into benchmarks/results; half an hour.
	$(BIN)/python -m benchmarks.fusing --to benchmarks/results/fusing.md

clean:  ## Take away environments and everything that was built.
	rm -rf .venv .venv-lowest .venv-training .venv-training-newest .venv-openvino .venv-qnn .venv-webgpu build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/cpu: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[cpu,report]'
	touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[cpu,torch,report,dev]'
	touch $@

.venv/browser: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[cpu,report,dev,browser]'
	touch $@

.venv/olive: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[cpu,torch,dev,olive]'
	touch $@

.venv/genai: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[cpu,models,genai]'
	touch $@

.venv/docs: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[docs]'
	touch $@

.venv-lowest/done: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv .venv-lowest
	$(LOWEST)/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[cpu,proof,report]' \
		hypothesis justhtml pytest pytest-xdist torch
	touch $@

.venv-openvino/done .venv-qnn/done .venv-webgpu/done: .venv-%/done: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --editable . hypothesis pytest $(PACKAGES_$*)
	touch $@

.venv-training/done .venv-training-newest/done: .venv-%/done: pyproject.toml constraints-%.txt tests/training/extensions.py
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --constraint constraints-$*.txt --requirement constraints-$*.txt
	.venv-$*/bin/python -m pip install --quiet --no-deps --editable .
	.venv-$*/bin/python -m tests.training.extensions
	touch $@

.venv/models: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[cpu,models]'
	touch $@
