"""
Fine-tunes a checkpoint on a corpus of prepare.py: adapters (LoRA) on a frozen base, or with --full whole parts of the model.

    python finetune.py config/finetune.py --ckpt=out/pretrain --data=data/voice                         # one process: CPU or one GPU
    torchrun --nproc_per_node=4 finetune.py config/finetune.py --ckpt=you/base --data=data/voice        # one node, FSDP2
    python merge.py --ckpt=out/finetune                     # then: adapters and base -> the checkpoint that sample.py speaks from

Codec, tokenizer, special tokens and text layout are the base's; text repetition is switched on and stamped into what is written.
Written to out_dir: checkpoint-<step>/ (adapters; with --full a whole checkpoint) with resume.pt, metrics.jsonl, curves.png and
evaluation.json: held-out losses by text length and language, before the first step (the base as it speaks, with its own text
repetition) and after. Started again, it goes on from the newest checkpoint; other ranks and batch sizes are fine. SIGTERM and Ctrl-C save and end.
"""
import json, math, os, signal, sys, time

import numpy as np

# -----------------------------------------------------------------------------
out_dir = 'out/finetune'
ckpt = 'out/pretrain'           # the base: a checkpoint folder, a run's folder (its newest checkpoint) or a Hub name
data = 'data/corpus'            # corpus folder, built with the base's codec and tokenizer
val_corpora = {}                # {'name': 'corpus folder'}: more held-out rows at each evaluation, say of what must not be forgotten; {} = none
codec = ''                      # '' = corpora must name the checkpoint's codec; else the name they know the same codec by
# what is trained
lora_rank = 16
lora_alpha = 32.0               # the change is alpha / rank * B A
lora_dropout = 0.05
lora_targets = ('q_proj', 'k_proj', 'v_proj', 'o_proj')     # the backbone's linears; also gate_proj, up_proj, down_proj
lora_last_n_layers = 0          # adapters in so many layers from the top; 0 = all
train_stop_head = False         # the stop head too, whole, beside the adapters
full = False                    # True: no adapters, the model itself, but for `freeze`
freeze = ('ref',)               # groups that stay as they are with full: backbone, embed, audio, ref (ref: without SupCon it forgets voices)
# rows
batch_size = 16                 # rows of a micro-batch and rank
gradient_accumulation = 4       # micro-batches a step and rank: 4 ranks make 256 rows of it; one GPU wants 16 for the same
epochs = 3
max_steps = 0                   # ends earlier; 0 = as many as the epochs give
text_repetition = {'enabled': True}     # put over the checkpoint's: enabled, apply_below (13 text tokens), target_text_tokens, max_repeats, mixed_keep_prob
short_fraction = 0.5            # long rows are thinned, anew each epoch, until rows below apply_below are this share; 0 = all rows
max_text_tokens = 150           # rows of longer texts are left out
ref_min_seconds = 3.0           # the reference is the row's own clip, from 6 s on a random crop of it
ref_max_seconds = 15.0
frame_drop = 0.0                # as in pretrain.py; 0 = none, which did as well on a base that was trained with it (config/proof_finetune.py)
# optimizer: AdamW, cosine to 0 after linear warmup
learning_rate = 2e-4            # of adapters, and of the backbone with full
lr_audio = 0.5                  # multipliers: tables, frame MLP, code and stop heads
lr_embed = 0.2                  # text embedding
lr_ref = 0.1                    # Q-Former, null prefix
warmup_steps = 150
grad_clip = 1.0                 # global norm; 0 = off
max_bad_steps = 10              # so many steps in a row with a non-finite gradient end the run; each is skipped and named
# evaluation, logging, saving
eval_interval = 100             # steps; 0 = never
eval_rows = 256                 # held-out rows of each corpus; 0 = all
log_interval = 10               # steps; the only time the host waits for the device. Several ranks notice a SIGTERM only then, and torchrun kills them after 30 s
save_interval = 100             # steps
keep_checkpoints = 3            # older ones go once a new one is whole; 0 = keep all
resume = True                   # False: refuse to start where checkpoints lie
# system
device = 'auto'                 # 'auto' = cuda where there is one
dtype = 'auto'                  # compute: 'auto' = bfloat16 on cuda, float32 on cpu; masters are always float32
compile = False                 # each layer through torch.compile, on a GPU only; worth its start-up after a few hundred steps
seed = 1337
# -----------------------------------------------------------------------------
GROUPS = ('backbone', 'embed', 'audio', 'ref')
REPETITION = {'enabled': 'True or False', 'apply_below': 'whole, above 0', 'target_text_tokens': 'whole, above 0', 'max_repeats': 'whole, above 0',
              'mixed_keep_prob': '0..1'}
FIXED = ('lora_rank', 'lora_alpha', 'lora_dropout', 'lora_targets', 'lora_last_n_layers', 'train_stop_head', 'full', 'freeze', 'text_repetition', 'ckpt',
         'data', 'val_corpora', 'eval_rows', 'seed')    # in a run; the last four say what is held out: `before` and `after` are of the same rows


def epoch_rows(lengths, short_below, short_fraction, longest, rng):
    """Row numbers of one epoch (int64, ascending). lengths: text tokens of each row, without layout and repetition.

    Short texts are where a base model fails and are rare in speech corpora, so all rows below short_below tokens are kept,
    rows over `longest` are dropped, and the rest is thinned at random until short rows are short_fraction of the epoch;
    0 thins nothing. If there are no short rows, or as many as that already, all stay. rng (np.random.Generator) draws, so
    the caller decides whether epochs differ."""
    if not 0 <= short_fraction <= 1:
        raise ValueError(f'short_fraction must be in 0..1, got {short_fraction}')
    lengths = np.asarray(lengths)
    fits = lengths <= longest
    short, rest = np.flatnonzero(fits & (lengths < short_below)), np.flatnonzero(fits & (lengths >= short_below))
    if short_fraction > 0 and len(short):
        wanted = round(len(short) * (1 - short_fraction) / short_fraction)
        rest = rng.choice(rest, min(wanted, len(rest)), replace=False)
    return np.sort(np.concatenate((short, rest))).astype(np.int64)


# ---- the script. Under this guard since tests import the function above

if __name__ == '__main__':
    from configurator import configure
    config = configure(globals())

    # validate: cross-field rules, before torch is imported
    bad = []
    rule = lambda ok, text: ok or bad.append(text)
    for name in ('batch_size', 'gradient_accumulation', 'epochs', 'log_interval', 'save_interval', 'learning_rate', 'max_bad_steps', 'max_text_tokens',
                 'ref_min_seconds', 'lora_rank', 'lora_alpha'):
        rule(config[name] > 0, f'{name} must be above 0, got {config[name]}')
    for name in ('max_steps', 'warmup_steps', 'grad_clip', 'lr_audio', 'lr_embed', 'lr_ref', 'eval_interval', 'eval_rows', 'keep_checkpoints',
                 'lora_last_n_layers', 'seed'):
        rule(config[name] >= 0, f'{name} must not be negative, got {config[name]}')
    rule(0 <= lora_dropout < 1, f'lora_dropout must be in [0, 1), got {lora_dropout}')
    rule(0 <= short_fraction <= 1, f'short_fraction must be in 0..1, got {short_fraction}')
    rule(0 <= frame_drop <= 1, f'frame_drop must be in 0..1, got {frame_drop}')
    rule(ref_max_seconds >= ref_min_seconds, f'ref_max_seconds {ref_max_seconds} is below ref_min_seconds {ref_min_seconds}')
    rule(not full or not train_stop_head, "train_stop_head belongs to adapters; with full the stop head is in the group 'audio'")
    rule(full or freeze == ('ref',), 'freeze needs full: adapters freeze everything else anyway')
    rule(set(freeze) <= set(GROUPS), f'freeze: {sorted(set(freeze) - set(GROUPS))} is none of {", ".join(GROUPS)}')
    rule(set(freeze) != set(GROUPS), 'freeze leaves nothing to train')
    rule(device in ('auto', 'cpu', 'cuda'), f"device is 'auto', 'cpu' or 'cuda', got {device!r}")
    rule(dtype in ('auto', 'float32', 'bfloat16'), f"dtype is 'auto', 'float32' or 'bfloat16', got {dtype!r}")
    rule(all(type(p) is str for p in val_corpora.values()), f'val_corpora: folders by name, got {val_corpora!r}')
    rule('val' not in val_corpora, "val_corpora: 'val' is the name of data's own held-out rows; choose another")
    for key, v in text_repetition.items():
        good = type(v) is bool if key == 'enabled' else type(v) in (int, float) and 0 <= v <= 1 if key == 'mixed_keep_prob' else type(v) is int and v > 0
        rule(good and key in REPETITION, f"text_repetition: {key!r} {v!r}: it takes {', '.join(f'{k} ({what})' for k, what in REPETITION.items())}")
    if bad:
        if os.environ.get('LOCAL_RANK', '0') == '0':        # of each node: the other's files may be missing
            print('finetune.py: ' + '; '.join(bad), file=sys.stderr)
        sys.exit(2)

    import fcntl, itertools, shutil, subprocess, warnings
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    import lora
    import model as gepard
    from prepare import Corpus, load_tokenizer, sha256_of

    # ---- setup

    ddp = 'RANK' in os.environ
    rank, world, local_rank = (int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    compute = {'auto': torch.bfloat16 if device == 'cuda' else torch.float32, 'float32': torch.float32, 'bfloat16': torch.bfloat16}[dtype]
    if device == 'cuda' and not torch.cuda.is_available():
        sys.exit(f'finetune.py: device is cuda, but torch {torch.__version__} sees none')
    if device == 'cuda':
        torch.cuda.set_device(local_rank)
        torch.set_float32_matmul_precision('high')
    if ddp:
        dist.init_process_group('nccl' if device == 'cuda' else 'gloo')
    warnings.filterwarnings('ignore', message='FSDP2-wrapped module')           # its outputs are views, and nothing writes into them
    say = (lambda *a: print(*a, flush=True)) if rank == 0 else lambda *a: None

    def fail(message, everywhere=False):
        if local_rank == 0 or everywhere:       # of each node: what is wrong may be wrong on one
            print('finetune.py: ' + ' '.join(str(message).split()), file=sys.stderr, flush=True)
        if ddp and everywhere:
            os._exit(2)                         # other ranks wait in a collective: torchrun ends them when this one is gone
        if ddp:
            dist.destroy_process_group()
        sys.exit(2)

    def all_sum(x):
        if ddp:
            dist.all_reduce(x)
        return x

    # ---- model: the base, or where this run was

    file = 'model.safetensors' if full else 'adapter.safetensors'
    newest = gepard.latest_checkpoint(out_dir, file=file)
    step, epoch, done = 0, 0, 0             # optimizer steps; epoch and rows of it that are done
    state, measured = None, {}
    try:
        os.makedirs(out_dir, exist_ok=True)
        if rank == 0:
            lock = open(os.path.join(out_dir, 'lock'), 'w')             # held until this process ends
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gepard.remove_unfinished(out_dir)
        other = gepard.latest_checkpoint(out_dir, file='adapter.safetensors' if full else 'model.safetensors')
        for stage in [gepard.read_json(os.path.join(f, 'training_metadata.json')).get('stage') for f in (newest, other) if f]:
            if stage != 'finetune':
                raise ValueError(f'{out_dir} holds checkpoints of stage {stage}, choose another out_dir')
        if newest and not resume:
            raise ValueError(f'{out_dir} holds {newest}: choose another out_dir, or --resume=true to go on')
        if other:
            raise ValueError(f'{out_dir} holds {other}, of a run {"without" if full else "with"} full: choose another out_dir')
        base = gepard.latest_checkpoint(ckpt) or ckpt
        parent_kind = 'folder' if os.path.isdir(base) else 'hub'        # known now; later the folder may be gone
        if newest:                          # by the base of the time: ckpt may be a run's folder, with a newer checkpoint by now
            metadata = gepard.read_json(os.path.join(newest, 'training_metadata.json'))
            base, before, measured = metadata['parent'], metadata['config'], metadata['evaluation']
            parent_kind = metadata.get('parent_kind')
            moved = parent_kind == 'folder' and not os.path.isdir(base)
            if moved and not full:          # with full it is only a name
                if ckpt == before['ckpt'] and not gepard.latest_checkpoint(ckpt):
                    raise ValueError(f'{newest}: its base {base} is not there: --ckpt= names where it is now')
                base = gepard.latest_checkpoint(ckpt) or ckpt       # load_adapter knows it by its hash
                parent_kind = 'folder' if os.path.isdir(base) else 'hub'
            for key in [k for k in before if k in config and json.dumps(before[k]) != json.dumps(config[k])]:
                if key in FIXED and not (moved and key == 'ckpt'):
                    raise ValueError(f'{newest} was made with {key} {before[key]!r}, now it is {config[key]!r}: choose another out_dir')
                say(f'  {key} was {before[key]!r}, is {config[key]!r}')
            try:
                state = torch.load(os.path.join(newest, 'resume.pt'), map_location='cpu', weights_only=True)
                step, epoch, done = state['step'], state['epoch'], state['rows']
                if any(k in before and before[k] != config[k] for k in ('short_fraction', 'max_text_tokens')):
                    say(f'  so epoch {epoch} has other rows and starts over')
                    done = 0
            except Exception as e:          # cut or foreign: many types, some with a page of text
                raise ValueError(f'{newest}/resume.pt: cannot be read ({type(e).__name__})') from None
        elif os.path.exists(os.path.join(base, 'adapter.safetensors')) or gepard.latest_checkpoint(base, file='adapter.safetensors'):
            raise ValueError(f'{base}: adapters without their base; merge.py makes a checkpoint of them')
        model, folder = gepard.load_checkpoint(newest if newest and full else base)
        told = os.path.join(folder, 'training_metadata.json')
        before = gepard.read_json(told) if os.path.exists(told) else {}
        hash_of, hop_of = (lambda stage: stage.get('corpus', {}).get('codec_hash')), (lambda stage: stage.get('corpus', {}).get('hop'))
        codec_hash, hop = (next(filter(None, map(of, (before, *reversed(before.get('history', []))))), None) for of in (hash_of, hop_of))       # of the newest stage that knows it
        cfg = model.cfg
        if unset := [k for k in REPETITION if k not in cfg.text_repetition | text_repetition]:
            raise ValueError(f"{base}: its text_repetition has no {', '.join(unset)}: give them in --text_repetition")
        plain, cfg.text_repetition = cfg.text_repetition, cfg.text_repetition | text_repetition
        if full:
            for name, p in model.named_parameters():
                p.requires_grad_(gepard.group_of(name) not in freeze)
            history = before.pop('history', []) + [before] * bool(before and not newest)        # the stages before, oldest first
        else:
            if newest:
                adapter = lora.load_adapter(model, newest, folder)      # compares the base's hash
            else:
                adapter = lora.inject(model, lora_targets, lora_last_n_layers, lora_rank, lora_alpha, lora_dropout, seed)
                adapter |= {'parent_hash': lora.tensors_hash(folder)}
            model.stop_head.requires_grad_(train_stop_head)
        tokenizer, tokenizer_file = load_tokenizer(folder)

        # ---- data

        of_file = lambda c: c.meta.get('settings', {}).get('codec_hash')        # '' = a codec by Hub name

        def open_corpus(path):
            """A corpus of the base's codec and tokenizer, or a ValueError that says in what it differs."""
            c = Corpus(path)
            m, special = c.meta, {k: v for k, v in cfg.special_tokens.items() if k != 'tokeniser_length'}
            differ = [f'{what} {has!r}, the base {base} has {want!r}' for what, has, want in (
                ('codec', m['codec']['id'], codec or cfg.codec['codec_id']), ('codec sample_rate', m['codec']['sample_rate'], cfg.codec['sample_rate']),
                ('codec hop', m['codec']['hop'], hop or m['codec']['hop']), ('codec hash', of_file(c), of_file(c) and codec_hash or of_file(c)),    # two files of one name; unknown on one side: no word
                ('codec levels', list(m['codec']['levels']) * m['codec']['groups'], cfg.levels),
                ('tokenizer hash', m['tokenizer']['hash'], sha256_of(tokenizer_file)), ('special_tokens', m['special_tokens'], special)) if has != want]
            if differ:
                raise ValueError(f'{path} was built with ' + '; '.join(differ))
            return c

        corpus = open_corpus(data)
        if newest and any(metadata['corpus'].get(k) != corpus.meta.get(k) for k in ('rows', 'frames')):
            raise ValueError(f'{data} is another corpus than {newest} was made with: choose another out_dir')
        others = {name: open_corpus(path) for name, path in val_corpora.items()}
        for c in others.values():
            if of_file(c) and of_file(corpus) and of_file(c) != of_file(corpus):
                raise ValueError(f"{c.path} and {data} were built with two codecs that were both called {corpus.meta['codec']['id']}: build one of them anew")
    except BlockingIOError:
        fail(f'another run is writing to {out_dir}')
    except (ValueError, OSError) as e:
        fail(f'{e}' + '; without that folder the run goes on from the one before' * str(e).startswith(f'{newest}/'))      # a file of it is cut
    except (KeyError, RuntimeError) as e:               # foreign files
        fail(f'{newest or base}: {e!r}' + '; without that folder the run goes on from the one before' * bool(newest))
    rows, repetition = corpus.rows, cfg.text_repetition
    frame_rate = corpus.meta['codec']['sample_rate'] / corpus.meta['codec']['hop']
    train_rows = corpus.split('train')
    per_step = batch_size * gradient_accumulation * world               # rows

    def plan_epoch(epoch):
        """Row numbers of an epoch in their order: drawn from the seed alone, the same for any ranks and batch size."""
        rng = np.random.default_rng([seed, epoch])
        chosen = epoch_rows(rows['text_len'][train_rows], repetition['apply_below'], short_fraction, max_text_tokens, rng)
        return rng.permutation(train_rows[chosen])

    def item(c, i, repetition, rng, train):
        """Row i of corpus c as `pack` takes it; its own clip is the voice. Not train: always repeated, never without its voice."""
        text, codes, ref = c.text(i).tolist(), c.codes(i), None
        copies = gepard.training_repeats(len(text), repetition, rng.random) if train else gepard.repeats(len(text), repetition)
        row = {'text': gepard.layout(text, cfg.special_tokens, copies), 'codes': codes}
        if train and frame_drop:
            row['hidden'] = rng.random(len(codes)) < frame_drop * rng.random()
        if cfg.num_queries:
            null = c.rows['speaker'][i] < 0
            if not null:
                n = int(rng.uniform(ref_min_seconds, ref_max_seconds) * frame_rate)
                start = rng.integers(len(codes) - n + 1) if len(codes) > n and len(codes) >= 6 * frame_rate else None
                ref = codes if start is None else codes[start:start + n]
            row |= {'ref': ref, 'null': null, 'speaker': int(c.rows['speaker'][i]), 'drop': train and rng.random() < cfg.null_prob}
        return row

    def make_batch(numbers, places):
        """Training rows -> packed batch, how many of them cannot be read: such a row is named and another one takes its place.
        A row's randomness hangs on seed, epoch and its place in the epoch: not on ranks or batch size."""
        out = []
        for i, n in zip(numbers, places):
            try:
                out.append(item(corpus, i, repetition, np.random.default_rng([seed, epoch, n]), True))
            except ValueError as e:
                print(f'finetune.py: {e}; left out', file=sys.stderr, flush=True)
                out.append(None)
        good = [r for r in out if r]
        if not good:
            fail(f'no row of {numbers.tolist()} in {data} can be read', everywhere=True)
        return gepard.pack([r or good[n % len(good)] for n, r in enumerate(out)], cfg), len(out) - len(good)

    def readable(c, numbers):
        for i in numbers:
            try:
                c.codes(i)
                yield i
            except ValueError as e:
                say(f'{e}; not held out')

    def held_out(c):
        """Rows of a corpus for evaluation, and of each its groups: all, number of words, language (its source where there is no tag)."""
        pool = c.split('val')
        pool = pool if len(pool) or c is corpus else np.arange(len(c.rows))             # a corpus made to be held out as a whole
        chosen = np.array([*itertools.islice(readable(c, np.random.default_rng(seed).permutation(pool)), eval_rows or None)], dtype=np.int64)
        sources, tags, groups = c.meta['sources'], c.meta.get('languages', []), []
        for i in chosen:
            words = tokenizer.decode(c.text(i).tolist()).split()
            tag = words[0][:-1] if words and words[0].endswith(':') and words[0][:-1] in tags else ''
            n, language = len(words) - bool(tag), tag or sources[c.rows['source'][i]]['name']
            groups.append(('all', '1-2 words' if n <= 2 else '3-6 words' if n <= 6 else '7 words on', f'language {language}'))
        return c, chosen, groups

    val = {name: held_out(c) for name, c in {'val': corpus, **others}.items()}
    val = {name: v for name, v in val.items() if len(v[1])}
    if eval_interval and 'val' not in val:
        say(f'{data} has no held-out rows: nothing of it is evaluated')
    order = plan_epoch(epoch)                                           # epochs differ in their rows, not in their number
    steps_per_epoch = len(order) // per_step
    if steps_per_epoch == 0:
        fail(f'an epoch of {data} has {len(order)} rows, one step takes {batch_size} x {gradient_accumulation} micro-batches x {world} ranks = {per_step}: '
             'lower gradient_accumulation or batch_size')
    for c in (corpus, *others.values()):
        laid_out = np.array([gepard.repeats(n, repetition) * (n + 2) + 1 for n in range(c.rows['text_len'].max() + 1)])     # of a text of n
        used = (c.rows['text_len'] <= max_text_tokens) | (c.rows['split'] > 0) if c is corpus else slice(None)
        longest = (laid_out[c.rows['text_len']] + c.rows['frame_len'])[used].max(initial=0) + cfg.num_queries
        if longest > cfg.max_position_embeddings:
            fail(f'{c.path} has rows of up to {longest} tokens, the model ends at max_position_embeddings {cfg.max_position_embeddings}')
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    sizes = {g: sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and gepard.group_of(n) == g) for g in GROUPS}

    def training(on):
        model.train(on)
        if cfg.num_queries and not sizes['ref']:
            model.ref_compressor.eval()         # frozen: no dropout in the voice, as at inference

    for layer in model.model.layers if compile and device == 'cuda' else ():
        layer.compile(dynamic=True)                                     # they share one graph, for any number of tokens
    if ddp:
        # inputs stay as they are: positions and angles lose too much in 16 bit
        policy = MixedPrecisionPolicy(*((compute, torch.float32) if compute != torch.float32 else ()), cast_forward_inputs=False)
        mesh = dist.init_device_mesh(device, (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to(device)
    # one process: autocast makes the 16-bit copies that FSDP makes by its policy
    cast = torch.autocast(device, compute) if compute != torch.float32 and not ddp else nullcontext()
    multipliers = {'backbone': 1.0, 'audio': lr_audio, 'embed': lr_embed, 'ref': lr_ref}
    optimizer = torch.optim.AdamW(gepard.param_groups(model, learning_rate, multipliers, 0.0), betas=(0.9, 0.999), eps=1e-8, fused=True)
    params = dict(model.named_parameters())     # now: after a forward without a backward, FSDP's root shows its gathered 16-bit copies instead
    if state:
        for name, p in params.items():
            if name in state['optimizer']:
                optimizer.state[p] = {k: distribute_tensor(v, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) and v.dim()
                                      else v.to(device) for k, v in state['optimizer'][name].items()}
        del state

    # ---- in words

    if newest:
        say(f'resumed {newest}: step {step}, epoch {epoch}, row {done} of it')
    say(f"inherited from {base}: codec {cfg.codec['codec_id']}, tokenizer of {tokenizer.get_vocab_size()} ids, special tokens, text layout"
        + (f', null prefix in {cfg.null_prob:.0%} of the rows' if cfg.num_queries else ''))
    overridden = [f'text_repetition {k} {plain.get(k)!r} -> {v!r}' for k, v in text_repetition.items() if plain.get(k) != v]
    say('overridden: ' + (', '.join(overridden + [f'codec, here named {codec}'] * bool(codec)) or 'nothing'))
    short = int((rows['text_len'][order] < repetition['apply_below']).sum())
    say(f"corpus {data}: {len(train_rows):,} training rows, of which an epoch takes {len(order):,}: {short:,} below {repetition['apply_below']} text tokens, "
        f'{len(order) - short:,} longer ones; ' + ', '.join(f'{name} {len(v[1]):,} held out' for name, v in val.items()))
    left = (epochs - epoch - 1) * steps_per_epoch + (len(order) - done) // per_step
    total_steps = max(step + left, step) if not max_steps else min(max_steps, step + left)
    mean = (rows['text_len'][order] + rows['frame_len'][order]).mean() + cfg.num_queries + 3
    say(f'step: {batch_size} rows x {gradient_accumulation} micro-batches x {world} ranks = {per_step:,} rows, about {per_step * mean:,.0f} tokens '
        f'before repetition; {steps_per_epoch:,} steps an epoch, {total_steps:,} in all' + (f', {total_steps - step:,} to go' if step else ''))
    say(', '.join(f'{g} {sizes[g] / 1e6:.3f}M at lr {learning_rate * multipliers[g]:.1e}' for g in GROUPS if sizes[g])
        + f" trained of {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M, {device}{f' x {world} (FSDP2)' if ddp else ''}, "
        f"{str(compute).removeprefix('torch.')} compute")
    if full:
        say('full fine-tuning moves every language and voice the base knows, not only the new ones: keep them in the corpus (max_rows of their sources), '
            'watch them in val_corpora, and prefer adapters for a small corpus')
    if total_steps <= step:
        say('nothing left to do')

    def lr_factor(step):
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1)))

    def to_device(batch):
        return {k: (v.pin_memory() if device == 'cuda' else v).to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}

    def whole(t):
        return (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu()

    # ---- saving and evaluating

    def save():
        """Every rank takes part (shards are gathered), rank 0 writes."""
        path = os.path.join(out_dir, f'checkpoint-{step}')
        if path == gepard.latest_checkpoint(out_dir, file=file):
            return
        weights = {n: whole(v) for n, v in (model.state_dict().items() if full else ((n, params[n]) for n in trained))}
        if not all(torch.isfinite(v).all() for v in weights.values()):
            fail(f'the weights are not finite after step {step}; the newest whole checkpoint is {gepard.latest_checkpoint(out_dir, file=file)}')
        moments = {n: {k: whole(v) for k, v in optimizer.state[p].items()} for n, p in params.items() if p in optimizer.state}
        if rank == 0:
            metadata = {'stage': 'finetune', 'step': step, 'parent': base, 'config': config, 'evaluation': measured, 'git': git, **({'parent_kind': parent_kind} if parent_kind else {}),
                        'corpus': {k: corpus.meta[k] for k in ('sources', 'languages', 'rows', 'frames') if k in corpus.meta} | {'codec_hash': of_file(corpus), 'hop': corpus.meta['codec']['hop']},
                        'versions': {'python': sys.version.split()[0], 'torch': torch.__version__, 'numpy': np.__version__}}

            def extra(folder):
                torch.save({'optimizer': moments, 'step': step, 'epoch': epoch, 'rows': done}, os.path.join(folder, 'resume.pt'))
                if not full:
                    gepard.write_json(os.path.join(folder, 'training_metadata.json'), metadata)
            try:
                if os.path.isdir(path):
                    os.rmdir(path)                                      # in the way; with files in it, it is not ours to remove
                if full:
                    gepard.save_checkpoint(path, weights, cfg, os.path.dirname(tokenizer_file), metadata | {'history': history}, extra)
                else:
                    own = {k: adapter[k] for k in ('rank', 'alpha', 'dropout', 'targets', 'layers')}
                    lora.save_adapter(path, weights, own | {'text_repetition': repetition, 'stage': 'finetune', 'step': step}, base, adapter['parent_hash'], extra)
            except Exception as e:                                      # a full disk, most likely; several libraries write here
                fail(f'{path}: not saved ({e}); the newest whole checkpoint is {gepard.latest_checkpoint(out_dir, file=file)}', everywhere=True)
            for _, old in gepard.checkpoints(out_dir, file=file)[:-keep_checkpoints] if keep_checkpoints and not bad_steps else []:
                shutil.rmtree(old)
            say(f'saved {path}')
        if ddp:
            dist.barrier()

    @torch.no_grad()
    def evaluate(repetition):
        """{corpus: {group: rows, code and stop loss}} of held-out rows; code: sum over channels, mean over frames. Every rank runs as many batches."""
        training(False)
        result = {}
        for name, (c, chosen, groups) in val.items():
            sums = torch.zeros(len(chosen), 3, dtype=torch.float64)     # of each row: code loss, stop loss, frames
            parts = np.array_split(np.arange(len(chosen)), -(-len(chosen) // (batch_size * world)) * world)
            for part in parts[rank::world]:
                own = part if len(part) else np.arange(1)               # an empty part still runs, so that no rank waits for another
                batch = to_device(gepard.pack([item(c, chosen[n], repetition, np.random.default_rng([seed, n]), False) for n in own], cfg))
                with cast:
                    out = model(batch)
                f, target = len(out['codes']), gepard.stop_target(out)
                code = F.cross_entropy(out['logits'].transpose(1, 2), out['codes'], reduction='none').sum(1)
                stop = F.binary_cross_entropy_with_logits(out['stop_logits'], target, reduction='none', pos_weight=code.new_tensor(cfg.stop_pos_weight))
                of_row = lambda x: x.new_zeros(len(own)).index_add(0, batch['frame_row'], x)
                if len(part):
                    sums[part] = torch.stack([of_row(code), of_row(stop[:f]) + stop[f:], of_row(torch.ones_like(code))], 1).double().cpu()
            sums = all_sum(sums.to(device) if device == 'cuda' else sums).cpu()
            result[name] = {}
            for g in ['all'] + sorted({g for gs in groups for g in gs[1:]}):
                mine = np.array([g in gs for gs in groups])
                code, stop, frames = sums[mine].sum(0).tolist()
                result[name][g] = {'rows': int(mine.sum()), 'code': code / frames, 'stop': stop / (frames + int(mine.sum()))}
        training(True)
        return result

    def evaluate_and_tell():
        """One line a corpus; the first time it is the base that speaks, with its own text repetition."""
        global measured
        r = evaluate(repetition if step else plain)
        measured = {'before': measured.get('before', {} if step else r), 'after_step': step, 'after': r}
        moved = lambda name: r[name]['all']['code'] - measured['before'].get(name, {'all': {'code': math.nan}})['all']['code']
        say(f'step {step}: ' + '; '.join(f"{name} code {g['all']['code']:.3f} ({moved(name):+.3f}) stop {g['all']['stop']:.4f}" for name, g in r.items()))
        record({f'{name}_{k}': g['all'][k] for name, g in r.items() for k in ('code', 'stop')})
        if rank == 0:
            try:
                gepard.write_json(os.path.join(out_dir, 'evaluation.json.tmp'), measured)
                os.replace(os.path.join(out_dir, 'evaluation.json.tmp'), os.path.join(out_dir, 'evaluation.json'))
                if step:
                    curves()
            except OSError as e:                                        # a full disk: numbers and pictures are not worth the run
                print(f'finetune.py: {out_dir}: step {step}: evaluation.json or curves.png is not written ({e.strerror or e})', file=sys.stderr, flush=True)

    def print_table():
        say(f"\n{'':32}{'rows':>6}{'code loss before':>18}{'after':>9}{'moved':>9}{'stop before':>14}{'after':>9}")
        for name, groups in measured['after'].items():
            for g, a in groups.items():
                b = measured['before'].get(name, {}).get(g, {'code': math.nan, 'stop': math.nan})      # a run that began without evaluations
                say(f"{name + ', ' + g:32}{a['rows']:>6}{b['code']:>18.3f}{a['code']:>9.3f}{a['code'] - b['code']:>+9.3f}{b['stop']:>14.4f}{a['stop']:>9.4f}")

    def curves():
        import matplotlib
        matplotlib.use('Agg')
        import matplotlib.pyplot as plt
        log = [json.loads(line) for line in open(metrics_path, encoding='utf-8')]
        fig, axes = plt.subplots(1, 4, figsize=(18, 4))
        for ax, keys in zip(axes, (['code'] + [f'{n}_code' for n in val], ['stop'] + [f'{n}_stop' for n in val], ['grad_norm'], ['lr'])):
            for key in keys:
                points = [(r['step'], r[key]) for r in log if key in r]
                ax.plot(*zip(*points), label=key, marker='.' if len(points) < 20 else None) if points else None
            ax.legend()
            ax.set_xlabel('step')
        fig.tight_layout()
        fig.savefig(os.path.join(out_dir, 'curves.tmp.png'))
        plt.close(fig)
        os.replace(os.path.join(out_dir, 'curves.tmp.png'), os.path.join(out_dir, 'curves.png'))

    # ---- the loop

    metrics_path = os.path.join(out_dir, 'metrics.jsonl')
    git = ''
    if rank == 0:
        try:
            git = subprocess.run(['git', 'rev-parse', 'HEAD'], capture_output=True, text=True, cwd=os.path.dirname(os.path.abspath(__file__))).stdout.strip()
        except OSError:                                                 # no git here
            pass
        gepard.keep_lines(metrics_path, step if newest else -1)

    def record(values):
        if rank == 0:
            gepard.append_line(metrics_path, json.dumps({'step': step, **values}))

    def settle():
        """Look at the pending steps' flags (the host waits here): name the skipped ones, end the run after too many in a row."""
        global bad_steps
        for s, numbers, flag in pending:
            bad_steps = bad_steps + 1 if flag.item() else 0
            if bad_steps:
                say(f'step {s}: non-finite gradient, step skipped ({bad_steps} in a row); rows {numbers.tolist()}')
            if bad_steps >= max_bad_steps:
                fail(f'{bad_steps} steps in a row with a non-finite gradient; the newest whole checkpoint is {gepard.latest_checkpoint(out_dir, file=file)}')
        pending.clear()

    stopping = []

    def on_signal(number, frame):
        if stopping and number == signal.SIGINT:                        # Ctrl-C twice: at once
            os._exit(130)
        stopping.append(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    bad_steps, bad_rows, pending, stop_now = 0, 0, [], False
    training(True)
    if eval_interval and step == 0 and val:
        evaluate_and_tell()
    clock, clock_step, tokens = time.time(), step, 0
    while step < total_steps and not stop_now:
        if done + per_step > len(order):                                # the epoch is over; what is left of it comes in another draw
            epoch, done = epoch + 1, 0
            order = plan_epoch(epoch)
        now = order[done:done + per_step]
        parts = []
        for n in range(rank * batch_size, per_step, world * batch_size):
            batch, bad = make_batch(now[n:n + batch_size], range(done + n, done + n + batch_size))
            parts.append(batch)
            bad_rows += bad
        tokens += sum(len(b['position']) for b in parts)
        # means are over all rows of the step, on all ranks: one gradient for 1x4, 2x2 and 4x1
        n = all_sum(torch.tensor([sum(len(b['codes']) for b in parts), per_step / world], dtype=torch.float32).to(device))
        count = {'frames': n[0], 'stops': n[0] + n[1], 'rows': n[1]}
        for g in optimizer.param_groups:
            g['lr'] = g['base_lr'] * lr_factor(step)
        torch.manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank) % 2 ** 63)   # dropout: the same after a resume
        sums = torch.zeros(2, device=device)
        for a, batch in enumerate(parts):
            if ddp:
                model.set_requires_gradient_sync(a == gradient_accumulation - 1)
            batch = to_device(batch)
            with cast:
                out = model(batch)
            out.pop('q', None)                                          # no regularizers of the voice here
            r = gepard.losses(out, batch, cfg, count)
            (r['total'] * world).backward()                             # FSDP averages over ranks; ours are parts of one sum
            sums += torch.stack([r['code'], r['stop']]).detach().float()
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], grad_clip or math.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # a non-finite gradient: the fused optimizer skips the step by itself when found_inf is set, without asking the host
        optimizer.found_inf = (~torch.isfinite(norm)).float().reshape(())
        optimizer.grad_scale = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pending.append((step, now, optimizer.found_inf))
        step, done = step + 1, done + per_step

        if step % log_interval == 0 or step == total_steps or stopping and not ddp:
            stop_now = all_sum(torch.tensor(float(len(stopping)), device=device)).item() > 0    # ranks agree, here only
            settle()
            code, stop, bad = all_sum(torch.cat([sums, sums.new_tensor([bad_rows])])).tolist()
            seconds = (time.time() - clock) / max(step - clock_step, 1)
            values = {'code': code, 'stop': stop, 'grad_norm': float(norm), 'lr': learning_rate * lr_factor(step - 1), 'epoch': epoch, 'bad_rows': int(bad),
                      'step_ms': 1000 * seconds, 'tokens_per_s': tokens * world / max(time.time() - clock, 1e-9)}
            record(values)
            eta = int(seconds * (total_steps - step))
            say(f"step {step}/{total_steps} epoch {epoch} code {code:.3f} stop {stop:.4f} norm {float(norm):.2f} lr {values['lr']:.1e} | "
                f"{values['step_ms']:.0f} ms, {values['tokens_per_s']:.0f} tokens/s, ETA {eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}")
            clock, clock_step, tokens = time.time(), step, 0
        pause = time.time()
        if eval_interval and val and (step == total_steps or step % eval_interval == 0 and not stop_now):
            evaluate_and_tell()
        if step % save_interval == 0 or step == total_steps or stop_now:
            settle()
            if not bad_steps or step == total_steps or stop_now:        # not in a bad streak, as long as there is a next time
                save()
        clock += time.time() - pause                                    # speeds are of training alone
    if stop_now and step < total_steps:
        say(f"stopped by {stopping[0] if stopping else 'another rank'} at step {step}")
    elif measured:
        if eval_interval and val and measured['after_step'] != step:    # stopped between two evaluations, and now there is nothing left to do
            evaluate_and_tell()
        if measured['after_step'] == step:
            print_table()
        say(f"\nnext: python {'sample.py' if full else 'merge.py'} --ckpt={out_dir}")
    if ddp:
        dist.barrier()
        dist.destroy_process_group()
