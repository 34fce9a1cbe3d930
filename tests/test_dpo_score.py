"""
dpo_score.py: the arithmetic (the reference's numbers are in test_golden.py), and the script on real speech through the offline
codec, heard by the real Whisper.

    pytest tests/test_dpo_score.py
"""
import gc, json, os, resource, runpy, shutil, signal, subprocess, sys, time

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import lora
import model as M
from dpo_score import KINDS, Listener, kind_of, make_pairs, normalise, rates, reward, rollouts_hash, stress_report, table
from test_sample import SPECIAL, TOKENIZER

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, 'assets', 'tiny'))
FLAGS = ['--asr=.cache/whisper-base.pt', '--asr_window=8', '--language=en', '--block_groups=1', '--device=cpu', '--energy_floor=-45']


def test_normalise():
    assert normalise('  Über [noise] (laugh) Café, ﬁve!  ') == 'über café five'
    assert [normalise(x) for x in ('', ' ', '...', '(all gone)', '¿?')] == [''] * 5


@pytest.mark.parametrize('transcript', ['', '   ', '...', '[noise]'])
def test_blank_transcripts_are_empty(transcript):
    r = reward('two words', transcript, 1.0)
    assert r['empty'] and r['wer'] == 1.0 and r['reward'] == -1.0 - 2.0


def test_blank_text_has_no_reward():
    r = reward('?!', 'something', 1.0, 0.9)
    assert r['wer'] is None and r['reward'] is None and r['expected'] == pytest.approx(1.1)


def test_duration_terms():
    """Expected 1.5 s for two words: nothing from 0.45 to 3.0 s, bounds included."""
    score = lambda seconds: reward('two words', 'two words', seconds)['reward']
    assert [score(s) for s in (0.45, 1.5, 3.0)] == [0.0, 0.0, 0.0]
    assert score(0.4) == -2.0 and score(4.0) == pytest.approx(-0.5)
    assert reward('two words', 'two words', 1.5, 0.5)['reward'] == pytest.approx(-0.25)


def rollout(i, **kw):
    return dict(group_id='g', sample_idx=i, reward=-0.1, wer=0.0, empty=False, truncated=False, seconds=1.5, dur_min=0.45, dur_max=3.0) | kw


@pytest.mark.parametrize('fault', [dict(wer=0.21), dict(empty=True), dict(truncated=True), dict(seconds=0.44), dict(seconds=3.01)])
def test_each_gate(fault):
    """A rollout with one fault is rejected however good its reward, and then is a rejected candidate."""
    assert make_pairs([rollout(0, **fault), rollout(1, reward=-5.0, wer=1.0)])[1]['no_chosen'] == 1
    pairs, counts = make_pairs([rollout(0), rollout(1, reward=-1.0, **fault)])
    assert [(p['chosen']['sample_idx'], p['rejected']['sample_idx']) for p in pairs] == [(0, 1)]
    assert counts == {'groups': 1, 'paired': 1, 'pairs': 1, 'blank_text': 0, 'no_chosen': 0, 'no_rejected': 0, 'no_margin': 0}


def test_every_group_has_one_reason():
    groups = {'alone': [rollout(0)], 'all bad': [rollout(0, wer=1.0), rollout(1, wer=1.0)], 'close': [rollout(0), rollout(1, wer=0.3, reward=-0.5)],
              'blank': [rollout(0, reward=None, wer=None)]}
    _, counts = make_pairs([s | {'group_id': name} for name, g in groups.items() for s in g])
    assert counts == {'groups': 4, 'paired': 0, 'pairs': 0, 'blank_text': 1, 'no_chosen': 1, 'no_rejected': 1, 'no_margin': 1}
    assert make_pairs([]) == ([], {k: 0 for k in counts})


def test_stopping_at_once_does_not_pay():
    """Both ends of the length term: a policy that stops at frame 1 scores below an honest attempt of which every word is wrong, and so
    does one that goes on for four times the expected time."""
    honest = reward('one two three', 'a b c', 1.9)['reward']
    assert reward('one two three', '', 1024 / 22050)['reward'] < reward('one two three', 'a', 1024 / 22050)['reward'] < honest == -1
    assert reward('one two three', 'a b c', 4 * 1.9)['reward'] < honest


# ---- the stress report

def score(kind='clean', **kw):
    s = dict(truncated=False, empty=False, wer=0.0, seconds=1.5, dur_min=0.45, dur_max=3.0, expected=1.5, tokens=3, voice='a', lang='en')
    return s | {'clean': {}, 'timeout': dict(truncated=True, empty=True, seconds=9.0), 'empty': dict(empty=True, wer=1.0), 'runaway': dict(seconds=3.1, wer=1.0),
                'wrong': dict(wer=0.5)}[kind] | kw


def test_kinds():
    assert [kind_of(score(k)) for k in KINDS] == list(KINDS)
    faults = dict(truncated=True), dict(empty=True), dict(seconds=9.0), dict(wer=1.0)       # with several: the first in the order of KINDS
    assert [kind_of(score(**{k: v for f in faults[n:] for k, v in f.items()})) for n in range(5)] == [*KINDS[1:], 'clean']
    assert kind_of(score(seconds=0.4)) == 'wrong' and kind_of(score(wer=0.2)) == 'clean' and kind_of(score(wer=0.2), max_wer=0.1) == 'wrong'


def test_report():
    scores = [score(k, tokens=t, voice=v) for k, t, v in (('clean', 3, 'a'), ('wrong', 6, 'a'), ('timeout', 7, 'a'), ('clean', 12, 'b'), ('empty', 13, 'null'), ('runaway', 40, 'b'))]
    scores = [s | {'kind': kind_of(s)} for s in scores]
    r = stress_report(scores)
    assert r['all']['all'] == rates(scores) and r['all']['all']['n'] == 6 and r['all']['all']['clean'] == pytest.approx(1 / 3)
    assert list(r['text tokens']) == ['1-6', '7-12', '13+'] and [x['n'] for x in r['text tokens'].values()] == [2, 2, 2]
    assert r['text tokens']['1-6']['wrong'] == r['text tokens']['7-12']['timeout'] == r['text tokens']['13+']['empty'] == 0.5
    assert list(r['voice']) == ['a', 'b', 'null'] and r['language']['en']['n'] == 6
    assert r['all']['all']['wer'] == pytest.approx(0.25) and r['all']['all']['length'] == pytest.approx(1.0)       # medians
    assert all(sum(x[k] for k in KINDS) == pytest.approx(1) for rows in r.values() for x in rows.values())
    lines = table(r, {'all': {'all': rates(scores[:1])}})
    assert len(lines) == 1 + 1 + 3 + 3 + 1 and '100.0% > 33.3%' in lines[1] and '>' not in lines[2]


# ---- the script

@pytest.fixture(scope='module')
def whisper_file():
    import measure
    pytest.importorskip('hibari', reason='hibari-tts is not installed: requirements-weights.txt')
    try:
        measure.load_whisper()                              # makes .cache/whisper-base.pt
    except ImportError as e:
        pytest.skip(str(e))


@pytest.fixture(scope='module')
def place(tmp_path_factory, whisper_file):
    """A random policy, and rollouts as if it had spoken: real speech through the codec, right and wrong, silence, a cut one."""
    import make_speech
    import soxr
    from hibari import Hibari
    from codec import NanoCodec
    place, tts, rng = tmp_path_factory.mktemp('score'), Hibari(), np.random.default_rng(0)
    os.chdir(ROOT)
    nano = NanoCodec('assets/tiny/codec.nemo')
    encode = lambda wav: nano.encode([soxr.resample(wav, 24000, 22050)])[0]
    said = {t: encode(make_speech.speak(tts, t, 'amber', rng)) for t in ('four two seven', 'the red house', 'hello elephant')}
    silence = nano.encode([np.zeros(22050, np.float32)])[0]
    cfg = M.Config(vocab_size=448, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                   rope_theta=1e4, max_position_embeddings=512, audio_embed_dim=4, prefix_heads=2, special_tokens=SPECIAL)
    cfg.codec = cfg.codec | {'codec_id': 'assets/tiny/codec.nemo'}
    model = M.Gepard(cfg)
    model.init_weights(0)
    M.save_checkpoint(str(place / 'policy'), model.state_dict(), cfg, TOKENIZER, {})
    folder = place / 'out' / 'round1' / 'rollouts'
    os.makedirs(folder)
    right, other, third = said.values()
    groups = [('four two seven', 0, [right, other, silence, right], [0, 0, 0, 1]), ('the red house', -1, [other, other], [0, 0]), ('hello elephant', 0, [right, other], [0, 0]),
              ('...', 0, [right, other], [0, 0]), ('Hello, elephant!', 0, [third, right[:1]], [0, 0])]
    at = 0
    with open(folder / 'index.jsonl', 'w') as index, open(folder / 'tokens.bin', 'wb') as tokens:
        for n, (text, voice, codes, cut) in enumerate(groups):
            index.write(json.dumps({'group': f'{n}/0', 'prompt': str(n), 'text': text, 'lang': 'en', 'category': '', 'tokens': 3, 'voice': voice, 'frames': list(map(len, codes)),
                                    'truncated': list(map(bool, cut)), 'start': at}) + '\n')
            at += sum(map(len, codes))
            tokens.write(np.concatenate(codes).astype('<u2').tobytes())
    save_file({'0': np.ascontiguousarray(right, np.int16)}, folder / 'voices.safetensors')
    M.write_json(folder / 'meta.json', {
        'policy': str(place / 'policy'), 'policy_hash': lora.tensors_hash(place / 'policy'), 'codec': cfg.codec, 'special_tokens': cfg.special_tokens,
        'text_repetition': cfg.text_repetition, 'voice_names': ['amber'], 'groups': 5, 'rollouts': 2, 'settings': {'language_tags': False, 'temperature': 0.4, 'seed': 0}})
    return place


def script(place, capsys, *flags, code=0):
    """Runs dpo_score.py in this process (NeMo is imported once) -> what it printed."""
    argv, here = sys.argv, os.getcwd()
    sys.argv = ['dpo_score.py', f'--out_dir={place}/out', *FLAGS, *flags]
    os.chdir(ROOT)
    try:
        runpy.run_path(os.path.join(ROOT, 'dpo_score.py'), run_name='__main__')
        assert code == 0
    except SystemExit as e:
        assert (e.code or 0) == code, capsys.readouterr().err
    finally:
        sys.argv = argv
        os.chdir(here)
        gc.collect()                    # the script's globals, and with them its lock
    text = capsys.readouterr()
    return text.out + text.err


@pytest.fixture(scope='module')
def heard(place):
    """The first run of the script."""
    return place, alone(place)


def alone(place, *flags, code=0, disk=None):
    """Runs dpo_score.py in a process of its own -> what it printed. disk: bytes that a file may have, as if there were no room for more."""
    r = subprocess.run([sys.executable, 'dpo_score.py', f'--out_dir={place}/out', *FLAGS, *flags], capture_output=True, text=True, cwd=ROOT,
                       env=os.environ | {'OMP_NUM_THREADS': '1'}, preexec_fn=disk and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (disk, disk))))
    assert r.returncode == code, r.stdout[-2000:] + r.stderr[-3000:]
    return r.stdout + r.stderr


def read(place, name, file):
    return [json.loads(line) for line in open(place / 'out' / name / file)]


def test_hearing_and_pairs(heard):
    place, text = heard
    facts = [g['rollouts'] for g in read(place, 'round1', 'facts.jsonl')]
    assert normalise(facts[4][0]['transcript']) == 'hello elephant' and normalise(facts[1][0]['transcript']) == 'the red house'
    assert not facts[0][2]['heard'] and facts[0][2]['transcript'] == '' and facts[0][2]['level'] < -45 < facts[0][0]['level']      # silence: nothing is invented
    assert not facts[4][1]['heard']                                                # one frame, 46 ms
    scores = read(place, 'round1', 'scores.jsonl')
    assert [s['kind'] for s in scores][:4] == ['wrong', 'wrong', 'empty', 'timeout']        # Whisper writes digits: see the next test
    for words in ('too quiet', 'too short', '2 blank text: no WER, no reward', 'speaker similarity: off'):
        assert words in text, text
    pairs = M.read_json(place / 'out' / 'round1' / 'pairs.json')
    assert [(p['group'], p['chosen']['k'], p['rejected']['k']) for p in pairs['pairs']] == [('4/0', 0, 1)]
    assert pairs['counts'] == {'groups': 5, 'paired': 1, 'pairs': 1, 'blank_text': 1, 'no_chosen': 2, 'no_rejected': 1, 'no_margin': 0}
    assert pairs['rollouts'] == M.read_json(place / 'out' / 'round1' / 'heard.json')['rollouts'] == rollouts_hash(place / 'out' / 'round1' / 'rollouts')
    assert pairs['policy_hash'] == lora.tensors_hash(place / 'policy') and pairs['pairs'][0]['chosen']['ref_tokens'] < 0


def test_other_weights_and_gates_hear_nothing(heard, capsys, monkeypatch):
    """Spelling, weights and gates are applied to the facts; the codec and Whisper are not even loaded."""
    place, _ = heard
    import codec, whisper
    monkeypatch.setattr(codec.NanoCodec, '__init__', None)
    monkeypatch.setattr(whisper, 'load_model', None)
    before = (place / 'out' / 'round1' / 'facts.jsonl').read_bytes()
    model, base = M.load_checkpoint(str(place / 'policy'))                          # as if it had been trained on in the meantime
    model.stop_head.bias.data += 1
    M.save_checkpoint(str(place / 'changed'), model.state_dict(), model.cfg, base, {})
    spelled = "--respell={r'(\\d)': r' \\1 ', '4': 'four', '2': 'two', '7': 'seven'}"
    text = script(place, capsys, spelled, '--w_wer=2', '--w_empty=5')
    scores = read(place, 'round1', 'scores.jsonl')
    assert [s['kind'] for s in scores][:4] == ['clean', 'wrong', 'empty', 'timeout'] and scores[0]['reward'] == 0 and scores[0]['transcript'] == 'four two seven'
    assert scores[2]['terms']['wer'] == -2 and scores[2]['terms']['empty'] == -5
    got = [(p['group'], p['chosen']['k'], p['rejected']['k']) for p in M.read_json(place / 'out' / 'round1' / 'pairs.json')['pairs']]
    assert got == [('0/0', 0, 2), ('4/0', 0, 1)], got                              # the silence is worst
    assert '1 pairs from 1' in script(place, capsys, 'config/dpo.py', '--speaker_model=')       # and back; the three scripts' one file of settings
    assert (place / 'out' / 'round1' / 'facts.jsonl').read_bytes() == before
    for flags, message in ((['--asr_window=10'], '--rehear hears everything again'), (['--run_name=none'], 'no finished rollouts there'), (['--asr=none.pt'], 'none.pt: no such file'),
                           (['--respell={"(": ""}'], 'respell'), (['--respell={"4": 4}'], "respell: '4': 4"), (['--respell={"4": r"\\1"}'], 'respell: '),
                           (['--compare=x'], 'compare belongs to --eval'), (['--eval', '--compare=x'], 'x/report.json: no such file (--eval writes it)'),
                           (['--eval', f'--compare={place}/out/round1/pairs.json'], 'pairs.json is no report of --eval'), ([f'--ckpt={place}/nothing'], 'no such folder'),
                           ([f'--ckpt={place}/changed'], 'changed is not the policy that spoke: its weights differ')):
        text = script(place, capsys, *flags, code=2)
        assert message in text and 'Traceback' not in text, text


def test_stress_report(heard, capsys):
    place, _ = heard
    shutil.copytree(place / 'out' / 'round1', place / 'out' / 'other')
    script(place, capsys, '--eval', '--run_name=other')
    text = script(place, capsys, '--eval', '--compare=other', '--max_wer=1')
    assert 'text tokens 1-6' in text and ' > ' in text and 'voice null' in text
    r = M.read_json(place / 'out' / 'round1' / 'report.json')
    assert r['rates']['all']['all']['n'] == 10 and r['counts']['blank text: no WER, no reward'] == 2 and set(r['rates']['voice']) == {'amber', 'null'}
    assert os.path.getsize(place / 'out' / 'round1' / 'report.png') > 1000


def test_what_was_heard_is_of_these_rollouts(heard, capsys):
    """Rollouts that were made anew under the same name, and damaged files, are refused by name."""
    place, _ = heard
    run = shutil.copytree(place / 'out' / 'round1', place / 'out' / 'stale')
    tokens, facts = run / 'rollouts' / 'tokens.bin', run / 'facts.jsonl'
    whole, lines = tokens.read_bytes(), facts.read_text()

    def refused(message):
        text = script(place, capsys, '--run_name=stale', code=2)
        assert message in text and 'Traceback' not in text, text
    tokens.write_bytes(whole[:16] + whole[:16] + whole[32:])
    refused("stale was heard with rollouts '")
    for part in (16, len(whole) - 3):
        tokens.write_bytes(whole[:part])
        refused(f'tokens.bin: {part:,} bytes, but the ')
    tokens.write_bytes(whole)
    for damaged in (lines[:-20], lines.split('\n', 1)[1], lines.replace('"group"', '"grope"')):
        facts.write_text(damaged)
        refused('facts.jsonl: damaged (')
    facts.write_text(lines)
    script(place, capsys, '--run_name=stale')


def test_what_cannot_be_heard_with(place, capsys, tmp_path):
    """One line that names the setting: a Whisper file cut short or of something else, no codec, a language that Whisper does not know."""
    import torch
    shutil.copytree(place / 'out' / 'round1' / 'rollouts', tmp_path / 'out' / 'round1' / 'rollouts')
    with open(os.path.join(ROOT, '.cache', 'whisper-base.pt'), 'rb') as f:
        (tmp_path / 'cut.pt').write_bytes(f.read(100000))
    (tmp_path / 'text.pt').write_text('hello')
    torch.save({'a': 1}, tmp_path / 'other.pt')
    index = tmp_path / 'out' / 'round1' / 'rollouts' / 'index.jsonl'
    index.write_text(index.read_text().replace('"lang": "en"', '"lang": "klingon"', 1))
    for flags, message in (*(([f'--asr={tmp_path}/{n}.pt'], f'asr {tmp_path}/{n}.pt (a name') for n in ('cut', 'text', 'other')), (['--asr=nosuch'], 'asr nosuch (a name'),
                           (['--speaker_model=/nowhere'], 'speaker_model /nowhere (a WavLM'), (['--codec=/nowhere.nemo'], 'codec: FileNotFoundError: /nowhere.nemo'),
                           (['--language='], "Whisper knows none called 'klingon'")):
        text = script(tmp_path, capsys, *flags, '--rehear', code=2)
        assert text.splitlines()[-1].startswith('dpo_score.py: ') and message in text and 'Traceback' not in text, text
    (tmp_path / 'out' / 'round1' / 'rollouts' / 'tokens.bin').unlink()
    assert 'tokens.bin' in script(tmp_path, capsys, '--rehear', code=2).splitlines()[-1]


def test_kill_and_two_ranks(heard, tmp_path):
    """kill -9, the rest by two ranks: the same facts, scores and pairs. A disk that is full on the way is one line."""
    place, _ = heard
    shutil.copytree(place / 'out' / 'round1' / 'rollouts', tmp_path / 'out' / 'round1' / 'rollouts')
    command, env = ['dpo_score.py', f'--out_dir={tmp_path}/out', *FLAGS], os.environ | {'OMP_NUM_THREADS': '1'}
    facts, rng = tmp_path / 'out' / 'round1' / 'facts-0.jsonl', np.random.default_rng(0)
    p, begun = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), time.time()
    while p.poll() is None and time.time() - begun < 200 and not (facts.exists() and facts.stat().st_size > 50):
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    p.send_signal(signal.SIGKILL)
    p.wait()
    with open(facts, 'a') as f:
        f.write('{"block": 4, "gro')
    r = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', *command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr[-3000:]
    text = alone(place, code=2, disk=500)
    assert text.splitlines()[-1].startswith(f'dpo_score.py: {place}/out/round1/scores.jsonl') and 'Traceback' not in text, text
    alone(place)                                                        # the undisturbed one with the same settings
    for file in ('facts.jsonl', 'scores.jsonl'):
        assert (tmp_path / 'out' / 'round1' / file).read_bytes() == (place / 'out' / 'round1' / file).read_bytes(), file
    a, b = (M.read_json(x / 'out' / 'round1' / 'pairs.json') for x in (tmp_path, place))
    assert a['pairs'] == b['pairs'] and not list((tmp_path / 'out' / 'round1').glob('facts-*'))


def test_speaker_similarity(place, capsys, tmp_path, monkeypatch):
    """A random WavLM x-vector through transformers: a rollout that is its own reference has similarity 1, the null voice has none."""
    transformers = pytest.importorskip('transformers')
    cfg = transformers.WavLMConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, conv_dim=(16,) * 7, num_feat_extract_layers=7,
                                   tdnn_dim=(16, 16, 16, 16, 48), xvector_output_dim=16, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4)
    transformers.WavLMForXVector(cfg).save_pretrained(tmp_path / 'wavlm')
    transformers.Wav2Vec2FeatureExtractor(feature_size=1, sampling_rate=16000, do_normalize=True, return_attention_mask=True).save_pretrained(tmp_path / 'wavlm')
    shutil.copytree(place / 'out' / 'round1' / 'rollouts', tmp_path / 'out' / 'round1' / 'rollouts')
    import codec
    decode, clips = codec.NanoCodec.decode, []
    monkeypatch.setattr(codec.NanoCodec, 'decode', lambda nano, codes: (clips.append(len(codes)), decode(nano, codes))[1])
    script(tmp_path, capsys, f'--speaker_model={tmp_path}/wavlm')
    assert sum(clips) == 12 + 1 and max(clips) == 4                                 # a block at a time and the reference, never all waveforms
    facts = [[r['similarity'] for r in g['rollouts']] for g in read(tmp_path, 'round1', 'facts.jsonl')]
    assert facts[0][0] == facts[0][3] == pytest.approx(1, abs=1e-4) and facts[0][2] is None and facts[1] == [None, None] and -1 <= facts[0][1] < 0.9999
    s = read(tmp_path, 'round1', 'scores.jsonl')[1]
    assert s['terms']['similarity'] == pytest.approx(-0.5 * (1 - s['similarity']))


def test_any_window(tmp_path):
    from whisper.model import ModelDimensions, Whisper
    dims = ModelDimensions(n_mels=80, n_audio_ctx=1500, n_audio_state=8, n_audio_head=1, n_audio_layer=1, n_vocab=51865, n_text_ctx=448, n_text_state=8, n_text_head=1, n_text_layer=1)
    torch.manual_seed(0)
    torch.save({'dims': vars(dims), 'model_state_dict': Whisper(dims).state_dict()}, tmp_path / 'random.pt')
    for window in (2.0, 4.02, 10.01):                               # places of 20 ms, of which no float sum must lose one
        assert len(Listener(str(tmp_path / 'random.pt'), 'cpu', window).hear([np.zeros(16000, np.float32)], ['en'])) == 1


def test_long_clips_are_heard_in_windows(place):
    """33 s: the same sentence at the start and behind the 30 s that Whisper hears at once."""
    import make_speech, soxr
    from hibari import Hibari
    clip = soxr.resample(make_speech.speak(Hibari(), 'hello elephant', 'amber', np.random.default_rng(0)), 24000, 16000).astype(np.float32)
    long = np.zeros(33 * 16000, np.float32)
    long[8000:8000 + len(clip)] = long[31 * 16000:31 * 16000 + len(clip)] = clip
    ears = Listener(os.path.join(ROOT, '.cache', 'whisper-base.pt'), 'cpu', 8.0)
    one, two = ears.hear([clip, long], ['en', ''])
    assert normalise(one) == 'hello elephant' and normalise(two).count('elephant') >= 2
