"""
A checkpoint on stock vLLM: an out-of-tree model, no fork and no patch.

    engine = Engine('out/pretrain/checkpoint-100', slots=64, length=600)          # used as model.Decoder is, in this process
    for number, result in engine.run([(text, voice, seed, cap), ...]): ...

    register()                                                                    # or with vLLM's own classes
    out = vllm.LLM(**settings(folder, slots=64, length=600)).generate(*request(text, cfg, voice, seed=1))

One generated token is one frame: `start_of_speech` stands for each, `end_of_speech` for the end (it carries none). The 32 codes lie
in a store on the GPU, written by the sampler, read by the next frame's embedding. What the model reads at a position depends on it
alone (prefix row, text token, frame number): decoding, prompts in chunks and after a preemption are one path, and a request goes on
exactly. All but the transformer is model.py's code, noise included: a seed gives the same frames here and there (in float32).
Left out: text guidance, top_k, repetition penalty. What plugs into vLLM are hooks of its V2 model runner, no stable interface: written for 0.26.0.
"""
import collections, dataclasses, itertools, os, queue, struct, threading, types

import numpy as np
import torch
import triton
import triton.language as tl
from torch import nn

import model as M

VERSIONS = (0, 26), (0, 33)     # the first is measured; the last was seen to build and load it, no more
FIELDS = 8                      # of a row of the request table: place in the store, prefix, prompt length, threshold, temperature, seed, frame cap, tokens that exist
VOICES = 64                     # kept ready beside those of running requests

def register():
    """Tell vLLM of the model. Harmless when repeated. ImportError where vLLM is missing or another version."""
    # before vLLM reads them. Its old runner has none of these hooks; its FlashInfer sampler is never used, but would be imported
    os.environ |= {'VLLM_USE_V2_MODEL_RUNNER': '1', 'VLLM_USE_FLASHINFER_SAMPLER': '0'}
    try:
        import vllm
    except ImportError as e:
        raise ImportError(f'vLLM cannot be imported ({e}): it wants an environment of its own, docs/serving.md') from None
    if not VERSIONS[0] <= tuple(int(x) for x in vllm.__version__.split('.')[:2]) <= VERSIONS[1]:
        raise ImportError(f'vLLM {vllm.__version__} is not supported, only {".".join(map(str, VERSIONS[0]))} to {".".join(map(str, VERSIONS[1]))}')
    # the class: a mere name is looked into by a subprocess that imports all of vLLM. Nothing here touches the GPU at import (Qwen3.5 does), so vLLM may fork
    vllm.ModelRegistry.register_model(GepardForCausalLM.__name__, GepardForCausalLM)

def read_config(name):
    """A checkpoint's folder or Hub name -> Config, folder"""
    folder = M.local_or_hub(name, ['*.json', '*.safetensors', '*.txt', '*.jinja'])
    where = os.path.join(folder, 'gepard_config.json')
    cfg = M.config_from_json(M.read_json(where), where)
    k, width, total = len(cfg.levels), max(cfg.levels), sum(cfg.levels)
    if k & k - 1 or width & width - 1 or k < 4:
        raise ValueError(f'{where}: {k} channels of {width} codes: vLLM\'s sampler here needs powers of two')
    frame, end = (cfg.special_tokens.get(name, -1) for name in ('start_of_speech', 'end_of_speech'))
    if frame == end or min(frame, end) <= total:                                        # ids up to there name codes, in the log-probs
        raise ValueError(f'{where}: start_of_speech and end_of_speech must differ and be above {total}, got {frame} and {end}')
    return cfg, folder

# ---- what goes in and comes out

def settings(name, slots, length, dtype='bfloat16', frames=4, **more):
    """Arguments for vllm.LLM and vllm.AsyncEngineArgs. slots: requests at once; length: longest prompt and frames together, the cache has room for all; frames:
    of a request in a step of the engine, see GepardForCausalLM.several; more: any other argument, or other values."""
    (cfg, folder), exact = read_config(name), dtype == 'float32'
    os.environ |= {'TRITON_F32_DEFAULT': 'ieee'} if exact else {}                       # Triton multiplies float32 as tf32 otherwise
    token = 2 * cfg.num_hidden_layers * cfg.num_key_value_heads * cfg.head_dim * (4 if exact else 2)
    sizes = [frames * n for n in sorted({slots, *(2 ** i for i in range(max(slots, 64).bit_length()))})]     # also of prompts, hence 64
    return dict(
        model=folder, hf_overrides={'architectures': [GepardForCausalLM.__name__]}, skip_tokenizer_init=True, load_format='safetensors', generation_config='vllm', dtype=dtype,
        max_model_len=length, max_num_seqs=slots, max_num_batched_tokens=max(8192, length, sizes[-1]), max_logprobs=len(cfg.levels) + 1,
        enable_prefix_caching=False,                        # it knows blocks by their tokens: all frames are one token, all prefixes too
        kv_cache_memory_bytes=token * (slots * -(-length // 64) + 1) * 64,
        gpu_memory_utilization=0.1,                         # decides nothing here, but so much must be free at the start: engines may share a GPU
        compilation_config=dict(mode=3, cudagraph_mode='FULL_AND_PIECEWISE', cudagraph_capture_sizes=sizes),
        # vLLM's own way to tokens that are given room before they are drawn: it counts these frames as drafts, of a model of text diffusion
        diffusion_config=dict(canvas_length=frames - 1) if frames > 1 else None,
        attention_backend='TRITON_ATTN' if exact else 'FLASH_ATTN', disable_log_stats=True) | more    # FlashAttention has no float32, FlashInfer's metadata not what `several` needs

def request(text, cfg, voice=None, *, max_frames=300, temperature=0.4, seed=0, stop_threshold=0.5, stream=False, logprobs=True):
    """Prompt and SamplingParams of one text, laid out by model.prompt. voice: packed codes [t, 8] of a reference clip, None = the null prefix,
    False = no prefix at all. logprobs=False: codes come by the side channel only (see Sampler)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    frame, end = cfg.special_tokens['start_of_speech'], cfg.special_tokens['end_of_speech']
    extra = {'stop_threshold': float(stop_threshold)}
    if cfg.num_queries and voice is not False:
        text = [frame] * cfg.num_queries + list(text)       # places for the prefix; the ids are not read
        extra['voice'] = b'' if voice is None else np.asarray(voice).astype('<i2').tobytes()
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_frames, stop_token_ids=[end], ignore_eos=True, detokenize=False, extra_args=extra,
        logprobs=len(cfg.levels) + 1 if logprobs else None,
        flat_logprobs=logprobs,                             # the other form, a list of dicts, takes three times as long
        output_kind=RequestOutputKind.CUMULATIVE if stream else RequestOutputKind.FINAL_ONLY)
    return {'prompt_token_ids': list(text)}, params

def result(output, cfg):
    """A vLLM CompletionOutput -> what model.Decoder gives: codes uint8 [n, K], logp [n], stop_logits, ended_by; and channel_logp [n, K]."""
    k, start = len(cfg.levels), np.cumsum([0, *cfg.levels[:-1]])
    ids, values = (np.array(x).reshape(-1, k + 2) for x in (output.logprobs.token_ids, output.logprobs.logprobs))
    ended = len(ids) > 0 and ids[-1, 0] == cfg.special_tokens['end_of_speech']
    n = len(ids) - ended
    tensor = lambda x: torch.from_numpy(x.astype(np.float32))
    return {'codes': torch.from_numpy((ids[:n, 1:k + 1] - start).astype(np.uint8)), 'logp': tensor(values[:n, 0]), 'channel_logp': tensor(values[:n, 1:k + 1]),
            'stop_logits': tensor(values[1:, k + 1]),       # a row holds the logit that was read before its frame
            'ended_by': 'stop_head' if ended else 'max_frames' if output.finish_reason == 'length' else str(output.finish_reason)}

class Engine:
    """vLLM in this process, used as model.Decoder is: `run` takes any number of jobs and yields (number, result) as they end."""
    def __init__(self, name, slots, length, dtype='bfloat16', temperature=0.4, stop_threshold=0.5, **more):
        os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] = '0'  # a process of its own would start this script again, or need a guard in it
        os.environ.setdefault('VLLM_PLUGINS', 'gepard')     # NeMo brings a plugin that imports much of it and may fail
        register()
        import vllm
        self.cfg, folder = read_config(name)
        self.llm = vllm.LLM(**settings(folder, slots, length, dtype, **more))
        self.slots, self.made, self.options = slots, itertools.count(), dict(temperature=temperature, stop_threshold=stop_threshold)
        self.stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def run(self, jobs, on_frame=None):
        """jobs (text, voice, seed, cap); on_frame(step, codes [1, K], None) for each frame, where there is one job only."""
        engine, jobs, number_of, heard = self.llm.llm_engine, enumerate(jobs), {}, 0
        torch.cuda.set_stream(self.stream)                  # a stream belongs to a thread, and vLLM knows only the one it began with
        try:
            while True:
                for number, (text, voice, seed, cap) in itertools.islice(jobs, 2 * self.slots - len(number_of)):     # so many that no slot waits for the host
                    number_of[name := str(next(self.made))] = number
                    engine.add_request(name, *request(text, self.cfg, voice, seed=seed, max_frames=cap, stream=on_frame is not None, **self.options))
                if not number_of:
                    return
                for out in engine.step():
                    spoken = out.outputs[0]
                    if on_frame:
                        for codes in result(spoken, self.cfg)['codes'][heard:].long():
                            on_frame(heard, codes[None], None)
                            heard += 1
                    if out.finished:
                        yield number_of.pop(out.request_id), result(spoken, self.cfg)
        finally:                                            # left in the middle: nothing stays behind in the engine
            if number_of:
                engine.abort_request(list(number_of))

@triton.jit
def hashed(x):
    """model.hashed"""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)

@triton.jit
def sample_frame(logits, stride, row_of, token_of, position, slot_of, table, starts, store, token, sampled, rejected, ids, values, side,
                 ROOM: tl.constexpr, FIELDS: tl.constexpr, K: tl.constexpr, L: tl.constexpr, FRAME: tl.constexpr, STOP: tl.constexpr):
    """All channels of the next frame, one program a request. logits [rows, K * L + ..]: -inf past a channel's codes, the stop logit behind them.
    row_of [n + 1]: a request's rows; it is drawn from the first of them, the others are behind drafts that nobody made."""
    b, row = tl.program_id(0), tl.load(row_of + tl.program_id(0))
    logits += row.to(tl.int64) * stride
    at = table + tl.load(slot_of + b).to(tl.int64) * FIELDS
    place, prompt, seed, cap, known = tl.load(at), tl.load(at + 2), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    threshold, temperature = tl.load(at + 3).to(tl.int32).to(tl.float32, bitcast=True), tl.load(at + 4).to(tl.int32).to(tl.float32, bitcast=True)
    next = tl.load(position + tl.load(token_of + row)).to(tl.int64) + 1
    frame, whole = next - prompt, next >= known                                         # its number; else in the middle of a prompt, or of frames that exist already
    c, j = tl.arange(0, K), tl.arange(0, L)
    grid = c[:, None] * L + j[None, :]
    x = tl.load(logits + grid)                                                          # [K, L]
    x = tl.where(x == x, x, float('-inf'))                                              # a row that fills up a graph attends to nothing: NaN, and argmax would go past the codes
    # model.gumbel; float64 as Triton's float32 logarithm is a coarse one near 1
    bits = hashed(hashed(seed.to(tl.uint64, bitcast=True)) + (frame * (K * L) + 1 + grid).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15) >> 41
    noise = -tl.log(-tl.log((bits.to(tl.float64) + 0.5) / 8388608)).to(tl.float32)
    code = tl.argmax(x / tl.where(temperature > 0, temperature, 1.0) + tl.where(temperature > 0, noise, 0.0), 1)
    top = tl.max(x, 1)
    logp = tl.sum(tl.where(j[None, :] == code[:, None], x, 0.0), 1) - top - tl.log(tl.sum(tl.exp(x - top[:, None]), 1))    # at temperature 1
    tl.store(store + (place * ROOM + frame) * K + c, code.to(tl.uint8), mask=c < tl.where(whole & (frame >= 0) & (frame < ROOM), K, 0))
    z = tl.load(logits + K * L)
    stop = (frame > 0) & (1 / (1 + tl.exp(-z)) > threshold)                             # the first frame is always spoken
    total, word = tl.where(stop, 0.0, tl.sum(logp, 0)), tl.where(stop, STOP, FRAME)
    tl.store(token + b, word)
    tl.store(sampled + b, whole.to(tl.int32))
    tl.store(rejected + b, tl.load(row_of + b + 1) - row - 1)
    # the request's log-probs: a column for the token, one a channel under an id of its own, the stop logit
    ids, values = ids + b * (K + 2), values + b * (K + 2)
    tl.store(ids, word)
    tl.store(ids + 1 + c, tl.load(starts + c) + code)
    tl.store(ids + K + 1, tl.load(starts + K))
    tl.store(values, total)
    tl.store(values + 1 + c, logp)
    tl.store(values + K + 1, z)
    # the side channel's row: codes by the byte, frame number * 2 + (end), log-prob
    side += b * (K // 4 + 2)
    tl.store(side + tl.arange(0, K // 4), tl.sum(tl.reshape(code.to(tl.int32), (K // 4, 4)) << (8 * tl.arange(0, 4))[None, :], 1))
    tl.store(side + K // 4, tl.where(whole & (frame >= 0) & (frame < cap), frame * 2 + stop, -1))
    tl.store(side + K // 4 + 1, total.to(tl.int32, bitcast=True))

class GepardForCausalLM(nn.Module):
    """vLLM's Qwen3.5 transformer, compiled and graph-captured by it, between model.py's frame embedding and heads."""
    def __init__(self, *, vllm_config, prefix=''):
        super().__init__()
        from vllm.model_executor.models.qwen3_5 import Qwen3_5Model
        from vllm.model_executor.models.utils import maybe_prefix
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError('enable_prefix_caching must be False: vLLM would take one voice, or one frame, for another')
        self.cfg, self.folder = read_config(vllm_config.model_config.model)
        self.model = Qwen3_5Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, 'model'))
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        if vllm_config.model_config.dtype == torch.float32:
            for layer in self.model.layers:                 # the fused kernel rounds queries and keys to float16 unless the type is bfloat16
                layer.self_attn.use_fused_qk_norm_rope_gate = False
        self.add_audio()

    def add_audio(self):
        """Everything that is no transformer: model.Gepard without one"""
        self.audio = M.Gepard(dataclasses.replace(self.cfg, vocab_size=1, num_hidden_layers=0, supcon_hidden=0)).requires_grad_(False).eval()
        del self.audio.model
        size = len(self.cfg.levels) * max(self.cfg.levels) + 8                          # the stop head behind the codes, and a round number
        self.register_buffer('head_weight', torch.zeros(size, self.cfg.hidden_size, dtype=torch.float32), persistent=False)
        self.register_buffer('head_bias', torch.zeros(size, dtype=torch.float32), persistent=False)

    def load_weights(self, weights):
        from vllm.model_executor.models.utils import AutoWeightsLoader
        weights = dict(weights)
        transformer = [(name, weights.pop(name)) for name in list(weights) if name.startswith('model.')]
        return AutoWeightsLoader(self).load_weights(transformer) | self.load_audio(weights)

    def load_audio(self, state):
        """The published tensors but the transformer's, strict as in model.load_checkpoint -> names of the parameters filled"""
        where, off = f'{self.folder}/model.safetensors', ('supcon_head.',) if self.cfg.num_queries else ('supcon_head.', 'ref_compressor.', 'null_prefix')
        M.load_strict(self.audio, M.fused(state, self.cfg, where), where, may_ignore=off)
        a, n = self.audio, len(self.cfg.levels) * max(self.cfg.levels)
        self.head_bias.fill_(float('-inf'))                 # past a channel's last code
        self.head_weight[a.slots], self.head_bias[a.slots] = a.codebook_heads.weight.float(), a.codebook_heads.bias.float()
        self.head_weight[n], self.head_bias[n] = a.stop_head.weight[0].float(), a.stop_head.bias[0].float()
        return {f'audio.{name}' for name, _ in self.audio.named_parameters()}

    def get_model_state_cls(self):
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState
        return type('GepardState', (Requests, DefaultModelState), {})

    def embed_input_ids(self, input_ids):                   # nobody calls it, but a model is known by it
        return self.model.embed_input_ids(input_ids)

    def inputs(self, slot, position, input_ids):
        """Input vectors [n, d] of the tokens at these positions of the requests in these slots: a frame of the store, a row of the prefix, or the text's."""
        s, (place, prefix, prompt) = self.state, self.state.table[slot, :3].unbind(1)
        frames = self.audio.frame_embedding(s.store[place, (position - prompt).clamp(0, s.room - 1)].long())
        voice = s.prefixes[prefix.clamp(min=0), position.clamp(max=s.prefixes.shape[1] - 1)]
        before = torch.where(((prefix >= 0) & (position < self.cfg.num_queries))[:, None], voice, self.model.embed_tokens(input_ids))
        return torch.where((position >= prompt)[:, None], frames, before, out=s.vectors[:len(slot)])     # one address for good: piecewise graphs read it in place

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        from vllm.forward_context import get_forward_context
        s, n, c = self.state, len(positions), get_forward_context()
        m = next(iter(c.attn_metadata.values())) if c.attn_metadata else None
        # so also while a whole graph is recorded. Pieces of a graph are of a padded batch, which may only look like this one
        if m and m.max_query_len == s.frames and n == s.frames * len(m.seq_lens) and c.cudagraph_runtime_mode.name != 'PIECEWISE':
            return self.several(input_ids.view(n // s.frames, s.frames), positions.view(n // s.frames, s.frames), c, m)
        s.looped, token = False, torch.arange(n, dtype=torch.int32, device=positions.device)
        request = torch.searchsorted(m.query_start_loc[1:], token, right=True) if m else token         # without requests (vLLM measures its memory): any
        return self.model(None, positions, None, self.inputs(s.slot_of[request.clamp(max=len(s.slot_of) - 1)], positions, input_ids))

    def several(self, input_ids, positions, c, m):
        """A step in which each request has `frames` tokens [n, frames], of which all but the first are yet to be drawn (or a prompt's): one after the other, each with
        attention of its own. Inside the captured graph, so vLLM's work in Python (more than the GPU's) is paid once for all of them."""
        s, (n, k), step, out = self.state, positions.shape, (c.attn_metadata, c.slot_mapping), []
        rows = torch.arange(n + 1, dtype=torch.int32, device=positions.device)
        for i in range(k):
            slots = next(iter(step[1].values()))[:n * k].view(n, k)[:, i].contiguous()
            one = dataclasses.replace(m, max_query_len=1, num_actual_tokens=n, query_start_loc=m.query_start_loc // k, seq_lens=(m.seq_lens - (k - 1 - i)).clamp(min=0),
                                      slot_mapping=slots, scheduler_metadata=None)
            c.attn_metadata, c.slot_mapping = dict.fromkeys(step[0], one), dict.fromkeys(step[1], slots)
            out.append(self.model(None, positions[:, i].contiguous(), None, self.inputs(s.slot_of[:n], positions[:, i], input_ids[:, i])))
            s.sampler.draw(i, self.compute_logits(out[-1]), rows, rows * k + i, positions)
        c.attn_metadata, c.slot_mapping = step
        return torch.stack(out, 1).flatten(0, 1)

    def compute_logits(self, hidden_states):
        return nn.functional.linear(hidden_states.float(), self.head_weight, self.head_bias)

class Requests:
    """The frames, voices and settings of running requests, on the GPU. With vLLM's DefaultModelState behind it: a ModelState."""
    prepare_dummy_inputs = lambda self, *args: {}
    def __init__(self, vllm_config, model, encoder_cache, device):
        super().__init__(vllm_config, model, encoder_cache, device)
        cfg, slots = model.cfg, self.max_num_reqs
        self.room, self.wants = self.max_model_len, np.zeros(slots, bool)               # frames of a place; which requests want log-probs
        self.frames, self.looped = vllm_config.num_speculative_tokens + 1, False        # whether this step's are drawn in `several`
        self.free = list(range(2 * slots + 8))              # places of the store; twice as many, see remove_request; and one for rows that fill up
        self.store = torch.zeros(len(self.free) + 1, self.room, len(cfg.levels), dtype=torch.uint8, device=device)
        self.prefixes = torch.zeros(slots + VOICES, max(1, cfg.num_queries), cfg.hidden_size, dtype=self.dtype, device=device)
        self.host = torch.zeros(slots + 1, FIELDS, dtype=torch.int64)
        self.host[slots, 0] = len(self.free)
        self.table, self.slot_of = self.host.to(device), torch.full((slots,), slots, dtype=torch.int32, device=device)
        self.vectors = torch.zeros(self.max_num_tokens, cfg.hidden_size, dtype=self.dtype, device=device)
        self.live, self.kept, self.voices, self.resumed = {}, collections.OrderedDict(), collections.OrderedDict(), 0
        self.side, model.state = (vllm_config.additional_config or {}).get('side'), self

    def add_request(self, index, new):
        params, name, length = new.sampling_params, new.req_id, len(new.prompt_token_ids)
        extra = params.extra_args or {}
        place = self.kept.pop(name, None)
        self.resumed += place is not None                   # back from a preemption: its frames are still there
        if place is None and len(new.prefill_token_ids) > length:                       # cannot happen while requests are served in order
            raise RuntimeError(f'request {name}: preempted, and its frames were given away')
        if place is None:
            place = self.free.pop() if self.free else self.kept.popitem(last=False)[1]
        voice = extra.get('voice') if self.model.cfg.num_queries else None
        self.live[name] = place, voice
        bits = lambda x: struct.unpack('<i', struct.pack('<f', x))[0]
        seed = params.seed if params.seed is not None else int(np.random.randint(2 ** 63 - 1))
        self.wants[index] = params.logprobs is not None
        self.host[index] = torch.tensor([place, self.prefix_of(voice), length, bits(extra.get('stop_threshold', 0.5)), bits(params.temperature), seed, params.max_tokens, len(new.prefill_token_ids)])

    def prefix_of(self, voice):
        """Row of a voice's prefix vectors, made when first asked for. voice: bytes of its codes, empty = the null prefix, None = none (-1)"""
        if voice is None:
            return -1
        if voice not in self.voices:
            row = len(self.voices)
            if row == len(self.prefixes):                   # the longest unused one goes
                busy = {v for _, v in self.live.values()}
                row = self.voices.pop(next(v for v in self.voices if v not in busy))
            codes = np.frombuffer(voice, '<i2').reshape(-1, self.model.cfg.codec['num_layers']) if voice else None
            self.prefixes[row] = self.model.audio.voices([codes])[0].to(self.dtype)
            self.voices[voice] = row
        self.voices.move_to_end(voice)
        return self.voices[voice]

    def remove_request(self, name):
        """Finished, aborted or preempted: vLLM does not say which. The frames stay where they are until their place is needed; a preempted
        request comes back before new ones do, and no more than all the others can end before that."""
        if name in self.live:
            self.kept[name] = self.live.pop(name)[0]

    def apply_staged_writes(self):
        self.table.copy_(self.host.pin_memory() if self.table.is_cuda else self.host, non_blocking=True)      # of a copy: `host` may change on the way

    def prepare_inputs(self, batch, req_states):
        """Before the graph: what this reads may be elsewhere in the next step (vLLM's buffers move), what it writes may not."""
        self.looped = bool((batch.num_scheduled_tokens == self.frames).all())
        self.slot_of.fill_(self.max_num_reqs)
        self.slot_of[:batch.num_reqs].copy_(batch.idx_mapping)
        return {}

    def custom_sampler(self, base):
        self.sampler = Sampler(self)                        # base is let go: its penalties take 4 bytes x vocabulary a slot
        return self.sampler, None

class Sampler:
    """In the place of vLLM's own: 32 codes and the stop in one launch; of all this vLLM sees one token id a request.
    additional_config={'side': 'ipc:///tmp/frames'}: each step's frames are also sent in one message for all requests, asked for log-probs
    or not (at many streams those are most of vLLM's work: three small arrays a request and step). `unpack` reads it."""
    def __init__(self, state):
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.worker.gpu.sample.output import SamplerOutput
        self.state, self.LogprobsTensors, self.SamplerOutput = state, LogprobsTensors, SamplerOutput
        self.penalties_state = types.SimpleNamespace(output_bin_counts=None)            # which vLLM updates, if there is one
        self.starts, k = torch.tensor(np.cumsum([0, *state.model.cfg.levels]), device=state.device), len(state.model.cfg.levels)
        make = lambda *more, dtype=torch.int32: torch.zeros(state.frames, state.max_num_reqs, *more, dtype=dtype, device=state.device)
        self.kept = make(dtype=torch.int64), make(), make(), make(k + 2), make(k + 2, dtype=torch.float32), make(k // 4 + 2)    # token, sampled, rejected, ids, values, side
        self.outbox = state.side and queue.SimpleQueue()
        if state.side:
            threading.Thread(target=self.send, daemon=True).start()

    add_request = apply_staged_writes = lambda self, *args: None                        # Requests has seen to it

    def draw(self, i, logits, row_of, token_of, positions):
        """The i-th frame of a step into kept[..][i]"""
        s, cfg, out = self.state, self.state.model.cfg, [x[i] for x in self.kept]
        sample_frame[(len(row_of) - 1,)](
            logits, logits.stride(0), row_of, token_of, positions, s.slot_of, s.table, self.starts, s.store, *out, ROOM=s.room, FIELDS=FIELDS, K=len(cfg.levels),
            L=max(cfg.levels), FRAME=cfg.special_tokens['start_of_speech'], STOP=cfg.special_tokens['end_of_speech'], num_warps=1)

    def __call__(self, logits, batch):
        s, n, k, ask = self.state, batch.num_reqs, self.state.frames if self.state.looped else 1, self.state.wants[batch.idx_mapping_np].any()
        if not s.looped:                                    # else drawn in the graph
            self.draw(0, logits, batch.cu_num_logits, batch.logits_indices, batch.positions)
        # all k count, but where `frames` tokens were the end of a prompt only the last does: it comes first
        sampled, rejected = self.kept[1][:k, :n].sum(0, dtype=torch.int32), self.kept[2][0, :n].clone()
        place = torch.arange(k, device=s.device) + (k - sampled)[:, None]
        pick = lambda x: x[place.clamp(max=k - 1), torch.arange(n, device=s.device)[:, None]]                 # [n, k, ..]
        token, side, logprobs = pick(self.kept[0]), pick(self.kept[5]), [pick(x).flatten(0, 1) for x in self.kept[3:5]] if ask else None
        number = side[..., -2]
        end = (number >= 0) & (number % 2 > 0)
        number.masked_fill_((end.cumsum(1) > end.int()) | (place >= k), -1)             # past the end nothing is to be heard
        if self.outbox:
            there, event = side.to('cpu', non_blocking=True), torch.cuda.Event(blocking=True)
            event.record()
            self.outbox.put((batch.req_ids, there, event, side))
        return self.SamplerOutput(sampled_token_ids=token, logprobs_tensors=self.LogprobsTensors(*logprobs, logprobs[0][:, 0], list(range(0, n * k, k))) if ask else None,
                                  num_nans=None, num_sampled=sampled, num_rejected=rejected)

    def send(self):
        import zmq
        socket = zmq.Context.instance().socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(self.state.side)
        while True:
            names, there, event, _ = self.outbox.get()
            event.synchronize()
            socket.send_multipart([' '.join(names).encode(), there.numpy().tobytes()])

def unpack(message, k=32):
    """A message of the side channel -> names, codes uint8 [n, K], frame numbers [n] (-1: nothing to hear), end [n], log-probs [n]; n: all frames of all requests"""
    names, rows = message[0].decode().split(' '), np.frombuffer(message[1], '<i4').reshape(-1, k // 4 + 2)
    names, at = [name for name in names for _ in range(len(rows) // len(names))], rows[:, k // 4]
    return names, np.ascontiguousarray(rows[:, :k // 4]).view(np.uint8), at >> 1, (at >= 0) & (at & 1 > 0), np.ascontiguousarray(rows[:, -1]).view(np.float32)
