# The second language of docs/new_language.md on the offline profile's model, minutes on two cores.
#   python finetune.py config/tiny_finetune.py          (after prepare.py config/tiny_spanish.py)
ckpt = 'out/tiny'
data = 'data/tiny_spanish'
out_dir = 'out/spanish'
val_corpora = {'english': 'data/tiny'}      # its held-out texts: what the base knew
lora_rank = 32                              # a small model has little to lend: wide adapters
lora_alpha = 64
lora_targets = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
learning_rate = 4e-3
warmup_steps = 30
batch_size = 24
gradient_accumulation = 1
short_fraction = 0.0                        # all texts are short here
epochs = 10
max_steps = 600
eval_interval = 200
eval_rows = 128
log_interval = 20
save_interval = 200
