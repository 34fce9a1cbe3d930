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

On one kind of device the same inputs give the same bytes, whatever the workers, the batch size or interruptions. Killed, it goes
on where it was. A clip must fill one codec frame; audio is mixed to mono and resampled by soxr (which NeMo's librosa brings).
Other scripts read a corpus through Corpus, a file through read_audio, and a text through load_tokenizer and encode_text.
"""
import csv, hashlib, itertools, json, math, os, re, shutil, sys, time, unicodedata
from collections import Counter, deque
from datetime import timedelta

import numpy as np

# -----------------------------------------------------------------------------
sources = ()                    # what goes in, in this order: a tuple of dicts, one a source; at least one
#   name          fixed namespace of its speakers ('name/speaker'): the same name in two sources is two people
#   path          the table. csv, tsv: a header line; jsonl: one object a line; ljspeech: id|text or id|text|normalized text
#   kind          'csv', 'tsv', 'jsonl' or 'ljspeech'; left out: by the extension, and a first line with '|' is ljspeech
#   columns       {'audio': .., 'text': .., 'speaker': .., 'language': ..} -> the table's column names (numbers: a table without
#                 header). Left out: audio, text, and speaker if the table has one. A row without speaker is a null row
#   root          folder of relative audio paths; left out: the table's folder (ljspeech: its wavs/)
#   quotes        True: "a ""field""" is unquoted (csv, tsv); False: quotes are text (left out: True, ljspeech False)
#   language_tag  'es' puts 'es: ' before each text; a mapped language column does so row by row; left out: no tag
#   max_rows      only the first so many rows of the table; left out: all
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
num_workers = 0                 # processes that read and resample audio; 0 = a thread of this process does
batch_seconds = 120.0           # audio seconds in one codec batch, padding included: less on a small machine, 1000 on a big GPU; 0.0 = clip by clip
unit_rows = 256                 # rows read, sorted by length, encoded and saved together: what a kill can lose
overwrite = False               # True: a corpus or an unfinished one with other settings in out_dir is replaced
# -----------------------------------------------------------------------------
MAGIC, VERSION = 'nanogepard-corpus', 1
ROW = np.dtype([('text_start', '<i8'), ('text_len', '<i8'), ('frame_start', '<i8'), ('frame_len', '<i8'), ('line', '<i8'),
                ('speaker', '<i4'), ('source', '<i4'), ('split', '<i4')])           # 64-bit offsets: 68,000 hours are 5.3e9 frames
DRAFT = np.dtype([('text_len', '<i8'), ('frame_len', '<i8'), ('line', '<i8'), ('source', '<i4'), ('hash', '<f8')])     # a row before joining
SPLITS = ('train', 'val', 'val_speakers')
FREE = ('out_dir', 'max_reject_share', 'device', 'num_workers', 'batch_seconds', 'unit_rows', 'overwrite')     # they change no byte
KINDS = {'csv': ',', 'tsv': '\t', 'ljspeech': '|', 'jsonl': ''}
NO_SPEAKER = ('', 'nan', 'NaN', 'None', 'null', '__null_ref__')         # what tables write where there is no speaker

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
    return Tokenizer.from_file(path), path

def clean_text(text):
    return unicodedata.normalize('NFC', text).strip()

def encode_text(tokenizer, text):
    """Ids (list of int) of a transcript, no layout: NFC, stripped. tokenizer: of `tokenizers`, or a fast one of transformers."""
    tok = getattr(tokenizer, 'backend_tokenizer', tokenizer)
    if not tok.encode_special_tokens:
        # '<|im_end|>' typed in a transcript is ten characters, not an id. The library's switch passes over added tokens
        # that are not marked special ('<think>'), so mark them all. And a tokenizer.json may ask to truncate: never.
        tok.add_special_tokens(list(tok.get_added_tokens_decoder().values()))
        tok.encode_special_tokens = True
        tok.no_truncation()
        tok.no_padding()
    return tok.encode(clean_text(text), add_special_tokens=False).ids

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
    opens: wav, flac, ogg, mp3, .. ValueError 'reason: detail' where it is not a whole, finite clip of at most max_seconds."""
    import soundfile, soxr
    if not os.path.isfile(path) or not os.path.getsize(path):
        raise ValueError(f"audio file {'is empty' if os.path.isfile(path) else 'not found'}: {path}")
    try:
        with soundfile.SoundFile(path) as f:
            rate, frames, log = f.samplerate, f.frames, f.extra_info
            if frames > 2 ** 62:                                    # a flac from a pipe: libsndfile can't read it through
                raise ValueError(f'audio of unknown length: {path}: write it again, to a file')
            if max_seconds and frames > max_seconds * rate:         # before it is decoded: it may be a day long
                raise ValueError(f'audio too long: {path}: {frames / rate:.1f} s')
            audio = f.read(dtype='float32', always_2d=True).mean(axis=1)
    except (soundfile.SoundFileError, OSError, TypeError) as e:     # TypeError: raw audio, which has no header
        raise ValueError(f'audio unreadable: {e}')
    if len(audio) < frames or cut_short(path, log):
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
    import multiprocessing, threading
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()

# ---- tables

def kind_of(source):
    """'csv', 'tsv', 'ljspeech' or 'jsonl': as given, else by the first line and the extension; '' where neither tells."""
    with open(source['path'], 'rb') as f:
        piped = b'|' in f.readline(65536)
    ext = os.path.splitext(source['path'])[1].lower()[1:]
    return source.get('kind') or ('ljspeech' if piped and ext != 'jsonl' else ext if ext in KINDS else '')

def table_rows(source):
    """Yields (line number, why the line is dropped or '', dict of the mapped columns) of each data line.
    A line is a row, always: a quote that does not close on its line is an error, so that it can't swallow the lines below."""
    path, kind = source['path'], kind_of(source)
    columns = source.get('columns') or ({'audio': 0, 'text': -1} if kind == 'ljspeech' else {'audio': 'audio', 'text': 'text', 'speaker': 'speaker'})
    headless = any(isinstance(c, int) for c in columns.values())
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
                sys.exit(f'{path}:{n}: not UTF-8 (byte {raw[e.start]:#04x}): convert the table')
            except csv.Error as e:
                sys.exit(f"{path}:{n}: bad quotes ({e}): a quoted field ends on its line, quotes in it are doubled; "
                         "'quotes': False in the source takes them as text")
            except (ValueError, RecursionError) as e:
                fields, bad = {}, f'line is not JSON: {e}'
            if kind == 'jsonl' and not isinstance(fields, dict):
                fields, bad = {}, 'line is not a JSON object'
            if header is None:              # the first line
                header = list(range(len(fields))) if headless else list(fields)
                columns = {role: c + len(header) if headless and c < 0 else c for role, c in columns.items()}
                missing = [columns[role] for role in source.get('columns') or ('audio', 'text') if columns[role] not in header]
                if missing:
                    sys.exit(f"{path}:{n}: no column {', '.join(map(repr, missing))}; it has {header}: say which is which in the source's columns")
                if len(set(header)) < len(header):
                    sys.exit(f'{path}:{n}: a column name is there twice: {header}')
                if kind != 'jsonl' and not headless:
                    continue
            if kind != 'jsonl':
                bad = '' if len(fields) == len(header) else f'wrong number of fields: {len(fields)}, the first line has {len(header)}'
                fields = dict(zip(header, fields))
            yield from ((b, 'line is blank', {}) for b in blank)
            yield n, bad, {role: fields.get(c) for role, c in columns.items()}
            blank = []

def source_rows(number, source):
    """Yields a dict for each data line: source, line, audio; then path, text, hash, speaker (None: null row), or reason, detail."""
    kind, seen = kind_of(source), {}
    root = source.get('root') or os.path.join(os.path.dirname(source['path']), 'wavs' if kind == 'ljspeech' else '')
    for line, bad, fields in itertools.islice(table_rows(source), source.get('max_rows')):
        audio, text, tag = ('' if fields.get(k) is None else fields[k] for k in ('audio', 'text', 'language'))
        speaker = fields.get('speaker')
        speaker = '' if speaker is None or speaker != speaker else clean_text(str(speaker))         # NaN is not itself
        first = line
        if not bad and not all(isinstance(x, str) for x in (audio, text, tag)):
            bad = f'field is not a string: audio {audio!r}, text {text!r}, language {tag!r}'[:200]
        elif not bad:
            audio, text, tag = audio.strip(), clean_text(text), tag.strip() or source.get('language_tag')
            audio += '.wav' * (kind == 'ljspeech' and not audio.lower().endswith(('.wav', '.flac', '.ogg', '.mp3')))
            first = seen.setdefault(hashlib.sha256(f'{audio}\0{text}'.encode('utf-8', 'surrogatepass')).digest()[:8], line)
            if not text:
                bad = 'text empty'
            elif first != line:
                bad = f'duplicate row: of line {first}'
            elif re.search('[\ud800-\udfff]', text + audio + speaker):      # half a UTF-16 pair: "\ud83d" in a jsonl
                bad = f'not Unicode: {ascii(text)[:200]}'
        row = {'source': number, 'line': line, 'audio': str(audio)}
        yield {**row, 'reason': bad.split(':')[0], 'detail': bad.partition(': ')[2]} if bad else {
            **row, 'path': os.path.join(root, audio), 'text': f'{tag.lower()}: {text}' if tag else text, 'hash': share_of(text),
            'speaker': None if speaker in NO_SPEAKER else f"{source['name']}/{speaker}"}

# ---- small tools

def share_of(text):
    """A number in 0..1 that is the same for the same text on every run and machine."""
    return int.from_bytes(hashlib.sha256(text.encode('utf-8', 'surrogatepass')).digest()[:6], 'big') / 2 ** 48

def sha256_of(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()

def save(path, write):
    """write(file) into a temporary name, down to the disk, then renamed: path is whole or not there."""
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
    print(f"\n{'source':<24}{'':<38}{'rows':>10}")
    for name, kept in meta['counts']['kept'].items():
        print(f"{name:<24}{'kept':<38}{kept:>10,}")
        for reason, n in meta['counts']['dropped'][name].items():
            print(f"{'':<24}{'dropped: ' + reason:<38}{n:>10,}")
    s, hours = meta['speaker_stats'], meta['frames'] * meta['codec']['hop'] / meta['codec']['sample_rate'] / 3600
    print(f"{meta['rows']:,} rows kept, {hours:.2f} hours, {meta['frames']:,} frames, {meta['tokens']:,} text tokens; "
          + ', '.join(f'{k} {n:,}' for k, n in meta['counts']['split'].items()))
    print(f"{s['usable_speakers']:,} usable speakers ({s['usable_rows']:,} rows), {s['low_count_speakers']:,} with fewer than "
          f"{meta['settings']['min_clips_per_speaker']} training clips ({s['low_count_rows']:,} rows), null rows {s['null_share']:.1%}")

# ---- the script. Under this guard since other scripts import from this file, and so do the worker processes

if __name__ == '__main__':
    from configurator import configure
    config = configure(globals())
    stop = lambda message: sys.exit('prepare.py: ' + message)

    # validate: every fault is named before torch is imported
    for low, high, keys in ((0, 1, 'silence_peak max_reject_share val_share'), (0, math.inf, 'max_seconds val_speakers num_workers batch_seconds'),
                            (1, math.inf, 'min_frames min_clips_per_speaker unit_rows')):
        for key in keys.split():
            if not low <= config[key] <= high:
                stop(f'{key}: {config[key]} is not in {low}..{high}')
    if singleton_policy not in ('null_prefix', 'remove'):
        stop(f"singleton_policy: 'null_prefix' or 'remove', got {singleton_policy!r}")
    if not sources or not all(isinstance(s, dict) for s in sources):
        stop(f'sources: at least one dict (see config/tiny_prepare.py), got {sources!r}')
    for i, s in enumerate(sources):
        name, columns, most = str(s.get('name', '')), s.get('columns') or {'audio': 'audio', 'text': 'text'}, s.get('max_rows')
        unknown = set(s) - {'name', 'path', 'kind', 'columns', 'root', 'quotes', 'language_tag', 'max_rows'}
        for fault, complaint in ((unknown, f"unknown {', '.join(sorted(map(repr, unknown)))}"),
                                 (not name.strip() or '/' in name or name in [x.get('name') for x in sources[:i]],
                                  f"name {name!r}: one of its own, without '/'"),
                                 (not os.path.isfile(s.get('path', '')), f"path {s.get('path')!r}: no such table"),
                                 (most is not None and (not isinstance(most, int) or most < 1), f'max_rows {most!r}: 1 or more'),
                                 (not {'audio', 'text'} <= set(columns) <= {'audio', 'text', 'speaker', 'language'}
                                  or {type(c) for c in columns.values()} not in ({str}, {int}),
                                  f'columns {columns}: audio, text, speaker? and language?, by name, or all by number in a table without header')):
            if fault:
                stop(f'sources[{i}]: {complaint}')
        if kind_of(s) not in KINDS:
            stop(f"sources[{i}]: kind {s.get('kind')!r} of {s['path']}: one of {', '.join(KINDS)}")
    try:
        tok, path = load_tokenizer(tokenizer)
    except Exception as e:
        stop(f"tokenizer {tokenizer!r}: {' '.join(str(e).split())[:300]}")
    length, special, beside = tok.get_vocab_size(), dict(special_tokens), os.path.join(tokenizer, 'gepard_special_tokens.json')
    if not special:
        if not os.path.exists(beside):
            stop(f'special_tokens is {{}}, and there is no {beside}')
        special = {k: v for k, v in json.load(open(beside)).items() if k != 'tokeniser_length'}
    wanted = {'start_of_speech', 'end_of_speech', 'start_of_text', 'end_of_text', 'tts_pad'}
    if set(special) != wanted or len(set(special.values())) < 5 or not all(0 <= v < length for v in special.values()):
        stop(f"special_tokens: {', '.join(sorted(wanted))} take five different ids below {length}, the length of {tokenizer}; got {special}")

    # the settings that the bytes depend on: those of an earlier run in the same place must be the same
    settings = json.loads(json.dumps({k: v for k, v in config.items() if k not in FREE}))       # tuples become lists, as in the file
    settings.update(special_tokens=special, version=VERSION, tokenizer_hash=sha256_of(path),
                    codec_hash=sha256_of(codec) if os.path.isfile(codec) else '', table_hashes={s['name']: sha256_of(s['path']) for s in sources})
    out_dir = out_dir.rstrip('/')
    building = out_dir + '.building'
    finished, begun = (os.path.join(folder, 'meta.json' if folder == out_dir else 'settings.json') for folder in (out_dir, building))
    if os.path.isdir(out_dir) and os.listdir(out_dir) and not os.path.exists(finished):
        stop(f'{out_dir} holds files that are not a corpus: choose another --out_dir')
    for file in (finished, begun):
        old = json.load(open(file)) if os.path.exists(file) else {}
        changed = old and differing(old.get('settings', old), settings)
        if changed and not overwrite:
            stop(f"{os.path.dirname(file)} was made with other settings ({'; '.join(changed)}): choose another --out_dir, or --overwrite")
        if changed and file == begun:
            shutil.rmtree(building)
    if os.path.exists(finished) and not overwrite:
        print(f'{out_dir} is complete and was made with these settings: nothing to do')
        print_table(Corpus(out_dir).meta)
        shutil.rmtree(building, ignore_errors=True)
        sys.exit()
    os.makedirs(building, exist_ok=True)
    save(begun, lambda f: f.write(json.dumps(settings).encode()))

    # one pass over the tables: what is wrong with them is said now, not after a day of encoding
    total = sum(1 for s in sources for _ in itertools.islice(table_rows(s), s.get('max_rows')))
    if not total:
        stop(f"no rows in {', '.join(s['path'] for s in sources)}")
    units = [os.path.join(building, f'unit-{unit_rows}-{k:06d}.npz') for k in range(-(-total // unit_rows))]
    todo = {unit for unit in units if not os.path.exists(unit)}
    print(f'{total:,} rows in {len(sources)} sources = {len(units):,} units of {unit_rows} rows, {len(units) - len(todo):,} of them done before')

    from codec import NanoCodec
    if device == 'auto':
        import torch
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    nano = NanoCodec(codec, device)
    rate, hop, groups, radix = nano.sample_rate, nano.hop, nano.groups, math.prod(nano.levels)
    print(f'codec {codec} on {device}: {rate} Hz, hop {hop}, {rate / hop:.3f} frames/s, {groups} groups of {radix}')

    # encode, unit by unit, while the pool reads the audio of the next one. No workers: a thread of this process does
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    from multiprocessing import get_context
    pool = ThreadPoolExecutor(1)
    if num_workers:                                 # spawn: fork is not safe once torch has threads
        pool = ProcessPoolExecutor(num_workers, get_context('spawn'), end_with_parent)
    read = lambda row: pool.submit(load_clip, row['path'], rate, max_seconds, min_frames * hop, silence_peak)
    stream, ahead = (row for i, s in enumerate(sources) for row in source_rows(i, s)), deque()
    begin = said = time.time()
    seconds = dropped = done = 0
    for unit in units + ['']:                       # '' encodes what is still ahead
        rows = list(itertools.islice(stream, unit_rows))
        if unit in todo:
            ahead.append((unit, rows, [None if 'reason' in r else read(r) for r in rows]))
        if not ahead or unit and len(ahead) < 2:
            continue
        unit, rows, jobs = ahead.popleft()
        clips = [job.result() if job else (r['reason'], r['detail']) for r, job in zip(rows, jobs)]        # arrays, or why not
        text = {}
        for i, r in enumerate(rows):
            if isinstance(clips[i], np.ndarray):
                text[i] = np.array(encode_text(tok, r['text']), dtype='<u4')
                if not len(text[i]) or np.isin(text[i], list(special.values())).any():
                    clips[i] = ('text holds a special token' if len(text[i]) else 'text gives no tokens', r['text'][:200])
        good = [i for i, clip in enumerate(clips) if isinstance(clip, np.ndarray)]
        rejects = [{'source': r['source'], 'line': r['line'], 'audio': r['audio'], 'reason': clip[0], 'detail': clip[1]}
                   for r, clip in zip(rows, clips) if not isinstance(clip, np.ndarray)]
        codes, batch = {}, []
        for i in sorted(good, key=lambda i: -len(clips[i])) + [None]:       # longest first: what does not fit fails at once
            if batch and (i is None or len(clips[batch[0]]) * (len(batch) + 1) > batch_seconds * rate):
                codes.update(zip(batch, nano.encode([clips[j] for j in batch])))
                batch = []
            batch.append(i)
        for i in good:
            if codes[i].shape != (-(-len(clips[i]) // hop), groups) or codes[i].max() >= radix:
                raise RuntimeError(f"{rows[i]['path']}: the codec gave codes {codes[i].shape} up to {codes[i].max()} for {len(clips[i])} samples")
        draft = np.array([(len(text[i]), len(codes[i]), rows[i]['line'], rows[i]['source'], rows[i]['hash']) for i in good], dtype=DRAFT)
        words = json.dumps({'names': [rows[i]['speaker'] for i in good], 'rejects': rejects}).encode()
        save(unit, lambda f: np.savez(f, draft=draft, words=np.frombuffer(words, dtype=np.uint8),
                                      text=np.concatenate([np.zeros(0, '<u4')] + [text[i] for i in good]),
                                      codes=np.concatenate([np.zeros((0, groups), '<u2')] + [codes[i].astype('<u2') for i in good])))
        seconds, dropped = seconds + draft['frame_len'].sum() * hop / rate, dropped + len(rejects)
        done, spent = done + 1, time.time() - begin
        if time.time() - said > 5 or done == len(todo):
            said = time.time()
            print(f'{done:,}/{len(todo):,} units, {seconds / 3600:.2f} hours, {dropped:,} dropped, {seconds / spent:.0f}x real time, '
                  f'{timedelta(seconds=int(spent / done * (len(todo) - done)))} left', flush=True)
    pool.shutdown()

    # join: speakers and splits need all rows, so they are decided here, from the units alone
    draft, names, rejects = [], [], []
    for unit in units:
        with np.load(unit) as u:
            draft.append(u['draft'])
            words = json.loads(u['words'].tobytes())
        names, rejects = names + words['names'], rejects + words['rejects']
    draft, names, bad = np.concatenate(draft), np.array(names, dtype=object), len(rejects)
    clips = Counter(n for n in names if n)
    usable = sorted((n for n in clips if clips[n] >= min_clips_per_speaker), key=share_of)
    if val_speakers and val_speakers >= len(usable):
        stop(f'val_speakers: {val_speakers}, but only {len(usable)} speakers have {min_clips_per_speaker} clips or more')
    held = set(usable[:val_speakers])
    split = np.where([n in held for n in names], 2, np.where(draft['hash'] < val_share, 1, 0))
    trained = Counter(names[split == 0])
    low = {n for n in clips if n not in held and trained[n] < min_clips_per_speaker}        # counted after filters, without held-out texts
    is_low = np.array([n in low for n in names], dtype=bool)
    keep = ~is_low if singleton_policy == 'remove' else np.ones(len(names), dtype=bool)
    rejects += [{'source': int(r['source']), 'line': int(r['line']), 'audio': '', 'reason': 'speaker with too few clips', 'detail': n}
                for r, n in zip(draft[~keep], names[~keep])]
    rejects.sort(key=lambda r: (r['source'], r['line']))
    speakers = sorted(set(clips) - low)
    number = {n: i for i, n in enumerate(speakers)}
    index = np.zeros(keep.sum(), dtype=ROW)
    for field in ('text_len', 'frame_len', 'line', 'source'):
        index[field] = draft[field][keep]
    for what in ('text', 'frame'):
        index[what + '_start'] = np.cumsum(index[what + '_len']) - index[what + '_len']
    index['split'], index['speaker'] = split[keep], [number.get(n, -1) for n in names[keep]]
    nulls, per_source = int((index['speaker'] < 0).sum()), range(len(sources))
    why = [Counter(r['reason'] for r in rejects if r['source'] == i) for i in per_source]
    meta = {
        'magic': MAGIC, 'version': VERSION,
        'rows': len(index), 'frames': int(index['frame_len'].sum()), 'tokens': int(index['text_len'].sum()),
        'codec': {'id': codec, 'sample_rate': rate, 'hop': hop, 'levels': list(nano.levels), 'groups': groups},
        'tokenizer': {'id': tokenizer, 'hash': settings['tokenizer_hash'], 'length': length},
        'special_tokens': special, 'sources': settings['sources'], 'settings': settings,
        'counts': {'kept': {sources[i]['name']: int((index['source'] == i).sum()) for i in per_source},
                   'dropped': {sources[i]['name']: dict(sorted(why[i].items())) for i in per_source},
                   'split': {name: int((index['split'] == i).sum()) for i, name in enumerate(SPLITS)}},
        'speaker_stats': {'usable_speakers': len(speakers), 'usable_rows': len(index) - nulls,
                          'low_count_speakers': len(low), 'low_count_rows': int(is_low.sum()),
                          'null_rows': nulls, 'null_share': nulls / max(1, len(index)),
                          'speakers_by_clips': {str(c): n for c, n in sorted(Counter(clips.values()).items())}},
        'speakers': speakers}
    new, replaced = os.path.join(building, 'corpus'), os.path.join(building, 'replaced')
    shutil.rmtree(new, ignore_errors=True)
    os.makedirs(new)
    for r in rejects:
        r['file'] = sources[r.pop('source')]['path']
    lines = ''.join(json.dumps(r, ensure_ascii=False, sort_keys=True) + '\n' for r in rejects)
    save(os.path.join(new, 'rejects.jsonl'), lambda f: f.write(lines.encode('utf-8', 'backslashreplace')))
    if not len(index) or bad > max_reject_share * total:
        print_table(meta)
        stop(f'{bad:,} of {total:,} rows are bad ({bad / total:.1%}), max_reject_share is {max_reject_share:.1%}: see {new}/rejects.jsonl')
    for what, item in (('codes', 'frame_len'), ('text', 'text_len')):
        def write(f, at=0):
            for unit in units:
                with np.load(unit) as u:
                    f.write(u[what][np.repeat(keep[at:at + len(u['draft'])], u['draft'][item])].tobytes())
                    at += len(u['draft'])
        save(os.path.join(new, what + '.bin'), write)
    save(os.path.join(new, 'index.bin'), lambda f: f.write(index.tobytes()))
    save(os.path.join(new, 'meta.json'), lambda f: f.write(json.dumps(meta, indent=1, ensure_ascii=False).encode()))
    Corpus(new)                                     # sizes and ranges, once more, before it is shown
    if os.path.isdir(out_dir):
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(out_dir, replaced)
    os.rename(new, out_dir)
    shutil.rmtree(building)
    print_table(meta)
    print(f'wrote {out_dir}; what was dropped, and why, is in {out_dir}/rejects.jsonl')
