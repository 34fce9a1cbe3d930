"""
The refilled batch behind `generate`: slots, order and neighbours must not matter. `generate` itself is in test_model.py and test_golden.py.

    pytest tests/test_decoder.py
"""
import functools

import numpy as np
import pytest
import torch

import model as M
from codec import fold
from test_model import cuda, spread, texts_of, tiny_model


@pytest.fixture(scope='module')
def jobs():
    """A tiny model whose stop head fires now and then; 20 jobs of their own texts, voices, seeds and caps."""
    model = tiny_model(noise=0.3).eval()
    model.stop_head.weight.data *= 30
    model.codebook_heads.weight.data *= 10
    prefix = torch.randn(20, 8, model.cfg.hidden_size, generator=torch.Generator().manual_seed(0))
    return model, [(t, p, 100 + i, 1 + 7 * i % 23) for i, (t, p) in enumerate(zip(texts_of(model.cfg, 20), prefix))]


def decode(model, jobs, slots, **kw):
    d = M.Decoder(model, slots, 8 + max(len(j[0]) for j in jobs), max(j[3] for j in jobs), **kw)
    results = dict(d.run(jobs))
    assert sorted(results) == list(range(len(jobs)))
    return [results[i] for i in range(len(jobs))]


def equal(a, b):
    for i, (x, y) in enumerate(zip(a, b)):
        assert torch.equal(x['codes'], y['codes']) and x['ended_by'] == y['ended_by'], i
        torch.testing.assert_close(x['logp'], y['logp'], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('kw', [
    dict(temperature=0.9), dict(temperature=0.9, cfg_scale=3.0, cfg_frames=4), dict(temperature=0.9, cfg_scale=3.0, cfg_frames=0),
    dict(temperature=0.7, repetition_penalty=1.3), dict(temperature=0.7, top_k=3, force_stop_frames=6)], ids=lambda kw: ' '.join(f'{k}={v}' for k, v in kw.items()))
def test_slots_and_order_do_not_matter(jobs, kw):
    """All at once, or through 1, 3 and 16 slots that are refilled as they come free; forwards and backwards."""
    model, jobs = jobs
    want = decode(model, jobs, 20, **kw)
    assert len({r['ended_by'] for r in want}) >= 2 and all(1 <= len(r['codes']) <= j[3] for r, j in zip(want, jobs))
    for slots in (1, 3, 16):
        equal(decode(model, jobs, slots, **kw), want)
    equal(decode(model, jobs[::-1], 5, **kw)[::-1], want)


def test_a_decoder_serves_again(jobs):
    model, jobs = jobs
    d = M.Decoder(model, 4, 8 + max(len(j[0]) for j in jobs), 23, temperature=0.9, cfg_scale=2.0)
    first = dict(d.run(jobs))
    half = d.run(jobs)
    next(half), half.close()                            # left in the middle of its work
    again = dict(d.run(jobs))
    assert all(torch.equal(first[i]['codes'], again[i]['codes']) for i in first)


@pytest.mark.parametrize('kw', [dict(), dict(cfg_scale=3.0, cfg_frames=5), dict(top_k=2)], ids=lambda kw: ' '.join(f'{k}={v}' for k, v in kw.items()) or 'plain')
def test_own_log_probs_are_those_of_a_trajectory(jobs, kw):
    """What the decoder notes at each frame, unguided and at temperature 1, adds up to trajectory_logprob of one packed forward; so do its stops."""
    model, jobs = jobs
    got = decode(model, jobs, 6, temperature=0.8, **kw)
    rows = [{'text': j[0], 'prefix': j[1], 'codes': fold(r['codes']).numpy()} for j, r in zip(jobs, got)]
    batch = M.pack(rows, model.cfg)
    truncated = torch.tensor([r['ended_by'] == 'max_frames' for r in got])
    assert 0 < truncated.sum() < len(got)
    with torch.no_grad():
        tokens, stop, frames = M.trajectory_logprob(model(batch), batch, truncated)
    assert spread(torch.stack([r['logp'].sum() for r in got]), tokens) < 1e-5
    low, high = np.log(1e-4), np.log1p(-1e-4)
    for r, want, cut in zip(got, stop, truncated):
        x = r['stop_logits']
        own = torch.nn.functional.logsigmoid(-x if cut else torch.cat((-x[:-1], x[-1:]))).clamp(low, high).sum()
        assert float(own) == pytest.approx(float(want), rel=1e-4, abs=1e-4)


def test_noise():
    """Gumbel by its first moments; a number depends on key and frame alone, and no two of them are alike or correlated."""
    key = M.hashed(torch.arange(2000))
    assert len(set(key.tolist())) == 2000
    g = M.gumbel(key, torch.full((2000,), 7), 32, 8)
    assert g.isfinite().all() and abs(float(g.mean()) - 0.5772) < 0.01 and abs(float(g.var()) - 1.6449) < 0.02
    assert torch.equal(M.gumbel(key[5:6], torch.tensor([7]), 32, 8)[0], g[5])
    assert g.unique().numel() > 0.95 * g.numel()                                   # of 2**23 values
    nearby = [M.gumbel(key, torch.full((2000,), 8), 32, 8), g.roll(1, 0), g.roll(1, 1), g.roll(1, 2)]
    for other in nearby:
        assert abs(float(torch.corrcoef(torch.stack((g.flatten(), other.flatten())))[0, 1])) < 5 / g.numel() ** 0.5


def test_a_guided_prompt_without_text(jobs):
    """The row without a text is then the longer one: alone as beside a long text."""
    model, jobs = jobs
    bare = ([model.cfg.special_tokens['start_of_speech']], None, 3, 6)
    equal(decode(model, [bare], 2, temperature=0.9, cfg_scale=3.0), decode(model, [bare, max(jobs, key=lambda j: len(j[0]))], 2, temperature=0.9, cfg_scale=3.0)[:1])


def test_generate_with_a_decoder_of_one_s_own(jobs):
    model, jobs = jobs
    texts, seeds = [j[0] for j in jobs[:6]], list(range(6))
    d = M.Decoder(model, 2, max(map(len, texts)), 9, temperature=0.9)
    equal(M.generate(model, texts, max_frames=9, seeds=seeds, decoder=d), M.generate(model, texts, max_frames=9, seeds=seeds, temperature=0.9))
    for kw in (dict(temperature=0.9), dict(max_frames=10)):
        with pytest.raises(ValueError, match='the decoder has its own settings, and room'):
            M.generate(model, texts, **{'max_frames': 9} | kw, decoder=d)


def test_refusals(jobs):
    model, _ = jobs
    for kw in (dict(temperature=-1), dict(force_stop_frames=0), dict(uncond='x')):
        with pytest.raises(ValueError):
            M.Decoder(model, 1, 20, 5, **kw)


def test_compiled_parts(jobs):
    """The parts of a step as torch.compile captures them (without inductor, which takes a minute here): one capture serves all
    layers, nothing breaks a graph, the cache is written in place, the frames are the same."""
    model, jobs = jobs
    jobs = [(t, p, seed, 6) for t, p, seed, _ in jobs[:10]]
    want = decode(model, jobs, 4, temperature=0.9)
    d = M.Decoder(model, 4, 8 + max(len(j[0]) for j in jobs), 6, temperature=0.9)
    d.run_part, before = functools.cache(lambda f: torch.compile(f, dynamic=True, backend='aot_eager')), [c.data_ptr() for c in d.cache]
    torch._dynamo.utils.counters.clear()
    got = dict(d.run(jobs))
    equal([got[i] for i in range(len(jobs))], want)
    assert [c.data_ptr() for c in d.cache] == before and not torch._dynamo.utils.counters['graph_break']
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 4      # prompts, and choose, layer and settle of a step


@cuda
@pytest.mark.parametrize('kw', [dict(), dict(cfg_scale=3.0, cfg_frames=4)], ids=['plain', 'guided'])
def test_cuda_graphs(jobs, kw):
    """Graphs equal the same steps without, bit for bit, in bf16; fp32 on the GPU says what the CPU says, for any number of slots."""
    import copy
    model, jobs = jobs

    class Never(dict):
        __contains__ = lambda self, n: False
    half = copy.deepcopy(model).cuda().bfloat16()
    results = []
    for graphs in ({}, Never()):
        d = M.Decoder(half, 5, 8 + max(len(j[0]) for j in jobs), 23, temperature=0.9, **kw)
        d.graphs = graphs
        results.append(dict(d.run(jobs)))
    assert all(torch.equal(results[0][i]['codes'], results[1][i]['codes']) for i in results[0])
    want, gpu = decode(model, jobs, 20, temperature=0.9, **kw), copy.deepcopy(model).cuda()
    for slots in (1, 7, 20):
        equal(decode(gpu, jobs, slots, temperature=0.9, **kw), want)
