"""What the tiny codec loses, on held-out sentences of held-out voices (make_codec_data.py eval), as the table of codec.md:

    python assets/tiny/measure_codec.py DIR assets/tiny/codec.nemo [--every=N]      # DIR holds eval.flac and eval.flac.json

Per kind of voice: word error rate of the original and of the resynthesis (Whisper base, measure.py), cosine of the Resemblyzer vectors
of the two, DistillMOS of both (where installed: pip install --no-deps distillmos==0.9.1 xls-r-sqa==0.1.0), mean difference of 80 log mel
bands (dB, floor 60 dB below the clip's top). Then the speed of the codec, by the clock and by CPU time (which other jobs on the machine disturb less).
"""
import collections, json, os, sys, time, types, warnings
import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [ROOT, os.path.join(ROOT, 'assets', 'tiny')]
if '--help' in sys.argv: sys.exit(print(__doc__.strip()))
if len(sys.argv) < 3: sys.exit(__doc__)
folder, codec_path = sys.argv[1:3]
every = int(sys.argv[3].split('=')[1]) if len(sys.argv) > 3 else 1      # every Nth clip only

import librosa, soundfile as sf, soxr, torch
from codec import NanoCodec
from measure import embed, load_speaker_encoder, load_whisper, transcribe, word_error_rate

torch.set_num_threads(1)
warnings.simplefilter('ignore')
nano = NanoCodec(codec_path)
try:
    sys.modules.setdefault('torchaudio', types.ModuleType('torchaudio'))            # distillmos imports it for its command line only; NeMo, that looks for it, is in by now
    import distillmos
    judge = distillmos.ConvTransformerSQAModel().eval()
except ImportError:
    judge = None

rows = json.load(open(f'{folder}/eval.flac.json'))[::every]
audio, _ = sf.read(f'{folder}/eval.flac', dtype='float32')
real = [audio[at:at + n] for at, n, _, _ in rows]
fake = [y[:len(x)] for x, y in zip(real, nano.decode(nano.encode(real)))]
real16, fake16 = ([soxr.resample(x, nano.sample_rate, 16000) for x in clips] for clips in (real, fake))

def mel_distance(x, y):
    a, b = (librosa.amplitude_to_db(librosa.feature.melspectrogram(y=v, sr=nano.sample_rate, n_fft=1024, hop_length=256, n_mels=80, power=1.0)) for v in (x, y))
    return np.abs(np.maximum(a, a.max() - 60) - np.maximum(b, a.max() - 60)).mean()

def mos(clips):
    with torch.inference_mode(): return np.array([judge(torch.from_numpy(np.pad(c, (0, max(0, 16000 - len(c)))))[None]).item() for c in clips])

whisper, speaker = load_whisper(), load_speaker_encoder()
texts, heard = [r[3] for r in rows], [transcribe(whisper, real16), transcribe(whisper, fake16)]
cosine = (embed(speaker, real16) * embed(speaker, fake16)).sum(1)
mel = np.array([mel_distance(x, y) for x, y in zip(real, fake)])
quality = [mos(real16), mos(fake16)] if judge else [np.full(len(rows), np.nan)] * 2

groups = collections.defaultdict(list)
for i, (_, _, voice, _) in enumerate(rows):
    groups[voice.split('/')[0]].append(i)
    if not voice.startswith('demo'): groups['all held-out voices'].append(i)
print('| voices | clips (words) | WER original | WER resynthesized | speaker cosine | DistillMOS original | DistillMOS resynthesized | mel, dB |\n|---|---|---|---|---|---|---|---|')
for name, rows_ in groups.items():
    take = lambda values: [values[i] for i in rows_]
    wers = [word_error_rate(take(texts), take(h)) for h in heard]
    print(f'| {name} | {len(rows_)} ({sum(len(t.split()) for t in take(texts))}) | {100 * wers[0]:.1f}% | {100 * wers[1]:.1f}% | {cosine[rows_].mean():.3f} | '
          f'{quality[0][rows_].mean():.2f} | {quality[1][rows_].mean():.2f} | {mel[rows_].mean():.2f} |')

speech = np.resize(np.concatenate(real), 120 * nano.sample_rate)
for threads in 1, 2:
    torch.set_num_threads(threads)
    for what, clips in (('60 clips of 2 s', list(speech.reshape(60, -1))), ('1 clip of 30 s', [speech[:30 * nano.sample_rate]])):
        seconds, clocks = sum(map(len, clips)) / nano.sample_rate, [(time.time(), time.process_time())]
        codes = nano.encode(clips); clocks.append((time.time(), time.process_time()))
        nano.decode(codes); clocks.append((time.time(), time.process_time()))
        wall, cpu = ([seconds / (b[i] - a[i]) for a, b in zip(clocks, clocks[1:])] for i in (0, 1))
        print(f'{threads} threads, {what}: encode {wall[0]:.0f}x real time, decode {wall[1]:.0f}x (by CPU time {cpu[0]:.0f}x, {cpu[1]:.0f}x), load {os.getloadavg()[0]:.1f}')
