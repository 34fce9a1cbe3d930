"""
Speaks a text with any checkpoint: text (and a reference clip for the voice) -> wav and a spectrogram picture.

    python sample.py --ckpt=out/tiny --text="four two seven" --ref=voice.wav
    python sample.py --ckpt=out/tiny --file=texts.txt --out=spoken/line.wav        # a line each: spoken/line-1.wav, ...
    python sample.py --ckpt=CHECKPOINT --text="Hola." --language=es                # where the training corpus was tagged
    python sample.py --ckpt=nineninesix/gepard-1.0 --text="Hello." --stream=true   # audio is written while it is made

Several texts are spoken side by side, 64 at once. Without --ref a checkpoint with voice cloning speaks with its null prefix (some
voice); --prefix=none leaves the prefix out. Text repetition, codec, tokenizer and special tokens come from the checkpoint.
"""
import os, sys, time

# -----------------------------------------------------------------------------
ckpt = 'out/pretrain'           # a checkpoint folder, a run's folder (its newest checkpoint), or a Hub name
text = ''                       # one text, or
file = ''                       # a UTF-8 file with one text a line
language = ''                   # one of the language tags that the checkpoint was trained with, such as es: put before each text; '' = none
ref = ''                        # audio file of the voice; its first max_ref_seconds are used
prefix = 'auto'                 # 'auto' = the reference, else the null prefix; 'null'; 'none' = no prefix at all
out = 'out/sample.wav'          # with several texts their number goes before the extension; a .png lies beside each
max_ref_seconds = 15.0          # training references are 3-15 s
max_seconds = 14.0              # of speech; a text cut here is named
temperature = 0.4               # 0 = arg-max
top_k = 0                       # 0 = off
stop_threshold = 0.5            # on the stop probability
cfg_scale = 1.0                 # text guidance; 1.0 = off, 3.0 is the default of dpo_sample.py
cfg_frames = 20                 # guided frames at the onset; 0 = all
repetition_penalty = 1.0        # 1.0 = off
seed = 0
stream = False                  # write audio as it is made, stream_frames at a time (one text)
stream_frames = 10              # 0.46 s
compile = False                 # GPU: a minute of compiling first, then a fraction of the time: for many texts, or to measure speed
engine = 'torch'                # 'vllm' = vLLM (docs/serving.md; GPU, a minute to start): no top_k, guidance, repetition penalty
codec = ''                      # '' = the checkpoint's
device = 'auto'                 # 'auto' = cuda where there is one
dtype = 'auto'                  # 'auto' = bfloat16 on cuda, float32 on cpu
# -----------------------------------------------------------------------------
from configurator import configure
configure(globals())


def fail(message):
    print('sample.py: ' + ' '.join(str(message).split()), file=sys.stderr)
    sys.exit(2)

def wav_name(n):
    base = os.path.splitext(out)[0]
    return f'{base}.wav' if len(texts) == 1 else f'{base}-{n + 1}.wav'

if bool(text) == bool(file):
    fail('give one of --text and --file' + (', not both' if text else ''))
if prefix not in ('auto', 'null', 'none'):
    fail(f"--prefix is auto, null or none, got {prefix!r}")
if ref and prefix != 'auto':
    fail(f'--ref and --prefix={prefix} contradict each other')
if ref and not os.path.exists(ref):
    fail(f'--ref: audio file not found: {ref}')
if min(max_seconds, max_ref_seconds, repetition_penalty) <= 0 or stream_frames < 1 or min(temperature, top_k, cfg_frames) < 0:
    fail('max_seconds, max_ref_seconds, stream_frames and repetition_penalty must be above 0; temperature, top_k and cfg_frames not below')
if not 0 < stop_threshold <= 1:
    fail(f'--stop_threshold is a probability above 0, got {stop_threshold}')
if engine not in ('torch', 'vllm'):
    fail(f'--engine is torch or vllm, got {engine!r}')
if engine == 'vllm' and (top_k or cfg_scale != 1 or repetition_penalty != 1 or compile):
    fail('--engine=vllm knows no top_k, cfg_scale, repetition_penalty and compile')
if not 0 <= seed < 2 ** 63:
    fail(f'--seed is 0 to 2**63 - 1, got {seed}')
if os.path.splitext(out)[1].lower() not in ('', '.wav') or not os.path.basename(out) or os.path.isdir(out):
    fail(f'--out is a .wav file, got {out!r}')
if ckpt.startswith('out/') and not os.path.isdir(ckpt):         # else it would be taken for a Hub name
    fail(f'{ckpt}: no such folder: train a checkpoint (pretrain.py), or give --ckpt a folder or a Hub name')
if file:
    try:
        texts = [(f'{file}:{n}', line.strip()) for n, line in enumerate(open(file, encoding='utf-8-sig'), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        fail(f'{file}: {e}')
    if not texts:
        fail(f'{file}: no text in it')
else:
    texts = [('--text', text)]
for where, t in texts:
    if not any(c.isalnum() for c in t):
        fail(f'{where}: nothing to speak in {t!r}')
    if any('\ud800' <= c <= '\udfff' for c in t):
        fail(f'{where}: not UTF-8: {t!r}')
if stream and len(texts) > 1:
    fail(f'--stream takes one text, {file} has {len(texts)}')
try:                                                            # before minutes of loading and speaking
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    for name in (wav_name(len(texts) - 1), os.path.splitext(wav_name(len(texts) - 1))[0] + '.png'):
        new = not os.path.exists(name)
        open(name, 'ab').close()
        if new:
            os.remove(name)
except OSError as e:
    fail(f'--out: {e}')

import functools, queue, re, threading

import soundfile
import torch

import model as M
from codec import NanoCodec, save_spectrogram, save_wav
from prepare import encode_text, load_clip, load_tokenizer, tagged

if device == 'auto':
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
try:
    torch.zeros(1, device=device).cpu()
except Exception as e:                                          # no such device, or a torch without it: several types
    fail(f'--device={device}: ' + (str(e).splitlines() or [type(e).__name__])[0])
if compile and not device.startswith('cuda'):
    fail('--compile needs a GPU')
compute = {'auto': torch.bfloat16 if device.startswith('cuda') else torch.float32}.get(dtype) or getattr(torch, dtype, None)
if compute not in (torch.float32, torch.bfloat16):
    fail(f"--dtype is auto, float32 or bfloat16, got {dtype!r}")
if engine == 'vllm':
    try:
        import vllm_gepard
        vllm_gepard.register()
    except ImportError as e:
        fail(e)
    if not device.startswith('cuda'):
        fail('--engine=vllm needs a GPU')
newest = M.latest_checkpoint(ckpt) or M.latest_checkpoint(ckpt, file='adapter.safetensors') or ckpt
if os.path.exists(os.path.join(newest, 'adapter.safetensors')):
    fail(f'{newest}: these are adapters: merge.py makes a checkpoint of them')
try:
    if engine == 'vllm':
        cfg, folder = vllm_gepard.read_config(newest)
    else:
        gepard, folder = M.load_checkpoint(newest, device, compute)
        cfg = gepard.cfg
    known = M.language_tags(folder)
    if language and language.lower() not in known:
        fail(f'--language={language}: ' + (f"{ckpt} knows {', '.join(known)}" if known else f'{ckpt} was trained without language tags, or its training_metadata.json is not there'))
    if known and not language:
        print(f"{ckpt} was trained with language tags ({', '.join(known)}): --language= puts one before the text")
    tokenizer = load_tokenizer(folder)[0]
    nano = NanoCodec(codec or cfg.codec['codec_id'], device=device)
except (OSError, ValueError, ImportError) as e:
    fail(e if ckpt in str(e) or 'codec' in str(e) else f'{ckpt}: {e}')
if tokenizer.get_vocab_size() > cfg.vocab_size:
    fail(f'{folder}: the tokenizer has {tokenizer.get_vocab_size()} ids, the model {cfg.vocab_size}')
if list(nano.levels) * nano.groups != list(cfg.levels):
    fail(f'codec {nano.id} has levels {list(nano.levels)} x {nano.groups}, the checkpoint {cfg.levels[:4]} x {len(cfg.levels) // 4}')

prompts = []
for where, t in texts:
    bare = re.sub(rf'^\s*{re.escape(language)}:', '', t, flags=re.I) if language else t
    if bare != t:
        print(f'{where}: has the tag {language.lower()}: already, it is not put twice')
    ids = encode_text(tokenizer, tagged(bare, language))
    if not ids:
        fail(f'{where}: the tokenizer makes no tokens of {t!r}')
    prompts.append(M.prompt(ids, cfg))
max_frames = max(1, round(min(max_seconds, 1e6) * nano.frame_rate))
if max(map(len, prompts)) + cfg.num_queries + max_frames > cfg.max_position_embeddings:
    fail(f'text of {max(map(len, prompts))} tokens and {max_frames} frames do not fit the model ({cfg.max_position_embeddings} positions): split the text or lower max_seconds')

if (ref or prefix == 'null') and not cfg.num_queries:
    fail(f'{ckpt} has no voice cloning: leave out --ref and --prefix')
voice, vectors = None, None
if ref:
    clip = load_clip(ref, nano.sample_rate, 0, nano.hop, 1e-4)  # at least one frame, not silent
    if isinstance(clip, tuple):
        fail(f'--ref: {clip[0]}: {clip[1]}' + ('' if ref in clip[1] else f': {ref}'))
    voice = nano.encode([clip[:max(nano.hop, int(min(max_ref_seconds, 1e6) * nano.sample_rate))]])[0]
if engine == 'torch' and cfg.num_queries and prefix != 'none':
    vectors = gepard.voices([voice]).expand(len(prompts), -1, -1)       # without a reference: the null prefix
settings = dict(temperature=temperature, top_k=top_k, stop_threshold=stop_threshold, cfg_scale=cfg_scale, cfg_frames=cfg_frames, repetition_penalty=repetition_penalty)
slots = min(64, len(prompts))                                   # texts at once; the others follow as these end
if engine == 'vllm':
    start = time.time()
    decoder = vllm_gepard.Engine(folder, slots, max(map(len, prompts)) + cfg.num_queries + max_frames, str(compute).removeprefix('torch.'), temperature, stop_threshold,
                                 frames=9 if stream else 4)                    # in a step of the engine: with the prompt's one, the first ten soon
    jobs = [(p, False if prefix == 'none' else voice, seed + n, max_frames) for n, p in enumerate(prompts)]
    speak = lambda on_frame=None: [r for _, r in sorted(decoder.run(jobs, on_frame), key=lambda done: done[0])]
    list(decoder.run([(*job[:3], min(4, max_frames)) for job in jobs]))     # what a first call must set up
    print(f'vLLM started in {time.time() - start:.0f} s')
else:
    start = time.time()
    decoder = M.Decoder(gepard, slots, max(map(len, prompts)) + (0 if vectors is None else cfg.num_queries), max_frames, compile=compile, **settings)
    speak = functools.partial(M.generate, gepard, prompts, vectors, max_frames=max_frames, seeds=list(range(seed, seed + len(prompts))), decoder=decoder)
    if compile:
        for _ in range(2):                                      # the first compiles, the second records
            speak(max_frames=min(4, max_frames))
        print(f'compiled in {time.time() - start:.0f} s')


def pieces(frames):
    """Frames from the queue -> stacks of stream_frames."""
    stack = []
    for codes in iter(frames.get, None):
        stack.append(codes)
        if len(stack) == stream_frames:
            yield torch.stack(stack)
            stack = []
    if stack:
        yield torch.stack(stack)


if stream:
    size = min(stream_frames, max_frames)
    if device.startswith('cuda'):
        torch.cuda.synchronize(device)                                      # the codec has been loaded
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))       # of this thread, which decodes: not behind frames that are yet to be made
    nano.record([(1, size), (1, nano.context + size)])          # also measures how far the codec hears: before the clock, as loading is
start, first = time.time(), None
if stream:
    frames, result = queue.Queue(), []

    def work():
        try:
            result.extend(speak(on_frame=lambda step, codes, running: frames.put(codes[0].cpu())))
        except Exception as e:
            result.append(e)
        frames.put(None)
    threading.Thread(target=work, daemon=True).start()
    audio = []
    try:
        with soundfile.SoundFile(wav_name(0), 'w', nano.sample_rate, 1, format='WAV') as f:
            for piece in nano.stream(pieces(frames)):
                first = first or time.time() - start
                f.write(piece)
                f.flush()
                audio.append(piece)
    except (OSError, soundfile.LibsndfileError) as e:
        sys.stdout.flush()
        print(f'sample.py: {wav_name(0)}: not written to its end ({e})', file=sys.stderr, flush=True)
        os._exit(2)                                             # the thread still speaks
    if isinstance(result[0], Exception):
        raise result[0]
    import numpy as np
    wavs, lm = [np.concatenate(audio)], time.time() - start
else:
    result = speak()
    lm = time.time() - start
    wavs = nano.decode([r['codes'].cpu() for r in result])
total = time.time() - start
for n, ((where, t), r, wav) in enumerate(zip(texts, result, wavs)):
    name = wav_name(n)
    try:
        if not stream:
            save_wav(name, wav, nano.sample_rate)
        save_spectrogram(os.path.splitext(name)[0] + '.png', wav, nano.sample_rate, t)
    except OSError as e:
        fail(f'{name}: not written ({e.strerror or e})')
    print(f"{name}: {len(r['codes'])} frames, {len(r['codes']) / nano.frame_rate:.2f} s" + (' (cut at max_seconds: the stop head did not fire)' if r['ended_by'] == 'max_frames' else ''))
seconds = sum(len(r['codes']) for r in result) / nano.frame_rate
print(f'{seconds:.2f} s of speech in {total:.2f} s: RTF {total / seconds:.3f} (model {lm / seconds:.3f}), first audio after {first or total:.2f} s')
