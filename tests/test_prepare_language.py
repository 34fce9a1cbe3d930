"""pytest tests/test_prepare_language.py          language tags: corpus -> checkpoint -> sample.py --language; a fake codec"""
import os, runpy, shutil, sys

import pytest

import model as M
from prepare import tagged
from test_prepare import ROOT, TOKENIZER, fake, prepare, speech, write      # noqa: F401

class Spoken(Exception):
    """What sample.py would speak."""

def sample(monkeypatch, capsys, ckpt, *flags):
    """The text ids that sample.py gives the model, or what it says where it stops."""
    def prompt(ids, cfg):
        raise Spoken(ids)
    monkeypatch.setattr(M, 'prompt', prompt)
    monkeypatch.setattr(sys, 'argv', ['sample.py', f'--ckpt={ckpt}', '--device=cpu', *flags])
    for name in ('save_wav', 'save_spectrogram'):
        monkeypatch.setattr(sys.modules['codec'], name, None, raising=False)
    try:
        runpy.run_path(os.path.join(ROOT, 'sample.py'), run_name='__main__')
    except Spoken as e:
        return e.args[0]
    except SystemExit as e:
        assert e.code == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

def test_language_is_applied_as_in_training(tmp_path, fake, monkeypatch, capsys):
    speech(tmp_path)
    rows = 'audio,text,speaker,lang\n0.wav,  Ho\u0301la,x,\n1.wav,ciao,x,IT\n'
    source = {'name': 'a', 'path': write(tmp_path / 'a.csv', rows), 'language_tag': 'ES', 'columns': {'audio': 'audio', 'text': 'text', 'speaker': 'speaker', 'language': 'lang'}}
    c = prepare(tmp_path / 'out', (source,))
    assert c.meta['languages'] == ['es', 'it'] and c.meta['sources'][0]['language_tag'] == 'ES'
    special = dict(zip(('start_of_speech', 'end_of_speech', 'start_of_text', 'end_of_text', 'tts_pad'), range(256, 261)), tokeniser_length=261)
    cfg = M.Config(vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
                   audio_embed_dim=4, prefix_heads=2, special_tokens=special)
    model = M.Gepard(cfg)
    model.init_weights(0)
    corpus = {k: c.meta[k] for k in ('sources', 'rows', 'frames', 'languages')}
    for name, metadata in (('plain', {'corpus': {**corpus, 'languages': []}}), ('tags', {'corpus': corpus}), ('merged', {'corpus': {**corpus, 'languages': ['fr']}, 'history': [{'stage': 'x'}, {'corpus': corpus}]})):
        M.save_checkpoint(str(tmp_path / name), model.state_dict(), cfg, TOKENIZER, metadata)
    out = f'--out={tmp_path}/x.wav'
    for i, (text, language) in enumerate((('H\u00f3la ', 'es'), ('ciao', 'it'))):
        for ckpt in ('tags', 'merged'):
            assert sample(monkeypatch, capsys, tmp_path / ckpt, f'--text={text}', f'--language={language}', out) == c.text(i).tolist()
    assert bytes(sample(monkeypatch, capsys, tmp_path / 'tags', '--text=hi', '--language=ES', out)) == b'es: hi' == tagged(' hi', 'es').encode()
    capsys.readouterr()
    assert bytes(sample(monkeypatch, capsys, tmp_path / 'tags', '--text=hi', out)) == b'hi' and 'trained with language tags (es, it)' in capsys.readouterr().out
    assert bytes(sample(monkeypatch, capsys, tmp_path / 'plain', '--text=hi', out)) == b'hi' and 'language tags' not in capsys.readouterr().out
    assert sample(monkeypatch, capsys, tmp_path / 'tags', '--text=hi', '--language=de', out) == f'sample.py: --language=de: {tmp_path}/tags knows es, it'
    assert sample(monkeypatch, capsys, tmp_path / 'merged', '--text=hi', '--language=de', out) == f'sample.py: --language=de: {tmp_path}/merged knows es, fr, it'
    assert 'was trained without language tags' in sample(monkeypatch, capsys, tmp_path / 'plain', '--text=hi', '--language=es', out)
    os.remove(tmp_path / 'tags/training_metadata.json')
    assert 'training_metadata.json is not there' in sample(monkeypatch, capsys, tmp_path / 'tags', '--text=hi', '--language=es', out)
