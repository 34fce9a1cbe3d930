# Over config/proof_dpo.py, for dpo_sample.py alone: the held-out texts instead of the prompts, in the voices of data/proof/voices.csv.
prompts = 'data/proof/heldout.jsonl'
voices = ('data/proof_voices',)
speakers_per_text = 5
rollouts = 4
cfg_scale = 1.0                     # as the checkpoint speaks by itself
seed = 1000
