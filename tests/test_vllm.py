"""
vllm_gepard.py without vLLM and without a GPU: its kernel in Triton's interpreter, its request table, its weights, driven as vLLM's
runner drives them and held against model.generate. What needs an engine is in assets/bench_vllm.py.

    pytest tests/test_vllm.py
"""
import abc, collections, dataclasses, os, subprocess, sys, types

import numpy as np
import pytest
import torch

import model as M
from codec import fold
from test_model import texts_of, tiny_model

pytest.importorskip('triton', reason='needs triton, which openai-whisper brings on Linux only')
GOLDEN = os.path.join(os.path.dirname(__file__), 'data', 'golden', 'checkpoint')
INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'        # must be set before Triton is imported: hence a process of its own
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(*command, **env):
    r = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=os.environ | {'OMP_NUM_THREADS': '1', **env})
    return r.returncode, r.stdout + r.stderr


# ------------------------------------------------------------------ vLLM's side, as far as it is needed

class DefaultModelState(abc.ABC):
    def __init__(self, vllm_config, model, encoder_cache, device):
        self.model, self.device, self.dtype = model, device, torch.float32
        self.max_num_reqs, self.max_model_len, self.max_num_tokens = vllm_config.slots, 256, 512


SamplerOutput = collections.namedtuple('SamplerOutput', 'sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected')
LogprobsTensors = collections.namedtuple('LogprobsTensors', 'logprob_token_ids logprobs selected_token_ranks cu_num_generated_tokens')
Metadata = dataclasses.make_dataclass('Metadata', 'max_query_len num_actual_tokens query_start_loc seq_lens slot_mapping scheduler_metadata'.split())
CONTEXT = types.SimpleNamespace(attn_metadata=None, slot_mapping=None, cudagraph_runtime_mode=types.SimpleNamespace(name='NONE'))


class AutoWeightsLoader:
    """Takes what names a parameter of the module and has its shape, as vLLM's does, and nothing else."""
    def __init__(self, module):
        self.module = module

    def load_weights(self, weights):
        own, loaded = dict(self.module.named_parameters()), set()
        for name, tensor in weights:
            own[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


def install(name, **content):
    for n in range(1, name.count('.') + 2):
        sys.modules.setdefault('.'.join(name.split('.')[:n]), types.ModuleType(name))
    sys.modules[name].__dict__.update(content)


@pytest.fixture
def vllm(monkeypatch):
    """Stand-ins for the modules of vLLM that are imported."""
    for name in [n for n in sys.modules if n.split('.')[0] == 'vllm']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, 'Event', lambda **kw: types.SimpleNamespace(record=lambda: None))
    install('vllm', __version__='0.26.0', SamplingParams=lambda **kw: types.SimpleNamespace(**kw))
    install('vllm.sampling_params', RequestOutputKind=types.SimpleNamespace(CUMULATIVE='cumulative', FINAL_ONLY='final'))
    install('vllm.model_executor.models.utils', AutoWeightsLoader=AutoWeightsLoader)
    install('vllm.forward_context', get_forward_context=lambda: CONTEXT)
    install('vllm.v1.outputs', LogprobsTensors=LogprobsTensors)
    install('vllm.v1.worker.gpu.sample.output', SamplerOutput=SamplerOutput)
    install('vllm.v1.worker.gpu.model_states.default', DefaultModelState=DefaultModelState)
    yield
    for name in [n for n in sys.modules if n.split('.')[0] == 'vllm']:
        del sys.modules[name]


class Transformer(torch.nn.Module):
    """In the place of vLLM's Qwen3_5Model: keeps the input vectors of each slot's tokens and computes the whole row anew in each step."""
    def __init__(self, cfg):
        super().__init__()
        inner = M.Backbone(cfg)
        self.embed_tokens, self.layers, self.norm, self.cfg, self.rows = inner.embed_tokens, inner.layers, inner.norm, cfg, {}
        self.inner = [inner]

    def embed_input_ids(self, ids):
        return self.embed_tokens(ids)

    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds):
        """Whose tokens these are it knows from the context alone, as attention does: a slot's cache begins at 1000 times its number."""
        m, out = CONTEXT.attn_metadata['layer'], torch.zeros_like(inputs_embeds)
        padded = len(positions) if CONTEXT.cudagraph_runtime_mode.name == 'PIECEWISE' else m.num_actual_tokens
        assert len(positions) == len(inputs_embeds) == padded >= m.num_actual_tokens == len(m.slot_mapping) and CONTEXT.slot_mapping['layer'] is m.slot_mapping
        start = m.query_start_loc.tolist()
        for first, last, n in zip(start, start[1:], m.seq_lens.tolist()):
            if last == first:                                               # fills up
                continue
            at, (slot, place) = n - (last - first), divmod(int(m.slot_mapping[first]), 1000)
            assert last - first <= m.max_query_len and positions[first:last].tolist() == list(range(at, n)) and at <= len(self.rows.get(slot, ()))
            assert m.slot_mapping[first:last].tolist() == list(range(1000 * slot + at, 1000 * slot + n))
            self.rows[slot] = torch.cat((self.rows[slot][:at], inputs_embeds[first:last])) if at else inputs_embeds[first:last].clone()
            out[first:last] = self.inner[0](self.rows[slot], torch.arange(n), M.packed_attention, (torch.tensor([0, n], dtype=torch.int32), n))[at:]
        out[start[-1]:] = torch.nan                                         # attention to nothing
        return out


def model_of(folder, V):
    """GepardForCausalLM of a checkpoint folder around that transformer, its weights loaded."""
    m = V.GepardForCausalLM.__new__(V.GepardForCausalLM)
    torch.nn.Module.__init__(m)
    m.cfg, m.folder = V.read_config(folder)
    m.model = Transformer(m.cfg)
    m.add_audio()
    loaded = m.load_weights(iter(M.read_tensors(m.folder).items()))
    return m, loaded


class Runner:
    """vLLM's scheduler and V2 runner in small: slots, prompts in chunks, preemption, drafts (frames - 1 of each request that is past its prompt)."""

    def __init__(self, model, slots, chunk=1000, frames=1):
        self.model, self.chunk, self.free, self.requests, self.waiting, self.frames, self.slots, self.sides = model, chunk, list(range(slots)), {}, [], frames, slots, []
        cls = model.get_model_state_cls()
        self.state = cls(types.SimpleNamespace(slots=slots, additional_config={}, num_speculative_tokens=frames - 1), model, None, torch.device('cpu'))
        self.sampler, _ = self.state.custom_sampler(None)
        self.sampler.outbox = types.SimpleNamespace(put=self.sides.append)

    def add(self, name, prompt, params):
        self.waiting.append((name, types.SimpleNamespace(prompt=prompt['prompt_token_ids'], params=params, out=[], lp=[])))

    def leave(self, name, again=False):
        r = self.requests.pop(name)
        self.state.remove_request(name)
        self.model.model.rows.pop(r.slot, None)
        self.free.append(r.slot)
        if again:
            self.waiting.insert(0, (name, r))

    @torch.no_grad()
    def step(self):
        """One step -> {name: request} of those that ended"""
        while self.free and self.waiting:
            name, r = self.waiting.pop(0)
            r.slot, r.done, r.ids = self.free.pop(), 0, r.prompt + r.out
            self.requests[name] = r
            self.state.add_request(r.slot, types.SimpleNamespace(req_id=name, prompt_token_ids=r.prompt, prefill_token_ids=r.ids, sampling_params=r.params))
            self.state.apply_staged_writes()
        names = sorted(self.requests, key=lambda n: len(self.requests[n].ids) - self.requests[n].done)
        rs = [self.requests[n] for n in names]
        drafts = [self.frames - 1 if len(r.ids) - r.done == 1 and r.out and len(r.ids) + self.frames <= 256 else 0 for r in rs]
        counts = [min(self.chunk, len(r.ids) - r.done) + d for r, d in zip(rs, drafts)]
        i32, n, total = lambda x: torch.tensor(x, dtype=torch.int32), len(rs), sum(counts)
        uniform = set(counts) == {self.frames}
        padded = min(self.slots, 1 << (n - 1).bit_length()) if uniform else n                       # a recorded graph has its own number of requests
        more = (padded - n) * self.frames if uniform else -total % 8                                # nor have pieces of one
        CONTEXT.cudagraph_runtime_mode.name = 'NONE' if uniform else 'PIECEWISE'
        start, logits = np.cumsum([0, *counts]), np.cumsum([0, *(d + 1 for d in drafts)])
        slots = i32([1000 * r.slot + p for r, c in zip(rs, counts) for p in range(r.done, r.done + c)] + [-1] * more * uniform)
        batch = types.SimpleNamespace(
            num_reqs=n, req_ids=names, idx_mapping=i32([r.slot for r in rs]), idx_mapping_np=np.array([r.slot for r in rs]), num_scheduled_tokens=np.array(counts),
            query_start_loc=i32([*start, *[total] * (padded - n)]), positions=torch.cat([*(torch.arange(r.done, r.done + c) for r, c in zip(rs, counts)), torch.full((more,), 7)]),
            logits_indices=i32([e - 1 - d + i for e, d in zip(start[1:], drafts) for i in range(d + 1)]), cu_num_logits=i32(logits))
        seq_lens = i32([*(r.done + c for r, c in zip(rs, counts)), *[0] * (padded - n)])
        assert self.state.prepare_inputs(batch, None) == {}
        CONTEXT.slot_mapping = {'layer': slots}
        CONTEXT.attn_metadata = {'layer': Metadata(max(counts), len(slots), batch.query_start_loc, seq_lens, slots, 'made for this step alone')}
        ids = torch.tensor([i for r, c in zip(rs, counts) for i in (r.ids + [0] * self.frames)[r.done:r.done + c]] + [0] * more)
        self.sides.clear()
        out = self.sampler(self.model.compute_logits(self.model(ids, batch.positions)[batch.logits_indices]), batch)
        assert self.state.looped == uniform
        side = V.unpack([' '.join(names).encode(), self.sides[0][1].numpy().tobytes()])
        ended = {}
        for b, (name, r) in enumerate(zip(names, rs)):
            r.done += counts[b] - int(out.num_rejected[b])
            whole = r.done >= len(r.ids)
            assert int(out.num_sampled[b]) == whole * (self.frames if uniform and drafts[b] else 1) and int(out.num_rejected[b]) == drafts[b] * (not uniform)
            heard = [i for i in range(len(side[0])) if side[0][i] == name and side[2][i] >= 0]
            said = []
            for i in range(int(out.num_sampled[b])):
                said.append(int(out.sampled_token_ids[b, i]))
                r.out.append(said[-1])
                r.ids.append(said[-1])
                if r.params.logprobs is not None:
                    row = (out.logprobs_tensors.cu_num_generated_tokens or range(n))[b] + i
                    r.lp.append((out.logprobs_tensors.logprob_token_ids[row], out.logprobs_tensors.logprobs[row]))
                if said[-1] in r.params.stop_token_ids or len(r.out) == r.params.max_tokens:
                    self.leave(name)
                    ended[name] = r
                    break
            assert [(int(side[2][i]), bool(side[3][i])) for i in heard] == [(len(r.out) - len(said) + i, t in r.params.stop_token_ids) for i, t in enumerate(said)]
        return ended


def outcome(r):
    """A finished request as vLLM's CompletionOutput"""
    flat = lambda k: [float(x) if k else int(x) for row in r.lp for x in row[k]]
    return types.SimpleNamespace(logprobs=types.SimpleNamespace(token_ids=flat(0), logprobs=flat(1)),
                                 finish_reason='stop' if r.out[-1] in r.params.stop_token_ids else 'length')


def lively():
    """A tiny model whose stop head fires now and then."""
    m = tiny_model(noise=0.3).eval()
    m.stop_head.weight.data *= 30
    m.codebook_heads.weight.data *= 10
    return m


if INTERPRETED:
    import vllm_gepard as V

    @pytest.fixture(scope='module')
    def made(tmp_path_factory):
        """The torch model, its checkpoint folder, 16 texts, voices (three clips, the null prefix), seeds, caps."""
        m, path = lively(), str(tmp_path_factory.mktemp('m') / 'checkpoint-1')
        M.save_checkpoint(path, m.state_dict(), m.cfg, None, {})
        g = np.random.default_rng(0)
        clips = [g.integers(0, 2016, (n, 8)).astype(np.uint16) for n in (5, 9, 30)] + [None]
        return m, path, texts_of(m.cfg, 16), [clips[i % 4] for i in range(16)], [7 * i for i in range(15)] + [2 ** 63 - 1], [1 + 5 * i % 13 for i in range(16)]

    def speak(made, slots, voiced=True, preempt=(), chunk=1000, n=16, frames=1, **kw):
        """n of them through Runner -> results, the state. preempt: in these steps all but one of the running requests"""
        m, path, texts, voices, seeds, caps = made
        texts, runner = texts[:n], Runner(model_of(path, V)[0], slots, chunk, frames)
        for i in range(len(texts)):
            runner.add(str(i), *V.request(texts[i], m.cfg, voices[i] if voiced else False, seed=seeds[i], max_frames=caps[i], **kw))
        done, step = {}, 0
        while len(done) < len(texts):
            done |= runner.step()
            step += 1
            if step in preempt:
                for name in list(runner.requests)[1:][::-1]:
                    runner.leave(name, again=True)
        return [V.result(outcome(done[str(i)]), m.cfg) for i in range(len(texts))], runner.state

    @pytest.mark.parametrize('kw, voiced', [(dict(temperature=0), True), (dict(temperature=0, frames=3), False), (dict(temperature=0.8), True), (dict(temperature=0.8, frames=4), True)],
                             ids=['greedy', 'no prefix, several', 'drawn', 'drawn, several'])
    def test_equals_generate(made, vllm, kw, voiced):
        """16 requests at once, in fp32: codes, ends, log-probs and stop logits are those of model.generate, from the same seeds."""
        m, _, texts, voices, seeds, caps = made
        want = M.generate(m, texts, m.voices(voices) if voiced else None, seeds=seeds, max_frames=caps, stop_threshold=0.9, temperature=kw['temperature'])
        got, _ = speak(made, 16, voiced, stop_threshold=0.9, **kw)
        assert {r['ended_by'] for r in want} == {'stop_head', 'max_frames'}
        for i, (a, b) in enumerate(zip(got, want)):
            assert torch.equal(a['codes'].long(), b['codes']) and a['ended_by'] == b['ended_by'], i
            for key in ('logp', 'stop_logits'):
                torch.testing.assert_close(a[key], b[key].float(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(a['channel_logp'].sum(1), a['logp'], rtol=1e-5, atol=1e-4)

    def test_log_probs_are_those_of_a_trajectory(made, vllm):
        m, _, texts, voices, *_ = made
        got, _ = speak(made, 5, temperature=0.8, n=8)
        rows = [{'text': t, 'prefix': p, 'codes': fold(r['codes']).numpy()} for t, p, r in zip(texts, m.voices(voices), got)]
        batch = M.pack(rows, m.cfg)
        with torch.no_grad():
            tokens, _, _ = M.trajectory_logprob(m(batch), batch, torch.ones(len(rows), dtype=torch.bool))
        torch.testing.assert_close(torch.stack([r['logp'].sum() for r in got]), tokens, rtol=1e-5, atol=1e-3)

    def test_slots_chunks_and_preemption_do_not_matter(made, vllm):
        kw = dict(temperature=0.8, stop_threshold=0.9, n=6)
        want, _ = speak(made, 16, **kw)
        for slots, chunk, preempt, frames in ((5, 5, (2, 3, 6, 12), 1), (3, 1000, (), 4), (5, 4, (4, 6, 9), 4), (5, 5, (4, 6), 2)):
            got, state = speak(made, slots, chunk=chunk, preempt=preempt, frames=frames, **kw)
            assert all(torch.equal(a['codes'], b['codes']) and a['ended_by'] == b['ended_by'] for a, b in zip(got, want)), (slots, chunk, frames)
            assert (state.resumed > 2) == bool(preempt) and not state.live

    def test_each_request_has_its_own_settings(made, vllm):
        m, path, texts, *_ = made
        runner = Runner(model_of(path, V)[0], 6)
        mix = [dict(temperature=0.0), dict(temperature=1.5, seed=3), dict(stop_threshold=0.0), dict(stop_threshold=1.0, max_frames=20), dict(logprobs=False, max_frames=3), dict(seed=5)]
        done = {}
        for i, kw in enumerate(mix):
            runner.add(str(i), *V.request(texts[0], m.cfg, None, **dict(max_frames=8) | kw))
        while len(done) < len(mix):
            done |= runner.step()
        assert not done['4'].lp and len(done['4'].out) == 3                     # nothing asked, nothing sent
        for i, kw in enumerate(mix):
            kw = dict(max_frames=8) | kw
            if kw.pop('logprobs', True):
                want, got = M.generate(m, [texts[0]], m.voices([None]), seeds=[kw.pop('seed', 0)], **kw)[0], V.result(outcome(done[str(i)]), m.cfg)
                assert torch.equal(got['codes'].long(), want['codes']) and got['ended_by'] == want['ended_by'], i
        assert V.result(outcome(done['2']), m.cfg)['ended_by'] == 'stop_head' and len(V.result(outcome(done['2']), m.cfg)['codes']) == 1      # never 0
        assert len(V.result(outcome(done['3']), m.cfg)['codes']) == 20

    def test_sampler(vllm):
        """Arg-max, noise, log-probs, the stop rule and the side channel's row against torch, for numbers of all sizes."""
        cfg, n, at = tiny_model().cfg, 24, 50
        g = torch.Generator().manual_seed(1)
        logits = torch.full((n, 264), float('-inf'))
        logits[:, M.Gepard(cfg).slots] = torch.randn(n, 216, generator=g) * torch.logspace(-2, 2, n)[:, None]
        logits[:, 256] = z = torch.linspace(-3, 3, n)
        whole = torch.arange(n) % 5 > 0                                         # the others are in the middle of a prompt
        frame, seed = torch.arange(n) * 7 % 11, torch.randint(0, 2 ** 63 - 1, (n,), generator=g)
        temperature, threshold = torch.tensor([0.0, 0.05, 0.4, 3.0] * 6), torch.linspace(0.05, 0.95, n)
        table = torch.stack((torch.arange(n), -torch.ones(n).long(), torch.full((n,), at), threshold.view(torch.int32).long(), temperature.view(torch.int32).long(), seed, torch.full((n,), 9), at + frame + ~whole), 1)
        order = torch.randperm(n, generator=g).int()                            # slots are not the batch's order
        slots, pos = table.clone(), at - 1 + frame
        slots[order.long()] = table
        new = lambda *size, dtype=torch.int32: torch.zeros(size, dtype=dtype)
        token, sampled, rejected, ids, values, side = new(n, 1, dtype=torch.int64), new(n), new(n), new(n, 34), new(n, 34, dtype=torch.float32), new(n, 10)
        store = new(n * 32, 32, dtype=torch.uint8)
        rows = torch.arange(n + 1).int() * 2                                    # each with one draft
        V.sample_frame[(n,)](logits.repeat_interleave(2, 0) + torch.tensor([0, 9e9]).repeat(n)[:, None], 264, rows, torch.arange(2 * n).int() // 2, pos, order,
                             slots, torch.tensor(np.cumsum([0, *cfg.levels])), store, token, sampled, rejected, ids, values, side, ROOM=32, FIELDS=V.FIELDS, K=32, L=8, FRAME=260, STOP=261)
        x = logits[:, :256].view(n, 32, 8)
        codes = torch.where(temperature[:, None, None] > 0, x / temperature[:, None, None].clamp(min=1e-9) + M.gumbel(M.hashed(seed), frame, 32, 8), x).argmax(-1)
        logp = x.log_softmax(-1).gather(-1, codes[..., None])[..., 0]
        stop = (z.sigmoid() > threshold) & (frame > 0)
        assert 3 < stop.sum() < n - 3
        assert torch.equal(store.view(n, 32, 32)[torch.arange(n), frame], codes.to(torch.uint8) * whole[:, None]) and store.view(n, -1).any(1).equal(whole)
        assert sampled.bool().equal(whole) and (rejected == 1).all()
        assert token[:, 0].equal(torch.where(stop, 261, 260)) and ids[:, 0].equal(token[:, 0].int()) and all(len(set(row)) == 34 for row in ids.tolist())
        torch.testing.assert_close(values[:, 1:33], logp, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values[:, 0], torch.where(stop, 0, logp.sum(1)), rtol=1e-5, atol=1e-4)
        assert values[:, 33].equal(z)
        names, got, number, end, total = V.unpack([' '.join(map(str, range(n))).encode(), side.numpy().tobytes()])
        assert names == [str(i) for i in range(n)] and (got == codes.numpy()).all() and (total == values[:, 0].numpy()).all()
        heard = whole & (frame < 9)                                             # what is past the cap is not
        assert (number == np.where(heard, frame, -1)).all() and (end == (stop & heard).numpy()).all()

    def test_engine(made, vllm, monkeypatch):
        """Engine.run as the scripts use it: more jobs than slots, streaming, left in the middle, the prefix as asked."""
        m, path, *_ = made

        class LLM:
            def __init__(self, model, max_num_seqs, max_model_len, diffusion_config, **kw):
                self.llm_engine, self.runner = self, Runner(model_of(model, V)[0], max_num_seqs, frames=diffusion_config['canvas_length'] + 1)
                assert max_model_len == 99 and os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] == '0'

            def add_request(self, name, prompt, params):
                self.runner.add(name, prompt, params)

            def step(self):
                ended = self.runner.step()
                for name, r in (self.runner.requests | ended).items():
                    if name in ended or r.params.output_kind == 'cumulative':
                        spoken = outcome(r)
                        spoken.token_ids = r.out
                        yield types.SimpleNamespace(request_id=name, outputs=[spoken], finished=name in ended)

            def abort_request(self, names):
                self.runner.waiting = [w for w in self.runner.waiting if w[0] not in names]
                for name in set(names) & set(self.runner.requests):
                    self.runner.leave(name)
        install('vllm', LLM=LLM, ModelRegistry=types.SimpleNamespace(register_model=lambda *a: None))
        monkeypatch.setenv('VLLM_ENABLE_V1_MULTIPROCESSING', '1')
        engine = V.Engine(path, 3, 99, 'float32', temperature=0.8, stop_threshold=0.9)
        texts, voices, seeds, caps = (x[:9] for x in made[2:])
        jobs = list(zip(texts, voices, seeds, caps))
        want = M.generate(m, texts, m.voices(voices), seeds=seeds, max_frames=caps, temperature=0.8, stop_threshold=0.9)
        got = dict(engine.run(jobs))
        assert sorted(got) == list(range(9)) and all(torch.equal(got[i]['codes'].long(), want[i]['codes']) for i in got)
        half = engine.run(jobs)
        next(half), half.close()
        assert not engine.llm.runner.requests and not engine.llm.runner.waiting and not engine.llm.runner.state.live
        heard = []
        long = max(range(9), key=lambda i: len(want[i]['codes']) * (want[i]['ended_by'] == 'stop_head'))
        assert len(dict(engine.run([jobs[long]], on_frame=lambda step, codes, _: heard.append((step, codes))))) == 1
        assert [s for s, _ in heard] == list(range(len(heard))) and torch.equal(torch.cat([c for _, c in heard]), want[long]['codes'])

    def test_nothing_is_left_behind(made, vllm):
        """Requests that come and go, many of them aborted in the middle: places, voices and rows stay as many as there are."""
        m, path, texts, *_ = made
        runner, g = Runner(model_of(path, V)[0], 3), np.random.default_rng(2)
        state, voices = runner.state, runner.model.audio.voices
        state.prefixes = state.prefixes[:3]                                     # no more than the three requests may need
        count = lambda codes: (counted.append(1), voices(codes))[1]
        counted, runner.model.audio.voices = [], count
        clips = [g.integers(0, 2016, (4, 8)).astype(np.uint16) for _ in range(9)]
        for i in range(120):
            runner.add(f'r{i}', *V.request(texts[i % 16], m.cfg, clips[min(g.geometric(0.25), 9) - 1], max_frames=6, logprobs=False))
            if i % 3 == 0:
                runner.step()
            if runner.requests and i % 2:
                runner.leave(list(runner.requests)[int(g.integers(len(runner.requests)))])
            places = [p for p, _ in state.live.values()] + list(state.kept.values()) + state.free
            assert sorted(places) == list(range(14)) and len(state.live) <= 3 and len(state.voices) <= 3
            assert sorted(state.voices.values()) == list(range(len(state.voices)))
            for name, (_, voice) in state.live.items():                         # a running request's own voice is in its row
                row = int(state.host[runner.requests[name].slot, 1])
                torch.testing.assert_close(state.prefixes[row], m.voices([np.frombuffer(voice, '<i2').reshape(-1, 8)])[0])
        assert 9 < len(counted) < 100                                           # made anew only when thrown out

    def test_frames_given_away_are_an_error(made, vllm):
        _, path, *_ = made
        state = Runner(model_of(path, V)[0], 1).state
        with pytest.raises(RuntimeError, match='given away'):
            state.add_request(0, types.SimpleNamespace(req_id='x', prompt_token_ids=[1], prefill_token_ids=[1, 2], sampling_params=types.SimpleNamespace(extra_args=None)))

else:
    import vllm_gepard as V

    def test_kernel_and_requests_on_the_cpu():
        """The tests above, in Triton's interpreter."""
        code, text = run('-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', __file__, TRITON_INTERPRET='1')
        assert code == 0 and ' passed' in text and 'skipped' not in text, text[-5000:]

    def test_kernel_compiles_for_a_gpu(tmp_path, monkeypatch):
        """To machine code of an H200, by Triton's own assembler: no GPU is needed for that."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile
        monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
        names, constants = V.sample_frame.arg_names, dict(ROOM=1024, FIELDS=8, K=32, L=8, FRAME=248070, STOP=248071)
        signature = dict(zip(names, '*fp32 i32 *i32 *i64 *i64 *i32 *i64 *i64 *u8 *i64 *i32 *i32 *i32 *fp32 *i32'.split())) | dict.fromkeys(constants, 'constexpr')
        assert list(signature) == names
        compiled = compile(ASTSource(fn=V.sample_frame, signature=signature, constexprs={(names.index(k),): v for k, v in constants.items()}), target=GPUTarget('cuda', 90, 32))
        assert len(compiled.asm['cubin']) > 1000

    @pytest.mark.parametrize('where', ['own', 'published', 'no cloning'])
    def test_weights(where, tmp_path, vllm):
        """A real checkpoint folder: every tensor finds its parameter, by name and shape, and means what it means in model.py."""
        folder = GOLDEN
        if where != 'published':
            m = tiny_model(num_queries=0 if where == 'no cloning' else 8)
            folder = str(tmp_path / 'c')
            M.save_checkpoint(folder, m.state_dict(), m.cfg, None, {})
        want, _ = M.load_checkpoint(folder)
        got, loaded = model_of(folder, V)
        assert loaded == {n for n, _ in got.named_parameters()} and all(torch.equal(p, want.state_dict()[n.removeprefix('audio.')]) for n, p in got.named_parameters())
        g = torch.Generator().manual_seed(0)
        codes = torch.stack([torch.randint(0, n, (6,), generator=g) for n in want.cfg.levels], 1)
        h = torch.randn(6, want.cfg.hidden_size, generator=g)
        with torch.no_grad():
            assert torch.equal(got.audio.frame_embedding(codes), want.frame_embedding(codes))
            logits = got.compute_logits(h)
            torch.testing.assert_close(logits[:, :256].view(6, 32, 8), want.code_logits(h), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(logits[:, 256], want.stop_head(h)[:, 0], rtol=1e-5, atol=1e-5)
            if want.cfg.num_queries:
                clips = [None, fold(codes)]
                assert torch.equal(got.audio.voices(clips), want.voices(clips))

    def test_weights_are_strict(tmp_path, vllm):
        m = tiny_model()
        M.save_checkpoint(str(tmp_path / 'c'), m.state_dict(), m.cfg, None, {})
        good = {k: v for k, v in M.read_tensors(str(tmp_path / 'c')).items() if not k.startswith('model.')}
        got, _ = model_of(str(tmp_path / 'c'), V)
        for change, words in (({'codebook_heads.3.bias': None}, 'missing .*codebook_heads.3.bias'), ({'stop_head.weight': None}, 'missing .*stop_head.weight'),
                              ({'extra.weight': torch.zeros(1)}, 'unexpected .*extra.weight'), ({'null_prefix': torch.zeros(7, 64)}, r'null_prefix \[7, 64\] instead of \[8, 64\]'),
                              ({'audio_embeddings.1.weight': torch.zeros(8, 8)}, 'audio_embeddings.1.weight has 8 rows instead of 7')):
            with pytest.raises(ValueError, match=words):
                got.load_audio({k: v for k, v in (good | change).items() if v is not None})

    def test_transformer_tensors_are_those_vllm_maps():
        """vLLM 0.26 and 0.33 fuse q, k, v and gate, up; every other name of the checkpoint is its own (qwen3_5.py, qwen3_next.py there)."""
        cfg = M.Config()
        with torch.device('meta'):
            ours = {k: tuple(v.shape) for k, v in M.Backbone(cfg).state_dict().items()}
        d, hd, h, kv, m = cfg.hidden_size, cfg.head_dim, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.intermediate_size
        theirs = {'embed_tokens.weight': (cfg.vocab_size, d), 'norm.weight': (d,)}
        for i in range(cfg.num_hidden_layers):
            theirs |= {f'layers.{i}.{k}.weight': v for k, v in {
                'input_layernorm': (d,), 'post_attention_layernorm': (d,), 'self_attn.qkv_proj': (2 * h * hd + 2 * kv * hd, d), 'self_attn.o_proj': (d, h * hd),
                'self_attn.q_norm': (hd,), 'self_attn.k_norm': (hd,), 'mlp.gate_up_proj': (2 * m, d), 'mlp.down_proj': (d, m)}.items()}
        filled = collections.Counter()
        for name, shape in ours.items():
            for part, whole in (('q_proj', 'qkv_proj'), ('k_proj', 'qkv_proj'), ('v_proj', 'qkv_proj'), ('gate_proj', 'gate_up_proj'), ('up_proj', 'gate_up_proj')):
                if name.endswith(f'.{part}.weight'):
                    name = name.replace(part, whole)
                    break
            filled[name] += shape[0]
            assert shape[1:] == theirs[name][1:]
        assert filled == {k: v[0] for k, v in theirs.items()}

    def test_config_is_what_vllm_reads(tmp_path):
        """The flat rotary factor is 0.25 in vLLM unless it is given, and wins over the nested one; a layer without a type has linear attention."""
        m = tiny_model()
        M.save_checkpoint(str(tmp_path / 'c'), m.state_dict(), m.cfg, None, {})
        j = M.read_json(str(tmp_path / 'c' / 'config.json'))
        assert j['model_type'] == 'qwen3_5_text' and j['partial_rotary_factor'] == j['rope_parameters']['partial_rotary_factor'] == 1.0
        assert j['layer_types'] == ['full_attention'] * 3 and j['tie_word_embeddings'] and j['dtype'] == 'float32'
        s = V.settings(str(tmp_path / 'c'), slots=12, length=100, dtype='float32', max_model_len=90)
        assert s['hf_overrides'] == {'architectures': ['GepardForCausalLM']} and s['compilation_config']['cudagraph_capture_sizes'] == [4, 8, 16, 32, 48, 64, 128, 256]
        assert s['diffusion_config'] == {'canvas_length': 3} and V.settings(str(tmp_path / 'c'), 12, 100, frames=1)['diffusion_config'] is None
        assert s['kv_cache_memory_bytes'] >= 12 * 100 * 2 * 3 * 2 * 32 * 4 and s['attention_backend'] == 'TRITON_ATTN' and V.settings(str(tmp_path / 'c'), 1, 50)['attention_backend'] == 'FLASH_ATTN' and s['max_model_len'] == 90
        assert s['enable_prefix_caching'] is False and os.environ['TRITON_F32_DEFAULT'] == 'ieee'

    def test_prompts(vllm):
        cfg = tiny_model(text_repetition=M.Config().text_repetition | {'enabled': True}).cfg
        text = M.prompt([5, 6], cfg)
        assert text.count(cfg.special_tokens['start_of_text']) == 8              # repeated, as the checkpoint says
        clip = np.arange(16, dtype=np.uint16).reshape(2, 8)
        p, s = V.request(text, cfg, clip, seed=3, max_frames=9, temperature=0.0)
        assert p['prompt_token_ids'] == [cfg.special_tokens['start_of_speech']] * 8 + text and s.extra_args == {'stop_threshold': 0.5, 'voice': clip.astype('<i2').tobytes()}
        assert (s.seed, s.max_tokens, s.temperature, s.logprobs, s.stop_token_ids) == (3, 9, 0.0, 33, [cfg.special_tokens['end_of_speech']])
        for voice, want in ((None, b''), (False, None)):
            p, s = V.request(text, cfg, voice, logprobs=False, stream=True)
            assert p['prompt_token_ids'][:-len(text)] == [cfg.special_tokens['start_of_speech']] * (8 if want is not None else 0)
            assert s.extra_args.get('voice') == want and s.logprobs is None and s.output_kind == 'cumulative'
        no = tiny_model(num_queries=0).cfg
        assert V.request(text, no)[0]['prompt_token_ids'] == text and 'voice' not in V.request(text, no)[1].extra_args

    def test_versions(vllm, monkeypatch):
        for version, fine in (('0.25.9', False), ('0.26.0', True), ('0.33.1', True), ('0.34.0rc1', False), ('1.0', False)):
            there = {}
            registry = types.SimpleNamespace(register_model=lambda name, cls: there.update({name: cls}))
            install('vllm', __version__=version, ModelRegistry=registry)
            if fine:
                V.register()
                V.register()
                assert there == {'GepardForCausalLM': V.GepardForCausalLM}
            else:
                with pytest.raises(ImportError, match=f'vLLM {version} is not supported, only 0.26 to 0.33'):
                    V.register()

    def test_plugin(tmp_path, monkeypatch):
        """The lines of docs/serving.md that make vLLM's own commands find the model."""
        from importlib.metadata import entry_points
        lines = [line.strip() for line in open(os.path.join(ROOT, 'docs', 'serving.md'), encoding='utf-8') if 'nanogepard' in line and line.startswith('    ')]
        r = subprocess.run(['bash', '-euc', f'site={tmp_path}\n' + '\n'.join(line for line in lines if not line.startswith('site='))], cwd=ROOT, capture_output=True, text=True)
        assert len(lines) >= 2 and r.returncode == 0, r.stderr
        monkeypatch.syspath_prepend(str(tmp_path))
        found = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'gepard']
        assert [e.load() for e in found] == [V.register] and (tmp_path / 'nanogepard.pth').read_text().strip() == ROOT

    def test_scripts_refuse(tmp_path):
        """What --engine=vllm cannot do, and that it is missing, in one line each."""
        (tmp_path / 'vllm.py').write_text('raise ImportError("none here")')
        (tmp_path / 'p.txt').write_text('one two')
        for script, flags, words in (
                ('sample.py', ['--text=hi', '--ckpt=x', '--engine=vllm', '--cfg_scale=3'], '--engine=vllm knows no top_k, cfg_scale'),
                ('sample.py', ['--text=hi', '--ckpt=x', '--engine=tf', f'--out={tmp_path}/x.wav'], "--engine is torch or vllm, got 'tf'"),
                ('sample.py', ['--text=hi', '--ckpt=x', '--engine=vllm', f'--out={tmp_path}/x.wav'], 'vLLM cannot be imported (none here): it wants an environment of its own'),
                ('dpo_sample.py', [f'--out_dir={tmp_path}', '--ckpt=x', f'--prompts={tmp_path}/p.txt', '--engine=vllm'], 'engine vllm knows no cfg_scale'),
                ('dpo_sample.py', [f'--out_dir={tmp_path}', '--ckpt=x', f'--prompts={tmp_path}/p.txt', '--engine=vllm', '--cfg_scale=1'], 'vLLM cannot be imported (none here): it wants an environment of its own')):
            code, text = run(script, *flags, PYTHONPATH=str(tmp_path))
            assert code == 2 and text.strip().splitlines()[-1].startswith(script + ': ') and words in text.splitlines()[-1], text[-2000:]

    def test_without_vllm(monkeypatch):
        monkeypatch.setitem(sys.modules, 'vllm', None)
        with pytest.raises(ImportError, match='docs/serving.md'):
            V.register()
