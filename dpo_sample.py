"""
Preference training, first of three: rollouts of a checkpoint, several of each text in each of several voices.

    python dpo_sample.py config/dpo.py --ckpt=out/finetune/merged --prompts=prompts.jsonl --voices=data/corpus
    torchrun --nproc_per_node=8 dpo_sample.py config/dpo.py ...                    # the same rollouts, shared out over the ranks
    python dpo_sample.py config/dpo.py --run_name=round2 --ckpt=out/dpo/round1/merged   # the next round, from the last one's result
    python dpo_sample.py config/dpo.py --status                                    # from another terminal: how far is it?

Prompts: a .jsonl file (text, and optionally id, category, lang), or a text file with a prompt a line. Written to
out_dir/run_name/rollouts: tokens.bin (packed codes uint16 [frames, 8], end to end), index.jsonl (a line a group: one prompt in one voice),
voices.safetensors (the codes of each voice's reference), meta.json. Until all is there each rank appends to files of its own, tokens
before index; started again, it goes on with the groups that are missing, with any number of ranks.
Every rollout depends on its own seed only: in float32 the files are the same for any number of ranks or slots.
"""
import hashlib, json, os, re, sys, time

# -----------------------------------------------------------------------------
out_dir = 'out/dpo'
run_name = 'round1'             # a round's folder in out_dir
ckpt = 'out/finetune/merged'    # the policy: a checkpoint folder, a run's folder (its newest checkpoint), or a Hub name
prompts = ''                    # .jsonl or text file
language_tags = False           # put each prompt's lang before its text ("es: hola"), for checkpoints whose corpora had such tags
# voices: wav files, folders (speaker/clip.wav or speaker.wav), corpora of prepare.py (training rows, a clip a speaker)
voices = ()                     # () = the null prefix only
hold_out = ()                   # speakers (or clips) of these names are left out, for testing
max_ref_seconds = 15.0          # of a reference clip, from its start
speakers_per_text = 5           # voices drawn for each prompt
null_share = 0.15               # of (prompt, voice) pairs that get the null prefix instead; 0 = none
rollouts = 8                    # of each prompt in each voice: a group
# sampling
temperature = 0.4
top_k = 0                       # 0 = off
repetition_penalty = 1.0        # 1.0 = off
cfg_scale = 3.0                 # text guidance; 1.0 = off, for measuring a checkpoint as it speaks by itself
cfg_frames = 20                 # guided frames at the onset; 0 = all
stop_threshold = 0.5            # on the stop probability
sec_base = 0.7                  # a text is expected to last sec_base + sec_per_word * words
sec_per_word = 0.4
cap_multiple = 4.0              # frame cap: so many times the expected frames,
cap_min = 80                    # but at least
cap_max = 300                   # and at most so many frames
seed = 0
# system
engine = 'torch'                # 'vllm' = vLLM (docs/serving.md; GPU): no guidance, top_k, repetition penalty
slots = 0                       # rollouts at once; 0 = 512 on a GPU, 32 on a CPU
compile = True                  # GPU: torch.compile the decoding step (a minute at the start); False = CUDA graphs alone
device = 'auto'                 # 'auto' = cuda where there is one
dtype = 'auto'                  # 'auto' = bfloat16 on cuda, float32 on cpu
status = False                  # print how far the run is, and end
# -----------------------------------------------------------------------------
FREE = ('out_dir', 'run_name', 'prompts', 'ckpt', 'slots', 'compile', 'device', 'status')     # they change no byte, or have a hash of their own


def frame_cap(text, frame_rate, sec_base=0.7, sec_per_word=0.4, multiple=4.0, low=80, high=300):
    """Frames after which a rollout is cut: babble that never stops should not cost more than that."""
    return int(min(high, max(low, multiple * (sec_base + sec_per_word * max(1, len(text.split()))) * frame_rate)))


def number_of(*parts):
    """A stable number in 0..2**63-1 of strings and numbers."""
    return int.from_bytes(hashlib.sha256('/'.join(map(str, parts)).encode()).digest()[:8], 'little') >> 1


def assign(prompt_id, voices, speakers_per_text, null_share, seed):
    """The voices of one prompt: list of voice numbers, -1 = the null prefix. Depends on the prompt's id, not on its neighbours."""
    import numpy as np
    rng = np.random.default_rng([seed, number_of(prompt_id)])
    if not voices:
        return [-1]
    drawn = rng.permutation(voices)[:speakers_per_text].tolist()
    return [-1 if rng.random() < null_share else v for v in drawn]


def read_prompts(path):
    """[{id, text, category, lang}] of a .jsonl or text file. ValueError names the line."""
    out, seen = [], {}
    if path.lower().endswith(('.csv', '.tsv', '.parquet', '.json')):
        raise ValueError(f'{path}: prompts are .jsonl (an object with a text a line) or a text file with a prompt a line')
    try:
        lines = open(path, encoding='utf-8-sig').read().split('\n')
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f'{path}: {e}') from None
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = {'text': line}
        if path.lower().endswith('.jsonl'):
            try:
                row = {k: v for k, v in json.loads(line).items() if v is not None}
                assert isinstance(row['text'], str) and json.dumps(row, ensure_ascii=False).encode()        # half a surrogate pair is no text
            except (ValueError, AssertionError, AttributeError, KeyError):
                raise ValueError(f'{path}:{n}: not a JSON object with a text: {line[:60]!r}') from None
        row = {'id': str(row.get('id', n)), 'text': ' '.join(row['text'].split()), 'category': str(row.get('category', '')), 'lang': str(row.get('lang', ''))}
        if not any(c.isalnum() for c in row['text']):
            raise ValueError(f"{path}:{n}: nothing to speak in {row['text']!r}")
        if row['id'] in seen:
            raise ValueError(f"{path}:{n}: id {row['id']!r} is that of line {seen[row['id']]} too")
        seen[row['id']] = n
        out.append(row)
    if not out:
        raise ValueError(f'{path}: no prompts in it')
    return out


def whole_lines(path):
    """Records of a .jsonl file that a kill may have cut, and the bytes they take."""
    records, size = [], 0
    for line in open(path, 'rb') if os.path.exists(path) else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
        if not line.endswith(b'\n'):
            records.pop()
            break
        size += len(line)
    return records, size


def replace(path, content):
    """A file of these bytes, whole whenever there is one of that name."""
    try:
        with open(path + '.tmp', 'wb') as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + '.tmp', path)
    except OSError as e:                                            # a full disk does not say whose
        raise OSError(f'{path}: {e}') from None


def shards(folder, kind, end=r'\.\w+'):
    """Paths of index-<rank>.jsonl and the like."""
    return [os.path.join(folder, n) for n in sorted(os.listdir(folder)) if re.fullmatch(rf'({kind})-\d+{end}', n)]


def tokens_beside(index):
    """Path of the tokens that an index-<rank>.jsonl tells of."""
    return re.sub(r'index-(\d+)\.jsonl$', r'tokens-\1.bin', index)


def progress(folder):
    """One line on all ranks."""
    try:
        meta = json.load(open(os.path.join(folder, 'meta.json'), encoding='utf-8'))
    except (OSError, ValueError):
        return f'{folder}: no run there yet'
    total = meta['groups']
    if os.path.exists(os.path.join(folder, 'index.jsonl')):
        return f"{folder}: finished, {total:,} groups of {meta['rollouts']}"
    done = sum(open(path, 'rb').read().count(b'\n') for path in shards(folder, 'index'))
    speed = seconds = 0.0
    for path in shards(folder, 'progress'):
        p = json.load(open(path))
        if time.time() - p['now'] < 60:                             # a rank that is alive
            speed, seconds = speed + p['groups'] / max(p['now'] - p['start'], 1e-9), seconds + p['seconds'] / max(p['now'] - p['start'], 1e-9)
    eta = f'{(total - done) / speed / 60:.0f} min left' if speed else 'nobody is at work'
    return f"{folder}: {done:,}/{total:,} groups ({100 * done / total:.1f}%), {speed * meta['rollouts']:.1f} rollouts/s, {seconds:,.0f} s of audio/s, {eta}"


# ---- the script. Under this guard since tests import the functions above

if __name__ == '__main__':
    from configurator import configure
    config = configure(globals())
    rank, world, local_rank = (int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    folder = os.path.join(out_dir, run_name, 'rollouts')
    inside = lambda name: os.path.join(folder, name)
    say = (lambda *a: print(*a, flush=True)) if rank == 0 else lambda *a: None

    def drop_shards():
        for path in shards(folder, 'tokens|index|progress', '.*') if rank == 0 else []:
            os.remove(path)

    def fail(message, by=0):
        if rank == by:
            print('dpo_sample.py: ' + ' '.join(str(message).split()), file=sys.stderr, flush=True)
        sys.exit(2)

    if status:
        print(progress(folder))
        sys.exit(0)
    bad = []
    rule = lambda ok, text: ok or bad.append(text)
    for name in ('speakers_per_text', 'rollouts', 'repetition_penalty', 'sec_base', 'cap_multiple', 'cap_min'):
        rule(config[name] > 0, f'{name} must be above 0, got {config[name]}')
    for name in ('temperature', 'top_k', 'cfg_frames', 'slots', 'sec_per_word', 'seed'):
        rule(config[name] >= 0, f'{name} must not be negative, got {config[name]}')
    rule(max_ref_seconds >= 0.1, f'max_ref_seconds must be at least 0.1, got {max_ref_seconds}')
    rule(0 <= null_share <= 1, f'null_share must be in 0..1, got {null_share}')
    rule(0 < stop_threshold <= 1, f'stop_threshold must be in (0, 1], got {stop_threshold}')
    rule(cap_max >= cap_min, f'cap_max {cap_max} is below cap_min {cap_min}')
    rule(rollouts == 1 or temperature > 0 and top_k != 1, f'{rollouts} rollouts of arg-max (temperature {temperature}, top_k {top_k}) are all the same')
    rule(run_name.strip('.') and os.path.basename(run_name) == run_name, f'run_name is a folder name, got {run_name!r}')
    rule(engine in ('torch', 'vllm'), f"engine is 'torch' or 'vllm', got {engine!r}")
    rule(engine == 'torch' or cfg_scale == 1 and not top_k and repetition_penalty == 1, 'engine vllm knows no cfg_scale, top_k and repetition_penalty')
    rule(device in ('auto', 'cpu', 'cuda'), f"device is 'auto', 'cpu' or 'cuda', got {device!r}")
    rule(dtype in ('auto', 'float32', 'bfloat16'), f"dtype is 'auto', 'float32' or 'bfloat16', got {dtype!r}")
    rule(prompts, 'prompts is missing: a .jsonl or text file')
    rule(not ckpt.startswith('out/') or os.path.isdir(ckpt), f'ckpt {ckpt}: no such folder')
    for path in voices:
        rule(os.path.exists(path), f'voices: {path}: no such file or folder')
    if bad:
        fail('; '.join(bad))
    try:
        asked = read_prompts(prompts)
    except ValueError as e:
        fail(e)

    if engine == 'vllm' and world > 1:                              # vLLM takes the first GPU that it sees
        os.environ['CUDA_VISIBLE_DEVICES'] = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(world)))).split(',')[local_rank]
        local_rank = 0

    import fcntl, queue, threading

    import numpy as np
    import torch
    from safetensors.numpy import save

    import model as M
    from codec import NanoCodec, fold
    from lora import tensors_hash
    from prepare import AUDIO, Corpus, encode_text, files_below, load_clip, load_tokenizer, tagged

    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cuda' and not torch.cuda.is_available():
        fail(f'device is cuda, but torch {torch.__version__} sees none')
    if engine == 'vllm':
        try:
            import vllm_gepard
            vllm_gepard.register()
        except ImportError as e:
            fail(e)
        if device != 'cuda':
            fail('engine vllm needs a GPU')
    if device == 'cuda':
        torch.cuda.set_device(local_rank)
    compute = {'auto': torch.bfloat16 if device == 'cuda' else torch.float32, 'float32': torch.float32, 'bfloat16': torch.bfloat16}[dtype]
    try:
        os.makedirs(folder, exist_ok=True)
        lock = open(inside(f'lock-{rank}'), 'w')                    # held until this process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        newest = M.latest_checkpoint(ckpt) or M.latest_checkpoint(ckpt, file='adapter.safetensors') or ckpt
        if os.path.exists(os.path.join(newest, 'adapter.safetensors')):
            fail(f'{newest}: these are adapters: merge.py makes a checkpoint of them')
        model, base = M.load_checkpoint(newest, device, compute) if engine == 'torch' else (None, vllm_gepard.read_config(newest)[1])
        cfg, policy_hash = model.cfg if model else vllm_gepard.read_config(base)[0], tensors_hash(base)
        tokenizer, known = load_tokenizer(base)[0], M.language_tags(base)
    except BlockingIOError:
        fail(f'another run is writing to {folder}')
    except (OSError, ValueError, ImportError) as e:
        fail(e)
    frame_rate = cfg.codec['sample_rate'] / 1024
    if voices and not cfg.num_queries:
        fail(f'{ckpt} has no voice cloning: leave out voices')

    if known and not language_tags:
        say(f"{ckpt} was trained with language tags ({', '.join(known)}): --language_tags=true puts each prompt's lang before its text")
    if not known and language_tags and any(p['lang'] for p in asked):
        say(f'{ckpt} does not say with which language tags it was trained: they are put as the prompts say')
    bare = [p['id'] for p in asked if not p['lang']]
    if known and language_tags and bare:
        say(f'{len(bare)} of {len(asked)} prompts, such as {bare[0]}, have no lang and get no tag')
    texts = []                                                      # all are looked at before anything is written
    for p in asked:
        if language_tags and known and p['lang'] and p['lang'].lower() not in known:
            fail(f"{prompts}: prompt {p['id']}: lang {p['lang']!r}, {ckpt} was trained with the language tags {', '.join(known)}")
        ids = encode_text(tokenizer, tagged(p['text'], p['lang'] if language_tags else ''))
        cap = frame_cap(p['text'], frame_rate, sec_base, sec_per_word, cap_multiple, cap_min, cap_max)
        laid = M.prompt(ids, cfg)
        if not ids or len(laid) + cfg.num_queries + cap > cfg.max_position_embeddings:
            fail(f"{prompts}: prompt {p['id']}: {len(laid)} tokens and {cap} frames do not fit the model ({cfg.max_position_embeddings} positions)")
        texts.append((p, laid, len(ids), cap))
    long = [p['id'] for p, _, _, cap in texts if sec_base + sec_per_word * len(p['text'].split()) >= cap / frame_rate]
    if long:
        say(f'{len(long)} of {len(texts)} prompts, such as {long[0]}, are expected to last as long as their frame cap or longer: most of what is spoken of them will be cut (--cap_max, --cap_multiple)')

    # ---- voices: rank 0 reads and encodes them once, the others find them in the folder

    def clips_of(path):
        """(name, speaker, wav file or (corpus, row)) of a file, a folder or a corpus."""
        if os.path.exists(os.path.join(path, 'meta.json')):
            corpus = Corpus(path)
            if corpus.meta['codec']['id'] != cfg.codec['codec_id']:
                raise ValueError(f"{path} was built with codec {corpus.meta['codec']['id']}, {ckpt} speaks {cfg.codec['codec_id']}")
            train = corpus.split('train')
            train = train[np.argsort(corpus.rows['speaker'][train], kind='stable')]
            edges = np.searchsorted(corpus.rows['speaker'][train], np.arange(len(corpus.speakers) + 1))
            for number, speaker in enumerate(corpus.speakers):
                own = train[edges[number]:edges[number + 1]]
                if len(own):
                    long = own[corpus.rows['frame_len'][own] >= 3 * frame_rate]
                    row = int(np.random.default_rng([seed, number_of(speaker)]).choice(long if len(long) else own))
                    yield f'{speaker}:{row}', speaker, (corpus, row)
            return
        for file in files_below(path, AUDIO) if os.path.isdir(path) else [path]:
            parts = os.path.splitext(os.path.relpath(file, path) if os.path.isdir(path) else os.path.basename(file))[0].split(os.sep)
            yield '/'.join(parts), parts[0], file

    def read_voices():
        found, held, hit, codec, codes = {}, 0, set(), None, {}
        for path in voices:
            clips = list(clips_of(path))
            if not clips:
                raise ValueError(f'voices: {path}: no voice there')
            for name, speaker, source in clips:
                if {name, speaker} & set(hold_out):
                    held, hit = held + 1, hit | {name, speaker}
                elif name in found:
                    raise ValueError(f'voices: two clips are called {name}')
                else:
                    found[name] = source
        if set(hold_out) - hit:
            raise ValueError(f'hold_out: no voice is called {sorted(set(hold_out) - hit)[0]}')
        for n, source in enumerate(found.values()):
            if isinstance(source, tuple):
                codes[str(n)] = source[0].codes(source[1])[:int(max_ref_seconds * frame_rate)]
                continue
            codec = codec or NanoCodec(cfg.codec['codec_id'], device=device)
            clip = load_clip(source, codec.sample_rate, 0, codec.hop, 1e-4)
            if isinstance(clip, tuple):
                raise ValueError(f'{source}: {clip[0]}: {clip[1]}')
            codes[str(n)] = codec.encode([clip[:int(max_ref_seconds * codec.sample_rate)]])[0]
        if voices and not codes:
            raise ValueError('voices: no voice is left')
        say(f'{len(found)} voices, {held} held out')
        return list(found), codes

    settings = {k: v for k, v in config.items() if k not in FREE} | {
        'dtype': str(compute).removeprefix('torch.'), 'policy_hash': policy_hash, 'prompts_hash': '%x' % number_of(json.dumps(asked))}
    try:
        if rank == 0 and not os.path.exists(inside('meta.json')):
            names, codes = read_voices()
            # contiguous: a transposed array would be saved in the wrong order
            replace(inside('voices.safetensors'), save({k: np.ascontiguousarray(v, np.int16) for k, v in codes.items()}))
            groups = sum(len(assign(p['id'], range(len(names)), speakers_per_text, null_share, seed)) for p in asked)
            replace(inside('meta.json'), json.dumps({
                'policy': os.path.abspath(base) if os.path.isdir(ckpt) else ckpt, 'policy_hash': policy_hash, 'codec': cfg.codec,
                'special_tokens': cfg.special_tokens, 'text_repetition': cfg.text_repetition,
                'voice_names': names, 'groups': groups, 'rollouts': rollouts, 'settings': settings, 'config': config,
                'versions': {'torch': torch.__version__, 'numpy': np.__version__}}, ensure_ascii=False).encode())
    except (OSError, ValueError, ImportError) as e:
        fail(e)
    while not os.path.exists(inside('meta.json')):                  # a rank that fails takes torchrun and this one with it
        time.sleep(0.1)
    meta = M.read_json(inside('meta.json'))
    changed = [f'{k} {meta["settings"].get(k)!r}, now {v!r}' for k, v in settings.items() if json.dumps(meta['settings'].get(k)) != json.dumps(v)]
    if changed:
        fail(f'{folder} was begun with {"; ".join(changed)}: choose another run_name')
    try:
        references = {int(k): v.numpy() for k, v in M.read_tensors(folder, 'voices.safetensors').items()}
    except (OSError, ValueError) as e:
        fail(e)

    # ---- what is to be done: groups in order, a prompt in a voice

    plan = [(p, laid, n, v, f"{p['id']}/{k}", cap) for p, laid, n, cap in texts
            for k, v in enumerate(assign(p['id'], range(len(references)), speakers_per_text, null_share, seed))]
    done = {}
    for path in shards(folder, 'index'):
        records, size = whole_lines(path)
        tokens = tokens_beside(path)
        there = os.path.getsize(tokens) // 16 if os.path.exists(tokens) else 0
        if any(r['start'] + sum(r['frames']) > there for r in records):
            fail(f'{tokens} is shorter than {path} says: delete both')
        if path == inside(f'index-{rank}.jsonl'):                   # nobody else writes to this one: cut what a kill left behind
            with open(path, 'r+b') as f, open(tokens, 'r+b') as t:
                f.truncate(size)
                t.truncate(16 * sum(sum(r['frames']) for r in records))
        done |= {r['group']: r for r in records}
    if os.path.exists(inside('index.jsonl')):
        drop_shards()                                               # a kill can have come before it
        say(progress(folder))
        sys.exit(0)
    todo = [g for g in plan[rank::world] if g[4] not in done]
    say(f"{len(asked):,} prompts, {len(plan):,} groups of {rollouts}, {len(done):,} of them done" + (f', shared out over {world} ranks' if world > 1 else ''))

    # ---- the loop

    def tell_sometimes():
        global said
        if time.time() - said > 10:
            said = time.time()
            say(progress(folder))

    def write():
        """Takes finished groups from the queue: their tokens first, then, once these are on the disk, their lines. Then nothing more:
        when rank 0 sees the last line it joins and removes these files."""
        try:
            with open(inside(f'tokens-{rank}.bin'), 'ab') as tokens, open(inside(f'index-{rank}.jsonl'), 'ab') as index:
                while True:
                    batch = [finished.get()]
                    while not finished.empty():
                        batch.append(finished.get())
                    now = {'start': start, 'now': time.time(), 'groups': groups, 'seconds': frames / frame_rate}
                    replace(inside(f'progress-{rank}.json'), json.dumps(now).encode())
                    lines = []
                    for record, codes in filter(None, batch):
                        lines.append(json.dumps(record | {'start': tokens.tell() // 16}, ensure_ascii=False) + '\n')
                        tokens.write(codes)
                    for f, content in ((tokens, b''), (index, ''.join(lines).encode())):
                        f.write(content)
                        f.flush()
                        os.fsync(f.fileno())
                    if None in batch:
                        return
        except Exception as e:                                      # a full disk
            broken.append(e)

    finished, broken, parts, frames, groups = queue.Queue(), [], {}, 0, 0
    said = time.time()
    if todo:
        with torch.no_grad():
            # vLLM makes them by itself
            make = (lambda codes: codes) if engine == 'vllm' else lambda codes: model.voices([codes])[0] if cfg.num_queries else None
            prefixes = {v: make(references.get(v)) for v in sorted({g[3] for g in todo})}
        jobs = ((laid, prefixes[voice], number_of(seed, group, k), cap) for _, laid, _, voice, group, cap in todo for k in range(rollouts))
        places = min(slots or (512 if device == 'cuda' else 32), len(todo) * rollouts)
        longest, cap = cfg.num_queries + max(len(g[1]) for g in todo), max(g[5] for g in todo)
        if engine == 'vllm':
            decoder = vllm_gepard.Engine(base, places, longest + cap, str(compute).removeprefix('torch.'), temperature, stop_threshold)
        else:
            decoder = M.Decoder(model, places, longest, cap, temperature=temperature, top_k=top_k, stop_threshold=stop_threshold, cfg_scale=cfg_scale,
                                cfg_frames=cfg_frames, repetition_penalty=repetition_penalty, compile=compile)
        writer = threading.Thread(target=write, daemon=True)
        start = time.time()
        writer.start()
        for number, r in decoder.run(jobs):
            p, laid, n, voice, group, cap = todo[number // rollouts]
            part = parts.setdefault(group, {})
            part[number % rollouts] = r
            frames += len(r['codes'])
            if len(part) == rollouts:
                rs = [part[k] for k in range(rollouts)]
                codes = fold(torch.cat([x['codes'] for x in rs]), cfg.codec['fsq_levels']).numpy().astype('<u2')
                finished.put(({'group': group, 'prompt': p['id'], 'text': p['text'], 'lang': p['lang'], 'category': p['category'], 'tokens': n, 'voice': voice,
                               'frames': [len(x['codes']) for x in rs], 'truncated': [x['ended_by'] == 'max_frames' for x in rs]}, codes.tobytes()))
                del parts[group]
                groups += 1
            if broken:
                break
            tell_sometimes()
        finished.put(None)
        writer.join()
        if broken:
            fail(f'{folder}: {broken[0]}', by=rank)

    # ---- all there: one file in the order of the prompts, whoever made what

    if rank == 0:
        while len(made := {r['group']: (r, tokens_beside(path)) for path in shards(folder, 'index') for r in whole_lines(path)[0]}) < len(plan):
            tell_sometimes()                                        # the other ranks are at work; one that dies takes torchrun and this one with it
            time.sleep(0.2)
        at = 0
        try:
            with open(inside('tokens.bin.tmp'), 'wb') as tokens, open(inside('index.jsonl.tmp'), 'w', encoding='utf-8') as index:
                for record, path in (made[group] for *_, group, _ in plan):
                    n = sum(record['frames'])
                    tokens.write(np.fromfile(path, '<u2', 8 * n, offset=16 * record['start']).tobytes())
                    index.write(json.dumps(record | {'start': at}, ensure_ascii=False) + '\n')
                    at += n
                for f in (tokens, index):
                    f.flush()
                    os.fsync(f.fileno())
            os.replace(inside('tokens.bin.tmp'), inside('tokens.bin'))
            os.replace(inside('index.jsonl.tmp'), inside('index.jsonl'))
            M.fsync(folder)
        except OSError as e:
            fail(f'{folder}: {e}')
        drop_shards()
        cut = sum(sum(r['truncated']) for r, _ in made.values())
        say(f'{folder}: {len(plan):,} groups, {len(plan) * rollouts:,} rollouts, {at / frame_rate:,.0f} s of audio, {cut:,} cut at their frame cap'
            + (f', {frames / frame_rate / (time.time() - start):,.1f} s of audio a second on this rank' if todo else ''))
