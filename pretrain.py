"""
Trains the base model on a corpus made by prepare.py.

    python pretrain.py config/tiny.py                                              # one process: CPU or one GPU
    torchrun --nproc_per_node=4 pretrain.py config/pretrain.py                     # one node
    torchrun --nnodes=2 --nproc_per_node=8 --node_rank=<0 or 1> --rdzv_backend=c10d --rdzv_endpoint=<host>:29500 \\
        pretrain.py config/pretrain.py                                             # two nodes; out_dir is a file system both see, data a path on both

Written to out_dir: checkpoint-<step>/ (a whole checkpoint that sample.py speaks from, with the resume state beside the
weights), metrics.jsonl, curves.png, samples/step-<n>/ (prompts spoken at each evaluation); docs/guide.md says how to read
them. Started again, it goes on from the newest checkpoint; another number of ranks is fine. SIGTERM and Ctrl-C save and end.
At step 0 the code loss is 60.9 (sum of ln L over 32 channels: every code equally likely).
"""
import json, math, os, signal, sys, time

# -----------------------------------------------------------------------------
out_dir = 'out/pretrain'
data = 'data/corpus'            # corpus folder from prepare.py; codec, tokenizer and special tokens come from it
# model
init_from = 'nineninesix/qwen3_5-full-attn-only-14'     # Qwen3.5 backbone, Hub name or folder; 'scratch' = random, shape below
hidden_size = 1024              # shape of a 'scratch' backbone; else these eight come from init_from
intermediate_size = 3584
num_hidden_layers = 14
num_attention_heads = 8
num_key_value_heads = 2         # divides the heads
head_dim = 256
rope_theta = 1e7
max_position_embeddings = 32768
audio_embed_dim = 32            # width of each of the 32 code tables
num_queries = 8                 # speaker prefix vectors; 0 = no voice cloning
prefix_layers = 2
prefix_heads = 8
prefix_dropout = 0.1
stop_loss_weight = 2.0
stop_pos_weight = 25.0          # one stop stands against some hundred non-stops
# batches: P speakers x K clips + M null rows with voice cloning (per rank and micro-batch), batch_size plain rows without
batch_size = 64                 # rows; must equal P*K + M with voice cloning
P = 16
K = 3                           # clips a speaker: SupCon needs at least 2
M = 16                          # rows that train the null prefix
null_prob = 0.15                # further rows that get the null prefix at random; 0 = none
text_drop_prob = 0.0            # rows that lose their text: speech without words, what guidance (cfg_scale) starts from, Ho & Salimans 2022; 0 = none
frame_drop = 0.0                # hides frames from the model's own past: each row draws its share of them from 0 to this. A backbone that starts from nothing else goes on
                                # by ear and never learns to follow the text (Tacotron's pre-net dropout has that purpose); 0 = none
min_text_tokens = 0             # rows of texts with fewer tokens are not learned from; 0 = all
ref_min_seconds = 3.0           # a reference is a random crop of another clip of the speaker,
ref_max_seconds = 15.0          # this long where the clip allows
gradient_accumulation = 2       # micro-batches a step
epochs = 8
max_steps = 0                   # ends earlier; 0 = as many as the epochs give
# regularizers of the speaker prefix; weight 0 = off. w(t) = weight * clamp((t - start) / ramp, 0, 1)
diversity_weight = 0.3
diversity_ramp = 1500           # steps
supcon_weight = 0.3
supcon_ramp = 500               # steps
reg_start = 1000                # step
# optimizer: AdamW, cosine to 0 after linear warmup
learning_rate = 9e-4
lr_audio = 0.5                  # multipliers: tables, frame MLP, code and stop heads
lr_embed = 0.2                  # text embedding
lr_ref = 0.1                    # Q-Former, null prefix, SupCon head
warmup_steps = 500
weight_decay = 0.0              # norms, biases, queries and null prefix never decay
beta1 = 0.9
beta2 = 0.999
grad_clip = 3.0                 # global norm; 0 = off
max_bad_steps = 10              # so many steps in a row with a non-finite gradient end the run; each is skipped and named
# evaluation, logging, saving
eval_interval = 500             # steps; 0 = never. Also the interval of the costly telemetry: ranks, states by layer
eval_batches = 8                # of batch_size held-out rows each
speak = ()                      # texts spoken at each evaluation but the first, e.g. --speak="('Hello there.',)"; () = none
speak_temperature = 0.4
log_interval = 10               # steps; the only time the host waits for the device. Several ranks notice a SIGTERM only then, and torchrun kills them after 30 s
save_interval = 1000            # steps
keep_checkpoints = 2            # older ones go once a new one is whole; 0 = keep all
resume = True                   # False: refuse to start where checkpoints lie
wandb_project = ''              # '' = off
# system
device = 'auto'                 # 'auto' = cuda where there is one
dtype = 'auto'                  # compute: 'auto' = bfloat16 where the GPU or CPU multiplies it in hardware, else float32; masters are always float32
parallel = 'replicate'          # several ranks: 'replicate' the model (DDP), or 'fsdp' = shards of it (FSDP2), for models that do not fit: some 30% slower (docs/speed.md)
recompute = False               # layers run twice instead of keeping their insides: less memory, more time
compile = True                  # torch.compile by layer, on a GPU only; half a minute or more at the start
peak_tflops = 989.0             # of one GPU, for MFU: dense bfloat16 of an H100 or H200
num_workers = 2                 # processes that pack batches ahead; 0 = in this process
seed = 1337
# -----------------------------------------------------------------------------
from configurator import configure
config = configure(globals())


def validate():
    """Cross-field rules, before torch is imported."""
    bad = []
    rule = lambda ok, text: ok or bad.append(text)
    for name in ('batch_size', 'gradient_accumulation', 'epochs', 'log_interval', 'save_interval', 'learning_rate', 'K', 'max_bad_steps',
                 'ref_min_seconds', 'stop_loss_weight', 'stop_pos_weight', 'peak_tflops', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'head_dim',
                 'num_attention_heads', 'num_key_value_heads', 'audio_embed_dim', 'rope_theta', 'prefix_layers', 'prefix_heads'):
        rule(config[name] > 0, f'{name} must be above 0, got {config[name]}')
    for name in ('max_steps', 'warmup_steps', 'eval_interval', 'num_workers', 'grad_clip', 'weight_decay', 'P', 'M', 'num_queries', 'keep_checkpoints',
                 'diversity_weight', 'supcon_weight', 'lr_audio', 'lr_embed', 'lr_ref', 'speak_temperature', 'reg_start', 'min_text_tokens', 'seed'):
        rule(config[name] >= 0, f'{name} must not be negative, got {config[name]}')
    for name in ('null_prob', 'text_drop_prob', 'prefix_dropout', 'beta1', 'beta2'):
        rule(0 <= config[name] < 1, f'{name} must be in [0, 1), got {config[name]}')
    rule(0 <= frame_drop <= 1, f'frame_drop must be in [0, 1], got {frame_drop}')
    rule(ref_max_seconds >= ref_min_seconds, f'ref_max_seconds {ref_max_seconds} is below ref_min_seconds {ref_min_seconds}')
    rule(not eval_interval or eval_batches > 0, 'eval_batches must be above 0 when eval_interval is')
    divides = lambda a, b: b > 0 and a % b == 0
    rule(head_dim % 2 == 0, f'head_dim must be even, got {head_dim}')
    rule(divides(num_attention_heads, num_key_value_heads),
         f'num_key_value_heads {num_key_value_heads} does not divide num_attention_heads {num_attention_heads}')
    rule(device in ('auto', 'cpu', 'cuda'), f"device is 'auto', 'cpu' or 'cuda', got {device!r}")
    rule(dtype in ('auto', 'float32', 'bfloat16'), f"dtype is 'auto', 'float32' or 'bfloat16', got {dtype!r}")
    rule(all(type(t) is str for t in speak), f'speak: texts, got {speak!r}')
    rule(parallel in ('replicate', 'fsdp'), f"parallel is 'replicate' or 'fsdp', got {parallel!r}")
    if num_queries:
        rule(P > 0, f'P must be above 0, got {P}')
        rule(batch_size == P * K + M, f'batch_size {batch_size} must equal P*K + M = {P}*{K} + {M} = {P * K + M}')
        rule(not supcon_weight or (P >= 2 and K >= 2), f'SupCon (supcon_weight {supcon_weight}) needs P >= 2 and K >= 2, got P {P}, K {K}')
        rule(init_from != 'scratch' or divides(hidden_size, prefix_heads), f'prefix_heads {prefix_heads} does not divide hidden_size {hidden_size}')
    else:
        rule(not supcon_weight, f'supcon_weight {supcon_weight} needs voice cloning (num_queries > 0)')
    try:
        meta = json.load(open(os.path.join(data, 'meta.json'), encoding='utf-8'))
        least = meta['settings']['min_clips_per_speaker']
        rule(not num_queries or least >= K, f'K {K} is above the min_clips_per_speaker {least} that {data} was built with')
    except FileNotFoundError:
        rule(False, f'data: {data}/meta.json does not exist (make it with prepare.py)')
    except (ValueError, KeyError, TypeError) as e:
        rule(False, f'data: {data}/meta.json is not a corpus description ({e})')
    if bad:
        if os.environ.get('LOCAL_RANK', '0') == '0':                    # of each node: the other's files may be missing
            print('pretrain.py: ' + '; '.join(bad), file=sys.stderr)
        sys.exit(2)

validate()

import atexit, fcntl, gc, heapq, logging, shutil, subprocess, warnings
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import model as gepard
from prepare import Corpus, encode_text, load_tokenizer, sha256_of

# ---- setup

ddp = 'RANK' in os.environ
rank, world, local_rank = (int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
sharded = ddp and parallel == 'fsdp'
if device == 'auto':
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
cuda = device == 'cuda'
quick = cuda or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
compute = {'auto': torch.bfloat16 if quick else torch.float32, 'float32': torch.float32, 'bfloat16': torch.bfloat16}[dtype]
if cuda and not torch.cuda.is_available():
    sys.exit(f'pretrain.py: device is cuda, but torch {torch.__version__} sees none')
if cuda:
    torch.cuda.set_device(local_rank)
    torch.set_float32_matmul_precision('high')
if ddp:
    dist.init_process_group('nccl' if cuda else 'gloo')
warnings.filterwarnings('ignore', message='torch.distributed is disabled')     # a checkpoint of one process: so it is meant
warnings.filterwarnings('ignore', message='FSDP2-wrapped module')               # its outputs are views, and nothing writes into them
say = (lambda *a: print(*a, flush=True)) if rank == 0 else lambda *a: None


def fail(message, everywhere=False):
    """One line and exit code 2, at once: other ranks may wait in a collective, torchrun ends them when this one is gone."""
    if local_rank == 0 or everywhere:                                   # of each node: what is wrong may be wrong on one
        print(f'pretrain.py: {message}', file=sys.stderr, flush=True)
    os._exit(2)


def all_sum(x):
    if ddp:
        dist.all_reduce(x)
    return x


def local(t):
    """This rank's part of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t

# ---- data

here = os.path.dirname(os.path.abspath(__file__))
beside = lambda name: os.path.join(here, name) if not os.path.exists(name) and os.path.exists(os.path.join(here, name)) else name
try:
    os.makedirs(out_dir, exist_ok=True)
    if rank == 0:
        lock = open(os.path.join(out_dir, 'lock'), 'w')                 # held until this process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gepard.remove_unfinished(out_dir)
    corpus = Corpus(data)
    meta = corpus.meta
    tokenizer, tokenizer_file = load_tokenizer(beside(meta['tokenizer']['id']))
    if meta['tokenizer']['hash'] != sha256_of(tokenizer_file):
        fail(f'{tokenizer_file} is not the tokenizer that {data} was built with: its text ids would mean other words')
    if speak and meta['codec']['id'].endswith('.nemo') and not os.path.isfile(beside(meta['codec']['id'])):
        fail(f"{data} was built with the codec {meta['codec']['id']}, which is not there to speak with: --speak= speaks nothing")
except BlockingIOError:
    fail(f'another run is writing to {out_dir}')
except (ValueError, OSError) as e:
    fail(e)
frame_rate = meta['codec']['sample_rate'] / meta['codec']['hop']        # 21.533, not the 21.5 of published configs
rows, speaker_of = corpus.rows, corpus.rows['speaker']
train_rows, val_rows = corpus.split('train'), corpus.split('val')
train_rows = train_rows[rows['text_len'][train_rows] >= min_text_tokens]
of_length = f' of min_text_tokens {min_text_tokens} or more' * (min_text_tokens > 0)
if not len(train_rows):
    fail(f'{data} has no training row{of_length}')


def clips_by_speaker(numbers):
    """{speaker: row numbers}, null rows left out."""
    numbers = numbers[speaker_of[numbers] >= 0]
    numbers = numbers[np.argsort(speaker_of[numbers], kind='stable')]
    names, starts = np.unique(speaker_of[numbers], return_index=True)
    return dict(zip(names.tolist(), np.split(numbers, starts[1:])))

clips = {s: c for s, c in clips_by_speaker(train_rows).items() if len(c) >= K}         # those with fewer, of min_text_tokens, are null rows
voices, all_clips = clips_by_speaker(corpus.split('train')), clips_by_speaker(np.arange(len(rows)))      # where references come from: in training, in evaluation
voiced = np.isin(speaker_of[train_rows], list(clips))
if num_queries and len(clips) < P:
    fail(f'P {P} speakers a batch, but {data} has {len(clips)} with {K} training clips{of_length}: '
         + (f'--P={len(clips)} --batch_size={len(clips) * K + M}, or ' * (len(clips) > 1) + 'config/no_vc.py, which trains without voice cloning'))
if len(train_rows) < batch_size:
    fail(f'batch_size {batch_size}, but {data} has {len(train_rows)} training rows{of_length}')


per_step = world * gradient_accumulation                                # micro-batches, of all ranks


def plan_epoch(epoch):
    """Row numbers of every micro-batch of an epoch, the same for any number of ranks -> int64 [micro-batches, batch_size].
    ~row (negative) is a row that gets the null prefix. Each row with a speaker comes about once: a speaker's clips are
    dealt into groups of K, and each batch takes a group of the P speakers that have most groups left."""
    rng = np.random.default_rng([seed, epoch])
    if not num_queries:
        order = rng.permutation(train_rows)
        return order[:len(order) // batch_size * batch_size].reshape(-1, batch_size)
    groups = {s: list(np.resize(rng.permutation(c), -(-len(c) // K) * K).reshape(-1, K)) for s, c in clips.items()}
    heap = [(-len(g), rng.random(), s) for s, g in groups.items()]
    heapq.heapify(heap)
    batches = []
    while heap:
        batch, taken = [], []
        while len(batch) < P and heap:
            n, _, s = heapq.heappop(heap)
            batch.append(groups[s].pop())
            taken.append((n + 1, s))
        while len(batch) < P:           # the epoch's tail: any group again
            s = list(clips)[rng.integers(len(clips))]
            batch.append(rng.permutation(np.resize(clips[s], max(K, len(clips[s]))))[:K])
        for n, s in taken:
            if n < 0:
                heapq.heappush(heap, (n, rng.random(), s))
        batches.append(np.concatenate(batch))
    batches = np.stack(batches)[rng.permutation(len(batches))]
    pool = train_rows[~voiced] if (speaker_of[train_rows] < 0).any() else train_rows     # no null rows in the corpus: any row, without its voice
    nulls = np.resize(rng.permutation(pool), len(batches) * M).reshape(len(batches), M)
    return np.concatenate((batches, ~nulls), 1)


def reference(i, by_speaker, rng):
    """Codes [t, 8] that give row i its voice: a crop of another clip of the speaker; of itself only where there is no other."""
    others = by_speaker[int(speaker_of[i])]
    others = others[others != i]
    long = others[rows['frame_len'][others] >= ref_min_seconds * frame_rate]
    pool = long if len(long) else others
    codes = corpus.codes(pool[rng.integers(len(pool))] if len(pool) else i)
    n = int(rng.uniform(ref_min_seconds, ref_max_seconds) * frame_rate)
    if len(codes) > n and (len(pool) or len(codes) >= 6 * frame_rate):
        start = rng.integers(len(codes) - n + 1)
        codes = codes[start:start + n]
    return codes


def make_batch(numbers, by_speaker, rng, train=True, texts_of=None):
    """Row numbers (~row = forced null) -> packed batch. A row that cannot be read is named and another one takes its place. texts_of: rows whose texts are taken."""
    out, bad = [], 0
    for number, of in zip(numbers.tolist(), (numbers if texts_of is None else texts_of).tolist()):
        i = number if number >= 0 else ~number
        null = number < 0 or speaker_of[i] < 0
        try:
            text = [] if train and text_drop_prob and rng.random() < text_drop_prob else corpus.text(of if of >= 0 else ~of).tolist()
            row = {'text': gepard.layout(text, cfg.special_tokens), 'codes': corpus.codes(i)}
            if train and frame_drop:
                row['hidden'] = rng.random(len(row['codes'])) < frame_drop * rng.random()
            if num_queries:
                row |= {'null': null, 'speaker': -1 if null else speaker_of[i], 'ref': None if null else reference(i, by_speaker, rng),
                        'drop': train and rng.random() < null_prob}
        except ValueError as e:
            print(f'pretrain.py: {e}; left out', file=sys.stderr, flush=True)
            row, bad = None, bad + 1
        out.append(row)
    good = [r for r in out if r]
    if not good:
        raise ValueError(f'no row of {numbers.tolist()} can be read')
    return gepard.pack([r or good[n % len(good)] for n, r in enumerate(out)], cfg, multiple=256 if cuda else 1) | {'bad_rows': bad}


class Batches(torch.utils.data.Dataset):
    """Micro-batches; their randomness depends on seed, epoch and number alone, not on ranks or workers."""
    def __getitem__(self, item):
        at, then, n, numbers = item
        return make_batch(numbers, voices, np.random.default_rng([seed, at[0], n])) | {'at': at, 'then': then}


def stream(epoch, micro):
    """This rank's micro-batches from a position (epoch, micro-batch) on, without end: where their step begins and ends, number, row numbers.
    A step's micro-batches are dealt so that ranks get about as many tokens (the fullest of 8 ranks has 2 % more than the mean, in turn it
    would be 9 %, with two micro-batches a step); the last ones of an epoch are left out where they make no whole step."""
    while True:
        plan = plan_epoch(epoch)
        for first in range(micro, len(plan) - per_step + 1, per_step):
            step_rows = plan[first:first + per_step]
            step_rows = np.where(step_rows < 0, ~step_rows, step_rows)
            by_size = first + np.argsort((rows['frame_len'] + rows['text_len'])[step_rows].sum(1), kind='stable')
            then = (epoch, first + per_step) if first + 2 * per_step <= len(plan) else (epoch + 1, 0)
            for turn, dealt in enumerate(by_size.reshape(gradient_accumulation, world)):
                n = int(dealt[rank if turn % 2 == 0 else world - 1 - rank])         # there and back
                yield (epoch, first), then, n, plan[n]
        epoch, micro = epoch + 1, 0


def apart(worker):
    """What a process that packs batches does first. A signal to the whole group must not end it before the trainer has saved, and a killed
    trainer's lock must not live on in it."""
    os.setsid()
    if rank == 0:
        lock.close()


def loader(epoch, micro):
    return iter(torch.utils.data.DataLoader(Batches(), batch_size=None, sampler=stream(epoch, micro), num_workers=num_workers, pin_memory=cuda,
                                            prefetch_factor=4 if num_workers else None, worker_init_fn=apart))


def to_device(batch):
    return {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}

# ---- model

special = meta['special_tokens']
ids_needed = max(meta['tokenizer']['length'], 1 + max(special.values()))
try:
    used_ids = np.union1d(corpus.used_ids(ids_needed), list(special.values()))
except ValueError as e:
    fail(e)
contrast = 128 if num_queries and supcon_weight else 0
audio = {k: config[k] for k in ('audio_embed_dim', 'num_queries', 'prefix_layers', 'prefix_heads', 'prefix_dropout', 'null_prob', 'stop_loss_weight',
                                'stop_pos_weight')}
audio |= dict(
    levels=list(meta['codec']['levels']) * meta['codec']['groups'], supcon_dim=contrast, supcon_hidden=contrast,
    special_tokens={'tokeniser_length': meta['tokenizer']['length'], **special},
    codec=dict(num_layers=meta['codec']['groups'], fsq_levels=list(meta['codec']['levels']), do_unfold=True, frame_rate_hz=21.5,
               codec_id=meta['codec']['id'], sample_rate=meta['codec']['sample_rate']))
shape = {k: config[k] for k in ('hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads',
                                'head_dim', 'rope_theta', 'max_position_embeddings')}
newest = gepard.latest_checkpoint(out_dir)
metadata = {'parent': init_from, 'parent_kind': 'scratch' if init_from == 'scratch' else 'folder' if os.path.isdir(init_from) else 'hub'}
for _, path in gepard.checkpoints(out_dir, file='training_metadata.json'):
    stage = gepard.read_json(os.path.join(path, 'training_metadata.json')).get('stage')
    if stage != 'pretrain':
        fail(f'{out_dir} holds checkpoints of the stage {stage}: choose another out_dir')
if newest and not resume:
    fail(f'{out_dir} holds {newest}: choose another out_dir, or --resume=true to go on')
step, epoch, micro = 0, 0, 0        # optimizer steps; epoch and micro-batches of it that are done
try:
    if newest:
        cfg = gepard.config_from_json(gepard.read_json(os.path.join(newest, 'gepard_config.json')), os.path.join(newest, 'gepard_config.json'))
        progress = gepard.read_json(os.path.join(newest, 'resume.json'))
        step, epoch, micro = progress['step'], progress['epoch'], progress['micro']
        say(f'resumed {newest}: step {step}, epoch {epoch}, micro-batch {micro}')
        metadata = gepard.read_json(os.path.join(newest, 'training_metadata.json'))
        before, codecs = metadata['config'], [m.get('codec_hash') for m in (metadata['corpus'], meta['settings'])]
        if before['init_from'] != init_from:
            fail(f"{newest} began with init_from {before['init_from']!r}, it cannot be {init_from!r} now: choose another out_dir")
        if all(codecs) and codecs[0] != codecs[1]:
            fail(f"{data} was encoded with another codec file of the name {meta['codec']['id']} than {newest} has learnt: its codes mean other sounds")
        for key, value in metadata.get('regularizers', {}).items():     # a run keeps those that it began with
            if config[key] != value:
                say(f'  {key} stays {value!r}, it is the run\'s')
            globals()[key] = config[key] = value
        if num_queries and supcon_weight and min(P, K) < 2:
            fail(f'SupCon (supcon_weight {supcon_weight}, the run\'s) needs P >= 2 and K >= 2, got P {P}, K {K}')
        changed = [k for k in before if k in config and json.dumps(before[k]) != json.dumps(config[k])]
        audio |= dict.fromkeys(('supcon_dim', 'supcon_hidden'), 128 if num_queries and supcon_weight else 0)
        if metadata['corpus'].get('hop', meta['codec']['hop']) != meta['codec']['hop']:
            fail(f"{data} has frames of {meta['codec']['hop']} samples, {newest} has learnt such of {metadata['corpus']['hop']}")
        for key in changed:
            say(f'  {key} was {before[key]!r}, is {config[key]!r}')
        if any(metadata['corpus'].get(k) != meta.get(k) for k in ('rows', 'frames')):
            say(f'  {data} is another corpus than before')
            changed.append('data')
        if before.get('min_text_tokens', 0) != min_text_tokens:
            changed.append('min_text_tokens')
        if micro and {'data', 'min_text_tokens', 'batch_size', 'P', 'K', 'M', 'seed', 'num_queries'} & set(changed):
            say(f'  so epoch {epoch} has other batches and starts over')
            micro = 0
        for key, want in (audio | (shape if init_from == 'scratch' else {})).items():
            if json.dumps(getattr(cfg, key)) != json.dumps(want) and key not in ('null_prob', 'stop_loss_weight', 'stop_pos_weight'):
                fail(f'{newest} has {key} {getattr(cfg, key)!r}, corpus and config say {want!r}')
    elif init_from == 'scratch':
        cfg = gepard.Config(vocab_size=-(-ids_needed // 64) * 64, **shape, **audio)
    else:
        cfg = gepard.config_from_qwen(init_from, **audio)
    cfg.null_prob, cfg.stop_loss_weight, cfg.stop_pos_weight = null_prob, stop_loss_weight, stop_pos_weight
    if num_queries and cfg.hidden_size % prefix_heads:
        fail(f'prefix_heads {prefix_heads} does not divide hidden_size {cfg.hidden_size} of {init_from}')
    if ids_needed > cfg.vocab_size:
        fail(f"{data}: tokenizer {meta['tokenizer']['id']} needs {ids_needed} ids, the model has {cfg.vocab_size}")
    longest = (rows['text_len'] + rows['frame_len']).max() + num_queries + 3
    if longest > cfg.max_position_embeddings:
        fail(f'{data} has rows of up to {longest} tokens, the model ends at max_position_embeddings {cfg.max_position_embeddings}')

    with torch.device('meta'):                                          # names and shapes, no memory
        model = gepard.Gepard(cfg)
    sizes = {}
    for name, p in model.named_parameters():
        sizes[gepard.group_of(name)] = sizes.get(gepard.group_of(name), 0) + p.numel()
    total_parameters = sum(sizes.values())
    # a save needs weights and two moments in fp32, beside the checkpoints that stay until it is whole
    need, free = 12.0 * total_parameters * ((keep_checkpoints or 1) + 1 - len(gepard.checkpoints(out_dir))), shutil.disk_usage(out_dir).free
    if need > free:
        fail(f'{out_dir}: {free / 1e9:.2f} GB free, but the checkpoints need {need / 1e9:.2f} GB: lower keep_checkpoints or choose another out_dir')
    whole = None
    if rank == 0 or not sharded:                                        # shards: rank 0 loads, all receive
        if newest:
            whole = gepard.load_checkpoint(newest)[0]
        else:
            whole = gepard.Gepard(cfg)
            if init_from != 'scratch':
                gepard.load_qwen(whole, init_from)
            whole.init_weights(seed, backbone=init_from == 'scratch')
except (ValueError, OSError, KeyError) as e:
    fail(f'{newest}: cannot go on from it ({e}); without that folder the run goes on from the one before' if newest else e, everywhere=True)

if not sharded:
    model = whole.to(device)
    model.cfg = cfg
model.train()
model.model.recompute = recompute
# by layer: 14 layers share one graph, for any number of tokens, and ranks can talk between them. The whole step as one graph had not
# compiled after three minutes, and with fixed shapes it was no faster (66.1 ms and 66.5, H200)
if compile and cuda:
    torch._dynamo.config.optimize_ddp = False                           # it cuts each layer in three, to send gradients earlier: the GPU then waits for Python
    for part in (*model.model.layers, *([model.ref_compressor] if num_queries else [])):
        part.compile(dynamic=True)
if sharded:
    # inputs stay as they are (positions and angles lose too much in 16 bit); weights stay whole from forward to backward
    policy = MixedPrecisionPolicy(*((compute, torch.float32) if compute != torch.float32 else ()), cast_forward_inputs=False)
    mesh = dist.init_device_mesh(device, (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device=device)
    model.fill_buffers()
    set_model_state_dict(model, whole.state_dict() if whole else {}, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
del whole
net, embedding = model, model.model.embed_tokens.weight
if ddp and not sharded:
    # most of the text embedding's gradient is zero, on all ranks: they exchange the rows of ids that the corpus has, not 1 GB each step
    warnings.filterwarnings('ignore', message='`broadcast_buffers`')       # torch 2.13 has another name for it
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ['model.embed_tokens.weight'])
    net = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    used_ids = torch.from_numpy(used_ids).to(device)


def meet():
    """The text embedding's gradient: its mean over ranks."""
    mean = all_sum(embedding.grad[used_ids]) / world
    embedding.grad[used_ids] = mean

# autocast makes the 16-bit copies that FSDP makes by its policy
cast = torch.autocast(device, compute) if compute != torch.float32 and not sharded else nullcontext()

multipliers = {'backbone': 1.0, 'audio': lr_audio, 'embed': lr_embed, 'ref': lr_ref}
optimizer = torch.optim.AdamW(gepard.param_groups(model, learning_rate, multipliers, weight_decay), betas=(beta1, beta2), eps=1e-8, fused=True)
named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
# telemetry compares up to 1,024 text embeddings with what they were at the start
if newest:
    watched = progress['watched']
else:
    watched = np.unique(np.concatenate([corpus.text(i) for i in train_rows[:: -(-len(train_rows) // 2000)]]))
    watched = watched[:: -(-len(watched) // 1024)].tolist()
full = lambda t: t.full_tensor() if isinstance(t, DTensor) else t      # a collective: every rank calls it
anchor = full(model.model.embed_tokens.weight.detach())[watched].clone()


def resume_state():
    """What the weights' file does not hold, as a flat dict of tensors; the same on one rank and on many."""
    state = {f'{k}.{name}': v for name, p in named for k, v in optimizer.state[p].items()}
    return state | {'anchor': anchor}

if newest:
    for name, p in named:
        optimizer.state[p] = {'step': torch.zeros((), device=device), 'exp_avg': torch.zeros_like(p), 'exp_avg_sq': torch.zeros_like(p)}
    logging.disable(logging.WARNING)        # it logs its errors with their tracebacks, and raises them as well
    try:
        dcp.load(resume_state(), storage_reader=dcp.HuggingFaceStorageReader(os.path.join(newest, 'resume')), no_dist=not ddp)
    except (Exception, CheckpointException) as e:                       # safetensors, planner and storage have their own types
        fail(f"{newest}: cannot go on from its resume state ({str(e).strip().splitlines()[-1][:200]}); without that folder the run goes on from the one before", everywhere=True)
    logging.disable(logging.NOTSET)

# ---- schedule, in words

plan = plan_epoch(0)
micros_per_epoch, shown = len(plan), np.bincount(plan[plan >= 0], minlength=len(rows))[train_rows[voiced] if num_queries else train_rows]
steps_per_epoch = micros_per_epoch // per_step
if steps_per_epoch == 0:
    fail(f'an epoch has {micros_per_epoch} micro-batches, one step takes {world} ranks x {gradient_accumulation}: '
         'lower gradient_accumulation or batch_size')
left = (epochs - epoch - 1) * steps_per_epoch + (micros_per_epoch - micro) // per_step
total_steps = max(step + left, step) if not max_steps else min(max_steps, step + left)
mean_frames, mean_text = rows['frame_len'][train_rows].mean(), rows['text_len'][train_rows].mean()
say(f"corpus {data}: {len(train_rows):,} training rows, {len(val_rows):,} held out, {rows['frame_len'].sum() / frame_rate / 3600:.2f} hours, "
    f"{len(clips):,} speakers, {int((~voiced).sum()):,} null rows")
say(f'batch: {batch_size} rows' + (f' = {P} speakers x {K} clips + {M} null rows' if num_queries else '')
    + f' x {gradient_accumulation} micro-batches x {world} ranks '
    f'= {batch_size * per_step:,} rows, about {batch_size * per_step * (mean_frames + mean_text + num_queries + 3):,.0f} tokens, '
    f'{batch_size * per_step * mean_frames / frame_rate:,.0f} s of audio a step')
say(f'an epoch shows each row{" with a speaker" * (num_queries > 0)} {shown.mean():.2f} times ({shown.min()} to {shown.max()})' if len(shown) else 'no row has a speaker')
if num_queries and (speaker_of[train_rows] < 0).any():
    say(f'  and has {len(plan) * M:,} places for the {int((~voiced).sum()):,} null rows')
say(f'{steps_per_epoch:,} steps an epoch, {total_steps:,} in all' + (f', {total_steps - step:,} to go' if step else ''))
for g in ('backbone', 'embed', 'audio', 'ref'):
    if g in sizes:
        say(f'parameters: {g:9s} {sizes[g] / 1e6:8.2f}M  lr {learning_rate * multipliers[g]:.2e}')
mode = f" x {world} ({'FSDP2' if sharded else 'replicated'})" if ddp else ''
say(f"{total_parameters / 1e6:.2f}M in all, {device}{mode}, {str(compute).removeprefix('torch.')} compute; a checkpoint takes {12 * total_parameters / 1e9:.2f} GB")
if total_steps <= step:
    say('nothing left to do')


def lr_factor(step):
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1)))

# ---- saving and evaluating

def full_weights():
    """The whole state dict on the CPU; a collective, only rank 0 gets it."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save():
    """Every rank takes part: rank 0 writes the weights, each writes its part of the resume state (safetensors, by torch's
    distributed checkpoint), then the folder gets its name."""
    path = os.path.join(out_dir, f'checkpoint-{step}')
    if path == gepard.latest_checkpoint(out_dir):
        return
    if all_sum(sum((~torch.isfinite(local(p))).sum() for _, p in named).float()).item():
        fail(f'the weights are not finite after step {step}; the newest whole checkpoint is {gepard.latest_checkpoint(out_dir)}')
    weights = full_weights()

    def rest(folder):
        if ddp:
            dist.barrier()                                              # rank 0 has made the folder
        dcp.save(resume_state(), storage_writer=dcp.HuggingFaceStorageWriter(os.path.join(folder, 'resume'), save_distributed=True), no_dist=not ddp)
        if rank == 0:
            gepard.write_json(os.path.join(folder, 'resume.json'), {'step': step, 'epoch': epoch, 'micro': micro, 'watched': watched})
    try:
        if rank:
            rest(path + '.tmp')
        else:
            made_of = {'stage': 'pretrain', 'step': step, **{k: metadata[k] for k in ('parent', 'parent_kind') if k in metadata}, 'config': config, 'corpus': {k: meta.get(k) for k in ('sources', 'rows', 'frames', 'languages')} | {'codec_hash': meta['settings'].get('codec_hash'), 'hop': meta['codec']['hop']},
                        'regularizers': {k: config[k] for k in ('diversity_weight', 'diversity_ramp', 'supcon_weight', 'supcon_ramp', 'reg_start')},
                        'versions': {'python': sys.version.split()[0], 'torch': torch.__version__, 'numpy': np.__version__}, 'git': git}
            if os.path.isdir(path):
                os.rmdir(path)                                          # in the way; with files in it, it is not ours to remove
            gepard.save_checkpoint(path, weights, cfg, os.path.dirname(tokenizer_file), made_of, rest)
            for _, old in gepard.checkpoints(out_dir)[:-keep_checkpoints] if keep_checkpoints and not bad_steps else []:
                shutil.rmtree(old)
            say(f'saved {path}')
    except (Exception, CheckpointException) as e:                       # a full disk, most likely; several libraries write here
        fail(f"{path}: not saved ({' '.join(str(e).split())[:300]}; it takes {12 * total_parameters / 1e9:.2f} GB, "
             f'{shutil.disk_usage(out_dir).free / 1e9:.2f} GB are free); the newest whole checkpoint is {gepard.latest_checkpoint(out_dir)}', everywhere=True)
    if ddp:
        dist.barrier()


@torch.no_grad()
def evaluate():
    """Means over held-out rows: code loss, what the right text gains over that of another row, stop loss, stop recall and precision at 0.5. Every rank runs as many batches."""
    model.eval()
    total = torch.zeros(8, device=device, dtype=torch.float64)
    chosen = np.random.default_rng(seed).permutation(val_rows)[:eval_batches * batch_size]
    parts, strangers = (np.array_split(x, -(-len(chosen) // (batch_size * world)) * world) for x in (chosen, np.roll(chosen, 1)))
    for n in range(rank, len(parts), world):
        empty = len(parts[n]) == 0                                      # still runs, so that no rank waits for another
        own, stranger = (x[n] if not empty else chosen[:1] for x in (parts, strangers))
        batch, wrong = (to_device(make_batch(own, all_clips, np.random.default_rng([seed, n]), train=False, texts_of=t)) for t in (own, stranger))
        with cast:
            out, other = net(batch), net(wrong)
        f, ending = len(out['codes']), out['stop_logits'][len(out['codes']):]
        hits, false = (ending > 0).sum(), (out['stop_logits'][:f] > 0).sum()
        code, misled = (gepard.code_nll(o['logits'], o['codes']).sum() for o in (out, other))
        stop = gepard.stop_nll(out['stop_logits'], gepard.stop_target(out), cfg.stop_pos_weight)
        total += 0 if empty else torch.stack([torch.as_tensor(x, device=device).double() for x in (code, stop, f, len(ending), hits, false, len(ending) + f, misled)])
    model.train()
    code, stop, frames, stops, hits, false, both, misled = all_sum(total).tolist()
    return {'val_code': code / frames, 'text_gain': (misled - code) / frames, 'val_stop': stop / both, 'stop_recall': hits / stops, 'stop_precision': hits / max(hits + false, 1)}


def speak_prompts():
    """The fixed prompts, each in the voice of another held-out row (or the null prefix), to wav with a spectrogram."""
    weights = full_weights()
    if rank:
        return
    from codec import save_spectrogram, save_wav
    voice = gepard.Gepard(cfg)                                          # a copy: neither sharded nor compiled
    voice.load_state_dict(weights)
    voice.to(device, compute if cuda else torch.float32).eval()
    folder = os.path.join(out_dir, 'samples', f'step-{step}')
    os.makedirs(folder, exist_ok=True)
    prefix = None
    if num_queries:
        voices = [i for i in val_rows if speaker_of[i] >= 0] or list(train_rows[speaker_of[train_rows] >= 0])
        prefix = voice.voices([reference(voices[n * len(voices) // len(speak)], all_clips, np.random.default_rng(seed)) for n in range(len(speak))])
    texts = [gepard.prompt(encode_text(tokenizer, t), cfg) for t in speak]
    room = cfg.max_position_embeddings - max(map(len, texts)) - num_queries
    spoken = gepard.generate(voice, texts, prefix, max_frames=min(300, room), temperature=speak_temperature)
    for n, (text, s, wav) in enumerate(zip(speak, spoken, codec.decode([s['codes'].cpu() for s in spoken]))):
        save_wav(os.path.join(folder, f'{n}.wav'), wav, codec.sample_rate)
        save_spectrogram(os.path.join(folder, f'{n}.png'), wav, codec.sample_rate, f"step {step}: {text} ({len(s['codes'])} frames, {s['ended_by']})")


def effective_rank(m):
    """exp of the entropy of the normalised singular values, Roy & Vetterli 2007: how many directions [rows, d] really uses."""
    p = torch.linalg.svdvals(m.float())
    p = p / p.sum()
    return torch.exp(-(p * p.clamp(min=1e-12).log()).sum()).item()


@torch.no_grad()
def look_inside():
    """The costly telemetry, on one held-out batch: see docs/guide.md for what each number shows. Every rank calls it."""
    model.eval()
    numbers = (val_rows if len(val_rows) else train_rows)[:batch_size]
    batch = to_device(make_batch(numbers, all_clips, np.random.default_rng(seed), train=False)) | {'states': []}
    with cast:
        out = model(batch)
    model.train()
    norm, cosine = lambda x: x.float().norm(dim=-1).mean().item(), torch.nn.functional.cosine_similarity
    own = lambda name: full(dict(named)[name].detach())                 # the masters: after a forward, FSDP's root shows its 16-bit copies
    embed, tables = own('model.embed_tokens.weight')[watched], own('audio_embeddings.weight').split(cfg.levels)
    text_at = batch['text_at'][batch['text_at'] < batch['last_at'][-1]]  # without what fills up
    ranks = [effective_rank(t) for t in tables]
    r = {'text_norm': norm(out['inputs'][text_at]), 'audio_norm': norm(out['inputs'][batch['frame_at']]),
         'text_cosine_to_start': cosine(embed, anchor).mean().item(), 'text_drift': ((embed - anchor).norm() / anchor.norm()).item(),
         'text_rank': effective_rank(embed - embed.mean(0)), 'table_rank': ranks, 'table_rank_share': float(np.mean([a / n for a, n in zip(ranks, cfg.levels)])),
         'text_audio_cosine': [cosine(h[text_at].float().mean(0), h[batch['frame_at']].float().mean(0), dim=0).item() for h in batch['states']]}
    if num_queries:
        r['null_norm'] = norm(own('null_prefix'))
        heard, n = ~batch['drop'], num_queries
        if heard.any():                                                 # the others have the null prefix
            spoken = out['q'][heard].float()
            q = torch.nn.functional.normalize(spoken, dim=-1)
            r |= {'prefix_norm': norm(out['inputs'][batch['prefix_at']].unflatten(0, (len(heard), n))[heard]),
                  'query_cosine': ((q @ q.mT).sum().item() / len(q) - n) / max(n * (n - 1), 1), 'query_spread': spoken.std(1, unbiased=False).mean().item()}
    return r


def curves():
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    log = [json.loads(line) for line in open(metrics_path, encoding='utf-8')]
    fig, axes = plt.subplots(2, 3, figsize=(15, 7))
    shown = (('code', 'val_code'), ('stop', 'val_stop'), ('stop_recall', 'stop_precision'), ('grad_norm', 'grad_norm_backbone', 'grad_norm_qformer'),
             ('supcon', 'diversity', 'supcon_positive', 'supcon_negative'), ('mfu', 'loader_wait') if cuda else ('lr',))
    for ax, keys in zip(axes.flat, shown):
        for key in keys:
            points = [(r['step'], r[key]) for r in log if key in r]
            if points:
                ax.plot(*zip(*points), label=key, marker='.' if len(points) < 20 else None)
        ax.legend()
        ax.set_xlabel('step')
    axes[0, 0].axhline(sum(map(math.log, cfg.levels)), color='gray', lw=0.5)        # every code equally likely
    fig.tight_layout()
    fig.savefig(os.path.join(out_dir, 'curves.tmp.png'))
    plt.close(fig)
    os.replace(os.path.join(out_dir, 'curves.tmp.png'), os.path.join(out_dir, 'curves.png'))

# ---- the loop

metrics_path = os.path.join(out_dir, 'metrics.jsonl')
codec, wandb, git = None, None, ''
if speak and eval_interval and rank == 0:                               # now, not after hundreds of steps
    from codec import NanoCodec
    try:
        for t in speak:
            if not any(c.isalnum() for c in t):
                raise ValueError(f'nothing to speak in {t!r}')
            if len(gepard.prompt(encode_text(tokenizer, t), cfg)) + num_queries >= cfg.max_position_embeddings:
                raise ValueError(f'{t[:60]!r} is too long for {cfg.max_position_embeddings} positions')
        codec = NanoCodec(beside(meta['codec']['id']), device=device)
    except (ValueError, OSError, ImportError) as e:
        fail(f'{e}: --speak= speaks nothing')
if rank == 0:
    try:
        git = subprocess.run(['git', 'rev-parse', 'HEAD'], capture_output=True, text=True, cwd=here).stdout.strip()
    except OSError:                                                     # no git here
        pass
    seen = any(r['step'] == step and 'text_norm' in r for r in gepard.keep_lines(metrics_path, step if newest else -1)[-20:])      # was this step's evaluation written?
    if wandb_project:
        try:
            import wandb
        except ImportError:
            fail('wandb_project is set, but wandb is not installed: pip install wandb')
        try:
            wandb.init(project=wandb_project, name=os.path.basename(out_dir), config=config)
        except Exception as e:                                          # no key, no network, ...
            fail(f'wandb: {e}')


def record(values):
    if rank == 0:
        gepard.append_line(metrics_path, json.dumps({'step': step, **values}))
        if wandb:
            wandb.log(values, step=step)


def settle():
    """Look at the pending steps' flags (the host waits here): name the skipped ones, end the run after too many in a row."""
    global bad_steps
    for s, e, m, flag in pending:
        bad_steps = bad_steps + 1 if flag.item() else 0
        if bad_steps:
            numbers = plan_epoch(e)[m:m + per_step].ravel()
            say(f'step {s}: non-finite gradient, step skipped ({bad_steps} in a row); rows {np.where(numbers < 0, ~numbers, numbers).tolist()}')
        if bad_steps >= max_bad_steps:
            fail(f'{bad_steps} steps in a row with a non-finite gradient; the newest whole checkpoint is {gepard.latest_checkpoint(out_dir)}')
    pending.clear()

PARTS = ('backbone', 'text_embedding', 'tables', 'frame_mlp', 'heads', 'stop_head', 'qformer', 'null_prefix', 'supcon_head')
BEGINS = {'model.embed_tokens': 1, 'model.': 0, 'audio_embeddings.': 2, 'audio_embed_proj.': 3, 'codebook_heads.': 4, 'stop_head.': 5, 'ref_compressor.': 6,
          'null_prefix': 7, 'supcon_head.': 8}
part_of = torch.tensor([next(n for begin, n in BEGINS.items() if name.startswith(begin)) for name, _ in named], device=device)


def gradient_norms():
    """Squared gradient norm of each of PARTS, over all ranks -> [9], on the device."""
    squares = torch.stack(torch._foreach_norm([local(p.grad) if p.grad is not None else local(p).new_zeros(1) for _, p in named])).square()
    squares = torch.zeros(len(PARTS), device=device).index_add_(0, part_of, squares)
    return all_sum(squares) if sharded else squares                     # replicas hold the same gradients already

stopping = []


def on_signal(number, frame):
    if stopping and number == signal.SIGINT:                            # Ctrl-C twice: at once
        os._exit(130)
    stopping.append(signal.Signals(number).name)

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, on_signal)
TALLY = ('code', 'stop', 'diversity', 'supcon', 'hits', 'false', 'stops', 'nulls_forced', 'nulls_random', 'supcon_positive', 'supcon_negative')
tally = torch.zeros(len(TALLY) + len(cfg.levels), device=device)        # sums since the last log line, this rank's
norms = torch.zeros(len(PARTS), device=device)


def micro_step(batch, n, w):
    """One micro-batch -> what to differentiate, what to log ([TALLY, loss of each channel], parts of the step's means).
    n: frames and rows of the whole step, w: weights of the regularizers; on the device, so that the host waits for nothing."""
    with cast:
        out = net(batch)
        r = gepard.losses(out, batch, cfg, {'frames': n[0], 'stops': n[0] + n[1], 'rows': n[1]}, w[0], w[1], supcon_share=1 / gradient_accumulation)
    with torch.no_grad():
        zero, f, share = n[0] * 0, len(out['codes']), 1 / world / gradient_accumulation
        forced, dropped = (batch[k].sum() for k in ('null', 'drop')) if num_queries else (zero, zero)
        stats = r.get('supcon_stats', {'positive': zero, 'negative': zero})
        seen = (r['code'], r['stop'], r.get('diversity', zero), r.get('supcon', zero) / world, (out['stop_logits'][f:] > 0).sum(), (out['stop_logits'][:f] > 0).sum(),
                zero + len(batch['last_at']), forced, dropped - forced, stats['positive'] * share, stats['negative'] * share)
        seen = torch.cat([torch.stack([x.float() for x in seen]), r['level'].float()])
    return r['total'] * world, seen                                     # DDP and FSDP average over ranks; ours are parts of one sum


def eval_due():
    return eval_interval and (step % eval_interval == 0 or step == total_steps)


def look_around():
    """What an evaluation step does: held-out rows, costly telemetry, spoken prompts, curves. Every rank calls it."""
    r = evaluate() if len(val_rows) else {}
    record(r | look_inside())
    say(f'step {step}: ' + ', '.join(f'{k} {v:.3f}' for k, v in r.items()))
    try:
        if speak:
            speak_prompts()
        if rank == 0:
            curves()
    except OSError as e:                                                # a full disk: pictures and samples are not worth the run
        print(f'pretrain.py: {out_dir}: step {step}: samples or curves are not written ({e.strerror or e})', file=sys.stderr, flush=True)

batches, bad_steps, bad_rows, pending = loader(epoch, micro), 0, 0, []
if eval_interval and step == 0 and len(val_rows):
    r = evaluate()
    record(r)
    say('step 0: ' + ', '.join(f'{k} {v:.3f}' for k, v in r.items()) + f' (code loss of a blind guess: {sum(map(math.log, cfg.levels)):.1f})')
elif eval_due() and all_sum(torch.tensor(float(rank == 0 and not seen), device=device)).item():
    look_around()                                                       # the run was stopped between saving and this
clock, clock_step, audio_frames, tokens, waited, flops = time.time(), step, 0, 0, 0.0, 0
start_time, start_step, eta_known = time.time(), step, False
while step < total_steps:
    t = time.time()
    try:
        parts = [next(batches) for _ in range(gradient_accumulation)]
    except (ValueError, RuntimeError) as e:                             # a worker's comes with its traceback
        fail(str(e).strip().splitlines()[-1].removeprefix('ValueError: '), everywhere=True)
    waited += time.time() - t
    audio_frames += sum(len(b['codes']) for b in parts)
    tokens += sum(len(b['position']) for b in parts)
    # forward and backward of the matrices, and of attention inside the rows: 6 flops a parameter and token, Kaplan 2020
    flops += sum(6 * sizes['backbone'] * len(b['position']) + 6 * cfg.num_hidden_layers * cfg.num_attention_heads * cfg.head_dim
                 * int((b['cu_seqlens'].diff().long() ** 2).sum()) for b in parts)
    # means are over all rows of the step, on all ranks: one gradient for 1x4, 2x2 and 4x1
    n = torch.tensor([sum(len(b['codes']) for b in parts), sum(len(b['last_at']) for b in parts)], dtype=torch.float32, pin_memory=cuda)
    n = all_sum(n.to(device, non_blocking=True))
    w = torch.tensor([gepard.ramp(step, diversity_weight, reg_start, diversity_ramp), gepard.ramp(step, supcon_weight, reg_start, supcon_ramp)],
                     pin_memory=cuda).to(device, non_blocking=True)
    for g in optimizer.param_groups:
        g['lr'] = g['base_lr'] * lr_factor(step)
    torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank) % 2 ** 63)       # dropout: the same after a resume
    try:
        for a, batch in enumerate(parts):
            last = a == gradient_accumulation - 1                       # gradients meet once a step
            if sharded:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            bad_rows += batch.pop('bad_rows')
            with nullcontext() if last or net is model else net.no_sync():
                loss, seen = micro_step(to_device(batch), n, w)
                loss.backward()
            tally += seen
            del loss, seen
        if net is not model:
            meet()
    except torch.OutOfMemoryError:
        fail(f'out of memory in a step of {sum(len(b["position"]) for b in parts):,} tokens in {gradient_accumulation} micro-batches: lower batch_size (with P, K, M) '
             'and raise gradient_accumulation, or --recompute=true, or --parallel=fsdp on several GPUs', everywhere=True)
    squares = gradient_norms()
    norm = squares.sum().sqrt()
    norms += squares.sqrt()
    # the fused optimizer divides by grad_scale (that is the clipping) and skips the step where found_inf is set, without asking the host
    optimizer.grad_scale = (norm / grad_clip).clamp(min=1) if grad_clip else torch.ones((), device=device)
    optimizer.found_inf = (~torch.isfinite(norm)).float()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    pending.append((step, *parts[0]['at'], optimizer.found_inf))
    step, (epoch, micro) = step + 1, parts[0]['then']

    stop_now = False
    if step % log_interval == 0 or step == total_steps or stopping and not ddp:
        stop_now = all_sum(torch.tensor(float(len(stopping)), device=device)).item() > 0    # ranks agree, here only
        settle()
        steps_done, seconds = max(step - clock_step, 1), time.time() - clock
        eta = (total_steps - step) * (time.time() - start_time) / (step - start_step)
        sums = (all_sum(tally) / steps_done).tolist()
        v = dict(zip(TALLY, sums))
        hits, false, stops, forced, random = (v.pop(k) for k in ('hits', 'false', 'stops', 'nulls_forced', 'nulls_random'))
        v |= {'train_stop_recall': hits / stops, 'train_stop_precision': hits / max(hits + false, 1e-9), 'null_forced': forced / stops, 'null_random': random / max(stops - forced, 1),
              'level': sums[len(TALLY):], 'grad_norm': float(norm), **{'grad_norm_' + k: x / steps_done for k, x in zip(PARTS, norms.tolist())},
              'lr': learning_rate * lr_factor(step - 1), 'epoch': epoch, 'bad_rows': bad_rows, 'step_ms': 1000 * seconds / steps_done, 'tokens_per_s': tokens * world / seconds,
              'audio_s_per_s': audio_frames * world / frame_rate / seconds, 'mfu': flops / seconds / 1e12 / peak_tflops, 'loader_wait': waited / seconds,
              'memory_gib': torch.cuda.max_memory_allocated() / 2 ** 30 if cuda else 0.0,
              'compilations': torch._dynamo.utils.counters['stats']['unique_graphs'] if cuda else 0}
        record(v)
        say(f"step {step}/{total_steps} epoch {epoch} code {v['code']:.3f} stop {v['stop']:.3f} div {v['diversity']:.3f} sup {v['supcon']:.3f} "
            f"norm {v['grad_norm']:.2f} lr {v['lr']:.1e} | {v['step_ms']:.0f} ms, {v['audio_s_per_s']:.0f} s audio/s, {v['tokens_per_s']:.0f} tokens/s, "
            + (f"MFU {100 * v['mfu']:.0f}%, " if cuda else '') + f"loader {100 * v['loader_wait']:.0f}%, ETA {int(eta) // 3600}:{int(eta) // 60 % 60:02d}:{int(eta) % 60:02d}")
        tally.zero_()
        norms.zero_()
        if not eta_known:                                               # half a million objects that stay: looking them all through again would stop every rank, for 0.4 s
            gc.collect()
            gc.freeze()
            atexit.register(gc.unfreeze)                                # else Triton's bindings call them leaks
            eta_known, start_time, start_step = True, time.time(), step # compiling is not to be foretold a second time
        clock, clock_step, audio_frames, tokens, waited, flops = time.time(), step, 0, 0, 0.0, 0
    pause = time.time()
    if step % save_interval == 0 or step == total_steps or stop_now:
        settle()
        if not bad_steps or step == total_steps or stop_now:            # not in a bad streak, as long as there is a next time
            save()
    if stop_now and step < total_steps:
        say(f'stopped by {stopping[0] if stopping else "another rank"} at step {step}')
        break
    if eval_due():
        look_around()
    clock += time.time() - pause                                        # speeds are of training alone, the ETA is of all
if ddp:
    dist.barrier()
    dist.destroy_process_group()
