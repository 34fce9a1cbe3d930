"""
The model against transformers, against brute force and against itself (packed or alone, one batch or four, one rank or two).

    pytest tests/test_model.py                # tests that need a GPU are skipped with a reason where there is none
"""
import json, math, os, resource, signal, time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import model as M
from codec import fold, unfold

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
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def _on_rank(rank, fn, file, world):
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', init_method=f'file://{file}', rank=rank, world_size=world)
    fn(rank)
    torch.distributed.destroy_process_group()


def two_ranks(fn):
    """Run fn(rank) in two processes on the CPU, joined by gloo; fn is a function of a test module."""
    import tempfile
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as env:
        env.setenv('CUDA_VISIBLE_DEVICES', '')
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
    h = ours(x, torch.cat([torch.arange(n) for n in lengths]), M.packed_attention, (cu, max(lengths)))
    weight = torch.randn(h.shape, generator=torch.Generator().manual_seed(2))
    grad, = torch.autograd.grad((h * weight).sum(), x)
    for a, b in zip(cu[:-1].tolist(), cu[1:].tolist()):
        row = x[a:b].detach().requires_grad_()
        want = ref(inputs_embeds=row[None]).last_hidden_state[0]
        assert spread(h[a:b], want) < 1e-5
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
    lengths = batch['cu_seqlens'].diff().tolist()
    assert lengths == [8 * prefix + len(r['text']) + len(r['codes']) for r in rows]
    assert batch['position'].tolist() == [i for n in lengths for i in range(n)]
    if prefix:      # a null row and one without a reference never see the zero frame that stands for it
        assert batch['drop'].tolist() == [False, False, True, True, True] and batch['null'].tolist() == [False, False, True, False, True]
        assert batch['ref_mask'].sum(1).tolist() == [4, 5, 6, 7, 1]


def test_hidden_frames():
    """What a row hides of itself changes no output, nor does it reach the tables; it is predicted all the same."""
    model = tiny_model()
    rows = random_rows(model.cfg, [9, 5])
    for r, hidden in zip(rows, ((1, 2, 7), ())):
        r['hidden'] = np.isin(np.arange(len(r['codes'])), hidden)
    out = model(M.pack(rows, model.cfg))
    for frames, same in (((1, 2, 7), True), ((3,), False)):
        other = [dict(r, codes=r['codes'].copy()) for r in rows]
        other[0]['codes'][list(frames)] ^= 1
        got = model(M.pack(other, model.cfg))
        assert torch.equal(got['logits'], out['logits']) == torch.equal(got['stop_logits'], out['stop_logits']) == same
        assert not torch.equal(got['codes'], out['codes'])


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
    return model.eval(), rows, float((r['code'] + r2['code']).detach())


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


def test_supcon_is_in_float32():
    """Under autocast too: products of nearly equal voices in 16 bit would all be 1."""
    z, g = F.normalize(torch.ones(12, 32) + 0.1 * torch.randn(12, 32, generator=torch.Generator().manual_seed(0)), dim=-1), []
    for dtype in (torch.float32, torch.bfloat16):
        x = z.clone().requires_grad_()
        with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss, stats = M.supcon(x, torch.arange(12) // 3, torch.zeros(12, dtype=torch.bool))
        loss.backward()
        g.append((x.grad, loss.detach(), stats['positive']))
    assert all(torch.equal(a, b) for a, b in zip(*g)) and g[0][2] > 0.98


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
    mesh = torch.distributed.init_device_mesh('cpu', (2,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    got = gradients(model, [rows[2 * rank:2 * rank + 2]], count, supcon_weight=0.3)
    for name, g in got.items():
        g = g.full_tensor() * 2                     # FSDP takes the mean over ranks, the loss is a sum
        assert spread(g, want[name]) < 1e-5, name
    assert want['supcon_head.fc2.weight'].abs().max() > 0


def test_two_ranks():
    two_ranks(sharded)


# ------------------------------------------------------------------ generation

def texts_of(cfg, n, seed=5):
    return [r['text'] for r in random_rows(cfg, [1] * n, seed)]


def speak(model, which, texts, prefix, **kw):
    """generate() for some of the rows; per-row settings are lists over all rows."""
    pick = lambda v: [v[i] for i in which] if isinstance(v, list) else v
    return M.generate(model, [texts[i] for i in which], None if prefix is None else prefix[which], **{k: pick(v) for k, v in kw.items()})


@pytest.fixture(scope='module')
def speaker():
    """A tiny model whose stop head fires now and then, 4 texts and prefixes."""
    model = tiny_model(noise=0.3).eval()
    model.stop_head.weight.data *= 30
    model.codebook_heads.weight.data *= 10
    with torch.no_grad():
        ref = torch.stack([unfold(torch.from_numpy(r['ref'][:4].astype(np.int64))) for r in random_rows(model.cfg, [1] * 4)])
        prefix = model.speaker_prefix(ref, torch.ones(ref.shape[:2], dtype=torch.bool))[0]
    return model, texts_of(model.cfg, 4), prefix


@pytest.mark.parametrize('kw', [
    dict(temperature=0), dict(temperature=0.9), dict(temperature=0.7, top_k=3), dict(temperature=0.9, cfg_scale=3.0, cfg_frames=4),
    dict(temperature=0.9, cfg_scale=2.0, cfg_frames=0, uncond='audio_only'), dict(temperature=0.5, repetition_penalty=1.3, repetition_window=4)],
    ids=lambda kw: ' '.join(f'{k}={v}' for k, v in kw.items()))
@pytest.mark.parametrize('voiced', [True, False])
def test_batch_equals_one_by_one(speaker, kw, voiced):
    """Texts, frame caps and seeds of its own in each row; neither neighbours nor their order matter."""
    model, texts, prefix = speaker
    prefix = prefix if voiced else None
    kw = dict(kw, max_frames=[3, 12, 7, 1], seeds=[11, 12, 13, 14])
    together = speak(model, [0, 1, 2, 3], texts, prefix, **kw)
    alone = [speak(model, [i], texts, prefix, **kw)[0] for i in range(4)]
    turned = speak(model, [3, 2, 1, 0], texts, prefix, **kw)[::-1]
    for i, (a, b, c) in enumerate(zip(together, alone, turned)):
        assert torch.equal(a['codes'], b['codes']) and torch.equal(a['codes'], c['codes'])
        assert a['ended_by'] == b['ended_by'] == c['ended_by'] and a['stop_probs'] == pytest.approx(b['stop_probs'], rel=1e-3, abs=1e-6)
        assert 1 <= len(a['codes']) <= kw['max_frames'][i] and (a['ended_by'] == 'stop_head' or len(a['codes']) == kw['max_frames'][i])


def test_seeds(speaker):
    model, texts, prefix = speaker
    run = lambda seeds: speak(model, [0, 0, 0], texts, prefix, temperature=1.0, max_frames=5, stop_threshold=1.0, seeds=seeds)
    a, b, c = run((1, 2, 1))
    assert torch.equal(a['codes'], c['codes']) and not torch.equal(a['codes'], b['codes'])
    assert all(torch.equal(x['codes'], y['codes']) for x, y in zip(run(None), run((0, 1, 2))))


def test_uncached(speaker):
    """Arg-max decoding with the cache equals a whole forward for each frame."""
    model, texts, prefix = speaker
    for i, g in enumerate(speak(model, [0, 1, 2, 3], texts, prefix, temperature=0, max_frames=6, stop_threshold=1.0)):
        row = {'text': texts[i], 'prefix': prefix[i], 'codes': np.zeros((1, 8), np.uint16)}
        for frame in g['codes']:
            with torch.no_grad():
                logits = model(M.pack([row], model.cfg))['logits'][-1]
            assert torch.equal(logits.argmax(-1), frame)
            row['codes'] = np.concatenate((row['codes'][:-1], fold(frame[None]).numpy(), row['codes'][-1:]))


def test_streaming_callback(speaker):
    """Each frame of each row is announced once, in order, while the row runs."""
    model, texts, prefix = speaker
    heard, steps = [[] for _ in texts], []

    def on_frame(step, codes, running):
        steps.append(step)
        for i in running.nonzero()[:, 0].tolist():
            heard[i].append(codes[i].clone())

    got = speak(model, [0, 1, 2, 3], texts, prefix, temperature=0.9, max_frames=[3, 12, 7, 1], on_frame=on_frame)
    assert steps == list(range(max(len(g['codes']) for g in got)))
    for g, h in zip(got, heard):
        assert torch.equal(torch.stack(h), g['codes'])


def test_guidance_of_scale_one_is_none(speaker):
    model, texts, prefix = speaker
    run = lambda **kw: speak(model, [0, 1, 2], texts, prefix, temperature=0.8, max_frames=6, stop_threshold=1.0, **kw)
    plain, one, strong = run(), run(cfg_scale=1.0, cfg_frames=0, uncond='audio_only'), run(cfg_scale=3.0)
    assert all(torch.equal(a['codes'], b['codes']) for a, b in zip(plain, one))
    assert any(not torch.equal(a['codes'], b['codes']) for a, b in zip(plain, strong))
    # cond + (scale - 1) * (cond - uncond): next to 1 it is next to nothing, so arg-max codes stay
    near = [run(top_k=1, cfg_scale=s, cfg_frames=0) for s in (1.0, 1.0 + 1e-6)]
    assert all(torch.equal(a['codes'], b['codes']) for a, b in zip(*near))


def test_forced_stop(speaker):
    model, texts, prefix = speaker
    for g in speak(model, [0, 1], texts, prefix, temperature=0, max_frames=9, stop_threshold=1.0, force_stop_frames=4):
        assert len(g['codes']) == 4 and g['ended_by'] == 'force_stop_frames'


@pytest.mark.parametrize('kw, message', [
    (dict(texts=[[1, 2]]), 'laid out'), (dict(texts=[[]]), 'laid out'), (dict(texts=[]), 'no texts'), (dict(force_stop_frames=0), 'force_stop_frames must be at least 1'),
    (dict(uncond='nothing'), "'nothing'"), (dict(max_frames=0), 'max_frames must be at least 1'), (dict(max_frames=[5, 0]), 'max_frames must be at least 1'),
    (dict(temperature=-1), 'must not be negative'), (dict(top_k=-1), 'must not be negative'), (dict(cfg_frames=-1), 'must not be negative'),
    (dict(repetition_window=-1), 'must not be negative'), (dict(repetition_penalty=0), 'repetition_penalty must be positive'),
    (dict(max_frames=[5, 5, 5]), 'max_frames: 3 for 2 texts'), (dict(seeds=[1]), 'seeds: 1 for 2 texts'), (dict(prefix=torch.zeros(1, 8, 64)), 'prefix: 1 for 2 texts')],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)))
def test_bad_arguments(speaker, kw, message):
    model, texts, _ = speaker
    kw = {'texts': texts[:2], 'max_frames': 3} | kw
    with pytest.raises(ValueError, match=message) as e:
        M.generate(model, kw.pop('texts'), **kw)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('temperature, top_k', [(1.0, 0), (0.6, 0), (1.5, 3)])
def test_sampling_follows_softmax(temperature, top_k):
    """Frequencies of the first frame's codes over 4000 seeds against softmax(logits / temperature), chi-square by channel."""
    model = tiny_model(num_hidden_layers=1).eval()
    model.codebook_heads.weight.data *= 10
    text, n = M.layout([7, 8], SPECIAL), 4000
    got = torch.cat([torch.stack([g['codes'][0] for g in M.generate(
        model, [text] * 500, max_frames=1, temperature=temperature, top_k=top_k, seeds=list(range(s, s + 500)))]) for s in range(0, n, 500)])
    with torch.no_grad():
        logits = model(M.pack([{'text': text, 'codes': np.zeros((1, 8), np.uint16)}], model.cfg))['logits'][0]      # [K, L]
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float('-inf'))
    p = (logits / temperature).softmax(-1).double()
    seen = F.one_hot(got, 8).sum(0).double()                                        # [K, L]
    assert seen[p == 0].sum() == 0
    used = n * p >= 5
    chi, dof = ((seen - n * p).square() / (n * p))[used].sum(), int(used.sum()) - len(p)
    assert abs(chi - dof) < 5 * (2 * dof) ** 0.5, (chi, dof)
    # channels are drawn apart: no correlation between their codes
    x = got.double() - got.double().mean(0)
    c = torch.corrcoef(x.T)[~torch.eye(len(p), dtype=torch.bool)]
    assert c.abs().max() < 5 / n ** 0.5


# ------------------------------------------------------------------ preference training

def test_trajectory_logprob_by_brute_force():
    """One forward for each frame, in which that frame is the last: nothing later can leak in."""
    model = tiny_model().eval()
    model.stop_head.weight.data *= 3
    rows = random_rows(model.cfg, [4, 1, 7])
    truncated = torch.tensor([False, True, True])
    batch = M.pack(rows, model.cfg)
    with torch.no_grad():
        tokens, stop, frames = M.trajectory_logprob(model(batch), batch, truncated)
        for i, r in enumerate(rows):
            want_tokens = want_stop = 0.0
            codes = unfold(torch.from_numpy(r['codes'].astype(np.int64)))
            for j in range(len(codes)):
                out = model(M.pack([r | {'codes': r['codes'][:j + 1]}], model.cfg))
                for k in range(len(model.cfg.levels)):
                    want_tokens += float(out['logits'][j, k, :model.cfg.levels[k]].double().softmax(-1)[codes[j, k]].log())
                p = float(torch.sigmoid(out['stop_logits'][-1].double()).clamp(1e-4, 1 - 1e-4))
                last = j == len(codes) - 1
                want_stop += (0 if truncated[i] else math.log(p)) if last else math.log(1 - p)
            assert float(tokens[i]) == pytest.approx(want_tokens, rel=1e-5)
            assert float(stop[i]) == pytest.approx(want_stop, rel=1e-5, abs=1e-6)
    assert frames.tolist() == [4, 1, 7]


# ------------------------------------------------------------------ checkpoints

def test_kill_during_save(tmp_path):
    """SIGKILL at random moments of a saving process: every folder without .tmp is whole, the newest is found by number."""
    model, folder = tiny_model(), str(tmp_path)
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def save(step):
        state['stop_head.bias'].fill_(step)
        M.save_checkpoint(os.path.join(folder, f'checkpoint-{step}'), state, model.cfg, None, {'step': step})

    save(200)
    assert M.latest_checkpoint(folder).endswith('checkpoint-200')
    first, cut, wait = 1000, 0, np.random.default_rng(0)
    for attempt in range(10):
        pid = os.fork()
        if pid == 0:                # the process that saves; it never comes back
            try:
                for step in range(first, first + 10**6):
                    save(step)
            finally:
                os._exit(1)
        time.sleep(wait.uniform(0.02, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        whole = [int(n.split('-')[1]) for n in os.listdir(folder) if not n.endswith('.tmp')]
        cut += any(n.endswith('.tmp') for n in os.listdir(folder))
        latest = M.latest_checkpoint(folder)
        assert latest == os.path.join(folder, f'checkpoint-{max(whole)}')
        assert float(M.load_checkpoint(latest)[0].stop_head.bias.detach()) == max(whole) == M.read_json(os.path.join(latest, 'training_metadata.json'))['step']
        first = max(max(whole) + 1, 1000)       # so that the cut one is written again, over its remains
    assert cut > 0 and len(whole) > 1


def test_latest_checkpoint(tmp_path):
    for name in ('checkpoint-200', 'checkpoint-1000', 'checkpoint-2000.tmp', 'checkpoint-', 'checkpoint-3000x', 'other-5000', 'checkpoint--7'):
        os.makedirs(tmp_path / name)
        (tmp_path / name / 'model.safetensors').touch()
    os.makedirs(tmp_path / 'checkpoint-9000')           # no weights inside
    assert M.latest_checkpoint(str(tmp_path)) == str(tmp_path / 'checkpoint-1000')
    assert M.latest_checkpoint(str(tmp_path / 'none')) is None and M.latest_checkpoint(str(tmp_path / 'other-5000')) is None


@pytest.fixture
def saved(tmp_path):
    model = tiny_model()
    path = str(tmp_path / 'checkpoint-1')
    M.save_checkpoint(path, model.state_dict(), model.cfg, None, {})
    return path


def rewrite(path, change):
    """Change a checkpoint's tensors (dict) in place."""
    file = os.path.join(path, 'model.safetensors')
    state = {k: v.clone() for k, v in load_file(file).items()}
    change(state)
    save_file(state, file)


def rewrite_config(path, change):
    file = os.path.join(path, 'gepard_config.json')
    j = M.read_json(file)
    change(j)
    with open(file, 'w') as f:
        json.dump(j, f)


def cut(path, name='model.safetensors', keep=0.5):
    file = os.path.join(path, name)
    os.truncate(file, int(os.path.getsize(file) * keep))


def out_of_order(j):
    j['audio_heads'] = dict(reversed(j['audio_heads'].items()))


BROKEN = {
    'cut weights': (cut, 'model.safetensors: cannot be read as safetensors'),
    'empty weights': (lambda p: cut(p, keep=0), 'model.safetensors: cannot be read as safetensors'),
    'no weights': (lambda p: os.remove(os.path.join(p, 'model.safetensors')), 'model.safetensors: no such file'),
    'missing tensor': (lambda p: rewrite(p, lambda s: s.pop('model.norm.weight')), r"model.safetensors: missing \['model.norm.weight'\]"),
    'missing table': (lambda p: rewrite(p, lambda s: s.pop('audio_embeddings.31.weight')), "model.safetensors: missing 'audio_embeddings.31.weight'"),
    'missing null prefix': (lambda p: rewrite(p, lambda s: s.pop('null_prefix')), r"missing \['null_prefix'\]"),
    'extra tensor': (lambda p: rewrite(p, lambda s: s.update(lm_head=torch.zeros(2))), r"unexpected \['lm_head'\]"),
    'extra table': (lambda p: rewrite(p, lambda s: s.update({'audio_embeddings.32.weight': torch.zeros(8, 8)})), r"unexpected \['audio_embeddings.32.weight'\]"),
    'wrong shape': (lambda p: rewrite(p, lambda s: s.update({'stop_head.weight': torch.zeros(1, 8)})), r'wrong shape \[.stop_head.weight \[1, 8\]'),
    'wrong table shapes': (lambda p: rewrite(p, lambda s: s.update({'codebook_heads.0.weight': torch.zeros(7, 64), 'codebook_heads.1.weight': torch.zeros(8, 64)})),
                           'model.safetensors: codebook_heads.0.weight has 7 rows instead of 8, codebook_heads.1.weight has 8 rows instead of 7'),
    'adapters inside': (lambda p: rewrite(p, lambda s: s.update({'model.layers.0.self_attn.q_proj.lora_A': torch.zeros(4, 64)})), 'unexpected .*lora_A'),
    'config not JSON': (lambda p: cut(p, 'gepard_config.json'), 'gepard_config.json: not JSON'),
    'no config': (lambda p: os.remove(os.path.join(p, 'gepard_config.json')), 'gepard_config.json: no such file'),
    'missing key': (lambda p: rewrite_config(p, lambda j: j.pop('audio_heads')), "gepard_config.json: missing key 'audio_heads'"),
    'missing inner key': (lambda p: rewrite_config(p, lambda j: j['voice_cloning']['compressor'].pop('num_heads')), "missing key 'num_heads'"),
    'missing prefix': (lambda p: rewrite_config(p, lambda j: j.pop('voice_cloning')), 'voice_cloning is missing, but .*model.safetensors has a speaker prefix'),
    'no prefix settings': (lambda p: rewrite_config(p, lambda j: j.update(voice_cloning=None)), 'voice_cloning is missing'),
    'heads out of order': (lambda p: rewrite_config(p, out_of_order), 'audio_heads are out of order'),
    'linear attention': (lambda p: rewrite_config(p, lambda j: j['backbone_config'].update(layer_types=['linear_attention'] * 3)), 'gepard_config.json: layer_types'),
    'prefix of another width': (lambda p: rewrite_config(p, lambda j: j['voice_cloning']['compressor'].update(d_model=32)), 'd_model 32'),
}


@pytest.mark.parametrize('case', BROKEN)
def test_broken_checkpoint(saved, case):
    damage, message = BROKEN[case]
    damage(saved)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as e:
        M.load_checkpoint(saved)
    assert saved in str(e.value) and '\n' not in str(e.value)


def test_older_files(saved):
    """0-dim scalars are read; the contrastive head may be missing, and then the model says so."""
    want = tiny_model().state_dict()
    rewrite(saved, lambda s: [s.update({k: s[k].reshape(())}) for k in ('audio_embed_scale', 'ref_compressor.output_scale')]
            + [s.pop(k) for k in list(s) if k.startswith('supcon_head.')])
    model, folder = M.load_checkpoint(saved)
    assert folder == saved and not model.training
    assert all(torch.equal(v, want[k]) for k, v in model.state_dict().items() if not k.startswith('supcon_head.'))


def test_bfloat16_round_trip(tmp_path):
    model = tiny_model().to(torch.bfloat16)
    path = str(tmp_path / 'checkpoint-1')
    M.save_checkpoint(path, model.state_dict(), model.cfg, None, {})
    assert all(t.dtype == torch.bfloat16 for t in load_file(os.path.join(path, 'model.safetensors')).values())
    assert M.read_json(os.path.join(path, 'gepard_config.json'))['model_dtype'] == M.read_json(os.path.join(path, 'config.json'))['dtype'] == 'bfloat16'
    for dtype in (torch.float32, torch.bfloat16):
        again = M.load_checkpoint(path, dtype=dtype)[0]
        assert all(torch.equal(v, model.state_dict()[k].to(dtype)) for k, v in again.state_dict().items())
    rows = random_rows(model.cfg, [3, 1])
    with torch.no_grad():
        batch = M.pack(rows, model.cfg)
        for a, b in zip(row_logits(again(batch), batch, 0), row_logits(M.load_checkpoint(path)[0](batch), batch, 0)):
            assert spread(a.clamp(min=-1e9), b.clamp(min=-1e9)) < 0.05
    assert len(M.generate(again, [r['text'] for r in rows], max_frames=3, stop_threshold=1.0)[0]['codes']) == 3


def test_tokenizer_files_travel(saved, tmp_path):
    os.makedirs(tmp_path / 'tok')
    for name in ('tokenizer.json', 'tokenizer_config.json', 'secret.txt'):
        (tmp_path / 'tok' / name).write_text('{}')
    model, path = tiny_model(), str(tmp_path / 'checkpoint-2')
    M.save_checkpoint(path, model.state_dict(), model.cfg, str(tmp_path / 'tok'), {'step': 2}, lambda folder: open(os.path.join(folder, 'resume.pt'), 'w').close())
    assert sorted(os.listdir(path)) == ['config.json', 'gepard_config.json', 'model.safetensors', 'resume.pt', 'tokenizer.json', 'tokenizer_config.json', 'training_metadata.json']


# ------------------------------------------------------------------ on a GPU

@cuda
def test_cuda_varlen_attention():
    """The 16-bit varlen kernel against the exact fp32 path on the same numbers, rows of 1 to 300 tokens: 2 % of the largest entry."""
    lengths = [5, 1, 300, 64, 2]
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device='cuda')
    g = torch.Generator('cuda').manual_seed(0)
    q, k, v, w = (torch.randn(sum(lengths), h, 64, device='cuda', generator=g).bfloat16().float() for h in (8, 2, 2, 8))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        y = M.packed_attention((cu, max(lengths)), *inputs)
        results.append([y.detach(), *torch.autograd.grad((y.float() * w).sum(), inputs)])
    for exact, fast in zip(*results):
        assert exact.dtype == torch.float32 and fast.dtype == torch.bfloat16
        assert spread(fast, exact) < 0.02


def cuda_loss(model, rows, cast=True):
    """Loss and gradients on the GPU, bf16 autocast or fp32."""
    batch = {k: v.cuda() if torch.is_tensor(v) else v for k, v in M.pack(rows, model.cfg).items()}
    n = sum(len(r['codes']) for r in rows)
    model.zero_grad()
    with torch.autocast('cuda', torch.bfloat16, enabled=cast):
        loss = M.losses(model(batch), batch, model.cfg, {'frames': n, 'stops': n + len(rows), 'rows': len(rows)}, 0.3, 0.3)['total']
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@cuda
def test_cuda_bfloat16_training():
    """Loss and gradient in bf16 against fp32, on the GPU and on the CPU."""
    model = tiny_model().cuda()
    rows = random_rows(model.cfg, [40, 1, 9, 130])
    exact, fast = cuda_loss(model, rows, cast=False), cuda_loss(model, rows)
    assert fast[0] == pytest.approx(exact[0], rel=0.01)
    assert F.cosine_similarity(fast[1], exact[1], dim=0) > 0.995
    model, batch = model.cpu(), M.pack(rows, model.cfg)
    cpu = M.losses(model(batch), batch, model.cfg, {'frames': 180, 'stops': 184, 'rows': 4}, 0.3, 0.3)['total']
    assert exact[0] == pytest.approx(float(cpu.detach()), rel=1e-5)


@cuda
def test_cuda_compiled():
    """Compiled with dynamic shapes equals eager, on batches of different shapes."""
    model = tiny_model(num_hidden_layers=2).cuda()
    import copy
    run = copy.deepcopy(model)
    for part in (*run.model.layers, run.ref_compressor):                 # as pretrain.py does
        part.compile(dynamic=True)
    for lengths in ([40, 1, 9, 130], [7, 3], [1, 1, 1]):
        rows = random_rows(model.cfg, lengths, seed=len(lengths))
        eager, fast = cuda_loss(model, rows), cuda_loss(run, rows)
        assert fast[0] == pytest.approx(eager[0], rel=0.005)
        assert F.cosine_similarity(fast[1], eager[1], dim=0) > 0.995


@cuda
def test_cuda_generate(overfit):
    """The same frames as on the CPU in fp32, arg-max and sampled: a row's noise is drawn on the CPU from its seed."""
    import copy
    model, rows, _ = overfit
    gpu, texts = copy.deepcopy(model).cuda(), [r['text'] for r in rows]
    for kw in (dict(temperature=0), dict(temperature=1.5, seeds=[4, 5, 6])):
        a, b = (M.generate(m, texts, max_frames=12, **kw) for m in (model, gpu))
        for x, y in zip(a, b):
            assert torch.equal(x['codes'], y['codes'].cpu()) and x['ended_by'] == y['ended_by']


def test_voices_and_prompt():
    """Clips one by one equal the padded batch of training; no clip is the null prefix. A prompt is laid out as the checkpoint says."""
    model = tiny_model()
    rng = np.random.default_rng(0)
    refs = [rng.integers(0, 2016, (n, 8)).astype(np.uint16) for n in (5, 1, 9)]
    got = model.voices([refs[0], None, *refs[1:]])
    codes = torch.zeros(3, 9, 8, dtype=torch.long)
    for i, r in enumerate(refs):
        codes[i, :len(r)] = torch.from_numpy(r.astype(np.int64))
    mask = torch.arange(9) < torch.tensor([[5], [1], [9]])
    want = model.speaker_prefix(M.unfold(codes), mask)[0]
    torch.testing.assert_close(got[[0, 2, 3]], want, rtol=1e-5, atol=1e-6)
    assert torch.equal(got[1], model.null_prefix)
    special = model.cfg.special_tokens
    assert M.prompt([7, 8], model.cfg) == M.layout([7, 8], special)
    model.cfg.text_repetition = model.cfg.text_repetition | {'enabled': True}
    assert M.prompt([7, 8], model.cfg) == M.layout([7, 8], special, 8)


def test_tensors_of_parts_switched_off_are_passed_over(tmp_path):
    """A checkpoint whose config has voice cloning off still loads where the file keeps the prefix's tensors."""
    model = tiny_model()
    path = str(tmp_path / 'checkpoint-1')
    M.save_checkpoint(path, model.state_dict(), model.cfg, None, {})
    config = M.read_json(path + '/gepard_config.json')
    config['voice_cloning']['enabled'] = False
    with open(path + '/gepard_config.json', 'w') as f:
        json.dump(config, f)
    again, _ = M.load_checkpoint(path)
    assert again.cfg.num_queries == 0 and not hasattr(again, 'null_prefix')
    assert torch.equal(again.model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize('change, words', [
    (lambda j: j['special_tokens'].update(start_of_text=99999), 'start_of_text 99999 is not an id below vocab_size'),
    (lambda j: j['special_tokens'].pop('start_of_speech'), "missing key 'start_of_speech'"),
    (lambda j: j['text_repetition'].pop('enabled'), "missing key 'enabled'"),
    (lambda j: j['codec'].pop('codec_id'), "missing key 'codec_id'"),
    (lambda j: j['voice_cloning']['compressor'].update(num_heads=3), 'num_heads 3 does not divide'),
    (lambda j: j.update(audio_heads=[8, 7]), 'a value of the wrong kind'),
    (lambda j: j['codec'].update(num_layers=7), 'audio_heads are not codec fsq_levels'),
    (lambda j: j.update(audio_embed_dim='8'), "audio_embed_dim is '8', not int"),
    (lambda j: j['voice_cloning']['compressor'].update(num_heads='8'), "num_heads is '8', not int"),
    (lambda j: j['voice_cloning']['compressor'].update(num_heads=0), 'num_heads 0 does not divide'),
    (lambda j: j['backbone_config'].update(hidden_size=None), 'hidden_size is None, not int'),
    (lambda j: j['voice_cloning']['compressor'].update(dropout=None), 'dropout is None, not float'),
])
def test_damaged_config_is_one_named_line(change, words):
    j = tiny_model().cfg.to_json('float32')
    j = json.loads(json.dumps(j))
    change(j)
    with pytest.raises(ValueError) as e:
        M.config_from_json(j, 'x/gepard_config.json')
    assert str(e.value).startswith('x/gepard_config.json: ') and words in str(e.value)


def test_a_log_on_a_full_disk(tmp_path, capsys):
    """The line is lost, the file is whole and the run goes on."""
    log, limits = str(tmp_path / 'metrics.jsonl'), resource.getrlimit(resource.RLIMIT_FSIZE)
    M.append_line(log, '{"step": 1}')
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        M.append_line(log, '{"step": 2}')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f'{log}: a line is not written (File too large)' in capsys.readouterr().err
    M.append_line(log, '{"step": 3}')
    assert [json.loads(line)['step'] for line in open(log)] == [1, 3]
