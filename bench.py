"""
Speed of the training step in the released 14-layer shape, side by side with the ordinary way: transformers' own Qwen3.5,
rows padded to the longest, a loop over 32 small tables and heads. Everything is on: speaker prefix, SupCon, diversity,
clipping, AdamW. Row lengths differ from step to step, as in training; how often torch.compile had to compile is printed.

    python bench.py                             # one GPU, bfloat16: padded, packed, compiled
    python bench.py --modes=compiled --profile=true                 # where the time goes: kernels, idle share
    python bench.py --modes=curve --data=data/tiny --steps=300      # loss of the same rows: padded and packed float32, packed bfloat16
    python bench.py --layers=2 --rows=4 --audio_seconds=20 --vocab=4096 --device=cpu --steps=2      # does it run at all
"""
import math, time

# -----------------------------------------------------------------------------
modes = ('padded', 'packed', 'compiled')        # and 'curve'
rows = 64                       # 16 speakers x 3 clips + 16 null rows, as in pretraining
audio_seconds = 581.0           # of all rows together, about
text_tokens = 33                # a row, mean
layers = 14
vocab = 248320
steps = 20                      # timed, after 5 warm-up steps
batches = 8                     # different ones, in turn
recompute = False               # activation checkpointing
profile = False                 # the last mode's kernels by time
peak_tflops = 989.0             # dense bf16 of an H100 or H200; share of peak counts the backbone's flops only
data = ''                       # corpus of mode 'curve'
out = 'out/bench'               # where mode 'curve' writes curve.json and curve.png
device = 'auto'                 # 'auto' = cuda where there is one
seed = 0
# -----------------------------------------------------------------------------
from configurator import configure
configure(globals())

import os
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import model as M

cuda = device == 'cuda' or device == 'auto' and torch.cuda.is_available()
device = 'cuda' if cuda else 'cpu'
torch.set_float32_matmul_precision('high')
rng = np.random.default_rng(seed)
wait = torch.cuda.synchronize if cuda else lambda: None


class Padded(nn.Module):
    """The same model as one would write it on transformers. Its parameters have the published names."""
    def __init__(self, cfg):
        super().__init__()
        from transformers import Qwen3_5TextConfig, Qwen3_5TextModel
        self.cfg, d, w = cfg, cfg.hidden_size, cfg.audio_embed_dim
        self.model = Qwen3_5TextModel(Qwen3_5TextConfig(**{k: v for k, v in cfg.backbone().items() if k not in ('architectures', 'model_type')},
                                                        attn_implementation='sdpa'))
        self.audio_embeddings = nn.ModuleList(nn.Embedding(n, w) for n in cfg.levels)
        self.audio_embed_proj = nn.Sequential(nn.Linear(len(cfg.levels) * w, d), nn.GELU(), nn.Linear(d, d))
        self.codebook_heads = nn.ModuleList(nn.Linear(d, n) for n in cfg.levels)
        self.stop_head = nn.Linear(d, 1)
        self.register_buffer('audio_embed_scale', torch.ones(1))
        self.ref_compressor, self.null_prefix = M.PrefixEncoder(cfg), nn.Parameter(torch.empty(cfg.num_queries, d))
        self.supcon_head = M.SupConHead(d, cfg.supcon_hidden, cfg.supcon_dim)

    def forward(self, b):
        """A batch of `pad` -> the same losses as M.losses, for all rows of one step."""
        prefix, q = self.ref_compressor(M.unfold(b['ref'].long()), b['ref_mask'], self.cfg.codec['fsq_levels'])
        prefix = torch.where(b['drop'][:, None, None], self.null_prefix.to(prefix.dtype), prefix)
        codes = M.unfold(b['codes'].long())                                                   # [B, F, K]
        frames = self.audio_embed_proj(torch.cat([e(codes[..., k]) for k, e in enumerate(self.audio_embeddings)], -1))
        frames = F.layer_norm(frames, frames.shape[-1:]) * self.audio_embed_scale
        text = self.model.embed_tokens(b['text'])
        rows = [torch.cat((prefix[i].to(frames.dtype), text[i, :t].to(frames.dtype), frames[i, :f])) for i, (t, f) in enumerate(b['lengths'])]
        x = nn.utils.rnn.pad_sequence(rows, batch_first=True)                                 # [B, longest, d]
        h = self.model(inputs_embeds=x, attention_mask=b['mask']).last_hidden_state
        code = 0
        for k, head in enumerate(self.codebook_heads):
            code = code + F.cross_entropy(head(h).float().flatten(0, 1), b['labels'][..., k].flatten(), ignore_index=-100)
        stop = F.binary_cross_entropy_with_logits(self.stop_head(h).float()[..., 0], b['stop'], reduction='none', pos_weight=b['pos_weight'])
        stop = (stop * b['stop_mask']).sum() / b['stop_mask'].sum()
        features = F.normalize(self.supcon_head(q.mean(1)).float(), dim=-1)
        total = code + self.cfg.stop_loss_weight * stop + 0.3 * M.diversity(q) / len(rows) + 0.3 * M.supcon(features, b['speaker'], b['null'])[0]
        return {'total': total, 'code': code}


def pad(rows, cfg):
    """Rows as for M.pack -> padded batch, labels shifted so that SOS and each frame predict the next one."""
    b = {k: v for k, v in M.pack(rows, cfg).items() if k in ('ref', 'ref_mask', 'drop', 'null', 'speaker')}
    p, b['lengths'] = cfg.num_queries, [(len(r['text']), len(r['codes'])) for r in rows]
    longest, most = max(p + t + f for t, f in b['lengths']), max(f for _, f in b['lengths'])
    b['text'] = torch.zeros(len(rows), max(t for t, _ in b['lengths']), dtype=torch.long)
    b['codes'] = torch.zeros(len(rows), most, 8, dtype=torch.int16)
    b['labels'] = torch.full((len(rows), longest, len(cfg.levels)), -100)
    b['mask'], b['stop'], b['stop_mask'] = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest), torch.zeros(len(rows), longest)
    for i, (r, (t, f)) in enumerate(zip(rows, b['lengths'])):
        codes, first = torch.from_numpy(np.asarray(r['codes']).astype(np.int16)), p + t - 1
        b['text'][i, :t], b['codes'][i, :f], b['mask'][i, :p + t + f] = torch.tensor(r['text']), codes, 1
        b['labels'][i, first:first + f] = M.unfold(codes.long())
        b['stop'][i, first + f], b['stop_mask'][i, first:first + f + 1] = 1, 1
    return b | {'pos_weight': torch.tensor(cfg.stop_pos_weight)}


def random_rows(cfg):
    share = rng.dirichlet(np.full(rows, 4.0)) * rng.uniform(0.95, 1.05)        # row lengths vary as speech does
    return [{'text': M.layout(rng.integers(0, 200, rng.integers(text_tokens - 20, text_tokens + 15)).tolist(), cfg.special_tokens),
             'codes': rng.integers(0, 2016, (max(int(s * audio_seconds * 22050 / 1024), 1), 8)), 'ref': None if i >= 0.75 * rows else rng.integers(0, 2016, (int(rng.uniform(64, 323)), 8)),
             'null': i >= 0.75 * rows, 'drop': rng.random() < 0.15, 'speaker': -1 if i >= 0.75 * rows else i // 3} for i, s in enumerate(share)]


def corpus_rows(corpus, cfg):
    picked = rng.choice(corpus.split('train'), rows, replace=False)
    speakers = corpus.rows['speaker']
    return [{'text': M.layout(corpus.text(i).tolist(), cfg.special_tokens), 'codes': corpus.codes(i), 'null': False, 'drop': rng.random() < 0.15, 'speaker': speakers[i],
             'ref': corpus.codes(rng.choice(np.flatnonzero(speakers == speakers[i])))[:323]} for i in picked]


def on_device(batch):
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}


def make_step(mode, model, optimizer, dtype):
    """step(batch) -> losses, in the given mode ('padded', 'packed', 'compiled')."""
    names = [p for p in model.parameters()]

    def forward(batch):
        if mode == 'padded':
            return model(batch)
        f, b = len(batch['codes']), len(batch['last_at'])
        return M.losses(model(batch), batch, model.cfg, {'frames': f, 'stops': f + b, 'rows': b}, 0.3, 0.3)
    if mode == 'compiled':                                          # by layer, as in pretrain.py
        for part in (*model.model.layers, model.ref_compressor):
            part.compile(dynamic=True)

    def step(batch):
        with torch.autocast(device, torch.bfloat16) if dtype == 'bfloat16' else nullcontext():
            r = forward(batch)
        r['total'].backward()
        if mode == 'padded':
            nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        else:                                                       # as in pretrain.py: the fused optimizer does the clipping
            norm = torch.stack(torch._foreach_norm([p.grad for p in names])).norm()
            optimizer.grad_scale, optimizer.found_inf = (norm / 3.0).clamp(min=1), (~torch.isfinite(norm)).float()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return r
    return step


def make_model(mode, cfg, state, lr):
    with torch.device(device):
        model = Padded(cfg) if mode == 'padded' else M.Gepard(cfg)
    missing = model.load_state_dict(M.published(state, cfg) if mode == 'padded' else state, strict=False)
    assert not missing.unexpected_keys and all('table_start' in k or 'slots' in k for k in missing.missing_keys), missing
    model.train()
    model.model.recompute = recompute
    if recompute and mode == 'padded':
        model.model.gradient_checkpointing_enable({'use_reentrant': False})
    return model, torch.optim.AdamW(M.param_groups(model, lr, dict(backbone=1, audio=0.5, embed=0.2, ref=0.1), 0.0), fused=True)


def kernels(step, batch):
    """Kernel time by name, and the share of the time in which the device did nothing."""
    from torch.profiler import ProfilerActivity, profile as record
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        for _ in range(3):
            step(batch)
        wait()
    events = [(e.start_ns(), e.duration_ns(), e.name()) for e in p.profiler.kineto_results.events()
              if 'CUDA' in str(e.device_type()) and e.duration_ns() and not e.name().startswith(('Optimizer', 'ProfilerStep', 'Context'))]
    events.sort()
    busy, end, total = 0, 0, {}
    for start, length, name in events:
        busy, end = busy + max(0, start + length - max(end, start)), max(end, start + length)
        n, t = total.get(name, (0, 0))
        total[name] = n + 1, t + length
    print(f'a step: {(end - events[0][0]) / 3e6:.1f} ms, idle {100 * (1 - busy / (end - events[0][0])):.1f}%')
    for name, (n, t) in sorted(total.items(), key=lambda x: -x[1][1])[:30]:
        print(f'{t / 3e6:8.2f} ms x{n // 3:4d}  {name[:120]}')


if 'curve' in modes:
    from prepare import Corpus
    corpus = Corpus(data)
    cfg = M.Config(num_hidden_layers=layers, vocab_size=-(-max(corpus.meta['tokenizer']['length'], 1 + max(corpus.meta['special_tokens'].values())) // 64) * 64, special_tokens=corpus.meta['special_tokens'], prefix_dropout=0.0)
    start = M.Gepard(cfg)
    start.init_weights(seed)
    curves = {}
    for mode, dtype in (('padded', 'float32'), ('packed', 'float32'), ('compiled' if cuda else 'packed', 'bfloat16')):
        torch.set_float32_matmul_precision('highest')
        rng = np.random.default_rng(seed)
        model, optimizer = make_model(mode, cfg, start.state_dict(), 5e-4)
        step, losses, begin = make_step(mode, model, optimizer, dtype), [], time.time()
        for n in range(steps):
            for g in optimizer.param_groups:
                g['lr'] = g['base_lr'] * min(1, (n + 1) / 30)
            r = step(on_device(pad(corpus_rows(corpus, cfg), cfg) if mode == 'padded' else M.pack(corpus_rows(corpus, cfg), cfg, multiple=256 if cuda else 1)))
            losses.append(r['code'].detach())
        curves[f'{mode} {dtype}'] = losses = torch.stack(losses).tolist()
        print(f'{mode} {dtype}: {time.time() - begin:.0f} s, code loss ' + ', '.join(f'step {n + 1} {losses[n]:.3f}' for n in range(0, steps, max(steps // 10, 1))) + f', last {losses[-1]:.3f}', flush=True)
        del model, optimizer, step
    a, *others = (np.array(c) for c in curves.values())
    for name, b in zip(list(curves)[1:], others):                   # float32 packed: the same sums in another order, so what it differs by is chance
        print(f'{name} less padded float32: mean of the last quarter {np.mean((b - a)[-steps // 4:]):+.4f}, of single steps {np.abs(b - a).mean():.4f} (mean), {np.abs(b - a).max():.4f} (largest)')
    os.makedirs(out, exist_ok=True)
    M.write_json(os.path.join(out, 'curve.json'), curves)
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    for name, c in curves.items():
        plt.plot(c, label=name, lw=1)
    plt.xlabel('step'), plt.ylabel('code loss'), plt.legend()
    plt.savefig(os.path.join(out, 'curve.png'), dpi=100)

speeds = [m for m in modes if m != 'curve']
if speeds:
    cfg = M.Config(num_hidden_layers=layers, vocab_size=vocab)
    if vocab < 248077:
        cfg.special_tokens |= dict(start_of_text=1, end_of_text=2, start_of_speech=3)
    with torch.device(device):
        start = M.Gepard(cfg)
    for name, p in start.named_parameters():                        # speed does not ask for a careful initialisation
        nn.init.normal_(p, std=0.02)
    state = {k: v.cpu() for k, v in start.state_dict().items()}
    parts = {'backbone': sum(p.numel() for n, p in start.named_parameters() if M.group_of(n) == 'backbone'), 'all': sum(p.numel() for p in start.parameters())}
    del start
    drawn = [random_rows(cfg) for _ in range(batches)]
    packed = [M.pack(r, cfg, multiple=256) for r in drawn]
    tokens, frames = (np.mean([sum(f(r) for r in rs) for rs in drawn]) for f in (lambda r: cfg.num_queries + len(r['text']) + len(r['codes']), lambda r: len(r['codes'])))
    flops = np.mean([6 * parts['backbone'] * sum(cfg.num_queries + len(r['text']) + len(r['codes']) for r in rs)
                     + 6 * layers * cfg.num_attention_heads * cfg.head_dim * sum((cfg.num_queries + len(r['text']) + len(r['codes'])) ** 2 for r in rs) for rs in drawn])
    audio = frames * 1024 / 22050
    print(f'{rows} rows, {audio:.0f} s of audio, {tokens:,.0f} tokens a step, {parts["all"] / 1e6:.1f}M parameters, {flops / 1e12:.2f} TFLOP a step, '
          f'torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else "cpu"}')
    for mode in speeds:
        model, optimizer = make_model(mode, cfg, state, 1e-5)
        step, given = make_step(mode, model, optimizer, 'bfloat16' if cuda else 'float32'), [on_device(pad(r, cfg) if mode == 'padded' else b) for r, b in zip(drawn, packed)]
        torch._dynamo.utils.counters.clear()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.time()
        for n in range(steps + 5):
            if n == 5:
                wait()
                warm, begin = time.time() - begin, time.time()
            r = step(given[n % batches])
        wait()
        ms = 1000 * (time.time() - begin) / steps
        print(f'{mode:9s} {ms:8.1f} ms a step, {tokens / ms * 1000:,.0f} tokens/s, {audio / ms * 1000:,.0f} s of audio/s, {flops / ms / 1e9:.0f} TFLOP/s = '
              f'{100 * flops / ms / 1e9 / peak_tflops:.1f}% of peak, {torch.cuda.max_memory_allocated() / 2 ** 30 if cuda else math.nan:.1f} GiB, '
              f"warm-up {warm:.0f} s, {torch._dynamo.utils.counters['stats']['unique_graphs']} compilations, loss {float(r['total'].detach()):.2f}", flush=True)
        if profile and cuda and mode == speeds[-1]:
            kernels(step, given[0])
        del model, optimizer, step, given
