# A language that the base never heard, with a replay of those it knows: docs/new_language.md is the recipe.
#   torchrun --nproc_per_node=4 finetune.py config/finetune_language.py --ckpt=you/base
data = 'data/language'          # sources of the new language, and max_rows of the old ones
out_dir = 'out/language'
val_corpora = {'old': 'data/corpus'}    # the base's corpus, its held-out rows: what is forgotten shows here
lora_rank = 32                  # more to learn than a voice or an accent
lora_alpha = 64
lora_targets = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
