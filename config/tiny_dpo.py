# Preference training of the offline profile: one file for three scripts, as config/dpo.py. Prompts are the ten words that its corpus has alone;
# a word that it has heard only in sentences it never says alone, so there is nothing to choose. No guidance.
#   python dpo_sample.py config/tiny_dpo.py                     (after make demo, which makes data/tiny, out/tiny and the Whisper file)
#   python dpo_score.py config/tiny_dpo.py
#   python dpo_train.py config/tiny_dpo.py
# Before and after, with other seeds:
#   python dpo_sample.py config/tiny_dpo.py --run_name=before --rollouts=4 --seed=2
#   python dpo_score.py config/tiny_dpo.py --run_name=before --eval
#   python dpo_sample.py config/tiny_dpo.py --run_name=after --rollouts=4 --seed=2 --ckpt=out/tiny_dpo/round1/merged
#   python dpo_score.py config/tiny_dpo.py --run_name=after --eval --compare=before
out_dir = 'out/tiny_dpo'
if 'prompts' in globals():          # dpo_sample.py
    ckpt = 'out/tiny'
    prompts = 'assets/tiny/words.txt'
    voices = ('data/tiny',)
    speakers_per_text = 8           # all there are
    rollouts = 16
    null_share = 0.0
    cfg_scale = 1.0
    temperature = 0.8               # a group must hold good and bad ones
    cap_min = 40
if 'asr' in globals():              # dpo_score.py
    asr = '.cache/whisper-base.pt'  # assets/tiny/measure.py makes it
    language = 'en'
    asr_window = 8.0
    # digits one by one, and homophones that the small language lacks
    _digits = 'zero one two three four five six seven eight nine'.split()
    _sounds = {'to|too': 'two', 'for': 'four', 'ate': 'eight', 'won': 'one', 'read': 'red', 'blew': 'blue', 'hoarse': 'horse'}
    respell = {r'(\d)': r' \1 '} | {str(n): w for n, w in enumerate(_digits)} | {rf'\b({said})\b': meant for said, meant in _sounds.items()}
    max_pairs = 6
if 'beta' in globals():             # dpo_train.py
    learning_rate = 3e-4            # a small model, and few pairs
    stop_lr = 1e-3
    epochs = 4                      # 56 steps; at twice as many the policy leaves chosen and rejected alike
    warmup_steps = 5
    log_interval = 5
    hold_out = 0.0                  # ten prompts are too few to set some aside
