"""How fast prepare.py encodes audio with a codec of NanoCodec's full size, and how busy the GPU is.

    python assets/measure_encode.py --speech=data/speech/wav --hours=4              # speech: a flac or wav, or a folder of them
    python assets/measure_encode.py --speech=data/speech/wav --hours=0.01 --turn_seconds=9 --runs="1:1"      # a CPU can, at real time

The weights are random: that changes no speed. The networks are NeMo's; their shape is that of the NanoCodec paper (22 kHz, 1.89 kbps, 21.5 frames
a second): HiFi-GAN encoder, strides 2 2 4 8 8 = 1,024, 24 channels doubled at each; causal HiFi-GAN decoder from 864 channels; 8 groups of levels
8 7 6 6. With NeMo's defaults for the rest these are 31.0 + 31.6 million weights, the 62 million that the model card names.
Clips of 3 to 15 s are cut from the speech and stand in the table under many names until they are `hours`. Compared are: one process that reads
a clip and encodes it, in turn; and prepare.py itself, with workers that read ahead. The clock runs from the loaded codec to the finished corpus.
"""
import csv, hashlib, os, random, shutil, subprocess, sys, threading, time

# -----------------------------------------------------------------------------
speech = 'data/speech/wav'      # what the clips are cut from
out = 'out/measure_encode'      # a new folder
hours = 4.0                     # of audio that prepare.py encodes in each run
unit_rows = 2048                # as config/prepare.py
turn_seconds = 20.0             # how long clips are read and encoded in turn
runs = '1:14 2:7 4:3'           # prepare.py as ranks:workers of each; more ranks than GPUs share them
device = 'auto'
# -----------------------------------------------------------------------------
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from configurator import configure
configure(globals())

import numpy as np
import soundfile, torch

from codec import NanoCodec
from prepare import Corpus, files_below, load_clip

if device == 'auto':
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
if os.path.exists(out):
    sys.exit(f'measure_encode.py: {out} is there already: remove it, or choose another --out')
if not os.path.exists(speech):
    sys.exit(f'measure_encode.py: {speech}: no such file or folder; make demo makes data/speech')
os.makedirs(f'{out}/clips')

# ---- the codec

def build(path):
    from omegaconf import OmegaConf
    from nemo.collections.tts.models import AudioCodecModel
    modules, losses = 'nemo.collections.tts.modules.audio_codec_modules.', 'nemo.collections.tts.losses.audio_codec_loss.'
    model = AudioCodecModel(OmegaConf.create(dict(
        sample_rate=22050, samples_per_frame=1024, commit_loss_scale=0.0,
        audio_encoder=dict(_target_=modules + 'HiFiGANEncoder', encoded_dim=32, down_sample_rates=[2, 2, 4, 8, 8], base_channels=24, activation='lrelu', pad_mode='replicate'),
        vector_quantizer=dict(_target_=modules + 'GroupFiniteScalarQuantizer', num_groups=8, num_levels_per_group=[8, 7, 6, 6]),
        audio_decoder=dict(_target_=modules + 'CausalHiFiGANDecoder', input_dim=32, up_sample_rates=[8, 8, 4, 2, 2], base_channels=864, activation='half_snake', output_activation='clamp'),
        loss_resolutions=[[1024, 256, 1024]], mel_loss_dims=[80],                   # NeMo builds its losses always; unused here
        generator_loss=dict(_target_=losses + 'GeneratorSquaredLoss'), discriminator_loss=dict(_target_=losses + 'DiscriminatorSquaredLoss')))).eval()
    # fresh weights let the signal die out, and all codes would be one: give it a gain through the layers, and the channels the spread of speech
    torch.manual_seed(0)
    for name, p in model.audio_encoder.named_parameters():
        p.data = torch.zeros_like(p) if name.endswith('bias') else torch.full_like(p, 0.7) if name.endswith('original0') else torch.randn_like(p)
    audio = torch.from_numpy(load_clip(f'{out}/clips/0.flac', 22050, 0, 1, 0))[None]
    with torch.no_grad():
        x, _ = model.encode_audio(audio=audio, audio_len=torch.tensor([audio.shape[1]]))
        last = model.audio_encoder.post_conv.conv
        gain = 0.6 / x[0].std(1)
        last.parametrizations.weight.original0.mul_(gain[:, None, None])
        last.bias.copy_(-x[0].mean(1) * gain)
    model.save_to(path)

# ---- the clips

rng, pieces = random.Random(0), []
for path in [speech] if os.path.isfile(speech) else files_below(speech, ('.wav', '.flac')):
    x, rate = soundfile.read(path, dtype='int16')
    pieces.append(x)
    if sum(map(len, pieces)) > 600 * rate:
        break
audio = np.concatenate(pieces)
length = [rng.uniform(3, 15) for _ in range(min(400, max(2, int(hours * 400))))]
for i, seconds in enumerate(length):
    n = int(seconds * rate)
    start = rng.randrange(max(1, len(audio) - n))
    soundfile.write(f'{out}/clips/{i}.flac', audio[start:start + n], rate)
names, total = [], 0.0
while total < hours * 3600:
    if len(names) % len(length) == 0:
        os.symlink('clips', f'{out}/{len(names) // len(length)}')
    names.append(f'{len(names) // len(length)}/{len(names) % len(length)}.flac')
    total += length[(len(names) - 1) % len(length)]
with open(f'{out}/table.csv', 'w', newline='') as f:
    csv.writer(f).writerows([('audio', 'text'), *((n, f'clip {n}') for n in names)])
print(f'{len(names):,} names of {len(length)} clips of 3 to 15 s, {total / 3600:.2f} hours, flac of {rate} Hz')

build(f'{out}/codec.nemo')
nano = NanoCodec(f'{out}/codec.nemo', device)
weights = [sum(p.numel() for p in part.state_dict().values()) / 1e6 for part in (nano.model.audio_encoder, nano.model.audio_decoder)]
print(f'codec: {weights[0]:.1f} + {weights[1]:.1f} million weights, hop {nano.hop}, on {torch.cuda.get_device_name() if device.startswith("cuda") else device}, torch {torch.__version__}, {os.cpu_count()} cores')

# ---- how busy the GPU is: nvidia-smi's share of the last moments in which a kernel ran, a few times a second

busy = []                       # (time, percent)
def watch():
    while True:
        said = subprocess.run(['nvidia-smi', '--query-gpu=utilization.gpu', '--format=csv,noheader,nounits'], capture_output=True, text=True).stdout.split()
        busy.append((time.time(), float(said[0])))
        time.sleep(0.1)
if device.startswith('cuda'):
    threading.Thread(target=watch, daemon=True).start()

def report(what, seconds, begin, end):
    share = [b for t, b in busy if begin + 0.5 < t < end]
    print(f'{what}: {seconds / 3600:.3f} hours of audio in {end - begin:.1f} s = {seconds / (end - begin):,.0f} hours per GPU hour'
          + (f'; GPU busy {np.mean(share):.0f}%' if share else ''), flush=True)

def encode_for(seconds, batches):
    """Audio seconds that were encoded of these, and when it began and ended."""
    begin, done = time.time(), 0.0
    for clips in batches:
        nano.encode(clips)
        done += sum(map(len, clips)) / nano.sample_rate
        if time.time() - begin > seconds:
            break
    return done, begin, time.time()

load = lambda name: load_clip(f'{out}/{name}', nano.sample_rate, 40.0, 1024, 1e-4)
nano.encode([load(names[0])])                       # the first one also builds plans
report('in turn, one process reads a clip and encodes it', *encode_for(turn_seconds, ([load(n)] for n in names)))
clips = [load(n) for n in names[:40]]
report('encoding alone, clip by clip from memory', *encode_for(turn_seconds / 2, ([c] for _ in range(1000) for c in clips)))
same = [np.resize(clips[i % len(clips)], 10 * nano.sample_rate) for i in range(32 if device.startswith('cuda') else 2)]
report(f'encoding alone, batches of {len(same)} x 10 s', *encode_for(turn_seconds / 2, (same for _ in range(1000))))

# ---- do codes depend on the batch, or on TF32?

together = nano.encode(same)
alone = [nano.encode([c])[0] for c in same]
differ = lambda a, b: f'{np.mean(np.concatenate(a) != np.concatenate(b)):.2e}'
print(f'of {np.concatenate(alone).size:,} codes ({len(np.unique(alone)):,} kinds) differ between batch and alone: {differ(together, alone)}; between two runs alone: {differ(alone, [nano.encode([c])[0] for c in same])}')
with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
    exact, exact_batch = [nano.encode([c])[0] for c in same], nano.encode(same)
    report('encoding alone, clip by clip, in full float32', *encode_for(turn_seconds / 2, ([c] for _ in range(1000) for c in clips)))
    report('encoding alone, these batches, in full float32', *encode_for(turn_seconds / 2, (same for _ in range(1000))))
print(f'in full float32: {differ(exact_batch, exact)} differ between batch and alone; {differ(exact, alone)} from the codes above', flush=True)
del nano, together
torch.cuda.empty_cache()

# ---- prepare.py

first = None
for run in runs.split():
    ranks, workers = map(int, run.split(':'))
    shutil.rmtree(f'{out}/corpus', ignore_errors=True)
    launch = [sys.executable] + ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}'] * (ranks > 1)
    command = [*launch, os.path.join(ROOT, 'prepare.py'), f'--sources={({"name": "m", "path": f"{out}/table.csv"},)!r}', f'--out_dir={out}/corpus', f'--codec={out}/codec.nemo',
               f'--tokenizer={ROOT}/tests/data/byte_tokenizer', '--special_tokens={}', '--picture=False', '--check_rows=0', '--max_reject_share=0.0',
               f'--unit_rows={unit_rows}', f'--num_workers={workers}', f'--device={"auto" if device == "cuda" else device}']
    start, begin = time.time(), None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, 'PYTHONUNBUFFERED': '1'}) as p:
        for line in p.stdout:
            begin = begin or line.startswith('codec ') and time.time() or None
    if p.returncode:
        sys.exit(f'prepare.py failed ({p.returncode}): {" ".join(command)}')
    end, corpus = time.time(), Corpus(f'{out}/corpus')
    report(f'prepare.py, {ranks} ranks of {workers} workers', corpus.meta['frames'] * 1024 / 22050, begin, end)
    digest = hashlib.sha256(b''.join(open(f'{out}/corpus/{n}.bin', 'rb').read() for n in ('codes', 'index', 'text'))).hexdigest()
    print(f'    {begin - start:.0f} s more to start; corpus {"as before" if digest == first else "of other bytes" if first else digest[:16]}', flush=True)
    first = first or digest
