"""pytest tests/test_prepare.py          seconds on CPU; a fake codec of a few lines, the real offline codec in the last test"""
import contextlib, csv, fcntl, io, json, os, resource, runpy, shutil, signal, subprocess, sys, time, types

import numpy as np
import pytest
import soundfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import prepare as prepare_module
from prepare import Corpus, clean_text, encode_text, load_tokenizer, read_audio, share_of

SCRIPT, TOKENIZER = os.path.join(ROOT, 'prepare.py'), os.path.join(ROOT, 'tests/data/byte_tokenizer')     # a token is a byte

FAKE = '''
import numpy as np, os, signal
class NanoCodec:
    """Codes from the mean level of each frame; dies by itself in call KILL_AT, of Ctrl-C where that is negative."""
    sample_rate, hop, levels, groups, limit, calls = 22050, 1024, (8, 7, 6, 6), 8, 0, 0
    def __init__(self, name, device):
        self.id = name
    def encode(self, clips):
        NanoCodec.calls += 1
        if os.environ.get('KILL_AT', '').lstrip('-') == str(NanoCodec.calls):
            signal.signal(signal.SIGINT, signal.default_int_handler)        # a shell's background job ignores it
            os.kill(os.getpid(), signal.SIGINT if os.environ['KILL_AT'] < '0' else signal.SIGKILL)
        pad = [np.pad(c, (0, -len(c) % 1024)).reshape(-1, 1024) for c in clips]
        return [((np.abs(p).mean(1, keepdims=True) * 9000 + 7 * np.arange(8)) % 2016).astype(np.uint16) for p in pad]
    def decode(self, codes):
        return [np.repeat(c[:, 0] / 9000, 1024).astype(np.float32) for c in codes]
'''

@pytest.fixture
def fake(monkeypatch):
    module = types.ModuleType('codec')
    exec(FAKE, module.__dict__)
    monkeypatch.setitem(sys.modules, 'codec', module)

def prepare(out, sources, *flags):
    """Run the script in this process, as from the command line; returns what it said where it stopped, else the corpus."""
    argv = [SCRIPT, f'--out_dir={out}', f'--sources={sources!r}', '--codec=fake', '--device=cpu', f'--tokenizer={TOKENIZER}', '--special_tokens={}', '--picture=False', '--check_rows=0', *flags]
    old, hook, sys.argv = sys.argv, sys.excepthook, argv
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runpy.run_path(SCRIPT, run_name='__main__')
    except SystemExit as e:
        if e.code:
            assert e.code == 2
            return said.getvalue()
    finally:
        sys.argv, sys.excepthook = old, hook
    return Corpus(str(out))

def script_with_fake_codec(folder):
    """For a run in a process of its own: the script in a folder with the fake codec."""
    os.mkdir(folder)
    (folder / 'codec.py').write_text(FAKE)
    for name in ('prepare.py', 'configurator.py'):
        shutil.copy(os.path.join(ROOT, name), folder)
    return str(folder / 'prepare.py')

def tone(samples, rate=22050, hz=220.0, level=0.3):
    return (level * np.sin(2 * np.pi * hz * np.arange(samples) / rate)).astype(np.float32)

def speech(folder, n=12, speakers=3, source='a'):
    """A table of n short clips, each of another level and length, by turns of the speakers."""
    os.makedirs(folder, exist_ok=True)
    with open(folder / 'table.csv', 'w', newline='') as f:
        w = csv.writer(f, lineterminator='\n')
        w.writerow(['audio', 'text', 'speaker'])
        for i in range(n):
            soundfile.write(folder / f'{i}.wav', tone(3000 + 700 * (i * 7 % n), level=0.05 + 0.04 * i % 0.9), 22050)
            w.writerow([f'{i}.wav', f'text, number {i}', f's{i % speakers}'])
    return {'name': source, 'path': str(folder / 'table.csv')}

def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)

def rejects(out):
    return [json.loads(line) for line in open(os.path.join(out, 'rejects.jsonl'), encoding='utf-8')]

def files(out):
    return {name: open(os.path.join(out, name), 'rb').read() for name in sorted(os.listdir(out))}

def test_corpus_holds_what_went_in(tmp_path, fake, capsys):
    c = prepare(tmp_path / 'out', (speech(tmp_path / 'in'),), '--val_share=0.2')
    assert len(c) == 12 and c.speakers == ['a/s0', 'a/s1', 'a/s2'] and not os.path.exists(tmp_path / 'out.building')
    nano = sys.modules['codec'].NanoCodec('', '')
    for i in range(12):
        audio = read_audio(str(tmp_path / f'in/{i}.wav'), 22050)
        assert c.codes(i).dtype == np.uint16 and np.array_equal(c.codes(i), nano.encode([audio])[0])
        assert c.text(i).dtype == np.uint32 and bytes(c.text(i).astype(np.uint8)).decode() == f'text, number {i}'
        assert c.rows['line'][i] == i + 2 and c.rows['speaker'][i] == i % 3
        assert (c.rows['split'][i] == 1) == (share_of(f'text, number {i}') < 0.2)
    assert c.meta['codec'] == {'id': 'fake', 'sample_rate': 22050, 'hop': 1024, 'levels': [8, 7, 6, 6], 'groups': 8}
    assert c.meta['tokenizer']['length'] == 261 and c.meta['special_tokens']['start_of_speech'] == 256
    assert len(c.split('train')) + len(c.split('val')) == 12 and 0 < len(c.split('val')) < 6 and not len(c.split('val_speakers'))
    said = capsys.readouterr().out
    assert '12 rows kept' in said and '3 usable speakers' in said

def test_odd_audio(tmp_path, fake):
    """Every odd file is in the corpus correctly or in rejects.jsonl with its reason; the run goes on."""
    x, d = tone(6000), tmp_path
    good, bad = {}, {}
    for sub in ('PCM_16', 'PCM_24', 'FLOAT', 'PCM_U8', 'DOUBLE'):
        soundfile.write(d / f'{sub}.wav', x, 22050, subtype=sub)
        good[f'{sub}.wav'] = 6
    for ext in ('flac', 'ogg', 'mp3'):
        soundfile.write(d / f'{ext}.{ext}', tone(30000), 22050)
        good[f'{ext}.{ext}'] = 30
        write(d / f'cut.{ext}', (d / f'{ext}.{ext}').read_bytes()[:-200])
        bad[f'cut.{ext}'] = 'audio unreadable' if ext == 'flac' else 'audio file truncated'
    soundfile.write(d / 'opus.ogg', tone(96000, 48000), 48000, subtype='OPUS')
    good['opus.ogg'] = 44
    write(d / 'cut_opus.ogg', (d / 'opus.ogg').read_bytes()[:-10])
    bad['cut_opus.ogg'] = 'audio file truncated'
    for rate in (8000, 16000, 44100, 48000):
        soundfile.write(d / f'{rate}.wav', tone(rate, rate), rate)
        good[f'{rate}.wav'] = 22
    soundfile.write(d / 'stereo.wav', np.stack([x, 0.5 * x], 1), 22050)
    good['stereo.wav'] = 6
    for n in (0, 1, 1023, 1024, 1025):
        soundfile.write(d / f'{n}.wav', tone(n), 22050)
        (good if n >= 1024 else bad)[f'{n}.wav'] = {1024: 1, 1025: 2}.get(n, 'audio too short')
    pcm = (d / 'PCM_16.wav').read_bytes()
    at = pcm.find(b'data') + 4
    for name, data, reason in (
            ('empty.wav', b'', 'audio file is empty'), ('half_header.wav', pcm[:20], 'audio unreadable'), ('header.wav', pcm[:at + 4], 'audio file truncated'),
            ('cut.wav', pcm[:-2000], 'audio file truncated'), ('text.wav', b'no audio here\n' * 50, 'audio unreadable'), ('text.mp3', b'no audio here\n' * 50, 'audio unreadable'), ('x.raw', b'abcd' * 999, 'audio unreadable'),
            ('pipe.wav', pcm[:4] + b'\xff' * 4 + pcm[8:at] + b'\xff' * 4 + pcm[at + 4:], 6)):     # written to a pipe: sizes unknown
        write(d / name, data)
        (bad if isinstance(reason, str) else good)[name] = reason
    with pytest.raises(ValueError, match='text.mp3: no audio that libsndfile knows'):
        read_audio(str(d / 'text.mp3'), 22050)
    flac = bytearray((d / 'flac.flac').read_bytes())
    flac[21], flac[22:26] = flac[21] & 0xF0, bytes(4)       # no total: written to a pipe
    write(d / 'pipe.flac', bytes(flac))
    bad['pipe.flac'] = 'audio of unknown length'
    nan = x.copy()
    nan[100] = np.nan
    for name, data, reason in (('nan.wav', nan, 'audio not finite'), ('inf.wav', np.full(6000, np.inf, np.float32), 'audio not finite'), ('silent.wav', 0 * x, 'audio silent'),
                               ('opposed.wav', np.stack([x, -x], 1), 'audio silent'), ('scaled.wav', x * 32768, 'audio not scaled to -1..1'), ('long.wav', tone(22050 * 41), 'audio too long')):
        soundfile.write(d / name, data, 22050, subtype='FLOAT')
        bad[name] = reason
    soundfile.write(d / 'just.wav', tone(22050 * 40), 22050)
    good['just.wav'] = 862
    bad['missing.wav'], bad['folder.wav'] = 'audio file not found', 'audio file not found'
    os.mkdir(d / 'folder.wav')
    os.mkdir(d / 'ein Ordner ü')
    soundfile.write(d / 'ein Ordner ü' / 'ça va.wav', x, 22050)
    good['ein Ordner ü/ça va.wav'] = 6
    good[str(d / 'PCM_16.wav')] = 6             # an absolute path
    names = sorted({**good, **bad})
    table = write(d / 't.jsonl', ''.join(json.dumps({'audio': n, 'text': f'say {n}'}) + '\n' for n in names))
    c = prepare(d / 'out', ({'name': 'odd', 'path': table},), '--max_reject_share=1.0', '--batch_seconds=45')
    assert {names[line - 1]: n for line, n in zip(c.rows['line'], c.rows['frame_len'])} == good
    assert {r['audio']: r['reason'] for r in rejects(d / 'out')} == bad
    assert all(r['file'] == table and names[r['line'] - 1] == r['audio'] for r in rejects(d / 'out'))
    assert c.meta['counts']['dropped']['odd']['audio file truncated'] == sum(r == 'audio file truncated' for r in bad.values())
    level = [read_audio(str(d / f), 22050) for f in ('PCM_16.wav', 'PCM_24.wav', 'FLOAT.wav', 'PCM_U8.wav', 'DOUBLE.wav', 'pipe.wav')]
    assert all(np.abs(y - x).max() < (0.008 if i == 3 else 1e-4) for i, y in enumerate(level))
    assert np.abs(read_audio(str(d / 'stereo.wav'), 22050) - 0.75 * x).max() < 1e-4

@pytest.mark.parametrize('rate', (8000, 16000, 24000, 44100, 48000))
def test_resampling_keeps_the_band_and_nothing_else(tmp_path, rate):
    soundfile.write(tmp_path / 'a.wav', tone(rate, rate, 1000.0, 0.5), rate, subtype='FLOAT')
    y = read_audio(str(tmp_path / 'a.wav'), 22050)
    assert len(y) == 22050 and np.abs(y - tone(22050, 22050, 1000.0, 0.5))[500:-500].max() < 1e-4       # in place, no delay
    if rate > 22050 * 1.1:                                              # above the new band: gone, not folded back
        soundfile.write(tmp_path / 'b.wav', tone(rate, rate, 14000.0, 0.5), rate, subtype='FLOAT')
        assert np.abs(read_audio(str(tmp_path / 'b.wav'), 22050))[500:-500].max() < 1e-4

def test_tables_of_every_kind_give_the_same_corpus(tmp_path, fake):
    speech(tmp_path)
    rows = list(csv.DictReader(open(tmp_path / 'table.csv')))
    kinds = {
        'comma.csv': None, 'tab.tsv': 'audio\ttext\tspeaker\n' + ''.join('\t'.join(r.values()) + '\n' for r in rows),
        'bom_crlf.csv': b'\xef\xbb\xbf' + (tmp_path / 'table.csv').read_bytes().replace(b'\n', b'\r\n') + b'\r\n\r\n',
        'quoted.csv': '"audio","text","speaker"\n' + ''.join(','.join(f'"{v}"' for v in r.values()) + '\n' for r in rows),
        'no_last_newline.tsv': ('audio\ttext\tspeaker\n' + ''.join('\t'.join(r.values()) + '\n' for r in rows))[:-1],
        'lines.jsonl': ''.join(json.dumps(r) + '\n' for r in rows),
        'metadata.csv': ''.join('|'.join((r['audio'][:-4], r['text'], r['speaker'])) + '\n' for r in rows),
        'renamed.csv': (tmp_path / 'table.csv').read_text().replace('audio,text,speaker', 'file,sentence,who')}
    first = prepare(tmp_path / 'out', ({'name': 'a', 'path': str(tmp_path / 'table.csv')},))
    for name, data in kinds.items():
        if data is None:
            continue
        source = {'name': 'a', 'path': write(tmp_path / name, data)}
        if name == 'metadata.csv':
            source.update(root=str(tmp_path), columns={'audio': 0, 'text': 1, 'speaker': 2})
        if name == 'renamed.csv':
            source.update(columns={'audio': 'file', 'text': 'sentence', 'speaker': 'who'})
        c = prepare(tmp_path / name.replace('.', '_'), (source,))
        assert len(c) == 12 and not rejects(c.path), name
        assert all(np.array_equal(c.rows[f], first.rows[f]) for f in c.rows.dtype.names if f != 'line') and c.speakers == first.speakers
        assert all(open(os.path.join(c.path, f), 'rb').read() == open(os.path.join(first.path, f), 'rb').read() for f in ('codes.bin', 'text.bin'))

@pytest.mark.parametrize('kind', ('csv', 'tsv', 'jsonl'))
def test_named_columns_keep_the_speaker(tmp_path, fake, kind):
    """Where the source names audio and text alone, 'speaker' is taken if the table has it, as parquet does; another one that is named is taken, a near one is an error."""
    speech(tmp_path)
    def table(*names):
        rows = [dict(zip(names, (f'{i}.wav', f'text, number {i}', f's{i % 3}', f't{i % 2}'))) for i in range(12)]
        lines = [json.dumps(r) for r in rows] if kind == 'jsonl' else [{'csv': ',', 'tsv': '\t'}[kind].join(f'"{v}"' for v in r) for r in (names, *map(dict.values, rows))]
        return write(tmp_path / f'{len(os.listdir(tmp_path))}.{kind}', '\n'.join(lines))
    source = {'name': 'a', 'path': table('file', 'sentence', 'speaker'), 'columns': {'audio': 'file', 'text': 'sentence'}}
    assert prepare(tmp_path / 'out', (source,)).speakers == ['a/s0', 'a/s1', 'a/s2']
    who = {**source, 'path': table('file', 'sentence', 'speaker', 'who'), 'columns': {**source['columns'], 'speaker': 'who'}}
    assert prepare(tmp_path / 'who', (who,)).speakers == ['a/t0', 'a/t1']
    assert prepare(tmp_path / 'none', ({**source, 'path': table('file', 'sentence')},)).speakers == []
    for columns in ({}, {'columns': {'audio': 'audio', 'text': 'text'}}):
        assert "column 'Speaker' is not 'speaker'" in prepare(tmp_path / f'near{len(columns)}', ({'name': 'a', 'path': table('audio', 'text', 'Speaker'), **columns},))

def test_ljspeech(tmp_path, fake):
    os.mkdir(tmp_path / 'wavs')
    for i in range(3):
        soundfile.write(tmp_path / f'wavs/LJ001-000{i}.wav', tone(5000), 22050)
    path = write(tmp_path / 'metadata.csv', 'LJ001-0000|In 1465|In fourteen sixty-five\nLJ001-0001|"Open, she said|"Open, she said\nLJ001-0002|a|b|c\n')
    c = prepare(tmp_path / 'out', ({'name': 'lj', 'path': path},), '--max_reject_share=0.5')
    assert [bytes(c.text(i).astype(np.uint8)).decode() for i in range(2)] == ['In fourteen sixty-five', '"Open, she said']
    assert c.rows['speaker'].tolist() == [-1, -1] and rejects(c.path)[0]['detail'] == '4, the first line has 3'

@pytest.mark.parametrize('name, data, said', (
    ('a.csv', 'audio,text\n0.wav,ok\n1.wav,"never closed\n2.wav,x\n3.wav,"y"\n', 'a.csv:3: bad quotes'),
    ('a.tsv', 'audio\ttext\n0.wav\t"Hello," she said\n', 'a.tsv:2: bad quotes'),
    ('a.csv', 'audio,transcript\n0.wav,x\n', "a.csv:1: no column 'text'; it has ['audio', 'transcript']"),
    ('a.csv', '0.wav,x\n', "a.csv:1: no column 'audio', 'text'"),
    ('a.csv', 'audio,text,Speaker\n0.wav,x,me\n', "a.csv:1: column 'Speaker' is not 'speaker'"),
    ('a.csv', 'audio,text,text\n0.wav,x,y\n', 'a.csv:1: a column name is there twice'),
    ('a.jsonl', '{"audio": "0.wav", "sentence": "x"}\n', "a.jsonl:1: no column 'text'"),
    ('a.csv', b'audio,text\n0.wav,ok\n1.wav,caf\xe9\n', 'a.csv:3: not UTF-8 (byte 0xe9), cp1252 or Latin-1?'),
    ('a.csv', 'audio,text\n0.wav,x\n'.encode('utf-16'), 'a.csv:1: not UTF-8 (byte 0xff), UTF-16?'),
    ('a.csv', 'audio,text\n0.wav,x\n'.encode('utf-16-le'), 'a.csv:1: NUL bytes'),
    ('a.jsonl', '{"audio": "0.wav"}\n'.encode('utf-16-le'), 'a.jsonl:1: NUL bytes'), ('a.jsonl', '{"audio": \n{"audio": "0.wav", "sentence": "x"}\n', "a.jsonl:2: no column 'text'"), ('a.csv', 'audio,text\n0.wav,x\n'.encode('utf-32'), 'a.csv:1: not UTF-8'),
    ('a.csv', 'audio,text\r0.wav,x\r', 'a.csv:1: bad quotes'),
    ('a.csv', 'audio,text\n\n', 'no rows in'), ('a.csv', '', 'no rows in'),
    ('a.csv', 'audio|text|speaker\n0.wav|x|s\n', 'a.csv:1: [\'audio\', \'text\', \'speaker\']: not id|text'), ('a.csv', '0|s|en|x\n', 'a.csv:1: ['),
    ('a.txt', 'audio,text\n', 'one of csv, tsv')))
def test_a_wrong_table_is_an_error_with_file_and_line(tmp_path, fake, name, data, said):
    assert said in prepare(tmp_path / 'out', ({'name': 'a', 'path': write(tmp_path / name, data)},))
    assert not os.path.exists(tmp_path / 'out')

@pytest.mark.parametrize('change, said', (
    ({'name': 'a/b'}, "without '/'"), ({'path': 'nowhere.csv'}, 'no such table'), ({'pathh': 'x'}, "sources[0] 'a': unknown key 'pathh'"), ({'kind': 'xml'}, "kind 'xml'"),
    ({'columns': {'audio': 'a', 'txt': 'b'}}, 'columns {'), ({'max_rows': -1}, 'max_rows'),
    ({'kind': 'folder'}, 'is not a folder'), ({'path': '.', 'kind': 'csv'}, 'is a folder'), ({'path': 'a/name'}, "takes 'kind': 'hf'"), ({'path': ROOT + '/tests/data/byte_tokenizer', 'kind': 'parquet'}, 'no .parquet file'),
    ({'path': ROOT + '/tests/data/byte_tokenizer', 'kind': 'hf'}, 'byte_tokenizer, split'), ({'name': 7}, 'sources[0] 7: name 7: wanted str'),
    *(({key: value}, f"sources[0] 'a': {key} {value!r}: wanted {kind}") for key, value, kind in (
        ('quotes', 'no', 'bool'), ('quotes', 0, 'bool'), ('root', 7, 'str'), ('root', None, 'str'), ('language_tag', ['es'], 'str'), ('language_tag', '', 'str, not empty'), ('max_rows', '9', 'int'),
        ('max_rows', True, 'int'), ('max_rows', 1.5, 'int'), ('columns', ['audio', 'text'], 'dict'), ('columns', {}, 'dict, not empty'), ('kind', None, 'str'), ('split', 1, 'str'), ('path', None, 'str'),
        ('subset', [], 'str, not empty'), ('streaming', 'yes', 'bool'))),
    ({'columns': {'audio': 'a', 'text': None}}, 'columns {'), ({'columns': {'audio': 0, 'text': 'b'}}, 'columns {'), ({'root': '/nowhere'}, "root '/nowhere': no such folder"), ({'max_rows': 0}, 'max_rows 0: 1 or more'),
    ({'language_tag': ' es'}, "language_tag ' es': blanks"), ({'streaming': True}, "streaming: says nothing to kind 'csv'"), ({'split': 'train'}, "split: says nothing to kind 'csv'")))
def test_a_wrong_source_is_an_error(tmp_path, fake, change, said):
    got = prepare(tmp_path / 'out', ({**speech(tmp_path), **change},))
    assert said in got and got.count('\n') == 1 and not os.path.exists(tmp_path / 'out.building')

@pytest.mark.parametrize('flag, said', (
    ('--max_seconds=-1', 'max_seconds'), ('--val_share=1.5', 'val_share'), ('--val_share=1.0', 'val_share: 1.0 leaves no row to train on'), ('--singleton_policy=drop', 'singleton_policy'), ('--min_clips_per_speaker=0', 'min_clips_per_speaker'),
    ('--val_speakers=9', 'only 3 speakers'), ('--tokenizer=./nothing', 'no tokenizer.json'), ("--special_tokens={'a': 1}", 'five different ids'), ('--sources=()', 'sources: at least one'),
    ('--out_dir=/', 'out_dir: a folder to be made'), ('--out_dir=/proc', 'out_dir: a folder to be made'),       # a mounted folder can't be replaced
    *((f"--special_tokens={dict(zip(('start_of_speech', 'end_of_speech', 'start_of_text', 'end_of_text', 'tts_pad'), ids))}", 'five different ids below 261')
      for ids in ((1, 2, 3, 4, 'a'), (1, 2, 3, 4, [5]), (1, 2, 3, 4, 5.5), (1, 2, 3, 4, 261), (1, 2, 3, 4, -1), (1, 2, 3, 4, 4)))))
def test_a_wrong_setting_is_an_error(tmp_path, fake, flag, said):
    assert said in prepare(tmp_path / 'out', (speech(tmp_path),), flag)

def test_missing_keys_and_other_types_are_an_error(tmp_path, fake):
    source = speech(tmp_path)
    for sources, said in (((source, {'name': 'b'}), "sources[1] 'b': no path"), (({'path': 'x.csv'},), 'sources[0]: no name'), (({},), 'sources[0]: no name and no path'), ((source, source), "sources[1] 'a': name 'a': another"),
                          ((source, 'b'), 'sources: at least one dict'), (source, 'sources: at least one dict')):
        got = prepare(tmp_path / 'out', sources)
        assert said in got and got.count('\n') == 1

def test_special_tokens_of_a_checkpoint(tmp_path, fake):
    os.mkdir(tmp_path / 'tok')
    shutil.copy(os.path.join(TOKENIZER, 'tokenizer.json'), tmp_path / 'tok')
    ids = json.load(open(os.path.join(TOKENIZER, 'gepard_special_tokens.json')))
    write(tmp_path / 'tok/gepard_config.json', json.dumps({'special_tokens': ids}))
    meta = prepare(tmp_path / 'out', (speech(tmp_path),), f'--tokenizer={tmp_path}/tok').meta
    assert meta['special_tokens'] == {k: v for k, v in ids.items() if k != 'tokeniser_length'}
    write(tmp_path / 'tok/tokenizer.json', '{}')
    got = prepare(tmp_path / 'other', (speech(tmp_path),), f'--tokenizer={tmp_path}/tok')
    assert 'tokenizer.json: ' in got and got.count('\n') == 1

@pytest.mark.parametrize('content, said', (('{"a"', 'Expecting'), ('[1]', "'list' object"), ('{"tokeniser_length": 9}', 'five different ids'), (None, 'No such file')))
def test_special_tokens_beside_the_tokenizer(tmp_path, fake, content, said):
    os.mkdir(tmp_path / 'tok')
    shutil.copy(os.path.join(TOKENIZER, 'tokenizer.json'), tmp_path / 'tok')
    if content is not None:
        write(tmp_path / 'tok/gepard_special_tokens.json', content)
    got = prepare(tmp_path / 'out', (speech(tmp_path),), f'--tokenizer={tmp_path}/tok')
    assert said in got and got.count('\n') == 1

def test_the_example_at_full_size_has_no_fault_but_its_paths():
    config = {}
    exec(open(os.path.join(ROOT, 'config/prepare.py')).read(), config)
    for source in config['sources']:
        kind = source.get('kind') or {'lj': 'ljspeech', 'mls_es': 'tsv', 'studio': 'folder'}[source['name']]
        there = {**source, 'kind': kind, 'path': ROOT if kind in ('folder', 'parquet', 'hf') else __file__, **({'root': ROOT} if 'root' in source else {})}
        assert prepare_module.fault_of(there) == ''

def test_a_pipe_in_a_text_and_the_first_rows_only(tmp_path, fake):
    speech(tmp_path)
    a = {'name': 'a', 'path': write(tmp_path / 'a.csv', 'audio,text\n0.wav,one | two\n1.wav,"three|"\n2.wav,|\n')}
    c = prepare(tmp_path / 'out', (a,), '--max_reject_share=1')
    assert [bytes(c.text(i).astype(np.uint8)).decode() for i in range(len(c))] == ['one | two', 'three|'] and rejects(c.path)[0]['line'] == 4
    lj = {'name': 'lj', 'path': write(tmp_path / 'lj.csv', '0|a\n1|b\n2|c\n'), 'root': str(tmp_path)}
    os.mkdir(tmp_path / 'f')
    for i in range(3):
        shutil.copy(tmp_path / f'{i}.wav', tmp_path / 'f')
        write(tmp_path / f'f/{i}.txt', f'say {i}')
    for source in (a, lj, {'name': 'f', 'path': str(tmp_path / 'f')}):
        for unit_rows in (1, 256):
            c = prepare(tmp_path / f"{source['name']}{unit_rows}", ({**source, 'max_rows': 2},), f'--unit_rows={unit_rows}')
            assert len(c) == 2 and not rejects(c.path)
    c = prepare(tmp_path / 'mixed', ({**a, 'max_rows': 1}, {**lj, 'max_rows': 9}, speech(tmp_path, source='s')), '--unit_rows=2')
    assert c.rows['source'].tolist() == [0, 1, 1, 1] + [2] * 12 and c.meta['counts']['kept'] == {'a': 1, 'lj': 3, 's': 12}

def test_folders_with_odd_files(tmp_path, fake):
    """Links that lead back or nowhere, two audio files with one text, a name that is no UTF-8: each is a row or a reject, once."""
    speech(tmp_path)
    os.makedirs(tmp_path / 'f/bob')
    for i, name in enumerate(('bob/a.wav', 'bob/a.WAV', 'bob/b.wav', 'c.wav')):
        shutil.copy(tmp_path / f'{i}.wav', tmp_path / 'f' / name)
    for name in ('bob/a', 'd'):
        write(tmp_path / f'f/{name}.txt', f'text of {name}')
    os.symlink(tmp_path / 'f', tmp_path / 'f/bob/back')
    os.symlink('/nowhere', tmp_path / 'f/d.wav')
    os.symlink('/nowhere', tmp_path / 'f/c.txt')
    for end in (b'.wav', b'.txt'):
        open(os.path.join(os.fsencode(tmp_path / 'f'), b'caf\xe9' + end), 'wb').close()
    source = {'name': 'a', 'path': str(tmp_path / 'f')}
    c = prepare(tmp_path / 'out', (source,), '--max_reject_share=1', '--min_clips_per_speaker=1')
    assert [bytes(c.text(i).astype(np.uint8)).decode() for i in range(len(c))] == ['text of bob/a'] * 2 and c.speakers == ['a/bob']
    assert [(r['audio'], r['reason']) for r in rejects(c.path)] == [('bob/b.wav', 'no text file'), ('c.wav', 'text file unreadable'), ('caf\udce9.wav', 'text empty'), ('d.wav', 'audio file not found')]
    os.rename(tmp_path / 'f/bob', tmp_path / 'f/tom')           # another speaker: the corpus is not the same
    assert 'table_hashes.a' in prepare(tmp_path / 'out', (source,), '--max_reject_share=1', '--min_clips_per_speaker=1')

def test_odd_rows_are_counted_not_lost(tmp_path, fake):
    speech(tmp_path)
    lines = ['audio,text,speaker', '0.wav,one,s', '1.wav,,s', '2.wav," \u00a0\t",s', '', '3.wav,one more', '0.wav,one,t', '0.wav,two,s', '4.wav,a\u2028b,s', '5.wav,"' + 'x' * 200000 + '",s', '', '']
    path = write(tmp_path / 'odd.csv', '\n'.join(lines))
    c = prepare(tmp_path / 'out', ({'name': 'a', 'path': path},), '--max_reject_share=0.6', '--max_text_tokens=0')
    assert c.rows['line'].tolist() == [2, 8, 9, 10] and c.rows['text_len'].tolist() == [3, 3, 3, 200000]
    assert [(r['line'], r['reason']) for r in rejects(c.path)] == [(3, 'text empty'), (4, 'text empty'), (5, 'line is blank'), (6, 'wrong number of fields'), (7, 'duplicate row')]
    assert c.meta['rows'] + sum(c.meta['counts']['dropped']['a'].values()) == 9        # all lines but the header and the blank ones at the end
    lines = [{'audio': '0.wav', 'text': 't'}, {'audio': '1.wav', 'text': None}, {'audio': '1.wav'}, {'audio': 7, 'text': 't'}, {'audio': '2.wav', 'text': '\ud83d'}, {'audio': None, 'text': 't'}, [1]]
    path = write(tmp_path / 'odd.jsonl', ''.join(json.dumps(x) + '\n' for x in lines) + '{"audio": \n')
    c = prepare(tmp_path / 'out2', ({'name': 'a', 'path': path},), '--max_reject_share=1')
    assert [(r['line'], r['reason']) for r in rejects(c.path)] == [(2, 'text empty'), (3, 'text empty'), (4, 'field is not a string'), (5, 'not Unicode'),
        (6, 'audio file not found'), (7, 'line is not a JSON object'), (8, 'line is not JSON')] and len(c) == 1
    for first, reason in (('{"audio": \n', 'line is not JSON'), ('[1]\n', 'line is not a JSON object')):      # the first line is one as any other
        c = prepare(tmp_path / f'out_{len(first)}', ({'name': 'a', 'path': write(tmp_path / f'{len(first)}.jsonl', first + '{"audio": "0.wav", "text": "t"}\n')},), '--max_reject_share=0.5')
        assert [(r['line'], r['reason']) for r in rejects(c.path)] == [(1, reason)] and c.rows['line'].tolist() == [2]
    array = ({'name': 'a', 'path': path}, {'name': 'b', 'path': write(tmp_path / 'array.jsonl', '[{"audio": "0.wav", "text": "t"}]\n')})
    assert 'array.jsonl: no line of it is a JSON object' in prepare(tmp_path / 'none', array, '--max_reject_share=1')
    lines = [{'audio': {'bytes': 'abc'}}, {'audio': {'path': 5}}, {'audio': {'path': '0.wav'}}, {'lang': '\ud83d'}, {'lang': 'e\0s'}, {'lang': 7}, {'audio': 'a\0.wav'}, {'audio': 'x' * 5000}, {'text': {}}]
    path = write(tmp_path / 'odder.jsonl', ''.join(json.dumps({'audio': '1.wav', 'text': 't', 'lang': None, **x}) + '\n' for x in lines))
    c = prepare(tmp_path / 'out3', ({'name': 'a', 'path': path, 'columns': {'audio': 'audio', 'text': 'text', 'language': 'lang'}},), '--max_reject_share=1')
    assert [(r['line'], r['reason']) for r in rejects(c.path)] == [(1, 'field is not a string'), (2, 'field is not a string'), (4, 'not Unicode'), (6, 'field is not a string'),
        (7, 'audio file not found'), (8, 'audio file not found'), (9, 'field is not a string')]
    assert [bytes(c.text(i).astype(np.uint8)).decode() for i in range(len(c))] == ['t', 'e s: t']

def test_odd_texts(tmp_path, fake):
    """Each is kept as it should be said, or counted under a reason."""
    speech(tmp_path, n=1)
    kept = {'a\nb': 'a b', ' a \r\n\t b\x07c ': 'a b c', 'a\u2028c\x85': 'a c', '\ufeffa': 'a', '[laughter]': '[laughter]', 'Cafe\u0301': 'Caf\xe9', '\u05e9\u05dc\u05d5\u05dd \u200fa': None,
            '7': '7', '\u4f60\u597d\u3002': None, 'ok \U0001f600': None, '<|end_of_text|>': None, 'x' * 1000: None, '\u0928\u092e\u0938\u094d\u0924\u0947': None, '"quoted" | piped': None}
    dropped = {'': 'text empty', ' \xa0\u3000\n': 'text empty', '\x07\x1b': 'text empty', '?!...': 'text without a letter or digit', '\U0001f600\u2764\ufe0f\u200d': 'text without a letter or digit',
               '\u200b': 'text without a letter or digit', 'a\0b': 'text damaged', 'caf\ufffd': 'text damaged', 'y' * 50000: 'text too long'}
    lines = ''.join(json.dumps({'audio': '0.wav', 'text': t}) + '\n' for t in (*kept, *dropped))
    c = prepare(tmp_path / 'out', ({'name': 'a', 'path': write(tmp_path / 't.jsonl', lines)},), '--max_reject_share=1')
    assert [bytes(c.text(i).astype(np.uint8)).decode() for i in range(len(c))] == [t if said is None else said for t, said in kept.items()]
    assert [r['reason'] for r in rejects(c.path)] == list(dropped.values()) and [r['line'] for r in rejects(c.path)] == list(range(len(kept) + 1, len(kept) + len(dropped) + 1))

def test_ids_that_no_text_may_have(tmp_path, fake):
    """A tokenizer that gives a special id for plain text, and one that gives nothing: counted, never trained on."""
    speech(tmp_path)
    ids = {'start_of_speech': ord('z'), 'end_of_speech': 257, 'start_of_text': 258, 'end_of_text': 259, 'tts_pad': 260}
    source = {'name': 'a', 'path': write(tmp_path / 'a.csv', 'audio,text\n0.wav,zoo\n1.wav,moo\n')}
    c = prepare(tmp_path / 'out', (source,), f'--special_tokens={ids}', '--max_reject_share=1')
    assert len(c) == 1 and [(r['line'], r['reason']) for r in rejects(c.path)] == [(2, 'text holds a special token')]
    from tokenizers import Tokenizer, models
    os.mkdir(tmp_path / 'tok')
    Tokenizer(models.BPE({'m': 0, 'o': 1, **{str(i): i for i in range(2, 7)}}, [])).save(str(tmp_path / 'tok/tokenizer.json'))
    ids = dict(zip(ids, range(2, 7)))
    c = prepare(tmp_path / 'out2', ({'name': 'a', 'path': write(tmp_path / 'b.csv', 'audio,text\n0.wav,xyz\n1.wav,moo\n')},), f'--tokenizer={tmp_path}/tok', f'--special_tokens={ids}', '--max_reject_share=1')
    assert len(c) == 1 and [(r['line'], r['reason']) for r in rejects(c.path)] == [(2, 'text gives no tokens')]

def test_reports(tmp_path, fake, capsys):
    """Hours and tokens a word by source and language, the tags, a picture, rows decoded back to wav."""
    speech(tmp_path, n=4)
    a = write(tmp_path / 'a.csv', 'audio,text,speaker,lang\n0.wav,one two,x,\n1.wav,one,x,FR\n2.wav,three four five,x,fr\n3.wav,..,x,\n')
    a = {'name': 'a', 'path': a, 'language_tag': 'es', 'columns': {'audio': 'audio', 'text': 'text', 'speaker': 'speaker', 'language': 'lang'}}
    c = prepare(tmp_path / 'out', (a, speech(tmp_path, n=4, source='b')), '--picture=True', '--check_rows=3', '--max_reject_share=1')
    assert c.meta['languages'] == ['es', 'fr']
    stats = [(t['source'], t['language'], t['rows'], t['words'], t['tokens']) for t in c.meta['text_stats']]
    assert stats == [('a', 'es', 1, 3, 11), ('a', 'fr', 2, 6, 7 + 19), ('b', '', 4, 12, 4 * 14)]
    assert sum(t['hours'] for t in c.meta['text_stats']) == pytest.approx(c.meta['frames'] * 1024 / 22050 / 3600)
    said = capsys.readouterr().out
    assert 'tokens a word' in said and 'dropped: text without a letter or digit' in said and 'check-6.wav should say: text, number 3' in said
    assert open(tmp_path / 'out/report.png', 'rb').read(4) == b'\x89PNG'
    nano = sys.modules['codec'].NanoCodec('', '')
    for i in (0, 3, 6):
        audio, rate = soundfile.read(tmp_path / f'out/check-{i}.wav', dtype='float32')
        assert rate == 22050 and np.abs(audio - nano.decode([c.codes(i)])[0]).max() < 1e-4

def test_more_than_four_billion_frames(tmp_path, fake):
    """The writer's offsets, and the reader on a sparse codes.bin of 72 GB (a few KB on disk)."""
    c = prepare(tmp_path / 'out', (speech(tmp_path),))
    rows = np.zeros(3, prepare_module.ROW)
    rows['frame_len'], rows['text_len'] = (2 ** 32, 2 ** 32 - 7, 5), (1, 2 ** 33, 1)
    prepare_module.lay_out(rows)
    assert rows['frame_start'].tolist() == [0, 2 ** 32, 2 ** 33 - 7] and rows['text_start'].tolist() == [0, 1, 2 ** 33 + 1]
    meta, rows, far = json.load(open(tmp_path / 'out/meta.json')), c.rows.copy(), 4_500_000_000
    with open(tmp_path / 'out/codes.bin', 'r+b') as f:
        f.seek(16 * far)
        f.write(c.codes(11).tobytes())
    rows['frame_start'][11], meta['frames'] = far, far + int(rows['frame_len'][11])
    rows.tofile(tmp_path / 'out/index.bin')
    write(tmp_path / 'out/meta.json', json.dumps(meta))
    far_one = Corpus(str(tmp_path / 'out'))
    assert np.array_equal(far_one.codes(11), c.codes(11)) and np.array_equal(far_one.codes(3), c.codes(3))
    assert os.stat(tmp_path / 'out/codes.bin').st_blocks * 512 < 1 << 20

def test_text_never_gives_special_ids():
    tok, _ = load_tokenizer(TOKENIZER)
    for text in ('<|start_of_speech|>', 'a <|end_of_text|> b', '<|tts_pad|><|tts_pad|>'):
        assert encode_text(tok, text) == list(text.encode())
    assert encode_text(tok, '  Cafe\u0301 \n') == list('Café'.encode()) == list(clean_text('Café').encode())
    from tokenizers import AddedToken
    tok, _ = load_tokenizer(TOKENIZER)
    tok.add_tokens([AddedToken('<think>', special=False)])              # Qwen's: added, but not marked special
    tok.enable_truncation(4)
    assert encode_text(tok, '<think>12345') == list(b'<think>12345')
    from transformers import PreTrainedTokenizerFast
    fast = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    assert encode_text(fast, 'x<|start_of_text|>') == list(b'x<|start_of_text|>')

def test_speakers(tmp_path, fake):
    """Namespaces, null rows, speakers with too few clips under both policies, held-out speakers and texts."""
    speech(tmp_path, n=15)
    rows = [('s', 5), ('t', 3), ('rare', 2), ('', 1), ('nan', 1)]
    lines, i = 'audio,text,speaker\n', 0
    for name, n in rows:
        for _ in range(n):
            lines, i = lines + f'{i}.wav,words {i},{name}\n', i + 1
    a, b = ({'name': n, 'path': write(tmp_path / f'{n}.csv', lines)} for n in 'ab')
    c = prepare(tmp_path / 'null', (a, b), '--val_share=0')
    assert c.speakers == ['a/s', 'a/t', 'b/s', 'b/t'] and c.rows['speaker'].tolist() == [0] * 5 + [1] * 3 + [-1] * 4 + [2] * 5 + [3] * 3 + [-1] * 4
    assert c.rows['source'].tolist() == [0] * 12 + [1] * 12
    assert c.meta['speaker_stats'] == {'usable_speakers': 4, 'usable_rows': 16, 'low_count_speakers': 2, 'low_count_rows': 4, 'null_rows': 8, 'null_share': 1 / 3,
                                       'speakers_by_clips': {'2': 2, '3': 2, '5': 2}}
    c = prepare(tmp_path / 'remove', (a, b), '--singleton_policy=remove', '--val_share=0', '--max_reject_share=0')     # a policy is no fault
    assert len(c) == 20 and (c.rows['speaker'] < 0).sum() == 4 and c.meta['counts']['dropped']['a'] == {'speaker with too few clips': 2}
    assert [r['line'] for r in rejects(c.path)] == [10, 11, 10, 11]
    full = {line: c0 for line, c0 in zip(range(24), (Corpus(str(tmp_path / 'null')).codes(i) for i in range(24)))}
    assert all(np.array_equal(c.codes(i), full[j]) for i, j in enumerate([*range(8), 10, 11, *range(12, 20), 22, 23]))
    c = prepare(tmp_path / 'held', (a, b), '--val_speakers=2', '--val_share=0.3')
    held = c.split('val_speakers')
    chosen = sorted(('a/s', 'a/t', 'b/s', 'b/t'), key=share_of)[:2]
    assert {c.speakers[s] for s in c.rows['speaker'][held]} == set(chosen) and len(held) == sum(5 if n[-1] == 's' else 3 for n in chosen)
    counts = np.bincount(c.rows['speaker'][c.split('train')][c.rows['speaker'][c.split('train')] >= 0], minlength=len(c.speakers))
    assert all(n == 0 or n >= 3 for n in counts)                        # a speaker in training has K clips there
    texts = lambda name: {c.text(i).tobytes() for i in c.split(name)}
    assert texts('val') and not texts('val') & texts('train')
    assert len(c.split('train')) + len(c.split('val')) + len(held) == 24
    c = prepare(tmp_path / 'jsonl', ({'name': 'j', 'path': write(tmp_path / 'j.jsonl', ''.join(json.dumps({'audio': f'{i}.wav', 'text': 'x', 'speaker': s}) + '\n'
                for i, s in enumerate((7, '7', None, float('nan'), '', 'Ann', ' Ann ', 7.0, 'None', 'nan', 'Nan', 'Nan', 'NULL', '\t'))))},), '--min_clips_per_speaker=2', '--val_share=0')
    assert c.speakers == ['j/7', 'j/Ann', 'j/Nan'] and c.rows['speaker'].tolist() == [0, 0, -1, -1, -1, 1, 1, 0, -1, -1, 2, 2, -1, -1]

def test_clips_of_a_speaker_are_counted_after_filters(tmp_path, fake):
    """Three rows each, but one is silent, missing, too long, without words, a duplicate: no speaker of them is usable."""
    speech(tmp_path, n=21)
    soundfile.write(tmp_path / '2.wav', np.zeros(6000, np.float32), 22050)
    os.remove(tmp_path / '5.wav')
    soundfile.write(tmp_path / '8.wav', tone(22050 * 2), 22050)
    lines = [f'{i}.wav,words {i},s{i // 3}' for i in range(21)]
    lines[11], lines[14], lines[17] = '11.wav,...,s3', lines[13], f"17.wav,{'x' * 50},s5"
    source = {'name': 'a', 'path': write(tmp_path / 'b.csv', '\n'.join(['audio,text,speaker', *lines]))}
    for policy, n in (('null_prefix', 15), ('remove', 3)):
        c = prepare(tmp_path / policy, (source,), '--max_reject_share=1', '--val_share=0', '--max_seconds=1.5', '--max_text_tokens=40', f'--singleton_policy={policy}')
        assert len(c) == n and c.speakers == ['a/s6'] and (c.rows['speaker'] == 0).sum() == 3
        assert c.meta['speaker_stats']['low_count_speakers'] == 6 and c.meta['speaker_stats']['speakers_by_clips'] == {'2': 6, '3': 1}
    assert c.meta['counts']['dropped']['a'] == {'audio file not found': 1, 'audio silent': 1, 'audio too long': 1, 'duplicate row': 1, 'speaker with too few clips': 12,
                                                'text too long': 1, 'text without a letter or digit': 1}

def test_golden_language_tag_and_speaker_names(tmp_path, fake):
    """golden/row.json: tag before the text in small letters; rare speakers become null rows, other names get the source's prefix."""
    golden = os.environ.get('GOLDEN_DIR', os.path.join(ROOT, 'tests/data/golden'))
    if not os.path.exists(os.path.join(golden, 'row.json')):
        pytest.skip(f'no row.json in {golden}')
    golden = json.load(open(os.path.join(golden, 'row.json')))
    tag, text, given = (golden['language_tag'][k] for k in ('tag', 'text', 'string_given_to_tokenizer'))
    speech(tmp_path)
    lines = f'audio,text,speaker,lang\n0.wav,{text},x,\n1.wav,{text},x,FR\n2.wav,{text},x,\n3.wav,{text},rare,\n4.wav,{text},__null_ref__,\n'
    source = {'name': 'ab12', 'path': write(tmp_path / 'g.csv', lines), 'language_tag': tag, 'columns': {'audio': 'audio', 'text': 'text', 'speaker': 'speaker', 'language': 'lang'}}
    c = prepare(tmp_path / 'out', (source,), '--val_share=0')
    said = [bytes(c.text(i).astype(np.uint8)).decode() for i in range(5)]
    assert said == [given, f'fr: {text}', given, given, given] and c.meta['sources'][0]['language_tag'] == tag
    for case in golden['speaker_id_rewrite']['cases']:
        if case['singleton_policy'] == 'null_prefix' and case['speaker_prefix']:
            row = {'x': 0, 'rare': 3, '__null_ref__': 4}[case['speaker_in']]
            got = c.rows['speaker'][row]
            assert ('__null_ref__' if got < 0 else c.speakers[got].replace('/', '_')) == case['speaker_out']

def test_same_bytes_in_any_way_it_is_run(tmp_path, fake):
    source = speech(tmp_path / 'in', n=30)
    one = files(prepare(tmp_path / 'one', (source,)).path)
    assert files(prepare(tmp_path / 'two', (source,), '--unit_rows=7', '--batch_seconds=0.5').path) == one
    # in a process of its own, as a user runs it, with workers; killed in the midst of it, twice, and run again
    flags = [f'--out_dir={tmp_path}/three', f'--sources={(source,)!r}', '--codec=fake', '--device=cpu', f'--tokenizer={TOKENIZER}', '--special_tokens={}', '--picture=False', '--check_rows=0', '--unit_rows=4', '--num_workers=2']
    script, done = script_with_fake_codec(tmp_path / 'bin'), []
    for kill_at in ('3', '-4', ''):
        run = subprocess.run([sys.executable, script, *flags], env={**os.environ, 'KILL_AT': kill_at}, capture_output=True, text=True, timeout=60)
        assert run.returncode == {'3': -signal.SIGKILL, '-4': 2, '': 0}[kill_at], run.stderr
        assert kill_at != '-4' or run.stderr == f'prepare.py: stopped; started again it goes on (in {tmp_path}/three.building)\n'
        if kill_at:
            assert not os.path.exists(tmp_path / 'three')
            done.append(sum(f.startswith('unit-') and f.endswith('.npz') for f in os.listdir(tmp_path / 'three.building')))
            if len(done) == 1:
                write(tmp_path / 'three.building/unit-4-000005.npz.tmp', b'half a unit')
    assert done == [2, 5] and '8 units of 4 rows, 5 of them done before' in run.stdout
    assert files(tmp_path / 'three') == one

def test_audio_is_read_while_the_codec_encodes(tmp_path, fake, monkeypatch):
    """Whoever encodes a unit waits here for a clip of the next one to be opened: without reading ahead it would wait for nothing."""
    source, opened, ahead = speech(tmp_path / 'in'), [], []
    real, encode = soundfile.SoundFile.__init__, sys.modules['codec'].NanoCodec.encode
    def watched(self, file, *a, **k):
        opened.append(file)
        real(self, file, *a, **k)
    def slow(self, clips):
        begin = time.time()
        while len(opened) <= 4 * (len(ahead) + 1) and len(ahead) < 2 and time.time() - begin < 5:
            time.sleep(0.01)
        ahead.append(len(opened) > 4 * (len(ahead) + 1))
        return encode(self, clips)
    monkeypatch.setattr(soundfile.SoundFile, '__init__', watched)
    monkeypatch.setattr(sys.modules['codec'].NanoCodec, 'encode', slow)
    prepare(tmp_path / 'out', (source,), '--unit_rows=4')
    assert ahead == [True, True, False] and len(opened) == 12

def test_killed_at_any_write_it_goes_on(tmp_path, fake, monkeypatch):
    """Every write to the disk, every rename and the last removal, in turn, is where it dies. In out_dir is the old corpus, none, or the new one, never a part of one."""
    source, out = speech(tmp_path / 'in'), tmp_path / 'out'
    flags = ('--val_share=0.3', '--unit_rows=5', '--overwrite')
    new, old = files(prepare(tmp_path / 'new', (source,), *flags).path), files(prepare(tmp_path / 'old', (source,)).path)
    real, left = {kind: getattr(os, kind) for kind in ('fsync', 'rename', 'replace', 'rmdir')}, [0]
    def die(kind, *a, **k):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        real[kind](*a, **k)
    for kind in real:
        monkeypatch.setattr(os, kind, lambda *a, kind=kind, **k: die(kind, *a, **k))
    # settings, 3 units: 2 each; codes, text, rejects; index, meta: 2 each; the old corpus away, the new one in its place, the old one's folder and the build's removed
    for kill_at in range(1, 20):
        left[0] = -1
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / 'old', out)
        left[0] = kill_at
        with pytest.raises(KeyboardInterrupt):
            prepare(out, (source,), *flags)
        if os.path.exists(f'{out}.building/lock'):      # a dead process lets go of its lock; this one lives on
            os.remove(f'{out}.building/lock')
        assert kill_at == 17 and not os.path.exists(out) or files(out) == (new if kill_at > 17 else old)
        assert files(prepare(out, (source,), *flags).path) == new
        assert sorted(os.listdir(tmp_path)) == ['in', 'new', 'old', 'out']
    shutil.rmtree(out)
    shutil.copytree(tmp_path / 'old', out)
    left[0] = 20
    prepare(out, (source,), *flags)
    assert left[0] == 1                 # there are no more than these 19

def test_nothing_of_other_settings_is_left_by_a_kill_in_the_last_act(tmp_path, fake):
    """Its folder is being removed, the settings are gone, units are not. They are of other settings now: encoded again."""
    source, out = speech(tmp_path / 'in'), tmp_path / 'out'
    want = files(prepare(tmp_path / 'want', (source,)).path)
    assert 'no row is left: 12 of 12 rows are bad' in prepare(out, (source,), '--max_text_tokens=3')
    for name in ('settings.json', 'lock'):
        os.remove(tmp_path / 'out.building' / name)
    assert files(prepare(out, (source,)).path) == want

def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, fake):
    """A file-size limit stands for the disk: reached by a unit, and by the corpus when the units are done."""
    source = speech(tmp_path / 'in', n=30)
    want = files(prepare(tmp_path / 'want', (source,)).path)
    argv = [sys.executable, script_with_fake_codec(tmp_path / 'bin'), f'--out_dir={tmp_path}/out', f'--sources={(source,)!r}', '--codec=fake', '--device=cpu', f'--tokenizer={TOKENIZER}', '--special_tokens={}',
            '--picture=False', '--check_rows=0', '--unit_rows=2']
    whole = len(want['codes.bin'])
    for limit, done in ((2000, range(1, 15)), (whole - 1000, (15,)), (1 << 30, ())):
        run = subprocess.run(argv, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        if done:
            assert run.returncode == 2 and run.stderr == f'prepare.py: [Errno 27] File too large (in {tmp_path}/out.building)\n' and not os.path.exists(tmp_path / 'out')
            assert len([f for f in os.listdir(tmp_path / 'out.building') if f.endswith('.npz')]) in done
    assert run.returncode == 0 and '15 of them done before' in run.stdout and files(tmp_path / 'out') == want

def test_other_settings_are_refused_by_name(tmp_path, fake, capsys):
    source, out = speech(tmp_path / 'in'), tmp_path / 'out'
    before = files(prepare(out, (source,)).path)
    prepare(out, (source,), '--num_workers=0', '--batch_seconds=9')
    assert 'nothing to do' in capsys.readouterr().out
    assert 'max_seconds: 40.0 there, 30.0 now' in prepare(out, (source,), '--max_seconds=30')
    assert "sources[0].name: 'a' there, 'b' now" in prepare(out, ({**source, 'name': 'b'},))
    table = open(source['path']).read()
    write(tmp_path / 'in/table.csv', table.replace('number 3', 'number three'))
    assert 'table_hashes.a' in prepare(out, (source,)) and files(out) == before
    c = prepare(out, (source,), '--overwrite')
    assert bytes(c.text(3).astype(np.uint8)).decode() == 'text, number three'
    assert sorted(f for f in os.listdir(tmp_path)) == ['in', 'out']
    os.mkdir(tmp_path / 'mine')
    write(tmp_path / 'mine/thesis.txt', 'x')
    for meta in (None, '{"settings": {}, "magic": "another"}', '[1]', '{'):
        if meta:
            write(tmp_path / 'mine/meta.json', meta)
        assert 'files that are not a corpus' in prepare(tmp_path / 'mine', (source,), '--overwrite') and os.path.exists(tmp_path / 'mine/thesis.txt')
    for spoil in (lambda: os.truncate(out / 'codes.bin', 9), lambda: os.remove(out / 'codes.bin')):
        spoil()
        said = prepare(out, (source,))
        assert 'codes.bin' in said and '--overwrite makes it anew' in said and said.count('\n') == 1
    assert files(prepare(out, (source,), '--overwrite').path) == files(c.path)

def test_too_many_bad_rows_fail_the_run_and_lose_nothing(tmp_path, fake):
    source = speech(tmp_path / 'in')
    os.remove(tmp_path / 'in/3.wav')
    said = prepare(tmp_path / 'out', (source,), '--unit_rows=5')
    assert '1 of 12 rows are bad (8.3%), max_reject_share is 5.0%' in said and not os.path.exists(tmp_path / 'out')
    assert rejects(tmp_path / 'out.building/corpus')[0]['line'] == 5
    os.remove(tmp_path / 'out.building/lock')       # a process that ended lets go of its lock; this one lives on
    calls = sys.modules['codec'].NanoCodec.calls
    assert len(prepare(tmp_path / 'out', (source,), '--unit_rows=5', '--max_reject_share=0.1')) == 11
    assert sys.modules['codec'].NanoCodec.calls == calls                # nothing was encoded twice

def test_what_only_the_join_needs_may_change_on_the_way(tmp_path, fake):
    """Too many held-out speakers are known at the end. Other ones are joined from the units that are there; what a unit depends on is refused."""
    source, out = speech(tmp_path / 'in'), tmp_path / 'out'
    want = files(prepare(tmp_path / 'want', (source,), '--val_speakers=1', '--val_share=0.2', '--singleton_policy=remove', '--min_clips_per_speaker=2').path)
    assert 'only 3 speakers' in prepare(out, (source,), '--val_speakers=9')
    assert 'out.building was made with other settings (max_seconds: 40.0 there, 30.0 now)' in prepare(out, (source,), '--max_seconds=30')
    os.remove(tmp_path / 'out.building/lock')
    calls = sys.modules['codec'].NanoCodec.calls
    assert files(prepare(out, (source,), '--val_speakers=1', '--val_share=0.2', '--singleton_policy=remove', '--min_clips_per_speaker=2').path) == want
    assert sys.modules['codec'].NanoCodec.calls == calls
    assert 'val_speakers: 1 there, 0 now' in prepare(out, (source,), '--val_share=0.2', '--singleton_policy=remove', '--min_clips_per_speaker=2')

def test_a_source_can_be_mended_before_anything_is_encoded(tmp_path, fake):
    """What was wrong with the columns is put right under the same name: no unit was there to lose."""
    speech(tmp_path)
    source = {'name': 'a', 'path': write(tmp_path / 'a.csv', 'file,sentence\n0.wav,one\n1.wav,two\n')}
    assert "no column 'audio', 'text'" in prepare(tmp_path / 'out', (source,)) and os.path.exists(tmp_path / 'out.building/settings.json')
    os.remove(tmp_path / 'out.building/lock')       # a process that ended lets go of its lock; this one lives on
    assert len(prepare(tmp_path / 'out', (source | {'columns': {'audio': 'file', 'text': 'sentence'}},))) == 2

def test_a_corpus_without_a_row_to_train_on_is_refused(tmp_path, fake):
    """Known at the join, by the settings' names. Other ones are joined from the units that are there."""
    source, out = speech(tmp_path / 'in'), tmp_path / 'out'
    got = prepare(out, (source,), '--val_share=0.999')
    assert 'no row is left to train on: val_share 0.999 and val_speakers 0 hold out all 12' in got and got.count('\n') == 1 and not os.path.exists(out)
    os.remove(tmp_path / 'out.building/lock')       # a process that ended lets go of its lock; this one lives on
    calls = sys.modules['codec'].NanoCodec.calls
    assert len(prepare(out, (source,), '--val_share=0.5').split('train')) and sys.modules['codec'].NanoCodec.calls == calls

def test_reader_names_what_is_wrong(tmp_path, fake):
    good = prepare(tmp_path / 'out', (speech(tmp_path / 'in'),)).path
    with pytest.raises(FileNotFoundError, match='no corpus here'):
        Corpus(str(tmp_path))
    for name, change, said in (
            ('codes.bin', lambda b: b[:-16], 'codes.bin: .* truncated'), ('text.bin', lambda b: b[:-1], 'text.bin: .* truncated'), ('index.bin', lambda b: b + b'\0', 'index.bin: .* truncated'),
            ('meta.json', lambda b: b.replace(b'nanogepard-corpus', b'other'), "magic 'other'"), ('meta.json', lambda b: b.replace(b'"version": 1', b'"version": 2', 1), 'version 2'),
            ('meta.json', lambda b: b[:100], 'meta.json: not JSON'), ('index.bin', lambda b: (10 ** 6).to_bytes(8, 'little') + b[8:], 'row 0: text 1000000')):
        shutil.copytree(good, tmp_path / 'bad', dirs_exist_ok=True)
        data = (tmp_path / 'bad' / name).read_bytes()
        write(tmp_path / 'bad' / name, change(data))
        with pytest.raises(ValueError, match=said):
            Corpus(str(tmp_path / 'bad'))
    shutil.copytree(good, tmp_path / 'bad', dirs_exist_ok=True)
    data = (tmp_path / 'bad/codes.bin').read_bytes()
    write(tmp_path / 'bad/codes.bin', (2016).to_bytes(2, 'little') + data[2:])
    with pytest.raises(ValueError, match='row 0 has code 2016'):
        Corpus(str(tmp_path / 'bad')).codes(0)
    with pytest.raises(ValueError):
        Corpus(good).split('test')

def test_real_codec(tmp_path):
    """The offline codec through NeMo, as `python prepare.py` runs it: the batch changes no code, and the codes are those of the clip alone."""
    nemo = os.path.join(ROOT, 'assets/tiny/codec.nemo')
    pytest.importorskip('nemo', reason='NeMo is not installed')
    source = speech(tmp_path / 'in', n=6)
    flags = [f'--codec={nemo}', '--val_share=0']
    c = prepare(tmp_path / 'one', (source,), *flags)
    assert files(prepare(tmp_path / 'two', (source,), *flags, '--batch_seconds=0.3', '--unit_rows=4').path) == files(c.path)
    from codec import NanoCodec
    nano = NanoCodec(nemo)
    for i in range(6):
        assert np.array_equal(c.codes(i), nano.encode([read_audio(str(tmp_path / f'in/{i}.wav'), 22050)])[0])
    assert len(nano.decode([c.codes(0)])[0]) == 1024 * len(c.codes(0))

def test_help_is_the_config_block(capsys, tmp_path):
    prepare_help = subprocess.run([sys.executable, SCRIPT, '--help'], capture_output=True, text=True).stdout
    assert 'val_share = 0.01' in prepare_help and 'language_tag' in prepare_help and 'class Corpus' not in prepare_help

def test_a_terminal_without_the_letters(tmp_path, fake):
    source = ({**speech(tmp_path / 'in'), 'name': 'na\u00efve'},)
    (tmp_path / 'in/table.csv').write_text('audio,text\n0.wav,\u05e9\u05dc\u05d5\u05dd\n', encoding='utf-8')
    argv = [f'--out_dir={tmp_path}/out', f'--sources={source!r}', '--codec=fake', '--device=cpu', f'--tokenizer={TOKENIZER}', '--special_tokens={}', '--picture=False']
    run = subprocess.run([sys.executable, script_with_fake_codec(tmp_path / 'bin'), *argv], capture_output=True, env={**os.environ, 'PYTHONIOENCODING': 'ascii'})
    assert not run.returncode and b'check-0.wav should say: \\u05e9' in run.stdout, run.stderr
    assert len(Corpus(f'{tmp_path}/out')) == 1

def test_a_link_to_another_disk_stays_one(tmp_path, fake):
    source = speech(tmp_path / 'in')
    os.makedirs(tmp_path / 'big')
    os.symlink(tmp_path / 'big/corpus', tmp_path / 'out')       # of a folder that is not there yet, then of a corpus
    for flags in ((), ('--val_share=0.5', '--overwrite')):
        assert len(prepare(tmp_path / 'out', (source,), *flags)) == 12
        assert os.path.islink(tmp_path / 'out') and os.listdir(tmp_path / 'big') == ['corpus']

def test_user_errors_are_one_line(tmp_path, fake):
    speech(tmp_path)
    source = ({'name': 'a', 'path': str(tmp_path / 'table.csv')},)
    assert 'out_dir: a folder' in prepare('', source)
    assert '/proc/nowhere' in prepare('/proc/nowhere/x', source)
    os.makedirs(tmp_path / 'busy.building')
    with open(tmp_path / 'busy.building' / 'lock', 'w') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert 'another prepare.py is building' in prepare(tmp_path / 'busy', source)
    assert len(prepare(tmp_path / 'busy', source)) == 12            # the lock went with its holder

def test_a_codec_that_is_none_is_one_line(tmp_path):
    speech(tmp_path)
    (tmp_path / 'x.nemo').write_text('not a codec')
    said = prepare(tmp_path / 'out', ({'name': 'a', 'path': str(tmp_path / 'table.csv')},), f'--codec={tmp_path}/x.nemo')
    assert said.count('\n') == 1 and 'x.nemo' in said and said.startswith('prepare.py: codec')
