"""
pretrain.py as a user runs it, on a small random corpus: exact resume, ranks, kills, refusals.   pytest tests/test_pretrain.py
"""
import json, os, shutil, signal, subprocess, sys, time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import model as M
import prepare

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKENIZER = os.path.join(ROOT, 'assets', 'tiny', 'tokenizer')
TINY = ['--init_from=scratch', '--hidden_size=32', '--intermediate_size=64', '--num_hidden_layers=2', '--num_attention_heads=2', '--num_key_value_heads=1',
        '--head_dim=16', '--max_position_embeddings=512', '--audio_embed_dim=4', '--prefix_heads=2', '--batch_size=8', '--P=3', '--K=2', '--M=2',
        '--gradient_accumulation=2', '--warmup_steps=3', '--reg_start=2', '--diversity_ramp=4', '--supcon_ramp=4', '--log_interval=1', '--eval_interval=0',
        '--num_workers=0', '--device=cpu', '--dtype=float32', '--epochs=40']


def write_corpus(path, speakers=5, clips=6, nulls=5, seed=0, most_frames=90, most_text=12, released=False):
    """A corpus of random rows in prepare.py's format; released: with the ids of the released tokenizer, for runs at full size."""
    rng = np.random.default_rng(seed)
    rows, codes, text = [], [], []
    frames = tokens = 0
    for i in range(speakers * clips + nulls):
        n, t = int(rng.integers(1, most_frames)), int(rng.integers(1, most_text))
        rows.append((tokens, t, frames, n, i + 1, i // clips if i < speakers * clips else -1, 0, 1 if i % clips == 5 else 0))
        codes.append(rng.integers(0, 2016, (n, 8)))
        text.append(rng.integers(0, 256, t))
        frames, tokens = frames + n, tokens + t
    special = {'start_of_speech': 256, 'end_of_speech': 257, 'start_of_text': 258, 'end_of_text': 259, 'tts_pad': 260}
    special, length = ({k: v + 247814 for k, v in special.items()}, 248077) if released else (special, 446)
    os.makedirs(path)
    np.concatenate(codes).astype('<u2').tofile(os.path.join(path, 'codes.bin'))
    np.concatenate(text).astype('<u4').tofile(os.path.join(path, 'text.bin'))
    np.array(rows, prepare.ROW).tofile(os.path.join(path, 'index.bin'))
    meta = {'magic': prepare.MAGIC, 'version': prepare.VERSION, 'rows': len(rows), 'frames': frames, 'tokens': tokens,
            'codec': {'id': 'none', 'sample_rate': 22050, 'hop': 1024, 'levels': [8, 7, 6, 6], 'groups': 8},
            'tokenizer': {'id': TOKENIZER, 'hash': prepare.sha256_of(os.path.join(TOKENIZER, 'tokenizer.json')), 'length': length}, 'sources': [], 'settings': {'min_clips_per_speaker': 3},
            'special_tokens': special,
            'speakers': [f'x/{s}' for s in range(speakers)]}
    with open(os.path.join(path, 'meta.json'), 'w') as f:
        json.dump(meta, f)
    return str(path)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus') / 'random')


def command(out, corpus, *flags, ranks=0):
    launch = [sys.executable] if not ranks else [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}']
    return [*launch, os.path.join(ROOT, 'pretrain.py'), *TINY, f'--out_dir={out}', f'--data={corpus}', *flags]


def run(out, corpus, *flags, ranks=0, code=0):
    r = subprocess.run(command(out, corpus, *flags, ranks=ranks), capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert r.returncode == code, r.stdout[-3000:] + r.stderr[-3000:]
    return r.stdout + r.stderr


def log(out):
    return {r['step']: r for r in map(json.loads, open(os.path.join(out, 'metrics.jsonl'))) if 'code' in r}


def weights(out, step):
    return load_file(os.path.join(out, f'checkpoint-{step}', 'model.safetensors'))


def same(a, b, rel=0.0):
    assert a.keys() == b.keys()
    for k in a:
        assert torch.equal(a[k], b[k]) if not rel else (a[k] - b[k]).abs().max() <= rel * max(b[k].abs().max(), 1e-3), k


@pytest.fixture(scope='module')
def ten(tmp_path_factory, corpus):
    """Ten steps in one go."""
    out = str(tmp_path_factory.mktemp('ten') / 'run')
    text = run(out, corpus, '--max_steps=10', '--save_interval=5', '--dtype=float32')
    return out, text


def test_ten_steps_learn_and_say_what_they_do(ten):
    out, text = ten
    r = log(out)
    assert sorted(r) == list(range(1, 11))
    assert abs(r[1]['code'] - 60.9) < 6.09 and r[10]['code'] < r[1]['code']
    assert r[1]['lr'] == pytest.approx(9e-4 / 3) and r[3]['lr'] == pytest.approx(9e-4) and r[10]['lr'] < 1e-4
    assert r[2]['supcon'] > 0 and r[10]['diversity'] >= 0
    for word in ('steps an epoch', 'lr 9.00e-04', 'ETA', '3 speakers x 2 clips + 2 null rows', 'saved'):
        assert word in text, text
    meta = M.read_json(os.path.join(out, 'checkpoint-10', 'training_metadata.json'))
    assert meta['stage'] == 'pretrain' and meta['step'] == 10 and meta['config']['P'] == 3
    model, folder = M.load_checkpoint(os.path.join(out, 'checkpoint-10'))
    assert model.cfg.levels == [8, 7, 6, 6] * 8 and os.path.exists(os.path.join(folder, 'tokenizer.json'))


def test_resume_is_bitwise(ten, corpus, tmp_path):
    out = str(tmp_path / 'run')
    # the total is the schedule's: stop at 5 by SIGTERM-free means, a run whose later steps are cut off by removing them
    import shutil
    shutil.copytree(ten[0], out)
    shutil.rmtree(os.path.join(out, 'checkpoint-10'))
    text = run(out, corpus, '--max_steps=10', '--save_interval=5', '--dtype=float32')
    assert 'resumed' in text and 'step 5' in text
    same(weights(out, 10), weights(ten[0], 10))
    a, b = log(out), log(ten[0])
    assert all(a[s]['code'] == b[s]['code'] and a[s]['grad_norm'] == b[s]['grad_norm'] for s in range(1, 11))
    same(*(load_file(os.path.join(o, 'checkpoint-10', 'resume', 'shard-00001-model-00001-of-00001.safetensors')) for o in (out, ten[0])))


@pytest.mark.parametrize('parallel, words', [('fsdp', 'FSDP2'), ('replicate', 'replicated')])
def test_two_ranks_and_back(corpus, tmp_path, parallel, words):
    """One rank with two micro-batches and two ranks with one see the same rows: the same gradients. A run of two ranks
    goes on with one. SupCon is off: it sees all rows of a moment, and here the moments differ."""
    plain = ['--supcon_weight=0', '--dtype=float32', '--null_prob=0', '--prefix_dropout=0', '--save_interval=3', '--weight_decay=0.1']
    one, two = str(tmp_path / 'one'), str(tmp_path / 'two')
    run(one, corpus, *plain, '--max_steps=6')
    text = run(two, corpus, *plain, '--gradient_accumulation=1', '--max_steps=6', f'--parallel={parallel}', ranks=2)
    assert f'cpu x 2 ({words})' in text
    a, b = log(one), log(two)
    for s in range(1, 7):
        assert b[s]['code'] == pytest.approx(a[s]['code'], rel=1e-5)
        assert b[s]['stop'] == pytest.approx(a[s]['stop'], rel=1e-5)
        assert b[s]['diversity'] == pytest.approx(a[s]['diversity'], rel=1e-5)
        assert b[s]['grad_norm'] == pytest.approx(a[s]['grad_norm'], rel=1e-4)
    import shutil
    shutil.rmtree(os.path.join(two, 'checkpoint-6'))
    text = run(two, corpus, *plain, '--max_steps=6')
    assert 'gradient_accumulation was 1, is 2' in text
    c = log(two)
    assert all(c[s]['code'] == pytest.approx(a[s]['code'], rel=1e-4) for s in range(1, 7))


def test_kill_loses_only_the_work_since_the_last_save(corpus, tmp_path):
    """kill -9 at a random moment, most likely inside a save (each step saves): what is there always loads and goes on."""
    out, rng = str(tmp_path / 'run'), np.random.default_rng(5)
    for _ in range(3):
        p = subprocess.Popen(command(out, corpus, '--save_interval=1', '--keep_checkpoints=2', '--max_steps=100000', '--epochs=100000'), stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL, env=os.environ | {'OMP_NUM_THREADS': '1'}, start_new_session=True)
        before = M.latest_checkpoint(out)
        while M.latest_checkpoint(out) in (before, None):
            assert p.poll() is None
            time.sleep(0.05)
        time.sleep(rng.random())
        os.killpg(p.pid, signal.SIGKILL)
        p.wait()
        M.load_checkpoint(M.latest_checkpoint(out))
    newest = int(M.latest_checkpoint(out).rsplit('-', 1)[1])
    text = run(out, corpus, '--save_interval=1', f'--max_steps={newest + 1}', '--epochs=100000')
    assert f'step {newest},' in text
    assert sorted(log(out)) == list(range(1, newest + 2))


def test_sigterm_saves(corpus, tmp_path):
    """To the whole process group, as torchrun and schedulers send it: the workers that pack batches must not die of it before the trainer has saved.
    Stopped at a step that evaluates, it evaluates when it goes on."""
    out = str(tmp_path / 'run')
    p = subprocess.Popen(command(out, corpus, '--epochs=100000', '--num_workers=2', '--eval_interval=1', '--eval_batches=1', '--save_interval=100000'),
                         stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
    for line in p.stdout:
        if line.startswith('step 3/'):
            os.killpg(p.pid, signal.SIGTERM)
            break
    rest = p.stdout.read()
    assert p.wait() == 0 and 'stopped by SIGTERM' in rest, rest
    stopped = int(M.latest_checkpoint(out).rsplit('-', 1)[1])
    evaluated = lambda: [r['step'] for r in map(json.loads, open(os.path.join(out, 'metrics.jsonl'))) if 'val_code' in r and 'text_norm' in r]
    assert stopped not in evaluated()
    run(out, corpus, f'--max_steps={stopped + 1}', '--eval_interval=1', '--eval_batches=1')
    assert evaluated()[-2:] == [stopped, stopped + 1]


def test_divergence_is_named_and_the_last_good_checkpoint_stays(ten, corpus, tmp_path):
    """A learning rate that blows the weights up: bad steps are skipped and named with their rows, nothing is saved, the
    run ends with the checkpoint from before."""
    import shutil
    from safetensors.torch import save_file
    out = str(tmp_path / 'run')
    shutil.copytree(ten[0], out)
    shutil.rmtree(os.path.join(out, 'checkpoint-10'))
    text = run(out, corpus, '--max_steps=30', '--max_bad_steps=3', '--learning_rate=1e30', '--warmup_steps=1', '--save_interval=4', '--keep_checkpoints=1', code=2)
    assert 'non-finite gradient, step skipped (1 in a row); rows [' in text and '3 steps in a row' in text
    assert 'newest whole checkpoint is ' + os.path.join(out, 'checkpoint-5') in text and M.checkpoints(out) == [(5, os.path.join(out, 'checkpoint-5'))]
    path = os.path.join(out, 'checkpoint-5', 'model.safetensors')
    w = load_file(path)
    w['codebook_heads.3.bias'][0] = float('nan')
    save_file(w, path)
    assert "NaN or infinite values in ['codebook_heads.bias']" in run(out, corpus, code=2)


@pytest.mark.parametrize('flags, words', [
    (['--P=4'], 'batch_size 8 must equal P*K + M'),
    (['--K=4', '--P=1', '--M=4'], 'K 4 is above the min_clips_per_speaker 3'),
    (['--num_queries=0'], 'supcon_weight 0.3 needs voice cloning'),
    (['--null_prob=1.5'], 'null_prob must be in [0, 1)'),
    (['--data=/nowhere'], '/nowhere/meta.json does not exist'),
    (['--P=6', '--batch_size=14'], '--P=5 --batch_size='),
    (['--min_text_tokens=1000'], 'no training row of min_text_tokens 1000 or more'),
    (['--num_key_value_heads=3'], 'does not divide'),
    (['--max_position_embeddings=50'], 'max_position_embeddings 50'),
    (['--gradient_accumulation=50'], 'lower gradient_accumulation'),
    (['--init_from=no_such_model'], 'no such folder'),
    (['--learnin_rate=1'], 'learning_rate'),
    (['--P=0', '--M=8'], 'P must be above 0'),
    (['--speak=7'], 'speak: texts, got (7,)'),
    (['--num_key_value_heads=0'], 'num_key_value_heads must be above 0'),
    (['--head_dim=15'], 'head_dim must be even'),
    (['--beta2=1.5'], 'beta2 must be in [0, 1)'),
    (['--out_dir=/proc/nowhere'], '/proc/nowhere'),
    (['--keep_checkpoints=100000000'], 'lower keep_checkpoints'),
    (['--parallel=ddp'], "parallel is 'replicate' or 'fsdp'"),
    (["--speak=('???',)", '--eval_interval=5'], "nothing to speak in '???'"),
    ([f"--speak=('{'four ' * 9000}',)", '--eval_interval=5'], 'is too long for'),
])
def test_refusals_are_one_line(corpus, tmp_path, flags, words):
    r = subprocess.run(command(str(tmp_path / 'run'), corpus, *flags), capture_output=True, text=True)
    assert r.returncode == 2 and words in r.stderr and 'Traceback' not in r.stderr, r.stderr


def test_resume_refused_where_it_is_not_wanted(ten, corpus):
    assert 'choose another out_dir' in run(ten[0], corpus, '--resume=false', code=2)
    assert 'has num_queries 8' in run(ten[0], corpus, '--num_queries=4', code=2)
    assert 'has hidden_size 32' in run(ten[0], corpus, '--hidden_size=64', code=2)
    assert 'prefix_heads 5 does not divide hidden_size 32 of' in run(ten[0] + '-5', corpus, f'--init_from={ten[0]}/checkpoint-10', '--prefix_heads=5', code=2)


def test_a_fault_on_another_node_is_said(corpus, tmp_path):
    r = subprocess.run(command(str(tmp_path / 'run'), str(tmp_path)), capture_output=True, text=True, env=os.environ | {'RANK': '8', 'WORLD_SIZE': '16', 'LOCAL_RANK': '0'})
    assert r.returncode == 2 and 'meta.json does not exist' in r.stderr


def test_damaged_resume_state_and_log(ten, corpus, tmp_path):
    import shutil
    out = str(tmp_path / 'run')
    shutil.copytree(ten[0], out)
    shutil.rmtree(os.path.join(out, 'checkpoint-10'))                    # at an epoch's end; step 5 is in the middle of one
    with open(os.path.join(out, 'metrics.jsonl'), 'ab') as f:
        f.write(b'[1]\n\xff\xfe\n{"step": ')
    os.makedirs(os.path.join(out, 'checkpoint-12'))                      # not whole: in the way of a save
    text = run(out, corpus, '--max_steps=12', '--M=0', '--batch_size=6', '--seed=20261130')      # a date is a seed, too
    assert 'no record' in text and 'has other batches and starts over' in text
    assert sorted(log(out)) == list(range(1, 13)) and M.checkpoints(out)[-1][0] == 12
    other = write_corpus(tmp_path / 'other', clips=7)
    assert 'is another corpus than before' in run(out, other, '--max_steps=13', '--M=0', '--batch_size=6')
    shutil.rmtree(os.path.join(out, 'checkpoint-13'))
    state = os.path.join(out, 'checkpoint-12', 'resume', 'shard-00001-model-00001-of-00001.safetensors')
    os.truncate(state, os.path.getsize(state) // 2)
    text = run(out, corpus, '--max_steps=20', code=2)
    assert 'checkpoint-12: cannot go on from its resume state' in text and 'Traceback' not in text


def test_resume_keeps_what_the_run_began_with(ten, corpus, tmp_path):
    """Another start, another codec file under the same name, or a folder of another stage: refused, nothing is touched."""
    import shutil
    out, mine = str(tmp_path / 'run'), str(tmp_path / 'corpus')
    assert "began with init_from 'scratch'" in run(ten[0], corpus, '--init_from=some/base', code=2)
    fewer = str(tmp_path / 'fewer')
    shutil.copytree(ten[0], fewer)
    shutil.rmtree(fewer + '/checkpoint-10')
    text = run(fewer, corpus, '--max_steps=6', '--min_text_tokens=3', '--supcon_weight=0.0', '--reg_start=7')
    assert 'has other batches and starts over' in text and 'supcon_weight stays 0.3' in text and 'reg_start stays' in text and 'supcon_weight was' not in text
    assert M.read_json(fewer + '/checkpoint-6/training_metadata.json')['regularizers'] == M.read_json(fewer + '/checkpoint-5/training_metadata.json')['regularizers']
    assert "(supcon_weight 0.3, the run's) needs P >= 2 and K >= 2, got P 1, K 1" in run(fewer, corpus, '--supcon_weight=0', '--P=1', '--K=1', '--M=7', '--batch_size=8', code=2)
    shutil.copytree(corpus, mine)
    meta = M.read_json(mine + '/meta.json')
    for digest, code in (('a' * 64, 0), ('b' * 64, 2)):
        M.write_json(mine + '/meta.json', meta | {'settings': meta['settings'] | {'codec_hash': digest}})
        text = run(out, mine, f'--max_steps={1 + code}', code=code)
    assert 'was encoded with another codec file' in text
    M.write_json(mine + '/meta.json', meta | {'codec': meta['codec'] | {'hop': 512}})
    assert 'has frames of 512 samples' in run(out, mine, code=2)
    folder = str(tmp_path / 'tuned' / 'checkpoint-5')
    os.makedirs(folder)
    M.write_json(folder + '/training_metadata.json', {'stage': 'finetune'})
    assert 'holds checkpoints of the stage finetune' in run(str(tmp_path / 'tuned'), corpus, code=2)
    assert os.listdir(folder) == ['training_metadata.json']
    assert 'speaks nothing' in run(str(tmp_path / 'mute'), corpus, '--eval_interval=2', '--speak=hi', code=2)


def test_full_disk_leaves_the_last_checkpoint(ten, corpus, tmp_path):
    """No file may grow over 100 kB, which ends the writing of the weights as a full disk would."""
    import resource, shutil
    out = str(tmp_path / 'run')
    shutil.copytree(ten[0], out)
    r = subprocess.run(command(out, corpus, '--max_steps=12'), capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'},
                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
    assert r.returncode == 2 and 'checkpoint-12: not saved' in r.stderr and 'newest whole checkpoint is ' + os.path.join(out, 'checkpoint-10') in r.stderr, r.stderr
    assert 'Traceback' not in r.stderr and M.checkpoints(out)[-1][0] == 10
    assert 'saved' in run(out, corpus, '--max_steps=12')


def test_unreadable_row_is_named_and_left_out(corpus, tmp_path):
    """A code past the codec's last, seen by one of two ranks: the row is named, another takes its place, both ranks go on."""
    import shutil
    mine = str(tmp_path / 'corpus')
    shutil.copytree(corpus, mine)
    row = prepare.Corpus(mine).rows[7]
    with open(mine + '/codes.bin', 'r+b') as f:
        f.seek(int(row['frame_start']) * 16)
        f.write(b'\xff\xff')
    out = str(tmp_path / 'run')
    text = run(out, mine, '--max_steps=6', '--gradient_accumulation=1', '--null_prob=0', ranks=2)
    assert 'row 7 has code 65535' in text and 'left out' in text
    r = log(out)
    assert sorted(r) == list(range(1, 7)) and all(np.isfinite(x['code']) for x in r.values())


def test_rows_that_lose_text_or_frames(corpus):
    """What make_batch takes away, in training alone: whole texts, and of each row a share of its frames; the texts of other rows, for the evaluation; rows of short texts."""
    script = '''
import json, sys
import numpy as np, model
sys.argv = ["pretrain.py"] + sys.argv[1:]
g = {"__file__": "pretrain.py", "__name__": "__main__", "__doc__": ""}
exec(compile(open("pretrain.py").read().split("# ---- model")[0], "pretrain.py", "exec"), g)
g["cfg"] = model.Config(special_tokens=g["meta"]["special_tokens"])
own = np.repeat(g["train_rows"], 20)
other = np.roll(own, 30)
make = lambda rows, **kw: g["make_batch"](rows, g["clips"], np.random.default_rng(0), **kw)
a, b, c = make(own), make(own, train=False, texts_of=other), make(other, train=False)
texts = np.split(a["text_ids"].numpy(), np.flatnonzero(a["text_ids"].numpy() == g["cfg"].special_tokens["start_of_speech"]) + 1)[:-1]
heard = [a["heard"][a["frame_row"] == i] for i in range(len(own))]
print(json.dumps([len(texts) == len(own), np.mean([len(t) == 3 for t in texts]), [h.float().mean().item() for h in heard if len(h) > 30],
                  sorted(set(a) - set(b)), b["text_ids"].equal(c["text_ids"]), b["codes"].equal(a["codes"]),
                  sorted(g["corpus"].split("train")), sorted(g["train_rows"].tolist()), g["rows"]["text_len"].tolist(),
                  {s: c.tolist() for s, c in g["voices"].items()}, g["plan_epoch"](0)[:, :6].reshape(-1, 2).tolist()], default=int))
'''
    r = subprocess.run([sys.executable, '-c', script, *TINY, f'--data={corpus}', '--text_drop_prob=0.3', '--frame_drop=0.8', '--min_text_tokens=4'], capture_output=True, text=True, cwd=ROOT)
    assert not r.returncode, r.stderr
    whole, lost, heard, taken, wrong_texts, own_codes, every, learned, text_len, voices, groups = json.loads(r.stdout.splitlines()[-1])
    assert whole and abs(lost - 0.3) < 0.06 and taken == ['heard'] and wrong_texts and own_codes
    assert learned == [n for n in every if text_len[n] >= 4] and len(learned) < len(every)
    assert sum(map(len, voices.values())) == sum(n < 30 for n in every)                         # references may be of short texts
    assert all(a != b and {a, b} <= {*learned} for a, b in groups)                              # SupCon sees two clips of a speaker, not one twice
    assert abs(np.mean(heard) - 0.6) < 0.05 and min(heard) < 0.35 and max(heard) > 0.95         # each row has its own share, 0 to 0.8


def test_another_tokenizer_or_a_second_run_is_refused(corpus, tmp_path):
    import fcntl, shutil
    mine, tok = str(tmp_path / 'corpus'), str(tmp_path / 'tok')
    shutil.copytree(corpus, mine)
    shutil.copytree(TOKENIZER, tok)
    meta = M.read_json(mine + '/meta.json')
    meta['tokenizer']['id'] = tok
    with open(mine + '/meta.json', 'w') as f:
        json.dump(meta, f)
    with open(tok + '/tokenizer.json', 'a') as f:
        f.write('\n')
    assert 'is not the tokenizer' in run(str(tmp_path / 'a'), mine, code=2)
    os.makedirs(tmp_path / 'b')
    with open(tmp_path / 'b' / 'lock', 'w') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert 'another run is writing' in run(str(tmp_path / 'b'), corpus, code=2)


def test_epoch_plan(corpus, tmp_path):
    """Every row with a speaker comes about once an epoch, P speakers a batch are distinct, epochs differ."""
    script = ('import sys; sys.argv = ["pretrain.py"] + sys.argv[1:]; src = open("pretrain.py").read().split("# ---- model")[0]; '
              'g = {"__file__": "pretrain.py", "__name__": "__main__", "__doc__": ""}; exec(compile(src, "pretrain.py", "exec"), g); import json; '
              'import itertools; a, b = g["plan_epoch"](0), g["plan_epoch"](1); g["per_step"] = 4; dealt = []\n'
              'for g["rank"] in (0, 1):\n'
              '    g["world"], g["gradient_accumulation"] = 2, 2; dealt.append([(*x[0], x[2], x[1]) for x in itertools.islice(g["stream"](0, 0), len(a) // 4 * 2 + 2)])\n'
              'size = (g["rows"]["frame_len"] + g["rows"]["text_len"]).tolist()\n'
              'print(json.dumps([a.tolist(), b.tolist(), g["speaker_of"].tolist(), dealt, size]))')
    r = subprocess.run([sys.executable, '-c', script, *TINY, f'--data={corpus}'], capture_output=True, text=True, cwd=ROOT)
    a, b, speaker, dealt, size = json.loads(r.stdout.splitlines()[-1])
    assert a != b
    # two ranks, two micro-batches each: together the epoch, once, then the next; the largest and the smallest of a step go together
    steps = len(a) // 4
    assert steps and sorted(n for d in dealt for e, _, n, _ in d if e == 0) == list(range(4 * steps)) and [d[-1][:2] for d in dealt] == [[1, 0]] * 2
    assert all(d[2 * s + 1][3] == d[2 * s + 2][:2] for d in dealt for s in range(steps))       # a step ends where the next begins
    tokens = [sum(size[max(i, ~i)] for i in row) for row in a]
    for s in range(steps):
        mine = [sorted((n for e, first, n, _ in d if (e, first) == (0, 4 * s)), key=tokens.__getitem__) for d in dealt]
        order = sorted(range(4 * s, 4 * s + 4), key=tokens.__getitem__)
        assert sorted(mine) == sorted([[order[0], order[3]], [order[1], order[2]]])
    a = np.array(a)
    voiced = a[:, :6]
    assert (voiced >= 0).all() and (a[:, 6:] < 0).all()
    assert all(len(set(np.array(speaker)[row][::2])) == 3 for row in voiced[:-1])
    train = [i for i in range(30) if i % 6 != 5]
    times = np.bincount(voiced.ravel(), minlength=30)
    assert all(1 <= times[i] <= 2 for i in train) and times.sum() <= len(train) + 10
    assert all(speaker[~i] == -1 for i in a[:, 6:].ravel())
