"""
finetune.py as a user runs it, on a small random base and corpus: resume, ranks, kills, refusals, and the way from a base to a
published checkpoint that speaks. The reference's numbers of epoch_rows are in test_golden.py.

    pytest tests/test_finetune.py
"""
import gc, glob, json, os, re, resource, runpy, shutil, signal, subprocess, sys, time

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

import lora
import model as M
import prepare
from finetune import epoch_rows
from test_lora import logits
from test_merge import run as script
from test_model import random_rows, spread
from test_upload import TOKEN, hub, save        # hub is a fixture

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKENIZER = os.path.join(ROOT, 'assets', 'tiny', 'tokenizer')
SHORT = ['--batch_size=4', '--gradient_accumulation=2', '--warmup_steps=3', '--log_interval=1', '--eval_interval=5', '--save_interval=5', '--device=cpu',
         '--dtype=float32', '--learning_rate=1e-2', '--epochs=40']
LENGTHS = [1, 5, 12, 13, 20, 40, 150, 151, 14, 15]
TEXTS = ['one', 'two cats', 'es: hola', 'es: uno dos', 'four red dogs', 'the dog sings today', 'es: el perro rojo', 'one two three four five six seven']


def rows(fraction, seed=0, lengths=LENGTHS, short_below=13, longest=150):
    return epoch_rows(lengths, short_below, fraction, longest, np.random.default_rng(seed))


def test_epoch_rows():
    assert rows(0).tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9]          # off: only the too long one goes
    assert rows(1).tolist() == [0, 1, 2]
    half = rows(0.5)
    assert half.dtype == np.int64 and len(half) == 6 and {0, 1, 2} <= set(half.tolist()) and 7 not in half
    assert rows(0.3).tolist() == rows(0).tolist()                   # as many short rows as that already
    assert rows(0.5, lengths=[20, 30]).tolist() == [0, 1]           # no short rows to weigh against
    assert rows(0.5, longest=4).tolist() == [0]
    assert len(rows(0.5, lengths=[])) == 0
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match='short_fraction'):
            rows(bad)


def test_epochs_are_redrawn_from_the_seed():
    lengths = [5] * 10 + [50] * 100
    draws = [rows(0.5, seed, lengths).tolist() for seed in range(5)]
    assert draws[0] == rows(0.5, 0, lengths).tolist() and len(set(map(tuple, draws))) == 5 and all(len(d) == 20 for d in draws)
    generator = np.random.default_rng(0)
    assert epoch_rows(lengths, 13, 0.5, 150, generator).tolist() != epoch_rows(lengths, 13, 0.5, 150, generator).tolist()


def write_corpus(path, n=48, seed=0, **meta):
    """Rows that say TEXTS in turn in random codes: 4 speakers, every fifth row without one, the last eight held out."""
    rng, tokenizer = np.random.default_rng(seed), prepare.load_tokenizer(TOKENIZER)[0]
    text = [prepare.encode_text(tokenizer, TEXTS[i % len(TEXTS)]) for i in range(n)]
    codes = [rng.integers(0, 2016, (int(rng.integers(1, 40)), 8)) for _ in range(n - 1)] + [rng.integers(0, 2016, (200, 8))]    # the last is over 6 s
    start = lambda parts: np.cumsum([0] + [len(p) for p in parts])[:-1]
    index = np.zeros(n, prepare.ROW)
    index['text_start'], index['text_len'], index['frame_start'], index['frame_len'] = start(text), list(map(len, text)), start(codes), list(map(len, codes))
    index['speaker'], index['split'] = [-1 if i % 5 == 4 else i % 4 for i in range(n)], [int(i >= n - 8) for i in range(n)]
    os.makedirs(path)
    np.concatenate(codes).astype('<u2').tofile(os.path.join(path, 'codes.bin'))
    np.concatenate(text).astype('<u4').tofile(os.path.join(path, 'text.bin'))
    index.tofile(os.path.join(path, 'index.bin'))
    M.write_json(os.path.join(path, 'meta.json'), {
        'magic': prepare.MAGIC, 'version': prepare.VERSION, 'rows': n, 'frames': sum(map(len, codes)), 'tokens': sum(map(len, text)),
        'codec': {'id': 'assets/tiny/codec.nemo', 'sample_rate': 22050, 'hop': 1024, 'levels': [8, 7, 6, 6], 'groups': 8},
        'tokenizer': {'id': TOKENIZER, 'hash': prepare.sha256_of(os.path.join(TOKENIZER, 'tokenizer.json')), 'length': 446},
        'sources': [{'name': 'made'}], 'languages': ['es'], 'speakers': [f'made/{s}' for s in range(4)],
        'special_tokens': {'start_of_speech': 256, 'end_of_speech': 257, 'start_of_text': 258, 'end_of_text': 259, 'tts_pad': 260}} | meta)
    return str(path)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A base (a run's folder), a corpus and another one."""
    folder = tmp_path_factory.mktemp('place')
    save(str(folder / 'base' / 'checkpoint-10'))
    write_corpus(folder / 'corpus')
    write_corpus(folder / 'other', n=16, seed=1)
    return folder


def command(place, out, *flags, ranks=0):
    launch = [sys.executable] if not ranks else [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}']
    return [*launch, os.path.join(ROOT, 'finetune.py'), *SHORT, f'--ckpt={place}/base', f'--data={place}/corpus', f'--out_dir={out}', *flags]


def ranks(place, out, *flags, n=2):
    r = subprocess.run(command(place, out, *flags, ranks=n), capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]
    return r.stdout


def run(place, out, capsys, *flags, code=0):
    """In this process -> what it printed."""
    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        return script(capsys, 'finetune.py', *command(place, out, *flags)[2:], code=code)
    finally:
        for n, handler in kept.items():
            signal.signal(n, handler)
        gc.collect()        # the run's globals, and with them its lock


def log(out, key='code'):
    return {r['step']: r for r in map(json.loads, open(os.path.join(out, 'metrics.jsonl'))) if key in r}


def adapters(out, step):
    return load_file(os.path.join(out, f'checkpoint-{step}', 'adapter.safetensors'))


def same(a, b, rel=0.0):
    assert a.keys() == b.keys()
    for k in a:
        assert torch.equal(a[k], b[k]) if not rel else (a[k] - b[k]).abs().max() <= rel * max(b[k].abs().max(), 1e-3), k


@pytest.fixture(scope='module')
def ten(place, tmp_path_factory):
    """Ten steps in one go."""
    out = str(tmp_path_factory.mktemp('ten') / 'run')
    r = subprocess.run(command(place, out, '--max_steps=10', f"--val_corpora={{'other': '{place}/other'}}", '--train_stop_head'), capture_output=True, text=True,
                       env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert r.returncode == 0, r.stderr
    return out, r.stdout


def test_ten_steps_say_what_they_do(ten, place):
    out, text = ten
    base = f'{place}/base/checkpoint-10'
    for words in (f'inherited from {base}: codec assets/tiny/codec.nemo', 'text_repetition enabled False -> True', '40 training rows, of which an epoch takes 40', 'val 8 held out, other 8 held out',
                  '4 rows x 2 micro-batches x 1 ranks = 8 rows', '5 steps an epoch, 10 in all', 'backbone 0.008M at lr 1.0e-02, audio 0.000M at lr 5.0e-03 trained of 0.12M', 'merge.py --ckpt='):
        assert words in text, text
    r = log(out)
    assert sorted(r) == list(range(1, 11)) and r[1]['lr'] == pytest.approx(1e-2 / 3) and r[3]['lr'] == pytest.approx(1e-2) and r[10]['lr'] < 1e-3
    assert sorted(log(out, 'val_code')) == sorted(log(out, 'other_code')) == [0, 5, 10]
    config, meta = (M.read_json(f'{out}/checkpoint-10/{n}.json') for n in ('adapter_config', 'training_metadata'))
    assert (config['parent'], config['parent_hash'], config['rank'], config['layers']) == (base, lora.tensors_hash(base), 16, [0, 1])
    assert config['text_repetition'] == M.Config().text_repetition | {'enabled': True}
    assert (meta['stage'], meta['step'], meta['parent'], meta['corpus']['languages']) == ('finetune', 10, base, ['es']) and meta['parent_kind'] == 'folder'
    state = adapters(out, 10)
    assert len(state) == 2 * 4 * 2 + 2 and all('.lora_' in k or k.startswith('stop_head') for k in state)
    plain = load_file(f'{base}/model.safetensors')
    assert not torch.equal(state['stop_head.weight'], plain['stop_head.weight']) and state['model.layers.1.self_attn.o_proj.lora_B'].abs().max() > 0


def test_the_table_is_of_the_base_and_of_the_adapters(ten, place):
    """Before: the base with its own layout; after: base and adapters with repetition. Each number again, from rows made by hand."""
    out, text = ten
    measured = M.read_json(f'{out}/evaluation.json')
    assert measured == M.read_json(f'{out}/checkpoint-10/training_metadata.json')['evaluation'] and measured['after_step'] == 10
    groups = {'all': 8, '1-2 words': 4, '3-6 words': 3, '7 words on': 1, 'language es': 3, 'language made': 5}
    assert {g: v['rows'] for g, v in measured['after']['val'].items()} == groups
    model = M.load_checkpoint(f'{place}/base/checkpoint-10')[0]
    corpus = prepare.Corpus(f'{place}/corpus')

    def loss(repetition, chosen):
        rows = []
        for i in chosen:                                            # all but the last are below 6 s: the whole clip is the reference
            text, codes, null = corpus.text(i).tolist(), corpus.codes(i), corpus.rows['speaker'][i] < 0
            rows.append({'text': M.layout(text, model.cfg.special_tokens, M.repeats(len(text), repetition)), 'codes': codes, 'null': null, 'ref': None if null else codes, 'speaker': 0})
        batch = M.pack(rows, model.cfg)
        with torch.no_grad():
            n = len(batch['codes'])
            r = M.losses(model(batch), batch, model.cfg, {'frames': n, 'stops': n + len(rows), 'rows': len(rows)})
        return float(r['code']), float(r['stop'])
    short = [40, 41, 42, 43]                                        # one, two cats, es: hola, es: uno dos
    got = lambda when: tuple(measured[when]['val']['1-2 words'][k] for k in ('code', 'stop'))
    assert loss(model.cfg.text_repetition, short) == pytest.approx(got('before'), rel=1e-5)
    lora.load_adapter(model, f'{out}/checkpoint-10')
    model.eval()                                                    # the adapters came in training mode
    assert loss(M.Config().text_repetition | {'enabled': True}, short) == pytest.approx(got('after'), rel=1e-5)
    line = re.search(r'^val, 1-2 words +4 +(\S+) +(\S+) +(\S+)', text, re.M)
    assert float(line[1]) == pytest.approx(got('before')[0], abs=1e-3) and float(line[3]) == pytest.approx(got('after')[0] - got('before')[0], abs=2e-3)
    assert re.search(r'^other, all +8 ', text, re.M)


def test_resume_is_bitwise(ten, place, tmp_path, capsys):
    out = str(tmp_path / 'run')
    shutil.copytree(ten[0], out)
    shutil.rmtree(f'{out}/checkpoint-10')
    save(f'{place}/base/checkpoint-11', seed=1)                     # the base's run has gone on: not this run's base
    try:
        text = run(place, out, capsys, '--max_steps=10', f"--val_corpora={{'other': '{place}/other'}}", '--train_stop_head')
    finally:
        shutil.rmtree(f'{place}/base/checkpoint-11')
    assert f'resumed {out}/checkpoint-5: step 5, epoch 0, row 40 of it' in text
    same(adapters(out, 10), adapters(ten[0], 10))
    a, b = log(out), log(ten[0])
    assert all(a[s]['code'] == b[s]['code'] and a[s]['grad_norm'] == b[s]['grad_norm'] for s in range(1, 11))
    ours, theirs = (torch.load(f'{o}/checkpoint-10/resume.pt', weights_only=True) for o in (out, ten[0]))
    assert all(torch.equal(v, theirs['optimizer'][n][k]) for n, s in ours['optimizer'].items() for k, v in s.items())
    assert M.read_json(f'{out}/evaluation.json') == M.read_json(f'{ten[0]}/evaluation.json')
    val = f"--val_corpora={{'other': '{place}/other'}}"
    for flag, words in (('--lora_rank=8', 'lora_rank 16, now it is 8'), ('--eval_rows=0', 'eval_rows 256, now it is 0'), ('--seed=2', 'seed 1337, now it is 2'), ('--val_corpora={}', 'now it is {}'),
                        (f'--data={place}/other', f"data '{place}/corpus', now it is '{place}/other'"), (f'--ckpt={place}/base/', f"ckpt '{place}/base', now it is '{place}/base/'")):
        assert f'{words}: choose another out_dir' in run(place, out, capsys, '--train_stop_head', val, flag, code=2)
    assert 'choose another out_dir, or --resume=true' in run(place, out, capsys, '--resume=false', '--train_stop_head', code=2)
    assert 'of a run without full' in run(place, out, capsys, '--full', code=2)


def test_two_ranks_and_other_shapes_are_one_gradient(place, tmp_path, capsys):
    """8 rows a step as 1 x 8, 4 x 2 in one process and 2 x 2 on two ranks; the two-rank run goes on with one."""
    plain = ['--lora_dropout=0', '--max_steps=6', '--save_interval=3', '--eval_interval=3', '--train_stop_head']
    outs = [str(tmp_path / n) for n in 'abc']
    run(place, outs[0], capsys, *plain, '--batch_size=8', '--gradient_accumulation=1')
    run(place, outs[1], capsys, *plain, '--batch_size=2', '--gradient_accumulation=4')
    text = ranks(place, outs[2], *plain, '--batch_size=2')
    assert 'cpu x 2 (FSDP2)' in text
    for out in outs[1:]:
        a, b = log(outs[0]), log(out)
        for s in range(1, 7):
            assert all(b[s][k] == pytest.approx(a[s][k], rel=1e-4) for k in ('code', 'stop', 'grad_norm'))
        before, after = (M.read_json(f'{o}/evaluation.json') for o in (outs[0], out))
        assert all(after[w]['val'][g][k] == pytest.approx(v, rel=1e-4) for w in ('before', 'after') for g, x in before[w]['val'].items() for k, v in x.items())
        moments = [torch.load(f'{o}/checkpoint-3/resume.pt', weights_only=True)['optimizer'].keys() for o in (outs[0], out)]
        assert moments[0] == moments[1] == adapters(out, 3).keys()  # also of the stop head, which FSDP gathers for the evaluation before the save
        same(adapters(out, 6), adapters(outs[0], 6), rel=2e-3)      # Adam's first steps are the sign of the gradient: rounding can flip a small one
    shutil.rmtree(f'{outs[2]}/checkpoint-6')
    assert 'batch_size was 2, is 4' in run(place, outs[2], capsys, *plain)
    assert all(log(outs[2])[s]['code'] == pytest.approx(log(outs[0])[s]['code'], rel=1e-4) for s in range(1, 7))


def test_kill_loses_only_the_work_since_the_last_save(place, tmp_path, capsys):
    """kill -9 at a random moment, most likely inside a save (each step saves): what is there always loads and goes on."""
    out, rng = str(tmp_path / 'run'), np.random.default_rng(5)
    for _ in range(3):
        p = subprocess.Popen(command(place, out, '--save_interval=1', '--keep_checkpoints=2', '--eval_interval=0', '--epochs=100000'), stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL, env=os.environ | {'OMP_NUM_THREADS': '1'}, start_new_session=True)
        newest = lambda: M.latest_checkpoint(out, file='adapter.safetensors')
        before = newest()
        while newest() in (before, None):
            assert p.poll() is None
            time.sleep(0.05)
        time.sleep(rng.random())
        os.killpg(p.pid, signal.SIGKILL)
        p.wait()
        lora.load_adapter(M.load_checkpoint(f'{place}/base/checkpoint-10')[0], newest(), f'{place}/base/checkpoint-10')
    last = int(newest().rsplit('-', 1)[1])
    text = run(place, out, capsys, '--save_interval=1', '--keep_checkpoints=2', '--eval_interval=0', f'--max_steps={last + 1}', '--epochs=100000')
    assert f'step {last},' in text and sorted(log(out)) == list(range(1, last + 2))
    assert [s for s, _ in M.checkpoints(out, file='adapter.safetensors')] == [last, last + 1]


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signals_save(place, tmp_path, capsys, number):
    """... and a restart that has nothing left to do evaluates what it prints the table of."""
    out = str(tmp_path / 'run')
    p = subprocess.Popen(command(place, out, '--epochs=100000'), stdout=subprocess.PIPE, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
    for line in p.stdout:
        if line.startswith('step 6/'):
            p.send_signal(number)
            break
    rest = p.stdout.read()
    assert p.wait() == 0 and f'stopped by {number.name}' in rest
    step, evaluated = int(M.latest_checkpoint(out, file='adapter.safetensors').rsplit('-', 1)[1]), M.read_json(f'{out}/evaluation.json')['after_step']
    text = run(place, out, capsys, '--epochs=100000', f'--max_steps={step}')
    assert 'nothing left to do' in text and 'val, all' in text and (f'step {step}: val code' in text) == (evaluated != step)
    assert M.read_json(f'{out}/evaluation.json')['after_step'] == step


def test_ctrl_c_twice_ends_at_once(place, tmp_path):
    out = str(tmp_path / 'run')
    p = subprocess.Popen(command(place, out, '--eval_interval=0', '--gradient_accumulation=40', '--batch_size=1'), stdout=subprocess.PIPE, text=True,
                         env=os.environ | {'OMP_NUM_THREADS': '1'})
    next(line for line in p.stdout if line.startswith('step 1/'))
    for _ in range(3):                              # within one step of 40 micro-batches; two that come at once are one
        p.send_signal(signal.SIGINT)
        time.sleep(0.02)
    p.stdout.read()
    assert p.wait() == 130 and not M.checkpoints(out, file='adapter.safetensors')


def test_a_signal_in_the_last_step_is_no_stop(place, tmp_path, capsys, monkeypatch):
    out, pack, calls = str(tmp_path / 'run'), M.pack, []

    def interrupt(rows, cfg, **kw):
        if not calls:
            os.kill(os.getpid(), signal.SIGTERM)    # while step 2 takes its rows
        calls.append(1)
        return pack(rows, cfg, **kw)
    run(place, out, capsys, '--max_steps=1', '--gradient_accumulation=1', '--batch_size=8')
    monkeypatch.setattr(M, 'pack', interrupt)
    text = run(place, out, capsys, '--max_steps=2', '--gradient_accumulation=1', '--batch_size=8')
    assert 'step 2: val code' in text and 'val, all' in text and 'stopped' not in text
    assert M.read_json(f'{out}/checkpoint-2/training_metadata.json')['evaluation']['after_step'] == 2


@pytest.mark.parametrize('name, size', [('resume.pt', 0), ('resume.pt', 100), ('resume.pt', 20000), ('adapter.safetensors', 200), ('adapter.safetensors', 0)])
def test_a_cut_file_is_one_short_line(ten, place, tmp_path, capsys, name, size):
    out = str(tmp_path / 'run')
    shutil.copytree(ten[0], out)
    os.truncate(f'{out}/checkpoint-10/{name}', size)
    text = run(place, out, capsys, '--train_stop_head', f"--val_corpora={{'other': '{place}/other'}}", code=2)
    assert text.startswith(f'finetune.py: {out}/checkpoint-10/{name}: cannot be read') and text.count('\n') == 1 and len(text) < 300 + 2 * len(out), text
    assert text.endswith('; without that folder the run goes on from the one before\n') and 'Traceback' not in text and 'site-packages' not in text


def spoil(path, numbers):
    corpus = prepare.Corpus(path)
    codes = np.memmap(corpus.files['codes'], dtype='<u2', mode='r+', shape=(corpus.meta['frames'], 8))
    for i in numbers:
        codes[corpus.rows['frame_start'][i]] = 60000
    codes.flush()


def test_rows_that_cannot_be_read(place, tmp_path):
    """One is named and counted and another takes its place, in training and held out; a batch of nothing else is a one-line error."""
    shutil.copytree(place / 'corpus', tmp_path / 'corpus')
    held_out = int(np.random.default_rng(1337).permutation(np.arange(40, 48))[0])
    spoil(tmp_path / 'corpus', [3, held_out])
    flags = [f'--data={tmp_path}/corpus', '--max_steps=5', '--eval_rows=7']
    r = subprocess.run(command(place, tmp_path / 'run', *flags), capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert r.returncode == 0, r.stderr
    assert r.stderr.count('row 3 has code 60000') == 1 and f'row {held_out} has code 60000' in r.stdout and 'val 7 held out' in r.stdout
    assert log(f'{tmp_path}/run', 'bad_rows')[5]['bad_rows'] == 1
    spoil(tmp_path / 'corpus', range(40))
    r = subprocess.run(command(place, tmp_path / 'none', *flags), capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert r.returncode == 2 and 'Traceback' not in r.stderr and re.fullmatch(r'finetune.py: no row of \[.*\] in .* can be read', r.stderr.splitlines()[-1]), r.stderr


@pytest.mark.parametrize('flags', [[], ['--full']])
def test_the_base_s_own_folder_is_refused(place, capsys, flags):
    assert 'holds checkpoints of stage pretrain, choose another out_dir' in run(place, f'{place}/base', capsys, *flags, code=2)


def test_evaluations_that_begin_late_have_no_before(place, tmp_path, capsys):
    out = str(tmp_path / 'run')
    run(place, out, capsys, '--max_steps=1', '--eval_interval=0')
    text = run(place, out, capsys, '--max_steps=2')
    assert re.search(r'^val, all +8 +nan +\d+\.\d+ +\+nan', text, re.M) and M.read_json(f'{out}/evaluation.json')['before'] == {}


def test_hidden_frames_are_of_training_only(place, tmp_path, capsys):
    """frame_drop changes the first training loss, and not the held-out loss before it."""
    found = []
    for drop in (0, 1):
        out = str(tmp_path / f'{drop}')
        run(place, out, capsys, '--max_steps=1', f'--frame_drop={drop}')
        found.append((log(out)[1]['code'], M.read_json(f'{out}/evaluation.json')['before']))
    (whole, before), (hidden, same) = found
    assert whole != hidden and abs(whole - hidden) < 5 and before == same and before


def test_divergence_is_named(ten, place, tmp_path, capsys):
    out = str(tmp_path / 'run')
    shutil.copytree(ten[0], out)
    shutil.rmtree(f'{out}/checkpoint-10')
    flags = ['--max_steps=30', '--train_stop_head', '--max_bad_steps=3', '--learning_rate=1e30', '--eval_interval=0', '--save_interval=4', '--keep_checkpoints=1', f"--val_corpora={{'other': '{place}/other'}}"]
    text = run(place, out, capsys, *flags, code=2)
    assert '3 steps in a row with a non-finite gradient; the newest whole checkpoint is ' + f'{out}/checkpoint-5' in text
    assert [s for s, _ in M.checkpoints(out, file='adapter.safetensors')] == [5]


def test_a_bad_last_step_is_no_dead_end(place, tmp_path, capsys, monkeypatch):
    """The step is skipped, so the weights are those from before; the run ends as any other. So does one that is stopped in a bad step."""
    out, losses, steps = str(tmp_path / 'run'), M.losses, []

    def bad(*args):
        steps.append(1)
        r = losses(*args)
        return r | {'total': r['total'] * (float('nan') if len(steps) > 1 else 1)}
    monkeypatch.setattr(M, 'losses', bad)
    text = run(place, out, capsys, '--max_steps=2', '--gradient_accumulation=1', '--batch_size=8', '--save_interval=1', '--eval_interval=0', '--keep_checkpoints=1')
    assert 'step 1: non-finite gradient, step skipped (1 in a row)' in text
    assert [s for s, _ in M.checkpoints(out, file='adapter.safetensors')] == [1, 2]         # nothing older goes in a bad streak
    same(adapters(out, 1), adapters(out, 2))


def test_a_full_disk_and_a_folder_in_the_way(ten, place, tmp_path):
    """One line that names the newest whole checkpoint; nobody's files are removed."""
    out = str(tmp_path / 'run')
    shutil.copytree(ten[0], out)
    flags = ['--max_steps=11', '--train_stop_head', '--eval_interval=0', f"--val_corpora={{'other': '{place}/other'}}"]
    for disk in (20_000, None):
        if not disk:
            os.makedirs(f'{out}/checkpoint-11')
            open(f'{out}/checkpoint-11/notes.txt', 'w').close()
        r = subprocess.run(command(place, out, *flags), capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'},
                           preexec_fn=disk and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))))
        assert r.returncode == 2 and 'Traceback' not in r.stderr and f'{out}/checkpoint-11: not saved (' in r.stderr and f'newest whole checkpoint is {out}/checkpoint-10' in r.stderr, r.stderr
    assert os.listdir(f'{out}/checkpoint-11') == ['notes.txt']


def test_full_with_frozen_groups(place, tmp_path, capsys):
    """The frozen groups stay bit for bit, the others move; a whole checkpoint that speaks, with repetition on; exact resume."""
    out, flags = str(tmp_path / 'run'), ['--full', '--freeze=ref,embed', '--max_steps=4', '--save_interval=2', '--eval_interval=2']
    text = run(place, out, capsys, *flags)
    assert 'moves every language and voice' in text and 'embed' not in re.search(r'.* trained of .*', text)[0] and 'sample.py --ckpt=' in text
    plain, now = (load_file(f'{p}/model.safetensors') for p in (f'{place}/base/checkpoint-10', f'{out}/checkpoint-4'))
    assert plain.keys() == now.keys()
    moved = {M.group_of(k) for k in plain if k != 'audio_embed_scale' and not torch.equal(plain[k], now[k])}
    assert moved == {'backbone', 'audio'}
    model = M.load_checkpoint(f'{out}/checkpoint-4')[0]
    meta = M.read_json(f'{out}/checkpoint-4/training_metadata.json')
    assert model.cfg.text_repetition['enabled'] and [h['stage'] for h in meta['history']] == ['pretrain'] and meta['evaluation']['after_step'] == 4
    shutil.rmtree(f'{out}/checkpoint-4')
    run(place, out, capsys, *flags)
    same(load_file(f'{out}/checkpoint-4/model.safetensors'), now)
    assert M.read_json(f'{out}/checkpoint-4/training_metadata.json')['evaluation'] == meta['evaluation']
    assert 'nothing to fold' in script(capsys, 'merge.py', f'--ckpt={out}/checkpoint-4', code=2)


def test_base_to_speech(ten, place, hub, tmp_path, capsys):
    """A user's way: base, adapters, merged, published, downloaded afresh, spoken. Logits before and after merging are the same."""
    base, merged, got = f'{place}/base/checkpoint-10', str(tmp_path / 'merged'), str(tmp_path / 'got')
    text = script(capsys, 'merge.py', f'--ckpt={ten[0]}', f'--out={merged}')
    assert 'text repetition: on, from the adapter' in text and 'taken over whole: stop_head.bias, stop_head.weight' in text
    live = M.load_checkpoint(base)[0]
    lora.load_adapter(live, f'{ten[0]}/checkpoint-10', base)
    batch = M.pack(random_rows(live.cfg, [5, 1, 9]), live.cfg)
    after = M.load_checkpoint(merged)[0]
    assert spread(logits(after, batch), logits(live.eval(), batch)) < 2e-5
    meta = M.read_json(f'{merged}/training_metadata.json')
    assert meta['parent_kind'] == 'folder'
    assert (meta['stage'], [h['stage'] for h in meta['history']], meta['adapter']['rank'], meta['evaluation']['after_step']) == ('finetune', ['pretrain'], 16, 10)

    def process(*args):
        p = subprocess.run([sys.executable, *args], cwd=ROOT, env=hub.env | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}, capture_output=True, text=True)
        assert p.returncode == 0 and TOKEN not in p.stdout + p.stderr, p.stdout + p.stderr
        return p.stdout
    assert 'published' in process('upload.py', f'--ckpt={merged}', '--repo=you/voice')
    card = hub.repos['you/voice']['files']['README.md'].decode()
    before, after = (meta['evaluation'][w]['val']['1-2 words']['code'] for w in ('before', 'after'))
    assert f'| finetune | val 1-2 words code | {before:.4g} -> {after:.4g} |' in card and ' rows |' not in card and 'LoRA rank 16' in card and str(place) not in card
    process('-c', f'from huggingface_hub import snapshot_download as s; s("you/voice", local_dir={got!r})')
    process('sample.py', f'--ckpt={got}', '--text=four two', '--max_seconds=1', f'--out={tmp_path}/hello.wav', '--device=cpu')
    wav, rate = soundfile.read(f'{tmp_path}/hello.wav')
    assert rate == 22050 and len(wav) >= 1024 and np.abs(wav).max() > 0
    assert M.config_from_json(M.read_json(f'{got}/gepard_config.json')).text_repetition['enabled']


@pytest.mark.parametrize('flags, words', [
    (['--batch_size=0'], 'batch_size must be above 0'),
    (['--lora_rank=0'], 'lora_rank must be above 0'),
    (['--lora_alpha=0'], 'lora_alpha must be above 0'),
    (['--lora_dropout=1'], 'lora_dropout must be in [0, 1)'),
    (['--short_fraction=1.5'], 'short_fraction must be in 0..1'),
    (['--ref_max_seconds=1'], 'ref_max_seconds 1.0 is below'),
    (['--lora_targets=q_proj,qkv'], "targets ['qkv'] match no linear layer; available: q_proj, k_proj"),
    (['--lora_targets='], 'match no linear layer'),
    (['--freeze=audio'], 'freeze needs full'),
    (['--full', '--freeze=mlp'], "freeze: ['mlp'] is none of backbone, embed, audio, ref"),
    (['--full', '--freeze=backbone,embed,audio,ref'], 'freeze leaves nothing to train'),
    (['--full', '--train_stop_head'], 'train_stop_head belongs to adapters'),
    (['--text_repetition={"below": 3}'], "text_repetition: 'below' 3: it takes enabled (True or False), apply_below"),
    (['--text_repetition={"enabled": 1}'], "text_repetition: 'enabled' 1: it takes"),
    (['--text_repetition={"mixed_keep_prob": 2}'], "text_repetition: 'mixed_keep_prob' 2: it takes"),
    (['--ckpt=/nowhere'], '/nowhere: no such folder'),
    (['--ckpt={place}/adapters'], 'adapters without their base; merge.py'),
    (['--data=/nowhere'], '/nowhere: no corpus here'),
    (['--data={place}/codec'], "{place}/codec was built with codec 'other.nemo', the base {place}/base/checkpoint-10 has 'assets/tiny/codec.nemo'"),
    (['--codec=mine.nemo'], "the base {place}/base/checkpoint-10 has 'mine.nemo'"),
    (['--data={place}/tokenizer'], "{place}/tokenizer was built with tokenizer hash 'x'"),
    (['--data={place}/special'], 'was built with special_tokens'),
    (['--val_corpora={{"old": "{place}/levels"}}'], "{place}/levels was built with codec levels"),
    (['--val_corpora={{"val": "{place}/other"}}'], "'val' is the name of data's own"),
    (['--data={place}/first', '--val_corpora={{"old": "{place}/second"}}'], 'two codecs that were both called assets/tiny/codec.nemo'),
    (['--ckpt={place}/hashed', '--data={place}/first'], "{place}/first was built with codec hash 'a', the base {place}/hashed has 'b'"),
    (['--ckpt={place}/hop'], '{place}/corpus was built with codec hop 1024, the base {place}/hop has 512'),
    (['--ckpt={place}/partial'], '{place}/partial: its text_repetition has no apply_below'),
    (['--val_corpora={"old": 5}'], "val_corpora: folders by name, got {{'old': 5}}"),
    (['--gradient_accumulation=50'], 'an epoch of {place}/corpus has 40 rows'),
    (['--ckpt={place}/small'], 'has rows of up to 236 tokens, the model ends at max_position_embeddings 100'),
    (['--learnin_rate=1'], 'learning_rate'),
    (['--out_dir=/proc/nowhere'], '/proc/nowhere'),
])
def test_refusals_are_one_line(place, ten, tmp_path, capsys, flags, words):
    if not os.path.exists(place / 'codec'):
        codec = {'id': 'assets/tiny/codec.nemo', 'sample_rate': 22050, 'hop': 1024, 'levels': [8, 7, 6, 6], 'groups': 8}
        write_corpus(place / 'tokenizer', n=9, tokenizer={'id': TOKENIZER, 'hash': 'x', 'length': 446})
        write_corpus(place / 'special', n=9, special_tokens={'start_of_speech': 256, 'end_of_speech': 257, 'start_of_text': 258, 'end_of_text': 259, 'tts_pad': 261})
        write_corpus(place / 'levels', n=9, codec=codec | {'levels': [8, 7, 6, 7]})
        write_corpus(place / 'codec', n=9, codec=codec | {'id': 'other.nemo'})
        write_corpus(place / 'first', n=9, settings={'codec_hash': 'a'})
        write_corpus(place / 'second', n=9, settings={'codec_hash': 'b'})
        save(str(place / 'small'), max_position_embeddings=100)
        save(str(place / 'hashed'), metadata={'stage': 'dpo', 'history': [{'stage': 'pretrain', 'corpus': {'codec_hash': 'b'}}]})
        save(str(place / 'hop'), metadata={'stage': 'pretrain', 'corpus': {'hop': 512}})
        save(str(place / 'partial'), text_repetition={'enabled': False})
        shutil.copytree(ten[0], place / 'adapters')
    out = str(tmp_path / 'run')
    term = signal.getsignal(signal.SIGTERM)
    text = run(place, out, capsys, *(f.format(place=place) if '{place}' in f else f for f in flags), code=2)
    assert signal.getsignal(signal.SIGTERM) is term
    line = text.strip().splitlines()[-1]
    assert line.startswith('finetune.py: ') and words.format(place=place) in line, text
    assert not glob.glob(f'{out}/checkpoint*')


def test_the_codec_s_hash_is_kept(place, tmp_path, capsys):
    save(str(tmp_path / 'base'), metadata={'stage': 'pretrain', 'corpus': {'codec_hash': 'c'}})
    write_corpus(tmp_path / 'corpus', n=16, settings={'codec_hash': 'c'})
    run(tmp_path, str(tmp_path / 'run'), capsys, '--max_steps=1', '--eval_interval=0', '--gradient_accumulation=1')
    assert M.read_json(f'{tmp_path}/run/checkpoint-1/training_metadata.json')['corpus']['codec_hash'] == 'c'


def test_more_layers_than_there_are_is_said(place, tmp_path, capsys):
    text = run(place, str(tmp_path / 'run'), capsys, '--max_steps=1', '--lora_last_n_layers=9', '--eval_interval=0')
    assert 'last_n_layers 9 is more than there are, taking all 2' in text
    assert M.read_json(f'{tmp_path}/run/checkpoint-1/adapter_config.json')['layers'] == [0, 1]


def test_another_run_in_the_same_folder_is_refused(place, tmp_path, capsys):
    import fcntl
    os.makedirs(tmp_path / 'run')
    with open(tmp_path / 'run' / 'lock', 'w') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert 'another run is writing to' in run(place, str(tmp_path / 'run'), capsys, code=2)


def test_a_base_that_has_changed_is_refused(ten, place, tmp_path, capsys):
    """Resumed on other weights, the adapters would be of nothing."""
    shutil.copytree(place / 'base', tmp_path / 'base')
    out = str(tmp_path / 'run')
    run(tmp_path, out, capsys, f'--data={place}/corpus', '--max_steps=2', '--save_interval=1', '--eval_interval=0')
    os.rename(tmp_path / 'base', tmp_path / 'elsewhere')            # the same weights: known by their hash
    assert '--ckpt= names where it is now' in run(tmp_path, out, capsys, f'--data={place}/corpus', '--max_steps=3', '--eval_interval=0', code=2)
    run(tmp_path, out, capsys, f'--data={place}/corpus', f'--ckpt={tmp_path}/elsewhere', '--max_steps=3', '--save_interval=1', '--eval_interval=0')
    assert M.read_json(f'{out}/checkpoint-3/adapter_config.json')['parent'] == f'{tmp_path}/elsewhere/checkpoint-10'
    shutil.rmtree(f'{out}/checkpoint-3')
    save(str(tmp_path / 'base' / 'checkpoint-10'), seed=3)
    assert 'whose weights are not those of' in run(tmp_path, out, capsys, f'--data={place}/corpus', '--max_steps=3', '--eval_interval=0', code=2)


@pytest.mark.parametrize('files', [['finetune.py'], ['finetune.py', 'finetune_wide.py'], ['finetune_language.py'], ['tiny_finetune.py']])
def test_presets_have_known_keys(tmp_path, capsys, files):
    paths = [os.path.join(ROOT, 'config', f) for f in files]
    text = script(capsys, 'finetune.py', *paths, '--ckpt=/nowhere', '--device=cpu', f'--out_dir={tmp_path}/run', code=2)
    assert '/nowhere: no such folder' in text


def test_the_tokenizer_check_of_the_docs(tmp_path):
    """The command of docs/new_language.md, as it stands: words of the tiny vocabulary are a token each, others fall back to bytes."""
    text = open(os.path.join(ROOT, 'docs', 'new_language.md'), encoding='utf-8').read()
    snippet = re.search(r'```sh\n(python -c .*?)\n```', text, re.S)[1]
    for words, want in (('four two seven\n\nthe dog', '1.00 tokens a word, 0% of them single bytes'), ('Ωρα', '7.00 tokens a word, 100% of them single bytes')):
        (tmp_path / 'texts.txt').write_text(words, encoding='utf-8')
        ready = snippet.replace('python -c', f'{sys.executable} -c').replace('TOKENIZER', TOKENIZER).replace('TEXTS.txt', str(tmp_path / 'texts.txt'))
        r = subprocess.run(['bash', '-c', ready], cwd=ROOT, capture_output=True, text=True)
        assert r.stdout.strip() == want, r.stdout + r.stderr


def test_second_language_holds_its_texts_out(monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(ROOT, 'assets', 'tiny'))
    import second_language as spanish
    train, held_out = spanish.plan()
    texts = {t for _, t, _ in held_out}
    assert len(texts) == 24 and not texts & {t for _, t, _ in train} and len(train) == 4 * spanish.per_voice
    assert {w for t in texts for w in t.split()} <= {w for _, t, _ in train for w in t.split()}
    assert sorted({v for _, _, v in held_out}) == sorted(spanish.VOICES) and spanish.plan() == (train, held_out)
    of = {p: (v, t) for p, t, v in held_out}
    assert all(len([p for p in of if of[p][0] == v]) == 6 for v in spanish.VOICES)
