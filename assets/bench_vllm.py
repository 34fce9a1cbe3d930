"""
vllm_gepard.py on a GPU: is it right, and how fast; the same table for the torch engine. The released shape, random weights.

    python assets/bench_vllm.py                                                     # all of it
    python assets/bench_vllm.py --codec=out/measure_encode/codec.nemo               # audio too, not frames alone
    python assets/bench_vllm.py --parts=equal --layers=2 --vocab=4096               # does it run at all

equal: 16 requests at once in float32, greedy and drawn, with prefixes and without: the frames, ends and log-probs of model.generate?
preempt: the same with a key-value cache too small for them. bf16: where frames differ, by how little. leak: 10,000 requests in a row, some
aborted: memory. These four run side by side. table: all streams begin at once; first audio is the tenth frame (or its audio), RTF a stream's
time by its length; streams under 2 s are left out of both; the last column is from a second run, of 400 frames each, while all of them speak.
engines: several on this GPU. one: a single stream, its engine and its codec in one process (its last column is of the same texts, after their first ten
frames). Each part is a process of its own, and what takes longer than `limit` is ended and said.
"""
import asyncio, json, os, queue, subprocess, sys, threading, time
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

# -----------------------------------------------------------------------------
parts = ('equal', 'preempt', 'bf16', 'leak', 'table', 'engines', 'torch', 'one')
layers = 14
vocab = 248320
streams = (1, 32, 128, 256, 512)
engines = 4                     # on this GPU, of
engine_streams = 128            # streams each
frames = 4                      # of a request in a step of the engine
one_frames = 9                  # in one
requests = 10000                # of leak
codec = ''                      # a codec file of NanoCodec's size (measure_encode.py leaves one in its folder); '' = frames alone
codec_device = 'cuda'           # 'cuda:1' = beside the engine, on another GPU
first_frames = 10               # first audio: so many frames are decoded at once
piece_frames = 43               # and then so many
first_rows = (1, 8, 64)         # streams at once in a decode of first frames, at most the last; the codec's CUDA graphs are recorded for these
piece_rows = (1, 8)             # in a later one: new streams wait until it is done
attention = ''                  # vLLM's backend of the table and the engines; '' = its choice
limit = 270                     # seconds for a part
out = 'out/bench_vllm'          # the checkpoint of random weights, made once
part = ''                       # what this process does; '' = start the others
number = 0                      # of this engine
# -----------------------------------------------------------------------------
from configurator import configure
if __name__ == '__main__':
    os.environ['RANK'] = '1' if '--part=' in ' '.join(sys.argv) else '0'           # only the first process prints the settings
configure(globals())
os.environ.pop('RANK', None)

import numpy as np
import torch

import model as M
import vllm_gepard as V
from codec import NanoCodec, fold

RATE = 22050 / 1024
FOLDER = f'{out}/{layers}-{vocab}'
SIDE, CONTROL = (f'ipc:///tmp/bench_vllm.{kind}.{number}' for kind in ('side', 'control'))
if part in ('equal', 'preempt', 'bf16', 'leak', 'table', 'rate', 'one'):
    V.register()                                                                    # at the top: an engine's process that is spawned comes by here too
CLIPS = [np.random.default_rng(i).integers(0, 2016, (65 + 40 * i, 8)).astype(np.uint16) for i in range(7)] + [None]      # None: the null prefix
say = lambda *a: print(f'{part}{number or ""}:', *a, flush=True)


def make():
    """A checkpoint of random weights whose codes vary, in bfloat16."""
    if os.path.exists(FOLDER):
        return
    cfg = M.Config(num_hidden_layers=layers, vocab_size=vocab)
    if vocab < 248320:
        cfg.special_tokens = {k: vocab - 10 + i for i, k in enumerate(cfg.special_tokens)}
    torch.manual_seed(0)
    with torch.device('cuda'):
        model = M.Gepard(cfg)
        for name, p in model.named_parameters():
            torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else None
        model.codebook_heads.weight.data *= 5
        model.ref_compressor.output_scale.data.fill_(cfg.hidden_size ** -0.5)
        model.audio_embed_scale.fill_(0.02)
    os.makedirs(out, exist_ok=True)
    M.save_checkpoint(FOLDER, model.to(torch.bfloat16).state_dict(), cfg, None, {})


def jobs_of(n, cfg, frames=None, seed=0):
    """(text, voice, seed, cap) of n requests: 1 to 20 words, as long as they need or `frames`; eight voices."""
    rng, out = np.random.default_rng(seed), []
    for i in range(n):
        words = int(rng.integers(1, 21))
        ids = rng.integers(0, 200, max(1, round(1.3 * words))).tolist()
        text = M.layout(ids, cfg.special_tokens, M.repeats(len(ids), cfg.text_repetition | {'enabled': True}))
        out.append((text, CLIPS[i % 8], i, frames or max(8, int((0.7 + 0.4 * words) * RATE * rng.uniform(0.7, 1.3)))))
    return out

# ---- is it right?

def wanted(model, jobs, prefixed, **kw):
    return M.generate(model, [j[0] for j in jobs], model.voices([j[1] for j in jobs]) if prefixed else None, seeds=[j[2] for j in jobs], max_frames=[j[3] for j in jobs], **kw)


def spoken(engine, jobs, prefixed):
    results = dict(engine.run([(t, voice if prefixed else False, s, cap) for t, voice, s, cap in jobs]))
    return [results[i] for i in range(len(jobs))]


@torch.no_grad()
def forced(model, jobs, got, prefixed):
    """Logits of each frame given those before it, in the model's type: one packed forward. And the trajectories' log-probs."""
    rows = [{'text': j[0], 'codes': fold(r['codes'].cpu()).numpy()} | ({'prefix': p} if prefixed else {}) for j, r, p in zip(jobs, got, model.voices([j[1] for j in jobs]))]
    batch = {k: v.cuda() if torch.is_tensor(v) else v for k, v in M.pack(rows, model.cfg).items()}
    out = model(batch)
    return out['logits'].float().split([len(r['codes']) for r in rows]), M.trajectory_logprob(out, batch, torch.ones(len(rows), dtype=torch.bool, device='cuda'))[0]


def compare(what, exact, jobs, got, want, prefixed, greedy):
    """How many requests are the same; of the others, how near a tie the first different codes were (in float32)."""
    same = [torch.equal(g['codes'].long(), w['codes'].long()) and g['ended_by'] == w['ended_by'] for g, w in zip(got, want)]
    logits, trajectory = forced(exact, jobs, got, prefixed)
    margins = []
    for g, w, x in zip(got, want, logits):
        n = min(len(g['codes']), len(w['codes']))
        apart = (g['codes'][:n].long() != w['codes'][:n].long())
        if greedy and apart.any():
            frame = int(apart.any(1).float().argmax())
            best = x[frame].topk(2, -1).values
            margins += (best[:, 0] - best[:, 1])[apart[frame].cuda()].tolist()
    pairs = [(g, w) for g, w, s in zip(got, want, same) if s]
    off = lambda key: max((float((g[key] - w[key].float().cpu()).abs().max()) for g, w in pairs if len(g[key])), default=float('nan'))
    ends = {e: sum(g['ended_by'] == e for g in got) for e in ('stop_head', 'max_frames')}
    say(f'{what}: {sum(same)}/{len(same)} requests the same ({sum(len(g["codes"]) for g in got)} frames, {ends}); largest difference of a frame\'s log-prob {off("logp"):.1e}, of a stop logit '
        f'{off("stop_logits"):.1e}; of a whole log-prob from the packed forward\'s {float((trajectory.cpu() - torch.stack([g["logp"].sum() for g in got])).abs().max()):.1e}'
        + (f'; {len(margins)} codes differ where requests part, by a margin of {max(margins):.4f} at most' if margins else ''))


def right(dtype, **more):
    model, _ = M.load_checkpoint(FOLDER, 'cuda', getattr(torch, dtype))
    exact = model if dtype == 'float32' else M.load_checkpoint(FOLDER, 'cuda')[0]
    jobs = [(t, v, s, 20 + 5 * i % 70) for i, (t, v, s, _) in enumerate(jobs_of(16, model.cfg))]
    probs = np.concatenate([r['stop_probs'] for r in wanted(model, jobs, True, temperature=0, stop_threshold=1.0)])
    threshold = float(np.quantile(probs, 0.99))                                     # so that some of them stop by themselves
    for temperature in (0.0, 0.8):
        engine = V.Engine(FOLDER, 16, 256, dtype, temperature, threshold, frames=frames, **more) if not temperature else engine
        engine.options['temperature'] = temperature
        for prefixed in (True, False):
            kw = dict(temperature=temperature, stop_threshold=threshold)
            compare(f'temperature {temperature}, {"prefixes" if prefixed else "no prefix"}', exact, jobs, spoken(engine, jobs, prefixed), wanted(model, jobs, prefixed, **kw), prefixed, not temperature)
    say(f'{inside(engine).resumed} came back from a preemption')
    if dtype == 'bfloat16':                                                         # how much of it is the type's own rounding?
        got = spoken(engine, jobs, True)
        true, half = (torch.cat(forced(m, jobs, got, True)[0]).log_softmax(-1) for m in (exact, model))
        codes = torch.cat([r['codes'] for r in got]).long().cuda()[..., None]
        own = torch.cat([r['channel_logp'] for r in got]).cuda()
        pick = lambda x: x.gather(-1, codes)[..., 0]
        say(f'a channel\'s log-prob differs from float32\'s by {float((own - pick(true)).abs().mean()):.4f} in the mean here, by {float((pick(half) - pick(true)).abs().mean()):.4f} in torch')


def inside(engine):
    """The request table: the engine is in this process."""
    return engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model_state


def leak():
    import resource
    engine = V.Engine(FOLDER, 64, 128, stop_threshold=1.0, frames=frames)
    jobs, seen, rng = jobs_of(1000, engine.cfg), [], np.random.default_rng(0)
    for turn in range(-(-requests // 1000)):
        run = engine.run([(t, v, s, int(rng.integers(2, 16))) for t, v, s, _ in jobs])
        for i, _ in enumerate(run):
            if turn % 2 and i == 900:                                               # the rest is aborted in the middle
                run.close()
                break
        list(engine.run(jobs[:1]))                                                  # what was aborted is told to the GPU's side with the next step
        state = inside(engine)
        seen.append((torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                     len(state.live), len(state.live) + len(state.kept) + len(state.free), len(state.voices)))
    say(f'{1000 * len(seen)} requests; by thousands: GPU MiB allocated, reserved, host MiB at most; running, places, voices: ' + ' '.join('/'.join(map(str, s)) for s in seen))

# ---- how fast?

def listen():
    """Takes the frames of an engine, notes when they come, decodes them if there is a codec, and answers what a run was like."""
    import zmq
    frames, control = (zmq.Context.instance().socket(kind) for kind in (zmq.PULL, zmq.REP))
    frames.set_hwm(0)
    frames.bind(SIDE)
    control.bind(CONTROL)
    nano = codec and NanoCodec(codec, codec_device)
    if nano:
        nano.record([(n, first_frames) for n in first_rows] + [(n, nano.context + piece_frames) for n in piece_rows])
    runs, asked, poller = {}, False, zmq.Poller()
    poller.register(frames, zmq.POLLIN)
    poller.register(control, zmq.POLLIN)

    def decode(group):
        """(run, past, end) each. Who has less to decode than the others, as at a stream's end, gets surplus frames behind it."""
        codes = np.zeros((len(group), max(end - past for _, past, end in group), 32), np.uint8)
        for row, (r, past, end) in zip(codes, group):
            row[:end - past] = r['codes'][past:end]
        nano._decode(torch.from_numpy(codes).to(codec_device).long()).cpu()       # of a row, (done - past) * hop to (end - past) * hop is new
        now = time.perf_counter()
        for r, _, end in group:
            r['done'] = end
            r['audio'].append(now)
    while True:
        waiting = []
        for r in runs.values() if nano else ():
            end = min(r['n'], r['done'] + (piece_frames if r['done'] else first_frames))
            if r['done'] < end <= len(r['at']):
                waiting.append((r, max(0, r['done'] - nano.context), end))
        waiting.sort(key=lambda w: w[0]['done'])                                    # who has heard least comes first
        first = [w for w in waiting if not w[0]['done']]
        if waiting:                                                                 # one batch, then look whose frames have come meanwhile
            decode(first[:max(first_rows)] or waiting[:max(piece_rows)])
        for socket, _ in poller.poll(0 if waiting else 20):
            if socket is control:
                question = json.loads(control.recv())
                asked = question == 'report'
                if not asked:
                    runs = {name: {'n': n, 'codes': np.zeros((n, 32), np.uint8), 'at': [], 'audio': [], 'done': 0} for name, n in question.items()}
                    control.send(b'{}')
                continue
            while True:
                try:
                    names, codes, at, ended, _ = V.unpack(frames.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
                now = time.perf_counter()
                for i, name in enumerate(names):
                    r = runs.get(name.rsplit('-', 1)[0])
                    if r and at[i] == len(r['at']) < r['n'] and not ended[i]:
                        r['codes'][at[i]] = codes[i]
                        r['at'].append(now)
        if asked and all(len(r['at']) == r['n'] and (not nano or r['done'] == r['n']) for r in runs.values()):
            begin, end = max(r['at'][0] for r in runs.values()), min(r['at'][-1] for r in runs.values())
            together = sum(begin < t <= end for r in runs.values() for t in r['at']) / (end - begin) if end > begin else 0.0
            control.send(json.dumps({'together': together, 'runs': {k: [r['at'][min(first_frames, r['n']) - 1], r['at'][-1], *([r['audio'][0], r['audio'][-1]] if nano else [])] for k, r in runs.items()}}).encode())
            asked = False


def listener():
    """Starts it -> ask(question) and the process"""
    import zmq
    process = subprocess.Popen([sys.executable, *sys.argv, '--part=listen', f'--number={number}'])
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, 120_000)
    socket.connect(CONTROL)

    def ask(question):
        socket.send(json.dumps(question).encode())
        return json.loads(socket.recv())
    ask({})                                                                         # it is up
    return ask, process


def row(engine, n, begun, report, lengths, together):
    """Prints a line of the table, with frames alone and with audio."""
    for what, (a, b) in (('frames', (0, 1)), ('audio', (2, 3))):
        if b < len(next(iter(report.values()))):
            long = [k for k in report if lengths[k] >= 2 * RATE]
            pct = lambda xs, scale, form: '/'.join(format(scale * x, form) for x in np.percentile(xs, (50, 90, 99)))
            first, rtf = ([report[k][a] - begun[k] for k in long], [(report[k][b] - begun[k]) * RATE / lengths[k] for k in long])
            spent = max(r[b] for r in report.values()) - min(begun.values())
            print(f'| {engine}, {what} | {n} | {pct(first, 1000, ".0f")} ms | {pct(rtf, 1, ".3f")} | {sum(lengths.values()) / RATE / spent:,.0f} | {together / RATE:,.0f} |', flush=True)


def table(sizes, lengths_of=(None, 400)):
    """A burst of each size through AsyncLLM in processes of its own."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    ask, process = listener()

    async def go():
        started = time.time()
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**V.settings(FOLDER, max(sizes), 640, frames=frames, additional_config={'side': SIDE}, **({'attention_backend': attention} if attention else {}))))
        cfg, made = V.read_config(FOLDER)[0], 0

        async def burst(n, length, seed):
            nonlocal made
            jobs = {f'r{made + i}': j for i, j in enumerate(jobs_of(n, cfg, length, seed))}
            made += n
            lengths = {k: j[3] for k, j in jobs.items()}
            ask(lengths)
            begun, asks = {}, {k: V.request(t, cfg, voice, seed=s, max_frames=cap, temperature=0.8, stop_threshold=2.0, logprobs=False) for k, (t, voice, s, cap) in jobs.items()}

            async def one(name):
                begun[name] = time.perf_counter()
                async for _ in llm.generate(*asks[name], name):
                    pass
            await asyncio.gather(*map(one, jobs))
            answer = ask('report')
            return begun, answer['runs'], lengths, answer['together']
        for n in (1, 2, max(sizes)):                                                # the first of a kind compiles
            await burst(n, 20, 0)
        say(f'ready after {time.time() - started:.0f} s')
        if part == 'rate':
            open(f'{out}/ready-{number}', 'w').close()
            while sum(name.startswith('ready-') for name in os.listdir(out)) < engines:
                await asyncio.sleep(0.02)
            begun, runs, lengths, together = await burst(engine_streams, 600, 0)
            say(f'{engine_streams} streams, RTF {np.median([(r[1] - begun[k]) * RATE / lengths[k] for k, r in runs.items()]):.3f} in the median, while all speak {together / RATE:,.0f} s of audio a second')
            with open(f'{out}/rate-{number}.json', 'w') as f:
                json.dump([min(begun.values()), max(r[1] for r in runs.values()), sum(lengths.values())], f)
        else:
            for n in sizes:
                several = [await burst(n, None, seed) for seed in range(12 if n == 1 else 1)]
                begun, runs, lengths = ({k: v for s in several for k, v in s[i].items()} for i in range(3))
                together = (await burst(n, 400, 0))[3]
                row('vLLM', n, begun, runs, lengths, together)
        llm.shutdown()
    try:
        asyncio.run(go())
    finally:
        process.kill()


def one():
    """A single stream, its frames and their audio in one process, as sample.py --engine=vllm --stream=true has them: the codec in the main thread."""
    engine = V.Engine(FOLDER, 1, 640, temperature=0.8, stop_threshold=1.0, frames=one_frames)
    nano = NanoCodec(codec, codec_device)
    torch.cuda.set_stream(torch.cuda.Stream(codec_device, priority=-1))
    nano.record([(1, first_frames), (1, nano.context + piece_frames)])

    def pieces(spoken):
        stack, size = [], first_frames
        for codes in iter(spoken.get, None):
            stack.append(codes)
            if len(stack) == size:
                yield torch.stack(stack)
                stack, size = [], piece_frames
        if stack:
            yield torch.stack(stack)

    def speak(job):
        spoken, frames_at, audio_at, start = queue.Queue(), [], [], time.perf_counter()

        def work():
            for _ in engine.run([job], lambda step, codes, _: (frames_at.append(time.perf_counter()), spoken.put(codes[0]))):
                pass
            spoken.put(None)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        for _ in nano.stream(pieces(spoken)):
            audio_at.append(time.perf_counter())
        thread.join()
        return start, [frames_at[min(first_frames, job[3]) - 1], frames_at[-1], audio_at[0], audio_at[-1]]
    jobs = jobs_of(60, engine.cfg)
    for job in jobs[:10]:
        speak(job)
    begun, report = zip(*(speak(job) for job in jobs))
    together = sum(job[3] - first_frames for job in jobs if job[3] > first_frames) / sum(r[1] - r[0] for r in report)
    row('vLLM and codec in one process', 1, dict(enumerate(begun)), dict(enumerate(report)), {i: job[3] for i, job in enumerate(jobs)}, together)


def torch_table():
    """The same bursts through model.Decoder; a frame counts once it is on the host."""
    import zmq
    ask, process = listener()
    model, _ = M.load_checkpoint(FOLDER, 'cuda', torch.bfloat16)
    voices = model.voices(CLIPS)                                                    # kept from the burst that warms up, in the other engine
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(SIDE)

    def burst(d, n, frames, seed):
        jobs = jobs_of(n, model.cfg, frames, seed)
        names = np.array([f'r{seed}.{i}-' for i in range(n)])
        lengths = {name[:-1]: j[3] for name, j in zip(names, jobs)}
        ask(lengths)

        def on_frame(step, codes, running):
            rows, on = np.zeros((n, 10), np.int32), running.cpu().numpy()
            rows[:, :8] = codes.to(torch.uint8).cpu().numpy().view(np.int32)
            rows[:, 8] = 2 * step
            socket.send_multipart([' '.join(names[on]).encode(), rows[on].tobytes()])
        start = time.perf_counter()
        for _ in d.run([(t, voices[i % 8], s, cap) for i, (t, _, s, cap) in enumerate(jobs)], on_frame=on_frame):
            pass
        answer = ask('report')
        return dict.fromkeys(lengths, start), answer['runs'], lengths, answer['together']
    for n in streams:
        torch._dynamo.reset()
        M.compiled.cache_clear()
        d = M.Decoder(model, n, 8 + 200, 400, temperature=0.8, stop_threshold=1.0, compile=True)
        start = time.time()
        for _ in range(2):
            burst(d, n, 20, 0)
        say(f'{n} streams: ready after {time.time() - start:.0f} s')
        several = [burst(d, n, None, seed) for seed in range(12 if n == 1 else 1)]
        begun, runs, lengths = ({k: v for s in several for k, v in s[i].items()} for i in range(3))
        row('torch', n, begun, runs, lengths, burst(d, n, 400, 0)[3])
        del d
        torch.cuda.empty_cache()
    process.kill()


if __name__ == '__main__':
    if not torch.cuda.is_available():
        sys.exit('bench_vllm.py: needs a GPU, and vLLM: docs/serving.md')
    todo = {'make': make, 'equal': lambda: right('float32'), 'preempt': lambda: right('float32', num_gpu_blocks_override=40), 'bf16': lambda: right('bfloat16'), 'leak': leak,
            'listen': listen, 'table': lambda: table(streams), 'rate': lambda: table((engine_streams,)), 'torch': torch_table, 'one': one}
    if part:
        todo[part]()
        sys.stdout.flush()
        os._exit(0)                                                                 # vLLM's threads need no farewell

    def start(name, n=0):
        return name, subprocess.Popen([sys.executable, *sys.argv, f'--part={name}', f'--number={n}'], env=os.environ | {'VLLM_LOGGING_LEVEL': 'WARNING', 'VLLM_NO_USAGE_STATS': '1', 'VLLM_PLUGINS': 'gepard'}, start_new_session=True)

    def wait(processes):
        end = time.time() + limit
        for name, p in processes:
            try:
                code = p.wait(max(1, end - time.time()))
            except subprocess.TimeoutExpired:
                code = f'more than {limit} s'
            try:
                os.killpg(p.pid, 9)                                                 # what it started goes with it
            except ProcessLookupError:
                pass
            if code:
                print(f'{name}: FAILED ({code})', flush=True)
    wait([start('make')])
    wait([start(name) for name in parts if name in ('equal', 'preempt', 'bf16', 'leak')])
    print('| | streams | first audio, p50/p90/p99 | RTF, p50/p90/p99 | s of audio a second, whole burst | while all speak |\n|---|---|---|---|---|---|', flush=True)
    for name in parts:
        if name == 'one' and not codec:
            print('one: needs --codec')
        elif name in ('table', 'torch', 'one'):
            wait([start(name)])
        elif name == 'engines':
            for old in os.listdir(out):
                if old.startswith(('ready-', 'rate-')):
                    os.remove(f'{out}/{old}')
            wait([start('rate', n) for n in range(engines)])
            done = [json.load(open(f'{out}/rate-{n}.json')) for n in range(engines) if os.path.exists(f'{out}/rate-{n}.json')]
            if len(done) == engines:
                begin, end, spoken = (f(x) for f, x in zip((min, max, sum), zip(*done)))
                print(f'engines: {engines} x {engine_streams} streams of 600 frames: {spoken / RATE / (end - begin):,.0f} s of audio a second', flush=True)
