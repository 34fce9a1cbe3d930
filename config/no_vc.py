# Without voice cloning: no Q-Former, no null prefix, plain rows. After another file: pretrain.py config/pretrain.py config/no_vc.py
num_queries = 0
supcon_weight = 0.0
diversity_weight = 0.0
batch_size = 64
