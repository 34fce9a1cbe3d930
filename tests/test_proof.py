"""python -m pytest tests/test_proof.py -- what the proof is made of: its sentences, voices and report."""
import importlib.util, os, re, subprocess, sys
import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROOF = os.path.join(ROOT, 'assets', 'proof')

def load(name):
    """assets/tiny has a make_speech.py too."""
    spec = importlib.util.spec_from_file_location(f'proof_{name}', os.path.join(PROOF, name + '.py'))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

speech, report = load('make_speech'), load('report')
words = lambda text: re.findall('[a-z]+', text.lower())

def test_sentences(monkeypatch):
    monkeypatch.setattr(speech, 'kokoro', 'somewhere')
    train, evaluation, references, held, prompts = plan = speech.plan()
    assert plan == speech.plan()                                        # the same every time
    texts, closed = {t for _, t, _ in train}, {t for own in held.values() for t in own}
    known_alone = set(held.pop('known'))
    closed -= known_alone
    spoken = {t for own in (*held.values(), known_alone, *prompts.values()) for t in own}
    assert not {w.capitalize() + '.' for w in speech.UNCLEAR} & spoken
    assert known_alone <= texts and not known_alone & {*prompts['1']} and not closed & texts and not closed & {t for own in prompts.values() for t in own} and not closed & {r[1] for r in references}
    assert len(closed) == sum(map(len, held.values())) == speech.per_bucket * 5 and {e[1] for e in evaluation} == closed | known_alone
    known = {w for t in texts for w in words(t)}
    assert {w for t in closed for w in words(t)} <= known               # held-out words are said in sentences
    assert {*prompts['1']} <= texts                                     # these alone too
    for bucket, own in held.items():
        assert all(speech.BUCKETS[bucket][0] <= len(words(t)) <= speech.BUCKETS[bucket][1] for t in own)
    for text in texts:
        assert re.fullmatch(r"[A-Z][A-Za-z, ]*[.?]", text) and not re.search('[A-Z]{2}', text) and not re.search(r'\b[Aa] [aeiou]', text), text
    assert {len(words(t)) for t in texts} >= set(range(1, 24)) and len(known) > 400
    paths = [r[0] for r in train + evaluation + references]
    assert len(set(paths)) == len(paths)

def test_voices(monkeypatch):
    monkeypatch.setattr(speech, 'kokoro', 'somewhere')
    train, evaluation, references, _, _ = speech.plan()
    trained, tested = {v for _, _, v in train}, {v for _, _, v, _ in references}
    warps, between, mixed = speech.voices(), speech.warps_between(), speech.mixtures()
    points = np.array([v[:3] for v in warps.values()])
    assert len(between) == 1000 and len(mixed) == 164 and not {n for a, b, _ in mixed.values() for n in (a, b)} & {*speech.UNSEEN_KOKORO}
    assert all(abs(v[0] - h[0]) >= 0.02 or abs(np.log2(v[1] / h[1])) >= 0.06 for v in between.values() for name, h in warps.items() if speech.unseen(name))
    assert len(warps) == 56 and len(trained) == 48 + 24 * 3 + 1000 + 164 * 3 and len(np.unique(points, axis=0)) == 56
    assert not any(speech.unseen(v) for v in trained) and sum(map(speech.unseen, warps)) == 8
    kinds = {v: kind for _, _, v, _, kind in evaluation}
    assert set(kinds) == tested and all((v in trained) == (kind == 'seen') == (not speech.unseen(v)) for v, kind in kinds.items())
    assert sorted(kinds.values()) == ['seen'] * 11 + ['unseen'] * 12

def test_more_clips_add_only(monkeypatch):
    monkeypatch.setattr(speech, 'between', 12)
    monkeypatch.setattr(speech, 'per_voice', 5)
    few = speech.plan()
    monkeypatch.setattr(speech, 'per_voice', 8)
    more = speech.plan()
    assert set(few[0]) < set(more[0]) and few[1:] == more[1:]

def test_made_once(tmp_path):
    pytest.importorskip('hibari', reason='hibari-tts is not installed: requirements-weights.txt')
    speech.out_dir = str(tmp_path)
    rows = [('wav/warp00/a.flac', 'Elephant.', 'warp00'), ('wav/warp76/a.flac', 'Elephant.', 'warp76')]
    assert 1 < speech.make(rows) < 4
    files = [tmp_path / r[0] for r in rows]
    first = [f.read_bytes() for f in files]
    assert first[0] != first[1]
    files[0].unlink()
    speech.make(rows)
    assert [f.read_bytes() for f in files] == first                     # the missing one is the same again

def test_refusals(tmp_path):
    (tmp_path / 'kk').mkdir()
    (tmp_path / 'kk' / 'kokoro-int8.onnx').write_text('')
    for script, args, said in (('make_speech.py', ['--per_bucket=0'], 'must be above 0'), ('make_speech.py', ['--kokoro=nowhere'], 'no kokoro-int8.onnx there'),
                               ('make_speech.py', ['--kokoro=kk'], 'kk/voices lacks af_alloy, '),
                               ('make_speech.py', ['--per_bucket=100'], 'no more texts of 1 words'),
                               ('report.py', [], 'run assets/proof/make_speech.py')):
        p = subprocess.run([sys.executable, os.path.join(PROOF, script), *args], cwd=tmp_path, capture_output=True, encoding='utf-8')
        assert p.returncode and said in p.stderr and p.stderr.count('\n') == 1, p.stderr
    assert [p.name for p in tmp_path.iterdir()] == ['kk']

def test_report_numbers():
    voices = {'a': np.array([1.0, 0.0]), 'b': np.array([0.0, 1.0])}
    share, own, other = report.nearest(np.array([[0.8, 0.6], [0.6, 0.8]]), ['a', 'a'], voices)
    assert (share, own, other) == (0.5, pytest.approx(0.7), pytest.approx(0.7))
    rows = [{'text': 'elephant', 'transcript': 'elephants', 'bucket': '1'}, {'text': 'the old man', 'transcript': 'the man', 'bucket': '2-3'}]
    assert report.wer_cells(rows) == ['-', '1.000 (1)', '0.333 (1)', '-', '-', '-', '0.500 (2)']
    a, b = ([(w, 'clean' if x == 'c' else 'wrong') for w, kinds in words.items() for x in kinds] for words in ({'x': 'cccw', 'y': 'cw', 'only here': 'w'}, {'x': 'ww', 'y': 'cwww'}))
    assert report.gain(a, b) == '+50.0% ± 25.0%' and report.gain(a, a[:4]) == ''           # 75% less 0, 50% less 25%

def test_speaker():
    """The checkpoint in assets/speaker: held-out sentences, in the voices of two clips, as Whisper and a speaker encoder hear them."""
    pytest.importorskip('hibari', reason='hibari-tts is not installed: requirements-weights.txt')
    sys.path[:0] = [ROOT, os.path.join(ROOT, 'assets', 'tiny')]
    import jiwer, soundfile, soxr
    import measure
    import model as M
    from codec import NanoCodec
    from dpo_score import Listener, normalise
    from prepare import encode_text, load_tokenizer
    try:
        measure.load_whisper(), measure.load_speaker_encoder()
    except ImportError as e:
        pytest.skip(str(e))
    folder = os.path.join(ROOT, 'assets', 'speaker')
    model, nano, held = M.load_checkpoint(folder)[0], NanoCodec(os.path.join(ROOT, 'assets', 'tiny', 'codec.nemo')), speech.plan()[3]
    texts = held['4-7'][:3] + held['8-14'][:2]
    references = [soundfile.read(os.path.join(folder, f'{name}.flac'), dtype='float32')[0] for name in ('warp01', 'af_bella')]
    prompts = [M.prompt(encode_text(load_tokenizer(folder)[0], t), model.cfg) for t in texts] * 2
    spoken = M.generate(model, prompts, model.voices(nano.encode(references)).repeat_interleave(5, 0), seeds=list(range(10)), max_frames=300, temperature=0.4)
    assert all(r['ended_by'] == 'stop_head' for r in spoken)
    to16 = lambda wavs: [soxr.resample(w, nano.sample_rate, 16000) for w in wavs]
    wavs = to16(nano.decode([r['codes'] for r in spoken]))
    heard = Listener(os.path.join(ROOT, '.cache', 'whisper-base.pt'), 'cpu', 8.0).hear(wavs, ['en'] * 10)
    assert jiwer.wer([normalise(t) for t in texts * 2], [normalise(t) for t in heard]) < 0.1, heard
    encoder = measure.load_speaker_encoder()
    alike = np.array(measure.embed(encoder, wavs)) @ np.array(measure.embed(encoder, to16(nano.decode(nano.encode(references))))).T
    assert (alike[:5, 0] > alike[:5, 1]).all() and (alike[5:, 1] > alike[5:, 0]).all(), alike
