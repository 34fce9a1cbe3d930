# The released recipe: torchrun --nproc_per_node=4 pretrain.py config/pretrain.py
# 4 ranks x 64 rows x 2 micro-batches = 512 rows a step. The defaults of pretrain.py are this run's; here stands what belongs to a site.
data = 'data/corpus'            # from prepare.py
out_dir = 'out/pretrain'
num_workers = 4                 # a rank
speak = ('Hello there.', 'The quick brown fox jumps over the lazy dog.')
