"""
Turns tables of audio files into a corpus: codec tokens and text ids in flat files that every later stage maps into memory.

    python prepare.py config/tiny_prepare.py                        # one process: CPU, or one GPU
    python prepare.py config/prepare.py --num_workers=16            # audio is read in 16 processes while the codec encodes

Written to out_dir, which appears only when it is complete (the work in between lies in <out_dir>.building):

    codes.bin      uint16 [frames, 8]    packed codec tokens of all rows, end to end; 16 bytes a frame, 1.24 MB an hour
    text.bin       uint32 [tokens]       text ids: no special tokens, no repetition (layout is applied when a batch is made)
    index.bin      ROW [rows]            where each row lies, its speaker, source, split and line in the source's table
    meta.json      magic, version, sizes, codec, tokenizer, special ids, settings, counts, speakers
    rejects.jsonl  every row that was dropped: file, line, audio, reason, detail

The same inputs give the same bytes, whatever num_workers, batch_seconds or interruptions. Killed, it goes on where it was.
Other scripts read a corpus through Corpus, a file through read_audio, and a text through load_tokenizer and encode_text.
"""
import csv, hashlib, json, math, os, re, shutil, sys, time, unicodedata
from collections import Counter, deque

import numpy as np

# -----------------------------------------------------------------------------
# what goes in: a tuple of dicts, one a source, in this order in the corpus
#   name          fixed namespace of its speakers ('name/speaker'): the same name in two sources is two people
#   path          the table. csv, tsv: a header line; jsonl: one object a line; ljspeech: id|text or id|text|normalized text
#   kind          'csv', 'tsv', 'jsonl' or 'ljspeech'; left out: by the extension, and a first line with '|' is ljspeech
#   columns       {'audio': .., 'text': .., 'speaker': .., 'language': ..} -> the table's column names (numbers: a table without
#                 header). Left out: audio, text, and speaker if the table has one. A row without speaker is a null row
#   root          folder of relative audio paths; left out: the table's folder (ljspeech: its wavs/)
#   quotes        True: "a ""field""" is unquoted (csv, tsv); False: quotes are text (left out: True, ljspeech False)
#   language_tag  'es' puts 'es: ' before each text; a mapped language column does so row by row; left out: no tag
#   max_rows      only the first so many rows of the table; left out: all
sources = ()
out_dir = 'data/corpus'
codec = 'nvidia/nemo-nano-codec-22khz-1.89kbps-21.5fps'     # Hub name, or a local .nemo file
tokenizer = 'nineninesix/qwen3_5-full-attn-only-14'         # Hub name, or a local folder with tokenizer.json
special_tokens = {'start_of_speech': 248070, 'end_of_speech': 248071, 'start_of_text': 248073, 'end_of_text': 248074,
                  'tts_pad': 248076}                        # the released ids; {}: from gepard_special_tokens.json of the tokenizer's folder
# filters: a row that fails one is written to rejects.jsonl
max_seconds = 40.0              # longer clips are dropped: they cost the most memory and are mostly wrongly cut; 0.0 = no limit
min_frames = 1                  # codec frames a clip must fill: 1 is 1024 samples at 22,050 Hz, 46 ms; 1023 samples are dropped
silence_peak = 1e-4             # a clip whose peak is below (-80 dBFS) is dropped: it teaches words as silence; 0.0 = off
max_reject_share = 0.05         # more bad rows than this and the run fails at the end, with nothing lost: raise it and run again; 1.0 = off
# speakers and the held-out part
min_clips_per_speaker = 3       # training clips that make a speaker usable: a batch takes K = 3 clips of each; 1 = all are
singleton_policy = 'null_prefix'    # speakers with fewer: 'null_prefix' keeps their rows without a speaker, 'remove' drops them
val_share = 0.01                # share of texts held out, by a hash of the text: a sentence that ten voices say is on one side; 0.0 = off
val_speakers = 0                # so many usable speakers are held out whole, by a hash of the name; 0 = off
# how it runs: none of these changes a byte
device = 'auto'                 # of the codec: 'auto' = cuda where there is one, else cpu
num_workers = 0                 # processes that read and resample audio; 0 = in turn with the codec, in this process
batch_seconds = 120.0           # audio seconds in one codec batch, padding included: some 40 on a laptop, 1000s on a big GPU
unit_rows = 256                 # rows read, sorted by length, encoded and saved together; all that a kill can lose is two of these
overwrite = False               # True: a corpus or an unfinished one with other settings in out_dir is replaced
# -----------------------------------------------------------------------------
MAGIC, VERSION = 'nanogepard-corpus', 1
ROW = np.dtype([('text_start', '<i8'), ('text_len', '<i8'), ('frame_start', '<i8'), ('frame_len', '<i8'), ('line', '<i8'),
                ('speaker', '<i4'), ('source', '<i4'), ('split', '<i4')])       # 64-bit offsets: 68,000 hours are 5.3e9 frames
SPLITS = ('train', 'val', 'val_speakers')
DRAFT = np.dtype([('text_len', '<i8'), ('frame_len', '<i8'), ('line', '<i8'), ('source', '<i4'), ('hash', '<f8')])  # a kept row before joining
SOURCE_KEYS = ('name', 'path', 'kind', 'columns', 'root', 'quotes', 'language_tag', 'max_rows')
FREE = ('out_dir', 'max_reject_share', 'device', 'num_workers', 'batch_seconds', 'unit_rows', 'overwrite')   # settings that change no byte
NO_SPEAKER = ('', 'nan', 'NaN', 'None', 'null', '__null_ref__')     # what tables write where there is no speaker
AUDIO = ('.wav', '.flac', '.ogg', '.mp3')

# ---- the reader

class Corpus:
    """A finished corpus: .meta dict, .rows ROW array, .speakers names by rows['speaker'] (-1 = null row). A wrong file is a ValueError."""

    def __init__(self, path):
        self.path, name = path, os.path.join(path, 'meta.json')
        if not os.path.exists(name):
            raise FileNotFoundError(f'{path}: no corpus here (no meta.json)' + '; an unfinished one is in ' * os.path.isdir(path + '.building') + (path + '.building') * os.path.isdir(path + '.building'))
        try:
            self.meta = meta = json.load(open(name, encoding='utf-8'))
        except ValueError as e:
            raise ValueError(f'{name}: not JSON: {e}')
        if meta.get('magic') != MAGIC or meta.get('version') != VERSION:
            raise ValueError(f"{name}: magic {meta.get('magic')!r} version {meta.get('version')!r}, wanted {MAGIC!r} version {VERSION}")
        groups = meta['codec']['groups']
        for file, item, n in (('codes.bin', 2 * groups, meta['frames']), ('text.bin', 4, meta['tokens']), ('index.bin', ROW.itemsize, meta['rows'])):
            file = os.path.join(path, file)
            if os.path.getsize(file) != n * item:
                raise ValueError(f'{file}: {os.path.getsize(file)} bytes, but meta.json says {n} x {item}: truncated, or of another corpus')
        self.rows = np.fromfile(os.path.join(path, 'index.bin'), dtype=ROW)
        self._codes = np.memmap(os.path.join(path, 'codes.bin'), dtype='<u2', mode='r', shape=(meta['frames'], groups))
        self._text = np.memmap(os.path.join(path, 'text.bin'), dtype='<u4', mode='r')
        self.speakers, self._radix = meta['speakers'], math.prod(meta['codec']['levels'])
        for what, n in (('frame', meta['frames']), ('text', meta['tokens'])):
            start, length = self.rows[what + '_start'], self.rows[what + '_len']
            bad = np.flatnonzero((start < 0) | (length < 1) | (start + length > n))
            if len(bad):
                raise ValueError(f'{path}/index.bin: row {bad[0]}: {what} {start[bad[0]]} + {length[bad[0]]} is outside 0..{n}')

    def __len__(self):
        return len(self.rows)

    def text(self, i):
        """uint32 [n] text ids of row i, without special tokens."""
        r = self.rows[i]
        return np.array(self._text[r['text_start']:r['text_start'] + r['text_len']])

    def codes(self, i):
        """uint16 [T, 8] packed codes of row i."""
        r = self.rows[i]
        codes = np.array(self._codes[r['frame_start']:r['frame_start'] + r['frame_len']])
        if codes.max() >= self._radix:
            raise ValueError(f'{self.path}/codes.bin: row {i} has code {codes.max()}, the codec has 0..{self._radix - 1}')
        return codes

    def split(self, name):
        """int64 row numbers of 'train', 'val' (held-out texts) or 'val_speakers' (held-out speakers)."""
        return np.flatnonzero(self.rows['split'] == SPLITS.index(name))

# ---- text

def load_tokenizer(name):
    """(tokenizers.Tokenizer, path of its tokenizer.json) of a local folder or a Hub name."""
    from tokenizers import Tokenizer
    path = os.path.join(name, 'tokenizer.json')
    if not os.path.exists(path):
        if os.path.isdir(name) or name.startswith(('.', '/')):
            raise FileNotFoundError(f'{name}: no tokenizer.json there')
        from huggingface_hub import hf_hub_download
        path = hf_hub_download(name, 'tokenizer.json')
    return Tokenizer.from_file(path), path

def clean_text(text):
    return unicodedata.normalize('NFC', text).strip()

def encode_text(tokenizer, text):
    """Ids (list of int) of a transcript, no layout: NFC, stripped. tokenizer: of `tokenizers`, or a fast one of transformers."""
    tokenizer = getattr(tokenizer, 'backend_tokenizer', tokenizer)
    if not tokenizer.encode_special_tokens:
        # '<|im_end|>' typed in a transcript is eleven characters, not an id. The library's switch leaves out added tokens
        # that are not marked special ('<think>'), so mark them all. And a tokenizer.json may ask to truncate: never.
        tokenizer.add_special_tokens(list(tokenizer.get_added_tokens_decoder().values()))
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer.encode(clean_text(text), add_special_tokens=False).ids

# ---- audio

def cut_short(path, log):
    """True where a file ends before its header says so. libsndfile reads such wav and ogg files without a word."""
    sizes = re.search(r'^ ?(?:data|SSND) : (\d+) \(should be', log, re.M)           # from its log on wav and aiff
    if sizes and int(sizes[1]) != 0xFFFFFFFF:           # that size means unknown: written to a pipe
        return True
    with open(path, 'rb') as f:
        if f.read(4) != b'OggS':
            return False
        f.seek(max(0, os.path.getsize(path) - 70000))   # an ogg page is at most 65,307 bytes
        tail = f.read()
    page = tail[tail.rfind(b'OggS'):]                   # the last page must be whole and carry the end-of-stream flag
    return len(page) < 27 or not page[5] & 4 or len(page) < 27 + page[26] + sum(page[27:27 + page[26]])

def read_audio(path, sample_rate, max_seconds=0.0):
    """Mono float32 [samples] at sample_rate (mean of the channels, soxr's band-limited 'HQ') of any file that libsndfile
    opens: wav, flac, ogg, mp3, .. ValueError(reason, detail) where it is not a whole, finite clip of at most max_seconds."""
    import soundfile, soxr
    if not os.path.isfile(path) or not os.path.getsize(path):
        raise ValueError('audio file is empty' if os.path.isfile(path) else 'audio file not found', path)
    try:
        with soundfile.SoundFile(path) as f:
            rate, frames, log = f.samplerate, f.frames, f.extra_info
            if max_seconds and frames > max_seconds * rate:         # before it is decoded: it may be a day long
                raise ValueError('audio too long', f'{frames / rate:.1f} s')
            audio = f.read(dtype='float32', always_2d=True).mean(axis=1)
    except (soundfile.SoundFileError, OSError, TypeError) as e:     # TypeError: raw audio, which has no header
        raise ValueError('audio unreadable', str(e))
    if len(audio) < frames or cut_short(path, log):
        raise ValueError('audio file truncated', f'{len(audio)} samples read, the header promises more')
    if not np.isfinite(audio).all():
        raise ValueError('audio not finite', f'{(~np.isfinite(audio)).sum()} NaN or infinite samples')
    return audio if rate == sample_rate else soxr.resample(audio, rate, sample_rate, 'HQ')

def load_clip(path, sample_rate, max_seconds, min_samples, silence_peak):
    """What a worker does: the clip, or the (reason, detail) that it is dropped for."""
    try:
        audio = read_audio(path, sample_rate, max_seconds)
    except ValueError as e:
        return e.args if len(e.args) == 2 else ('audio unreadable', str(e))
    peak = np.abs(audio).max() if len(audio) else 0.0
    if len(audio) < min_samples:
        return 'audio too short', f'{len(audio)} samples at {sample_rate} Hz, at least {min_samples}'
    if peak < silence_peak:
        return 'audio silent', f'peak {peak:.1e}'
    if peak > 4:
        return 'audio not scaled to -1..1', f'peak {peak:.1f}'       # a float wav of 16-bit values, say
    return audio

def die_with_parent():
    """Initializer of a worker: end when the main process is killed. Otherwise it would wait for work for ever."""
    import multiprocessing, threading
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()

# ---- tables

def kind_of(source):
    with open(source['path'], 'rb') as f:
        piped = b'|' in f.readline(65536)
    ext = os.path.splitext(source['path'])[1].lower()
    return source.get('kind') or ('ljspeech' if piped and ext != '.jsonl' else {'.csv': 'csv', '.tsv': 'tsv', '.jsonl': 'jsonl'}.get(ext, ''))

def table_rows(source):
    """Yields (line, fields) of each data line: fields is a dict of the mapped columns, or the string why the line is dropped.
    A line is a row, always: a quote that is not closed on its line is an error, so that it can't swallow the lines below."""
    path, kind = source['path'], kind_of(source)
    columns = dict(source.get('columns') or ({'audio': 0, 'text': -1} if kind == 'ljspeech' else {'audio': 'audio', 'text': 'text', 'speaker': 'speaker'}))
    optional = () if source.get('columns') else ('speaker',)
    sep = {'csv': ',', 'tsv': '\t', 'ljspeech': '|'}.get(kind)
    quotes = source.get('quotes', kind != 'ljspeech')
    headless = any(isinstance(c, int) for c in columns.values())
    header, blank, n_rows = None, [], 0
    csv.field_size_limit(2 ** 31 - 1)
    with open(path, 'rb') as f:
        for n, raw in enumerate(f, 1):      # bytes, so that only \n ends a line: str.splitlines also cuts at U+2028 and others
            try:
                line = raw.decode('utf-8-sig' if n == 1 else 'utf-8').rstrip('\r\n')
            except UnicodeDecodeError as e:
                sys.exit(f'{path}:{n}: not UTF-8 (byte {raw[e.start]:#04x}): convert the table')
            if not line.strip():
                blank.append(n)             # at the end of the file they are nothing, between rows they are counted
                continue
            if kind == 'jsonl':
                try:
                    fields = json.loads(line)
                except ValueError as e:
                    fields = f'line is not JSON: {e}'
                if isinstance(fields, (list, int, float, type(None))):
                    fields = 'line is not a JSON object'
            elif quotes:
                try:
                    fields = next(csv.reader([line], delimiter=sep, strict=True))
                except csv.Error as e:
                    sys.exit(f"{path}:{n}: bad quotes ({e}): a quoted field ends on its line, a quote in it is doubled; 'quotes': False in the source takes them as text")
            else:
                fields = line.split(sep)
            if header is None:              # the first line
                header = list(fields) if kind == 'jsonl' and isinstance(fields, dict) else fields if not headless else list(range(len(fields)))
                missing = [c for role, c in columns.items() if role not in optional and (c >= len(header) if headless else c not in header)]
                if missing or kind == 'jsonl' and not isinstance(fields, dict):
                    sys.exit(f"{path}:{n}: no column {', '.join(map(repr, missing))}; it has {header}; say which is which in the source's columns")
                if len(set(header)) < len(header):
                    sys.exit(f'{path}:{n}: a column name is there twice: {header}')
                columns = {role: c for role, c in columns.items() if headless or c in header or kind == 'jsonl'}
                if kind != 'jsonl' and not headless:
                    continue
            for b in blank + [n]:
                n_rows += 1
                if source.get('max_rows') and n_rows > source['max_rows']:
                    return
                if b < n:
                    yield b, 'line is blank'
                elif isinstance(fields, str):
                    yield n, fields
                elif kind == 'jsonl':
                    yield n, {role: fields.get(c) for role, c in columns.items()}
                elif len(fields) != len(header):
                    yield n, f'line has {len(fields)} fields, the first line {len(header)}'
                else:
                    yield n, {role: fields[c if headless else header.index(c)] for role, c in columns.items()}
            blank = []

def source_rows(number, source):
    """Yields a dict for each data line: source, line, audio and either path, text, speaker (name or None) or reason, detail."""
    kind, seen = kind_of(source), {}
    root = source.get('root') or os.path.join(os.path.dirname(source['path']), 'wavs' if kind == 'ljspeech' else '')
    for line, fields in table_rows(source):
        row = {'source': number, 'line': line, 'audio': ''}
        if isinstance(fields, str):
            yield {**row, 'reason': fields.split(':')[0], 'detail': fields}
            continue
        audio, text, speaker, tag = (fields.get(k) for k in ('audio', 'text', 'speaker', 'language'))
        audio, text = audio if audio is not None else '', text if text is not None else ''
        if not isinstance(audio, str) or not isinstance(text, str):
            yield {**row, 'reason': 'field is not a string', 'detail': f'audio {audio!r}, text {text!r}'[:200]}
            continue
        audio, text = audio.strip(), clean_text(text)
        tag = tag.strip() if isinstance(tag, str) else ''
        tag = tag or source.get('language_tag')
        row['audio'] = audio = audio + '.wav' * (kind == 'ljspeech' and not audio.lower().endswith(AUDIO))
        key = hashlib.sha256(f'{audio}\0{text}'.encode('utf-8', 'surrogatepass')).digest()[:8]
        if not text:
            yield {**row, 'reason': 'text empty', 'detail': ''}
        elif re.search('[\ud800-\udfff]', text + audio):            # half a UTF-16 pair: '\ud83d' in a jsonl
            yield {**row, 'reason': 'text not Unicode', 'detail': ascii(text)[:200]}
        elif key in seen:
            yield {**row, 'reason': 'duplicate row', 'detail': f'of line {seen[key]}'}
        else:
            speaker = '' if speaker is None or speaker != speaker else clean_text(str(speaker))     # NaN is not itself
            yield {**row, 'path': os.path.join(root, audio), 'text': f'{tag.lower()}: {text}' if tag else text, 'hash': share_of(text),
                   'speaker': None if speaker in NO_SPEAKER else f"{source['name']}/{speaker}"}
        seen.setdefault(key, line)

# ---- small tools

def share_of(text):
    """A number in 0..1 that is the same for the same text on every run and machine."""
    return int.from_bytes(hashlib.sha256(text.encode('utf-8', 'surrogatepass')).digest()[:6], 'big') / 2 ** 48

def sha256_of(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()

def as_bytes(x):
    return np.frombuffer(json.dumps(x).encode(), dtype=np.uint8)

def save(path, write):
    """write(file) into a temporary name, to the disk, then renamed: path is whole or not there."""
    with open(path + '.tmp', 'wb') as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + '.tmp', path)

def differing(old, new, at=''):
    """The settings that differ: ['max_seconds: 40.0 there, 30.0 now', ..]."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [d for k in sorted({*old, *new}) for d in differing(old.get(k), new.get(k), f'{at}.{k}' if at else k)]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new)) for d in differing(a, b, f'{at}[{i}]')]
    return [] if old == new else [f'{at}: {old!r} there, {new!r} now']

def print_table(meta):
    """The last thing on the screen: kept and dropped by source and reason, hours, speakers."""
    hours = meta['frames'] * meta['codec']['hop'] / meta['codec']['sample_rate'] / 3600
    print(f"\n{'source':<24}{'':<34}{'rows':>10}")
    for name, kept in meta['counts']['kept'].items():
        print(f"{name:<24}{'kept':<34}{kept:>10,}")
        for reason, n in meta['counts']['dropped'].get(name, {}).items():
            print(f"{'':<24}{'dropped: ' + reason:<34}{n:>10,}")
    s = meta['speaker_stats']
    print(f"{meta['rows']:,} rows kept, {hours:.2f} hours, {meta['frames']:,} frames, {meta['tokens']:,} text tokens; "
          + ', '.join(f"{k} {n:,}" for k, n in meta['counts']['split'].items()))
    print(f"{s['usable_speakers']:,} speakers with {meta['settings']['min_clips_per_speaker']} training clips or more ({s['usable_rows']:,} rows), "
          f"{s['low_count_speakers']:,} with fewer ({s['low_count_rows']:,} rows), null rows {s['null_share']:.1%}")

# ---- the script. Under this guard since other scripts import from this one, and so do the worker processes

if __name__ == '__main__':
    from configurator import configure
    config = configure(globals())

    # validate: every fault is named before torch is imported
    for ok, complaint in (
            (sources, 'sources: none; it takes at least one (see config/tiny_prepare.py)'),
            (all(isinstance(s, dict) for s in sources), 'sources: a tuple of dicts'),
            (max_seconds >= 0, f'max_seconds: {max_seconds} is below 0'),
            (min_frames >= 1, f'min_frames: {min_frames} is below 1'),
            (0 <= silence_peak < 1, f'silence_peak: {silence_peak} is not in 0..1'),
            (0 <= max_reject_share <= 1, f'max_reject_share: {max_reject_share} is not in 0..1'),
            (min_clips_per_speaker >= 1, f'min_clips_per_speaker: {min_clips_per_speaker} is below 1'),
            (singleton_policy in ('null_prefix', 'remove'), f"singleton_policy: 'null_prefix' or 'remove', got {singleton_policy!r}"),
            (0 <= val_share < 1, f'val_share: {val_share} is not in 0..1'),
            (val_speakers >= 0, f'val_speakers: {val_speakers} is below 0'),
            (num_workers >= 0, f'num_workers: {num_workers} is below 0'),
            (batch_seconds > 0, f'batch_seconds: {batch_seconds} is not above 0'),
            (unit_rows >= 1, f'unit_rows: {unit_rows} is below 1')):
        if not ok:
            sys.exit(f'prepare.py: {complaint}')
    for i, source in enumerate(sources):
        at = f'prepare.py: sources[{i}]'
        for key in source:
            if key not in SOURCE_KEYS:
                sys.exit(f'{at}: unknown key {key!r}; it takes {", ".join(SOURCE_KEYS)}')
        if not str(source.get('name', '')).strip() or '/' in source['name'] or [s.get('name') for s in sources].count(source['name']) > 1:
            sys.exit(f"{at}: name {source.get('name')!r}: a name of its own, without '/'")
        if not os.path.isfile(source.get('path', '')):
            sys.exit(f"{at} ({source['name']}): path {source.get('path')!r}: no such table")
        if kind_of(source) not in ('csv', 'tsv', 'jsonl', 'ljspeech'):
            sys.exit(f"{at} ({source['name']}): kind {source.get('kind')!r} of {source['path']}: 'csv', 'tsv', 'jsonl' or 'ljspeech'")
        columns = source.get('columns') or {'audio': 'audio', 'text': 'text'}
        if not {'audio', 'text'} <= set(columns) <= {'audio', 'text', 'speaker', 'language'} or len({isinstance(c, int) for c in columns.values()}) > 1:
            sys.exit(f"{at} ({source['name']}): columns {columns}: audio, text, and if there are any speaker and language; names, or numbers in a table without header")

    # tokenizer and special ids
    try:
        tok, path = load_tokenizer(tokenizer)
    except Exception as e:
        sys.exit(f'prepare.py: tokenizer {tokenizer!r}: {e}')
    length, beside = tok.get_vocab_size(), os.path.join(tokenizer, 'gepard_special_tokens.json')
    special = dict(special_tokens)
    if not special:
        if not os.path.exists(beside):
            sys.exit(f'prepare.py: special_tokens is {{}}, but there is no {beside}')
        special = {k: v for k, v in json.load(open(beside)).items() if k != 'tokeniser_length'}
    wanted = {'start_of_speech', 'end_of_speech', 'start_of_text', 'end_of_text', 'tts_pad'}
    if set(special) != wanted or len(set(special.values())) < 5 or not all(0 <= v < length for v in special.values()):
        sys.exit(f'prepare.py: special_tokens: five different ids below the length {length} of {tokenizer} for {", ".join(sorted(wanted))}; got {special}')
    tokenizer_meta = {'id': tokenizer, 'hash': sha256_of(path), 'length': length}

    # the settings that the bytes depend on. Those of an earlier run in the same place must be the same
    settings = json.loads(json.dumps({k: v for k, v in config.items() if k not in FREE}))
    settings.update(special_tokens=special, version=VERSION, tokenizer_hash=tokenizer_meta['hash'],
                    codec_hash=sha256_of(codec) if os.path.isfile(codec) else '', table_hashes={s['name']: sha256_of(s['path']) for s in sources})
    out_dir = out_dir.rstrip('/')
    building, retired = out_dir + '.building', out_dir + '.retired'
    if os.path.exists(os.path.join(out_dir, 'meta.json')) and not overwrite:
        meta = Corpus(out_dir).meta
        changed = differing(meta['settings'], settings)
        if changed:
            sys.exit(f'prepare.py: {out_dir} was made with other settings ({"; ".join(changed)}): choose another --out_dir, or --overwrite')
        print(f'{out_dir} is complete and was made with these settings: nothing to do')
        print_table(meta)
        shutil.rmtree(building, ignore_errors=True)
        sys.exit(0)
    if os.path.isdir(out_dir) and os.listdir(out_dir) and not os.path.exists(os.path.join(out_dir, 'meta.json')):
        sys.exit(f'prepare.py: {out_dir} holds files that are not a corpus: choose another --out_dir')
    settings_file = os.path.join(building, 'settings.json')
    if os.path.exists(settings_file):
        changed = differing(json.load(open(settings_file)), settings)
        if changed and not overwrite:
            sys.exit(f'prepare.py: {building} was begun with other settings ({"; ".join(changed)}): choose another --out_dir, or --overwrite')
        if changed:
            shutil.rmtree(building)
    os.makedirs(building, exist_ok=True)
    save(settings_file, lambda f: f.write(json.dumps(settings).encode()))

    # one pass over the tables: what is wrong with them is said now, not after a day of encoding
    total = sum(1 for s in sources for _ in table_rows(s))
    if not total:
        sys.exit(f"prepare.py: no rows in {', '.join(s['path'] for s in sources)}")
    unit_path = lambda k: os.path.join(building, f'unit-{unit_rows}-{k:06d}.npz')     # other unit_rows: other files
    n_units = -(-total // unit_rows)
    todo = [k for k in range(n_units) if not os.path.exists(unit_path(k))]
    print(f'{total:,} rows in {len(sources)} sources, {n_units:,} units of {unit_rows} rows, {n_units - len(todo):,} of them done before')

    # codec
    import torch
    from codec import NanoCodec
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    nano = NanoCodec(codec, device)
    rate, hop, groups, radix = nano.sample_rate, nano.hop, nano.groups, math.prod(nano.levels)
    print(f'codec {codec} on {device}: {rate} Hz, hop {hop}, {rate / hop:.3f} frames/s, {groups} groups of {radix}')

    pool = None
    if num_workers:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context
        pool = ProcessPoolExecutor(num_workers, mp_context=get_context('spawn'), initializer=die_with_parent)    # fork is not safe once torch has threads

    def encode_unit(k, rows, clips):
        """Encode the clips (arrays, or the reason they are dropped for) of one unit and save it whole."""
        good = [i for i, c in enumerate(clips) if isinstance(c, np.ndarray)]
        codes, batch = {}, []
        for i in sorted(good, key=lambda i: (-len(clips[i]), i)) + [None]:          # longest first: what does not fit fails early
            if batch and (i is None or len(clips[batch[0]]) * (len(batch) + 1) > batch_seconds * rate):
                codes.update(zip(batch, nano.encode([clips[j] for j in batch])))
                batch = []
            batch.append(i)
        text, draft, names = [], [], []
        for i in good:
            ids = encode_text(tok, rows[i]['text'])
            if not ids or set(ids) & set(special.values()):
                clips[i] = ('text without tokens' if not ids else 'text holds a special token', rows[i]['text'][:200])
                continue
            if codes[i].shape != (-(-len(clips[i]) // hop), groups) or codes[i].max() >= radix:
                raise RuntimeError(f"{rows[i]['path']}: the codec gave codes {codes[i].shape} up to {codes[i].max()} for {len(clips[i])} samples")
            text.append(np.array(ids, dtype='<u4'))
            draft.append((len(ids), len(codes[i]), rows[i]['line'], rows[i]['source'], rows[i]['hash']))
            names.append(rows[i]['speaker'])
        kept = [codes[i] for i in good if isinstance(clips[i], np.ndarray)]
        rejects = [{'source': r['source'], 'line': r['line'], 'audio': r['audio'], 'reason': c[0], 'detail': c[1]} for r, c in zip(rows, clips) if not isinstance(c, np.ndarray)]
        save(unit_path(k), lambda f: np.savez(f, draft=np.array(draft, dtype=DRAFT), names=as_bytes(names), rejects=as_bytes(rejects),
             codes=np.concatenate(kept or [np.zeros((0, groups))]).astype('<u2'), text=np.concatenate(text or [np.zeros(0)]).astype('<u4')))
        return sum(map(len, kept)) * hop / rate, len(rejects)

    def units():
        """(unit number, its rows, their clips) with the audio of the next unit being read meanwhile."""
        stream, waiting, undone = (r for i, s in enumerate(sources) for r in source_rows(i, s)), deque(), set(todo)
        def clips(jobs):
            return [j if isinstance(j[0], str) and len(j) == 2 else load_clip(*j) for j in jobs] if pool is None else [j.result() if hasattr(j, 'result') else j for j in jobs]
        for k in range(n_units):
            rows = [r for _, r in zip(range(unit_rows), stream)]
            if k not in undone:
                continue
            jobs = [(r['reason'], r['detail']) if 'reason' in r else (r['path'], rate, max_seconds, min_frames * hop, silence_peak) for r in rows]
            waiting.append((k, rows, jobs if pool is None else [j if len(j) == 2 else pool.submit(load_clip, *j) for j in jobs]))
            if len(waiting) > (1 if pool else 0):
                k, rows, jobs = waiting.popleft()
                yield k, rows, clips(jobs)
        for k, rows, jobs in waiting:
            yield k, rows, clips(jobs)

    t0 = said = time.time()
    seconds = dropped = done = 0
    for k, rows, clips in units():
        s, d = encode_unit(k, rows, clips)
        seconds, dropped, done = seconds + s, dropped + d, done + 1
        if time.time() - said > 5 or done == len(todo):
            said, spent = time.time(), time.time() - t0
            left = spent / done * (len(todo) - done)
            print(f'{done:,}/{len(todo):,} units, {seconds / 3600:.2f} hours, {dropped:,} dropped, {seconds / spent:.0f}x real time, {left // 3600:.0f}:{left // 60 % 60:02.0f}:{left % 60:02.0f} left', flush=True)
    if pool:
        pool.shutdown()

    # join: speakers and splits need all rows, so they are decided here, from the units alone
    draft, names, rejects = [], [], []
    for k in range(n_units):
        with np.load(unit_path(k)) as unit:
            draft.append(unit['draft'])
            names += json.loads(unit['names'].tobytes())
            rejects += json.loads(unit['rejects'].tobytes())
    draft, names = np.concatenate(draft), np.array(names, dtype=object)
    bad = len(rejects)
    clips = Counter(n for n in names if n)
    usable = sorted((n for n in clips if clips[n] >= min_clips_per_speaker), key=lambda n: (share_of(n), n))
    if val_speakers and val_speakers >= len(usable):
        sys.exit(f'prepare.py: val_speakers: {val_speakers}, but only {len(usable)} speakers have {min_clips_per_speaker} clips or more')
    held = set(usable[:val_speakers])
    split = np.where([n in held for n in names], 2, np.where(draft['hash'] < val_share, 1, 0))
    trained = Counter(n for n, s in zip(names, split) if n and s == 0)
    low = {n for n in clips if n not in held and trained[n] < min_clips_per_speaker}     # counted after filters and held-out texts
    is_low = np.array([n in low for n in names], dtype=bool)
    keep = ~is_low if singleton_policy == 'remove' else np.ones(len(names), dtype=bool)
    rejects += [{'source': int(r['source']), 'line': int(r['line']), 'audio': '', 'reason': 'speaker with too few clips', 'detail': n} for r, n in zip(draft[~keep], names[~keep])]
    rejects.sort(key=lambda r: (r['source'], r['line']))
    speakers = sorted({n for n in clips} - low)
    number = {n: i for i, n in enumerate(speakers)}
    kept = draft[keep]
    index = np.zeros(len(kept), dtype=ROW)
    for field in ('text_len', 'frame_len', 'line', 'source'):
        index[field] = kept[field]
    for what in ('text', 'frame'):
        index[what + '_start'] = np.cumsum(kept[what + '_len']) - kept[what + '_len']
    index['split'], index['speaker'] = split[keep], [number.get(n, -1) for n in names[keep]]
    dropped = {s['name']: dict(sorted(Counter(r['reason'] for r in rejects if r['source'] == i).items())) for i, s in enumerate(sources)}
    nulls = int((index['speaker'] < 0).sum())
    meta = {'magic': MAGIC, 'version': VERSION, 'rows': len(index), 'frames': int(index['frame_len'].sum()), 'tokens': int(index['text_len'].sum()),
            'codec': {'id': codec, 'sample_rate': rate, 'hop': hop, 'levels': list(nano.levels), 'groups': groups},
            'tokenizer': tokenizer_meta, 'special_tokens': special, 'sources': settings['sources'], 'settings': settings,
            'counts': {'kept': {s['name']: int((index['source'] == i).sum()) for i, s in enumerate(sources)}, 'dropped': dropped,
                       'split': {name: int((index['split'] == i).sum()) for i, name in enumerate(SPLITS)}},
            'speaker_stats': {'usable_speakers': len(speakers), 'usable_rows': len(index) - nulls, 'low_count_speakers': len(low), 'low_count_rows': int(is_low.sum()),
                              'null_rows': nulls, 'null_share': nulls / max(1, len(index)), 'speakers_by_clips': {str(c): n for c, n in sorted(Counter(clips.values()).items())}},
            'speakers': speakers}
    new = os.path.join(building, 'corpus')
    shutil.rmtree(new, ignore_errors=True)
    os.makedirs(new)
    rejects_text = ''.join(json.dumps({'file': sources[r['source']]['path'], **{k: r[k] for k in ('line', 'audio', 'reason', 'detail')}}, ensure_ascii=False) + '\n' for r in rejects)
    save(os.path.join(new, 'rejects.jsonl'), lambda f: f.write(rejects_text.encode('utf-8', 'backslashreplace')))
    if not len(index) or bad > max_reject_share * total:
        print_table(meta)
        sys.exit(f'prepare.py: {bad:,} of {total:,} rows are bad ({bad / total:.1%}), max_reject_share is {max_reject_share:.1%}: see {new}/rejects.jsonl')

    def join(what, length):
        """Writer of one array of all units, row by row only where rows are dropped."""
        def write(f):
            at = 0
            for k in range(n_units):
                with np.load(unit_path(k)) as unit:
                    n = len(unit['draft'])
                    f.write(unit[what][np.repeat(keep[at:at + n], unit['draft'][length])].tobytes())
                at += n
        return write
    save(os.path.join(new, 'codes.bin'), join('codes', 'frame_len'))
    save(os.path.join(new, 'text.bin'), join('text', 'text_len'))
    save(os.path.join(new, 'index.bin'), lambda f: f.write(index.tobytes()))
    save(os.path.join(new, 'meta.json'), lambda f: f.write(json.dumps(meta, indent=1, ensure_ascii=False).encode()))
    Corpus(new)                             # sizes and ranges, once more, before it is shown
    shutil.rmtree(retired, ignore_errors=True)
    if os.path.isdir(out_dir):
        os.rename(out_dir, retired)
    os.rename(new, out_dir)
    shutil.rmtree(retired, ignore_errors=True)
    shutil.rmtree(building)
    print_table(meta)
    print(f'wrote {out_dir}; what was dropped and why is in {out_dir}/rejects.jsonl')
