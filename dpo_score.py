"""
Preference training, second of three: listens to the rollouts of dpo_sample.py, rewards them and pairs the good with the bad.

    python dpo_score.py config/dpo.py                                              # out/dpo/round1: rollouts -> facts, scores, pairs.json
    torchrun --nproc_per_node=8 dpo_score.py config/dpo.py                         # the same, shared out over the ranks
    python dpo_score.py config/dpo.py --w_wer=2                                    # other weights or gates: from the facts, nothing is heard again
    python dpo_score.py config/dpo.py --run_name=test2 --eval --compare=test1      # no pairs: how robust is the checkpoint?

Heard once (facts.jsonl): decode -> energy and duration gate -> Whisper -> speaker similarity, a few groups at a time; a kill loses those
in flight. Then rewards (scores.jsonl, a line a rollout) and pairs.json: tokens' places, rewards, and the frozen policy's log-probs with
its hash. --eval writes report.json and report.png instead: rates of clean, timeout (cut at the frame cap), empty (nothing heard),
runaway (longer than plausible), wrong (WER or shorter than plausible), by text length, voice and language.
"""
import hashlib, io, json, os, re, sys
from functools import cache

# -----------------------------------------------------------------------------
out_dir = 'out/dpo'
run_name = 'round1'             # the folder of dpo_sample.py's round in out_dir
ckpt = ''                       # where the policy is now; '' = where the rollouts were made from. Its weights must be the same
# hearing; changed settings need --rehear, everything below this part does not
asr = 'base'                    # openai-whisper: a name (downloaded), or a .pt file such as .cache/whisper-base.pt of assets/tiny/measure.py
language = ''                   # of all prompts; '' = each prompt's lang, and where it has none Whisper decides
asr_window = 30.0               # seconds that Whisper hears at a time; less is faster where rollouts are shorter, its own is 30
energy_floor = -50.0            # dB of full scale (rms): below it nothing is heard, since Whisper invents text on silence
min_asr_seconds = 0.1           # nor in clips shorter than this
speaker_model = ''              # WavLM x-vector for transformers, a folder or a Hub name (microsoft/wavlm-base-plus-sv); '' = no similarity
codec = ''                      # '' = the checkpoint's
block_groups = 8                # groups heard together: what a kill can lose, and what a rank takes at a time
rehear = False                  # True: throw away facts that were heard with other settings
# what is written is not always what is said: regular expression -> replacement, applied to transcripts in this order, case ignored
respell = {}                    # e.g. {r'(\d)': r' \1 ', r'\b4\b': 'four'}
# reward: expected length = sec_base + sec_per_word * words
sec_base = 0.7
sec_per_word = 0.4
min_ratio = 0.3                 # plausible lengths: from this share of the expected one
max_ratio = 2.0                 # up to this
w_wer = 1.0                     # per unit of word error rate
w_over = 0.5                    # per second above the longest plausible length
w_short = 2.0                   # below the shortest plausible length
w_empty = 2.0                   # nothing heard
w_similarity = 0.5              # times (1 - speaker similarity)
# pairs: chosen passes all gates, rejected fails one
max_wer = 0.2
not_truncated = True            # False = being cut at the frame cap is no fault
duration_in_bounds = True       # False = nor is an implausible length
min_margin = 0.5                # of reward between chosen and rejected
max_pairs = 2                   # a group
p_floor = 1e-4                  # stop probabilities are clipped to [p_floor, 1 - p_floor] in log-probs; dpo_train.py takes it from the pairs
# report
eval = False                    # True: a stress report instead of pairs
compare = ''                    # another run_name, or a report.json, to stand beside it
# system
tokens_per_batch = 16384        # of a packed forward of the policy
device = 'auto'                 # 'auto' = cuda where there is one
dtype = 'auto'                  # 'auto' = bfloat16 on cuda, float32 on cpu
# -----------------------------------------------------------------------------
HEARD = ('asr', 'language', 'asr_window', 'energy_floor', 'min_asr_seconds', 'speaker_model', 'codec', 'block_groups')
WEIGHTS = ('w_wer', 'w_over', 'w_short', 'w_empty', 'w_similarity')
KINDS = ('clean', 'timeout', 'empty', 'runaway', 'wrong')           # faults in the order in which kind_of asks


@cache
def normaliser():
    """Whisper's basic normaliser: lower case, no brackets, punctuation to spaces; the same for every language."""
    from whisper.normalizers import BasicTextNormalizer
    return BasicTextNormalizer()


def normalise(text):
    """Text as WER sees it. Stripped: the normaliser turns '...' into one space, which is not an empty string but is blank."""
    return normaliser()(text.strip()).strip()


def reward(text, transcript, seconds, similarity=None, *, sec_base=0.7, sec_per_word=0.4, min_ratio=0.3, max_ratio=2.0,
           w_wer=1.0, w_over=0.5, w_short=2.0, w_empty=2.0, w_similarity=0.5):
    """How good a rollout is -> dict: wer, empty, expected, dur_min, dur_max (seconds), terms, reward (their sum, <= 0).

    text: what was asked for; transcript: what ASR heard; seconds: length of the audio; similarity: speaker cosine, None
    where there is no voice to compare with. Expected length = sec_base + sec_per_word * words. WER can exceed 1; a blank
    transcript has WER 1. A text that is blank after normalising has no WER and no reward (both None): count such rows."""
    import jiwer
    expected = sec_base + sec_per_word * max(1, len(text.split()))
    low, high = min_ratio * expected, max_ratio * expected
    said, heard = normalise(text), normalise(transcript)
    r = {'text': said, 'transcript': heard, 'empty': not heard, 'expected': expected, 'dur_min': low, 'dur_max': high,
         'wer': None, 'terms': None, 'reward': None}
    if not said:
        return r
    r['wer'] = jiwer.wer(said, heard) if heard else 1.0
    r['terms'] = {'wer': -w_wer * r['wer'], 'over': -w_over * max(0.0, seconds - high), 'short': -w_short * (seconds < low),
                  'empty': -w_empty * r['empty'], 'similarity': 0.0 if similarity is None else -w_similarity * (1 - similarity)}
    r['reward'] = sum(r['terms'].values())
    return r


def make_pairs(scores, *, max_wer=0.2, not_truncated=True, duration_in_bounds=True, min_margin=0.5, max_pairs=2):
    """Preference pairs among rollouts of the same prompt and voice -> pairs, counts.

    scores: dicts with group_id, sample_idx, reward, wer, empty, truncated, seconds, dur_min, dur_max. A rollout passes if its
    WER is at most max_wer, it is not empty, was not cut at the frame cap (not_truncated) and has a plausible length
    (duration_in_bounds). The best that passes is chosen over the worst that does not, then the second best over the second
    worst, up to max_pairs, as long as the rewards are min_margin apart. Pairs: dicts group_id, chosen, rejected (the
    score dicts), gap. counts: groups, paired, pairs, and groups without a pair by their one reason: blank_text (no reward),
    no_chosen (none passes), no_rejected (all pass), no_margin."""
    groups = {}
    for s in scores:
        groups.setdefault(s['group_id'], []).append(s)

    def passes(s):
        return (s['wer'] <= max_wer and not s['empty'] and not (not_truncated and s['truncated'])
                and (not duration_in_bounds or s['dur_min'] <= s['seconds'] <= s['dur_max']))

    pairs = []
    counts = {'groups': len(groups), 'paired': 0, 'pairs': 0, 'blank_text': 0, 'no_chosen': 0, 'no_rejected': 0, 'no_margin': 0}
    for name, group in groups.items():
        if any(s['reward'] is None for s in group):
            counts['blank_text'] += 1
            continue
        ranked = sorted(group, key=lambda s: -s['reward'])          # stable: equal rewards stay in sampling order
        good = [s for s in ranked if passes(s)]
        bad = [s for s in reversed(ranked) if not passes(s)]
        # gaps only shrink from one pair to the next
        new = [{'group_id': name, 'chosen': c, 'rejected': r, 'gap': c['reward'] - r['reward']} for c, r in zip(good[:max_pairs], bad)
               if c['reward'] - r['reward'] >= min_margin]
        pairs += new
        counts['pairs'] += len(new)
        counts['paired' if new else 'no_chosen' if not good else 'no_rejected' if not bad else 'no_margin'] += 1
    return pairs, counts


def kind_of(s, max_wer=0.2):
    """The one word for a rollout (a score dict): clean, or its first fault of KINDS."""
    return ('timeout' if s['truncated'] else 'empty' if s['empty'] else 'runaway' if s['seconds'] > s['dur_max']
            else 'wrong' if s['wer'] > max_wer or s['seconds'] < s['dur_min'] else 'clean')


def rates(scores):
    """Score dicts -> {n, a rate of each kind, median WER, median of length / expected length}."""
    import statistics
    n = len(scores)
    return {'n': n} | {k: sum(s['kind'] == k for s in scores) / n for k in KINDS} | {
        'wer': statistics.median(s['wer'] for s in scores), 'length': statistics.median(s['seconds'] / s['expected'] for s in scores)}


def stress_report(scores):
    """Score dicts with kind, tokens, voice, lang -> {heading: {row: rates}}, largest groups of voices first."""
    def split(key, order=None):
        parts = {}
        for s in scores:
            parts.setdefault(key(s), []).append(s)
        return {k: rates(parts[k]) for k in sorted(parts, key=order or (lambda k: (-len(parts[k]), k)))}
    size = lambda s: '1-6' if s['tokens'] <= 6 else '7-12' if s['tokens'] <= 12 else '13+'
    return {'all': {'all': rates(scores)}, 'text tokens': split(size, ('1-6', '7-12', '13+').index),
            'voice': split(lambda s: s['voice']), 'language': split(lambda s: s['lang'] or '?')}


def table(report, other=None):
    """Lines of text; `other` report's numbers stand in front of an arrow."""
    columns = ('n', *KINDS, 'wer', 'length')
    number = lambda k, v: f'{v:d}' if k == 'n' else f'{v:.2f}' if k in ('wer', 'length') else f'{100 * v:.1f}%'
    lines = [f"{'':24}" + ''.join(f'{k:>{18 if other else 9}}' for k in ('n', *KINDS, 'med. wer', 'med. len'))]
    for heading, rows in report.items():
        for name, r in rows.items():
            old = (other or {}).get(heading, {}).get(name)
            cells = [(number(k, old[k]) + ' > ' if old else '') + number(k, r[k]) for k in columns]
            lines.append(f"{(name if heading == 'all' else f'{heading} {name}')[:24]:24}" + ''.join(f'{c:>{18 if other else 9}}' for c in cells))
    return lines


def draw(reports):
    """Stacked bars of the kinds, a bar a row and report, as bytes of a .png. reports: {name: report}"""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    bars = [(f'{row}\n{name}' if len(reports) > 1 else row, r) for heading in ('all', 'text tokens', 'voice', 'language')
            for row in dict.fromkeys(k for rep in reports.values() for k in list(rep[heading])[:12])
            for name, rep in reports.items() for r in [rep[heading].get(row)] if r]
    fig, ax = plt.subplots(figsize=(max(6, 0.7 * len(bars)), 4.5))
    bottom = [0.0] * len(bars)
    for kind, color in zip(KINDS, ('tab:green', 'tab:red', 'tab:gray', 'tab:orange', 'tab:purple')):
        heights = [100 * r[kind] for _, r in bars]
        ax.bar(range(len(bars)), heights, bottom=bottom, color=color, label=kind)
        bottom = [a + b for a, b in zip(bottom, heights)]
    ax.set_xticks(range(len(bars)), [b[0] for b in bars], rotation=90, fontsize=8)
    ax.set_ylabel('% of rollouts')
    ax.legend(loc='lower right')
    fig.tight_layout()
    picture = io.BytesIO()
    fig.savefig(picture)
    plt.close(fig)
    return picture.getvalue()


def rollouts_hash(folder):
    """Of what was spoken: rollouts that were made anew under the same name are neither what was heard nor what was paired."""
    h = hashlib.sha256()
    for name in ('index.jsonl', 'tokens.bin'):
        with open(os.path.join(folder, name), 'rb') as f:
            hashlib.file_digest(f, lambda: h)                           # both in one
    return h.hexdigest()[:16]


class Listener:
    """Whisper on batches of clips. openai-whisper hears 30 s at a time; its positions are a fixed table and the start of it serves
    shorter windows as well, at a share of the time. Where it then falls into a loop (its own sign: the text compresses more than
    2.4 times), the whole 30 s are used."""
    def __init__(self, name, device, window):
        import whisper
        self.whisper, self.device, self.window = whisper, device, min(window, 30.0)
        self.model = whisper.load_model(name, device=device)
        self.positions = self.model.encoder.positional_embedding

    def decode(self, clips, seconds, language):
        import numpy as np
        import torch
        encoder, dims = self.model.encoder, self.model.dims
        n = round(seconds * 50)                                         # positions of 320 samples each
        encoder.positional_embedding, dims.n_audio_ctx = self.positions[:n], n
        audio = np.stack([self.whisper.pad_or_trim(np.asarray(c, np.float32), n * 320) for c in clips])
        mel = self.whisper.log_mel_spectrogram(torch.from_numpy(audio).to(self.device), dims.n_mels)
        options = self.whisper.DecodingOptions(language=language or ('en' if not self.model.is_multilingual else None), without_timestamps=True,
                                               fp16=self.device == 'cuda')
        got = self.whisper.decode(self.model, mel, options)
        encoder.positional_embedding, dims.n_audio_ctx = self.positions, len(self.positions)
        return got

    def hear(self, clips, languages, batch=32):
        """float32 clips at 16 kHz of any length, a language code or '' each -> texts. What is over 30 s is heard in pieces."""
        pieces = [(i, c[a:a + 480000]) for i, c in enumerate(clips) for a in range(0, len(c), 480000)]
        texts = [''] * len(pieces)
        for language in sorted(set(languages)):
            own = sorted((n for n, (i, _) in enumerate(pieces) if languages[i] == language), key=lambda n: len(pieces[n][1]))
            fits = lambda n: len(pieces[n][1]) <= round(self.window * 50) * 320
            short, again = [n for n in own if fits(n)], [n for n in own if not fits(n)]
            for window, waiting in ((self.window, short), (30.0, again)):
                for k in range(0, len(waiting), batch):
                    rows = waiting[k:k + batch]
                    for n, r in zip(rows, self.decode([pieces[n][1] for n in rows], window, language)):
                        texts[n] = r.text
                        if window < 30 and r.compression_ratio > 2.4:
                            again.append(n)
        out = [''] * len(clips)
        for (i, _), text in zip(pieces, texts):
            out[i] = f'{out[i]} {text}'.strip()
        return out


# ---- the script. Under this guard since tests import the functions above

if __name__ == '__main__':
    from configurator import configure
    config = configure(globals())
    rank, world, local_rank = (int(os.environ.get(k, d)) for k, d in (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    run = os.path.join(out_dir, run_name)
    inside = lambda *names: os.path.join(run, *names)
    say = (lambda *a: print(*a, flush=True)) if rank == 0 else lambda *a: None

    def fail(message, by=0):
        if rank == by:
            print('dpo_score.py: ' + ' '.join(str(message).split()), file=sys.stderr, flush=True)
        sys.exit(2)

    def append(path, content, mode='ab'):
        """Text or bytes, on the disk when this returns."""
        try:
            with open(path, mode) as f:
                f.write(content if isinstance(content, bytes) else content.encode())
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:                                        # a full disk
            fail(f'{path}: {e}', by=rank)

    def save(path, content):
        append(path + '.tmp', content, 'wb')
        os.replace(path + '.tmp', path)

    lines = lambda rows: ''.join(json.dumps(r, ensure_ascii=False) + '\n' for r in rows)

    bad = []
    rule = lambda ok, text: ok or bad.append(text)
    for name in ('asr_window', 'block_groups', 'sec_base', 'max_ratio', 'max_pairs', 'tokens_per_batch'):
        rule(config[name] > 0, f'{name} must be above 0, got {config[name]}')
    for name in ('min_asr_seconds', 'sec_per_word', 'min_ratio', *WEIGHTS, 'max_wer', 'min_margin'):
        rule(config[name] >= 0, f'{name} must not be negative, got {config[name]}')
    rule(0 < p_floor < 0.5, f'p_floor must be in (0, 0.5), got {p_floor}')
    rule(min_ratio < max_ratio, f'min_ratio {min_ratio} is not below max_ratio {max_ratio}')
    rule(eval or not compare, 'compare belongs to --eval')
    rule(device in ('auto', 'cpu', 'cuda'), f"device is 'auto', 'cpu' or 'cuda', got {device!r}")
    rule(dtype in ('auto', 'float32', 'bfloat16'), f"dtype is 'auto', 'float32' or 'bfloat16', got {dtype!r}")
    rule(not asr.endswith('.pt') or os.path.isfile(asr),
         f'asr: {asr}: no such file (an openai-whisper model; assets/tiny/measure.py makes .cache/whisper-base.pt)')
    for pattern, by in respell.items():
        try:
            re.sub(pattern, by, '')
        except (re.error, TypeError) as e:
            rule(False, f'respell: {pattern!r}: {by!r}: {e}')
    other = compare if compare.endswith('.json') else os.path.join(out_dir, compare, 'report.json')
    rule(not compare or os.path.isfile(other), f'compare: {other}: no such file (--eval writes it)')
    rule(os.path.isfile(inside('rollouts', 'index.jsonl')),
         f"{inside('rollouts')}: no finished rollouts there (dpo_sample.py makes them; --status says how far it is)")
    if bad:
        fail('; '.join(bad))

    import fcntl, time

    import numpy as np
    import torch

    import model as M
    from codec import NanoCodec
    from lora import tensors_hash
    from prepare import encode_text, load_tokenizer, tagged

    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cuda' and not torch.cuda.is_available():
        fail(f'device is cuda, but torch {torch.__version__} sees none')
    if device == 'cuda':
        torch.cuda.set_device(local_rank)
    compute = {'auto': torch.bfloat16 if device == 'cuda' else torch.float32, 'float32': torch.float32, 'bfloat16': torch.bfloat16}[dtype]
    try:
        import jiwer, soxr                                          # jiwer: needed after the hearing, missed before it
        from whisper.tokenizer import LANGUAGES, TO_LANGUAGE_CODE
        lock = open(inside(f'lock-{rank}'), 'w')                    # held until this process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        meta = M.read_json(inside('rollouts', 'meta.json'))
        index = [json.loads(line) for line in open(inside('rollouts', 'index.jsonl'), encoding='utf-8')]
        references = {int(k): v.numpy() for k, v in M.read_tensors(inside('rollouts'), 'voices.safetensors').items()}
        frames, size = sum(sum(g['frames']) for g in index), os.path.getsize(inside('rollouts', 'tokens.bin'))
        if size != 16 * frames:
            fail(f"{inside('rollouts', 'tokens.bin')}: {size:,} bytes, but the {frames:,} frames of index.jsonl have {16 * frames:,}: damaged")
        tokens = np.memmap(inside('rollouts', 'tokens.bin'), '<u2', 'r').reshape(-1, 8)
        old = M.read_json(other) if compare else None
        if compare and not (isinstance(old, dict) and {'run', 'policy', 'sampling', 'rates'} <= old.keys()):
            fail(f'compare: {other} is no report of --eval')
    except BlockingIOError:
        fail(f'another run is writing to {run}', by=rank)
    except ImportError as e:
        fail(f'{e}: pip install -r requirements.txt')
    except (OSError, ValueError) as e:
        fail(e)
    except (KeyError, TypeError) as e:
        fail(f"{inside('rollouts', 'index.jsonl')}: damaged ({e!r})")
    named = {g['group']: g for g in index}
    for g in index:
        g['starts'] = np.cumsum([g['start'], *g['frames']]).tolist()
    codes_of = lambda g, k: np.array(tokens[g['starts'][k]:g['starts'][k + 1]])
    frame_rate = meta['codec']['sample_rate'] / 1024

    # ---- hearing: in blocks of groups, a rank takes every world'th. A block is always heard as a whole, so its transcripts are
    # the same whoever hears it and whatever was interrupted

    own_facts, all_facts = inside(f'facts-{rank}.jsonl'), inside('facts.jsonl')
    facts_of_ranks = lambda: [inside(name) for name in os.listdir(run) if re.fullmatch(r'facts-\d+\.jsonl', name)]

    def read_blocks():
        """{block: facts of its groups} of all ranks' files; a line that a kill has cut is none."""
        found = {}
        for line in (line for path in facts_of_ranks() for line in open(path, 'rb')):
            try:
                found |= {b['block']: b['groups'] for b in [json.loads(line)]}
            except ValueError:
                pass
        return found

    heard_with = {k: config[k] for k in HEARD} | {'rollouts': rollouts_hash(inside('rollouts'))}
    if rank == 0:
        before = M.read_json(inside('heard.json')) if os.path.exists(inside('heard.json')) else heard_with
        before.setdefault('rollouts', heard_with['rollouts'])           # heard before this was kept
        changed = [f'{k} {before.get(k)!r}, now {v!r}' for k, v in heard_with.items() if before.get(k) != v]
        if changed and not rehear:
            fail(f"{run} was heard with {'; '.join(changed)}: --rehear hears everything again")
        for path in [*facts_of_ranks(), all_facts] if changed else []:
            if os.path.exists(path):
                os.remove(path)
        save(inside('heard.json'), json.dumps(heard_with, indent=2))
    while not os.path.exists(inside('heard.json')) or M.read_json(inside('heard.json')) != heard_with:
        time.sleep(0.1)

    blocks, done = -(-len(index) // block_groups), read_blocks()
    if not os.path.exists(all_facts):
        mine = [b for b in range(rank, blocks, world) if b not in done]
        if mine:
            spoken = {language} if language else {g['lang'] for g in index}
            for name in sorted(x for x in spoken if x and x.lower() not in {*LANGUAGES, *TO_LANGUAGE_CODE}):
                fail(f'language: Whisper knows none called {name!r} (--language=en, say, holds for all prompts)')
            try:
                what = 'codec'
                nano = NanoCodec(codec or meta['codec']['codec_id'], device=device)
                what = f'asr {asr} (a name that openai-whisper can download, or a .pt file)'
                ears = Listener(asr, device, asr_window)
                if speaker_model:
                    what = f'speaker_model {speaker_model} (a WavLM x-vector for transformers)'
                    from transformers import AutoFeatureExtractor, WavLMForXVector
                    extractor, xvector = AutoFeatureExtractor.from_pretrained(speaker_model), WavLMForXVector.from_pretrained(speaker_model).to(device).eval()
            except Exception as e:                                  # pickle's, the Hub's, torch's own types
                fail(f'{what}: {type(e).__name__}: {str(e)[:300]}')
            if not speaker_model:
                say('speaker similarity: off (speaker_model is not given)')
            at_16k = lambda clips: [soxr.resample(c, nano.sample_rate, 16000) for c in nano.decode(clips)]

            @torch.no_grad()
            def speaker_vector(clip):
                clip = np.resize(clip, max(len(clip), 8000))        # half a second at least: the network needs as much
                inputs = extractor(clip, sampling_rate=16000, return_tensors='pt').to(device)
                return torch.nn.functional.normalize(xvector(**inputs).embeddings[0].float(), dim=0)

            reference_vector = cache(lambda voice: speaker_vector(at_16k([references[voice]])[0]))
            append(own_facts, '\n')                                 # ends a line that a kill has cut
            start = said = time.time()
            for n, b in enumerate(mine):
                groups = index[b * block_groups:(b + 1) * block_groups]
                places = [(g, k) for g in groups for k in range(len(g['frames']))]
                wavs = at_16k([codes_of(g, k) for g, k in places])
                level = [10 * np.log10(float(np.mean(w.astype(np.float64) ** 2)) + 1e-12) for w in wavs]
                loud = [i for i, (g, k) in enumerate(places) if level[i] >= energy_floor and g['frames'][k] / frame_rate >= min_asr_seconds]
                texts = dict(zip(loud, ears.hear([wavs[i] for i in loud], [language or places[i][0]['lang'] for i in loud])))
                facts = {g['group']: [] for g in groups}
                for i, (g, k) in enumerate(places):
                    alike = speaker_model and g['voice'] >= 0 and i in texts
                    similarity = round(float(reference_vector(g['voice']) @ speaker_vector(wavs[i])), 6) if alike else None
                    facts[g['group']].append({'transcript': texts.get(i, ''), 'level': round(level[i], 2), 'heard': i in texts, 'similarity': similarity})
                append(own_facts, lines([{'block': b, 'groups': list(facts.values())}]))
                if time.time() - said > 10 or n + 1 == len(mine):
                    said, seconds = time.time(), time.time() - start
                    say(f'heard {n + 1:,}/{len(mine):,} blocks of {block_groups} groups, '
                        f"{(n + 1) * block_groups * meta['rollouts'] / seconds * world:.1f} rollouts/s, "
                        f'{(len(mine) - n - 1) * seconds / (n + 1) / 60:.0f} min left')
        if rank == 0:
            while len(done := read_blocks()) < blocks:              # the other ranks; one that dies takes torchrun and this one with it
                time.sleep(0.5)
            save(all_facts, lines({'group': g['group'], 'rollouts': f} for g, f in zip(index, [f for b in range(blocks) for f in done[b]])))
    if rank:
        sys.exit(0)
    for path in facts_of_ranks():                                   # what they held is in facts.jsonl
        os.remove(path)

    # ---- rewards

    try:
        facts = [json.loads(line) for line in open(all_facts, encoding='utf-8')]
        if [(f['group'], len(f['rollouts'])) for f in facts] != [(g['group'], len(g['frames'])) for g in index]:
            raise ValueError('its groups are not those of the rollouts')
        facts = [f['rollouts'] for f in facts]
    except (ValueError, KeyError, TypeError) as e:
        fail(f'{all_facts}: damaged ({e}): remove it, and all is heard again')
    scores, counts = [], {'not heard: too quiet': 0, 'not heard: too short': 0}
    terms = {n: config[n] for n in ('sec_base', 'sec_per_word', 'min_ratio', 'max_ratio', *WEIGHTS)}
    for g, heard in zip(index, facts):
        for k, f in enumerate(heard):
            transcript, seconds = f['transcript'], g['frames'][k] / frame_rate
            for pattern, by in respell.items():
                transcript = re.sub(pattern, by, transcript, flags=re.IGNORECASE)
            if not f['heard']:
                counts['not heard: too short' if seconds < min_asr_seconds else 'not heard: too quiet'] += 1
            r = reward(g['text'], transcript, seconds, f['similarity'], **terms) | {
                'group_id': g['group'], 'sample_idx': k, 'prompt': g['prompt'], 'tokens': g['tokens'], 'lang': language or g['lang'],
                'voice': 'null' if g['voice'] < 0 else meta['voice_names'][g['voice']],
                'seconds': seconds, 'truncated': g['truncated'][k], 'heard_as': f['transcript'], 'similarity': f['similarity']}
            scores.append(r | {'kind': None if r['reward'] is None else kind_of(r, max_wer)})
    save(inside('scores.jsonl'), lines(scores))
    known = [s for s in scores if s['reward'] is not None]
    counts['blank text: no WER, no reward'] = len(scores) - len(known)
    say(f'{len(scores):,} rollouts of {len(index):,} groups: ' + ', '.join(f'{sum(s["kind"] == k for s in known):,} {k}' for k in KINDS)
        + ''.join(f'; {n:,} {what}' for what, n in counts.items() if n))

    if eval:
        if not known:
            fail(f'{run}: every text is blank: nothing to report')
        report = {'run': run_name, 'policy': meta['policy'], 'policy_hash': meta['policy_hash'], 'sampling': meta['settings'], 'counts': counts,
                  'rates': stress_report(known)}
        save(inside('report.json'), json.dumps(report, indent=2, ensure_ascii=False))
        save(inside('report.png'), draw({**({old['run']: old['rates']} if old else {}), run_name: report['rates']}))
        if old:
            differs = [k for k in old['sampling'] if k not in ('policy_hash', 'seed') and old['sampling'][k] != report['sampling'].get(k)]
            print(f"{old['run']} ({old['policy']}) > {run_name} ({meta['policy']})" + (f"; they differ in {', '.join(differs)} too" if differs else ''))
        print('\n'.join(table(report['rates'], old and old['rates'])))
        print(f"{inside('report.json')}, report.png")
        sys.exit(0)

    # ---- pairs, and what the frozen policy thinks of both sides

    pairs, reasons = make_pairs(scores, **{k: config[k] for k in ('max_wer', 'not_truncated', 'duration_in_bounds', 'min_margin', 'max_pairs')})
    why = {'blank_text': 'blank text', 'no_chosen': 'none passes the gates', 'no_rejected': 'all pass', 'no_margin': f'rewards less than {min_margin} apart'}
    say(f"{reasons['pairs']:,} pairs from {reasons['paired']:,} of {reasons['groups']:,} groups; without a pair: "
        + ', '.join(f'{reasons[k]:,} {text}' for k, text in why.items()))
    try:
        model, base = M.load_checkpoint(M.latest_checkpoint(ckpt or meta['policy']) or ckpt or meta['policy'], device, compute)
        if tensors_hash(base) != meta['policy_hash']:
            fail(f"{base} is not the policy that spoke: its weights differ from those of {meta['policy']} (--ckpt says where that is now)")
        tokenizer = load_tokenizer(base)[0]
    except (OSError, ValueError, ImportError) as e:
        fail(e)
    places = [(named[name], k) for name, k in sorted({(p[s]['group_id'], p[s]['sample_idx']) for p in pairs for s in ('chosen', 'rejected')})]
    tags, prefixes, reference = meta['settings']['language_tags'], {}, {}
    with torch.no_grad():
        for g, _ in places:
            g['laid_out'] = M.prompt(encode_text(tokenizer, tagged(g['text'], g['lang'] if tags else '')), model.cfg)
            if model.cfg.num_queries and g['voice'] not in prefixes:
                prefixes[g['voice']] = model.voices([references.get(g['voice'])])[0]
        batch_of = np.cumsum([len(g['laid_out']) + model.cfg.num_queries + g['frames'][k] for g, k in places]) // tokens_per_batch
        for n in sorted(set(batch_of)):
            batch = [places[i] for i in np.flatnonzero(batch_of == n)]
            rows = [{'text': g['laid_out'], 'codes': codes_of(g, k)} | ({'prefix': prefixes[g['voice']]} if prefixes else {}) for g, k in batch]
            packed = {k: v.to(device) if torch.is_tensor(v) else v for k, v in M.pack(rows, model.cfg).items()}
            with torch.autocast(device, compute, enabled=compute != torch.float32):         # as dpo_train.py computes
                out = model(packed)
            parts = M.trajectory_logprob(out, packed, torch.tensor([g['truncated'][k] for g, k in batch], device=device), p_floor)      # [rows] each
            reference |= {(g['group'], k): values for (g, k), values in zip(batch, torch.stack(parts, 1).tolist())}

    def side(s):
        k = s['sample_idx']
        return {'k': k, 'start': named[s['group_id']]['starts'][k], **{x: s[x] for x in ('truncated', 'reward', 'wer', 'kind')},
                **dict(zip(('ref_tokens', 'ref_stop', 'frames'), reference[s['group_id'], k]))}

    rows = []
    for p in pairs:
        g = named[p['group_id']]
        rows.append({k: g[k] for k in ('group', 'prompt', 'text', 'lang', 'category', 'voice')} | {
            'tokens': g['laid_out'], 'gap': p['gap'], 'chosen': side(p['chosen']), 'rejected': side(p['rejected'])})
    content = {'policy': meta['policy'], 'policy_hash': meta['policy_hash'], 'rollouts': heard_with['rollouts'], 'p_floor': p_floor, 'dtype': str(compute).removeprefix('torch.'),
               **{k: meta[k] for k in ('codec', 'special_tokens', 'text_repetition')}, 'counts': reasons, 'config': config, 'pairs': rows}
    save(inside('pairs.json'), json.dumps(content, ensure_ascii=False))
    say(f"{inside('pairs.json')}: {len(rows):,} pairs" + ('' if rows else ': nothing to train on'))
