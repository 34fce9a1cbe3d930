"""
Adapters: no-op at start, folding, files, refusals; compiled and sharded. The reference's numbers are in test_golden.py.

    pytest tests/test_lora.py
"""
import os

import pytest
import torch

import lora
import model as M
from test_model import random_rows, spread, tiny_model, two_ranks

TARGETS = ('q_proj', 'k_proj', 'v_proj', 'o_proj')


def adapted(seed=0, **kw):
    """A tiny model with adapters away from zero."""
    model = tiny_model().eval()
    config = lora.inject(model, **({'targets': TARGETS, 'rank': 4, 'alpha': 8, 'dropout': 0.0} | kw))
    g = torch.Generator().manual_seed(seed)
    for m in lora.adapters_of(model):
        m.lora_B.data.copy_(torch.randn(m.lora_B.shape, generator=g) * 0.1)
    return model, config


def logits(model, batch):
    with torch.no_grad():
        out = model(batch)
    return torch.cat((out['logits'][out['logits'] > -1e30].flatten(), out['stop_logits']))


@pytest.fixture(scope='module')
def batch():
    return M.pack(random_rows(tiny_model().cfg, [5, 1, 9]), tiny_model().cfg)


@pytest.fixture
def base_dir(tmp_path):
    model = tiny_model()
    M.save_checkpoint(str(tmp_path / 'base'), model.state_dict(), model.cfg, None, {})
    return str(tmp_path / 'base')


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_no_op_at_start(batch, dtype):
    model = tiny_model().to(dtype).eval()
    want = logits(model, batch)
    lora.inject(model, TARGETS + ('up_proj',), rank=4, alpha=8, dropout=0.5)
    assert torch.equal(logits(model.train(), batch), want)      # bitwise, whatever the dropout
    assert all(m.lora_A.dtype == torch.float32 for m in lora.adapters_of(model))


def test_injection(capsys):
    model, config = adapted(last_n_layers=2, targets=('v_proj', 'down_proj'))
    assert config == {'rank': 4, 'alpha': 8, 'dropout': 0.0, 'targets': ['v_proj', 'down_proj'], 'layers': [1, 2]}
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        f'model.layers.{i}.{n}.lora_{x}' for i in (1, 2) for n in ('self_attn.v_proj', 'mlp.down_proj') for x in 'AB']
    assert adapted()[1]['layers'] == [0, 1, 2] and capsys.readouterr().out == ''
    assert adapted(last_n_layers=9)[1]['layers'] == [0, 1, 2]   # clamped, and said
    assert 'taking all 3' in capsys.readouterr().out
    same = [m.lora_A for m in lora.adapters_of(adapted()[0])]
    assert all(torch.equal(a, m.lora_A) for a, m in zip(same, lora.adapters_of(adapted()[0])))
    assert not torch.equal(same[0], same[1])
    bound = 1 / same[0].shape[1] ** 0.5                         # kaiming_uniform, a = sqrt(5)
    assert bound * 0.9 < same[0].abs().max() <= bound


def test_refusals():
    with pytest.raises(ValueError, match=r"\['w_proj'\] match no linear layer; available: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"):
        lora.inject(tiny_model(), ('q_proj', 'w_proj'))
    for bad in ({'rank': 0}, {'alpha': 0}, {'dropout': 1.0}, {'dropout': -0.1}, {'last_n_layers': -1}, {'targets': ()}):
        with pytest.raises(ValueError, match='lora: '):
            lora.inject(tiny_model(), **({'targets': TARGETS} | bad))
    with pytest.raises(ValueError, match='already'):
        lora.inject(adapted()[0], TARGETS)


def test_dropout_acts_on_the_low_rank_path_only(batch):
    model, _ = adapted(dropout=0.5)
    model.train()
    a, b = logits(model, batch), logits(model, batch)
    assert not torch.equal(a, b)
    lora.fold(model)
    assert torch.equal(logits(model, batch), logits(model, batch))


@pytest.mark.parametrize('dtype, bound', [(torch.float32, 2e-5), (torch.bfloat16, 0.05)])
def test_fold_and_unfold(batch, dtype, bound):
    """Folded equals live up to the rounding of the weights; unfolded is the old model, bit for bit."""
    model, config = adapted()
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(dtype)
    model.audio_embed_scale.data = model.audio_embed_scale.to(dtype)
    live, weights = logits(model, batch), {k: v.clone() for k, v in model.state_dict().items()}
    lora.fold(model)
    lora.fold(model)                                            # the second changes nothing
    got = logits(model, batch)
    assert not torch.equal(got, live) and spread(got, live) < bound
    merged = lora.fold_state({k.replace('.base.', '.'): v for k, v in weights.items() if '.lora_' not in k}, lora.adapter_state(model), config)
    own = {k.replace('.base.', '.'): v for k, v in model.state_dict().items() if '.lora_' not in k}
    assert merged.keys() == own.keys() and all(torch.equal(merged[k], own[k]) for k in own)
    lora.unfold(model)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert torch.equal(logits(model, batch), live)


def test_files(batch, base_dir, tmp_path):
    """n loaded = n saved, the parent is the one it was made from, a stop head trained beside the adapters travels along."""
    model, config = adapted(last_n_layers=2)
    model.stop_head.requires_grad_(True)
    model.stop_head.bias.data += 1
    path = str(tmp_path / 'checkpoint-7')
    lora.save_adapter(path, lora.adapter_state(model), config | {'text_repetition': {'enabled': True}}, base_dir, lora.tensors_hash(base_dir),
                      extra=lambda folder: open(os.path.join(folder, 'resume.pt'), 'w').close())
    assert sorted(os.listdir(path)) == ['adapter.safetensors', 'adapter_config.json', 'resume.pt']
    assert len(lora.read_adapter(path)[0]) == 2 * 4 * 2 + 2
    assert M.latest_checkpoint(str(tmp_path), file='adapter.safetensors') == path and M.latest_checkpoint(str(tmp_path)) is None
    again = M.load_checkpoint(base_dir)[0]
    got = lora.load_adapter(again, path, parent=base_dir)
    assert got['text_repetition'] == {'enabled': True} and got['parent'] == base_dir
    assert torch.equal(logits(again, batch), logits(model, batch))
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {n for n, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(FileExistsError):
        lora.save_adapter(path, lora.adapter_state(model), config, base_dir, 'x')
    merged = lora.fold_state(M.read_tensors(base_dir), *lora.read_adapter(path))
    assert torch.equal(merged['stop_head.bias'], model.stop_head.bias)


def test_file_refusals(base_dir, tmp_path):
    model, config = adapted()
    state, parent = lora.adapter_state(model), lora.tensors_hash(base_dir)
    name = 'model.layers.0.self_attn.q_proj.lora_A'
    other = dict(M.read_tensors(base_dir))
    other['stop_head.bias'] = other['stop_head.bias'] + 1
    M.save_checkpoint(str(tmp_path / 'other'), M.fused(other, model.cfg), model.cfg, None, {})

    def saved(state, **more):
        path = str(tmp_path / f'adapter-{len(os.listdir(tmp_path))}')
        lora.save_adapter(path, state, config | more, 'out/base', parent)
        return path

    def refused(path, message, parent=None, error=ValueError):
        with pytest.raises(error, match=message) as e:
            lora.load_adapter(tiny_model(), path, parent)
        assert '\n' not in str(e.value)

    refused(saved(state), 'made from out/base, whose weights are not those of', str(tmp_path / 'other'))
    refused(saved({k: v for k, v in state.items() if k != name}), f'1 tensors missing, unknown or of another shape.*{name}')
    refused(saved(state | {'model.layers.9.x': state[name].clone()}), 'model.layers.9.x')
    refused(saved(state | {name: state[name][:2].clone()}), name)
    refused(saved(state, targets=['q_proj']), 'tensors missing, unknown')
    lame = saved(state)
    M.write_json(os.path.join(lame, 'adapter_config.json'), {k: v for k, v in M.read_json(os.path.join(lame, 'adapter_config.json')).items() if k != 'alpha'})
    refused(lame, 'adapter_config.json: no alpha')
    cut = saved(state)
    file = os.path.join(cut, 'adapter.safetensors')
    os.truncate(file, os.path.getsize(file) // 2)
    refused(cut, 'adapter.safetensors: cannot be read')
    os.remove(file)
    refused(cut, 'adapter.safetensors: no such file', error=FileNotFoundError)
    few = saved(state)
    from safetensors.torch import save_file
    save_file({name: state[name]}, os.path.join(few, 'adapter.safetensors'))
    refused(few, '1 tensors in adapter.safetensors, 24 saved')
    with pytest.raises(ValueError, match='has no model.layers.0.self_attn.q_proj.weight in the base'):
        lora.fold_state({}, state, config)


def test_compiled(batch):
    """Forward and backward under torch.compile equal eager, before and after folding."""
    model, _ = adapted()
    layer = model.model.layers[1].self_attn.q_proj
    x = torch.randn(7, model.cfg.hidden_size)
    fast = torch.compile(layer, fullgraph=True, backend='aot_eager')     # traced as always, but no C++ compiler needed
    for step in (lora.unfold, lora.fold):
        step(model)
        assert spread(fast(x), layer(x)) < 1e-5
    lora.unfold(model)
    grads = []
    for f in (layer, fast):
        model.zero_grad()
        f(x).square().sum().backward()
        grads.append([p.grad.clone() for p in (layer.lora_A, layer.lora_B)])
    assert all(spread(a, b) < 1e-5 for a, b in zip(*grads))


def sharded(rank):
    """Two ranks with half of the rows each, under FSDP2: the gradients and a step equal one process with all rows."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    rows = random_rows(tiny_model().cfg, [5, 1, 9, 3])

    def step(model, rows, all_reduced):
        opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        out = model(M.pack(rows, model.cfg))
        total = M.losses(out, M.pack(rows, model.cfg), model.cfg, {'frames': 18, 'stops': 22, 'rows': 4})['code']
        (total * (2 if all_reduced else 1)).backward()          # FSDP averages over the ranks, the loss is a sum
        opt.step()

    whole = adapted()[0]
    step(whole, rows, False)
    model = adapted()[0]
    mesh = torch.distributed.init_device_mesh('cpu', (2,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    step(model, rows[2 * rank:2 * rank + 2], True)
    full = lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=False))
    got, want = full(), lora.adapter_state(whole)
    if rank == 0:
        got = lora.adapter_state(model, got)
        assert got.keys() == want.keys()
        assert all(spread(got[k], want[k]) < 1e-5 for k in want)
        assert not torch.equal(want['model.layers.0.self_attn.q_proj.lora_A'], lora.adapter_state(adapted()[0])['model.layers.0.self_attn.q_proj.lora_A'])
    lora.fold(model)
    lora.fold(whole)
    got = full()
    if rank == 0:
        assert spread(got['model.layers.1.self_attn.q_proj.base.weight'], whole.model.layers[1].self_attn.q_proj.base.weight) < 1e-5


def test_two_ranks():
    two_ranks(sharded)
