"""sample.py as a user runs it, on a small random checkpoint and the offline codec.   pytest tests/test_sample.py"""
import os, re, runpy, shutil, sys

import numpy as np
import pytest
import soundfile
import torch

import codec
import model as M

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TOKENIZER = os.path.join(ROOT, 'assets', 'tiny', 'tokenizer')
SPECIAL = {'tokeniser_length': 446, 'start_of_text': 258, 'end_of_text': 259, 'start_of_speech': 256, 'end_of_speech': 257, 'tts_pad': 260}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A run's folder with one checkpoint, and a reference wav."""
    out = tmp_path_factory.mktemp('run')
    cfg = M.Config(vocab_size=448, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                   rope_theta=1e4, max_position_embeddings=512, audio_embed_dim=4, prefix_heads=2, special_tokens=SPECIAL)
    cfg.codec = cfg.codec | {'codec_id': 'assets/tiny/codec.nemo'}
    model = M.Gepard(cfg)
    model.init_weights(0)
    M.save_checkpoint(str(out / 'checkpoint-7'), model.state_dict(), cfg, TOKENIZER, {})
    t = np.arange(30000) / 22050
    soundfile.write(out / 'voice.wav', 0.3 * np.sin(2 * np.pi * 200 * t), 22050)
    for name, audio in (('sample', t[:1] + 0.5), ('silence', 0 * t), ('loud', 1000 * t), ('nan', t * np.nan)):
        soundfile.write(out / f'{name}.wav', audio, 22050, 'FLOAT')
    (out / 'texts.txt').write_text('one two\n\nthree\n', encoding='utf-8')
    return out


def speak(folder, capsys, *flags, code=0):
    """Runs the script in this process (NeMo is imported once) -> what it printed."""
    argv, here = sys.argv, os.getcwd()
    sys.argv = ['sample.py', f'--ckpt={folder}', '--device=cpu', *flags]
    os.chdir(ROOT)
    try:
        runpy.run_path(os.path.join(ROOT, 'sample.py'), run_name='__main__')
        assert code == 0
    except SystemExit as e:
        assert e.code == code
    finally:
        sys.argv = argv
        os.chdir(here)
    text = capsys.readouterr()
    return text.out + text.err


def test_text_to_wav_and_picture(folder, capsys, tmp_path):
    out = tmp_path / 'new' / 'a.wav'
    text = speak(folder, capsys, '--text=four two', f'--ref={folder}/voice.wav', f'--out={out}', '--max_seconds=1')
    frames = int(re.search(r'(\d+) frames', text)[1])
    wav, rate = soundfile.read(out)
    assert rate == 22050 and len(wav) == frames * 1024 and 'RTF' in text and 'first audio after' in text
    assert (tmp_path / 'new' / 'a.png').stat().st_size > 1000


def test_streaming_is_the_same_speech(folder, capsys, tmp_path):
    for name, flag in (('whole', '--stream=false'), ('stream', '--stream=true')):
        speak(folder, capsys, '--text=one', f'--out={tmp_path}/{name}.wav', '--max_seconds=1.5', flag, '--stream_frames=4')
    a, b = (soundfile.read(tmp_path / f'{n}.wav')[0] for n in ('whole', 'stream'))
    assert len(a) == len(b) and np.abs(a - b).max() < 2e-4


def test_streaming_measures_before_the_clock(folder, capsys, tmp_path, monkeypatch):
    """The codec's reach is known before the first piece: no pause behind it, and "first audio" is honest."""
    known, stream = [], codec.NanoCodec.stream
    monkeypatch.setattr(codec.NanoCodec, 'stream', lambda self, chunks: known.append('context' in self.__dict__) or stream(self, chunks))
    speak(folder, capsys, '--text=one', f'--out={tmp_path}/a', '--max_seconds=1', '--stream')
    assert known == [True] and (tmp_path / 'a.wav').exists() and not (tmp_path / 'a').exists()


def test_several_texts_each_as_alone(folder, capsys, tmp_path):
    speak(folder, capsys, f'--file={folder}/texts.txt', f'--out={tmp_path}/t.wav', '--max_seconds=1', '--seed=3')
    speak(folder, capsys, '--text=one two', f'--out={tmp_path}/alone.wav', '--max_seconds=1', '--seed=3')
    a, b = (soundfile.read(tmp_path / n)[0] for n in ('t-1.wav', 'alone.wav'))
    assert len(a) == len(b) and np.abs(a - b).max() < 2e-4 and (tmp_path / 't-2.wav').exists()


def test_more_texts_than_places(folder, capsys, tmp_path):
    (tmp_path / 'many.txt').write_text('\n'.join(['one', 'two'] * 33))
    speak(folder, capsys, f'--file={tmp_path}/many.txt', f'--out={tmp_path}/t.wav', '--max_seconds=0.3', '--seed=3')
    speak(folder, capsys, '--text=two', f'--out={tmp_path}/alone.wav', '--max_seconds=0.3', '--seed=68')
    a, b = (soundfile.read(tmp_path / n)[0] for n in ('t-66.wav', 'alone.wav'))
    assert len(a) == len(b) and np.abs(a - b).max() < 2e-4


def test_a_tag_is_put_once(folder, capsys, tmp_path):
    shutil.copytree(folder / 'checkpoint-7', tmp_path / 'es')
    M.write_json(f'{tmp_path}/es/training_metadata.json', {'corpus': {'languages': ['es']}})
    wavs = []
    for n, (text, said) in enumerate([('hola', False), ('es: hola', True), (' ES:hola', True), ('es: es: hola', True)]):
        printed = speak(tmp_path / 'es', capsys, f'--text={text}', '--language=es', f'--out={tmp_path}/{n}.wav', '--max_seconds=0.5')
        assert ('has the tag es: already' in printed) == said
        wavs.append(soundfile.read(f'{tmp_path}/{n}.wav')[0])
    assert all(np.array_equal(w, wavs[0]) for w in wavs[:3]) and not np.array_equal(wavs[3], wavs[0])       # the last keeps its second one


def test_adapters_do_not_speak(folder, capsys, tmp_path):
    os.makedirs(tmp_path / 'run' / 'checkpoint-3')
    (tmp_path / 'run' / 'checkpoint-3' / 'adapter.safetensors').write_bytes(b'')
    for path in ('run', 'run/checkpoint-3'):
        text = speak(tmp_path / path, capsys, '--text=hi', f'--out={tmp_path}/x.wav', code=2)
        assert text.endswith(f'\nsample.py: {tmp_path}/run/checkpoint-3: these are adapters: merge.py makes a checkpoint of them\n')


@pytest.mark.parametrize('flags, words', [
    (['--text='], 'give one of --text and --file'),
    (['--text=a', '--file=b'], 'not both'),
    (['--text=...!'], 'nothing to speak'),
    (['--file=/nowhere.txt'], '/nowhere.txt'),
    (['--text=hi', '--ref=/nowhere.wav'], 'audio file not found'),
    (['--text=hi', '--ref=README.md'], 'audio unreadable'),
    (['--text=hi', '--ckpt=/nowhere'], 'no such folder'),
    (['--text=hi', '--prefix=some'], 'auto, null or none'),
    (['--text=hi', '--ref=x.wav', '--prefix=none'], 'contradict'),
    (['--text=' + 'word ' * 200, '--max_seconds=1'], 'split the text'),
    (['--text=hi', '--codec=/nowhere.nemo'], '/nowhere.nemo'),
    (['--text=hi', '--codec=README.md'], 'README.md: neither a .nemo file'),
    (['--text=hi', '--ckpt=out/nowhere'], 'out/nowhere: no such folder'),
    (['--text=hi', '--device=gpu'], '--device=gpu: '),
    (['--text=hi', '--device=cuda:99'], '--device=cuda:99: '),
    (['--text=hi', '--max_seconds=inf'], '--max_seconds takes float'),
    (['--text=hi', '--max_seconds=1e300'], 'do not fit'),
    (['--text=hi', '--stop_threshold=50'], '--stop_threshold is a probability'),
    (['--text=hi', '--temperature=inf'], '--temperature takes float'),
    (['--text=hi', '--max_ref_seconds=0'], 'must be above 0'),
    (['--text=hi', '--seed=99999999999999999999'], '--seed is 0 to'),
    (['--text=hi\udc80'], 'not UTF-8'),
    (['--text=hi', '--out=x.png'], '--out is a .wav file'),
    (['--text=hi', '--out=assets'], '--out is a .wav file'),
    (['--text=hi', '--out=README.md/x.wav'], '--out: '),
    (['--text=hi', '--out=' + 'x' * 300 + '.wav'], 'File name too long'),
    (['--text=hi', '--ref={folder}/sample.wav'], 'audio too short'),
    (['--text=hi', '--ref={folder}/silence.wav'], 'audio silent'),
    (['--text=hi', '--ref={folder}/loud.wav'], 'not scaled'),
    (['--text=hi', '--ref={folder}/nan.wav'], 'not finite'),
])
def test_errors_are_one_line(folder, capsys, tmp_path, flags, words):
    text = speak(folder, capsys, f'--out={tmp_path}/x.wav', *(f.format(folder=folder) for f in flags), code=2)
    line = text.strip().splitlines()[-1]
    assert line.startswith('sample.py: ') and words in line, text
