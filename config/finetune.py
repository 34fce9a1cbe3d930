# One language or voice more, or a better one, on a base checkpoint: torchrun --nproc_per_node=4 finetune.py config/finetune.py
# The defaults of finetune.py are this run's (LoRA r 16 on q, k, v, o of all layers); here stands what belongs to a site.
ckpt = 'out/pretrain'
data = 'data/corpus'            # from prepare.py, with the base's codec and tokenizer
out_dir = 'out/finetune'
