"""
The model against transformers, against brute force and against itself (packed or alone, one batch or four, one rank or two).

    pytest tests/test_model.py                # tests that need a GPU are skipped with a reason where there is none
"""
import json, math, os, signal, subprocess, sys, time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import model as M
from codec import unfold

torch.set_num_threads(1)
SPECIAL = {'tokeniser_length': 261, 'start_of_text': 258, 'end_of_text': 259, 'start_of_speech': 256, 'end_of_speech': 257, 'tts_pad': 260}
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')


def tiny_model(seed=0, noise=0.1, **kw):
    """3 layers, width 64, on the CPU, without dropout; norms, biases and the null prefix off their initial values."""
    cfg = M.Config(**(dict(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, rope_theta=1e4, audio_embed_dim=8, prefix_heads=4, prefix_dropout=0.0, special_tokens=SPECIAL) | kw))
    model = M.Gepard(cfg)
    model.init_weights(seed)
    g = torch.Generator().manual_seed(seed + 1)
    for p in model.parameters():
        p.data += noise * torch.randn(p.shape, generator=g) * (p.data.std() if p.dim() > 1 else 1.0)
    return model


def random_rows(cfg, lengths, seed=0, texts=None):
    """Rows of these numbers of frames, each with a text of 1-9 tokens and a reference; speakers in pairs."""
    g = np.random.default_rng(seed)
    codes = lambda n: g.integers(0, math.prod(cfg.codec['fsq_levels']), (n, cfg.codec['num_layers'])).astype(np.uint16)
    return [{'text': M.layout(g.integers(0, 256, (texts or range(1, 10))[i % 9]).tolist(), cfg.special_tokens), 'codes': codes(n),
             'ref': codes(4 + i), 'null': False, 'drop': False, 'speaker': i // 2} for i, n in enumerate(lengths)]


def without(rows, *keys):
    return [{k: v for k, v in r.items() if k not in keys} for r in rows]


def spread(a, b):
    """Largest difference, relative to the largest entry of b."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-12))


def _on_rank(rank, fn, file, world):
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', init_method=f'file://{file}', rank=rank, world_size=world)
    fn(rank)
    torch.distributed.destroy_process_group()


def two_ranks(fn):
    """Run fn(rank) in two processes joined by gloo; fn is a function of a test module."""
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_rank, (fn, os.path.join(folder, 'store'), 2), nprocs=2)


def row_logits(out, batch, i):
    """Code logits of row i's frames, its stop logits (last frame included)."""
    mine = batch['frame_row'] == i
    return out['logits'][mine], torch.cat((out['stop_logits'][:len(mine)][mine], out['stop_logits'][len(mine) + i:][:1]))


# ------------------------------------------------------------------ transformers

SHAPES = {
    'square': dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, partial_rotary_factor=1.0),
    'wide heads, quarter rotary': dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=1, head_dim=32, partial_rotary_factor=0.25),
    'narrow heads': dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=6, head_dim=8, partial_rotary_factor=1.0),
    'half rotary, other base': dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=24, partial_rotary_factor=0.5, rope_theta=1e6),
}


def theirs(cfg, cls='Qwen3_5TextModel'):
    """transformers' model of this config with random weights, norms included."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    j = {k: v for k, v in cfg.backbone().items() if k not in ('architectures', 'model_type', 'partial_rotary_factor', 'rope_theta')}
    ref = getattr(qwen, cls)(Qwen3_5TextConfig(**j, attn_implementation='eager')).eval()
    g = torch.Generator().manual_seed(0)
    for p in ref.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) * (0.5 if p.dim() == 1 else p.shape[-1] ** -0.5))
    return ref


@pytest.mark.parametrize('shape', SHAPES)
def test_backbone_equals_transformers(shape):
    """Packed rows here, each row alone there: the same vectors (and the same gradient of the input)."""
    cfg = tiny_model(**SHAPES[shape]).cfg
    ref, ours = theirs(cfg), M.Backbone(cfg)
    M.load_strict(ours, ref.state_dict(), 'transformers', may_ignore=('rotary_emb.',))
    lengths = [9, 1, 17, 4]
    x = torch.randn(sum(lengths), cfg.hidden_size, generator=torch.Generator().manual_seed(1)).requires_grad_()
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    h = ours(x, torch.cat([torch.arange(n) for n in lengths]), M.packed_attention(cu, max(lengths), len(x)))
    weight = torch.randn(h.shape, generator=torch.Generator().manual_seed(2))
    grad, = torch.autograd.grad((h * weight).sum(), x)
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()):
        row = x[a:b].detach().requires_grad_()
        want = ref(inputs_embeds=row[None]).last_hidden_state[0]
        assert spread(h[a:b].detach(), want.detach()) < 1e-5
        assert spread(grad[a:b], torch.autograd.grad((want * weight[a:b]).sum(), row)[0]) < 1e-5


@pytest.fixture(scope='module')
def qwen_dir(tmp_path_factory):
    """A folder as transformers' save_pretrained writes it (causal LM: keys with `model.`), sharded with an index."""
    path = str(tmp_path_factory.mktemp('qwen'))
    cfg = tiny_model().cfg
    theirs(cfg, 'Qwen3_5ForCausalLM').save_pretrained(path, max_shard_size='200KB')
    j = M.read_json(os.path.join(path, 'config.json'))
    assert os.path.exists(os.path.join(path, 'model.safetensors.index.json')) and j['layer_types'] == ['full_attention'] * 3
    return path


def variant(qwen_dir, tmp_path, config=None, tensors=None):
    """A copy of qwen_dir as one file, with its config and tensors changed in place by the given functions."""
    path = str(tmp_path / 'variant')
    os.makedirs(path)
    j, state = M.read_json(os.path.join(qwen_dir, 'config.json')), M.read_tensors(qwen_dir)
    for change, what in ((config, j), (tensors, state)):
        if change:
            change(what)
    with open(os.path.join(path, 'config.json'), 'w') as f:
        json.dump(j, f)
    save_file(state, os.path.join(path, 'model.safetensors'))
    return path


def test_load_qwen(qwen_dir, tmp_path):
    from transformers import AutoModelForCausalLM
    ref = AutoModelForCausalLM.from_pretrained(qwen_dir, dtype=torch.float32).model.state_dict()

    def multimodal(state):      # as the released vision-language checkpoints name them
        for k in list(state):
            state[k.replace('model.', 'model.language_model.', 1)] = state.pop(k)
        state['model.visual.patch.weight'] = torch.zeros(2)
        state['mtp.fc.weight'] = torch.zeros(2)
        state['lm_head.weight'] = torch.zeros(2)

    def nested(j):
        inner = dict(j)
        j.clear()
        j |= {'model_type': 'qwen3_5', 'text_config': inner}

    for path in (qwen_dir, variant(qwen_dir, tmp_path, nested, multimodal)):
        cfg = M.config_from_qwen(path, special_tokens=SPECIAL)
        assert cfg.backbone()['rope_parameters'] == tiny_model().cfg.backbone()['rope_parameters']
        model = M.Gepard(cfg)
        M.load_qwen(model, path)
        model.init_weights(0, backbone=False)
        got = model.model.state_dict()
        assert all(torch.equal(got[k], ref[k]) for k in got) and len(got) == len(ref)
        assert float(model.audio_embed_scale) == pytest.approx(float(ref['embed_tokens.weight'].std()), rel=1e-5)


def bad(**kw):
    return lambda j: j.update(kw)


QWEN_REFUSED = {
    'no layer_types': (lambda j: j.pop('layer_types'), None, 'config.json: no layer_types'),
    'a linear layer': (bad(layer_types=['full_attention', 'linear_attention', 'full_attention']), None, r"layer_types has \['linear_attention'\]"),
    'layer_types too short': (bad(layer_types=['full_attention']), None, '1 layer_types, 3 layers'),
    'another activation': (bad(hidden_act='gelu'), None, 'hidden_act'),
    'scaled rope': (lambda j: j['rope_parameters'].update(rope_type='yarn'), None, "rope_type 'yarn'"),
    'no rotary factor': (lambda j: [j.pop('partial_rotary_factor', 0), j['rope_parameters'].pop('partial_rotary_factor')], None, 'no partial_rotary_factor'),
    'no head_dim': (lambda j: j.pop('head_dim'), None, r"missing \['head_dim'\]"),
    'other config': (bad(num_attention_heads=8), None, r'differs from the model: num_attention_heads 8 \(model: 4\)'),
    'other rotary factor': (lambda j: j['rope_parameters'].update(partial_rotary_factor=0.25), None, r'partial_rotary_factor 0.25 \(model: 1.0\)'),
    'tensor missing': (None, lambda s: s.pop('model.layers.1.mlp.up_proj.weight'), r"missing \['layers.1.mlp.up_proj.weight'\]"),
    'tensor too many': (None, lambda s: s.update({'model.layers.0.mlp.up_proj.bias': torch.zeros(2)}), r"unexpected \['layers.0.mlp.up_proj.bias'\]"),
    'wrong shape': (None, lambda s: s.update({'model.norm.weight': torch.zeros(2)}), r'wrong shape \[.norm.weight \[2\] instead of \[64\]'),
}


@pytest.mark.parametrize('case', QWEN_REFUSED)
def test_load_qwen_refuses(qwen_dir, tmp_path, case):
    config, tensors, message = QWEN_REFUSED[case]
    path = variant(qwen_dir, tmp_path, config, tensors)
    with pytest.raises(ValueError, match=message) as e:
        M.load_qwen(tiny_model(), path)
    assert path in str(e.value) and '\n' not in str(e.value)
    for name, message in (('no/such/folder', 'no such folder'), ('./none', 'no such folder')):
        with pytest.raises(FileNotFoundError, match=message):
            M.load_qwen(tiny_model(), name)


# ------------------------------------------------------------------ packing and learning

@pytest.mark.parametrize('prefix', [True, False])
def test_packed_equals_alone(prefix):
    model = tiny_model().eval()
    rows = random_rows(model.cfg, [5, 1, 12, 3, 1])
    rows[2]['null'], rows[3]['drop'], rows[4]['ref'] = True, True, None
    rows = rows if prefix else without(rows, 'ref')
    with torch.no_grad():
        batch = M.pack(rows, model.cfg)
        out = model(batch)
        for i, r in enumerate(rows):
            one = M.pack([r], model.cfg)
            for a, b in zip(row_logits(out, batch, i), row_logits(model(one), one, 0)):
                assert spread(a.clamp(min=-1e9), b.clamp(min=-1e9)) < 1e-5
    assert M.stop_target(out).tolist() == [0] * 22 + [1] * 5


def test_pack_refuses_a_row_without_frames():
    cfg = tiny_model().cfg
    with pytest.raises(ValueError, match='row 1 has no frames'):
        M.pack(random_rows(cfg, [3, 0]), cfg)


@pytest.mark.parametrize('width', ['tiny', 'released'])
def test_first_loss(width):
    """A fresh model gives each code the same chance: the code loss is sum of ln L over 32 channels, 60.9."""
    big = dict(M.Config().__dict__, num_hidden_layers=2, vocab_size=300, special_tokens=SPECIAL)
    model = tiny_model(noise=0.0, **(big if width == 'released' else {}))
    rows = random_rows(model.cfg, [20, 30])
    count = {'frames': 50, 'stops': 52, 'rows': 2}
    with torch.no_grad():
        batch = M.pack(rows, model.cfg)
        r = M.losses(model(batch), batch, model.cfg, count)
    assert sum(math.log(n) for n in model.cfg.levels) == pytest.approx(60.9, abs=0.05)
    assert float(r['code']) == pytest.approx(60.9, rel=0.1)


@pytest.fixture(scope='module')
def overfit():
    """A tiny model that has learned three rows by heart, the second with its prefix and without."""
    model = tiny_model(noise=0.0, num_hidden_layers=2)
    rows = random_rows(model.cfg, [17, 6, 11], texts=[8, 3, 5] * 3)
    bare = without(rows[1:2], 'ref')
    count = {'frames': 34 + 6, 'stops': 37 + 1, 'rows': 3}
    opt = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    batch, batch2 = M.pack(rows, model.cfg), M.pack(bare, model.cfg)
    for step in range(250):
        opt.param_groups[0]['lr'] = 6e-3 * min(1, (step + 1) / 20, (250 - step) / 150)
        r, r2 = (M.losses(model(b), b, model.cfg, count) for b in (batch, batch2))
        opt.zero_grad()
        (r['total'] + r2['total']).backward()
        opt.step()
    return model.eval(), rows, float(r['code'] + r2['code'])


def test_overfit_one_row(overfit):
    """Code loss near 0 at frame j+1; arg-max decoding returns the rows exactly, with and without prefix, alone and
    together with longer ones, and each ends at its own last frame."""
    model, rows, loss = overfit
    assert loss < 0.1           # of 60.9
    with torch.no_grad():
        refs = [unfold(torch.from_numpy(r['ref'].astype(np.int64)))[None] for r in rows]
        prefix = torch.cat([model.speaker_prefix(r, torch.ones(r.shape[:2], dtype=torch.bool))[0] for r in refs])
    want = [unfold(torch.from_numpy(r['codes'].astype(np.int64))) for r in rows]
    texts = [r['text'] for r in rows]
    runs = [([1], prefix[1:2]), ([1], None), ([0, 1, 2], prefix), ([2, 1, 0], prefix[[2, 1, 0]])]
    for which, p in runs:
        got = M.generate(model, [texts[i] for i in which], p, max_frames=40, temperature=0)
        for i, g in zip(which, got):
            assert torch.equal(g['codes'], want[i]) and g['ended_by'] == 'stop_head'
    with torch.no_grad():
        batch = M.pack(rows, model.cfg)
        stop = torch.sigmoid(model(batch)['stop_logits'])
    assert stop[:34].max() < 0.1 and stop[34:].min() > 0.9


# ------------------------------------------------------------------ gradients do not depend on how rows are dealt out

GRAD_ROWS = [5, 1, 9, 3]


def gradients(model, batches, count, supcon_weight=0.0):
    model.zero_grad()
    for b in batches:
        b = M.pack(b, model.cfg)
        M.losses(model(b), b, model.cfg, count, 0.3, supcon_weight)['total'].backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def test_micro_batches():
    model = tiny_model(supcon_dim=0, supcon_hidden=0)
    rows = random_rows(model.cfg, GRAD_ROWS)
    rows[3]['drop'] = True
    count = {'frames': sum(GRAD_ROWS), 'stops': sum(GRAD_ROWS) + 4, 'rows': 4}
    whole = gradients(model, [rows], count)
    assert all(g.abs().max() > 0 for g in whole.values())
    for n in (1, 2):
        parts = gradients(model, [rows[i:i + n] for i in range(0, 4, n)], count)
        assert max(spread(parts[k], whole[k]) for k in whole) < 1e-5


def sharded(rank):
    """Half of the rows on each rank under FSDP2, contrastive loss over the rows of both: the gradient of one process with all rows."""
    from torch.distributed.fsdp import fully_shard
    model, whole = tiny_model(), tiny_model()
    rows = random_rows(model.cfg, GRAD_ROWS)
    rows[3]['drop'] = True
    for i, speaker in enumerate((0, 1, 0, 1)):      # the positive pair of each row lies on the other rank
        rows[i]['speaker'] = speaker
    count = {'frames': sum(GRAD_ROWS), 'stops': sum(GRAD_ROWS) + 4, 'rows': 4}
    gather, M.gather_rows = M.gather_rows, lambda x: x
    want = gradients(whole, [rows], count, supcon_weight=0.3)
    M.gather_rows = gather
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    got = gradients(model, [rows[2 * rank:2 * rank + 2]], count, supcon_weight=0.3)
    for name, g in got.items():
        g = g.full_tensor() * 2                     # FSDP takes the mean over ranks, the loss is a sum
        assert spread(g, want[name]) < 1e-5, name
    assert want['supcon_head.fc2.weight'].abs().max() > 0


def test_two_ranks():
    two_ranks(sharded)
