"""Trains the tiny offline codec: NeMo's MultiResolutionSTFTEncoder, GroupFiniteScalarQuantizer and causal ResNetDecoder, made small.

    python train_codec.py --data=DIR --out=OUT --minutes=8                     # one GPU (a CPU runs it too: --batch_size=2 --minutes=1)
    python train_codec.py --data=DIR --out=OUT2 --resume=OUT --minutes=8       # a second session from the first one's state
    python train_codec.py --export=OUT/ema.pt --nemo=codec.nemo                # wrap the averaged weights as a .nemo file (needs NeMo, CPU)

DIR holds the flac shards of make_codec_data.py. The networks below are NeMo's, written out without length masks, type checks and host
syncs so that a whole training step fits one CUDA graph; parameter names are NeMo's and --export checks that both compute the same.
All schedules follow wall time, so a faster machine makes more steps of the same plan. codec.md beside this file has the numbers.
"""
import glob, json, math, os, sys, time

# -----------------------------------------------------------------------------
data = 'data'          # folder of flac shards
out = 'out'            # where g.pt, ema.pt, d.pt, opt_g.pt, opt_d.pt and log.jsonl go
resume = ''            # an earlier `out`, or a .nemo (weights only), to go on from; '' starts fresh
export = ''            # an ema.pt to write as --nemo; '' trains
nemo = 'codec.nemo'
minutes = 8.0          # wall time of training, data loading left out
recon_share = 0.25     # share of that time without the discriminators
batch_size = 24        # crops a step
frames = 24            # frames a crop, 1,024 samples each
lr = 5e-4              # generator; decays to lr_end by wall time
lr_end = 5e-5
lr_d = 3e-4            # discriminators, same decay
ema = 0.999            # averaging of the generator's weights, a step
clip = 5.0             # gradient norm, each side
noise_rows = 0.3       # share of rows whose code values get +-0.5 level noise before rounding: codes near a border are then worth little
                       # to the encoder, and the decoder learns to stand the wrong neighbour levels a language model will give it
w_mel = 15.0           # loss weights: multi-resolution log mel, feature matching, least-squares adversarial
w_feature = 2.0
w_adv = 1.0
w_asr = 6.0            # distance of a speech recogniser's features, see Listener; 0 = off
asr = ''               # that recogniser's weights; '' = off
judged = 8             # frames of each crop, its last, that the discriminators see
share_kokoro = 0.32    # rows of a batch from kokoro shards
share_espeak = 0.18    # and from espeak shards; the rest is hibari
seed = 1
# -----------------------------------------------------------------------------
if '--help' in sys.argv: sys.exit(print(__doc__.strip()))
for arg in sys.argv[1:]:
    key, _, value = arg.lstrip('-').partition('=')
    if key not in globals() or key.startswith('_'): sys.exit(f'{arg}: no such setting')
    globals()[key] = type(globals()[key])(value)

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

RATE, HOP, LEVELS, GROUPS = 22050, 1024, [8, 7, 6, 6], 8
# one description of the network for NeMo and for the classes below
ENCODER = dict(out_dim=32, resolutions=[[512, 128, 512], [1024, 256, 1024]], resolution_filter_list=[96, 128],
               down_sample_filter_list=[160, 192], down_sample_rate_list=[2, 2], kernel_size=3, activation='lrelu', pad_mode='replicate')
DECODER = dict(input_dim=32, input_filters=192, pre_up_sample_rates=[4], pre_up_sample_filters=[192], n_hidden_layers=3, hidden_filters=256,
               resblock_up_sample_rates=[4, 4, 4, 4], resblock_up_sample_filters=[96, 48, 24, 12], resblock_up_sample_kernel_size=7,
               kernel_size=3, activation='half_snake', is_causal=True, pad_mode='zeros')

# ---- generator: names and arithmetic of nemo.collections.tts.modules.audio_codec_modules

class Snake(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))
    def forward(self, x):
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)

class HalfSnake(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.n, self.snake_act = channels // 2, Snake(channels // 2)
    def forward(self, x):
        return torch.cat([self.snake_act(x[:, :self.n]), F.leaky_relu(x[:, self.n:])], 1)

class CodecActivation(nn.Module):
    def __init__(self, activation, channels):
        super().__init__()
        self.activation = HalfSnake(channels) if activation == 'half_snake' else nn.LeakyReLU()
    def forward(self, x):
        return self.activation(x)

class Conv(nn.Module):                       # Conv1dNorm and CausalConv1dNorm
    def __init__(self, i, o, kernel, stride=1, activation=None, causal=False, pad_mode='replicate'):
        super().__init__()
        self.causal, self.kernel = causal, kernel
        self.conv = weight_norm(nn.Conv1d(i, o, kernel, stride, padding=0 if causal else (kernel - 1) // 2, padding_mode='zeros' if causal else pad_mode))
        self.activation = CodecActivation(activation, o) if activation else nn.Identity()
    def forward(self, x):
        return self.activation(self.conv(F.pad(x, (self.kernel - 1, 0)) if self.causal else x))

class ConvT(nn.Module):                      # CausalConvTranspose1dNorm: one group an output channel, right end trimmed
    def __init__(self, i, o, stride, activation):
        super().__init__()
        self.stride = stride
        self.conv = weight_norm(nn.ConvTranspose1d(i, o, 2 * stride, stride, groups=o))
        self.activation = CodecActivation(activation, o)
    def forward(self, x):
        return self.activation(self.conv(x)[..., :-self.stride])

class ResidualBlockV2(nn.Module):
    def __init__(self, channels, filters, kernel, activation, causal=False, pad_mode='replicate'):
        super().__init__()
        self.input_conv = Conv(channels, filters, kernel, 1, activation, causal, pad_mode)
        self.skip_conv = Conv(filters, channels, kernel, 1, None, causal, pad_mode)
        self.output_activation = CodecActivation(activation, channels)
    def forward(self, x):
        return self.output_activation(x + self.skip_conv(self.input_conv(x)))

class STFTProcessor(nn.Module):
    def __init__(self, n_fft, hop, win):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer('window', torch.hann_window(win, periodic=False))
    def forward(self, audio):
        pad = (self.n_fft - self.hop) // 2
        spec = torch.stft(F.pad(audio[:, None], (pad, pad), 'replicate')[:, 0], self.n_fft, self.hop, len(self.window), self.window, center=False, return_complex=True)
        return torch.log(spec.abs() + 1.0)

class STFTResidualBlock(nn.Module):
    def __init__(self, resolution, i, o, kernel, activation):
        super().__init__()
        self.down_sample_conv = Conv(i, o, 5, 2, activation)
        self.spec_processor = STFTProcessor(*resolution)
        self.spec_conv = Conv(resolution[0] // 2 + 1, o, kernel)
        self.spec_act = CodecActivation(activation, o)
        self.res_block = ResidualBlockV2(o, o, kernel, activation)
    def forward(self, x, audio):
        return self.res_block(self.spec_act(self.down_sample_conv(x) + self.spec_conv(self.spec_processor(audio))))

class DownSampleResidualBlock(nn.Module):
    def __init__(self, i, o, rate, kernel, activation):
        super().__init__()
        self.down_sample_conv = Conv(i, o, 2 * rate + 1, rate, activation)
        self.res_block = ResidualBlockV2(o, o, kernel, activation)
    def forward(self, x):
        return self.res_block(self.down_sample_conv(x))

class Encoder(nn.Module):                    # MultiResolutionSTFTEncoder
    def __init__(self, out_dim, resolutions, resolution_filter_list, down_sample_filter_list, down_sample_rate_list, kernel_size, activation, pad_mode):
        super().__init__()
        n = resolution_filter_list[0]
        self.pre_spec_processor = STFTProcessor(*resolutions[0])
        self.pre_conv = Conv(resolutions[0][0] // 2 + 1, n, kernel_size, 1, activation)
        self.pre_res_block = ResidualBlockV2(n, n, kernel_size, activation)
        self.stft_blocks, self.down_sample_blocks = nn.ModuleList(), nn.ModuleList()
        for r, f in zip(resolutions[1:], resolution_filter_list[1:]):
            self.stft_blocks.append(STFTResidualBlock(r, n, f, kernel_size, activation)); n = f
        for f, rate in zip(down_sample_filter_list, down_sample_rate_list):
            self.down_sample_blocks.append(DownSampleResidualBlock(n, f, rate, kernel_size, activation)); n = f
        self.post_conv = Conv(n, out_dim, kernel_size)
    def forward(self, audio):
        x = self.pre_res_block(self.pre_conv(self.pre_spec_processor(audio)))
        for block in self.stft_blocks: x = block(x, audio)
        for block in self.down_sample_blocks: x = block(x)
        return self.post_conv(x)

class Decoder(nn.Module):                    # ResNetDecoder, causal
    def __init__(self, input_dim, input_filters, pre_up_sample_rates, pre_up_sample_filters, n_hidden_layers, hidden_filters,
                 resblock_up_sample_rates, resblock_up_sample_filters, resblock_up_sample_kernel_size, kernel_size, activation, is_causal, pad_mode):
        super().__init__()
        n, res = input_filters, lambda c, f, k: ResidualBlockV2(c, f, k, activation, True)
        self.pre_conv = Conv(input_dim, n, kernel_size, causal=True)
        self.pre_resblocks, self.pre_up_sample_layers, self.resblock_up_sample_layers, self.resblocks = (nn.ModuleList() for _ in range(4))
        for rate, f in zip(pre_up_sample_rates, pre_up_sample_filters):
            self.pre_resblocks.append(res(n, 2 * n, kernel_size))
            self.pre_up_sample_layers.append(ConvT(n, f, rate, activation)); n = f
        self.conv_layers = nn.ModuleList(res(n, hidden_filters, kernel_size) for _ in range(n_hidden_layers))
        for rate, f in zip(resblock_up_sample_rates, resblock_up_sample_filters):
            self.resblock_up_sample_layers.append(ConvT(n, f, rate, activation)); n = f
            self.resblocks.append(res(n, 2 * n, resblock_up_sample_kernel_size))
        self.post_conv = Conv(n, 1, resblock_up_sample_kernel_size, causal=True)
    def forward(self, x):
        x = self.pre_conv(x)
        for block, up in zip(self.pre_resblocks, self.pre_up_sample_layers): x = up(block(x))
        for block in self.conv_layers: x = block(x)
        for up, block in zip(self.resblock_up_sample_layers, self.resblocks): x = block(up(x))
        return self.post_conv(x)[:, 0]       # clamped to [-1, 1] outside training

class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.audio_encoder, self.audio_decoder = Encoder(**ENCODER), Decoder(**DECODER)
        levels = torch.tensor(LEVELS * GROUPS).view(1, -1, 1).float()
        scale, offset = (levels - 1) / 2 * (1 - 1e-3), torch.where(levels % 2 == 0, 0.5, 0.0)
        for name, value in dict(middle=levels // 2, scale=scale, offset=offset, shift=(offset / scale).tan()).items():
            self.register_buffer(name, value, persistent=False)
    def quantize(self, z, noise=0.0):        # NeMo's FSQ: [B, 32, T] -> the same, on the grid, straight-through gradient
        z = self.scale * (z.float() + self.shift).tanh() - self.offset
        noisy = z + noise * (torch.rand_like(z) - 0.5) if torch.is_tensor(noise) else z
        noisy = torch.maximum(torch.minimum(noisy, self.scale - self.offset), -self.scale - self.offset)   # stays inside the levels
        return (z + (torch.round(noisy) - z).detach()) / self.middle
    def forward(self, audio, noise=0.0):
        return self.audio_decoder(self.quantize(self.audio_encoder(audio), noise))

# ---- discriminators: periods (HiFi-GAN) and complex STFTs (EnCodec), narrow

class Period(nn.Module):
    def __init__(self, period):
        super().__init__()
        self.period, widths = period, (1, 32, 64, 128, 256, 256)
        self.convs = nn.ModuleList(weight_norm(nn.Conv2d(a, b, (5, 1), (3 if i < 4 else 1, 1), (2, 0))) for i, (a, b) in enumerate(zip(widths, widths[1:])))
        self.post = weight_norm(nn.Conv2d(256, 1, (3, 1), padding=(1, 0)))
    def forward(self, x):
        x = F.pad(x[:, None], (0, -x.shape[-1] % self.period), 'reflect')
        x, maps = x.view(x.shape[0], 1, -1, self.period), []
        for conv in self.convs: maps.append(x := F.leaky_relu(conv(x), 0.1))
        return self.post(x), maps

class Spectral(nn.Module):
    def __init__(self, n_fft):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer('window', torch.hann_window(n_fft))
        shapes = [(2, 16, (3, 9), (1, 2)), (16, 32, (3, 9), (1, 2)), (32, 32, (3, 9), (1, 2)), (32, 32, (3, 3), (1, 1))]
        self.convs = nn.ModuleList(weight_norm(nn.Conv2d(a, b, k, s, (k[0] // 2, k[1] // 2))) for a, b, k, s in shapes)
        self.post = weight_norm(nn.Conv2d(32, 1, (3, 3), padding=1))
    def forward(self, x):
        x = torch.stft(x, self.n_fft, self.n_fft // 4, self.n_fft, self.window, center=True, return_complex=True) * (4 / self.n_fft ** 0.5)
        x, maps = torch.stack([x.real, x.imag], 1).transpose(2, 3).contiguous(memory_format=torch.channels_last), []   # [B, 2, T, bins]
        for conv in self.convs: maps.append(x := F.leaky_relu(conv(x), 0.1))
        return self.post(x), maps

class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Period(p) for p in (2, 3, 5, 7, 11)] + [Spectral(n) for n in (2048, 1024, 512)])
    def forward(self, x):
        return [part(x) for part in self.parts]

# ---- losses

class MelLoss(nn.Module):
    """L1 of log mel magnitudes at seven resolutions, a sine of amplitude 1 reads about 1; below 3e-4 (-70 dB) nothing counts."""
    def __init__(self, sizes=(64, 128, 256, 512, 1024, 2048), mels=(6, 12, 24, 48, 80, 128)):
        super().__init__()
        self.sizes = sizes
        for n, m in zip(sizes, mels):
            edge = lambda f: 2595 * math.log10(1 + f / 700)
            hz = 700 * (10 ** (torch.linspace(edge(0), edge(RATE / 2), m + 2) / 2595) - 1)
            f = torch.linspace(0, RATE / 2, n // 2 + 1)[:, None]
            bank = torch.minimum((f - hz[:-2]) / (hz[1:-1] - hz[:-2]), (hz[2:] - f) / (hz[2:] - hz[1:-1])).clamp(min=0)
            self.register_buffer(f'bank{n}', bank / bank.sum(0).clamp(min=1.0), persistent=False)
            self.register_buffer(f'win{n}', torch.hann_window(n), persistent=False)
    def features(self, audio, n):
        spec = torch.stft(audio, n, n // 4, n, getattr(self, f'win{n}'), center=True, return_complex=True)
        mag = (spec.real.square() + spec.imag.square() + 1e-9).sqrt() * (4 / n)              # |.|, with a gradient at 0
        return torch.log(mag.transpose(1, 2) @ getattr(self, f'bank{n}') + 3e-4)
    def forward(self, real, fake):
        return sum((self.features(real, n) - self.features(fake, n)).abs().mean() for n in self.sizes)

class Listener(nn.Module):
    """What a speech recogniser hears: the encoder of Whisper tiny.en (frozen), real against decoded. NanoCodec's own training has a speech
    model for the same reason. Its 25 ms / 10 ms log mel is taken at 22,050 Hz: 551 and 220 samples, bins of 40.0 Hz as at 16 kHz."""
    def __init__(self, path):
        super().__init__()
        weights = torch.load(path, map_location='cpu', weights_only=True)
        width, self.depth = weights['conv2.weight'].shape[0], 1 + max(int(k.split('.')[1]) for k in weights if k.startswith('blocks.'))
        for k, v in weights.items(): self.register_buffer(k.replace('.', '_'), v.float(), persistent=False)
        angle = torch.arange(1500)[:, None] * torch.exp(-math.log(10000) / (width // 2 - 1) * torch.arange(width // 2))
        self.register_buffer('place', torch.cat([angle.sin(), angle.cos()], 1), persistent=False)
        self.register_buffer('window', torch.hann_window(551), persistent=False)
    def linear(self, x, name):
        return F.linear(x, getattr(self, name + '_weight'), getattr(self, name + '_bias', None))
    def norm(self, x, name):
        return F.layer_norm(x.float(), x.shape[-1:], getattr(self, name + '_weight'), getattr(self, name + '_bias'))
    def spectrum(self, audio, top=None):
        spec = torch.stft(audio, 551, 220, 551, self.window, center=True, return_complex=True)[:, :201]
        x = torch.log10((self.mel @ (spec.real.square() + spec.imag.square()) * (400 / 551) ** 2).clamp(min=1e-10))
        top = x.amax((1, 2), keepdim=True).detach() if top is None else top
        return (torch.maximum(x, top - 8) + 4) / 4, top
    def features(self, x):
        x = F.gelu(F.conv1d(x, self.conv1_weight, self.conv1_bias, padding=1))
        x = F.gelu(F.conv1d(x, self.conv2_weight, self.conv2_bias, stride=2, padding=1)).transpose(1, 2)
        x, seen = x.float() + self.place[:x.shape[1]], []
        for i in range(self.depth):
            b, h = f'blocks_{i}', self.norm(x, f'blocks_{i}_attn_ln')
            q, k, v = (self.linear(h, f'{b}_attn_{n}').unflatten(-1, (-1, 64)).transpose(1, 2) for n in ('query', 'key', 'value'))
            x = x + self.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), f'{b}_attn_out').float()
            x = x + self.linear(F.gelu(self.linear(self.norm(x, f'{b}_mlp_ln'), f'{b}_mlp_0')), f'{b}_mlp_2').float()
            seen.append(F.layer_norm(x, x.shape[-1:]))
        return seen
    def forward(self, real, fake):
        with torch.no_grad():
            x, top = self.spectrum(real)
            truth = self.features(x)
        return sum((a - b).abs().mean() for a, b in zip(truth, self.features(self.spectrum(fake, top)[0])))

# ---- export: the averaged weights in NeMo's own model

def export_nemo(source, target):
    from omegaconf import OmegaConf
    from nemo.collections.tts.models import AudioCodecModel
    modules, losses = 'nemo.collections.tts.modules.audio_codec_modules.', 'nemo.collections.tts.losses.audio_codec_loss.'
    config = dict(sample_rate=RATE, samples_per_frame=HOP, commit_loss_scale=0.0,
                  audio_encoder=dict(_target_=modules + 'MultiResolutionSTFTEncoder', **ENCODER),
                  vector_quantizer=dict(_target_=modules + 'GroupFiniteScalarQuantizer', num_groups=GROUPS, num_levels_per_group=LEVELS),
                  audio_decoder=dict(_target_=modules + 'ResNetDecoder', **DECODER),
                  loss_resolutions=[[1024, 256, 1024]], mel_loss_dims=[80],                     # NeMo builds its losses always; unused here
                  generator_loss=dict(_target_=losses + 'GeneratorSquaredLoss'), discriminator_loss=dict(_target_=losses + 'DiscriminatorSquaredLoss'))
    model, ours = AudioCodecModel(OmegaConf.create(config)).eval(), Codec().eval()
    if source != 'random': ours.load_state_dict(torch.load(source, map_location='cpu', weights_only=True))
    keep = {k: v.half() if v.is_floating_point() else v for k, v in ours.state_dict().items()}
    own = model.state_dict()
    fixed = {k for k in own if k.startswith('vector_quantizer.') or '.padding_total' in k or k.startswith(('mel_loss_fn.', 'stft_loss_fn.'))}
    assert set(own) - fixed == set(keep), set(own) - fixed ^ set(keep)
    nn.Module.load_state_dict(model, keep, strict=False)
    ours.load_state_dict(keep)
    audio = 0.3 * torch.randn(1, 20 * HOP)
    with torch.no_grad():
        theirs, _ = model(audio=audio, audio_len=torch.tensor([audio.shape[1]]))
        error = (theirs - ours(audio).clamp(-1, 1)).abs().max().item()
    assert error < 1e-3, f'NeMo and this file differ by {error}'
    model.half().save_to(target)                                                                # fp16 in the file, read back as fp32
    print(f'{target}: {os.path.getsize(target):,} bytes, {sum(p.numel() for p in ours.parameters()):,} parameters, largest difference to NeMo {error:.1e}')

if export:
    export_nemo(export, nemo)
    sys.exit()

# ---- data: every shard as int16 on the device, one stretch a kind; crops may span two clips

def load_audio(device):
    import soundfile as sf
    from concurrent.futures import ThreadPoolExecutor
    from scipy.signal import resample_poly
    parts, spans, at = [], [], 0
    for kind in ('hibari', 'kokoro', 'espeak'):
        files = sorted(glob.glob(f'{data}/{kind}-*.flac'))
        if not files: sys.exit(f'{data}: no {kind}-*.flac')
        read = lambda path: sf.read(path, dtype='int16')[0]
        with ThreadPoolExecutor(16) as pool: audio = list(pool.map(read, files))
        if kind == 'kokoro':                 # few minutes: replayed 6-12% faster and slower they are other voices
            shift = lambda job: resample_poly(job[0].astype(np.float32), *job[1]).clip(-32767, 32767).astype(np.int16)
            with ThreadPoolExecutor(16) as pool: audio += list(pool.map(shift, [(a, r) for a in audio for r in ((25, 27), (27, 25), (25, 28), (28, 25))]))
        audio = np.concatenate(audio)
        spans.append((at, at + len(audio) - frames * HOP)); at += len(audio)
        parts.append(audio)
        print(f'{kind}: {len(files)} shards, {len(audio) / RATE / 60:.1f} minutes')
    return torch.from_numpy(np.concatenate(parts)).to(device), spans

device = 'cuda' if torch.cuda.is_available() else 'cpu'
torch.manual_seed(seed)
torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
started = time.time()
audio, spans = load_audio(device)
rows = [0, round(batch_size * share_kokoro), round(batch_size * share_espeak)]; rows[0] = batch_size - sum(rows)
low = torch.tensor([s[0] for s, n in zip(spans, rows) for _ in range(n)], device=device)
width = torch.tensor([s[1] - s[0] for s, n in zip(spans, rows) for _ in range(n)], device=device)
steps = torch.arange(frames * HOP, device=device)

net, disc, mel = Codec().to(device), Discriminator().to(device).to(memory_format=torch.channels_last), MelLoss().to(device)
listener = Listener(asr).to(device) if asr and w_asr else None
average = Codec().to(device)
average.load_state_dict(net.state_dict())
fast = device == 'cuda'
lr_g_now, lr_d_now = torch.tensor(0.0, device=device), torch.tensor(0.0, device=device)
opt_g = torch.optim.AdamW(net.parameters(), lr=lr_g_now, betas=(0.8, 0.99), weight_decay=0.0, capturable=fast, fused=fast)
opt_d = torch.optim.AdamW(disc.parameters(), lr=lr_d_now, betas=(0.8, 0.99), weight_decay=0.0, capturable=fast, fused=fast)
files = dict(g=net, ema=average, d=disc, opt_g=opt_g, opt_d=opt_d)
half = lambda x: {k: half(v) for k, v in x.items()} if isinstance(x, dict) else [half(v) for v in x] if isinstance(x, list) else \
    x.to(torch.bfloat16) if torch.is_tensor(x) and x.numel() > 1 else x
if resume.endswith('.nemo'):                 # weights only; moments and discriminators start fresh
    import tarfile
    with tarfile.open(resume) as tar: state = torch.load(tar.extractfile('./model_weights.ckpt'), map_location=device, weights_only=True)
    state = {k: v for k, v in state.items() if k in net.state_dict()}
    net.load_state_dict(state); average.load_state_dict(state)
elif resume:
    for name, thing in files.items():
        if not os.path.exists(f'{resume}/{name}.pt'):
            print(f'{resume}/{name}.pt is not there: starts fresh')
            continue
        state = torch.load(f'{resume}/{name}.pt', map_location=device, weights_only=True)
        if name.startswith('opt'):           # moments were written as bf16; the live lr tensors stay ours
            for s in state['state'].values(): s.update({k: v.float() for k, v in s.items()})
            for group, live in zip(state['param_groups'], thing.param_groups): group['lr'] = live['lr']
        thing.load_state_dict(state)
print(f'generator {sum(p.numel() for p in net.parameters()):,} parameters, discriminators {sum(p.numel() for p in disc.parameters()):,}, '
      f'{batch_size} x {frames} frames a step, data ready after {time.time() - started:.0f} s')

def crops():
    at = low + (torch.rand(batch_size, device=device, dtype=torch.float64) * width).long()
    gain = 0.5 + 0.7 * torch.rand(batch_size, 1, device=device)
    return (audio[at[:, None] + steps].float() * (gain / 32768)).clamp(-1, 1)

def generate(real):
    noise = (torch.rand(batch_size, 1, 1, device=device) < noise_rows).float()
    with torch.autocast(device, torch.bfloat16, enabled=fast, cache_enabled=False):
        return net(real, noise).float()

def update(loss, model, opt):
    opt.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    opt.step()

def follow():                                # the average; buffers never change
    with torch.no_grad():
        torch._foreach_lerp_([p.data for p in average.parameters()], [p.data for p in net.parameters()], 1 - ema)

def judge(x):
    with torch.autocast(device, torch.bfloat16, enabled=fast, cache_enabled=False): return disc(x)

def distance(real, fake):
    near = mel(real, fake)
    if listener is None: return w_mel * near, dict(mel=near.detach())
    with torch.autocast(device, torch.bfloat16, enabled=fast, cache_enabled=False): heard = listener(real, fake)
    return w_mel * near + w_asr * heard, dict(mel=near.detach(), asr=heard.detach())

def step_recon():
    real = crops()
    loss, seen = distance(real, generate(real))
    update(loss, net, opt_g); follow()
    return seen

def step_adversarial():
    real = crops()
    fake = generate(real)
    end, fake_end = real[:, -judged * HOP:], fake[:, -judged * HOP:]
    both = judge(torch.cat([end, fake_end.detach()]))                               # one pass for both halves of the batch
    loss_d = sum((1 - s[:batch_size].float()).square().mean() + s[batch_size:].float().square().mean() for s, _ in both)
    update(loss_d, disc, opt_d)
    for p in disc.parameters(): p.requires_grad_(False)                             # the generator's pass leaves them no gradient
    truth, guess = judge(end), judge(fake_end)
    adv = sum((1 - s.float()).square().mean() for s, _ in guess)
    feature = sum((a - b).abs().float().mean() for (_, x), (_, y) in zip(truth, guess) for a, b in zip(x, y))
    loss, seen = distance(real, fake)
    update(loss + w_feature * feature + w_adv * adv, net, opt_g); follow()
    for p in disc.parameters(): p.requires_grad_(True)
    return dict(seen, d=loss_d.detach(), adv=adv.detach(), feature=feature.detach())

def captured(step):
    """The whole step as one CUDA graph: thousands of small kernels, one launch."""
    if not fast: return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4): step()
    torch.cuda.current_stream().wait_stream(side)
    for opt in (opt_g, opt_d): opt.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): result = step()
    def run():
        graph.replay()
        return result
    return run

held = None
if os.path.exists(f'{data}/eval.flac'):      # mel distance on the held-out speech, averaged weights
    import soundfile as sf
    held = torch.from_numpy(sf.read(f'{data}/eval.flac', dtype='float32')[0])
    held = held[:len(held) // (HOP * 200) * HOP * 200].view(-1, HOP * 200)
    held = held[::max(1, len(held) // (24 if fast else 2))].to(device)

def evaluate():
    if held is None: return {}
    with torch.no_grad():
        z = average.quantize(average.audio_encoder(held))
        fake = average.audio_decoder(z).clamp(-1, 1)
        used = [len((z[:, i] * average.middle[0, i]).round().unique()) for i in range(32)]
    return dict(eval_mel=round(mel(held, fake).item(), 4), levels_used=sum(used), of=sum(LEVELS) * GROUPS)

def save():
    os.makedirs(out, exist_ok=True)
    for name, thing in files.items():
        state = half(thing.state_dict()) if name.startswith('opt') else thing.state_dict()
        torch.save(state, f'{out}/{name}.pt.part'); os.replace(f'{out}/{name}.pt.part', f'{out}/{name}.pt')

os.makedirs(out, exist_ok=True)
log = open(f'{out}/log.jsonl', 'a')
started, n, step, phase, next_log, next_save = time.time(), 0, None, None, 15.0, 120.0
while (spent := time.time() - started) < minutes * 60:
    share = spent / (minutes * 60)
    want = step_recon if share < recon_share else step_adversarial
    decay = (lr_end / lr) ** share
    lr_g_now.fill_(lr * decay); lr_d_now.fill_(lr_d * decay)
    if want is not phase:
        step, phase = None, want             # frees the old graph's memory
        step = captured(want)
    result = step()
    n += 1
    if n % 10 == 0 and fast: torch.cuda.synchronize()                              # wall time stays true
    if spent > next_log:
        values = {k: round(v.item(), 4) for k, v in result.items()}
        if not all(math.isfinite(v) for v in values.values()): sys.exit(f'step {n}: {values}')
        line = dict(step=n, seconds=round(spent), phase=phase.__name__, **values, **(evaluate() if int(next_log) % 60 < 15 or not fast else {}))
        print(json.dumps(line), flush=True); log.write(json.dumps(line) + '\n'); log.flush()
        next_log += 15
    if spent > next_save: save(); next_save += 120
save()
line = dict(step=n, seconds=round(time.time() - started), **evaluate())
print(json.dumps(line)); log.write(json.dumps(line) + '\n')
