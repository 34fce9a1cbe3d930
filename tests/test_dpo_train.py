"""
dpo_train.py as a user runs it, on pairs from the rollouts of a small random checkpoint: step 0, exact resume, ranks, refusals, the merged result.

    pytest tests/test_dpo_train.py
"""
import filecmp, json, math, os, resource, shutil, signal, subprocess, sys, time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lora
import model as M
from test_dpo_sample import path, place, run as sample      # place is a fixture
from test_merge import run as merge

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FLAGS = ['--batch_size=2', '--gradient_accumulation=4', '--epochs=4', '--warmup_steps=1', '--learning_rate=3e-3', '--stop_lr=3e-3', '--log_interval=1', '--eval_interval=4',
         '--save_interval=2', '--keep_checkpoints=0', '--hold_out=0.3', '--device=cpu']


def pretend_heard(folder, **changed):
    """facts.jsonl as if Whisper had understood the first rollout of each group and nothing of the others."""
    index = [json.loads(line) for line in open(os.path.join(folder, 'rollouts', 'index.jsonl'))]
    with open(os.path.join(folder, 'facts.jsonl'), 'w') as f:
        for g in index:
            f.write(json.dumps({'group': g['group'], 'rollouts': [
                {'transcript': g['text'] if k == 0 else 'mumble', 'level': -20.0, 'heard': True, 'similarity': None} for k in range(len(g['frames']))]}) + '\n')


def script(name, place, round_name, *flags, ranks=0, code=0, popen=False, disk=None):
    """disk: bytes that a file may have, as if there were no room for more."""
    launch = [sys.executable] if not ranks else [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}']
    command = [*launch, os.path.join(ROOT, name), f'--out_dir={place}/out', f'--run_name={round_name}', *flags]
    env = os.environ | {'OMP_NUM_THREADS': '1'}
    if popen:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    r = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env,
                       preexec_fn=disk and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))))
    assert r.returncode == code, r.stdout[-3000:] + r.stderr[-3000:]
    return r.stdout + r.stderr


@pytest.fixture(scope='module')
def trained(place):
    """A round with pairs, trained in one go -> place, what was printed."""
    pretend_heard(f'{place}/out/whole')
    text = script('dpo_score.py', place, 'whole', '--not_truncated=false', '--duration_in_bounds=false', '--w_over=0', '--w_short=0', '--max_pairs=1', '--device=cpu')
    assert '24 pairs from 24 of 24 groups' in text, text
    for name in ('ranks', 'killed-training', 'other'):
        shutil.copytree(f'{place}/out/whole', f'{place}/out/{name}')
    return place, script('dpo_train.py', place, 'whole', *FLAGS)


def log(place, name):
    return {r['step']: r for r in map(json.loads, open(f'{place}/out/{name}/train/metrics.jsonl')) if 'loss' in r}


def adapters(place, name, step):
    return load_file(f'{place}/out/{name}/train/checkpoint-{step}/adapter.safetensors')


def test_stored_log_probs_by_brute_force(trained):
    """The reference in pairs.json: one forward a frame, of the published policy, without packing."""
    place, _ = trained
    content = M.read_json(f'{place}/out/whole/pairs.json')
    model, base = M.load_checkpoint(f'{place}/policy/checkpoint-3')
    assert content['policy_hash'] == lora.tensors_hash(base) and content['p_floor'] == 1e-4
    tokens, voices = np.fromfile(path(place, 'whole', 'tokens.bin'), '<u2').reshape(-1, 8), load_file(path(place, 'whole', 'voices.safetensors'))
    for pair in content['pairs'][:3]:
        for s in (pair['chosen'], pair['rejected']):
            n = int(s['frames'])
            codes, code_sum, stop_sum = tokens[s['start']:s['start'] + n], 0.0, 0.0
            prefix = model.voices([None if pair['voice'] < 0 else voices[str(pair['voice'])].numpy()])[0]
            for j in range(1, n + 1):
                with torch.no_grad():
                    out = model(M.pack([{'text': pair['tokens'], 'prefix': prefix, 'codes': codes[:j]}], model.cfg))
                code_sum += float(out['logits'][-1].log_softmax(-1).gather(-1, out['codes'][-1:].T).sum())
                p = float(torch.sigmoid(out['stop_logits'][-1]).clamp(1e-4, 1 - 1e-4))
                stop_sum += math.log(1 - p) if j < n else 0.0 if s['truncated'] else math.log(p)
            assert s['ref_tokens'] == pytest.approx(code_sum, rel=1e-5) and s['ref_stop'] == pytest.approx(stop_sum, rel=1e-4, abs=1e-4)


def test_training(trained):
    """ln 2 and no margin at step 0, then the chosen side wins; what is written is an ordinary checkpoint that speaks the next round."""
    place, text = trained
    assert f'step 0, the largest of 24 pairs: loss 0.6931 (ln 2 = {math.log(2):.4f}), margin 0.0000' in text, text
    r = log(place, 'whole')
    last = max(r)
    assert r[1]['loss'] == pytest.approx(math.log(2), abs=0.02) and r[last]['loss'] < 0.6 and r[last]['accuracy'] > 0.8 and r[last]['margin'] > 0.2
    assert {'accuracy', 'margin', 'chosen', 'rejected', 'chosen_drift', 'rejected_drift', 'stop_chosen', 'stop_rejected'} <= r[last].keys()
    assert [n for n, _ in M.checkpoints(f'{place}/out/whole/train', file='adapter.safetensors')] == list(range(2, last + 1, 2))        # every save_interval
    held = [x for x in map(json.loads, open(f'{place}/out/whole/train/metrics.jsonl')) if 'held_loss' in x]
    assert held[0]['step'] == 0 and held[0]['held_loss'] == pytest.approx(math.log(2), abs=1e-4) and held[0]['held_drift'] == pytest.approx(0, abs=1e-5) and abs(held[-1]['held_drift']) > 1e-4
    for word in ('held out (30% of the prompts)', 'steps an epoch', 'lr 3.0e-03', 'stop head', 'ETA', 'merged: the merged checkpoint'):
        assert word in text, word
    base, merged = load_file(f'{place}/policy/checkpoint-3/model.safetensors'), load_file(f'{place}/out/whole/merged/model.safetensors')
    changed = {k for k in base if not torch.equal(base[k], merged[k])}
    assert base.keys() == merged.keys() and changed == {f'model.layers.{i}.self_attn.{n}.weight' for i in range(2) for n in ('q_proj', 'v_proj')} | {'stop_head.weight', 'stop_head.bias'}
    meta = M.read_json(f'{place}/out/whole/merged/training_metadata.json')
    assert meta['stage'] == 'dpo' and meta['step'] == last and meta['history'] == [{'stage': 'pretrain'}]
    model, _ = M.load_checkpoint(f'{place}/policy/checkpoint-3')
    lora.load_adapter(model, f'{place}/out/whole/train/checkpoint-{last}', f'{place}/policy/checkpoint-3')
    lora.fold(model)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.base.weight, merged['model.layers.0.self_attn.q_proj.weight'])
    assert os.path.getsize(f'{place}/out/whole/train/curves.png') > 1000
    sample(place, 'second', f'--ckpt={place}/out/whole/merged')             # the later flag wins: one flag starts the next round
    assert M.read_json(path(place, 'second', 'meta.json'))['policy_hash'] == lora.tensors_hash(f'{place}/out/whole/merged')
    assert 'this round is finished' in script('dpo_train.py', place, 'whole', *FLAGS, code=2)


def test_two_ranks(trained):
    """Two ranks with half the micro-batches each: the same adapters but for rounding."""
    place, _ = trained
    script('dpo_train.py', place, 'ranks', *FLAGS, '--gradient_accumulation=2', ranks=2)
    last = max(log(place, 'whole'))
    a, b = adapters(place, 'whole', last), adapters(place, 'ranks', last)
    assert all((a[k] - b[k]).abs().max() <= 1e-3 * a[k].abs().max() + 1e-6 for k in a)
    assert log(place, 'ranks')[last]['loss'] == pytest.approx(log(place, 'whole')[last]['loss'], rel=1e-3)
    for gone in ('merged', f'train/checkpoint-{last}'):
        shutil.rmtree(f'{place}/out/ranks/{gone}')
    os.makedirs(f'{place}/out/ranks/train/checkpoint-99.tmp')               # a save that was killed
    assert 'must stay' in script('dpo_train.py', place, 'ranks', *FLAGS, '--gradient_accumulation=2', code=2)
    script('dpo_train.py', place, 'ranks', *FLAGS)                          # one rank, with as many pairs a step: it goes on
    c = adapters(place, 'ranks', last)
    assert all((c[k] - b[k]).abs().max() <= 1e-3 * b[k].abs().max() + 1e-6 for k in b) and not os.path.exists(f'{place}/out/ranks/train/checkpoint-99.tmp')


def test_kills(trained):
    """kill -9 once there is a checkpoint, SIGTERM (which saves) after the next, and on to the end: the same bits and the same log."""
    place, _ = trained
    folder, rng = f'{place}/out/killed-training/train', np.random.default_rng(1)
    saved = lambda: len(M.checkpoints(folder, file='adapter.safetensors'))
    for n in range(2):
        before, begun, p = saved(), time.time(), script('dpo_train.py', place, 'killed-training', *FLAGS, popen=True)
        while p.poll() is None and time.time() - begun < 120 and saved() == before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.05))
        p.send_signal((signal.SIGKILL, signal.SIGTERM)[n])
        assert p.wait() in ((-signal.SIGKILL, 0), (0,))[n]
        if os.path.exists(f'{place}/out/killed-training/merged'):           # it was faster
            break
    if not os.path.exists(f'{place}/out/killed-training/merged'):
        open(f'{folder}/metrics.jsonl', 'a').write('{"step": 9')
        assert 'resumed' in script('dpo_train.py', place, 'killed-training', *FLAGS)
    last = max(log(place, 'whole'))
    a, b = adapters(place, 'whole', last), adapters(place, 'killed-training', last)
    assert all(torch.equal(a[k], b[k]) for k in a) and log(place, 'killed-training') == log(place, 'whole')
    assert open(f'{place}/out/killed-training/merged/model.safetensors', 'rb').read() == open(f'{place}/out/whole/merged/model.safetensors', 'rb').read()


def test_warnings(trained):
    """When chosen and rejected fall together; when every pair is right as soon as the policy has moved at all (a copy of the run on all pairs at once)."""
    place, text = trained
    fell = [r['rejected_drift'] < -0.05 and r['chosen_drift'] < -0.05 and r['chosen_drift'] < r['rejected_drift'] / 4 for r in log(place, 'whole').values()]
    assert text.count('warning: chosen falls with rejected') == sum(fell) and 0 < sum(fell) < len(fell)
    assert 'accuracy is 1.0' not in text                                    # it is, but not from the start
    shutil.copytree(f'{place}/out/other', f'{place}/out/warm')
    text = script('dpo_train.py', place, 'warm', *FLAGS, '--learning_rate=1e-3', '--batch_size=8', '--log_interval=5', '--max_steps=10', '--epochs=10')
    assert 'warning: accuracy is 1.0 from the start' in text, text


def test_full_disk(trained):
    """One line; once there is room the run goes on to the same end."""
    place, _ = trained
    shutil.copytree(f'{place}/out/other', f'{place}/out/full')
    size = os.path.getsize(f'{place}/out/whole/train/checkpoint-2/adapter.safetensors')
    assert os.path.getsize(f'{place}/out/whole/train/curves.png') > 2 * size
    for disk, file in ((100, 'train/checkpoint-2'), (size - 1, 'train/checkpoint-2'), (2 * size + 20000, 'merged')):
        text = script('dpo_train.py', place, 'full', *FLAGS, code=2, disk=disk)
        assert ('train/metrics.jsonl: a line is not written' in text) == (disk == 100)      # named, and not worth the run
        assert text.rstrip().splitlines()[-1].startswith(f'dpo_train.py: {place}/out/full/{file}: not written (') and 'Traceback' not in text, text
    script('dpo_train.py', place, 'full', *FLAGS)
    assert open(f'{place}/out/full/merged/model.safetensors', 'rb').read() == open(f'{place}/out/whole/merged/model.safetensors', 'rb').read()


def test_merged_as_merge_py_does(trained, capsys):
    """One adapter through both is one checkpoint. What the base lacks, its dtypes and foreign keys stay; the policy has moved since, and stays a folder."""
    place, _ = trained
    run, base = shutil.copytree(f'{place}/out/other', f'{place}/out/moved'), shutil.copytree(f'{place}/policy/checkpoint-3', f'{place}/new/base')
    weights = load_file(f'{base}/model.safetensors')
    save_file({k: t for k, t in weights.items() if not k.startswith('supcon_head.')}, f'{base}/model.safetensors', metadata={'format': 'pt'})
    for name, more in (('config.json', {'theirs': 1}), ('gepard_config.json', {'theirs': [2], 'model_dtype': 'bfloat16'})):
        M.write_json(f'{base}/{name}', M.read_json(f'{base}/{name}') | more)
    M.write_json(f'{run}/pairs.json', M.read_json(f'{run}/pairs.json') | {'policy': '/gone/policy', 'policy_hash': lora.tensors_hash(base)})
    script('dpo_train.py', place, 'moved', *FLAGS, f'--ckpt={base}', '--max_steps=1')
    merge(capsys, 'merge.py', f'--ckpt={run}/train', f'--base={base}')
    files = sorted(os.listdir(f'{run}/merged'))
    assert filecmp.cmpfiles(f'{run}/merged', f'{run}/train/checkpoint-1-merged', files, shallow=False) == (files, [], []) and files == sorted(os.listdir(base))
    merged = load_file(f'{run}/merged/model.safetensors')
    assert {k: (t.dtype, t.shape) for k, t in merged.items()} == {k: (t.dtype, t.shape) for k, t in weights.items() if not k.startswith('supcon_head.')}
    assert filecmp.cmp(f'{run}/merged/config.json', f'{base}/config.json', shallow=False) and M.read_json(f'{run}/merged/gepard_config.json') == M.read_json(f'{base}/gepard_config.json')
    meta = M.read_json(f'{run}/merged/training_metadata.json')
    assert (meta['parent'], meta['parent_kind'], meta['pairs']) == ('/gone/policy', 'folder', 18) and {'counts', 'versions', 'config'} <= meta.keys()
    assert (meta['adapter']['rank'], meta['adapter']['alpha'], meta['adapter']['targets']) == (16, 32.0, ['q_proj', 'v_proj'])


def test_resume_of_other_rollouts(trained):
    """Rollouts or pairs made anew under the same name are not gone on with; a pairs.json of before does not say whose it is, and is taken."""
    place, _ = trained
    run = shutil.copytree(f'{place}/out/whole', f'{place}/out/again')
    for gone in ('merged', f"train/checkpoint-{max(log(place, 'whole'))}"):
        shutil.rmtree(f'{run}/{gone}')
    file, where = f'{run}/pairs.json', f'{run}/rollouts/tokens.bin'
    content, whole = M.read_json(file), open(where, 'rb').read()
    open(where, 'wb').write(whole[16:] + whole[:16])
    assert 'again/rollouts: not those that pairs.json was made from' in script('dpo_train.py', place, 'again', *FLAGS, code=2)
    open(where, 'wb').write(whole)
    M.write_json(file, content | {'counts': {}})
    assert 'was trained with other pairs' in script('dpo_train.py', place, 'again', *FLAGS, code=2)
    shutil.rmtree(f'{run}/train')
    M.write_json(file, {k: v for k, v in content.items() if k != 'rollouts'})
    script('dpo_train.py', place, 'again', *FLAGS, '--max_steps=1')


def test_refusals(trained):
    place, _ = trained
    file = f'{place}/out/other/pairs.json'
    content = M.read_json(file)

    def refused(message, *flags, **changed):
        json.dump(content | changed, open(file, 'w'))
        text = script('dpo_train.py', place, 'other', *FLAGS, *flags, code=2)
        assert message in text and 'Traceback' not in text, text
    refused('is not the policy that made the pairs', f'--ckpt={place}/out/whole/merged')
    refused('was made with text_repetition', text_repetition=content['text_repetition'] | {'enabled': False})
    for n in (0, 23):                                                       # one pair, whichever it is
        shifted = [p | {'chosen': p['chosen'] | {'ref_tokens': p['chosen']['ref_tokens'] + (i == n)}} for i, p in enumerate(content['pairs'])]
        refused('at step 0 the policy differs from the reference', pairs=shifted)
    text = script('dpo_train.py', place, 'other', *FLAGS, ranks=2, code=1)  # the second rank's
    mean = 1 / shifted[23]['chosen']['frames'] / 48
    assert f', {mean:.3g} in the mean' in text and text.count('at step 0 the policy differs') == 1, text
    refused('has no pairs', pairs=[])
    where = f'{place}/out/other/rollouts/tokens.bin'
    whole = open(where, 'rb').read()
    for part in (len(whole) // 16 // 2 * 16, len(whole) - 3):
        open(where, 'wb').write(whole[:part])
        refused('rollouts/tokens.bin: shorter than what pairs.json was made from')
    open(where, 'wb').write(whole)
    json.dump({k: v for k, v in content.items() if k != 'p_floor'}, open(file, 'w'))
    assert "pairs.json has no 'p_floor': make it anew with dpo_score.py" in script('dpo_train.py', place, 'other', *FLAGS, code=2)
    refused('all 24 pairs are held out', '--hold_out=0.99999')
    for flags, message in ((['--beta=0'], 'beta must be above 0'), (['--pair_weights=x'], "'linear', 'clip' or 'none'"), (['--learning_rate=0', '--stop_lr=0'], 'nothing would be trained')):
        refused(message, *flags)
    for flag in ('--betta=1', '--weight_decay=0.1'):                        # it would decay the stop head's bias
        assert 'unknown key' in script('dpo_train.py', place, 'other', flag, code=2)
    assert 'pairs.json does not exist' in script('dpo_train.py', place, 'nothing', 'config/dpo.py', f'--out_dir={place}/out', code=2)
