"""merge.py as a user runs it, on adapters of a small random model.   pytest tests/test_merge.py"""
import json, os, runpy, shutil, sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora
import model as M
from test_lora import TARGETS, logits
from test_model import random_rows, spread, tiny_model

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GOLDEN = os.path.join(ROOT, 'tests', 'data', 'golden', 'checkpoint')
TOKENIZER = os.path.join(ROOT, 'assets', 'tiny', 'tokenizer')
REPETITION = M.Config().text_repetition | {'enabled': True, 'apply_below': 9}


def run(capsys, script, *flags, code=0):
    """A script in this process -> what it printed."""
    argv, sys.argv = sys.argv, [script, *flags]
    try:
        runpy.run_path(os.path.join(ROOT, script), run_name='__main__')
        assert code == 0
    except SystemExit as e:
        assert e.code == code, capsys.readouterr().err
    finally:
        sys.argv = argv
    text = capsys.readouterr()
    return text.out if code == 0 else text.err


def make_base(path, dtype=torch.float32):
    model = tiny_model().to(dtype)
    M.save_checkpoint(path, model.state_dict(), model.cfg, TOKENIZER, {'stage': 'pretrain', 'step': 10, 'parent': 'scratch', 'config': {'learning_rate': 1e-3}})


def make_adapter(path, base, change=lambda state: state, stop_head=False, targets=TARGETS, rank=None, **more):
    """Adapters away from zero for a base of make_base -> the live model. rank: a lie to be written into the config."""
    model = M.load_checkpoint(base)[0]
    config = lora.inject(model, targets, rank=4, alpha=8, dropout=0.0)
    g = torch.Generator().manual_seed(1)
    for m in lora.adapters_of(model):
        m.lora_B.data.copy_(torch.randn(m.lora_B.shape, generator=g) * 0.1)
    if stop_head:
        model.stop_head.requires_grad_(True)
        model.stop_head.bias.data += 1
        model.stop_head.weight.data *= 1.5
    more = {'text_repetition': REPETITION, 'stage': 'finetune', 'step': 7} | ({'rank': rank} if rank else {}) | more
    lora.save_adapter(path, change(lora.adapter_state(model)), config | more, base, lora.tensors_hash(base))
    return model


@pytest.fixture
def folder(tmp_path):
    make_base(str(tmp_path / 'base'))
    return tmp_path


# measured: 2.2e-7 and 2.4e-3; the bounds are those of merge.py's docstring
@pytest.mark.parametrize('dtype, bound', [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)])
def test_logits_before_and_after(tmp_path, capsys, dtype, bound):
    base, run_dir = str(tmp_path / 'base'), tmp_path / 'ft'
    make_base(base, dtype)
    make_adapter(str(run_dir / 'checkpoint-5'), base, change=lambda s: {k: t + 1 for k, t in s.items()})
    model = make_adapter(str(run_dir / 'checkpoint-10'), base, stop_head=True, targets=TARGETS + ('down_proj',))
    text = run(capsys, 'merge.py', f'--ckpt={run_dir}')         # a run's folder: its newest adapters
    out = f'{run_dir}/checkpoint-10-merged'
    assert '15 adapters of rank 4, alpha 8' in text and 'taken over whole: stop_head.bias, stop_head.weight' in text and out in text
    assert ('rounding to bfloat16 loses' in text) == (dtype == torch.bfloat16)
    merged, plain = load_file(f'{out}/model.safetensors'), load_file(f'{base}/model.safetensors')
    assert {k: (t.shape, t.dtype) for k, t in merged.items()} == {k: (t.shape, t.dtype) for k, t in plain.items()}
    changed = {k for k in plain if not torch.equal(merged[k], plain[k])}
    assert len(changed) == 15 + 2 and all(k.startswith(('model.layers.', 'stop_head.')) for k in changed)
    batch = M.pack(random_rows(model.cfg, [5, 1, 9]), model.cfg)
    again = M.load_checkpoint(out)[0]
    assert spread(logits(again, batch), logits(model.eval(), batch)) < bound
    assert spread(logits(again, batch), logits(M.load_checkpoint(base)[0], batch)) > 0.1     # the adapters do something


def test_files_are_the_base_s(folder, capsys):
    """config.json byte for byte (rotary factor), unknown keys of gepard_config.json too, repetition of the fine-tune, the history."""
    base = str(folder / 'base')
    config = M.read_json(f'{base}/config.json') | {'partial_rotary_factor': 0.25, 'theirs': 1}
    M.write_json(f'{base}/config.json', config)
    M.write_json(f'{base}/gepard_config.json', M.read_json(f'{base}/gepard_config.json') | {'theirs': [1, 2]})
    make_adapter(str(folder / 'a'), base)
    run(capsys, 'merge.py', f'--ckpt={folder}/a/', f'--out={folder}/m')
    assert sorted(os.listdir(folder / 'm')) == sorted(os.listdir(base))
    for name in ('config.json', 'tokenizer.json', 'tokenizer_config.json'):
        assert (folder / 'm' / name).read_bytes() == (folder / 'base' / name).read_bytes()
    was, now = M.read_json(f'{base}/gepard_config.json'), M.read_json(f'{folder}/m/gepard_config.json')
    assert now == was | {'text_repetition': REPETITION} and list(now) == list(was) and list(now['audio_heads']) == list(was['audio_heads'])
    meta = M.read_json(f'{folder}/m/training_metadata.json')
    assert (meta['stage'], meta['step'], meta['parent'], meta['adapter']['rank']) == ('finetune', 7, base, 4)
    assert [h['stage'] for h in meta['history']] == ['pretrain'] and 'text_repetition' in meta
    # a second round on top of the first: history grows, and without a word of the adapter the base's repetition stays
    make_adapter(str(folder / 'b'), str(folder / 'm'), stage='dpo', text_repetition=REPETITION | {'max_repeats': 3})
    text = run(capsys, 'merge.py', f'--ckpt={folder}/b')
    assert [h['stage'] for h in M.read_json(f'{folder}/b-merged/training_metadata.json')['history']] == ['pretrain', 'finetune']
    assert 'text repetition: on, from the adapter' in text
    c = M.read_json(f'{folder}/b/adapter_config.json')
    del c['text_repetition']
    M.write_json(f'{folder}/b/adapter_config.json', c)
    text = run(capsys, 'merge.py', f'--ckpt={folder}/b', f'--out={folder}/n')
    assert M.read_json(f'{folder}/n/gepard_config.json')['text_repetition'] == REPETITION and 'the adapter says nothing' in text


def test_moved_base(folder, capsys):
    make_adapter(str(folder / 'a'), str(folder / 'base'))
    os.rename(folder / 'base', folder / 'moved')
    assert 'no such folder' in run(capsys, 'merge.py', f'--ckpt={folder}/a', code=2)
    run(capsys, 'merge.py', f'--ckpt={folder}/a', f'--base={folder}/moved')
    M.load_checkpoint(str(folder / 'a-merged'))
    os.makedirs(folder / 'run')
    os.rename(folder / 'moved', folder / 'run' / 'checkpoint-10')
    run(capsys, 'merge.py', f'--ckpt={folder}/a', f'--base={folder}/run', f'--out={folder}/b')


def test_refusals(folder, capsys):
    base = str(folder / 'base')
    name = 'model.layers.1.self_attn.q_proj.lora_A'

    def refused(words, path, *flags):
        text = run(capsys, 'merge.py', f'--ckpt={path}', *flags, code=2)
        assert text.startswith('merge.py: ') and text.count('\n') == 1 and words in text, text

    def adapter(**kw):
        path = str(folder / f'a{len(os.listdir(folder))}')
        make_adapter(path, base, **kw)
        return path

    good = adapter()
    run(capsys, 'merge.py', f'--ckpt={good}')
    refused('exists already', good)                                                 # the same merge again
    refused('nothing to fold', f'{good}-merged')                                    # a merged checkpoint
    refused('whose weights are not those of', good, f'--out={folder}/x', f'--base={good}-merged')   # folding in twice
    refused('exists already', good, f'--out={base}')
    refused('no such folder', f'{folder}/nowhere')
    os.mkdir(folder / 'empty')
    refused('no adapter.safetensors there', f'{folder}/empty')
    shutil.copytree(good, folder / 'a.tmp')
    refused('a.tmp: a save that was not finished', f'{folder}/a.tmp/')
    refused('b.tmp: a save that was not finished', good, f'--out={folder}/x', f'--base={folder}/b.tmp')
    shutil.rmtree(folder / 'a.tmp')
    refused(f'1 tensors missing, the first is {name}', adapter(change=lambda s: {k: t for k, t in s.items() if k != name}))
    refused(f'{name} is [2, 64] instead of [4, 64]', adapter(change=lambda s: s | {name: s[name][:2].clone()}))
    refused(f'{name} is not finite', adapter(change=lambda s: s | {name: s[name] * float('nan')}))
    refused('model.layers.9.x has no place', adapter(change=lambda s: s | {'model.layers.9.x': s[name].clone()}))
    refused('no q_proj in layer 3', adapter(layers=[0, 1, 2, 3]))
    refused('instead of [8, 64]', adapter(rank=8))                                  # rank is the config's own
    few = adapter()
    save_file({name: load_file(f'{few}/adapter.safetensors')[name]}, f'{few}/adapter.safetensors')
    refused('1 tensors in adapter.safetensors, 24 saved', few)
    for key in ('alpha', 'parent_hash'):
        lame = adapter()
        config = M.read_json(f'{lame}/adapter_config.json')
        M.write_json(f'{lame}/adapter_config.json', {k: v for k, v in config.items() if k != key})
        refused(f'adapter_config.json: no {key}', lame)
    # the base's weights changed after training, even by one number
    weights = load_file(f'{base}/model.safetensors')
    save_file(weights | {'stop_head.bias': weights['stop_head.bias'] + 1}, f'{base}/model.safetensors')
    refused('whose weights are not those of', good, f'--out={folder}/x')
    # adapters left inside the base
    save_file(weights | {name: torch.zeros(4, 64)}, f'{base}/model.safetensors')
    live = str(folder / 'live')
    shutil.copytree(good, live)
    M.write_json(f'{live}/adapter_config.json', M.read_json(f'{live}/adapter_config.json') | {'parent_hash': lora.tensors_hash(base)})
    refused('adapters inside model.safetensors', live)
    assert not [n for n in os.listdir(folder) if n.endswith('.tmp') or n == 'x']


def test_published_layout(tmp_path, capsys):
    """The published checkpoint (older ones store scalars without a dimension) as a base: same keys, dtypes, files afterwards."""
    base = str(tmp_path / 'base')
    os.mkdir(base)
    for name in os.listdir(GOLDEN):
        shutil.copyfile(os.path.join(GOLDEN, name), os.path.join(base, name))
    old = load_file(f'{base}/model.safetensors')
    for key in ('audio_embed_scale', 'ref_compressor.output_scale'):
        old[key] = old[key].reshape(())
    save_file(old, f'{base}/model.safetensors', metadata={'format': 'pt'})
    model = M.load_checkpoint(base)[0]
    config = lora.inject(model, ('q_proj', 'v_proj'), 1, 4, 8, 0.0)
    for m in lora.adapters_of(model):
        m.lora_B.data.normal_()
    lora.save_adapter(str(tmp_path / 'a'), lora.adapter_state(model), config, base, lora.tensors_hash(base))
    run(capsys, 'merge.py', f'--ckpt={tmp_path}/a')
    new = load_file(f'{tmp_path}/a-merged/model.safetensors')
    assert {k: (t.shape, t.dtype) for k, t in new.items()} == {k: (t.shape, t.dtype) for k, t in old.items()}
    assert sorted(k for k in old if not torch.equal(old[k], new[k])) == [f'model.layers.2.self_attn.{n}.weight' for n in ('q_proj', 'v_proj')]
    lora.fold(model)
    again = M.load_checkpoint(f'{tmp_path}/a-merged')[0].state_dict()
    assert all(torch.equal(again[k.replace('.base.', '.')], t) for k, t in model.state_dict().items() if '.lora_' not in k)
    assert json.loads(open(f'{tmp_path}/a-merged/gepard_config.json').read()) == M.read_json(f'{GOLDEN}/gepard_config.json')
