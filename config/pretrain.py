# The released recipe: torchrun --nproc_per_node=4 pretrain.py config/pretrain.py
# 4 ranks x 64 rows x 2 micro-batches = 512 rows a step: on one GPU --gradient_accumulation=8 keeps them, on two 4, on eight 1.
# 64 rows of 9 s took 23 GiB; with less --P=8 --M=8 --batch_size=32 (P*K + M) and twice the accumulation. The defaults of pretrain.py are this run's; here stands what belongs to a site.
data = 'data/corpus'            # from prepare.py
out_dir = 'out/pretrain'
num_workers = 4                 # a rank
speak = ('en: Hello there.', 'en: The quick brown fox jumps over the lazy dog.')     # tagged as config/prepare.py tags; without tags leave 'en: ' out
