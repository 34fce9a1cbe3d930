"""
Turns audio or tokens of any source into a corpus: codec tokens and text ids in flat files that every later stage maps into memory.

    python prepare.py config/tiny_prepare.py                        # one process: CPU, or one GPU
    torchrun --nproc_per_node=8 prepare.py config/prepare.py --num_workers=4        # a process a GPU; each reads audio in 4 more

Written to out_dir, which appears only when it is complete (the work in between lies in <out_dir>.building, as large again):

    codes.bin      uint16 [frames, 8]    packed codec tokens of all rows, end to end; 16 bytes a frame, 1.24 MB an hour
    text.bin       uint32 [tokens]       text ids: no special tokens, no repetition (layout is applied when a batch is made)
    index.bin      ROW [rows]            where each row lies, its speaker, source, split and line in the source's table
    meta.json      magic, version, sizes, codec, tokenizer, special ids, settings, counts, speakers
    rejects.jsonl  every row that was dropped: file, line (a row's number where there are no lines), audio, reason, detail

On one kind of device the same inputs give the same bytes, whatever the ranks, workers, batch size or interruptions. Killed, it
goes on where it was. Memory does not grow with the audio, and by about 0.4 KB a row. A clip must fill one codec frame; audio is mixed
to mono and resampled by soxr. Other scripts read a corpus through Corpus, a file through read_audio, a text through load_tokenizer and encode_text.
"""
import csv, fcntl, hashlib, io, itertools, json, math, os, pickle, re, shutil, sys, time, unicodedata
from collections import Counter, deque
from datetime import timedelta

import numpy as np

# -----------------------------------------------------------------------------
sources = ()                    # what goes in, in this order: a tuple of dicts, one a source; at least one
#   name          fixed namespace of its speakers ('name/speaker'): the same name in two sources is two people
#   path          csv, tsv: a header line; jsonl: one object a line; ljspeech: id|text or id|text|normalized text; parquet: a file or
#                 a folder of them; hf: a save_to_disk folder or a Hub name; folder: x.wav beside x.txt, a folder in it is a speaker
#   kind          one of those seven words; left out: by the extension or what is in the folder (first line with '|': ljspeech)
#   split, subset of a Hugging Face dataset: 'train' and none if left out
#   streaming     True: of a Hub dataset, or a folder of parquet (with 'kind': 'hf'), nothing is stored here, each rank reads it through.
#                 A commit to the Hub's dataset makes it another one, also for an unfinished build. Left out: False
#   columns       {'audio': .., 'text': .., 'speaker': .., 'language': ..} -> the table's column names (numbers: a table without
#                 header). Left out: audio, text. A column 'speaker', if there, is taken where no other is named (not by number). A row
#                 without speaker is a null row.
#                 parquet, hf: audio is a path or an Audio column. Columns nano_layer_1..8 (lists of packed codes; 'layers' gives
#                 another prefix) are taken for tokens of `codec`, and encoded_len, if there, must be their length
#   root          folder of relative audio paths; left out: the table's folder (ljspeech: its wavs/)
#   quotes        True: "a ""field""" is unquoted (csv, tsv); False: quotes are text (left out: True, ljspeech False)
#   language_tag  'es' puts 'es: ' before each text; a mapped language column does so row by row; left out: no tag
#   max_rows      only the first so many rows of the table; left out: all
out_dir = 'data/corpus'
codec = 'nvidia/nemo-nano-codec-22khz-1.89kbps-21.5fps'     # Hub name, or a local .nemo file
tokenizer = 'nineninesix/qwen3_5-full-attn-only-14'         # Hub name, or a local folder with tokenizer.json
special_tokens = {'start_of_speech': 248070, 'end_of_speech': 248071, 'start_of_text': 248073, 'end_of_text': 248074,
                  'tts_pad': 248076}                        # the released ids; {}: from gepard_special_tokens.json or, of a checkpoint, gepard_config.json in the tokenizer's folder
# filters: a row that fails one is written to rejects.jsonl
max_seconds = 40.0              # longer clips are dropped: they cost the most memory and are mostly wrongly cut; 0.0 = no limit
max_text_tokens = 1000          # longer texts are dropped: 40 s hold some 200 tokens of words, 800 bytes, so this is a page for a sentence; 0 = no limit
min_frames = 1                  # codec frames a clip must fill: 1 is 1024 samples at 22,050 Hz, 46 ms; 1023 samples are dropped
silence_peak = 1e-4             # a clip whose peak is below (-80 dBFS) is dropped: it teaches words as silence; 0.0 = off
max_reject_share = 0.05         # more bad rows than this and the run fails at the end, with nothing lost: raise it and run again; 1.0 = off
# speakers and the held-out part: decided when all rows are encoded, so these may still be changed while a build is unfinished
min_clips_per_speaker = 3       # training clips that make a speaker usable: a batch takes K = 3 clips of each; 1 = all are
singleton_policy = 'null_prefix'    # speakers with fewer: 'null_prefix' keeps their rows without a speaker, 'remove' drops them
val_share = 0.01                # share of texts held out, by a hash of the text: a sentence that ten voices say is on one side; 0.0 = off
val_speakers = 0                # so many usable speakers are kept out, by a hash of the name, for measuring on them (Corpus.split('val_speakers')); 0 = off
# how it runs: none of these changes a byte, but for batch_seconds and unit_rows on a GPU, where one code in 300 depends on the clips that
# share its batch (measured with TF32, which is torch's default); ranks and workers never change one
device = 'auto'                 # of the codec: 'auto' = cuda where there is one, else cpu
num_workers = 0                 # processes that read and resample audio; 0 = a thread of this process does
batch_seconds = 0.0             # audio seconds in one codec batch, of clips of one length; 0.0 = the codec's choice: 12 on a CPU, 380 on a GPU
unit_rows = 256                 # rows read, sorted by length, encoded and saved together (16 times as many tokenized ones): what a kill
                                # can lose, and what a rank takes at a time. A GPU wants many: only clips of one length share a batch
picture = True                  # histograms of the corpus in report.png; False = off
check_rows = 4                  # so many rows are decoded back to check-<row>.wav: what the model will hear; 0 = off
overwrite = False               # True: a corpus or an unfinished one with other settings in out_dir is replaced
# -----------------------------------------------------------------------------
MAGIC, VERSION = 'nanogepard-corpus', 1
ROW = np.dtype([('text_start', '<i8'), ('text_len', '<i8'), ('frame_start', '<i8'), ('frame_len', '<i8'), ('line', '<i8'),
                ('speaker', '<i4'), ('source', '<i4'), ('split', '<i4')])           # 64-bit offsets: 68,000 hours are 5.3e9 frames
DRAFT = np.dtype([('text_len', '<i8'), ('frame_len', '<i8'), ('line', '<i8'), ('source', '<i4'), ('who', '<i4'), ('hash', '<f8'), ('key', '<u8'),
                  ('tag', '<i4'), ('words', '<i4')])                        # a row before joining
NANO = {'sample_rate': 22050, 'hop': 1024, 'levels': [8, 7, 6, 6], 'groups': 8}         # what tokenized sources hold
SPLITS = ('train', 'val', 'val_speakers')
FREE = ('out_dir', 'max_reject_share', 'device', 'num_workers', 'batch_seconds', 'unit_rows', 'picture', 'check_rows', 'overwrite')     # they change no byte
JOINED = ('min_clips_per_speaker', 'singleton_policy', 'val_share', 'val_speakers')     # they change no unit, only how the units are joined
KINDS = {'csv': ',', 'tsv': '\t', 'ljspeech': '|', 'jsonl': '', 'parquet': '', 'hf': '', 'folder': ''}
KEYS = {'name': str, 'path': str, 'kind': str, 'split': str, 'subset': str, 'streaming': bool, 'columns': dict, 'root': str, 'quotes': bool,
        'language_tag': str, 'max_rows': int}       # of a source, and their types
AUDIO = ('.wav', '.flac', '.ogg', '.mp3')
NO_SPEAKER = ('', 'nan', 'NaN', 'NAN', 'None', 'none', 'null', 'NULL', 'N/A', '<NA>', '__null_ref__')    # what tables write for none ('Nan' is a name)

# ---- the reader

class Corpus:
    """A finished corpus: .meta dict, .rows ROW array, .speakers names by rows['speaker'] (-1 = null row). A wrong file is a ValueError."""

    def __init__(self, path):
        self.path, name = path, os.path.join(path, 'meta.json')
        if not os.path.exists(name):
            begun = f'; {path}.building is unfinished' if os.path.isdir(path + '.building') else ''
            raise FileNotFoundError(f'{path}: no corpus here (no meta.json){begun}')
        try:
            self.meta = meta = json.load(open(name, encoding='utf-8'))
        except ValueError as e:
            raise ValueError(f'{name}: not JSON: {e}')
        if (meta.get('magic'), meta.get('version')) != (MAGIC, VERSION):
            raise ValueError(f"{name}: magic {meta.get('magic')!r} version {meta.get('version')!r}, wanted {MAGIC!r} version {VERSION}")
        groups, self.speakers, self.radix = meta['codec']['groups'], meta['speakers'], math.prod(meta['codec']['levels'])
        self.files = {k: os.path.join(path, k + '.bin') for k in ('codes', 'text', 'index')}
        for k, item, n in (('codes', 2 * groups, meta['frames']), ('text', 4, meta['tokens']), ('index', ROW.itemsize, meta['rows'])):
            size = os.path.getsize(self.files[k])
            if size != n * item:
                raise ValueError(f'{self.files[k]}: {size} bytes, but meta.json says {n} x {item}: truncated, or of another corpus')
        self.rows = np.fromfile(self.files['index'], dtype=ROW)
        for what, n in (('frame', meta['frames']), ('text', meta['tokens'])):
            start, length = self.rows[what + '_start'], self.rows[what + '_len']
            for i in np.flatnonzero((start < 0) | (length < 1) | (start + length > n)):
                raise ValueError(f"{self.files['index']}: row {i}: {what} {start[i]} + {length[i]} is outside 0..{n}")
        self._codes = np.memmap(self.files['codes'], dtype='<u2', mode='r', shape=(meta['frames'], groups))
        self._text = np.memmap(self.files['text'], dtype='<u4', mode='r')

    def __len__(self):
        return len(self.rows)

    def text(self, i):
        """uint32 [n] text ids of row i, without special tokens."""
        r = self.rows[i]
        return np.array(self._text[r['text_start']:r['text_start'] + r['text_len']])

    def used_ids(self, length):
        """int64: each text id that some row has, once, in order; ValueError if one is not below `length`."""
        seen = np.zeros(length, bool)
        for start in range(0, len(self._text), 1 << 24):
            part = self._text[start:start + (1 << 24)]
            if part.max() >= length:
                raise ValueError(f"{self.files['text']}: has id {part.max()}, the tokenizer ends at {length - 1}")
            seen[part] = True
        return np.flatnonzero(seen)

    def codes(self, i):
        """uint16 [T, 8] packed codes of row i."""
        r = self.rows[i]
        codes = np.array(self._codes[r['frame_start']:r['frame_start'] + r['frame_len']])
        if codes.max() >= self.radix:
            raise ValueError(f"{self.files['codes']}: row {i} has code {codes.max()}, the codec has 0..{self.radix - 1}")
        return codes

    def split(self, name):
        """int64 row numbers of 'train', 'val' (held-out texts) or 'val_speakers' (held-out speakers)."""
        return np.flatnonzero(self.rows['split'] == SPLITS.index(name))

def stop(message):
    """A user's error: one line, exit code 2."""
    print('prepare.py: ' + message, file=sys.stderr)
    sys.exit(2)

# ---- text

def load_tokenizer(name):
    """(tokenizers.Tokenizer, path of its tokenizer.json) of a local folder or a Hub name."""
    from tokenizers import Tokenizer
    if not os.path.exists(os.path.join(name, 'tokenizer.json')):
        if os.path.isdir(name) or name.startswith(('.', '/')):
            raise FileNotFoundError(f'{name}: no tokenizer.json there')
        from huggingface_hub import snapshot_download
        name = snapshot_download(name, allow_patterns=['*token*.json'])     # a checkpoint takes its tokenizer_config.json along
    path = os.path.join(name, 'tokenizer.json')
    try:
        return Tokenizer.from_file(path), path
    except Exception as e:                                  # it knows no narrower one
        raise ValueError(f'{path}: {e}') from None

def clean_text(text):
    """NFC; each run of control characters, newlines, line separators and stray BOMs is one space; stripped."""
    return re.sub('\\s*[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ufeff]+\\s*', ' ', unicodedata.normalize('NFC', text)).strip()

def tagged(text, tag):
    """The text as the model reads it: clean, 'es: ' before it where it has the tag 'es'."""
    return f'{tag.lower()}: {clean_text(text)}' if tag else clean_text(text)

def encode_text(tokenizer, text):
    """Ids (list of int) of a transcript, no layout: NFC, stripped. tokenizer: of `tokenizers`, or a fast one of transformers."""
    return encode_texts(tokenizer, [text])[0]

def encode_texts(tokenizer, texts):
    tok = getattr(tokenizer, 'backend_tokenizer', tokenizer)
    if not tok.encode_special_tokens:
        # '<|im_end|>' typed in a transcript is ten characters, not an id. The library's switch passes over added tokens
        # that are not marked special ('<think>'), so mark them all. And a tokenizer.json may ask to truncate: never.
        tok.add_special_tokens(list(tok.get_added_tokens_decoder().values()))
        tok.encode_special_tokens = True
        tok.no_truncation()
        tok.no_padding()
    return [x.ids for x in tok.encode_batch_fast([clean_text(text) for text in texts], add_special_tokens=False)]

# ---- audio

def cut_short(path, log):
    """True where a file ends before its header says so. libsndfile reads such wav and ogg files without a word."""
    sizes = re.search(r'^ ?(?:data|SSND) : (\d+) \(should be', log, re.M)           # from its log on wav and aiff
    if sizes and int(sizes[1]) != 0xFFFFFFFF:           # that size means unknown: written to a pipe
        return True
    with io.BytesIO(path) if isinstance(path, bytes) else open(path, 'rb') as f:
        if f.read(4) != b'OggS':
            return False
        f.seek(max(0, f.seek(0, 2) - 70000))            # an ogg page is at most 65,307 bytes
        tail = f.read()
    page = tail[tail.rfind(b'OggS'):]                   # the last page must be whole and carry the end-of-stream flag
    return len(page) < 27 or not page[5] & 4 or len(page) < 27 + page[26] + sum(page[27:27 + page[26]])

def read_audio(path, sample_rate, max_seconds=0.0):
    """Mono float32 [samples] at sample_rate (mean of the channels, soxr's band-limited 'HQ') of any file, or its bytes, that libsndfile
    opens: wav, flac, ogg, mp3, .. ValueError 'reason: detail' where it is not a whole, finite clip of at most max_seconds."""
    import soundfile, soxr
    file = path
    if isinstance(path, bytes):
        file, path = io.BytesIO(path), f'{len(path)} bytes'
    elif not os.path.isfile(path) or not os.path.getsize(path):
        raise ValueError(f"audio file {'is empty' if os.path.isfile(path) else 'not found'}: {path}")
    try:
        with soundfile.SoundFile(file) as f:
            rate, frames, log = f.samplerate, f.frames, f.extra_info
            if frames > 2 ** 62:                                    # a flac from a pipe: libsndfile can't read it through
                raise ValueError(f'audio of unknown length: {path}: write it again, to a file')
            if max_seconds and frames > max_seconds * rate:         # before it is decoded: it may be a day long
                raise ValueError(f'audio too long: {path}: {frames / rate:.1f} s')
            audio = f.read(dtype='float32', always_2d=True).mean(axis=1)
        short = len(audio) < frames or cut_short(path if file is path else file.getvalue(), log)
    except (soundfile.SoundFileError, OSError, TypeError) as e:     # TypeError: raw audio, which has no header
        why = getattr(e, 'error_string', str(e))                    # of a file that is there libsndfile may say that it is not
        raise ValueError(f"audio unreadable: {path}: {'no audio that libsndfile knows' if 'does not exist' in why else why}")
    if short:
        raise ValueError(f'audio file truncated: {path}: {len(audio)} samples read, the header promises more')
    if not np.isfinite(audio).all():
        raise ValueError(f'audio not finite: {path}: {(~np.isfinite(audio)).sum()} NaN or infinite samples')
    return audio if rate == sample_rate else soxr.resample(audio, rate, sample_rate, 'HQ')

def load_clip(path, sample_rate, max_seconds, min_samples, silence_peak):
    """What a worker does: the clip, or the (reason, detail) that it is dropped for."""
    try:
        audio = read_audio(path, sample_rate, max_seconds)
    except ValueError as e:
        reason, _, detail = str(e).partition(': ')
        return reason, detail
    peak = np.abs(audio).max() if len(audio) else 0.0
    if len(audio) < min_samples:
        return 'audio too short', f'{len(audio)} samples at {sample_rate} Hz, at least {min_samples}'
    if peak < silence_peak:
        return 'audio silent', f'peak {peak:.1e}'
    if peak > 4:
        return 'audio not scaled to -1..1', f'peak {peak:.1f}'       # a float wav of 16-bit values, say
    return audio

def end_with_parent():
    """Initializer of a worker: when the main process is killed, end. It would wait for work for ever."""
    import multiprocessing, signal, threading
    signal.signal(signal.SIGINT, signal.SIG_IGN)            # Ctrl-C is the main process's
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()

# ---- tables

def kind_of(source):
    """The kind as given, else by the extension, the first line or what is in the folder; '' where none tells."""
    path, ext = source['path'], os.path.splitext(source['path'])[1].lower()[1:]
    if source.get('kind'):
        return source['kind']
    if os.path.isdir(path):
        return 'hf' if {'state.json', 'dataset_dict.json'} & set(os.listdir(path)) else 'parquet' if files_below(path, ('.parquet',)) else 'folder'
    with open(path, 'rb') as f:
        piped = b'|' in f.readline(65536)
    return ext if ext in ('jsonl', 'parquet') else 'ljspeech' if piped else ext if ext in ('csv', 'tsv') else ''

def fault_of(source):
    """What is wrong with the dict of a source, or ''."""
    for key, value in source.items():
        if key not in KEYS:
            return f"unknown key {key!r}: {', '.join(KEYS)} are there"
        if type(value) is not KEYS[key] or value in ('', {}):
            return f'{key} {value!r}: wanted {KEYS[key].__name__}' + ', not empty' * (not value)
    missing = [k for k in ('name', 'path') if k not in source]
    if missing:
        return f"no {' and no '.join(missing)}"
    name, path, columns = source['name'], source['path'], source.get('columns')
    if not name.strip() or '/' in name:
        return f"name {name!r}: a string without '/'"
    if not os.path.exists(path) and source.get('kind') != 'hf':
        return f"path {path!r}: no such table or folder (a Hub name takes 'kind': 'hf')"
    kind = kind_of(source)
    if kind not in KINDS:
        return f"kind {kind!r} of {path}: one of {', '.join(KINDS)}"
    if kind not in ('parquet', 'hf') and os.path.isdir(path) != (kind == 'folder'):
        return f"path {path!r} is {'' if os.path.isdir(path) else 'not '}a folder, kind is {kind!r}"
    idle = [k for k in source if k in ('split', 'subset', 'streaming') and kind != 'hf' or k == 'quotes' and not KINDS[kind]
            or k == 'columns' and kind == 'folder']
    if idle:
        return f"{idle[0]}: says nothing to kind {kind!r}"
    if source.get('max_rows', 1) < 1:
        return f"max_rows {source['max_rows']}: 1 or more"
    if not os.path.isdir(source.get('root', '.')):
        return f"root {source['root']!r}: no such folder"
    if clean_text(source.get('language_tag', 'x')) != source.get('language_tag', 'x'):
        return f"language_tag {source['language_tag']!r}: blanks or control characters at its ends or in it"
    needed, known, types = {'audio', 'text'}, {'audio', 'text', 'speaker', 'language'}, ({str}, {int})
    if kind in ('parquet', 'hf'):
        needed, known, types = set(), known | {'layers', 'encoded_len'}, ({str},)
    if columns and not (needed <= set(columns) <= known and {type(c) for c in columns.values()} in types):
        return f'columns {columns}: audio, text, speaker? and language?, by name, or all by number in a table without header'
    return ''

def files_below(path, endings):
    """Sorted paths of the files with one of the endings, in any depth. Links are followed, each folder is read once."""
    found, seen = [], set()
    for folder, below, names in os.walk(path, followlinks=True, onerror=lambda e: stop(str(e))):    # else what can't be read is passed over
        if os.path.realpath(folder) in seen:
            below.clear()                       # a link that leads back
            continue
        seen.add(os.path.realpath(folder))
        found += [os.path.join(folder, f) for f in names if f.lower().endswith(endings)]
    return sorted(found)

def folder_rows(source):
    """Like table_rows, of a folder of audio files, each with its text in a .txt of the same name. Line: the number in the sorted order."""
    files = [os.path.relpath(f, source['path']) for f in files_below(source['path'], (*AUDIO, '.txt'))]
    stem = lambda file: os.path.splitext(file)[0]
    texts = {stem(f): f for f in files if f.lower().endswith('.txt')}
    sounds = {f: stem(f) for f in files if f.lower().endswith(AUDIO)}
    alone = {s + '.wav': s for s in set(texts) - set(sounds.values())}
    for n, (audio, s) in enumerate(sorted({**sounds, **alone}.items()), 1):
        text, bad = '', 'audio file not found: beside its text' if audio in alone else '' if s in texts else 'no text file'
        if not bad:
            try:
                with open(os.path.join(source['path'], texts[s]), encoding='utf-8-sig', newline='') as f:
                    text = f.read()
            except (UnicodeDecodeError, OSError) as e:
                bad = f"text file {'unreadable' if isinstance(e, OSError) else 'is not UTF-8'}: {e}"
        yield n, bad, {'audio': audio, 'text': text, 'speaker': audio.split(os.sep)[0] if os.sep in audio else None}

def table_rows(source):
    """Yields (line number, why the line is dropped or '', dict of the mapped columns) of each data line.
    A line is a row, always: a quote that does not close on its line is an error, so that it can't swallow the lines below."""
    path, kind = source['path'], kind_of(source)
    columns = source.get('columns') or ({'audio': 0, 'text': -1} if kind == 'ljspeech' else {'audio': 'audio', 'text': 'text'})
    headless = any(isinstance(c, int) for c in columns.values())
    columns = columns if headless else {'speaker': 'speaker', **columns}
    quoting = csv.QUOTE_MINIMAL if source.get('quotes', kind != 'ljspeech') else csv.QUOTE_NONE
    csv.field_size_limit(2 ** 31 - 1)
    header, blank = None, []
    with open(path, 'rb') as f:
        for n, raw in enumerate(f, 1):      # bytes, so that only \n ends a line: str.splitlines also cuts at U+2028 and others
            try:
                line = raw.decode('utf-8-sig' if n == 1 else 'utf-8').rstrip('\r\n')
                if not line.strip():
                    blank.append(n)         # at the end of the file they are nothing, between rows they are counted
                    continue
                bad = ''
                fields = json.loads(line) if kind == 'jsonl' else next(csv.reader([line], strict=True, delimiter=KINDS[kind], quoting=quoting))
            except UnicodeDecodeError as e:
                like = 'UTF-16' if raw[:2] in (b'\xff\xfe', b'\xfe\xff') else 'cp1252 or Latin-1'
                stop(f'{path}:{n}: not UTF-8 (byte {raw[e.start]:#04x}), {like}?: convert the table')
            except csv.Error as e:
                stop(f"{path}:{n}: bad quotes ({e}): a quoted field ends on its line, quotes in it are doubled; "
                         "'quotes': False in the source takes them as text")
            except (ValueError, RecursionError) as e:
                fields, bad = {}, f'line is not JSON: {e}'
            if kind == 'jsonl' and not isinstance(fields, dict):
                fields, bad = {}, 'line is not a JSON object'
            if header is None and b'\0' in raw:
                stop(f'{path}:{n}: NUL bytes, UTF-16 without its mark?: convert the table')
            if header is None and not bad:  # the first line
                if kind == 'ljspeech' and 'columns' not in source and (len(fields) not in (2, 3) or {'audio', 'text'} <= set(fields)):
                    stop(f"{path}:{n}: {fields}: not id|text or id|text|normalized text: say which is which in the source's columns")
                header = list(range(len(fields))) if headless else list(fields)
                columns = {role: c + len(header) if headless and c < 0 else c for role, c in columns.items()}
                missing = [columns[role] for role in source.get('columns') or ('audio', 'text') if columns[role] not in header]
                if missing:
                    stop(f"{path}:{n}: no column {', '.join(map(repr, missing))}; it has {header}: say which is which in the source's columns")
                near = [(c, h) for c in {*columns.values()} - {*header} for h in header if isinstance(h, str) and h.strip().lower() == c]
                if near:                    # the speaker's, say: without it every row would be a null row
                    stop(f"{path}:{n}: column {near[0][1]!r} is not {near[0][0]!r}: rename it, or say which is which in the source's columns")
                if len(set(header)) < len(header):
                    stop(f'{path}:{n}: a column name is there twice: {header}')
                if kind != 'jsonl' and not headless:
                    continue
            if kind != 'jsonl':
                bad = '' if len(fields) == len(header) else f'wrong number of fields: {len(fields)}, the first line has {len(header)}'
                fields = dict(zip(header, fields))
            yield from ((b, 'line is blank', {}) for b in blank)
            yield n, bad, {role: fields.get(c) for role, c in columns.items()}
            blank = []
    if header is None and kind == 'jsonl' and os.path.getsize(path):
        stop(f'{path}: no line of it is a JSON object')

def open_lines(source):
    """(count, read, files, tokenized) of a table or a folder; read(start, end) gives (its rows, codes: None), and start must not go back."""
    lines, at = folder_rows if kind_of(source) == 'folder' else table_rows, 0
    stream, files = lines(source), [source['path']] if lines is table_rows else files_below(source['path'], (*AUDIO, '.txt'))
    def read(start, end):
        nonlocal at
        rows, at = list(itertools.islice(stream, start - at, end - at)), end
        return rows, None
    return lambda: sum(1 for _ in itertools.islice(lines(source), source.get('max_rows'))), read, files, False

def source_rows(number, source, rows=None):
    """Yields a dict for each of table_rows' rows (or those given): source, line, audio; then path, text, tag, hash, key, speaker (None: null
    row), or reason, detail."""
    kind, path = kind_of(source), source['path']
    root = source.get('root') or (path if os.path.isdir(path) else os.path.join(os.path.dirname(path), 'wavs' * (kind == 'ljspeech')))
    for line, bad, fields in table_rows(source) if rows is None else rows:
        audio, text, tag = ('' if fields.get(k) is None else fields[k] for k in ('audio', 'text', 'language'))
        data = None                             # an Audio column: the file's bytes, its path, or both
        if isinstance(audio, bytes):
            data, audio = audio, ''
        elif isinstance(audio, dict):
            data, audio = audio.get('bytes'), audio.get('path') or ''
        speaker = fields.get('speaker')
        if isinstance(speaker, float) and speaker.is_integer():
            speaker = int(speaker)              # a column of ints with holes is read as floats
        speaker = '' if speaker is None else clean_text(str(speaker))
        if not bad and not (all(isinstance(x, str) for x in (audio, text, tag)) and isinstance(data, (bytes, type(None)))):
            bad = f'field is not a string: audio {audio!r}, text {text!r}, language {tag!r}'[:200]
        elif not bad:
            audio, text, tag = audio.strip(), clean_text(text), clean_text(tag) or source.get('language_tag', '')
            audio += '.wav' * (kind == 'ljspeech' and not audio.lower().endswith(AUDIO))
            if not text:
                bad = 'text empty'
            elif re.search('[\ud800-\udfff]', text + audio + speaker + tag):        # half a UTF-16 pair: "\ud83d" in a jsonl
                bad = f'not Unicode: {ascii(text)[:200]}'
            elif re.search('[\0\ufffd]', fields['text']):       # half-read UTF-16; a byte that some other program could not decode
                bad = f'text damaged: {ascii(fields["text"])[:200]}'
            elif not any(c.isalnum() for c in text):            # punctuation, emoji, zero-width characters: nothing to speak
                bad = f'text without a letter or digit: {ascii(text)[:200]}'
        row = {'source': number, 'line': line, 'audio': str(audio)}
        if bad:
            reason, _, detail = bad.partition(': ')
            yield {**row, 'reason': reason, 'detail': detail}
            continue
        yield {**row, 'path': os.path.join(root, audio) if data is None else data, 'text': tagged(text, tag), 'tag': tag.lower(),
               'hash': share_of(text), 'key': key_of(number, text, audio.encode() if data is None else data),
               'speaker': None if speaker in NO_SPEAKER else f"{source['name']}/{speaker}"}

# ---- Arrow: parquet and Hugging Face datasets

def open_parquet(source, want):
    """(files, the schema of each, count, batches) of a parquet file or a folder of them. batches(names) yields (number of the first row, Arrow
    table) in order; what lies before row want[0] need not come. count(most, text): rows, at most so many; text is the column to count by."""
    import pyarrow as pa, pyarrow.parquet as pq
    path, schemas, groups = source['path'], [], []
    files = files_below(path, ('.parquet',)) if os.path.isdir(path) else [path]
    for f in files:
        try:
            with pq.ParquetFile(f) as p:
                schemas.append(p.schema_arrow)
                groups += [(f, g, p.metadata.row_group(g).num_rows) for g in range(p.num_row_groups)]
        except (pa.ArrowInvalid, OSError) as e:
            stop(f"{f}: not a whole parquet file: {' '.join(str(e).split())[:200]}")
    if not files:
        stop(f'{path}: no .parquet file in it')
    def batches(names):
        at = 0
        for f, g, n in groups:
            if at + n <= want[0]:               # another rank's
                at += n
                continue
            with pq.ParquetFile(f, buffer_size=1 << 20) as p:
                for batch in p.iter_batches(1024, [g], names):      # a row group may be larger than memory
                    yield at, pa.Table.from_batches([batch])
                    at += len(batch)
    return files, schemas, lambda most, text: min(most, sum(n for *_, n in groups)), batches

def open_hf(source, want):
    """open_parquet of a save_to_disk folder or a Hugging Face dataset."""
    import datasets, huggingface_hub
    path, split, streaming = source['path'], source.get('split', 'train'), source.get('streaming', False)
    load = lambda revision: datasets.load_dataset(path, source.get('subset'), split=split, streaming=streaming, revision=revision)
    try:
        if streaming and not os.path.isdir(path) and not source['revision']:        # the other ranks read the one that rank 0 finds
            source['revision'] = huggingface_hub.HfApi().dataset_info(path).sha
        if os.path.isdir(path) and not streaming:
            data = datasets.load_from_disk(path)
        else:
            data = load(source['revision'])
        data = (data[split] if isinstance(data, dict) else data).with_format('arrow')
        schema = next(data.iter(1)).schema if streaming else data.features.arrow_schema
        known = (load(None).info.splits or {}).get(split) if streaming else None        # what the Hub says, mostly of no named revision
    except Exception as e:                      # of many kinds: no such name, no network, no such split, no rows, a broken file
        hint = "; without 'streaming' what is cached will do" * (type(e).__name__ == 'OfflineModeIsEnabled' and streaming)
        stop(f"{path}, split {split!r}: {type(e).__name__}: {' '.join(str(e).split())[:300]}{hint}")
    files = [] if source['revision'] else files_below(path, ('.parquet',)) if streaming else [f['filename'] for f in data.cache_files]
    if streaming and not files and not source['revision']:      # of other files a change would not be seen
        stop(f'{path}: no .parquet file in it')
    def count(most, text):
        if not streaming:
            return min(most, len(data))
        return min(most, known.num_examples) if known and known.num_examples else sum(map(len, data.select_columns([text]).take(most).iter(1024)))
    def batches(names):
        at, mapped = want[0], data
        if streaming:
            for batch in data.select_columns(names).skip(at).iter(1024):
                yield at, batch
                at += len(batch)
            return
        for at in range(0, len(data), 1024):
            if at % 16384 == 0 and files:       # what was read of a mapped file stays in resident memory: map it anew
                mapped = pickle.loads(pickle.dumps(mapped))
            if at + 1024 > want[0]:
                yield at, mapped.select_columns(names)[at:at + 1024]
    return files, [schema], count, batches

def open_arrow(source):
    """open_lines of parquet and Hugging Face datasets. Of tokens read gives (rows, what tokens_of makes of each)."""
    path, given, most, want = source['path'], source.get('columns') or {}, source.get('max_rows', sys.maxsize), [0]
    try:
        files, schemas, count, batches = (open_hf if kind_of(source) == 'hf' else open_parquet)(source, want)
    except ImportError as e:
        stop(f"source {source['name']!r}: {e}: pip install {(e.name or 'datasets').split('.')[0]}")
    prefix, has = given.get('layers', 'nano_layer_'), schemas[0].names
    layers = sorted((n for n in has if re.fullmatch(re.escape(prefix) + '[0-9]+', n)), key=lambda n: int(n[len(prefix):]))
    wanted = {f'layer{k}': f'{prefix}{k + 1}' for k in range(NANO['groups'])}
    if layers and layers != list(wanted.values()) or 'layers' in given and not layers:
        stop(f"{(files or [path])[0]}: has {len(layers)} token columns ({', '.join(layers)}), the codec {len(wanted)}: {', '.join(wanted.values())}")
    roles = {**(wanted if layers else {'audio': 'audio'}), 'text': 'text', **{k: k for k in ('speaker', 'encoded_len')[:1 + bool(layers)] if k in has}}
    roles.update((k, v) for k, v in given.items() if k != 'layers' and not (layers and k == 'audio'))
    if 'speaker' not in roles and (near := [n for n in has if n.strip().lower() == 'speaker']):      # else every row would be a null row
        stop(f"{(files or [path])[0]}: column {near[0]!r} is not 'speaker': rename it, or say which is which in the source's columns")
    ints = r'u?int(8|16|32|64)'
    types = {**{c: (rf'(large_|fixed_size_)?list<\w+: {ints}( not null)?>(\[\d+\])?', 'a list of ints') for c in layers},
             roles.get('encoded_len'): (ints + '|float|double|null', 'ints')}
    for f, schema in zip(files or [path], schemas):
        missing = [c for c in roles.values() if schema.names.count(c) != 1]
        if missing:
            stop(f"{f}: no column {', '.join(map(repr, missing))} or more than one; it has {schema.names}: say which is which in the source's columns")
        for c, (pattern, what) in types.items():
            if c and not re.fullmatch(pattern, str(schema.field(c).type)):
                stop(f'{f}: column {c} is {schema.field(c).type}, wanted {what}')
    stream, held = batches(list(dict.fromkeys(roles.values()))), []     # read forward, also where rows could be had in any order
    def read(start, end):
        want[0], parts, upto = start, [], start
        while upto < end:
            at, batch = held.pop() if held else next(stream, (None, None))
            if batch is None:
                stop(f"{path}: it ended before row {end}; {count(most, roles['text'])} rows were promised")
            upto = at + len(batch)
            if upto > start:
                part = batch.slice(max(0, start - at), end - max(at, start))
                parts.append(part.select(list(roles.values())).rename_columns(list(roles)))
        if upto > end:
            held.append((at, batch))
        plain = [k for k in roles if k != 'encoded_len' and not k.startswith('layer')]      # tokens never become Python lists
        rows = [fields for part in parts for fields in part.select(plain).to_pylist()]      # part by part: another file may have other types
        codes = [c for part in parts for c in tokens_of(part)] if layers else None
        return [(start + n, '', fields) for n, fields in enumerate(rows, 1)], codes
    return lambda: count(most, roles['text']), read, files, bool(layers)

def tokens_of(table):
    """Token columns of a batch -> of each row its codes uint16 [frames, layers], or (reason, detail)."""
    import pyarrow.compute as pc
    names, why, none = [n for n in table.column_names if n.startswith('layer')], {}, -2 ** 63         # none: a null in a list
    radix = math.prod(NANO['levels'])
    length = np.stack([pc.fill_null(pc.list_value_length(table[n]), -1).to_numpy() for n in names], 1).astype(np.int64)        # [rows, layers]
    said = length[:, 0]
    if 'encoded_len' in table.column_names:
        said = pc.fill_null(table['encoded_len'].cast('int64', safe=False), -1).to_numpy()
    for fault, reason, detail in (((length < 0).any(1), 'tokens missing', lambda i: f'layer {np.argmin(length[i]) + 1} is null'),
                                  ((length != length[:, :1]).any(1), 'layers of different lengths', lambda i: str(length[i].tolist())),
                                  (length[:, 0] != said, 'encoded_len disagrees', lambda i: f'{said[i]}, but {length[i, 0]} frames')):
        for i in np.flatnonzero(fault):
            why.setdefault(int(i), (reason, detail(i)))
    good = np.array([i not in why for i in range(len(table))], dtype=bool)
    table, frames = table.filter(good), np.where(good, length[:, 0], 0)
    codes = np.stack([pc.fill_null(pc.list_flatten(table[n]).cast('int64', safe=False), none).to_numpy() for n in names], 1)    # [frames, layers]
    start, wrong = np.cumsum(frames) - frames, (codes < 0) | (codes >= radix)
    for k in np.flatnonzero(wrong.any(1))[::-1]:        # backwards: the first wrong frame of a row is named
        i, layer = int(np.searchsorted(start + frames, k, 'right')), int(np.argmax(wrong[k]))
        value = int(codes[k, layer]) if codes[k, layer] != none else None
        why[i] = 'token out of range', f'layer {layer + 1}, frame {k - start[i]}: {value}, the codec has 0..{radix - 1}'
    codes = codes.astype('<u2')
    return [why[i] if i in why else codes[at:at + n] for i, (at, n) in enumerate(zip(start, frames))]

# ---- small tools

def key_of(source, text, data):
    """64 bits that are the same for the same text and audio (name, bytes or tokens) of a source: duplicates are found by them."""
    h = hashlib.sha256(f'{source}\0{text}\0'.encode('utf-8', 'surrogatepass'))
    h.update(data)
    return int.from_bytes(h.digest()[:8], 'little')

def share_of(text):
    """A number in 0..1 that is the same for the same text on every run and machine."""
    return int.from_bytes(hashlib.sha256(text.encode('utf-8', 'surrogatepass')).digest()[:6], 'big') / 2 ** 48

def sha256_of(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()

def hash_of(files):
    """Of a source: a table whole; of many or large files names and sizes, and, but for audio, the last 64 KB, where parquet keeps its footer."""
    if len(files) == 1 and not files[0].endswith(('.parquet', '.arrow')):
        return sha256_of(files[0])
    h, above = hashlib.sha256(), len(os.path.commonpath(files)) if files else 0
    for path in files:
        h.update(path[above:].encode('utf-8', 'surrogateescape') + b'\0')
        try:
            size = os.path.getsize(path)
            h.update(f'{size}\0'.encode())
            if not path.lower().endswith(AUDIO):
                with open(path, 'rb') as f:
                    f.seek(max(0, size - 65536))
                    h.update(f.read())
        except OSError:
            pass                                # gone or not readable: its row will say so
    return h.hexdigest()

def save(path, write):
    """write(file) into a temporary name, down to the disk, then renamed: path is whole or not there."""
    beside = f'{path}.{os.getpid()}.tmp'        # of this process: a rank of a killed run may still be writing the same
    with open(beside, 'wb') as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(beside, path)

def lay_out(rows):
    """Fills in where each row of a ROW array lies: end to end, in 64 bits."""
    for what in ('text', 'frame'):
        rows[what + '_start'] = np.cumsum(rows[what + '_len']) - rows[what + '_len']

def draw(path, rows, meta):
    """The corpus as four histograms."""
    from matplotlib.figure import Figure        # not pyplot: no display
    rate = meta['codec']['sample_rate'] / meta['codec']['hop']
    figure = Figure((12, 7), layout='constrained')
    for axes, (what, x) in zip(figure.subplots(2, 2).flat, (
            ('seconds of a row', rows['frame_len'] / rate), ('text tokens of a row', rows['text_len']),
            ('text tokens a second', rows['text_len'] / rows['frame_len'] * rate), ('rows of a usable speaker', np.bincount(rows['speaker'] + 1)[1:]))):
        axes.hist(np.minimum(x, np.quantile(x, 0.999)) if len(x) else x, 100)
        axes.set(xlabel=what, yscale='log' if len(x) else 'linear')
    figure.suptitle(f"{len(rows):,} rows, {meta['frames'] / rate / 3600:,.2f} hours, {len(meta['speakers']):,} usable speakers")
    figure.savefig(path)

def differing(old, new, at=''):
    """The settings that differ: ['max_seconds: 40.0 there, 30.0 now', ..]."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [d for k in sorted({*old, *new}) for d in differing(old.get(k), new.get(k), f'{at}.{k}' if at else k)]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new)) for d in differing(a, b, f'{at}[{i}]')]
    return [] if old == new else [f'{at}: {old!r} there, {new!r} now']

def print_table(meta):
    """The last thing on the screen: kept and dropped by source and reason, hours, speakers."""
    print(f"\n{'source':<24}{'':<38}{'rows':>10}")
    for name, kept in meta['counts']['kept'].items():
        print(f"{name:<24}{'kept':<38}{kept:>10,}")
        for reason, n in meta['counts']['dropped'][name].items():
            print(f"{'':<24}{'dropped: ' + reason:<38}{n:>10,}")
    print(f"\n{'source':<24}{'language':<14}{'hours':>12}{'words':>12}{'tokens a word':>14}")         # 4 or more: the tokenizer falls back to bytes
    for t in meta['text_stats']:
        print(f"{t['source']:<24}{t['language'] or '-':<14}{t['hours']:>12.2f}{t['words']:>12,}{t['tokens'] / max(1, t['words']):>14.2f}")
    s, hours = meta['speaker_stats'], meta['frames'] * meta['codec']['hop'] / meta['codec']['sample_rate'] / 3600
    print(f"{meta['rows']:,} rows kept, {hours:.2f} hours, {meta['frames']:,} frames, {meta['tokens']:,} text tokens; "
          + ', '.join(f'{k} {n:,}' for k, n in meta['counts']['split'].items()))
    print(f"{s['usable_speakers']:,} usable speakers ({s['usable_rows']:,} rows), {s['low_count_speakers']:,} with fewer than "
          f"{meta['settings']['min_clips_per_speaker']} training clips ({s['low_count_rows']:,} rows), null rows {s['null_share']:.1%}")

# ---- the script. Under this guard since other scripts import from this file, and so do the worker processes

if __name__ == '__main__':
    sys.stdout.reconfigure(errors='backslashreplace')       # a text in letters that the terminal lacks must not end the run
    from configurator import configure
    config = configure(globals())
    def disk_fault(kind, e, trace):
        """Ctrl-C, and a disk that is full or can't be read, are no bugs: one line. Units that are done stay."""
        if kind is KeyboardInterrupt:
            if 'pool' in globals():
                pool.shutdown(cancel_futures=True)
            stop(f'stopped; started again it goes on (in {out_dir}.building)')
        if not issubclass(kind, OSError):
            return sys.__excepthook__(kind, e, trace)
        stop(str(e) if e.filename else f'{e} (in {out_dir}.building)')
    sys.excepthook = disk_fault
    out_dir = out_dir.rstrip('/')
    if os.path.islink(out_dir):                             # the disk that it leads to is meant
        out_dir = os.path.realpath(out_dir)
    if not out_dir or os.path.ismount(out_dir):             # a mounted folder can't be put in the place of another
        stop(f"out_dir: a folder to be made, got {config['out_dir']!r}")

    # ranks share nothing but a counter of the units taken and the disk. Rank 0 checks everything, then the others begin
    rank, local_rank, world = (int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)))
    revisions = {}                                          # of what is streamed from the Hub
    if world > 1:
        from torch.distributed import rendezvous
        store = next(rendezvous('env://'))[0]
        store.set_timeout(timedelta(days=30))
        if rank:
            checked, revisions = json.loads(store.get('checked'))       # waits
            if not checked:
                sys.exit()                                  # there is nothing to do

    # validate: every fault is named before torch is imported
    for low, high, keys in ((0, 1, 'silence_peak max_reject_share val_share'),
                            (0, math.inf, 'max_seconds max_text_tokens val_speakers num_workers batch_seconds check_rows'),
                            (1, math.inf, 'min_frames min_clips_per_speaker unit_rows')):
        for key in keys.split():
            if not low <= config[key] <= high:
                stop(f'{key}: {config[key]} is not in {low}..{high}')
    if val_share == 1:
        stop(f'val_share: {val_share} leaves no row to train on')
    if singleton_policy not in ('null_prefix', 'remove'):
        stop(f"singleton_policy: 'null_prefix' or 'remove', got {singleton_policy!r}")
    if not sources or not all(isinstance(s, dict) for s in sources):
        stop(f'sources: at least one dict (see config/tiny_prepare.py), got {sources!r}')
    for i, s in enumerate(sources):
        complaint = fault_of(s) or f"name {s['name']!r}: another source has it" * (s['name'] in [x['name'] for x in sources[:i]])
        if complaint:
            stop(f"sources[{i}]{' ' + repr(s['name']) if 'name' in s else ''}: {complaint}")
    sources = [{**s, 'kind': kind_of(s), 'revision': revisions.get(s['name'])} for s in sources]     # kind, once: it may take a walk through the folder
    try:
        tok, path = load_tokenizer(tokenizer)
    except Exception as e:
        stop(f"tokenizer {tokenizer!r}: {' '.join(str(e).split())[:300]}")
    length, special, beside = tok.get_vocab_size(), dict(special_tokens), os.path.join(tokenizer, 'gepard_special_tokens.json')
    if not special:
        checkpoint = os.path.join(tokenizer, 'gepard_config.json')
        beside = checkpoint if os.path.exists(checkpoint) and not os.path.exists(beside) else beside
        try:
            special = json.load(open(beside))
            special = {k: v for k, v in special.get('special_tokens', special).items() if k != 'tokeniser_length'}
        except (OSError, ValueError, AttributeError) as e:
            stop(f'special_tokens is {{}}, and {beside}: {e}')
    specials = {v for v in special.values() if type(v) is int and 0 <= v < length}
    wanted = {'start_of_speech', 'end_of_speech', 'start_of_text', 'end_of_text', 'tts_pad'}
    if set(special) != wanted or len(specials) < 5:
        stop(f"special_tokens: {', '.join(sorted(wanted))} take five different ids below {length}, the length of {tokenizer}; got {special}")

    # the settings that the bytes depend on: those of an earlier run in the same place must be the same
    counts, readers, files, tokenized = zip(*((open_arrow if kind_of(s) in ('parquet', 'hf') else open_lines)(s) for s in sources))
    if device == 'auto' and all(tokenized):                 # tokens need neither codec nor torch
        device = 'cpu'
    elif device == 'auto':
        import torch
        device = f'cuda:{local_rank % torch.cuda.device_count()}' if torch.cuda.is_available() else 'cpu'     # several ranks may share a GPU
    bound = ('batch_seconds', 'unit_rows') if device.startswith('cuda') else ()
    settings = json.loads(json.dumps({k: v for k, v in config.items() if k not in FREE or k in bound}))     # tuples become lists, as in the file
    settings.update(special_tokens=special, version=VERSION, tokenizer_hash=sha256_of(path),
                    codec_hash=sha256_of(codec) if os.path.isfile(codec) else '')
    building = out_dir + '.building'
    if not rank:
        settings['table_hashes'] = {s['name']: s['revision'] or hash_of(f) for s, f in zip(sources, files)}
        finished = os.path.isfile(out_dir) or os.path.isdir(out_dir) and bool(os.listdir(out_dir))
        if finished:
            try:
                meta = json.load(open(os.path.join(out_dir, 'meta.json'), encoding='utf-8'))
                mine = meta['magic'] == MAGIC and meta['settings']
            except (OSError, ValueError, LookupError, TypeError):
                mine = False
            if not mine:
                stop(f'{out_dir} is or holds files that are not a corpus: choose another --out_dir')
        begun, encoded = os.path.join(building, 'settings.json'), {k: v for k, v in settings.items() if k not in JOINED}
        of_units = json.load(open(begun)) if os.path.exists(begun) and any(n.startswith('unit-') for n in os.listdir(building)) else None     # none yet: nothing to lose
        for folder, changed in ((out_dir, finished and differing(mine, settings)), (building, of_units and differing(of_units, encoded))):
            if changed and not overwrite:
                stop(f"{folder} was made with other settings ({'; '.join(changed)}): choose another --out_dir, or --overwrite")
        if finished and not overwrite:
            try:
                print_table(Corpus(out_dir).meta)
            except (OSError, ValueError) as e:
                stop(f'{e}: --overwrite makes it anew')
            print(f'{out_dir} is complete and was made with these settings: nothing to do')
            shutil.rmtree(building, ignore_errors=True)
            if world > 1:
                store.set('checked', '[[], {}]')
                time.sleep(1)                           # the others fetch it from here
            sys.exit()
        try:
            os.makedirs(building, exist_ok=True)
            lock = open(os.path.join(building, 'lock'), 'w')        # held until this process ends
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stop(f'another prepare.py is building {out_dir}')
        except OSError as e:
            stop(f'out_dir: {e}')
        if of_units != encoded:                         # overwrite, or killed in its last act: no unit of other settings stays
            for name in os.listdir(building):
                if name.startswith('unit-'):
                    os.remove(os.path.join(building, name))
        save(begun, lambda f: f.write(json.dumps(encoded).encode()))

        # one pass over the tables: what is wrong with them is said now, not after a day of encoding
        checked = [count() for count in counts]
        if not sum(checked):
            stop(f"no rows in {', '.join(s['path'] for s in sources)}")
        if world > 1:
            store.set('checked', json.dumps([checked, {s['name']: s['revision'] for s in sources}]))
    total, units = sum(checked), []                     # a unit: source, rows start..end of it, file
    for i, n in enumerate(checked):
        step = unit_rows * (16 if tokenized[i] else 1)
        for start in range(0, n, step):
            units.append((i, start, min(start + step, n), os.path.join(building, f'unit-{unit_rows}-{len(units):06d}.npz')))
    missing = sum(not os.path.exists(unit[3]) for unit in units)
    if not rank:
        print(f'{total:,} rows in {len(sources)} sources = {len(units):,} units of {unit_rows} rows, {len(units) - missing:,} of them done before')

    nano, spec = None, NANO
    if not all(tokenized) or check_rows and not rank:   # of tokens alone only check-*.wav needs a codec
        from codec import NanoCodec
        try:
            nano = NanoCodec(codec, device)
        except (ValueError, OSError, ImportError, RuntimeError, AssertionError) as e:
            stop(f"codec {codec!r} on {device}: {' '.join(str(e).split())[:300]}" + '; --check_rows=0 needs none' * all(tokenized))
        nano.limit = int(batch_seconds * nano.sample_rate / nano.hop) or nano.limit
        spec = {'sample_rate': nano.sample_rate, 'hop': nano.hop, 'levels': list(nano.levels), 'groups': nano.groups}
        if spec != NANO and any(tokenized):
            stop(f'codec {codec} is {spec}, tokenized sources hold {NANO}')
    rate, hop, groups, radix = spec['sample_rate'], spec['hop'], spec['groups'], math.prod(spec['levels'])
    if not rank:
        print(f"codec {codec} {f'on {device}' if nano else 'is not run'}: {rate} Hz, hop {hop}, {rate / hop:.3f} frames/s, {groups} groups of {radix}")

    # encode, unit by unit, while the pool reads the audio of the next one. No workers: a thread of this process does
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    from multiprocessing import get_context
    pool = ThreadPoolExecutor(1)
    if num_workers:                                 # spawn: fork is not safe once torch has threads
        pool = ProcessPoolExecutor(num_workers, get_context('spawn'), end_with_parent)
    # a rank that is done takes the next unit: none waits longer than a unit takes, whatever the clips' lengths
    taken = itertools.count() if world == 1 else (store.add('taken', 1) - 1 for _ in itertools.count())
    todo = (unit for unit in map(units.__getitem__, itertools.takewhile(lambda k: k < len(units), taken)) if not os.path.exists(unit[3]))
    ahead, begin, said, seconds, dropped, done = deque(), time.time(), time.time(), 0, 0, 0
    for unit in itertools.chain(todo, [None]):      # None encodes what is still ahead
        if unit:
            source, start, end, file = unit
            lines, codes = readers[source](start, end)
            rows = list(source_rows(source, sources[source], lines))
            for r, c in zip(rows, codes or rows):
                if 'reason' not in r:
                    r['clip'] = c if codes else pool.submit(load_clip, r.pop('path'), rate, max_seconds, min_frames * hop, silence_peak)
            ahead.append((source, rows, file))
        if not ahead or unit and len(ahead) < 2:
            continue
        source, rows, file = ahead.popleft()
        tokens, good = tokenized[source], [r for r in rows if 'reason' not in r]
        for r, ids in zip(good, encode_texts(tok, [r['text'] for r in good])):
            clip = r['clip'] = r['clip'] if tokens else r['clip'].result()                  # codes or samples; or why not
            r['ids'] = np.array(ids, dtype='<u4')
            if isinstance(clip, tuple):
                r['reason'], r['detail'] = clip
            elif tokens and len(clip) < min_frames:
                r['reason'], r['detail'] = 'audio too short', f'{len(clip)} frames, at least {min_frames}'
            elif tokens and max_seconds and len(clip) * hop > max_seconds * rate + hop:      # the last frame is filled up
                r['reason'], r['detail'] = 'audio too long', f'{len(clip) * hop / rate:.1f} s'
            elif max_text_tokens and len(ids) > max_text_tokens:
                r['reason'], r['detail'] = 'text too long', f'{len(ids)} tokens'
            elif not ids or not specials.isdisjoint(ids):
                r['reason'], r['detail'] = 'text holds a special token' if ids else 'text gives no tokens', r['text'][:200]
        good = [r for r in good if 'reason' not in r]
        for r, codes in zip(good, [r['clip'] for r in good] if tokens else nano.encode([r['clip'] for r in good])):
            r['codes'] = codes.astype('<u2')
            if tokens:
                r['key'] = key_of(source, r['text'], r['codes'])
            elif codes.shape != (-(-len(r['clip']) // hop), groups) or codes.max() >= radix:
                raise RuntimeError(f"{r['audio']}: the codec gave codes {codes.shape} up to {codes.max()} for {len(r['clip'])} samples")
        names, tags = sorted({r['speaker'] for r in good} - {None}), sorted({r['tag'] for r in good})
        who = {None: -1, **{n: k for k, n in enumerate(names)}}
        draft = np.array([(len(r['ids']), len(r['codes']), r['line'], source, who[r['speaker']], r['hash'], r['key'], tags.index(r['tag']),
                           len(r['text'].split())) for r in good], dtype=DRAFT)
        rejects = [{k: r[k] for k in ('line', 'audio', 'reason', 'detail')} for r in rows if 'reason' in r]
        words = np.frombuffer(json.dumps({'names': names, 'tags': tags, 'rejects': rejects}).encode(), dtype=np.uint8)
        text = np.concatenate([np.zeros(0, '<u4'), *(r['ids'] for r in good)])
        codes = np.concatenate([np.zeros((0, groups), '<u2'), *(r['codes'] for r in good)])
        save(file, lambda f: np.savez(f, draft=draft, words=words, text=text, codes=codes))
        seconds, dropped = seconds + draft['frame_len'].sum() * hop / rate, dropped + len(rejects)
        done, spent = done + 1, time.time() - begin
        if not rank and (time.time() - said > 5 or done == missing):
            said, share = time.time(), min(missing, done * world)                           # the other ranks are about as far
            print(f'{share:,}/{missing:,} units, {seconds * world / 3600:.2f} hours, {dropped * world:,} dropped, {seconds * world / spent:.0f}x real time, '
                  f'{timedelta(seconds=int(spent / share * (missing - share)))} left', flush=True)
    pool.shutdown()
    if world > 1:
        if rank:
            store.add('done', 1)
            sys.exit()
        while store.add('done', 0) < world - 1:         # a rank that dies takes torchrun and this one with it
            time.sleep(0.05)

    # join: duplicates, speakers and splits need all rows, so they are decided here, from the units alone
    draft, number, tags, bad = [], {}, {}, 0            # number: name -> int, -1 is none
    for *_, file in units:
        with np.load(file) as u:
            rows, words = u['draft'], json.loads(u['words'].tobytes())
        rows['who'] = np.array([number.setdefault(n, len(number)) for n in words['names']] + [-1])[rows['who']]
        rows['tag'] = np.array([tags.setdefault(t, len(tags)) for t in words['tags']] + [-1])[rows['tag']]
        draft.append(rows)
        bad += len(words['rejects'])
    sizes, draft, names = [len(d) for d in draft], np.concatenate(draft), list(number)
    _, first, same = np.unique(draft['key'], return_index=True, return_inverse=True)
    first = first[same]                                 # of each row: the first one with its text and audio
    unique, who = first == np.arange(len(draft)), draft['who']
    bad += int((~unique).sum())
    clips = np.bincount(who[unique & (who >= 0)], minlength=len(names))
    usable = sorted((n for n, c in zip(names, clips) if c >= min_clips_per_speaker), key=share_of)
    if val_speakers and val_speakers >= len(usable):
        stop(f'val_speakers: {val_speakers}, but only {len(usable)} speakers have {min_clips_per_speaker} clips or more')
    of = lambda flags: np.append(flags, False)[who]     # a flag of each speaker -> of each row; none has none
    held = np.isin(np.arange(len(names)), [number[n] for n in usable[:val_speakers]])
    split = np.where(of(held), 2, np.where(draft['hash'] < val_share, 1, 0))
    trained = np.bincount(who[unique & (who >= 0) & (split == 0)], minlength=len(names))
    low = (clips > 0) & ~held & (trained < min_clips_per_speaker)       # counted after filters, without held-out texts
    keep = unique & ~of(low) if singleton_policy == 'remove' else unique
    speakers = sorted(n for n, k in number.items() if clips[k] and not low[k])
    place = {n: i for i, n in enumerate(speakers)}
    index = np.zeros(keep.sum(), dtype=ROW)
    for field in ('text_len', 'frame_len', 'line', 'source'):
        index[field] = draft[field][keep]
    lay_out(index)
    index['split'], index['speaker'] = split[keep], np.array([place.get(n, -1) for n in names] + [-1])[who[keep]]
    new, failed = os.path.join(building, 'corpus'), not len(index) or bad > max_reject_share * total
    why, at = [Counter() for _ in sources], 0           # why: of each source, reason -> rows
    shutil.rmtree(new, ignore_errors=True)
    os.makedirs(new)
    with (open(f'{new}/codes.bin', 'wb') as codes_file, open(f'{new}/text.bin', 'wb') as text_file, open(f'{new}/rejects.jsonl', 'wb') as rejects_file):
        for (i, *_, file), size in zip(units, sizes):
            kept = keep[at:at + size]
            with np.load(file) as u:
                rejects = json.loads(u['words'].tobytes())['rejects']
                if not failed:
                    codes_file.write(u['codes'][np.repeat(kept, u['draft']['frame_len'])].tobytes())
                    text_file.write(u['text'][np.repeat(kept, u['draft']['text_len'])].tobytes())
            for k in at + np.flatnonzero(~kept):
                reason, detail = ('speaker with too few clips', names[who[k]]) if unique[k] else ('duplicate row', f"of line {draft['line'][first[k]]}")
                rejects.append({'line': int(draft['line'][k]), 'audio': '', 'reason': reason, 'detail': detail})
            at += size
            why[i].update(r['reason'] for r in rejects)
            for r in sorted(rejects, key=lambda r: r['line']):
                line = json.dumps({**r, 'file': sources[i]['path']}, ensure_ascii=False, sort_keys=True) + '\n'
                rejects_file.write(line.encode('utf-8', 'backslashreplace'))
        for f in (codes_file, text_file, rejects_file):
            f.flush()
            os.fsync(f.fileno())
    nulls, text_stats = int((index['speaker'] < 0).sum()), []
    for i, source in enumerate(sources):
        for tag in sorted(tags):
            cell = draft[keep & (draft['source'] == i) & (draft['tag'] == tags[tag])]
            if len(cell):
                text_stats.append({'source': source['name'], 'language': tag, 'rows': len(cell), 'hours': int(cell['frame_len'].sum()) * hop / rate / 3600,
                                   'words': int(cell['words'].sum()), 'tokens': int(cell['text_len'].sum())})
    meta = {
        'magic': MAGIC, 'version': VERSION,
        'rows': len(index), 'frames': int(index['frame_len'].sum()), 'tokens': int(index['text_len'].sum()),
        'codec': {'id': codec, **spec},
        'tokenizer': {'id': tokenizer, 'hash': settings['tokenizer_hash'], 'length': length},
        'special_tokens': special, 'sources': settings['sources'], 'settings': settings,
        'counts': {'kept': {s['name']: int((index['source'] == i).sum()) for i, s in enumerate(sources)},
                   'dropped': {s['name']: dict(sorted(w.items())) for s, w in zip(sources, why)},
                   'split': {name: int((index['split'] == i).sum()) for i, name in enumerate(SPLITS)}},
        'languages': sorted({t['language'] for t in text_stats} - {''}), 'text_stats': text_stats,
        'speaker_stats': {'usable_speakers': len(speakers), 'usable_rows': len(index) - nulls,
                          'low_count_speakers': int(low.sum()), 'low_count_rows': int((of(low) & unique).sum()),
                          'null_rows': nulls, 'null_share': nulls / max(1, len(index)),
                          'speakers_by_clips': {str(c): n for c, n in sorted(Counter(clips[clips > 0].tolist()).items())}},
        'speakers': speakers}
    if failed:
        print_table(meta)
        stop(f"{'no row is left: ' * (not len(index))}{bad:,} of {total:,} rows are bad ({bad / total:.1%}), max_reject_share is {max_reject_share:.1%}: "
             f'see {new}/rejects.jsonl; if you mend rows, remove {building} before the next run')
    if not (index['split'] == 0).any():
        stop(f'no row is left to train on: val_share {val_share} and val_speakers {val_speakers} hold out all {len(index):,}'
             + " that singleton_policy 'remove' has left" * (singleton_policy == 'remove' and bool(low.any())))
    save(f'{new}/index.bin', lambda f: f.write(index.tobytes()))
    save(f'{new}/meta.json', lambda f: f.write(json.dumps(meta, indent=1, ensure_ascii=False).encode()))
    corpus = Corpus(new)                            # sizes and ranges, once more, before it is shown
    if picture:
        draw(f'{new}/report.png', corpus.rows, meta)
    for i in np.unique(np.linspace(0, len(corpus) - 1, min(check_rows, len(corpus))).astype(int)):
        import soundfile
        soundfile.write(f'{new}/check-{i}.wav', nano.decode([corpus.codes(i)])[0], rate, subtype='PCM_16')
        print(f'{out_dir}/check-{i}.wav should say: {tok.decode(corpus.text(i).tolist())[:200]}')
    if os.path.isdir(out_dir):
        shutil.rmtree(f'{building}/replaced', ignore_errors=True)
        os.rename(out_dir, f'{building}/replaced')
    os.rename(new, out_dir)
    shutil.rmtree(building)
    print_table(meta)
    print(f'wrote {out_dir}; what was dropped, and why, is in {out_dir}/rejects.jsonl')
