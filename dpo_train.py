"""
Preference training (DPO, Rafailov 2023), last of three: adapters and the stop head learn from the pairs of dpo_score.py.

    python dpo_train.py config/dpo.py                                              # out/dpo/round1/pairs.json -> out/dpo/round1/merged
    torchrun --nproc_per_node=4 dpo_train.py config/dpo.py
    python dpo_sample.py config/dpo.py --run_name=round2 --ckpt=out/dpo/round1/merged   # and so on, the same three commands

Written to out_dir/run_name: train/checkpoint-<step>/ (adapter and stop head; merge.py folds any of them), train/metrics.jsonl, train/curves.png, and
at the end merged/, an ordinary checkpoint. The reference log-probs are those in pairs.json: no second model is loaded. Before step 0 every pair, held
out or not, is run through once: each loss is ln 2 and each margin 0, or the run stops. Started again, it goes on from the newest adapter.
SIGTERM saves and ends with exit code 0.
"""
import json, math, os, sys

# -----------------------------------------------------------------------------
out_dir = 'out/dpo'
run_name = 'round1'             # the folder of this round in out_dir
ckpt = ''                       # where the policy is now; '' = where the rollouts were made from. Its weights must be the same
# loss = -log sigmoid(beta * (chosen margin - rejected margin)), margins of log-probs a frame against the reference
beta = 2.0
stop_weight = 1.0               # of the stop log-probs beside the codes'; 0 = the codes alone
length_normalize = True         # False: log-probs of whole rollouts, long ones weigh more
pair_weights = 'linear'         # by reward gap: 'linear' 1 + gap/gap_scale, 'clip' gap/gap_scale, 'none'
gap_scale = 3.5
gap_largest = 4.0               # weights are clipped to [1/gap_largest, gap_largest], and relative within a step
hold_out = 0.1                  # share of prompts whose pairs are not trained on, to watch; 0 = none
# adapters
lora_rank = 16
lora_alpha = 32.0
lora_dropout = 0.05
lora_targets = ('q_proj', 'v_proj')
lora_last_n_layers = 0          # 0 = all
# optimizer: AdamW, cosine to 0 after linear warmup
learning_rate = 1e-5            # adapters
stop_lr = 1e-4                  # stop head; 0 = frozen
batch_size = 4                  # pairs a micro-batch and rank
gradient_accumulation = 4       # micro-batches a step
epochs = 2
max_steps = 0                   # ends earlier; 0 = as many as the epochs give
warmup_steps = 100              # at most a tenth of the run
grad_clip = 1.0                 # global norm; 0 = off
max_bad_steps = 5               # so many steps in a row with a non-finite gradient end the run; each is skipped and named
# logging, saving
log_interval = 10               # steps
eval_interval = 50              # steps; held-out pairs; 0 = never
save_interval = 100             # steps
keep_checkpoints = 3            # older ones go once a new one is whole; 0 = keep all
# system
device = 'auto'                 # 'auto' = cuda where there is one
dtype = 'auto'                  # compute: 'auto' = that of the reference log-probs
seed = 0
# -----------------------------------------------------------------------------
FREE = ('out_dir', 'run_name', 'ckpt', 'gradient_accumulation', 'log_interval', 'eval_interval', 'save_interval', 'keep_checkpoints', 'device', 'max_bad_steps')
from configurator import configure
config = configure(globals())
run = os.path.join(out_dir, run_name)


def validate():
    bad = []
    rule = lambda ok, text: ok or bad.append(text)
    for name in ('beta', 'gap_scale', 'lora_rank', 'lora_alpha', 'batch_size', 'gradient_accumulation', 'epochs', 'log_interval', 'save_interval',
                 'max_bad_steps'):
        rule(config[name] > 0, f'{name} must be above 0, got {config[name]}')
    for name in ('stop_weight', 'learning_rate', 'stop_lr', 'max_steps', 'warmup_steps', 'grad_clip', 'eval_interval',
                 'keep_checkpoints', 'lora_last_n_layers', 'seed'):
        rule(config[name] >= 0, f'{name} must not be negative, got {config[name]}')
    rule(gap_largest >= 1, f'gap_largest must be at least 1, got {gap_largest}')
    rule(learning_rate > 0 or stop_lr > 0, 'learning_rate and stop_lr are both 0: nothing would be trained')
    rule(0 <= lora_dropout < 1, f'lora_dropout must be in [0, 1), got {lora_dropout}')
    rule(0 <= hold_out < 1, f'hold_out must be in [0, 1), got {hold_out}')
    rule(pair_weights in ('linear', 'clip', 'none'), f"pair_weights is 'linear', 'clip' or 'none', got {pair_weights!r}")
    rule(device in ('auto', 'cpu', 'cuda'), f"device is 'auto', 'cpu' or 'cuda', got {device!r}")
    rule(dtype in ('auto', 'float32', 'bfloat16'), f"dtype is 'auto', 'float32' or 'bfloat16', got {dtype!r}")
    rule(os.path.isfile(os.path.join(run, 'pairs.json')), f'{run}/pairs.json does not exist (make it with dpo_score.py)')
    if bad:
        if os.environ.get('LOCAL_RANK', '0') == '0':
            print('dpo_train.py: ' + '; '.join(bad), file=sys.stderr)
        sys.exit(2)

validate()

import fcntl, hashlib, pickle, shutil, signal, time
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist

import lora
import model as gepard
from dpo_score import rollouts_hash

# ---- setup

ddp = 'RANK' in os.environ
rank, world, local_rank = (int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
say = (lambda *a: print(*a, flush=True)) if rank == 0 else lambda *a: None


def fail(message):
    if local_rank == 0:                             # of each node: what is wrong may be wrong on one
        print('dpo_train.py: ' + ' '.join(str(message).split()), file=sys.stderr, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(2)


@contextmanager
def writing(path):
    """A full disk in one line; the libraries that write here have errors of their own."""
    try:
        yield
    except Exception as e:
        fail(f'{path}: not written ({str(e)[:300]})')

if device == 'auto':
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
if device == 'cuda' and not torch.cuda.is_available():
    fail(f'device is cuda, but torch {torch.__version__} sees none')
if device == 'cuda':
    torch.cuda.set_device(local_rank)
if ddp:
    dist.init_process_group('nccl' if device == 'cuda' else 'gloo')
train_dir, merged_dir = os.path.join(run, 'train'), os.path.join(run, 'merged')
try:
    os.makedirs(train_dir, exist_ok=True)
    if rank == 0:
        lock = open(os.path.join(train_dir, 'lock'), 'w')               # held until this process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gepard.remove_unfinished(train_dir)
    if os.path.exists(merged_dir):
        fail(f'{merged_dir} exists: this round is finished')
    content = gepard.read_json(os.path.join(run, 'pairs.json'))
    pairs_hash = hashlib.sha256(open(os.path.join(run, 'pairs.json'), 'rb').read()).hexdigest()
    compute = {'float32': torch.float32, 'bfloat16': torch.bfloat16}[content['dtype'] if dtype == 'auto' else dtype]
    model, base = gepard.load_checkpoint(gepard.latest_checkpoint(ckpt or content['policy']) or ckpt or content['policy'])
    base_hash = lora.tensors_hash(base)
    references = {int(k): v.numpy() for k, v in gepard.read_tensors(os.path.join(run, 'rollouts'), 'voices.safetensors').items()}
    cfg, pairs, p_floor = model.cfg, content['pairs'], content['p_floor']
    where = os.path.join(run, 'rollouts', 'tokens.bin')
    if os.path.getsize(where) % 16 or os.path.getsize(where) < 16 * max((p[side]['start'] + p[side]['frames'] for p in pairs for side in ('chosen', 'rejected')), default=0):
        fail(f'{where}: shorter than what pairs.json was made from, or cut inside a frame: damaged')
    tokens = np.memmap(where, '<u2', 'r').reshape(-1, 8)
    if 'rollouts' in content and content['rollouts'] != rollouts_hash(os.path.join(run, 'rollouts')):      # older pairs.json do not say
        fail(f'{run}/rollouts: not those that pairs.json was made from: make it anew with dpo_score.py')
except BlockingIOError:
    fail(f'another run is writing to {train_dir}')
except KeyError as e:
    fail(f'{run}/pairs.json has no {e}: make it anew with dpo_score.py')
except (OSError, ValueError) as e:
    fail(e)
except TypeError as e:
    fail(f'{run}/pairs.json: damaged ({e}): make it anew with dpo_score.py')
if base_hash != content['policy_hash']:
    fail(f'{base} is not the policy that made the pairs: its weights differ from those of {content["policy"]}')
for key in ('special_tokens', 'text_repetition', 'codec'):
    if content[key] != getattr(cfg, key):
        fail(f'{run}/pairs.json was made with {key} {content[key]}, {base} has {getattr(cfg, key)}')
if not pairs:
    fail(f'{run}/pairs.json has no pairs')

# ---- model: the policy as it is, adapters (which start at zero), and the stop head

newest = gepard.latest_checkpoint(train_dir, file='adapter.safetensors')
step, state = 0, None
try:
    if newest:
        adapter = lora.load_adapter(model, newest, base)
        state = torch.load(os.path.join(newest, 'resume.pt'), map_location='cpu', weights_only=True)
        step, now = state['step'], batch_size * gradient_accumulation * world
        if state.get('per_step', now) != now:
            fail(f"{newest} was trained with {state['per_step']} pairs a step, now they are {now}: batch_size x gradient_accumulation x ranks must stay")
        changed = [k for k in config if k not in FREE and json.dumps(adapter['config'].get(k)) != json.dumps(config[k])]
        if changed or adapter['pairs_hash'] != pairs_hash:
            fail(f'{newest} was trained with other ' + (', '.join(changed) or 'pairs') + f': delete {train_dir} to start anew')
        say(f'resumed {newest}')
    else:
        adapter = lora.inject(model, lora_targets, lora_last_n_layers, lora_rank, lora_alpha, lora_dropout, seed)
        adapter |= {'stage': 'dpo', 'config': json.loads(json.dumps(config)), 'pairs_hash': pairs_hash}
except (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError) as e:
    fail(f'{newest}: cannot go on from it ({e}); without that folder the run goes on from the one before' if newest else e)
model.stop_head.requires_grad_(stop_lr > 0)
for p in model.parameters():                    # as the reference was made: frozen weights in its dtype; what is trained stays float32
    if not p.requires_grad:
        p.data = p.data.to(compute)
model.audio_embed_scale = model.audio_embed_scale.to(compute)           # a buffer, rounded there too
model.to(device)
cast = torch.autocast(device, compute) if compute != torch.float32 else nullcontext()
trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
split = {'adapters': [p for n, p in trained.items() if 'lora_' in n], 'stop head': [p for n, p in trained.items() if 'lora_' not in n]}
groups = [{'params': ps, 'lr': lr, 'base_lr': lr, 'name': name} for (name, ps), lr in zip(split.items(), (learning_rate, stop_lr)) if ps]
optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
if state:
    optimizer.load_state_dict(state['optimizer'])

# ---- pairs and schedule

watched = lambda p: int.from_bytes(hashlib.sha256(p['prompt'].encode()).digest()[:4], 'little') / 2 ** 32 < hold_out
train, held = [p for p in pairs if not watched(p)], [p for p in pairs if watched(p)]       # by prompt: no text on both sides
if not train:
    fail(f'all {len(pairs)} pairs are held out: lower hold_out')
weights = gepard.gap_weights(torch.tensor([p['gap'] for p in train]), pair_weights, gap_scale, gap_largest)
weights = torch.ones(len(train)) if weights is None else weights
with torch.no_grad():
    model.eval()
    prefixes = {v: model.voices([references.get(v)])[0] for v in sorted({p['voice'] for p in pairs})} if cfg.num_queries else {}     # {voice: [8, d]}
per_step = batch_size * gradient_accumulation * world
steps_per_epoch = max(1, len(train) // per_step)
total_steps = min(max_steps or 10 ** 9, epochs * steps_per_epoch)
warmup = min(warmup_steps, total_steps // 10)
say(f'{len(pairs):,} pairs, {len(train):,} to train on, {len(held):,} held out ({hold_out:.0%} of the prompts)')
say(f'{batch_size} pairs x {gradient_accumulation} micro-batches x {world} ranks = {min(per_step, len(train))} pairs a step, '
    f'{steps_per_epoch} steps an epoch, {total_steps} in all, warmup {warmup}')
for g in groups:
    say(f"parameters: {g['name']:9s} {sum(p.numel() for p in g['params']) / 1e6:8.3f}M  lr {g['base_lr']:.1e}")
say(f"of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M; {device}, {str(compute).removeprefix('torch.')} compute, p_floor {p_floor}, reference {base}")


def plan(step):
    """Numbers of the pairs of a step, all ranks, in order."""
    epoch, n = divmod(step, steps_per_epoch)
    return np.random.default_rng([seed, epoch]).permutation(len(train))[n * per_step:(n + 1) * per_step]


LOGGED = ('loss', 'accuracy', 'margin', 'chosen', 'rejected', 'chosen_drift', 'rejected_drift', 'stop_chosen', 'stop_rejected')

def both_sides(batch):
    """Pairs -> what is LOGGED of each, in order, [pairs]: chosen and rejected in one packed forward; log-probs a frame, drift: from the reference."""
    sides = [(p, p[k]) for k in ('chosen', 'rejected') for p in batch]
    rows = [{'text': p['tokens'], 'codes': np.array(tokens[s['start']:s['start'] + int(s['frames'])])}
            | ({'prefix': prefixes[p['voice']].cpu()} if prefixes else {}) for p, s in sides]
    packed = {k: v.to(device) if torch.is_tensor(v) else v for k, v in gepard.pack(rows, cfg).items()}
    with cast:
        out = model(packed)
    code, stop, frames = gepard.trajectory_logprob(out, packed, torch.tensor([s['truncated'] for _, s in sides], device=device), p_floor)      # [2 pairs] each, chosen first
    ref_code, ref_stop = (torch.tensor([s[k] for _, s in sides], device=device) for k in ('ref_tokens', 'ref_stop'))
    pi, ref = (gepard.combine(a, b, frames, stop_weight, length_normalize) for a, b in ((code, stop), (ref_code, ref_stop)))
    (chosen, rejected), (ref_chosen, ref_rejected), (stop_chosen, stop_rejected) = (x.chunk(2) for x in (pi, ref, stop / frames))
    _, margin = gepard.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
    return dict(zip(LOGGED, (-torch.nn.functional.logsigmoid(margin), margin > 0, margin, chosen, rejected, chosen - ref_chosen, rejected - ref_rejected,
                             stop_chosen, stop_rejected)))


def totals(r):
    return torch.stack([x.detach().double().sum() for x in r.values()])


@torch.no_grad()
def evaluate():
    """Means over the held-out pairs; drift: mean over both sides of log pi - log ref a frame, what the policy has moved by (KL-like)."""
    model.eval()
    sums = torch.zeros(len(LOGGED), dtype=torch.float64, device=device)
    for n in range(rank * batch_size, len(held), world * batch_size):
        sums += totals(both_sides(held[n:n + batch_size]))
    if ddp:
        dist.all_reduce(sums)
    model.train()
    v = dict(zip(LOGGED, (sums / len(held)).tolist()))
    return {f'held_{k}': x for k, x in v.items()} | {'held_drift': (v['chosen_drift'] + v['rejected_drift']) / 2}


def factor(step):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total_steps - warmup, 1)))


def save():
    path = os.path.join(train_dir, f'checkpoint-{step}')
    if rank == 0 and path != gepard.latest_checkpoint(train_dir, file='adapter.safetensors'):
        # dpo_sample.py names folders absolutely; whether this one is still there says nothing
        metadata = {'stage': 'dpo', 'step': step, 'parent': content['policy'], 'parent_kind': 'folder' if os.path.isabs(content['policy']) else 'hub',
                    'config': config, 'pairs': len(train), 'counts': content['counts'],
                    'versions': {'python': sys.version.split()[0], 'torch': torch.__version__, 'numpy': np.__version__}}

        def extra(folder):
            torch.save({'optimizer': optimizer.state_dict(), 'step': step, 'per_step': per_step}, os.path.join(folder, 'resume.pt'))
            gepard.write_json(os.path.join(folder, 'training_metadata.json'), metadata)
        with writing(path):
            if os.path.isdir(path):
                os.rmdir(path)                                          # in the way; with files in it, it is not ours to remove
            lora.save_adapter(path, lora.adapter_state(model), adapter | {'step': step}, content['policy'], base_hash, extra)
        for _, old in gepard.checkpoints(train_dir, file='adapter.safetensors')[:-keep_checkpoints] if keep_checkpoints else []:
            shutil.rmtree(old)
        say(f'saved {path}')
    if ddp:
        dist.barrier()


def curves():
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    log = [json.loads(line) for line in open(metrics_path, encoding='utf-8')]
    fig, axes = plt.subplots(2, 3, figsize=(15, 7))
    for ax, keys in zip(axes.flat, (('loss', 'held_loss'), ('accuracy', 'held_accuracy'), ('margin', 'held_margin'),
                                    ('chosen_drift', 'rejected_drift', 'held_drift'), ('stop_chosen', 'stop_rejected'), ('grad_norm',))):
        for key in keys:
            points = [(r['step'], r[key]) for r in log if key in r]
            if points:
                ax.plot(*zip(*points), label=key, marker='.' if len(points) < 20 else None)
        ax.legend()
        ax.set_xlabel('step')
    fig.tight_layout()
    fig.savefig(os.path.join(train_dir, 'curves.tmp.png'))
    plt.close(fig)
    os.replace(os.path.join(train_dir, 'curves.tmp.png'), os.path.join(train_dir, 'curves.png'))

# ---- the loop

metrics_path = os.path.join(train_dir, 'metrics.jsonl')
if rank == 0:
    with writing(metrics_path):
        gepard.keep_lines(metrics_path, step or -1)


def record(values):
    if rank == 0:
        gepard.append_line(metrics_path, json.dumps({'step': step, **values}))


def warn(values):
    """What usually goes wrong, in words."""
    if values['chosen_drift'] < min(-0.05, values['rejected_drift'] / 4) and values['rejected_drift'] < -0.05:
        say(f"  warning: chosen falls with rejected ({values['chosen_drift']:+.3f}, {values['rejected_drift']:+.3f} a frame): the policy leaves both; "
            'lower learning_rate or raise beta')
    if step <= max(warmup, 2 * log_interval) and values['accuracy'] == 1:       # never in the first lines: at step 0 every margin is 0
        say('  warning: accuracy is 1.0 from the start: chosen and rejected differ in something trivial (look at the pairs), '
            'or the learning rate is far too high')

stopping = []
signal.signal(signal.SIGTERM, lambda *a: stopping.append(1))
model.train()
bad_steps, window, clock = 0, [], time.time()
if step == 0:                                                           # nothing has been trained: policy = reference, or something is not what it seems
    model.eval()
    own = pairs[rank::world]
    some = own or pairs[:1]                                             # of more ranks than pairs
    with torch.no_grad():
        r = [both_sides(some[n:n + 8 * batch_size]) for n in range(0, len(some), 8 * batch_size)]       # without gradients there is room for as many at once
    model.train()
    loss, margin, *drift = (torch.cat([b[k] for b in r]).abs() for k in ('loss', 'margin', 'chosen_drift', 'rejected_drift'))
    worst = torch.stack([loss.max(), margin.max(), torch.cat(drift).max()]).nan_to_num(nan=math.inf)
    mean = torch.cat(drift)[:2 * len(own)].sum() / (2 * len(pairs))
    if ddp:
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        dist.all_reduce(mean)
    (loss, margin, off), mean = worst.tolist(), mean.item()
    # 16 bits round differently in other batches, most in rollouts of two or three frames
    allowed, usual = (x * (1 if length_normalize else 100) for x in ((1e-3, 1e-3) if compute == torch.float32 else (1.0, 0.05)))
    say(f'step 0, the largest of {len(pairs):,} pairs: loss {loss:.4f} (ln 2 = {math.log(2):.4f}), margin {margin:.4f}, log-probs {off:.1e} from the reference')
    if not (off <= allowed and mean <= usual):
        fail(f'at step 0 the policy differs from the reference by up to {off:.3g}, {mean:.3g} in the mean (at most {allowed:g} and {usual:g}): pairs.json is not of this policy or layout')
if eval_interval and held and step == 0:
    record(evaluate())
while step < total_steps:
    numbers = plan(step)
    all_weight = float(weights[numbers].sum())
    for g in optimizer.param_groups:
        g['lr'] = g['base_lr'] * factor(step)
    sums = torch.zeros(len(LOGGED), dtype=torch.float64, device=device)
    for m, start in enumerate(range(0, len(numbers), batch_size)):      # ranks take turns: 1 x 4, 2 x 2 and 4 x 1 give one gradient
        if m % world != rank:
            continue
        own = numbers[start:start + batch_size]
        torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + m) % 2 ** 63)    # dropout: the same for any number of ranks, and after a resume
        r = both_sides([train[i] for i in own])
        ((r['loss'] * weights[own].to(device)).sum() / all_weight).backward()
        sums += totals(r)
    for p in trained.values():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if ddp:
            dist.all_reduce(p.grad)
    if ddp:
        dist.all_reduce(sums)
    norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), grad_clip or math.inf))
    if math.isfinite(norm):
        optimizer.step()
        bad_steps = 0
    else:
        bad_steps += 1
        say(f"step {step}: non-finite gradient, step skipped ({bad_steps} in a row); groups {[train[i]['group'] for i in numbers]}")
        if bad_steps >= max_bad_steps:
            fail(f'{bad_steps} steps in a row with a non-finite gradient')
    optimizer.zero_grad(set_to_none=True)
    step += 1
    window.append((sums / len(numbers)).cpu())

    stop_now = torch.tensor(float(len(stopping)), device=device)
    if ddp:
        dist.all_reduce(stop_now)
    if step % log_interval == 0 or step == total_steps:
        v = dict(zip(LOGGED, torch.stack(window).mean(0).tolist()))
        v |= {'grad_norm': norm, 'lr': optimizer.param_groups[0]['lr']}
        record(v)
        seconds = time.time() - clock
        eta = int((total_steps - step) * seconds / len(window))
        say(f"step {step}/{total_steps} loss {v['loss']:.4f} accuracy {v['accuracy']:.2f} margin {v['margin']:+.3f} | a frame: chosen {v['chosen']:.3f} "
            f"({v['chosen_drift']:+.3f}) rejected {v['rejected']:.3f} ({v['rejected_drift']:+.3f}) stop {v['stop_chosen']:.4f} {v['stop_rejected']:.4f} | "
            f"norm {norm:.2f} lr {v['lr']:.1e}, {len(window) * len(numbers) / seconds:.1f} pairs/s, ETA {eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}")
        warn(v)
        window, clock = [], time.time()
    if eval_interval and held and (step % eval_interval == 0 or step == total_steps):
        r = evaluate()
        record(r)
        say(f'step {step}, held out: ' + ', '.join(f"{k} {r[f'held_{k}']:.3f}" for k in ('loss', 'accuracy', 'margin', 'drift')))
    if step % save_interval == 0 or step == total_steps or stop_now:
        save()
    if stop_now:
        say(f'stopped by SIGTERM at step {step}')
        break

# ---- the end: an ordinary checkpoint, as merge.py makes it

if step >= total_steps and rank == 0:
    with writing(merged_dir):
        curves()
        lora.merge(os.path.join(train_dir, f'checkpoint-{step}'), base, merged_dir)
    say(f'{merged_dir}: the merged checkpoint')
if ddp:
    dist.barrier()
    dist.destroy_process_group()
