"""NanoCodec's frames: index arithmetic in plain torch, and the codec itself through NeMo.

    codec = NanoCodec('assets/tiny/codec.nemo')     # a file, or a Hub name: nvidia/nemo-nano-codec-22khz-1.89kbps-21.5fps
    codes = codec.encode([waveform])                # float32 at 22,050 Hz -> [uint16 [T, 8]], T = ceil(samples / 1024)
    audio = codec.decode(codes)                     # -> [float32 [T * 1024]]
    for piece in codec.stream(chunks): ...          # the same audio, chunk by chunk
    codec.record([(1, 10), (1, codec.context + 10)])        # before that, on a GPU: a chunk of up to 10 frames is one launch

A frame is 8 packed indices (one a group) or 32 channels (4 a group): index k unfolds little-endian, code_d = k // prod(L_0..L_{d-1}) mod L_d,
channel = group * 4 + d. NeMo is imported only when a NanoCodec is made.
"""
import contextlib, functools, io, logging, math, os, warnings, wave
import numpy as np
import torch
from torch.nn.utils import parametrize

LEVELS = (8, 7, 6, 6)   # of one group: 2,016 values
GROUPS = 8

# ----------------------------------------------------------------------------- arithmetic
# Python numbers only, no tensor is made from a list: nothing here copies to the device or waits for it.

def unfold(packed, levels=LEVELS):
    """Packed indices [..., groups] -> codes int64 [..., groups * len(levels)]. Values are not checked, see check_codes."""
    packed = packed.long()
    return torch.stack([packed // math.prod(levels[:d]) % n for d, n in enumerate(levels)], -1).flatten(-2)

def fold(codes, levels=LEVELS):
    """Codes [..., groups * len(levels)] -> packed indices int64 [..., groups]."""
    codes = codes.long().unflatten(-1, (-1, len(levels)))
    return sum(codes[..., d] * math.prod(levels[:d]) for d in range(len(levels)))

def dequantize(codes, levels=LEVELS):
    """Codes [..., channels] -> float32 values (code - L // 2) / (L // 2), what the decoder reads: -1 to 1, where L is even to 1 - 2 / L."""
    codes = codes.unflatten(-1, (-1, len(levels)))
    return torch.stack([(codes[..., d] - n // 2).float() / (n // 2) for d, n in enumerate(levels)], -1).flatten(-2)

def check_codes(codes, levels=LEVELS, groups=GROUPS):
    """Raises ValueError, naming the first place, unless codes [..., groups] (packed) or [..., groups * len(levels)] are integers in range."""
    codes = codes.cpu().numpy() if torch.is_tensor(codes) else np.asarray(codes)
    limits = {groups: [math.prod(levels)] * groups, groups * len(levels): list(levels) * groups}
    if codes.ndim < 1 or codes.shape[-1] not in limits or not np.issubdtype(codes.dtype, np.integer):
        raise ValueError(f'codes {list(codes.shape)} {codes.dtype}: expected integers [..., {groups}] packed or [..., {groups * len(levels)}]')
    limit = limits[codes.shape[-1]]
    bad = (codes < 0) | (codes >= np.array(limit))
    if bad.any():
        *frame, column = np.argwhere(bad)[0].tolist()
        kind = 'group' if len(limit) == groups else 'channel'
        raise ValueError(f'code {codes[(*frame, column)]} at frame {", ".join(map(str, frame)) or 0}, {kind} {column}: expected 0 to {limit[column] - 1}')

# ----------------------------------------------------------------------------- files for ears and eyes

def save_wav(path, audio, rate):
    """float -1 to 1 -> 16-bit mono wav; what is beyond is clipped. Whole or not at all; OSError where it cannot be written."""
    pcm = (np.clip(np.asarray(audio, np.float32), -1, 1) * 32767).round().astype('<i2')
    data = io.BytesIO()
    with wave.open(data, 'wb') as f:
        f.setparams((1, 2, rate, 0, 'NONE', ''))
        f.writeframes(pcm.tobytes())
    try:
        with open(f'{path}.tmp', 'wb') as f:
            f.write(data.getvalue())
        os.replace(f'{path}.tmp', path)
    except OSError:
        if os.path.exists(f'{path}.tmp'):
            os.remove(f'{path}.tmp')
        raise

def save_spectrogram(path, audio, rate, title=''):
    """A picture of the log magnitude spectrogram, 70 dB deep, about 200 pixels a second."""
    from matplotlib.figure import Figure                                             # not pyplot: no display, no global state
    n = 512
    audio = np.pad(np.asarray(audio, np.float32), (0, max(0, n - len(audio))))
    frames = np.lib.stride_tricks.sliding_window_view(audio, n)[::n // 4] * np.hanning(n)
    decibel = 20 * np.log10(np.abs(np.fft.rfft(frames)).T / (n / 4) + 1e-5)
    figure = Figure(figsize=(min(40, max(6, 2 * len(audio) / rate)), 4), dpi=100, layout='constrained')
    axes = figure.subplots()
    axes.imshow(decibel, origin='lower', aspect='auto', cmap='magma', vmin=decibel.max() - 70, extent=(0, len(audio) / rate, 0, rate / 2000))
    axes.set(title=title.replace('$', r'\$'), xlabel='seconds', ylabel='kHz')         # an odd $ would start a formula
    figure.savefig(path)

# ----------------------------------------------------------------------------- the codec

@contextlib.contextmanager
def _quiet():
    """NeMo and its telemetry log and warn at import and construction, also at level error where nothing is wrong."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(before)

def _load(name, device):
    try:
        from nemo.collections.tts.models import AudioCodecModel
        from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
        from omegaconf import OmegaConf
    except ImportError as e:
        raise ImportError(f'{e}: the codec runs in NeMo, pip install -r requirements.txt') from None

    class Connector(SaveRestoreConnector):
        def load_instance_with_state_dict(self, instance, state_dict, strict):       # AudioCodecModel itself ignores every mismatch
            missing = [k for k in instance.state_dict() if k.startswith(('audio_encoder.', 'audio_decoder.')) and k not in state_dict]
            if missing: raise ValueError(f'{name}: no weights {missing[0]} in the file ({len(missing)} missing)')
            super().load_instance_with_state_dict(instance, state_dict, strict)

    load = functools.partial(AudioCodecModel.restore_from if name.endswith('.nemo') else AudioCodecModel.from_pretrained, name, map_location=device)
    config = load(return_config=True, save_restore_connector=Connector())
    OmegaConf.set_struct(config, False)
    # Training-only parts. One of the discriminators, the speaker loss and the distillation loss each build another model and fetch its
    # weights from the Hub; none of them takes part in encoding or decoding.
    config.pop('discriminator', None)
    config.use_scl_loss = config.use_slm_loss = False
    return load(override_config_path=config, strict=False, save_restore_connector=Connector())

def _steady():
    """Of cuDNN only what gives the same bits each time: some of its transposed convolutions add in any order."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=torch.backends.cudnn.allow_tf32)

def _lean(decoder):
    """NeMo's causal convolutions keep their padding in tensors on the device, for which the host waits twice at each (184 times a call), and then clear what lies
    behind a row's length. Here all rows of a batch are equally long: the same bits without that."""
    def forward(m, left, inputs, input_len): return m.activation(m.conv(m._pad1d(inputs, (left, 0), m.extra_pad_mode)))
    for m in decoder.modules():
        if type(m).__name__ == 'CausalConv1dNorm' and m.conv.stride == (1,): m.forward = functools.partial(forward, m, m.padding_total.item())

class NanoCodec:
    def __init__(self, name_or_path, device='cpu'):
        self.id, self.device = str(name_or_path), torch.device(device)
        beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), self.id)   # a checkpoint names assets/tiny/codec.nemo, used from elsewhere
        name = self.id if os.path.exists(self.id) or not self.id.endswith('.nemo') or not os.path.exists(beside) else beside
        if name.endswith('.nemo') and not os.path.isfile(name): raise FileNotFoundError(f'{name}: no such codec file')
        if not name.endswith('.nemo') and (os.path.isfile(name) or name.count('/') != 1): raise ValueError(f'codec {name}: neither a .nemo file nor a Hub name (user/model)')
        try:
            with _quiet(): self.model = _load(name, self.device).eval().requires_grad_(False)
            for m in [m for m in self.model.modules() if parametrize.is_parametrized(m, 'weight')]:      # weight norm: computed once, not in each call; the same bits
                parametrize.remove_parametrizations(m, 'weight')
            _lean(self.model.audio_decoder)
        except ImportError:
            raise
        except Exception as e:                                                       # tarfile's, yaml's, the Hub's, torch's own types, some over many lines
            line = ' '.join(f'{e}'.split()) or type(e).__name__
            raise (OSError if isinstance(e, OSError) else ValueError)(line if line.startswith(name) else f'codec {name}: {line}') from e
        self.limit = 256 if self.device.type == 'cpu' else 8192                      # frames a batch; on a CPU more than its cache holds is slower
        quantizer = self.model.vector_quantizer
        self.sample_rate, self.hop = self.model.sample_rate, self.model.samples_per_frame
        self.groups, self.levels = quantizer.num_groups, tuple(quantizer.fsqs[0].num_levels.flatten().tolist())
        self.frame_rate = self.sample_rate / self.hop                                # 21.533 a second, not 21.5
        self.recorded = {}                                                           # (rows, frames): graph, its codes, its audio

    def _batches(self, lengths):
        """Rows of equal length share a batch; nothing is ever padded to another row's length. NeMo's convolutions
        repeat the last real sample past the end and padding would be seen instead, so padded batches change the last codes."""
        rows = sorted(range(len(lengths)), key=lambda i: lengths[i])
        while rows:
            n = max(1, self.limit // max(1, lengths[rows[0]]))
            batch = [i for i in rows[:n] if lengths[i] == lengths[rows[0]]]
            yield batch
            rows = rows[len(batch):]

    @torch.inference_mode()
    def encode(self, audio):
        """Waveforms (1-D, float, mono, self.sample_rate) -> packed codes uint16 [T, groups], in the same order; the last frame is filled up with zeros.
        A clip's codes do not depend on the clips beside it."""
        audio = [torch.as_tensor(a, dtype=torch.float32) for a in audio]
        for i, a in enumerate(audio):
            if a.ndim != 1 or not len(a): raise ValueError(f'clip {i}: {list(a.shape)}, expected one channel and at least one sample')
            if not torch.isfinite(a).all(): raise ValueError(f'clip {i}: not finite at sample {(~torch.isfinite(a)).nonzero()[0].item()}')
        lengths, codes = [-(-len(a) // self.hop) for a in audio], [None] * len(audio)
        for rows in self._batches(lengths):
            size = lengths[rows[0]] * self.hop
            batch = torch.stack([torch.nn.functional.pad(audio[i], (0, size - len(audio[i]))) for i in rows]).to(self.device)
            with _steady(): tokens, _ = self.model.encode(audio=batch, audio_len=torch.full((len(rows),), size, device=self.device))   # [B, groups, T]
            for i, t in zip(rows, tokens.transpose(1, 2).cpu().numpy()): codes[i] = t.astype(np.uint16)
        return codes

    @torch.inference_mode()
    def record(self, shapes):
        """CUDA graphs for batches of (rows, frames): launched one by one from Python, the hundreds of small kernels take longer to start than to run. A stream of pieces of
        n frames needs n and context + n. Not for two threads at once: the graphs share their memory. On a CPU nothing is recorded."""
        self.context                                                                 # measured now; a decoder that hears the future is refused
        if self.device.type != 'cuda': return
        with torch.cuda.device(self.device):
            side, pool = torch.cuda.Stream(priority=-1), torch.cuda.graph_pool_handle()      # kernels keep it: ahead of a model that speaks on
            for shape in sorted(set(shapes), key=math.prod, reverse=True):           # the others fit into the memory of the largest
                codes = torch.zeros(*shape, self.groups * len(self.levels), dtype=torch.int64, device=self.device)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(3): self._run(codes)                              # cuDNN chooses, TorchScript compiles: neither may happen in a recording
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode='thread_local'): audio = self._run(codes)     # other threads may go on
                graph.replay()                                                       # the first one also uploads it
                self.recorded[shape] = graph, codes, audio
            torch.cuda.synchronize()

    @torch.inference_mode()
    def _decode(self, codes):
        """codes int64 [B, T, channels] on the device -> audio [B, T * hop], by the smallest recording that they fit in. What lies beside and
        behind them there is of no matter: rows are independent, and the decoder does not hear the future."""
        rows, frames = codes.shape[:2]
        fits = [shape for shape in self.recorded if shape[0] >= rows and shape[1] >= frames]
        if not fits: return self._run(codes)
        graph, given, audio = self.recorded[min(fits, key=math.prod)]
        given[:rows, :frames] = codes
        graph.replay()
        return audio[:rows, :frames * self.hop].clone()                              # the next replay writes over it

    def _run(self, codes):
        """Straight from the channels: no packed index, no NeMo quantizer."""
        lengths = torch.full((len(codes),), codes.shape[1], device=self.device)
        with _steady(): return self.model.decode_audio(inputs=dequantize(codes, self.levels).transpose(1, 2), input_len=lengths)[0]

    def _channels(self, codes):
        """One clip's packed or unfolded frames, any integer type -> int64 [T, channels] on the device; ValueError if out of range."""
        check_codes(codes, self.levels, self.groups)
        codes = torch.as_tensor(np.asarray(codes.cpu() if torch.is_tensor(codes) else codes).astype(np.int64), device=self.device)
        if codes.ndim != 2: raise ValueError(f'codes {list(codes.shape)}: expected [frames, {self.groups} or {self.groups * len(self.levels)}]')
        return unfold(codes, self.levels) if codes.shape[1] == self.groups else codes

    @torch.inference_mode()
    def decode(self, codes):
        """Clips of packed codes [T, groups] or channels [T, groups * len(levels)] -> float32 [T * hop] in -1 to 1, in the same order."""
        codes = [self._channels(c) for c in codes]
        audio = [np.zeros(0, np.float32)] * len(codes)
        for rows in self._batches([len(c) for c in codes]):
            if len(codes[rows[0]]):
                for i, a in zip(rows, self._decode(torch.stack([codes[i] for i in rows])).float().cpu().numpy()): audio[i] = a
        return audio

    @functools.cached_property
    def context(self):
        """Frames of the past that the decoder hears, measured: one of 96 random frames is changed, the last changed sample counts."""
        at, shape = 16, (2, 96, self.groups)                                         # two draws; a fixed seed of their own
        with torch.inference_mode():
            codes = unfold(torch.randint(math.prod(self.levels), shape, generator=torch.Generator().manual_seed(0)), self.levels).to(self.device)
            other = codes.clone()
            other[:, at] = codes[:, 0]
            changed = ((self._decode(other) - self._decode(codes)).abs() > 1e-6).any(0).nonzero()[:, 0] // self.hop - at
        early, reach = changed.min().item(), changed.max().item()
        if early < 0: raise ValueError(f'{self.id}: its decoder looks {-early} frames ahead, stream() needs a causal one')
        if reach > shape[1] - at - 2: raise ValueError(f'{self.id}: its decoder hears more than {shape[1] - at - 2} frames back')
        return reach + 1                                                             # one to spare

    @torch.inference_mode()
    def stream(self, chunks):
        """Iterator of code chunks [n, groups] or [n, channels] -> yields float32 [n * hop]. Each chunk is decoded behind the last `context` frames,
        all that a causal decoder hears, so the pieces equal one decode of the whole but for float rounding (under 1e-4; tested)."""
        context, past = self.context, None                                           # measured before the first piece: a pause after it would be heard
        for chunk in chunks:
            new = self._channels(chunk)
            if not len(new): continue
            codes = new if past is None else torch.cat([past, new])
            yield self._decode(codes[None])[0, -len(new) * self.hop:].float().cpu().numpy()
            past = codes[-context:]
