# More room for change, for a corpus of some tens of hours: wider adapters, in the MLPs too, at half the learning rate.
#   python finetune.py config/finetune.py config/finetune_wide.py --out_dir=out/wide
lora_rank = 32
lora_alpha = 64
lora_targets = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
learning_rate = 1e-4
epochs = 2
