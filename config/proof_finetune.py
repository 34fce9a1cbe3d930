# The proof's fine-tuning: repetition of short texts, learned on the corpus of the base. After pretrain.py config/proof_pretrain.py:
#   python finetune.py config/proof_finetune.py
#   python finetune.py config/proof_finetune.py --out_dir=out/proof/plain --text_repetition="{'enabled': False}"       the same without repetition
ckpt = 'out/proof/base'
data = 'data/proof_corpus'
out_dir = 'out/proof/sft'
lora_rank = 32                              # a small model has little to lend: wide adapters
lora_alpha = 64
lora_targets = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
learning_rate = 1e-3
warmup_steps = 50
batch_size = 64
gradient_accumulation = 1
epochs = 10                                 # of twice the short rows, a ninth of the corpus
max_steps = 600
eval_interval = 200
eval_rows = 512
log_interval = 20
save_interval = 200
