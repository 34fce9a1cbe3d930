# Preference training, a round: the same file for its three scripts, each of which has the names of its own part.
#   python dpo_sample.py config/dpo.py --ckpt=out/finetune/merged --run_name=round1
#   python dpo_score.py config/dpo.py --run_name=round1
#   python dpo_train.py config/dpo.py --run_name=round1
#   python dpo_sample.py config/dpo.py --ckpt=out/dpo/round1/merged --run_name=round2      and so on: two rounds with equal settings
# The scripts' defaults are the published recipe; here stands what belongs to a site, and what must be equal in two scripts.
out_dir = 'out/dpo'
if 'prompts' in globals():          # dpo_sample.py
    prompts = 'data/prompts.jsonl'  # {"id": ..., "text": ..., "category": ..., "lang": ...} a line
    voices = ('data/corpus',)
    language_tags = True            # as config/prepare.py tags; False for a corpus without
if 'asr' in globals():              # dpo_score.py
    asr = 'large-v3'
    speaker_model = 'microsoft/wavlm-base-plus-sv'
if 'sec_base' in globals():         # both: the expected length of a text
    sec_base, sec_per_word = 0.7, 0.4
