"""
The whole model in one file: Qwen3.5 text backbone, frame embedding, 32 code heads and a stop head, Q-Former speaker
prefix, losses, trajectory log-probabilities and DPO, batched generation, checkpoint read and write.

One row of the model's input, in order:

    [ prefix (8 vectors) | SOT text EOT SOS | frame 0 .. frame n-1 ]

A frame is 32 FSQ codes (8 groups of levels 8,7,6,6). Output at SOS predicts frame 0, output at frame j predicts frame
j+1, all 32 channels at once; the stop head says 1 at the last frame. Rows of a batch are packed end to end into one
sequence of N tokens (see `pack`): no padding, attention never crosses rows, positions start at 0 in each row.

Shape letters: N packed tokens, F frames, B rows, d width, K = 32 channels, L = 8 codes at most in a channel.
"""
import functools, itertools, json, math, os, shutil, sys
from dataclasses import dataclass, field, fields

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from codec import dequantize, unfold

# -----------------------------------------------------------------------------
# configuration

@dataclass
class Config:
    """Everything needed to rebuild a model; `gepard_config.json` holds it in the published layout."""
    # backbone (Qwen3.5, every layer full attention); defaults are the released 14-layer base
    vocab_size: int = 248320
    hidden_size: int = 1024
    intermediate_size: int = 3584
    num_hidden_layers: int = 14
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int = 32768
    # audio in and out
    levels: list = field(default_factory=lambda: [8, 7, 6, 6] * 8)  # codes of each channel; 216 in all
    audio_embed_dim: int = 32
    stop_loss_weight: float = 2.0
    stop_pos_weight: float = 25.0
    # speaker prefix; 0 queries = a model without voice cloning
    num_queries: int = 8
    prefix_layers: int = 2
    prefix_heads: int = 8
    prefix_ffn: int = 4
    prefix_dropout: float = 0.1
    null_prob: float = 0.15         # share of training rows whose prefix is replaced by the null prefix
    supcon_hidden: int = 128        # projection head of the contrastive loss; 0 = no projection
    supcon_dim: int = 128
    special_tokens: dict = field(default_factory=lambda: dict(
        tokeniser_length=248077, start_of_text=248073, end_of_text=248074, start_of_speech=248070,
        end_of_speech=248071, tts_pad=248076))
    codec: dict = field(default_factory=lambda: dict(
        num_layers=8, fsq_levels=[8, 7, 6, 6], do_unfold=True, frame_rate_hz=21.5, sample_rate=22050,
        codec_id='nvidia/nemo-nano-codec-22khz-1.89kbps-21.5fps'))
    text_repetition: dict = field(default_factory=lambda: dict(
        enabled=False, target_text_tokens=16, apply_below=13, max_repeats=8, mixed_keep_prob=0.25, seed=0))

    def backbone(self):
        """config.json: what transformers (nested rotary factor) and vLLM (flat one) read."""
        return dict(
            architectures=['Qwen3_5ForCausalLM'], model_type='qwen3_5_text', vocab_size=self.vocab_size,
            hidden_size=self.hidden_size, intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers, num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads, head_dim=self.head_dim, hidden_act='silu',
            rms_norm_eps=self.rms_norm_eps, max_position_embeddings=self.max_position_embeddings,
            attention_bias=False, attention_dropout=0.0, tie_word_embeddings=True, use_cache=True,
            layer_types=['full_attention'] * self.num_hidden_layers,
            partial_rotary_factor=self.partial_rotary_factor, rope_theta=self.rope_theta,
            rope_parameters=dict(rope_type='default', rope_theta=self.rope_theta,
                                 partial_rotary_factor=self.partial_rotary_factor))

    def to_json(self, dtype):
        """gepard_config.json, the published layout (dict)."""
        return dict(
            model_type='gepard', backbone_config=self.backbone(),
            audio_heads={f'level_audio_{i}': n for i, n in enumerate(self.levels)},
            audio_embed_dim=self.audio_embed_dim, partial_rotary_factor=self.partial_rotary_factor,
            special_tokens=self.special_tokens, stop_loss_weight=self.stop_loss_weight,
            stop_pos_weight=self.stop_pos_weight, model_dtype=dtype, codec=self.codec,
            text_repetition=self.text_repetition,
            voice_cloning=dict(
                enabled=self.num_queries > 0,
                compressor=dict(num_queries=self.num_queries, num_layers=self.prefix_layers,
                                num_heads=self.prefix_heads, d_model=self.hidden_size,
                                ffn_hidden_size_multiplier=self.prefix_ffn, dropout=self.prefix_dropout),
                training=dict(
                    cfg_dropout_prob=self.null_prob,
                    supcon=dict(enabled=self.supcon_dim > 0, use_projection=self.supcon_hidden > 0,
                                projection_hidden_dim=self.supcon_hidden, projection_dim=self.supcon_dim),
                    diversity_loss=dict(enabled=self.num_queries > 0))))


def backbone_fields(cfg, where):
    """The Config fields that a Qwen3.5 config.json (dict) settles. Any layer that is not full attention is an error:
    transformers fills a missing `layer_types` with linear attention in 3 of 4 layers, so it may not be missing."""
    cfg = cfg.get('text_config', cfg)
    if 'layer_types' not in cfg:
        raise ValueError(f'{where}: no layer_types; write "full_attention" for each layer if that is what they are')
    other = sorted({t for t in cfg['layer_types'] if t != 'full_attention'})
    if other:
        raise ValueError(f'{where}: layer_types has {other}; this backbone has full attention only')
    if len(cfg['layer_types']) != cfg['num_hidden_layers']:
        raise ValueError(f"{where}: {len(cfg['layer_types'])} layer_types, {cfg['num_hidden_layers']} layers")
    for key, want in (('hidden_act', 'silu'), ('attention_bias', False)):
        if cfg.get(key, want) != want:
            raise ValueError(f'{where}: {key} is {cfg[key]!r}, only {want!r} is supported')
    rope = cfg.get('rope_parameters') or {}
    if rope.get('rope_type', 'default') != 'default':
        raise ValueError(f"{where}: rope_type {rope['rope_type']!r}, only 'default' is supported")
    for key in ('rope_theta', 'partial_rotary_factor'):
        if key not in rope and key not in cfg:
            raise ValueError(f'{where}: no {key}, neither flat nor in rope_parameters')
    keys = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads',
            'num_key_value_heads', 'head_dim', 'rms_norm_eps', 'max_position_embeddings')
    missing = [k for k in keys if k not in cfg]
    if missing:
        raise ValueError(f'{where}: missing {missing}')
    return {k: cfg[k] for k in keys} | {k: rope.get(k, cfg.get(k)) for k in ('rope_theta', 'partial_rotary_factor')}


def check_kinds(cfg, where):
    """ValueError where a number of a Config is none."""
    keys = {'prefix_layers': 'num_layers', 'prefix_heads': 'num_heads', 'prefix_ffn': 'ffn_hidden_size_multiplier', 'prefix_dropout': 'dropout', 'null_prob': 'cfg_dropout_prob'}
    for f in fields(cfg):
        if f.type in (int, float) and type(v := getattr(cfg, f.name)) not in (int, f.type):
            raise ValueError(f'{where}: {keys.get(f.name, f.name)} is {v!r}, not {f.type.__name__}')


def config_from_json(j, where='gepard_config.json'):
    """Config from the published layout. Raises ValueError naming the file and key."""
    try:
        vc = j.get('voice_cloning') or {'enabled': False}
        c, t = vc.get('compressor', {}), vc.get('training', {})
        sup = t.get('supcon', {'enabled': False})
        heads = j['audio_heads']
        if [int(k.rsplit('_', 1)[1]) for k in heads] != list(range(len(heads))):
            raise ValueError(f'{where}: audio_heads are out of order: {list(heads)[:4]}...')
        cfg = Config(
            **backbone_fields(j['backbone_config'], where), levels=list(heads.values()),
            audio_embed_dim=j['audio_embed_dim'], stop_loss_weight=j['stop_loss_weight'],
            stop_pos_weight=j['stop_pos_weight'], num_queries=c['num_queries'] if vc['enabled'] else 0,
            special_tokens=j['special_tokens'], codec=j['codec'], text_repetition=j['text_repetition'])
        check_kinds(cfg, where)
        if vc['enabled']:
            if c.get('d_model', cfg.hidden_size) != cfg.hidden_size:
                raise ValueError(f"{where}: compressor d_model {c['d_model']} is not the backbone's {cfg.hidden_size}")
            cfg.prefix_layers, cfg.prefix_heads = c['num_layers'], c['num_heads']
            cfg.prefix_ffn, cfg.prefix_dropout = c['ffn_hidden_size_multiplier'], c['dropout']
            cfg.null_prob = t.get('cfg_dropout_prob', 0.0)
        projected = bool(vc['enabled'] and sup['enabled'] and sup['use_projection'])
        cfg.supcon_hidden = sup['projection_hidden_dim'] if projected else 0
        cfg.supcon_dim = (sup['projection_dim'] if projected else cfg.hidden_size) if sup['enabled'] else 0
        check_kinds(cfg, where)
        if cfg.num_queries and (cfg.prefix_heads < 1 or cfg.hidden_size % cfg.prefix_heads):
            raise ValueError(f'{where}: compressor num_heads {cfg.prefix_heads} does not divide d_model {cfg.hidden_size}')
        # what is used later, not here: named now
        [cfg.codec[k] for k in ('codec_id', 'sample_rate')], repeats(1, cfg.text_repetition)
        if type(cfg.text_repetition['enabled']) is not bool:
            raise ValueError(f"{where}: text_repetition enabled is {cfg.text_repetition['enabled']!r}, not true or false")
        if list(cfg.codec['fsq_levels']) * cfg.codec['num_layers'] != cfg.levels:
            raise ValueError(f"{where}: audio_heads are not codec fsq_levels {cfg.codec['fsq_levels']} x num_layers {cfg.codec['num_layers']}")
        for key in ('start_of_text', 'end_of_text', 'start_of_speech'):
            if not 0 <= cfg.special_tokens[key] < cfg.vocab_size:
                raise ValueError(f'{where}: {key} {cfg.special_tokens[key]} is not an id below vocab_size {cfg.vocab_size}')
        return cfg
    except KeyError as e:
        raise ValueError(f'{where}: missing key {e}') from None
    except (TypeError, AttributeError, IndexError) as e:
        raise ValueError(f'{where}: a value of the wrong kind ({e})') from None

# -----------------------------------------------------------------------------
# text layout

def repeats(n, repetition):
    """How often a text of n tokens stands in the prompt. Below ~13 text tokens the 8 prefix vectors drown the text
    and the model babbles, so short texts are repeated up to `target_text_tokens`."""
    if not repetition['enabled'] or n == 0 or n >= repetition['apply_below']:
        return 1
    return min(math.ceil(repetition['target_text_tokens'] / n), repetition['max_repeats'])


def training_repeats(n, repetition, uniform):
    """`repeats` with the training coin: a short row keeps one copy with probability mixed_keep_prob, so that the model
    can still read a text that stands once. uniform() draws from [0, 1), only when there is something to decide."""
    copies = repeats(n, repetition)
    return 1 if copies > 1 and repetition['mixed_keep_prob'] > 0 and uniform() < repetition['mixed_keep_prob'] else copies


def layout(ids, special, copies=1):
    """Token ids of a text -> text region (SOT text EOT) x copies, then SOS. Context copies are never voiced."""
    one = [special['start_of_text'], *ids, special['end_of_text']]
    return one * copies + [special['start_of_speech']]

def prompt(ids, cfg):
    """Token ids of a text -> what `generate` takes: laid out, repeated as the checkpoint says."""
    return layout(ids, cfg.special_tokens, repeats(len(ids), cfg.text_repetition))

# -----------------------------------------------------------------------------
# backbone: parameter names are those of transformers' Qwen3_5TextModel

class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight), in fp32. offset 1 in Qwen3.5 (weight starts at 0), 0 in the Q-Former."""
    def __init__(self, dim, eps, offset):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim) if offset else torch.ones(dim))
        self.eps, self.offset = eps, offset

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (self.offset + self.weight.float())).to(x.dtype)


def rotary(position, cfg):
    """Rotary angles at integer positions [N] -> cos, sin [N, 1, rotary dims], fp32 (rotate-half layout)."""
    dims = int(cfg.head_dim * cfg.partial_rotary_factor)
    freq = cfg.rope_theta ** (-torch.arange(0, dims, 2, device=position.device, dtype=torch.float32) / dims)
    angle = (position.float()[:, None] * freq).repeat(1, 2)[:, None]
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Apply rotary angles to the first dims of x [N, heads, head_dim], in fp32."""
    dims = cos.shape[-1]
    y, rest = x[..., :dims].float(), x[..., dims:]
    a, b = y.chunk(2, -1)
    y = (y * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def side_by_side(x, *linears):
    """Bias-free linears that read the same x, as one matrix product: fewer and larger GEMMs. One by one for adapters, and for a row
    or two, which do not repay joining the weights."""
    if len(x) <= 2 or any(type(m) is not nn.Linear for m in linears):
        return [m(x) for m in linears]
    return F.linear(x, torch.cat([m.weight for m in linears])).split([m.out_features for m in linears], -1)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        d, h, kv, hd = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        self.q_proj = nn.Linear(d, h * hd * 2, bias=False)  # per head: [query | output gate]
        self.k_proj = nn.Linear(d, kv * hd, bias=False)
        self.v_proj = nn.Linear(d, kv * hd, bias=False)
        self.o_proj = nn.Linear(h * hd, d, bias=False)
        self.q_norm = RMSNorm(hd, cfg.rms_norm_eps, 1)
        self.k_norm = RMSNorm(hd, cfg.rms_norm_eps, 1)
        self.head_dim = hd

    def forward(self, x, cos, sin, attend, where):
        n, hd = x.shape[0], self.head_dim
        q, k, v = (t.unflatten(-1, (-1, w)) for t, w in zip(side_by_side(x, self.q_proj, self.k_proj, self.v_proj), (2 * hd, hd, hd)))
        q, gate = q.chunk(2, -1)                                    # [N, heads, head_dim] each
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        y = attend(where, q, k, v)                                  # [N, heads, head_dim]
        return self.o_proj((y * torch.sigmoid(gate)).reshape(n, -1))


class SwiGLU(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(d, hidden, bias=False)
        self.up_proj = nn.Linear(d, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, d, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, 1)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, 1)
        self.mlp = SwiGLU(cfg.hidden_size, cfg.intermediate_size)

    def forward(self, x, cos, sin, attend, where):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend, where)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Qwen3.5 text decoder without lm_head. `attend(where, q, k, v)` says which tokens see which: `packed_attention` in
    training, a key-value cache in generation; the layers are the same."""
    def __init__(self, cfg):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, 1)
        self.cfg = cfg
        self.recompute = False      # True: a layer runs again in the backward pass instead of keeping its insides

    def forward(self, x, position, attend, where=None, states=None):
        """x [N, d] input vectors, position [N] -> [N, d]. where: what `attend` is told, by default the layer's number;
        states: a list that each layer's output is put into."""
        cos, sin = rotary(position, self.cfg)
        for i, layer in enumerate(self.layers):
            args = x, cos, sin, attend, i if where is None else where
            x = checkpoint(layer, *args, use_reentrant=False) if self.recompute and self.training else layer(*args)
            if states is not None:
                states.append(x)
        return self.norm(x)


def dot_product_attention(q, k, v, mask=None, **options):
    """torch's, on a CPU always in float32: its 16-bit kernel takes several times as long there, backward."""
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, mask, **options)
    with torch.autocast('cpu', enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, **options).to(q.dtype)


def packed_attention(where, q, k, v):
    """Causal attention inside each packed row. where: row boundaries [rows + 1] int32, length of the longest row at most;
    q [N, heads, head_dim], k and v [N, kv heads, head_dim] -> [N, heads, head_dim]"""
    cu_seqlens, max_len = where
    if q.is_cuda and q.dtype != torch.float32:                      # the flash kernel knows 16-bit only; torch's varlen_attn, without its Python
        return torch.ops.aten._flash_attention_forward(q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, True, False)[0]
    # exact: rows side by side, padded on the right; with a causal mask no real query ever sees the padding
    b, n = len(cu_seqlens) - 1, len(q)
    row = torch.repeat_interleave(torch.arange(b, device=q.device), cu_seqlens.diff().long(), output_size=n)
    slot = torch.arange(n, device=q.device) - cu_seqlens[:-1].long()[row]
    q, k, v = (t.new_zeros(b, max_len, *t.shape[1:]).index_put((row, slot), t).transpose(1, 2) for t in (q, k, v))
    y = dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)             # [B, heads, max_len, head_dim]
    return y.transpose(1, 2)[row, slot]

# -----------------------------------------------------------------------------
# speaker prefix: Q-Former over the reference clip's codes

class PrefixAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x, memory, mask=None):
        """x [B, Q, d], memory [B, T, d], mask [B, T] True where real -> [B, Q, d]"""
        q, k, v = (p(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for p, t in ((self.q_proj, x), (self.k_proj, memory), (self.v_proj, memory)))
        y = dot_product_attention(q, k, v, None if mask is None else mask[:, None, None])
        return self.out_proj(y.transpose(1, 2).flatten(2))


class PrefixBlock(nn.Module):
    def __init__(self, d, heads, mult, p):
        super().__init__()
        self.norm_self, self.norm_cross, self.norm_ffn = (RMSNorm(d, 1e-6, 0) for _ in range(3))
        self.self_attn, self.cross_attn = PrefixAttention(d, heads), PrefixAttention(d, heads)
        self.ffn = SwiGLU(d, mult * d)
        self.dropout = nn.Dropout(p)

    def forward(self, x, memory, mask):
        h = self.norm_self(x)
        x = x + self.dropout(self.self_attn(h, h))
        x = x + self.dropout(self.cross_attn(self.norm_cross(x), memory, mask))
        return x + self.dropout(self.ffn(self.norm_ffn(x)))


class PrefixEncoder(nn.Module):
    """Reference codes -> 8 prefix vectors. Regularizers read q (unit rms); the model sees output_scale * q."""
    def __init__(self, cfg):
        super().__init__()
        d = cfg.hidden_size
        self.input_proj = nn.Linear(len(cfg.levels), d)
        self.queries = nn.Parameter(torch.empty(cfg.num_queries, d))
        self.blocks = nn.ModuleList(PrefixBlock(d, cfg.prefix_heads, cfg.prefix_ffn, cfg.prefix_dropout)
                                    for _ in range(cfg.prefix_layers))
        self.final_norm = RMSNorm(d, 1e-6, 0)
        self.output_scale = nn.Parameter(torch.empty(1))

    def forward(self, codes, mask, levels):
        """codes [B, T, K], mask [B, T] -> prefix [B, 8, d], q [B, 8, d]"""
        x = self.input_proj(dequantize(codes, levels).to(self.input_proj.weight.dtype))
        t, d = x.shape[1:]
        # Vaswani 2017 sinusoids, sin and cos interleaved
        freq = torch.exp(torch.arange(0, d, 2, device=x.device) * (-math.log(10000.0) / d))
        angle = torch.arange(t, device=x.device)[:, None] * freq
        x = x + torch.stack((angle.sin(), angle.cos()), -1).flatten(1).to(x.dtype)
        q = self.queries.to(x.dtype).expand(len(x), -1, -1)
        for block in self.blocks:
            q = block(q, x, mask)
        q = self.final_norm(q)
        return self.output_scale * q, q


class SupConHead(nn.Module):
    def __init__(self, d, hidden, out):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, hidden), nn.Linear(hidden, out, bias=False)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))

# -----------------------------------------------------------------------------
# the model

class Gepard(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        d, total = cfg.hidden_size, sum(cfg.levels)
        self.cfg = cfg
        self.model = Backbone(cfg)
        # 32 tables and 32 heads, each as one fused matrix: 2 kernels instead of 64. Checkpoints hold them apart.
        self.audio_embeddings = nn.Embedding(total, cfg.audio_embed_dim)
        self.audio_embed_proj = nn.Sequential(nn.Linear(len(cfg.levels) * cfg.audio_embed_dim, d), nn.GELU(), nn.Linear(d, d))
        self.codebook_heads = nn.Linear(d, total)
        self.stop_head = nn.Linear(d, 1)
        self.register_buffer('audio_embed_scale', torch.ones(1))    # std of the text embedding; stored, not trained
        if cfg.num_queries:
            self.ref_compressor = PrefixEncoder(cfg)
            self.null_prefix = nn.Parameter(torch.empty(cfg.num_queries, d))
            if cfg.supcon_hidden:
                self.supcon_head = SupConHead(d, cfg.supcon_hidden, cfg.supcon_dim)
        self.register_buffer('table_start', torch.empty(len(cfg.levels), dtype=torch.long), persistent=False)   # [K] first row of each table
        self.register_buffer('slots', torch.empty(total, dtype=torch.long), persistent=False)   # [216] place in the padded K x L grid
        self.fill_buffers()

    def fill_buffers(self):
        """The constants that no checkpoint holds; to be called again after a start on the meta device."""
        levels, width = self.cfg.levels, max(self.cfg.levels)
        self.table_start.copy_(torch.from_numpy(np.cumsum([0, *levels[:-1]])))
        self.slots.copy_(torch.tensor([k * width + j for k, n in enumerate(levels) for j in range(n)]))

    @torch.no_grad()
    def init_weights(self, seed, backbone=True):
        """Seeded initialisation on the CPU; backbone=False keeps the loaded Qwen weights. Sets audio_embed_scale."""
        g = torch.Generator().manual_seed(seed)
        normal = lambda p, std: p.copy_(torch.randn(p.shape, generator=g) * std)
        if backbone:
            for name, p in self.model.named_parameters():
                normal(p, 0.02) if p.dim() == 2 else p.zero_()
        normal(self.audio_embeddings.weight, 1.0)
        rest = [self.audio_embed_proj, *(getattr(self, n) for n in ('ref_compressor', 'supcon_head') if hasattr(self, n))]
        for m in (m for part in rest for m in part.modules() if isinstance(m, nn.Linear)):
            normal(m.weight, m.in_features ** -0.5)
            if m.bias is not None:
                m.bias.zero_()
        # small heads: the code loss starts at sum of ln L = 60.9, as if every code were equally likely
        for m in (self.codebook_heads, self.stop_head):
            normal(m.weight, 0.1 * m.in_features ** -0.5)
            m.bias.zero_()
        if self.cfg.num_queries:
            normal(self.ref_compressor.queries, 0.02)
            normal(self.null_prefix, 0.02)
            self.ref_compressor.output_scale.fill_(self.cfg.hidden_size ** -0.5)
        self.audio_embed_scale.fill_(self.model.embed_tokens.weight.std())

    def frame_embedding(self, codes):
        """codes [..., K] -> [..., d]: 32 lookups side by side, an MLP, LayerNorm, the scale of the text embedding."""
        x = self.audio_embed_proj(self.audio_embeddings(codes + self.table_start).flatten(-2))
        return (F.layer_norm(x, x.shape[-1:]) * self.audio_embed_scale).to(x.dtype)

    def code_logits(self, h):
        """h [M, d] -> [M, K, L] fp32; places past a channel's last code hold -inf, so softmax needs no loop."""
        width = max(self.cfg.levels)
        size = len(self.cfg.levels) * width
        w = self.codebook_heads.weight.new_zeros(size, h.shape[-1]).index_copy(0, self.slots, self.codebook_heads.weight)
        b = self.codebook_heads.bias.new_full((size,), float('-inf')).index_copy(0, self.slots, self.codebook_heads.bias)
        return (F.linear(h, w).float() + b).view(len(h), -1, width)

    def speaker_prefix(self, codes, mask):
        """Unfolded reference codes [B, T, K], mask [B, T] -> prefix [B, 8, d], q [B, 8, d] (before the scale)"""
        return self.ref_compressor(codes, mask, self.cfg.codec['fsq_levels'])

    @torch.no_grad()
    def voices(self, references):
        """Reference clips, packed codes [t, 8] each (None = no voice, the null prefix) -> prefixes [B, 8, d] for `generate`."""
        dev, out = self.null_prefix.device, []
        for codes in references:        # one at a time: a voice does not depend on what stands beside it
            if codes is None:
                out.append(self.null_prefix)
                continue
            codes = unfold(torch.as_tensor(np.asarray(codes).astype(np.int64), device=dev)[None], self.cfg.codec['fsq_levels'])
            out.append(self.speaker_prefix(codes, torch.ones(codes.shape[:2], dtype=torch.bool, device=dev))[0][0])
        return torch.stack(out)

    def forward(self, batch):
        """A packed batch (see `pack`) -> dict: logits [F, K, L] and stop_logits [F + B] (first the outputs that
        predict each frame, then each row's last frame), q [B, 8, d], unit features [B, 128] for the regularizers."""
        codes = unfold(batch['codes'].long(), self.cfg.codec['fsq_levels'])       # [F, K]
        frames = self.frame_embedding(codes)
        if 'heard' in batch:                                                      # frames that later ones shall not know of
            frames = frames * batch['heard'][:, None]
        x = frames.new_zeros(len(batch['position']), self.cfg.hidden_size)
        x = x.index_copy(0, batch['frame_at'], frames)
        x = x.index_copy(0, batch['text_at'], self.model.embed_tokens(batch['text_ids']).to(x.dtype))
        out = {}
        if 'prefix' in batch:                                                     # ready-made, as in preference training
            x = x.index_copy(0, batch['prefix_at'], batch['prefix'].to(x.dtype).flatten(0, 1))
        elif 'ref' in batch:
            ref = unfold(batch['ref'].long(), self.cfg.codec['fsq_levels'])       # [B, T, K]
            prefix, q = self.speaker_prefix(ref, batch['ref_mask'])
            prefix = torch.where(batch['drop'][:, None, None], self.null_prefix.to(x.dtype), prefix.to(x.dtype))
            x = x.index_copy(0, batch['prefix_at'], prefix.flatten(0, 1))
            mean = q.mean(1)
            mean = self.supcon_head(mean) if self.cfg.supcon_hidden else mean
            out = {'q': q, 'features': F.normalize(mean.float(), dim=-1)}
        if 'states' in batch:                                                     # a list: telemetry looks inside
            out['inputs'] = x
        h = self.model(x, batch['position'], packed_attention, (batch['cu_seqlens'], batch['max_len']), batch.get('states'))
        h = h[torch.cat((batch['frame_at'] - 1, batch['last_at']))]               # only outputs that have a target
        n = len(codes)
        return out | {'codes': codes, 'logits': self.code_logits(h[:n]), 'stop_logits': self.stop_head(h).float()[:, 0]}


def pack(rows, cfg, position_of=None, multiple=1):
    """Rows -> one packed batch of CPU tensors.

    A row is a dict: text (laid-out token ids, ends with SOS), codes (packed codes [n, 8], n >= 1), and with voice
    cloning ref (packed codes [t, 8] or None), null (no usable speaker), drop (null prefix in this step), speaker (int).
    A row may hold a ready prefix [8, d] instead of these four; without either key the batch has no prefix at all.
    hidden (bool [n], in all rows or none): frames that the model does not see, though it must still predict them.
    position_of(row number, row length) overrides the positions 0..length-1 (for tests against padded layouts).
    multiple > 1: one more row of text that nothing reads fills the tokens up to a multiple, so that shapes repeat (for the
    GPU's allocator and kernels); references and the longest row are rounded up too, behind their mask.
    """
    prefixed = cfg.num_queries > 0 and ('ref' in rows[0] or 'prefix' in rows[0])
    p = cfg.num_queries if prefixed else 0
    text, codes, frame_row = [], [], []
    at = {'prefix_at': [], 'text_at': [], 'frame_at': [], 'last_at': []}
    position, cu = [], [0]
    for i, r in enumerate(rows):
        start, t, n = cu[-1], len(r['text']), len(r['codes'])
        if n == 0:
            raise ValueError(f'row {i} has no frames')
        at['prefix_at'].append(np.arange(start, start + p))
        at['text_at'].append(np.arange(start + p, start + p + t))
        at['frame_at'].append(np.arange(start + p + t, start + p + t + n))
        at['last_at'].append([start + p + t + n - 1])
        cu.append(start + p + t + n)
        position.append(np.arange(p + t + n) if position_of is None else position_of(i, p + t + n))
        text.append(np.asarray(r['text'], np.int64))
        codes.append(np.asarray(r['codes']).astype(np.int16))
        frame_row.append(np.full(n, i))
    max_len, up = max(np.diff(cu)), lambda n, to: -(-n // to) * to
    if multiple > 1:
        fill, max_len = -cu[-1] % multiple, up(max(max_len, multiple), 64)
        at['text_at'].append(np.arange(cu[-1], cu[-1] + fill))
        text.append(np.full(fill, cfg.special_tokens['start_of_text']))
        position.append(np.arange(fill))
        cu.append(cu[-1] + fill)
    cat = lambda xs: torch.from_numpy(np.concatenate(xs).astype(np.int64))
    batch = {'text_ids': cat(text), 'codes': torch.from_numpy(np.concatenate(codes)), 'position': cat(position),
             'frame_row': cat(frame_row), 'cu_seqlens': torch.tensor(cu, dtype=torch.int32),
             'max_len': int(max_len), **{k: cat(v) for k, v in at.items() if k != 'prefix_at' or prefixed}}
    if 'hidden' in rows[0]:
        batch['heard'] = torch.from_numpy(~np.concatenate([r['hidden'] for r in rows]))
    if prefixed and 'prefix' in rows[0]:
        batch['prefix'] = torch.stack([r['prefix'] for r in rows])
    elif prefixed:
        # a row without a reference gets one zero frame, so that attention over it is defined; it is always dropped
        refs = [np.zeros((1, len(cfg.levels) // len(cfg.codec['fsq_levels'])), np.int16) if r['ref'] is None
                else np.asarray(r['ref']).astype(np.int16) for r in rows]
        lens = [len(r) for r in refs]
        ref = np.zeros((len(rows), up(max(lens), 64 if multiple > 1 else 1), refs[0].shape[1]), np.int16)
        for i, r in enumerate(refs):
            ref[i, :lens[i]] = r
        null = torch.tensor([bool(r['null'] or r['ref'] is None) for r in rows])
        batch |= {'ref': torch.from_numpy(ref), 'ref_mask': torch.arange(ref.shape[1]) < torch.tensor(lens)[:, None],
                  'null': null, 'drop': null | torch.tensor([bool(r.get('drop', False)) for r in rows]),
                  'speaker': torch.tensor([int(r['speaker']) for r in rows])}
    return batch

# -----------------------------------------------------------------------------
# losses

def code_nll(logits, codes):
    """Cross-entropy summed over frames, by channel: logits [F, K, L], codes [F, K] (-100 = no target) -> [K]"""
    return F.cross_entropy(logits.transpose(1, 2), codes, ignore_index=-100, reduction='none').sum(0)


def stop_nll(logits, target, pos_weight):
    """Weighted binary cross-entropy, summed. logits, target [M]; target -100 = no target."""
    loss = F.binary_cross_entropy_with_logits(logits, target.clamp(min=0).float(), reduction='none',
                                              pos_weight=logits.new_full((), pos_weight))    # new_tensor would wait for the device
    return (loss * (target >= 0)).sum()


def stop_target(out):
    """0 at SOS and at every frame but the last, 1 at the last frame, in the order of out['stop_logits']."""
    target = torch.zeros_like(out['stop_logits'])
    target[len(out['codes']):] = 1
    return target


def diversity(q, gamma=0.5):
    """Sum over rows of mean over width of relu(gamma - std over the queries): keeps the 8 queries from collapsing."""
    std = q.float().var(1, unbiased=False).clamp(min=1e-8).sqrt()      # std floored at 1e-4
    return F.relu(gamma - std).mean(-1).sum()


def supcon(features, speakers, null, temperature=0.1):
    """Supervised contrastive loss, Khosla 2020 (L_out): features [B, d] of unit length, speakers [B], null [B] rows left out.
    Returns the mean over anchors that have a positive (0 without one) and a dict of means over pairs: positive and
    negative cosine, anchors, positives an anchor. No host sync: rows are masked, not removed. Not under autocast: cosines near 1
    would come in steps of 1/256, a tenth of which is the temperature."""
    with torch.autocast(features.device.type, enabled=False):
        z = features.float()
        ok = ~null & (speakers >= 0)
        other = ok[:, None] & ok[None] & ~torch.eye(len(z), dtype=torch.bool, device=z.device)
        positive = other & (speakers[:, None] == speakers[None])
        cosine = z @ z.T
        sim = (cosine / temperature).masked_fill(~other, -1e9)
        log_p = sim - sim.logsumexp(1, keepdim=True)
        n = positive.sum(1)
        anchors = (n > 0).sum()
        loss = -((log_p * positive).sum(1) / n.clamp(min=1)).sum() / anchors.clamp(min=1)
        mean = lambda mask: ((cosine * mask).sum() / mask.sum().clamp(min=1)).detach()
        return loss, {'positive': mean(positive), 'negative': mean(other & ~positive), 'anchors': anchors,
                      'positives_per_anchor': n.sum() / anchors.clamp(min=1)}


def gather_rows(x):
    """Rows of every rank [ranks * B, ...]; the gradient goes through the local ones only. Summed over ranks that is
    the gradient of the loss on the joint batch. Every rank must hold the same number of rows."""
    if not torch.distributed.is_initialized():
        return x
    parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, x.detach().contiguous())
    parts[torch.distributed.get_rank()] = x
    return torch.cat(parts)


def losses(out, batch, cfg, count, diversity_weight=0.0, supcon_weight=0.0, supcon_share=1.0, codes=None, stop=None):
    """All training losses of a packed batch as parts of the global means -> dict; 'total' is what to differentiate.

    count: dict of the global number of frames, stops and rows over all micro-batches and ranks, so that gradients summed
    over them do not depend on how the rows were dealt out. The contrastive loss sees the rows of all ranks at once and is
    the mean over micro-batches (supcon_share = 1 / their number). codes [F, K] and stop [F + B] override the targets,
    -100 = none; then count may hold tensors."""
    codes = out['codes'] if codes is None else codes
    stop = stop_target(out) if stop is None else stop
    at_least_one = lambda n: n.clamp(min=1) if torch.is_tensor(n) else max(n, 1)   # a head without a target adds 0
    level = code_nll(out['logits'], codes) / at_least_one(count['frames'])
    r = {'level': level, 'code': level.sum(),
         'stop': stop_nll(out['stop_logits'], stop, cfg.stop_pos_weight) / at_least_one(count['stops'])}
    r['total'] = r['code'] + cfg.stop_loss_weight * r['stop']
    if 'q' in out:
        r['diversity'] = diversity(out['q']) / count['rows']
        r['total'] = r['total'] + diversity_weight * r['diversity']
        if cfg.supcon_dim:
            r['supcon'], r['supcon_stats'] = supcon(*(gather_rows(t) for t in (out['features'], batch['speaker'], batch['null'])))
            r['supcon'] = r['supcon'] * supcon_share
            r['total'] = r['total'] + supcon_weight * r['supcon']
    return r


def ramp(step, weight, start, length):
    """Regularizer weight at a step: 0 until start, then linear to full weight over `length` steps."""
    return weight * min(max((step - start) / max(length, 1), 0.0), 1.0)

# -----------------------------------------------------------------------------
# preference training

def trajectory_logprob(out, batch, truncated, p_floor=1e-4):
    """log pi(y|x) of each packed row, in its two parts -> tokens [B], stop [B], frames [B].

    tokens: sum over frames and channels of log p; stop: sum over frames but the last of log(1 - p_stop), plus
    log p_stop at the last unless the row is truncated [B]. p_stop is clipped to [p_floor, 1 - p_floor] in value only:
    a hard clamp has no gradient exactly where the stop head is saturated and needs one most."""
    n, rows = len(out['codes']), len(batch['last_at'])
    total = lambda x: x.new_zeros(rows).index_add(0, batch['frame_row'], x)
    log_p = out['logits'].log_softmax(-1).gather(-1, out['codes'][..., None]).squeeze(-1).sum(-1)
    low, high = math.log(p_floor), math.log1p(-p_floor)
    clip = lambda x: x + (x.clamp(low, high) - x).detach()
    going, ending = out['stop_logits'][:n], out['stop_logits'][n:]
    first = torch.ones_like(batch['frame_row'], dtype=torch.bool)
    first[1:] = batch['frame_row'][1:] != batch['frame_row'][:-1]      # predicted from SOS, where no stop is decided
    stop = total(clip(F.logsigmoid(-going)) * ~first) + clip(F.logsigmoid(ending)) * ~truncated
    return total(log_p), stop, total(torch.ones_like(log_p))


def combine(tokens, stop, frames, stop_weight=1.0, length_normalize=True):
    """One number per trajectory from trajectory_logprob's parts."""
    return (tokens + stop_weight * stop) / (frames if length_normalize else 1)


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=2.0, weight=None):
    """Rafailov 2023: weighted mean of -log sigmoid(beta * margin), margin = (chosen - ref) - (rejected - ref).
    All [pairs]. Returns loss, margin [pairs] (times beta: the reward margin that the loss sees)."""
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    loss = -F.logsigmoid(margin)
    return loss.mean() if weight is None else (loss * weight).sum() / weight.sum(), margin


def gap_weights(gap, mode='linear', scale=3.5, largest=4.0):
    """Pair weights from reward gaps [pairs], mean 1: 'linear' 1 + gap/scale, 'clip' gap/scale, 'none' -> None;
    clipped to [1/largest, largest]."""
    if mode == 'none':
        return None
    if mode not in ('linear', 'clip'):
        raise ValueError(f"gap_weights: mode {mode!r} is none of 'none', 'linear', 'clip'")
    w = (gap / scale + (mode == 'linear')).clamp(1 / largest, largest)
    return w / w.mean()

# -----------------------------------------------------------------------------
# generation: rows of a continuously refilled batch, each in a slot with a cache, a length, a frame cap and a seed of its own

def hashed(x):
    """splitmix64's finaliser on int64 tensors (products wrap around): neighbouring numbers come out unrelated."""
    for shift, factor in ((30, -0x40a7b892e31b1a47), (27, -0x6b2fb644ecceee15)):
        x = (x ^ x >> shift & (1 << 64 - shift) - 1) * factor
    return x ^ x >> 31 & (1 << 33) - 1


def gumbel(key, frame, channels, width):
    """Gumbel noise [S, K, L] of a row's key and frame number alone (a hashed counter): neither the batch nor its order matters.
    The arg-max of logit + noise is a sample of softmax(logit)."""
    at = frame[:, None] * (channels * width) + torch.arange(1, channels * width + 1, device=key.device)
    bits = hashed(key[:, None] + at * -0x61c8864680b583eb) >> 41 & (1 << 23) - 1
    return -(-((bits.float() + 0.5) / (1 << 23)).log()).log().view(-1, channels, width)


def attend_to_cache(q: torch.Tensor, cache: torch.Tensor, used: torch.Tensor, q_start: torch.Tensor, k_start: torch.Tensor, room: int) -> torch.Tensor:
    """Attention of one token a row to the first `used` places of its row in the cache [rows, places, 2, kv heads, hd]. q [n, group, kv heads, hd]:
    the query heads that share a key head stand as that many queries, so no key is repeated. room: what is used at most (of the path in fp32)."""
    if q.is_cuda and q.dtype != torch.float32:      # reads only what is used, whatever the cache's size: the step's shape never changes
        keys, values = cache.flatten(0, 1).unbind(1)
        return torch.ops.aten._flash_attention_forward(q.flatten(0, 1), keys, values, q_start, k_start, q.shape[1], cache.shape[1], 0.0,
                                                       False, False, seqused_k=used)[0].view_as(q)
    keys, values = cache[:len(q), :room].permute(2, 0, 3, 1, 4).unbind(0)           # [n, kv heads, room, hd]
    seen = torch.arange(room, device=q.device) < used[:, None]
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, seen[:, None, None]).transpose(1, 2).contiguous()


# Opaque to torch.compile, which would otherwise read all of the cache. Not compiled, the function itself is called: the first call of an operator imports torch.compile, a second or two
cached_attention = torch.library.custom_op('gepard::cached_attention', attend_to_cache, mutates_args=())


@cached_attention.register_fake
def _(q, cache, used, q_start, k_start, room):
    return torch.empty_like(q)


def filling(where, q, k, v):
    """`attend` for packed prompts: packed_attention that leaves keys and values in the cache, at place pos [N] of row [N]."""
    cache, row, pos, *boundaries = where
    cache[row, pos] = torch.stack((k, v), 1)
    return packed_attention(boundaries, q, k, v)


def cached(where, q, k, v):
    """`attend` for one token a row. where: cache, row, pos as above, then cached_attention's arguments after the cache."""
    cache, row, pos, *rest = where
    cache[row, pos] = torch.stack((k, v), 1)                                        # in place when compiled, too, and in one kernel with rotary
    q = q.unflatten(1, (k.shape[1], -1)).transpose(1, 2).contiguous()               # [n, group, kv heads, hd]
    return (cached_attention if torch.compiler.is_compiling() else attend_to_cache)(q, cache, *rest).transpose(1, 2).flatten(1, 2)


@functools.cache
def compiled(function, tuned):
    """tuned: inductor then writes products of a matrix and a single row as kernels of its own, twice as fast as cuBLAS there."""
    return torch.compile(function, dynamic=True, options={'coordinate_descent_tuning': tuned})


class Decoder:
    """Decodes any number of rows in a batch of fixed size. Each step samples one frame of every slot, all 32 channels at once,
    feeds it back and reads the stop head; on a GPU it is one CUDA graph, and the host looks at it every few steps only.
    A guided row has a second one without text beside it during its guided frames. See `generate` for the settings.

    slots: rows at once; prompt: longest prompt, prefix included; frames: largest frame cap; compile: torch.compile the step's
    parts (GPU; seconds at the start)."""
    ended = (None, 'max_frames', 'force_stop_frames', 'stop_head')

    def __init__(self, model, slots, prompt, frames, *, temperature=0.4, top_k=0, stop_threshold=0.5, cfg_scale=1.0, cfg_frames=20,
                 uncond='empty_text', repetition_penalty=1.0, repetition_window=0, force_stop_frames=None, compile=False):
        if force_stop_frames is not None and force_stop_frames < 1:
            raise ValueError(f'force_stop_frames must be at least 1, got {force_stop_frames}')
        if uncond not in ('empty_text', 'audio_only'):
            raise ValueError(f"uncond must be 'empty_text' or 'audio_only', got {uncond!r}")
        if min(temperature, top_k, cfg_frames, repetition_window) < 0 or repetition_penalty <= 0:
            raise ValueError('temperature, top_k, cfg_frames and repetition_window must not be negative, repetition_penalty must be positive')
        cfg, dev, dtype = model.cfg, model.model.norm.weight.device, model.model.norm.weight.dtype
        self.model, self.slots, self.frames, self.dev, self.dtype = model, slots, frames, dev, dtype
        self.temperature, self.top_k, self.stop_threshold = temperature, min(top_k, max(cfg.levels)), stop_threshold
        self.cfg_scale, self.cfg_frames, self.guided = cfg_scale, cfg_frames or frames, cfg_scale != 1.0
        self.penalty, self.window, self.force = repetition_penalty, repetition_window or frames, force_stop_frames or 0
        s = cfg.special_tokens
        self.blind = [s['start_of_text'], s['end_of_text'], s['start_of_speech']] if uncond == 'empty_text' else [s['start_of_speech']]
        self.prompt = max(prompt, cfg.num_queries + 3)              # the prompt without text may be the longest
        self.room, rows = self.prompt + frames, slots * (1 + self.guided)
        self.run_part = (lambda f: compiled(f, slots == 1)) if compile and dev.type == 'cuda' else (lambda f: f)
        self.graphs, self.pool = {}, None                           # what was recorded, where the device has graphs
        self.busy = {}                                              # slot -> [job, its second row, steps done, longest it can be]
        # rows: the slots, then the second rows of guided ones; beside a single slot, one for what fills up a prompt
        self.cache = [torch.zeros(rows + (slots == 1), self.room, 2, cfg.num_key_value_heads, cfg.head_dim, device=dev, dtype=dtype) for _ in model.model.layers]
        self.h = torch.zeros(rows, cfg.hidden_size, device=dev, dtype=dtype)        # the output that the next frame is drawn from
        self.length, self.source = torch.zeros(rows, dtype=torch.long, device=dev), torch.arange(rows, device=dev) % slots
        whole = lambda: torch.zeros(slots, dtype=torch.long, device=dev)
        self.active, self.count, self.cap, self.key, self.reason, self.second = whole().bool(), whole(), whole(), whole(), whole(), whole()
        # what was spoken; a column to spare takes what finished rows write
        self.codes = torch.zeros(slots, frames + 1, len(cfg.levels), dtype=torch.uint8, device=dev)
        self.logp, self.stop = torch.zeros(2, slots, frames + 1, device=dev)
        self.all, group = torch.arange(rows, device=dev), cfg.num_attention_heads // cfg.num_key_value_heads
        self.q_start, self.k_start = (torch.arange(rows + 1, device=dev, dtype=torch.int32) * k for k in (group, self.room))

    @torch.no_grad()
    def fill(self, jobs):
        """Prompts of {slot: (number, text, prefix, seed, cap)} -> their caches: all packed end to end, as in training."""
        model, dev, prompts = self.model, self.dev, []
        spare = sorted(set(range(self.slots, 2 * self.slots)) - {b[1] for b in self.busy.values()}) if self.guided else []
        for slot, (number, text, prefix, seed, cap) in jobs.items():
            prompts.append((slot, text, prefix))
            if self.guided:
                prompts.append((spare.pop(0), self.blind, prefix))
            longest = max(len(text), len(self.blind) if self.guided else 0) + (0 if prefix is None else len(prefix))
            self.busy[slot] = [number, prompts[-1][0] if self.guided else 0, 0, longest]
        slots = list(jobs)
        tensor = lambda values: torch.as_tensor(values, device=dev)
        at = tensor(slots)
        self.active[at], self.count[at], self.reason[at] = True, 0, 0
        self.key[at], self.cap[at] = hashed(tensor([j[3] for j in jobs.values()])), tensor([j[4] for j in jobs.values()])
        if self.guided:
            self.second[at] = tensor([self.busy[s][1] for s in slots])
            self.source[self.second[at]] = at
        p = [0 if prefix is None else len(prefix) for _, _, prefix in prompts]
        sizes = [a + len(text) for a, (_, text, _) in zip(p, prompts)]
        cu = np.cumsum([0, *sizes])
        pos = np.arange(cu[-1]) - np.repeat(cu[:-1], sizes)
        voiced = pos < np.repeat(p, sizes)
        ids = np.zeros(cu[-1], np.int64)
        ids[~voiced] = np.concatenate([text for _, text, _ in prompts])
        x = model.model.embed_tokens(tensor(ids)).to(self.dtype)
        if voiced.any():
            x[tensor(np.flatnonzero(voiced))] = torch.cat([prefix for _, _, prefix in prompts if prefix is not None]).to(dev, self.dtype)
        rows, last = tensor([r for r, *_ in prompts]), tensor(cu[1:] - 1)
        row, pos, cu = rows.repeat_interleave(tensor(sizes), output_size=len(x)), tensor(pos), tensor(cu)
        if self.slots == 1:                 # somebody waits for the first frame: a graph, for each 64 tokens more
            n = 64 - len(x) % 64
            x, row, pos, cu = F.pad(x, (0, 0, 0, n)), F.pad(row, (0, n), value=len(self.cache[0]) - 1), F.pad(pos, (0, n)), F.pad(cu, (0, 1), value=len(x) + n)
            x = self.replay(('prompt', len(x)), self.prefill, x, row, pos, cu)
        else:
            x = self.prefill(x, row, pos, cu)
        self.h[rows] = model.model.norm(x[last])
        self.length[rows] = tensor(sizes)

    def prefill(self, x, row, pos, cu):
        """Prompts end to end: x [N, d] their vectors, row and pos [N] where each goes, cu [prompts + 1] their boundaries -> [N, d]"""
        cos, sin = rotary(pos, self.model.cfg)
        for layer, cache in zip(self.model.model.layers, self.cache):
            x = self.run_part(Layer.forward)(layer, x, cos, sin, filling, (cache, row, pos, cu.int(), max(self.prompt, 64)))
        return x

    def replay(self, key, function, *inputs):
        """function(*inputs), as one CUDA graph for each key: the first call runs as it is (and warms up), the second is recorded."""
        if self.dev.type != 'cuda' or key not in self.graphs:
            self.graphs[key] = None
            return function(*inputs)
        if self.graphs[key] is None:
            graph, held = torch.cuda.CUDAGraph(), [t.clone() for t in inputs]
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode='thread_local'):        # others may use the GPU
                out = function(*held)
            self.graphs[key], self.pool = (graph, held, out), graph.pool()
        graph, held, out = self.graphs[key]
        for there, given in zip(held, inputs):
            there.copy_(given)
        graph.replay()
        return out

    def choose(self, n):
        """Draws every slot's next frame -> its embedding for each of the first n rows, their positions' angles."""
        cfg, s = self.model.cfg, self.slots
        all_logits = self.model.code_logits(self.h[:n])                                 # [n, K, L]
        cond = logits = all_logits[:s]
        if n > s:
            blank = all_logits[self.second.clamp(max=n - 1)]
            guided = (self.count < self.cfg_frames)[:, None, None] & ~cond.isinf()
            logits = torch.where(guided, blank + self.cfg_scale * (cond - blank), cond)
        if self.penalty != 1.0:
            back = self.count[:, None] - 1 - torch.arange(self.window, device=self.dev)
            recent = self.codes[self.all[:s, None], back.clamp(min=0)].long().transpose(1, 2)       # [S, K, window]
            seen = torch.zeros_like(logits).scatter_add(-1, recent, (back >= 0)[:, None].expand_as(recent).to(logits.dtype)) > 0
            logits = torch.where(seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)
        if self.top_k:
            logits = logits.masked_fill(logits < logits.topk(self.top_k, -1).values[..., -1:], float('-inf'))
        if self.temperature and self.top_k != 1:
            logits = logits / self.temperature + gumbel(self.key, self.count, *logits.shape[1:])
        codes = logits.argmax(-1)                                                       # [S, K]
        self.codes[self.all[:s], self.count] = codes.to(torch.uint8)
        self.logp[self.all[:s], self.count] = cond.log_softmax(-1).gather(-1, codes[..., None])[..., 0].sum(-1)
        x = self.model.frame_embedding(codes).to(self.dtype)[self.source[:n]]
        return x, *rotary(self.length[:n], cfg)

    def settle(self, n, x):
        """After the layers: x [n, d] -> the rows' outputs, and which rows go on."""
        s = self.slots
        h = self.model.model.norm(x)
        self.h[:n] = h
        stop = self.model.stop_head(h[:s]).float()[:, 0]
        self.stop[self.all[:s], self.count] = stop
        self.count += self.active
        capped = self.count >= self.cap
        forced = ~capped & (self.count == self.force)
        stopped = ~capped & ~forced & (torch.sigmoid(stop) > self.stop_threshold)
        ended = 1 * capped + 2 * forced + 3 * stopped
        self.reason.copy_(torch.where(self.active, ended, self.reason))
        self.active &= ended == 0
        # a row without work stays at its first place, where its attention costs nothing
        on = self.active[self.source[:n]]
        on[s:] &= (self.second[self.source[s:n]] == self.all[s:n]) & (self.count[self.source[s:n]] < self.cfg_frames)
        self.length[:n] = torch.where(on, self.length[:n] + 1, 0)

    def one_step(self, n):
        x, cos, sin = self.run_part(Decoder.choose)(self, n)
        row, pos = self.all[:n], self.length[:n]
        used = (pos + 1).int()
        starts = self.q_start[:n + 1], self.k_start[:n + 1]
        room = self.room if self.dev.type == 'cuda' else min(self.room, 1 + max(b[2] + b[3] for b in self.busy.values()))
        for layer, cache in zip(self.model.model.layers, self.cache):
            x = self.run_part(Layer.forward)(layer, x, cos, sin, cached, (cache, row, pos, used, *starts, room))
        self.run_part(Decoder.settle)(self, n, x)

    @torch.no_grad()
    def step(self):
        """One frame of every slot. The number of rows moves in eighths, each with its own graph."""
        seconds = [1 + second - self.slots for _, second, steps, _ in self.busy.values() if self.guided and steps < self.cfg_frames]
        eighth = max(1, self.slots // 8)
        n = self.slots + min(self.slots, -(-max(seconds, default=0) // eighth) * eighth)
        self.replay(n, functools.partial(self.one_step, n))
        for b in self.busy.values():
            b[2] += 1

    @torch.no_grad()
    def run(self, jobs, every=8, on_frame=None):
        """Jobs (text, prefix [8, d] or None, seed, cap), any iterable -> yields (number, result) as they end: dicts like those of
        `generate`, codes in uint8 and without stop_probs. The host looks every so many steps; free slots are filled once there is a
        sixteenth of them. on_frame: see `generate`."""
        jobs, step = enumerate(jobs), 0
        self.busy.clear()
        self.active.fill_(False)
        more = True
        while True:
            free = [s for s in range(self.slots) if s not in self.busy]
            if more and len(free) >= max(1, self.slots // 16):
                new = [(n, *job) for n, job in itertools.islice(jobs, len(free))]
                more = len(new) == len(free)
                if new:
                    self.fill(dict(zip(free, new)))
            if not self.busy:
                return
            for _ in range(1 if on_frame else every):
                running, count = (self.active.clone(), self.count.clone()) if on_frame else (None, None)
                self.step()
                if on_frame:
                    on_frame(step, self.codes[self.all[:self.slots], count].long(), running)
                step += 1
            still = self.active.tolist()                            # the host waits here
            done = [s for s in self.busy if not still[s]]
            if not done:
                continue
            at = torch.tensor(done, device=self.dev)
            count, reason = torch.stack((self.count[at], self.reason[at])).tolist()
            codes, logp, stop = (t[at, :max(count)].cpu() for t in (self.codes, self.logp, self.stop))
            for i, slot in enumerate(done):
                checked = count[i] - (reason[i] != 3)               # no stop is read after the last frame of a cut row
                yield self.busy.pop(slot)[0], {'codes': codes[i, :count[i]], 'logp': logp[i, :count[i]], 'stop_logits': stop[i, :checked],
                                               'ended_by': self.ended[reason[i]]}


@torch.no_grad()
def generate(model, texts, prefix=None, *, max_frames=300, seeds=None, on_frame=None, decoder=None, **settings):
    """Speak a batch. texts: B lists of laid-out ids (end with SOS); prefix [B, 8, d] or None. settings are Decoder's: temperature=0.4,
    top_k=0, stop_threshold=0.5, cfg_scale=1.0, cfg_frames=20, uncond='empty_text', repetition_penalty=1.0, repetition_window=0,
    force_stop_frames=None.

    Each step samples all 32 channels of one frame per row, feeds it back and reads the stop head; a row ends when
    sigmoid(stop) > stop_threshold (frame included), after force_stop_frames, or at max_frames (an int or one per row).
    The first frame is always produced. temperature 0 or top_k 1 is arg-max. Guidance (cfg_scale != 1): logit = uncond +
    scale * (cond - uncond) on the first cfg_frames frames (0 = all); the unconditional branch keeps the prefix and sees
    no text ('empty_text': SOT EOT SOS, 'audio_only': SOS); the stop is the conditioned branch's. repetition_penalty
    (Keskar 2019) by channel over the last repetition_window frames (0 = all). seeds: one per row; a row's noise depends
    on its seed alone, not on the batch. on_frame(step, codes [B, K], running [B]) is called for each frame. decoder: one
    made before, in the place of settings, with any number of slots (one where on_frame is given): what a first call must set up is then there.

    Returns B dicts: codes [n, K] int64 on the CPU, logp [n] (log-probability of each frame's codes, unguided, at temperature
    1), stop_logits and stop_probs of each check, ended_by 'stop_head' | 'max_frames' | 'force_stop_frames'.
    """
    b = len(texts)
    if any(not t or t[-1] != model.cfg.special_tokens['start_of_speech'] for t in texts):
        raise ValueError('generate: every text must be laid out (end with start_of_speech)')
    caps = max_frames.tolist() if torch.is_tensor(max_frames) else max_frames
    caps = [caps] * b if isinstance(caps, int) else caps
    seeds = list(range(b)) if seeds is None else seeds
    wrong = [f'{k}: {len(v)} for {b} texts' for k, v in (('prefix', prefix), ('seeds', seeds), ('max_frames', caps)) if v is not None and len(v) != b]
    if wrong or not texts:
        raise ValueError('generate: ' + (', '.join(wrong) or 'no texts'))
    if min(caps) < 1:
        raise ValueError(f'max_frames must be at least 1, got {max_frames}')
    p = 0 if prefix is None else prefix.shape[1]
    if decoder and (settings or max(caps) > decoder.frames or p + max(map(len, texts)) > decoder.prompt):
        raise ValueError(f'generate: the decoder has its own settings, and room for prompts of {decoder.prompt} and {decoder.frames} frames')
    decoder = decoder or Decoder(model, b, p + max(map(len, texts)), max(caps), **settings)
    results = [None] * b
    for number, result in decoder.run(zip(texts, [None] * b if prefix is None else prefix, seeds, caps), on_frame=on_frame):
        results[number] = result | {'codes': result['codes'].long(), 'stop_probs': result['stop_logits'].sigmoid().tolist()}
    return results

# -----------------------------------------------------------------------------
# optimizer groups

def group_of(name):
    """Which learning-rate group a parameter belongs to, by name (published or fused)."""
    if name.startswith('model.embed_tokens'):
        return 'embed'
    if name.startswith('model.'):
        return 'backbone'
    if name.startswith(('ref_compressor.', 'null_prefix', 'supcon_head.')):
        return 'ref'
    if name.startswith(('audio_embeddings.', 'audio_embed_proj.', 'codebook_heads.', 'stop_head.')):
        return 'audio'
    raise ValueError(f'parameter {name!r} belongs to no group')


def param_groups(model, lr, multipliers, weight_decay):
    """AdamW groups: trainable parameters by group and by decay; only matrices decay, except queries and null prefix."""
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            decays = p.dim() >= 2 and name not in ('null_prefix', 'ref_compressor.queries')
            groups.setdefault((group_of(name), decays), []).append(p)
    return [{'params': ps, 'lr': lr * multipliers[g], 'base_lr': lr * multipliers[g], 'name': g,
             'weight_decay': weight_decay if decays else 0.0} for (g, decays), ps in sorted(groups.items())]

# -----------------------------------------------------------------------------
# checkpoints

def published(state, cfg):
    """Our state dict -> published key names: the fused table and head fall apart into 32 tensors."""
    out = {}
    for name, t in state.items():
        part, _, kind = name.partition('.')
        if part in ('audio_embeddings', 'codebook_heads'):
            out |= {f'{part}.{i}.{kind}': piece.clone() for i, piece in enumerate(t.split(list(cfg.levels)))}
        else:
            out[name] = t
    return out


def fused(state, cfg, where='model.safetensors'):
    """Published key names -> our state dict. ValueError names the file and each missing or wrong table or head."""
    out = {k: v.reshape(1) if k in ('audio_embed_scale', 'ref_compressor.output_scale') else v    # 0-dim in older files
           for k, v in state.items()}
    for part, kind in (('audio_embeddings', 'weight'), ('codebook_heads', 'weight'), ('codebook_heads', 'bias')):
        names = [f'{part}.{i}.{kind}' for i in range(len(cfg.levels))]
        pieces = [out.pop(name, ()) for name in names]
        wrong = [f'{name} has {len(t)} rows instead of {n}' if len(t) else f'missing {name!r}' for name, t, n in zip(names, pieces, cfg.levels) if len(t) != n]
        if wrong:       # side by side, heads of swapped sizes would fit
            raise ValueError(f'{where}: {", ".join(wrong)}')
        out[f'{part}.{kind}'] = torch.cat(pieces)
    return out


def load_strict(module, state, where, may_miss=(), may_ignore=()):
    """load_state_dict in which every difference not named beforehand is an error. Prefixes in may_miss, may_ignore."""
    state = {k: v for k, v in state.items() if not k.startswith(tuple(may_ignore))}
    own = module.state_dict()
    missing = [k for k in own if k not in state and not k.startswith(tuple(may_miss))]
    extra = [k for k in state if k not in own]
    wrong = [f'{k} {list(state[k].shape)} instead of {list(own[k].shape)}' for k in own if k in state and state[k].shape != own[k].shape]
    if missing or extra or wrong:
        raise ValueError(f'{where}: ' + '; '.join(f'{name} {keys[:4]}{" ..." * (len(keys) > 4)}' for name, keys in (
            ('missing', missing), ('unexpected', extra), ('wrong shape', wrong)) if keys))
    module.load_state_dict(state, strict=False)
    return [k for k in own if k not in state]


def read_json(path):
    try:
        with open(path, encoding='utf-8') as f:
            return json.load(f)
    except FileNotFoundError:
        raise FileNotFoundError(f'{path}: no such file') from None
    except ValueError as e:
        raise ValueError(f'{path}: not JSON ({e})') from None


def local_or_hub(name, patterns):
    """A folder as it is, or a Hub name downloaded (only because the user named it)."""
    if os.path.isdir(name):
        return name
    if name.count('/') != 1 or name.startswith(('.', '/', 'out/', 'data/')):      # a run that is not there is no name
        raise FileNotFoundError(f'{name}: no such folder (and not a Hub name of the form user/model)')
    from huggingface_hub import snapshot_download
    try:
        return snapshot_download(name, allow_patterns=patterns)
    except Exception as e:      # the client has many error types of its own
        raise OSError(f"{name}: no such folder, and as a Hub name: {' '.join(str(e).split())[:400]}") from None


def read_tensors(folder, file='model.safetensors'):
    """All safetensors of a folder (one file, or those an index names) -> dict on the CPU."""
    from safetensors.torch import load_file
    index = os.path.join(folder, f'{file}.index.json')
    files = sorted(set(read_json(index)['weight_map'].values())) if os.path.exists(index) else [file]
    state = {}
    for name in files:
        path = os.path.join(folder, os.path.basename(name))
        if not os.path.exists(path):
            raise FileNotFoundError(f'{path}: no such file')
        try:
            state |= load_file(path)
        except Exception as e:      # safetensors has its own error type for a cut or foreign file
            raise ValueError(f'{path}: cannot be read as safetensors ({e})') from None
    return state


def load_qwen(model, name):
    """Fill the backbone from a transformers Qwen3.5 checkpoint (folder or Hub name). Strict: vision, MTP and lm_head
    tensors are ignored, everything else must fit. Call init_weights(backbone=False) afterwards."""
    folder = local_or_hub(name, ['*.json', '*.safetensors'])
    want = backbone_fields(read_json(os.path.join(folder, 'config.json')), f'{name}/config.json')
    differ = [f'{k} {v} (model: {getattr(model.cfg, k)})' for k, v in want.items() if getattr(model.cfg, k) != v and k != 'max_position_embeddings']
    if differ:
        raise ValueError(f'{name}/config.json differs from the model: ' + ', '.join(differ))
    state = read_tensors(folder)
    for prefix in ('model.language_model.', 'language_model.model.', 'language_model.', 'model.'):   # as transformers versions wrote it
        if any(k.startswith(prefix + 'layers.') for k in state):
            state = {k.removeprefix(prefix): v for k, v in state.items()}
            break
    load_strict(model.model, {k: v.float() for k, v in state.items()}, name,
                may_ignore=('lm_head.', 'mtp.', 'visual.', 'model.visual.', 'rotary_emb.'))


def config_from_qwen(name, **audio):
    """Config for a new model on a Qwen3.5 backbone (folder or Hub name); audio: the other Config fields."""
    folder = local_or_hub(name, ['*.json'])
    return Config(**backbone_fields(read_json(os.path.join(folder, 'config.json')), f'{name}/config.json'), **audio)


TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'vocab.json', 'merges.txt', 'chat_template.jinja')


def load_checkpoint(name, device='cpu', dtype=torch.float32):
    """A published or own checkpoint (folder or Hub name) -> model in eval mode, its folder. Never unpickles.
    Only the contrastive head may be missing (it is not needed to speak; it then starts anew). Tensors of parts that the
    config has switched off are passed over: older files keep them."""
    folder = local_or_hub(name, ['*.json', '*.safetensors', '*.txt', '*.jinja'])
    settings = os.path.join(folder, 'gepard_config.json')
    raw = read_json(settings)
    cfg = config_from_json(raw, settings)
    model = Gepard(cfg)
    where = os.path.join(folder, 'model.safetensors')
    state = fused(read_tensors(folder), cfg, where)
    if not raw.get('voice_cloning') and any(k.startswith('ref_compressor.') for k in state):
        raise ValueError(f'{settings}: voice_cloning is missing, but {where} has a speaker prefix; "voice_cloning": {{"enabled": false}} leaves it out')
    broken = [k for k, v in state.items() if not torch.isfinite(v).all()]
    if broken:
        raise ValueError(f'{where}: NaN or infinite values in {broken[:4]}: the run that wrote it had diverged')
    off = () if cfg.num_queries and cfg.supcon_hidden else ('supcon_head.',) if cfg.num_queries else ('supcon_head.', 'ref_compressor.', 'null_prefix')
    load_strict(model, {k: v.float() for k, v in state.items()}, where, may_miss=('supcon_head.',), may_ignore=off)
    return model.to(device=device, dtype=dtype).eval(), folder


def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_json(path, content):
    with open(path, 'w', encoding='utf-8') as f:
        json.dump(content, f, indent=2, ensure_ascii=False)


def append_line(path, line):
    """A line more in a log. Where the disk is full the file stays as it was and stderr says so: numbers are not worth a run."""
    size = os.path.getsize(path) if os.path.exists(path) else 0
    try:
        with open(path, 'a', encoding='utf-8') as f:
            f.write(line + '\n')
    except OSError as e:
        print(f'{path}: a line is not written ({e.strerror or e})', file=sys.stderr, flush=True)
        try:
            os.truncate(path, size)
        except OSError:                     # it is not there, or nothing can be written at all
            pass


def keep_lines(path, step):
    """A run that goes on from `step`: its metrics.jsonl loses what will be written again, and lines that are no records, such as one cut by a kill, each named. Returns the records."""
    kept = []
    for line in open(path, encoding='utf-8', errors='replace') if os.path.exists(path) else []:
        try:
            record = json.loads(line)
            kept += [record] if record['step'] <= step else []
        except (ValueError, TypeError, KeyError):
            print(f'{path}: dropped a line that is no record: {line[:60]!r}', flush=True)
    with open(f'{path}.tmp', 'w', encoding='utf-8') as f:
        f.writelines(json.dumps(record) + '\n' for record in kept)
    os.replace(f'{path}.tmp', path)
    return kept


def write_folder(path, write):
    """Make a folder whose files write(folder) writes, so that it is whole or absent whenever the process dies: temporary
    name, fsync, rename. An existing folder of that name is an error."""
    path = path.rstrip('/')
    if os.path.exists(path):
        raise FileExistsError(f'{path} exists already')
    tmp = f'{path}.tmp'
    shutil.rmtree(tmp, ignore_errors=True)      # left over from a killed save
    os.makedirs(tmp)
    write(tmp)
    for folder, _, files in os.walk(tmp):
        for name in files:
            fsync(os.path.join(folder, name))
        fsync(folder)
    os.rename(tmp, path)
    fsync(os.path.dirname(os.path.abspath(path)))


def language_tags(folder):
    """The tags that a checkpoint's corpora were built with, as its training_metadata.json says: sorted, [] = none or not known."""
    path = os.path.join(folder, 'training_metadata.json')
    stage = read_json(path) if os.path.exists(path) else {}
    corpora = [s.get('corpus') for s in (stage, *(stage.get('history') or ()))]
    return sorted({tag for c in corpora if isinstance(c, dict) for tag in c.get('languages') or ()})        # a stranger's may be a name


def remove_unfinished(out_dir):
    """What killed saves have left of checkpoints; for a process that holds the folder's lock."""
    for name in os.listdir(out_dir):
        if name.startswith('checkpoint-') and name.endswith('.tmp'):
            shutil.rmtree(os.path.join(out_dir, name))


def save_checkpoint(path, state, cfg, tokenizer, metadata, extra=None):
    """Write a checkpoint folder, whole or absent (see write_folder).

    state: our full state dict (any device); tokenizer: folder whose tokenizer files are copied (None: none); metadata:
    dict -> training_metadata.json; extra(folder) may write more files, such as the resume state."""
    from safetensors.torch import save_file
    state = {k: v.detach().cpu().contiguous() for k, v in published(state, cfg).items()}
    dtype = str(state['model.norm.weight'].dtype).removeprefix('torch.')

    def write(folder):
        save_file(state, os.path.join(folder, 'model.safetensors'), metadata={'format': 'pt'})
        write_json(os.path.join(folder, 'config.json'), cfg.backbone() | {'dtype': dtype})
        write_json(os.path.join(folder, 'gepard_config.json'), cfg.to_json(dtype))
        write_json(os.path.join(folder, 'training_metadata.json'), metadata)
        for name in TOKENIZER_FILES:
            if tokenizer and os.path.exists(os.path.join(tokenizer, name)):
                shutil.copyfile(os.path.join(tokenizer, name), os.path.join(folder, name))
        if extra:
            extra(folder)
    write_folder(path, write)


def checkpoints(folder, name='checkpoint', file='model.safetensors'):
    """The whole checkpoints `name-<step>` of a run, [(step, path)] in order of the number. Unfinished ones (.tmp) never
    match, nor does a folder without that file (adapters: 'adapter.safetensors')."""
    found = []
    for entry in os.listdir(folder) if os.path.isdir(folder) else []:
        head, _, tail = entry.rpartition('-')
        if head == name and tail.isdecimal() and os.path.isfile(os.path.join(folder, entry, file)):
            found.append((int(tail), os.path.join(folder, entry)))
    return sorted(found)


def latest_checkpoint(folder, **kw):
    """Path of the newest of `checkpoints`, or None."""
    found = checkpoints(folder, **kw)
    return found[-1][1] if found else None
