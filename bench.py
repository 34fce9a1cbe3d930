"""
Speed of one full training step (forward, losses, backward, clipping, AdamW) of the released 14-layer shape on packed random rows.

    python bench.py                             # one GPU: eager and compiled, bfloat16
    python bench.py --layers=2 --rows=4 --device=cpu --steps=2      # does it run at all
"""
import math, time

# -----------------------------------------------------------------------------
rows = 64                       # 16 speakers x 3 clips + 16 null rows, as in pretraining
audio_seconds = 581.0           # of all rows together
text_tokens = 33                # a row, mean
layers = 14
vocab = 248320
steps = 20                      # timed, after 3 warm-up steps
peak_tflops = 989.0             # dense bf16 of an H100 or H200; share of peak counts model flops only
modes = ('eager', 'compiled')
device = 'auto'                 # 'auto' = cuda where there is one
seed = 0
# -----------------------------------------------------------------------------
from configurator import configure
configure(globals())

from contextlib import nullcontext

import numpy as np
import torch

import model as M

if device == 'auto':
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
torch.set_float32_matmul_precision('high')
rng = np.random.default_rng(seed)
cfg = M.Config(num_hidden_layers=layers, vocab_size=vocab)
share = rng.dirichlet(np.full(rows, 4.0))                       # row lengths vary as speech does
frames = np.maximum((share * audio_seconds * 22050 / 1024).astype(int), 1)
batch = M.pack([{'text': M.layout(rng.integers(0, 200, rng.integers(text_tokens - 20, text_tokens + 15)).tolist(), cfg.special_tokens | (
    {} if vocab > 248077 else dict(start_of_text=1, end_of_text=2, start_of_speech=3))),
    'codes': rng.integers(0, 2016, (n, 8)), 'ref': None if i >= 0.75 * rows else rng.integers(0, 2016, (int(rng.uniform(64, 323)), 8)),
    'null': i >= 0.75 * rows, 'drop': rng.random() < 0.15, 'speaker': -1 if i >= 0.75 * rows else i // 3} for i, n in enumerate(frames)], cfg)
batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
tokens, f = len(batch['position']), len(batch['codes'])
count = {'frames': f, 'stops': f + rows, 'rows': rows}
with torch.device(device):
    model = M.Gepard(cfg)
for name, p in model.named_parameters():                        # speed does not ask for a careful initialisation
    torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else None
model.train()
backbone = sum(p.numel() for n, p in model.named_parameters() if M.group_of(n) == 'backbone')
flops = 6 * backbone * tokens + 6 * layers * cfg.num_attention_heads * cfg.head_dim * int((batch['cu_seqlens'].diff().long() ** 2).sum())
print(f'{rows} rows, {f / 22050 * 1024:.0f} s of audio, {tokens:,} tokens, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {flops / 1e12:.2f} TFLOP a step, '
      f'torch {torch.__version__}, {torch.cuda.get_device_name() if device == "cuda" else "cpu"}')
cast = torch.autocast(device, torch.bfloat16) if device == 'cuda' else nullcontext()
wait = torch.cuda.synchronize if device == 'cuda' else lambda: None


def loss_of(batch):
    out = model(batch)
    return M.losses(out, batch, cfg, count, 0.3, 0.3)['total']

for mode in modes:
    optimizer = torch.optim.AdamW(M.param_groups(model, 1e-5, dict(backbone=1, audio=0.5, embed=0.2, ref=0.1), 0.0), fused=True)
    run = torch.compile(loss_of) if mode == 'compiled' else loss_of
    if device == 'cuda':
        torch.cuda.reset_peak_memory_stats()
    begin = time.time()
    for step in range(steps + 3):
        if step == 3:
            wait()
            warm, start = time.time() - begin, time.time()
        with cast:
            loss = run(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    wait()
    ms = 1000 * (time.time() - start) / steps
    memory = torch.cuda.max_memory_allocated() / 2 ** 30 if device == 'cuda' else math.nan
    print(f'{mode:9s} {ms:8.1f} ms a step, {tokens / ms * 1000:,.0f} tokens/s, {f / 22050 * 1024 / ms * 1000:,.0f} s of audio/s, {flops / ms / 1e9:.0f} TFLOP/s = '
          f'{100 * flops / ms / 1e9 / peak_tflops:.1f}% of peak, {memory:.1f} GiB, warm-up {warm:.0f} s, loss {float(loss.detach()):.2f}')
    del optimizer
