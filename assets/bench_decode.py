"""
Speed and correctness of generation on a GPU: the released 14-layer shape, random weights, bfloat16.

    python assets/bench_decode.py                       # all of it, on one GPU
    python assets/bench_decode.py --layers=2 --slots=8 --groups=4 --checks=true --device=cpu        # does it run at all

Lengths: prompts of 1 to 20 words, 8 rollouts each, a rollout is 0.7 to 1.3 times as long as the words need (the stop head of
random weights says nothing, so lengths are given as frame caps). Everything counts: prefill, refilling, results to the host.
"""
import os, sys, time
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# -----------------------------------------------------------------------------
layers = 14
vocab = 248320
slots = (512,)                  # rollouts at once, e.g. --slots=512,1024
groups = 1024                   # prompts; 8 rollouts each
compile = True                  # False: CUDA graphs alone
checks = True                   # the correctness checks
sentence = True                 # one sentence alone
profile = True                  # where the time of a step goes
device = 'cuda'
# -----------------------------------------------------------------------------
from configurator import configure
configure(globals())

import numpy as np
import torch

import model as M
from codec import fold

if device == 'cpu':
    compile = profile = False
elif not torch.cuda.is_available():
    raise SystemExit('bench_decode.py: needs a GPU; --device=cpu shows that it runs')
FRAME_RATE = 22050 / 1024
cfg = M.Config(num_hidden_layers=layers, vocab_size=vocab)
with torch.device(device):
    torch.manual_seed(0)
    model = M.Gepard(cfg)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else None
    model.codebook_heads.weight.data *= 5
model = model.to(torch.bfloat16).eval()
wait = torch.cuda.synchronize if device == 'cuda' else lambda: None
print(f'{layers} layers, {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, torch {torch.__version__}, '
      f'{torch.cuda.get_device_name() if device == "cuda" else "cpu"}', flush=True)


def jobs_of(groups, seed=0):
    """(text, prefix, seed, cap) of 8 rollouts a group, in order."""
    rng = np.random.default_rng(seed)
    out = []
    for g in range(groups):
        words = int(rng.integers(1, 21))
        ids = rng.integers(0, 200, max(1, round(1.3 * words))).tolist()
        text = M.layout(ids, cfg.special_tokens, M.repeats(len(ids), cfg.text_repetition | {'enabled': True}))
        prefix = torch.randn(8, cfg.hidden_size, generator=torch.Generator().manual_seed(g)).mul(0.03).to(device, torch.bfloat16)
        for k in range(8):
            out.append((text, prefix, g * 8 + k, max(8, int((0.7 + 0.4 * words) * FRAME_RATE * rng.uniform(0.7, 1.3)))))
    return out


def speak(m, jobs, slots, graphs=True, **kw):
    d = M.Decoder(m, slots, 8 + max(len(j[0]) for j in jobs), max(j[3] for j in jobs), stop_threshold=1.0, **kw)
    if not graphs:
        class Never(dict):
            __contains__ = lambda self, n: False
        d.graphs = Never()
    results = dict(d.run(jobs))
    return [results[i] for i in range(len(jobs))]

same = lambda a, b: sum(torch.equal(x['codes'], y['codes']) for x, y in zip(a, b))

# ---- correctness

if checks:
    few = [(t, p, s, min(c, 60)) for t, p, s, c in jobs_of(6)][::2]         # 24 rollouts
    for kw in (dict(), dict(cfg_scale=3.0)):
        a, b = speak(model, few, 24, **kw), speak(model, few, 24, graphs=False, **kw)
        print(f'bf16 {kw}: {same(a, b)}/{len(few)} rollouts of the graphs equal those without', flush=True)
        for name, got in (('as it is', a), ('compiled', speak(model, few, 24, compile=True, **kw) if compile and kw else None)):
            if got is None:
                continue
            rows = [{'text': j[0], 'prefix': j[1], 'codes': fold(r['codes']).numpy()} for j, r in zip(few, got)]
            batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in M.pack(rows, cfg).items()}
            with torch.no_grad():
                tokens, _, frames = M.trajectory_logprob(model(batch), batch, torch.ones(len(rows), dtype=torch.bool, device=device))
            own = torch.stack([r['logp'].sum() for r in got]).to(device)
            print(f'bf16 {kw}, {name}: log-prob a frame {float((tokens / frames).mean()):.3f} by one packed forward, differs from the decoder\'s own '
                  f'by at most {float(((tokens - own) / frames).abs().max()):.4f}', flush=True)
    exact = model.float()
    torch.backends.cuda.matmul.allow_tf32 = False
    for kw in (dict(), dict(cfg_scale=3.0)):
        a = speak(exact, few, 24, **kw)
        print(f'fp32 {kw}: ' + ', '.join(f'{same(a, speak(exact, few, n, **kw))}/{len(few)} equal with {n} slots instead of 24' for n in (1, 5, 16))
              + f', {same(a, speak(exact, few, 24, graphs=False, **kw))}/{len(few)} without graphs', flush=True)
    model = exact.to(torch.bfloat16)

def fresh():
    """Each measurement compiles anew: past 8 variants of a function torch goes on without compiling."""
    torch._dynamo.reset()
    M.compiled.cache_clear()

# ---- batch 1

def single(**kw):
    fresh()
    frames, text = 200, M.layout(list(range(20)), cfg.special_tokens)
    prefix = torch.zeros(1, 8, cfg.hidden_size, device=device, dtype=torch.bfloat16)
    d = M.Decoder(model, 1, 8 + len(text), frames, stop_threshold=1.0, **kw)
    start = time.time()
    for _ in range(2):
        M.generate(model, [text], prefix, max_frames=40, decoder=d)
    wait()
    warm, times = time.time() - start, []
    for _ in range(3):
        wait()
        start = time.time()
        M.generate(model, [text], prefix, max_frames=frames, decoder=d)
        times.append(time.time() - start)
    firsts = []
    for _ in range(5):
        wait()
        start, seen = time.time(), []
        M.generate(model, [text], prefix, max_frames=3, decoder=d, on_frame=lambda step, codes, running: seen or seen.append((codes.cpu(), time.time())))
        firsts.append(seen[0][1] - start)
    ms = 1000 * min(times) / frames
    print(f'batch 1 {kw}: {ms:.3f} ms a frame, RTF {ms / 1000 * FRAME_RATE:.4f}, first frame {1000 * sorted(firsts)[2]:.1f} ms (warm-up {warm:.0f} s)', flush=True)
    return d


def profiled(d, steps, what):
    if not profile:
        return
    from torch.profiler import ProfilerActivity, profile as profiler
    with torch.no_grad():
        wait()
        start = time.time()
        for _ in range(20):
            d.step()
        wait()
        print(f'{what}: {(time.time() - start) * 50:.3f} ms a step', flush=True)
        with profiler(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(steps):
                d.step()
            wait()
    rows = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows)
    print(f'  kernels {total / steps / 1000:.3f} ms, {sum(e.count for e in rows) / steps:.0f} a step')
    for e in rows[:12]:
        print(f'  {e.self_device_time_total / steps:9.1f} us  {e.count / steps:6.1f} x  {e.key[:110]}')

if device == 'cuda':
    torch.cuda.empty_cache()
if sentence:
    single()
if sentence and compile:
    d = single(compile=True)
    d.fill({0: (0, *jobs_of(1)[0][:3], 200)})
    profiled(d, 10, 'batch 1, compiled')
    single(compile=True, cfg_scale=3.0)

# ---- rollouts

def rollouts(slots):
    for n in slots:
        for kw in (dict(), dict(cfg_scale=3.0, cfg_frames=20)):
            fresh()
            d = M.Decoder(model, n, 8 + max(len(j[0]) for j in jobs), max(j[3] for j in jobs), stop_threshold=1.0, compile=compile, **kw)
            start = time.time()
            sum(1 for _ in d.run(jobs[:3 * n]))                                 # compiles, records the graphs
            wait()
            warm = time.time() - start
            for every in (8, 16):
                start = time.time()
                frames = sum(len(r['codes']) for _, r in d.run(jobs, every=every))
                wait()
                spent = time.time() - start
                memory = torch.cuda.max_memory_allocated() / 2 ** 30 if device == 'cuda' else 0
                print(f'{n} slots {kw}, looked at every {every} steps: {frames / FRAME_RATE / spent:,.0f} s of audio a second, {len(jobs) / spent:.0f} rollouts/s, '
                      f'{spent:.1f} s, {len(d.graphs)} graphs, {memory:.0f} GiB (warm-up {warm:.0f} s)', flush=True)
            if not kw:
                with torch.no_grad():
                    d.busy.clear()
                    wait()
                    start = time.time()
                    d.fill({s: (s, *jobs[s][:3], 10 ** 6) for s in range(min(64, n))})
                    wait()
                    print(f'  {min(64, n)} prompts of {sum(len(j[0]) + 8 for j in jobs[:min(64, n)])} tokens: {1000 * (time.time() - start):.1f} ms')
                    if n > 64:
                        d.fill({s: (s, *jobs[s][:3], 10 ** 6) for s in range(64, n)})
                profiled(d, 5, f'  {n} slots, all of them busy')
            del d

jobs = jobs_of(groups)
seconds = sum(j[3] for j in jobs) / FRAME_RATE
print(f'rollouts: {groups} groups of 8, {seconds:.0f} s of audio, {seconds / len(jobs):.2f} s and {np.mean([len(j[0]) for j in jobs]):.0f} text tokens each', flush=True)
rollouts(slots)
