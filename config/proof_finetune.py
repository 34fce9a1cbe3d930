# The proof's fine-tuning: repetition of short texts, learned on the corpus of the base. After pretrain.py config/proof_pretrain.py:
#   python finetune.py config/proof_finetune.py
#   python finetune.py config/proof_finetune.py --out_dir=out/proof/plain --text_repetition="{'enabled': False, 'apply_below': 14}"       the same without repetition
ckpt = 'out/proof/base'
data = 'data/proof_corpus'
out_dir = 'out/proof/sft'
lora_rank = 32                              # a small model has little to lend: wide adapters
lora_alpha = 64
lora_targets = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
text_repetition = {'enabled': True, 'apply_below': 14, 'target_text_tokens': 40}      # 3 words, 9 words. Of 984 rollouts of the prompts 740 were clean; with 32 (7 words) 703
frame_drop = 0.0                            # of 4,000 rollouts after 600 steps 3,103 were clean; with 1.0, as the base was trained, 3,052
learning_rate = 1e-3
warmup_steps = 50
batch_size = 64
gradient_accumulation = 1
epochs = 10                                 # more than max_steps gives: it ends in the sixth
max_steps = 1500
eval_interval = 500
eval_rows = 512
log_interval = 20
save_interval = 500
