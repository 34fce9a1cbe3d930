# The proof's preference training: one file for three scripts, as config/dpo.py. Known words alone and a few longer texts; after finetune.py and merge.py:
#   python dpo_sample.py config/proof_dpo.py
#   python dpo_score.py config/proof_dpo.py
#   python dpo_train.py config/proof_dpo.py
#   python dpo_sample.py config/proof_dpo.py --run_name=round2 --ckpt=out/proof/dpo/round1/merged      and so on
# What a checkpoint makes of the held-out texts, in voices that it knows and does not know and with the null prefix:
#   python dpo_sample.py config/proof_dpo.py config/proof_heldout.py --run_name=test_sft --ckpt=out/proof/sft/merged
#   python dpo_score.py config/proof_dpo.py --run_name=test_sft --eval
out_dir = 'out/proof/dpo'
if 'prompts' in globals():          # dpo_sample.py
    ckpt = 'out/proof/sft/merged'
    prompts = 'data/proof/prompts.jsonl'
    voices = ('data/proof_corpus',)         # a clip of each speaker
    speakers_per_text = 8
    rollouts = 4
    cfg_scale = 1.0                         # guided pairs (1.5) are fewer, and taught less in the three runs that tried both: docs/proof.md
    compile = False                         # seconds of work are not worth a minute of compiling
if 'asr' in globals():              # dpo_score.py
    asr = '.cache/whisper-base.pt'  # assets/tiny/measure.py makes it
    language = 'en'
    asr_window = 8.0
if 'beta' in globals():             # dpo_train.py
    learning_rate = 3e-4            # a small model, and few pairs: with 1e-4 (stop 3e-4) 453 of 600 rollouts were clean, with these 460
    stop_lr = 1e-3
    epochs = 2
    warmup_steps = 10
