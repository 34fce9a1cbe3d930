"""
dpo_sample.py as a user runs it, on a small random checkpoint and corpus: the same files for any number of ranks and slots and after
any kill.

    pytest tests/test_dpo_sample.py
"""
import json, os, resource, shutil, signal, subprocess, sys, time

import numpy as np
import pytest
from safetensors.numpy import load_file

import model as M
from dpo_sample import assign, frame_cap, number_of, progress, read_prompts
from test_pretrain import write_corpus
from test_sample import SPECIAL, TOKENIZER

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FILES = ('tokens.bin', 'index.jsonl', 'voices.safetensors')
FLAGS = ['--speakers_per_text=2', '--rollouts=3', '--cap_min=5', '--cap_max=60', '--cap_multiple=1.2', '--cfg_frames=4', '--stop_threshold=0.97', '--device=cpu']


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A checkpoint, a corpus of random voices, prompts, and the rollouts of one undisturbed run."""
    place = tmp_path_factory.mktemp('dpo')
    cfg = M.Config(vocab_size=448, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                   rope_theta=1e4, max_position_embeddings=512, audio_embed_dim=4, prefix_heads=2, special_tokens=SPECIAL)
    cfg.codec = cfg.codec | {'codec_id': 'assets/tiny/codec.nemo'}
    cfg.text_repetition = cfg.text_repetition | {'enabled': True}
    model = M.Gepard(cfg)
    model.init_weights(0)
    model.codebook_heads.weight.data *= 30
    model.stop_head.weight.data *= 30
    M.save_checkpoint(str(place / 'policy' / 'checkpoint-3'), model.state_dict(), cfg, TOKENIZER, {'stage': 'pretrain'})
    write_corpus(place / 'corpus')
    meta = json.load(open(place / 'corpus' / 'meta.json'))
    meta['codec']['id'] = 'assets/tiny/codec.nemo'
    json.dump(meta, open(place / 'corpus' / 'meta.json', 'w'))
    lines = [{'id': f'p{n}', 'text': ' '.join(['four', 'red', 'dogs', 'sing'][:1 + n % 4]), 'lang': ['en', 'de'][n % 2], 'category': 'c'} for n in range(12)]
    (place / 'prompts.jsonl').write_text(''.join(json.dumps(x) + '\n' for x in lines))
    run(place, 'whole')
    return place


def command(place, name, *flags, ranks=0):
    launch = [sys.executable] if not ranks else [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}']
    return [*launch, os.path.join(ROOT, 'dpo_sample.py'), f'--out_dir={place}/out', f'--run_name={name}', f'--ckpt={place}/policy', f'--prompts={place}/prompts.jsonl',
            f'--voices={place}/corpus', *FLAGS, *flags]


def run(place, name, *flags, ranks=0, code=0, disk=None):
    """disk: bytes that a file may have, as if there were no room for more."""
    r = subprocess.run(command(place, name, *flags, ranks=ranks), capture_output=True, text=True, cwd=ROOT, env=os.environ | {'OMP_NUM_THREADS': '1'},
                       preexec_fn=disk and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))))
    assert r.returncode == code, r.stdout[-3000:] + r.stderr[-3000:]
    return r.stdout + r.stderr


def path(place, name, file):
    return os.path.join(place, 'out', name, 'rollouts', file)


def same(place, name):
    for file in FILES:
        assert open(path(place, name, file), 'rb').read() == open(path(place, 'whole', file), 'rb').read(), file
    left = {n for n in os.listdir(os.path.dirname(path(place, name, ''))) if not n.startswith('lock-')}
    assert left == {*FILES, 'meta.json'}


def test_frame_cap():
    assert frame_cap('one two three', 21.5) == 163 and frame_cap('one', 21.5) == 94                     # int(4 * 1.9 * 21.5)
    assert [frame_cap(t, 21.5, low=100, high=200) for t in ('', 'one', 'one two three four')] == [100, 100, 197]
    assert frame_cap('word ' * 50, 21.5) == 300


def test_assign():
    voices = range(40)
    drawn = {f'p{n}': assign(f'p{n}', voices, 5, 0.15, 0) for n in range(2000)}
    assert drawn['p7'] == assign('p7', voices, 5, 0.15, 0) != assign('p7', voices, 5, 0.15, 1)
    named = [[v for v in d if v >= 0] for d in drawn.values()]
    assert all(len(d) == 5 and len(set(n)) == len(n) for d, n in zip(drawn.values(), named))            # no voice twice
    assert abs(sum(d.count(-1) for d in drawn.values()) / 10000 - 0.15) < 0.02
    uses = np.bincount(sum(named, []), minlength=40)
    assert uses.min() > 0.75 * uses.mean()
    assert len(assign('a', range(2), 5, 0.0, 0)) == 2 and assign('a', [], 5, 0.0, 0) == [-1] and set(assign('a', voices, 5, 1.0, 0)) == {-1}
    assert 0 <= number_of('a', 1) < 2 ** 63 and number_of('a', 1) != number_of('a', 2)


def test_prompts(tmp_path):
    (tmp_path / 'a.txt').write_text('\ufeffone  two\n\nthree\n', encoding='utf-8')
    assert [(p['id'], p['text']) for p in read_prompts(str(tmp_path / 'a.txt'))] == [('1', 'one two'), ('3', 'three')]
    for content, message in (('', 'no prompts'), ('{"text": "a"}\n{"txt": "b"}', 'a.jsonl:2: not a JSON object with a text'),
                             ('{"id": 1, "text": "a"}\n{"id": "1", "text": "b"}', "id '1' is that of line 1"), ('{"text": "..."}', 'a.jsonl:1: nothing to speak'),
                             ('[1]', 'a.jsonl:1'), ('{"text": "a \\ud800"}', 'a.jsonl:1: not a JSON object')):
        (tmp_path / 'a.jsonl').write_text(content)
        with pytest.raises(ValueError, match=message):
            read_prompts(str(tmp_path / 'a.jsonl'))
    (tmp_path / 'a.jsonl').write_text('{"id": null, "text": "a", "lang": null, "category": null}')
    assert read_prompts(str(tmp_path / 'a.jsonl')) == [{'id': '1', 'text': 'a', 'category': '', 'lang': ''}]
    os.rename(tmp_path / 'a.jsonl', tmp_path / 'B.JSONL')
    assert read_prompts(str(tmp_path / 'B.JSONL'))[0]['text'] == 'a'
    (tmp_path / 'a.json').write_text('[{"text": "a"}]')                     # no list of lines: it would be spoken with its brackets
    with pytest.raises(ValueError, match='a.json: prompts are .jsonl'):
        read_prompts(str(tmp_path / 'a.json'))


def test_progress(tmp_path):
    """One line for all ranks, of what those alive are doing."""
    folder, now = str(tmp_path), time.time()
    assert progress(folder) == f'{folder}: no run there yet'
    M.write_json(tmp_path / 'meta.json', {'groups': 40, 'rollouts': 8})
    for rank, lines, age in ((0, 4, 1), (1, 3, 2), (12, 3, 300)):           # the last has died
        (tmp_path / f'index-{rank}.jsonl').write_text('{}\n' * lines + '{"cut')
        M.write_json(tmp_path / f'progress-{rank}.json', {'start': now - age - 10, 'now': now - age, 'groups': 5, 'seconds': 50.0})
    assert progress(folder) == f'{folder}: 10/40 groups (25.0%), 8.0 rollouts/s, 10 s of audio/s, 0 min left'
    for rank in (0, 1):
        os.remove(tmp_path / f'progress-{rank}.json')
    assert progress(folder).endswith('nobody is at work')


def test_what_is_written(place):
    meta = M.read_json(path(place, 'whole', 'meta.json'))
    index = [json.loads(line) for line in open(path(place, 'whole', 'index.jsonl'))]
    tokens, voices = np.fromfile(path(place, 'whole', 'tokens.bin'), '<u2').reshape(-1, 8), load_file(path(place, 'whole', 'voices.safetensors'))
    assert [g['group'] for g in index] == [f'p{n}/{k}' for n in range(12) for k in range(2)] and meta['groups'] == 24 and meta['rollouts'] == 3
    at = 0
    for g in index:
        assert g['start'] == at and len(g['frames']) == len(g['truncated']) == 3 and -1 <= g['voice'] < len(voices) == 5
        cap = frame_cap(g['text'], 22050 / 1024, multiple=1.2, low=5, high=60)
        assert all(0 < n <= cap and (not cut or n == cap) for n, cut in zip(g['frames'], g['truncated']))
        at += sum(g['frames'])
    assert at == len(tokens) and tokens.max() < 2016
    cut = [c for g in index for c in g['truncated']]
    assert 0 < sum(cut) < len(cut)                                      # both kinds of ending, else the rest shows little
    assert meta['policy_hash'].startswith('sha256:') and meta['text_repetition']['enabled'] and len(meta['voice_names']) == 5
    assert len({tokens[g['start']:g['start'] + 5].tobytes() for g in index}) > 1


@pytest.mark.parametrize('flags, ranks', [(['--slots=2'], 0), ([], 2)], ids=['two slots', 'two ranks'])
def test_the_same_files_however_made(place, flags, ranks):
    name = f'index-{ranks}'                                             # as its own files are called
    text = run(place, name, *flags, ranks=ranks)
    same(place, name)
    assert '24 groups of 3, 0 of them done' in text
    for left in ('tokens-1.bin', 'progress-1.json.tmp'):                # a kill between the last file and the end
        open(path(place, name, left), 'w').close()
    assert 'finished' in run(place, name, *flags)                       # once more: nothing to do
    same(place, name)


def test_kills(place):
    """kill -9 at random moments, ranks changing in between, and once the marks that a kill in the middle of a write leaves."""
    rng = np.random.default_rng(0)
    index, tokens = path(place, 'killed', 'index-0.jsonl'), path(place, 'killed', 'tokens-0.bin')
    for attempt in range(4):
        p = subprocess.Popen(command(place, 'killed', '--slots=2'), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             env=os.environ | {'OMP_NUM_THREADS': '1'})
        begun, size = time.time(), os.path.getsize(index) if os.path.exists(index) else 0
        while p.poll() is None and time.time() - begun < 120 and not (os.path.exists(index) and os.path.getsize(index) > size):
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        p.send_signal(signal.SIGKILL)
        p.wait()
        if os.path.exists(path(place, 'killed', 'index.jsonl')):
            break
        if attempt == 1:
            kept = open(index).read().count('\n')
            open(index, 'a').write('{"group": "p9/')
            open(tokens, 'ab').write(b'\x01' * 77)
            assert f'{kept}/24 groups' in run(place, 'killed', '--status')
    text = run(place, 'killed')
    assert ', 0 of them done' not in text or 'finished' in text
    same(place, 'killed')


def test_full_disk(place):
    """One line, wherever it happens, and once there is room the run goes on."""
    size = lambda file: os.path.getsize(path(place, 'whole', file))
    assert size('meta.json') < size('voices.safetensors') < size('tokens.bin')
    for disk, file in ((100, 'voices'), (size('tokens.bin') // 2, 'rank 0'), (size('tokens.bin') - 1, 'joining')):
        text = run(place, 'full', '--slots=2', disk=disk, code=2)
        assert text.rstrip().splitlines()[-1].startswith(f'dpo_sample.py: {place}/out/full/rollouts') and 'Traceback' not in text, (file, text)
    assert ', 0 of them done' not in run(place, 'full')
    same(place, 'full')


def test_without_voice_cloning(place):
    """A checkpoint that takes no voice speaks without one."""
    model, base = M.load_checkpoint(f'{place}/policy/checkpoint-3')
    model.cfg.num_queries = 0
    plain = M.Gepard(model.cfg)
    plain.init_weights(0)
    M.save_checkpoint(f'{place}/plain', plain.state_dict(), plain.cfg, base, {})
    assert 'plain has no voice cloning: leave out voices' in run(place, 'plain', f'--ckpt={place}/plain', code=2)
    run(place, 'plain', f'--ckpt={place}/plain', '--voices=')
    assert {json.loads(line)['voice'] for line in open(path(place, 'plain', 'index.jsonl'))} == {-1}


def test_refusals(place, tmp_path):
    os.makedirs(tmp_path / 'run' / 'checkpoint-2')
    (tmp_path / 'run' / 'checkpoint-2' / 'adapter.safetensors').write_bytes(b'')
    os.makedirs(tmp_path / 'empty')
    shutil.copytree(place / 'corpus', tmp_path / 'foreign')
    meta = M.read_json(tmp_path / 'foreign' / 'meta.json')
    M.write_json(tmp_path / 'foreign' / 'meta.json', meta | {'codec': meta['codec'] | {'id': 'some/other'}})
    for flags, message in (
            (['--temperature=0.5'], 'was begun with temperature 0.4, now 0.5: choose another run_name'), (['--prompts='], 'prompts is missing'),
            (['--cap_max=4'], 'cap_max 4 is below cap_min 5'), (['--temperature=0'], 'are all the same'), (['--voices=nowhere'], 'voices: nowhere: no such file or folder'),
            (['--ckpt=out/nothing'], 'no such folder')):
        text = run(place, 'whole', *flags, code=2)
        assert message in text and 'Traceback' not in text, text
    for flags, message in (
            (['--hold_out=nobody'], 'hold_out: no voice is called nobody'), ([f'--voices={place}/corpus,{tmp_path}/empty'], f'voices: {tmp_path}/empty: no voice there'),
            ([f'--voices={tmp_path}/foreign'], 'was built with codec some/other'), ([f'--ckpt={tmp_path}/run'], 'run/checkpoint-2: these are adapters'),
            (['--max_ref_seconds=0.01', '--run_name=..'], 'max_ref_seconds must be at least 0.1, got 0.01; run_name is a folder name')):
        text = run(place, 'bad', *flags, code=2)
        assert message in text and 'Traceback' not in text, text
    (tmp_path / 'table.csv').write_text('audio,text\na.wav,four\n')
    assert 'table.csv: prompts are .jsonl' in run(place, 'bad', f'--prompts={tmp_path}/table.csv', code=2)
    (tmp_path / 'long.txt').write_text('four\n' + 'four ' * 500)
    assert 'long.txt: prompt 2: 503 tokens and 60 frames do not fit the model' in run(place, 'bad', f'--prompts={tmp_path}/long.txt', code=2)
    (tmp_path / 'tags.jsonl').write_text('{"text": "four", "lang": "English"}')
    shutil.copytree(place / 'policy' / 'checkpoint-3', tmp_path / 'tagged')
    M.write_json(f'{tmp_path}/tagged/training_metadata.json', {'corpus': {'languages': ['de', 'en']}})
    assert "lang 'English', " in run(place, 'bad', f'--prompts={tmp_path}/tags.jsonl', f'--ckpt={tmp_path}/tagged', '--language_tags=true', code=2)
    assert os.listdir(path(place, 'bad', '')) == ['lock-0']             # nothing was begun: with the right settings the name is free
    assert 'nothing' not in run(place, 'none-yet', '--status') and 'no run there yet' in run(place, 'none-yet', '--status')


def test_what_is_said_of_tags_and_caps(place, tmp_path):
    shutil.copytree(place / 'policy' / 'checkpoint-3', tmp_path / 'tagged')
    M.write_json(f'{tmp_path}/tagged/training_metadata.json', {'corpus': {'languages': ['de', 'en']}})
    (tmp_path / 'mixed.jsonl').write_text('{"text": "four"}\n{"text": "dos", "lang": "de"}')        # a corpus may have a language without a tag
    text = run(place, 'mixed', f'--ckpt={tmp_path}/tagged', f'--prompts={tmp_path}/mixed.jsonl', '--language_tags=true', '--rollouts=1', '--speakers_per_text=1')
    assert '1 of 2 prompts, such as 1, have no lang and get no tag' in text
    text = run(place, 'said', f'--ckpt={tmp_path}/tagged', '--cap_max=30', '--rollouts=1', '--speakers_per_text=1')
    assert 'was trained with language tags (de, en): --language_tags=true' in text and '9 of 12 prompts, such as p1, are expected to last as long as their frame cap' in text


def test_held_out_voices_and_config_file(place):
    """config/dpo.py serves this script; a held-out speaker never speaks."""
    r = subprocess.run([sys.executable, os.path.join(ROOT, 'dpo_sample.py'), 'config/dpo.py', *command(place, 'held')[2:], '--hold_out=x/1,x/3', '--null_share=0'],
                       capture_output=True, text=True, cwd=ROOT, env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert r.returncode == 0, r.stderr
    meta = M.read_json(path(place, 'held', 'meta.json'))
    assert [n.split(':')[0] for n in meta['voice_names']] == ['x/0', 'x/2', 'x/4']
    assert all(json.loads(line)['voice'] >= 0 for line in open(path(place, 'held', 'index.jsonl')))


def test_voices_from_wav_files(place, tmp_path):
    """A folder speaker/clip.wav and single files: the codes kept are the codec's, of the first max_ref_seconds."""
    import soundfile
    from codec import NanoCodec
    nano, rng = NanoCodec(os.path.join(ROOT, 'assets', 'tiny', 'codec.nemo')), np.random.default_rng(0)
    os.makedirs(tmp_path / 'studio' / 'ann')
    wavs = {'ann/a': tmp_path / 'studio' / 'ann' / 'a.wav', 'ann/b': tmp_path / 'studio' / 'ann' / 'b.wav', 'bob': tmp_path / 'studio' / 'bob.wav', 'eve': tmp_path / 'eve.wav'}
    for file in wavs.values():
        soundfile.write(file, 0.1 * rng.standard_normal(22050 * 2), 22050)
    text = run(place, 'wavs', f'--voices={tmp_path}/studio,{tmp_path}/eve.wav', '--hold_out=ann/b', '--max_ref_seconds=1.5')
    assert '3 voices, 1 held out' in text
    assert M.read_json(path(place, 'wavs', 'meta.json'))['voice_names'] == ['ann/a', 'bob', 'eve']
    got = load_file(path(place, 'wavs', 'voices.safetensors'))
    for n, name in enumerate(('ann/a', 'bob', 'eve')):
        want = nano.encode([soundfile.read(wavs[name], dtype='float32')[0][:int(1.5 * 22050)]])[0]
        assert np.array_equal(got[str(n)], want)
    assert 'two clips are called eve' in run(place, 'twice', f'--voices={tmp_path}/eve.wav,{tmp_path}/eve.wav', code=2)
