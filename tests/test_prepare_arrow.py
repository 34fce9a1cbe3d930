"""pytest tests/test_prepare_arrow.py          parquet and Hugging Face sources, tokenized and audio; seconds on CPU"""
import io, json, os, resource, shutil, subprocess, sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from prepare import Corpus, clean_text
from test_prepare import ROOT, TOKENIZER, fake, files, prepare, rejects, speech, tone, write      # noqa: F401

LAYERS = [f'nano_layer_{k}' for k in range(1, 9)]

def tokens(n, seed=0, frames=(5, 40)):
    """A table in the published form, and the codes of each row."""
    rng = np.random.default_rng(seed)
    codes = [rng.integers(0, 2016, (rng.integers(*frames), 8)) for _ in range(n)]
    columns = {f'nano_layer_{k + 1}': [c[:, k].tolist() for c in codes] for k in range(8)}
    return {**columns, 'encoded_len': [len(c) for c in codes], 'text': [f'text, number {i}' for i in range(n)], 'speaker': [f's{i % 3}' for i in range(n)]}, codes

def said(c, i):
    return bytes(c.text(i).astype(np.uint8)).decode()

def test_tokenized_sources_of_every_form_give_the_same_corpus(tmp_path, fake):
    """Parquet (many row groups, a folder), save_to_disk, lists of other types, renamed columns. No codec is made."""
    datasets = pytest.importorskip('datasets')
    columns, codes = tokens(60)
    table = pa.table(columns)
    os.makedirs(tmp_path / 'folder/deep')
    pq.write_table(table, tmp_path / 'one.parquet')
    pq.write_table(table, tmp_path / 'groups.parquet', row_group_size=7)
    pq.write_table(table.slice(0, 25), tmp_path / 'folder/a.parquet', row_group_size=10)
    pq.write_table(table.slice(25), tmp_path / 'folder/deep/b.parquet')
    narrow = table
    for k, name in enumerate(LAYERS):
        kind = (pa.list_(pa.int16()), pa.large_list(pa.int64()), pa.list_(pa.uint16()), pa.list_(pa.int32()))[k % 4]
        narrow = narrow.set_column(narrow.column_names.index(name), name, narrow[name].cast(kind))
    pq.write_table(narrow, tmp_path / 'types.parquet')
    pq.write_table(table.rename_columns([n.replace('nano_layer_', 'c').replace('text', 'sentence') for n in table.column_names]), tmp_path / 'renamed.parquet')
    data = datasets.Dataset(table)
    data.save_to_disk(str(tmp_path / 'disk'))
    datasets.DatasetDict(train=data.select([0]), dev=data).save_to_disk(str(tmp_path / 'dict'))
    first = None
    for path, more in (('one.parquet', {}), ('groups.parquet', {}), ('folder', {}), ('types.parquet', {}), ('renamed.parquet', {'columns': {'layers': 'c', 'text': 'sentence'}}),
                       ('disk', {}), ('dict', {'split': 'dev'})):
        for flags in ((), ('--unit_rows=1',)):
            c = prepare(tmp_path / f'out_{path}_{len(flags)}', ({'name': 'a', 'path': str(tmp_path / path), **more},), '--val_share=0.2', *flags)
            assert not isinstance(c, str), c
            got = {k: v for k, v in files(c.path).items() if k.endswith('.bin')}
            first = first or got
            assert got == first, path
    assert len(c) == 60 and c.speakers == ['a/s0', 'a/s1', 'a/s2'] and c.rows['line'].tolist() == list(range(1, 61))
    assert all(np.array_equal(c.codes(i), codes[i]) and said(c, i) == f'text, number {i}' for i in range(60))
    assert sys.modules['codec'].NanoCodec.calls == 0
    monkey = lambda name, subset, split, streaming, revision=None: (name, subset, split, streaming, revision) == ('someone/speech', 'es', 'train', False, None) and data
    datasets.load_dataset, real = monkey, datasets.load_dataset     # a Hub name: the same call, without the Hub
    try:
        c = prepare(tmp_path / 'hub', ({'name': 'a', 'path': 'someone/speech', 'kind': 'hf', 'subset': 'es', 'max_rows': 10},))
    finally:
        datasets.load_dataset = real
    assert len(c) == 10 and np.array_equal(c.codes(9), codes[9])

def test_streaming_gives_the_same_corpus(tmp_path, fake, monkeypatch):
    """The Hub's path, on local folders of parquet: tokens, and an Audio column that is never decoded by datasets. Unknown sizes are counted."""
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    columns, codes = tokens(3000, frames=(5, 9))
    os.makedirs(tmp_path / 'tokens')
    pq.write_table(pa.table(columns).slice(0, 1700), tmp_path / 'tokens/train-0.parquet')
    pq.write_table(pa.table(columns).slice(1700), tmp_path / 'tokens/train-1.parquet')
    speech(tmp_path / 'in')
    sounds = datasets.Dataset.from_dict({'audio': [str(tmp_path / f'in/{i}.wav') for i in range(12)], 'text': [f'text, number {i}' for i in range(12)]})
    os.makedirs(tmp_path / 'sounds')
    sounds.cast_column('audio', datasets.Audio(decode=False)).cast_column('audio', datasets.Audio()).to_parquet(str(tmp_path / 'sounds/train-0.parquet'))
    for name, n in (('tokens', 3000), ('sounds', 12)):
        plain = {'name': 'a', 'path': str(tmp_path / name)}
        want = files(prepare(tmp_path / f'{name}_plain', (plain,), '--unit_rows=50').path)
        stream = {**plain, 'kind': 'hf', 'streaming': True}
        for unit_rows in (256, 7):
            c = prepare(tmp_path / f'{name}_{unit_rows}', (stream,), f'--unit_rows={unit_rows}')
            assert not isinstance(c, str), c
            assert len(c) == n and {k: v for k, v in files(c.path).items() if k.endswith('.bin')} == {k: v for k, v in want.items() if k.endswith('.bin')}
    assert len(prepare(tmp_path / 'some', ({**stream, 'max_rows': 5},))) == 5
    real = datasets.load_dataset                    # killed after three units: it goes on where it was, without what is before
    flags = ('--unit_rows=3', '--val_share=0')
    want = files(prepare(tmp_path / 'whole', (stream,), *flags).path)
    monkeypatch.setattr(sys.modules['codec'].NanoCodec, 'encode', lambda self, clips, real=sys.modules['codec'].NanoCodec.encode: real(self, clips) if self.calls < 10 ** 9 else 1 / 0)
    sys.modules['codec'].NanoCodec.calls = 10 ** 9 - 3
    with pytest.raises(ZeroDivisionError):
        prepare(tmp_path / 'cut', (stream,), *flags)
    sys.modules['codec'].NanoCodec.calls = 0
    assert len([f for f in os.listdir(tmp_path / 'cut.building') if f.endswith('.npz')]) == 3
    os.remove(tmp_path / 'cut.building/lock')       # a dead process lets go of its lock; this one lives on
    assert files(prepare(tmp_path / 'cut', (stream,), *flags).path) == want
    def short(*a, **k):                             # fewer than the Hub had said
        data = real(*a, **k).take(5)
        data.info.splits = datasets.SplitDict({'train': datasets.SplitInfo('train', num_examples=9)})
        return data
    monkeypatch.setattr(datasets, 'load_dataset', short)
    assert 'it ended before row 9; 9 rows were promised' in prepare(tmp_path / 'short', (stream,))

@pytest.mark.parametrize('path', ('now', 'someone/speech'))
def test_a_streamed_source_that_changes_is_refused(tmp_path, fake, monkeypatch, path):
    """A folder, and a Hub name whose commits are folders here. Killed after two units: over other data neither the build nor then the corpus is taken for the same."""
    datasets, hub = pytest.importorskip('datasets'), pytest.importorskip('huggingface_hub')
    monkeypatch.chdir(tmp_path)
    for name in ('old', 'new'):
        os.mkdir(name)
        columns, _ = tokens(60)
        pq.write_table(pa.table({**columns, 'text': [f'{name} {t}' for t in columns['text']]}), f'{name}/train-0.parquet')
    def turn(to):
        shutil.rmtree('now', ignore_errors=True)
        shutil.copytree(to, 'now')
        commit[:] = [to]
    commit, opened, load, savez = [], [], datasets.load_dataset, np.savez
    monkeypatch.setattr(hub, 'HfApi', lambda: SimpleNamespace(dataset_info=lambda name: SimpleNamespace(sha=commit[0]) if name == path else 1 / 0))
    monkeypatch.setattr(datasets, 'load_dataset', lambda name, *a, revision=None, **k: opened.append(revision) or load(name if name == 'now' else revision or commit[0], *a, **k))
    args = (tmp_path / 'out', ({'name': 'a', 'path': path, 'kind': 'hf', 'streaming': True},), '--unit_rows=1')
    def die(f, **k):
        savez(f, **k)
        if len([n for n in os.listdir('out.building') if n.endswith('.npz')]) == 1:
            raise KeyboardInterrupt             # in the second
    turn('old')
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(np, 'savez', die)
        prepare(*args)
    os.remove('out.building/lock')              # a dead process lets go of its lock; this one lives on
    turn('new')
    assert 'out.building was made with other settings (table_hashes.a: ' in prepare(*args)
    turn('old')
    c = prepare(*args)
    assert [said(c, i) for i in range(len(c))] == [f'old text, number {i}' for i in range(60)]
    turn('new')
    assert 'out was made with other settings (table_hashes.a: ' in prepare(*args)
    assert set(opened) == ({None} if path == 'now' else {None, 'old', 'new'})       # None: for the sizes alone
    os.remove('now/train-0.parquet')
    write(tmp_path / 'now/train-0.jsonl', json.dumps({k: v[0] for k, v in columns.items()}))
    assert path != 'now' or 'now: no .parquet file in it' in prepare(*args)

def test_a_missing_package_is_one_line(tmp_path, fake, monkeypatch):
    pq.write_table(pa.table(tokens(3)[0]), tmp_path / 'a.parquet')
    for package, source in (('datasets', {'path': 'someone/speech', 'kind': 'hf', 'streaming': True}), ('pyarrow.parquet', {'path': str(tmp_path / 'a.parquet')})):
        with monkeypatch.context() as m:
            m.setitem(sys.modules, package, None)
            got = prepare(tmp_path / 'out', ({'name': 'a', **source},))
        assert f"source 'a': " in got and f"pip install {package.split('.')[0]}" in got and got.count('\n') == 1

def test_disk_beside_the_reference_layout(tmp_path, fake):
    """Bytes an hour of audio: ours, and 32 input + 32 label channels of int64 in Arrow, both measured on 500 rows of 3 to 15 s."""
    columns, codes = tokens(500, frames=(65, 323))
    pq.write_table(pa.table(columns), tmp_path / 'a.parquet')
    c = prepare(tmp_path / 'out', ({'name': 'a', 'path': str(tmp_path / 'a.parquet')},))
    hours = sum(map(len, codes)) * 1024 / 22050 / 3600
    ours = sum(os.path.getsize(tmp_path / 'out' / f) for f in ('codes.bin', 'text.bin', 'index.bin'))
    channels = np.concatenate([c.codes(i) for i in range(len(c))]).astype(np.int64)
    lists = lambda x: pa.ListArray.from_arrays(pa.array(np.cumsum([0, *map(len, codes)]), pa.int32()), pa.array(x))
    wide = pa.table({f'{what}_{d}': lists(channels[:, d // 4]) for what in ('input', 'label') for d in range(32)})
    with pa.OSFile(str(tmp_path / 'wide.arrow'), 'wb') as f, pa.ipc.new_stream(f, wide.schema) as w:
        w.write_table(wide)
    theirs = os.path.getsize(tmp_path / 'wide.arrow')
    print(f'{hours:.2f} hours: {ours / hours / 1e6:.2f} MB an hour, reference layout {theirs / hours / 1e6:.1f} MB, {theirs / ours:.1f} times as much')
    assert 1.24e6 < ours / hours < 1.4e6 and theirs / hours > 64 * 8 * 77519 and theirs > 29 * ours

def test_wrong_tokens_are_named_and_counted(tmp_path, fake):
    columns, codes = tokens(14)
    bad = {1: 'tokens missing', 2: 'layers of different lengths', 3: 'encoded_len disagrees', 4: 'token out of range', 5: 'token out of range', 6: 'token out of range',
           7: 'text empty', 8: 'audio too short', 9: 'audio too long', 10: 'encoded_len disagrees', 12: 'duplicate row'}
    columns['nano_layer_3'][1] = None
    columns['nano_layer_4'][2] = columns['nano_layer_4'][2][:-1]
    columns['encoded_len'][3] += 1
    columns['nano_layer_8'][4][2] = 2016
    columns['nano_layer_1'][5][0] = -1
    columns['nano_layer_2'][6][3] = None
    columns['text'][7] = None
    for name in LAYERS:
        columns[name][8], columns[name][9], columns[name][12] = [], [7] * 900, columns[name][11]
    columns['encoded_len'][8], columns['encoded_len'][9], columns['encoded_len'][10], columns['encoded_len'][12] = 0, 900, None, columns['encoded_len'][11]
    columns['text'][12] = columns['text'][11]
    pq.write_table(pa.table(columns), tmp_path / 'a.parquet')
    for flags in ((), ('--unit_rows=1',)):
        c = prepare(tmp_path / f'out{len(flags)}', ({'name': 'a', 'path': str(tmp_path / 'a.parquet')},), '--max_reject_share=1', *flags)
        assert {r['line'] - 1: r['reason'] for r in rejects(c.path)} == bad and (c.rows['line'] - 1).tolist() == [0, 11, 13]
        assert all(np.array_equal(c.codes(i), codes[r]) for i, r in enumerate((0, 11, 13)))
    detail = {r['line'] - 1: r['detail'] for r in rejects(c.path)}
    assert detail[1] == 'layer 3 is null' and detail[4] == 'layer 8, frame 2: 2016, the codec has 0..2015' and detail[5].startswith('layer 1, frame 0: -1')
    assert detail[6].startswith('layer 2, frame 3: None') and detail[12] == 'of line 12'
    assert c.meta['counts']['dropped']['a']['token out of range'] == 3

def test_files_of_one_folder_may_differ_in_their_types(tmp_path, fake):
    """Order of the columns, width of the ints, speakers as numbers or none at all, encoded_len with holes: as shards of one set do."""
    columns, codes = tokens(40)
    table = pa.table(columns)
    put = lambda t, name, array: t.set_column(t.column_names.index(name), name, array)
    shards = (table.slice(0, 10), put(table.slice(10, 10), 'speaker', pa.nulls(10)).select(table.column_names[::-1]),
              put(put(table.slice(20, 10), 'speaker', pa.array([7] * 10)), 'nano_layer_3', table.slice(20, 10)['nano_layer_3'].cast(pa.large_list(pa.int16()))),
              put(table.slice(30, 10), 'encoded_len', pa.array([float(len(c)) for c in codes[30:39]] + [float('nan')])))
    os.mkdir(tmp_path / 'f')
    for i, shard in enumerate(shards):
        pq.write_table(shard, tmp_path / f'f/{i}.parquet')
    for unit_rows in (1, 256):
        c = prepare(tmp_path / f'out{unit_rows}', ({'name': 'a', 'path': str(tmp_path / 'f')},), f'--unit_rows={unit_rows}', '--val_share=0')
        assert not isinstance(c, str), c
        assert len(c) == 39 and all(np.array_equal(c.codes(i), codes[i]) for i in range(39)) and [r['line'] for r in rejects(c.path)] == [40]
        names = [None if s < 0 else c.speakers[s] for s in c.rows['speaker']]
        assert names == [f'a/s{i % 3}' for i in range(10)] + [None] * 10 + ['a/7'] * 10 + [f'a/s{i % 3}' for i in range(30, 39)]

def test_rows_to_hear_want_a_codec_at_the_start(tmp_path, fake, monkeypatch):
    """Tokens need a codec for check-*.wav alone. One that can't be had is said before the rows are read."""
    pq.write_table(pa.table(tokens(3)[0]), tmp_path / 'a.parquet')
    def none(self, name, device):
        raise ImportError('No module named nemo')
    monkeypatch.setattr(sys.modules['codec'].NanoCodec, '__init__', none)
    source = ({'name': 'a', 'path': str(tmp_path / 'a.parquet')},)
    got = prepare(tmp_path / 'out', source, '--check_rows=4')
    assert 'No module named nemo; --check_rows=0 needs none' in got and got.count('\n') == 1
    assert not [f for f in os.listdir(tmp_path / 'out.building') if f.endswith('.npz')]
    os.remove(tmp_path / 'out.building/lock')
    assert len(prepare(tmp_path / 'out', source)) == 3

@pytest.mark.parametrize('change, said', (
    (lambda c: c.update(encoded_len=list('abcde')), 'column encoded_len is string, wanted ints'), (lambda c: c.update(encoded_len=[[1]] * 5), 'wanted ints'),
    (lambda c: c.pop('nano_layer_8'), 'has 7 token columns'), (lambda c: c.update(nano_layer_9=c['nano_layer_1']), 'has 9 token columns'),
    (lambda c: c.update(nano_layer_2=[[0.5]] * 5), "column nano_layer_2 is list<"), (lambda c: c.update(nano_layer_2=[1] * 5), 'wanted a list of ints'),
    (lambda c: c.update(Speaker=c.pop('speaker', ['x'] * 5)), "column 'Speaker' is not 'speaker'"),
    (lambda c: c.pop('text'), "no column 'text'"), (lambda c: [c.pop(k) for k in LAYERS], "no column 'audio'")))
def test_another_codecs_columns_are_an_error(tmp_path, fake, change, said):
    columns, _ = tokens(5)
    change(columns)
    pq.write_table(pa.table(columns), tmp_path / 'a.parquet')
    got = prepare(tmp_path / 'out', ({'name': 'a', 'path': str(tmp_path / 'a.parquet')},))
    assert said in got and 'a.parquet: ' in got and not os.path.exists(tmp_path / 'out.building')
    table = pa.table(tokens(5)[0])
    pq.write_table(table.append_column('text', table['text']), tmp_path / 'a.parquet')
    assert "no column 'text' or more than one" in prepare(tmp_path / 'out', ({'name': 'a', 'path': str(tmp_path / 'a.parquet')},))
    write(tmp_path / 'a.parquet', (tmp_path / 'a.parquet').read_bytes()[:-9])
    assert 'not a whole parquet file' in prepare(tmp_path / 'out', ({'name': 'a', 'path': str(tmp_path / 'a.parquet')},))

def test_audio_columns_and_folders_give_the_same_corpus(tmp_path, fake):
    """Parquet with paths, with an Audio column (bytes and path), a Hugging Face dataset with one, a folder of wav + txt: all as the csv."""
    datasets = pytest.importorskip('datasets')
    source = speech(tmp_path / 'in')
    first = prepare(tmp_path / 'first', (source,), '--min_clips_per_speaker=1')
    want = {k: v for k, v in files(first.path).items() if k in ('codes.bin', 'text.bin')}
    columns = {'audio': [f'{i}.wav' for i in range(12)], 'text': [f'text, number {i}' for i in range(12)], 'speaker': [f's{i % 3}' for i in range(12)]}
    pq.write_table(pa.table(columns), tmp_path / 'in/paths.parquet')
    inside = [{'bytes': (tmp_path / f'in/{i}.wav').read_bytes(), 'path': 'audio.wav'} for i in range(12)]
    pq.write_table(pa.table({**columns, 'audio': inside}), tmp_path / 'inside.parquet', row_group_size=5)
    table = pa.table({**columns, 'audio': pa.array([{'bytes': None, 'path': str(tmp_path / f'in/{i}.wav')} if i % 2 else x for i, x in enumerate(inside)],
                                                    pa.struct({'bytes': pa.binary(), 'path': pa.string()}))})
    datasets.Dataset(table).cast_column('audio', datasets.Audio(decode=False)).save_to_disk(str(tmp_path / 'disk'))
    os.mkdir(tmp_path / 'folder')
    for i in range(12):
        os.makedirs(tmp_path / f'folder/s{i % 3}', exist_ok=True)
        shutil.copy(tmp_path / f'in/{i}.wav', tmp_path / f'folder/s{i % 3}')
        write(tmp_path / f'folder/s{i % 3}/{i}.txt', f'text, number {i}\n')
    for path in ('in/paths.parquet', 'inside.parquet', 'disk'):
        c = prepare(tmp_path / ('out_' + path.replace('/', '_')), ({'name': 'a', 'path': str(tmp_path / path)},), '--min_clips_per_speaker=1', '--unit_rows=4')
        assert not isinstance(c, str), c
        assert {k: v for k, v in files(c.path).items() if k in want} == want and c.speakers == first.speakers, path
    c = prepare(tmp_path / 'f', ({'name': 'a', 'path': str(tmp_path / 'folder')},), '--min_clips_per_speaker=1')
    number = {said(c, i): i for i in range(12)}
    assert c.speakers == first.speakers and all(np.array_equal(first.codes(i), c.codes(number[said(first, i)])) for i in range(12))
    # what is wrong with the bytes is named as it is with files
    sounds = io.BytesIO()
    soundfile.write(sounds, tone(6000), 22050, format='OGG')
    for k, data in enumerate((b'', b'no audio', inside[0]['bytes'][:-500], sounds.getvalue()[:-20], sounds.getvalue(), None)):
        inside[k] = {'bytes': data, 'path': 'nowhere.wav'}
    pq.write_table(pa.table({**columns, 'audio': inside}), tmp_path / 'inside.parquet')
    c = prepare(tmp_path / 'bad', ({'name': 'a', 'path': str(tmp_path / 'inside.parquet')},), '--max_reject_share=1')
    assert [r['reason'] for r in rejects(c.path)] == ['audio unreadable', 'audio unreadable', 'audio file truncated', 'audio file truncated', 'audio file not found']
    write(tmp_path / 'folder/alone.txt', 'x')
    os.remove(tmp_path / 'folder/s0/0.txt')
    write(tmp_path / 'folder/s0/3.txt', b'caf\xe9')
    c = prepare(tmp_path / 'bad2', ({'name': 'a', 'path': str(tmp_path / 'folder')},), '--max_reject_share=1')
    assert sorted((r['reason'], r['audio']) for r in rejects(c.path)) == [('audio file not found', 'alone.wav'), ('no text file', 's0/0.wav'), ('text file is not UTF-8', 's0/3.wav')]

def test_speakers_of_every_type(tmp_path, fake):
    """Ints with holes, floats with NaN, strings: the same person in a source, another one in each source, none where there is none."""
    sources = []
    for name, column in (('ints', pa.array([7, None, 7, 0])), ('floats', pa.array([7.0, float('nan'), 7.0, None])), ('words', pa.array(['7', 'nan', ' 7', ''])), ('none', pa.array([None] * 4))):
        columns, _ = tokens(4, seed=len(sources))
        pq.write_table(pa.table({**columns, 'speaker': column}), tmp_path / f'{name}.parquet')
        sources.append({'name': name, 'path': str(tmp_path / f'{name}.parquet')})
    c = prepare(tmp_path / 'out', tuple(sources), '--min_clips_per_speaker=1', '--val_share=0')
    names = [None if s < 0 else c.speakers[s] for s in c.rows['speaker']]
    assert names == ['ints/7', None, 'ints/7', 'ints/0', 'floats/7', None, 'floats/7', None, 'words/7', None, 'words/7', None, *[None] * 4]

@pytest.mark.filterwarnings('error::UserWarning')
def test_reports_of_tokens_without_speakers(tmp_path, fake):
    columns, codes = tokens(3)
    columns.pop('speaker')
    pq.write_table(pa.table(columns), tmp_path / 'a.parquet')
    c = prepare(tmp_path / 'out', ({'name': 'a', 'path': str(tmp_path / 'a.parquet')},), '--picture=True', '--check_rows=9')
    assert c.meta['speaker_stats']['null_share'] == 1 and sorted(f for f in os.listdir(c.path) if f[0] in 'cr' and '.' in f) == [
        'check-0.wav', 'check-1.wav', 'check-2.wav', 'codes.bin', 'rejects.jsonl', 'report.png']
    assert all(soundfile.info(tmp_path / f'out/check-{i}.wav').frames == 1024 * len(codes[i]) for i in range(3))

def test_memory_is_flat(tmp_path):
    """20,000 rows, and three times as many in one row group, in a process of its own: resident memory grows by less than 1 KB a row."""
    peak = {}
    for n in (20000, 60000):
        columns, _ = tokens(1000)
        table = pa.concat_tables([pa.table({**columns, 'text': [f'{k} {t}' for t in columns['text']]}) for k in range(n // 1000)])
        pq.write_table(table, tmp_path / f'{n}.parquet', row_group_size=n)
        flags = [f'--out_dir={tmp_path}/out{n}', f"--sources={({'name': 'a', 'path': f'{tmp_path}/{n}.parquet'},)!r}", f'--tokenizer={TOKENIZER}', '--special_tokens={}', '--picture=False', '--check_rows=0']
        code = ("import os, sys, resource, subprocess; subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL); "
                "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
        run = subprocess.run([sys.executable, '-c', code, os.path.join(ROOT, 'prepare.py'), *flags], capture_output=True, text=True)
        assert not run.returncode, run.stderr
        peak[n] = int(run.stdout)
        assert len(Corpus(f'{tmp_path}/out{n}')) == n
    print(peak)
    assert peak[20000] < 1 << 20 and peak[60000] - peak[20000] < 40000
