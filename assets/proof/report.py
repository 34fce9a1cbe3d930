"""The report of the proof: docs/results.md and its pictures, from what dpo_sample.py spoke and dpo_score.py heard of the held-out texts.

    python assets/proof/report.py                   # after `make proof`, or any part of it: a run that is not there is left out and named
    python assets/proof/report.py --samples=true    # some clips of the last stage into assets/samples too

A run is out/proof/dpo/test_NAME (config/proof_dpo.py shows the two commands that make one). Measured here: word error rates by words of
the text and by kind of voice, of the runs, of the recordings and of these through the codec; which voice a speaker encoder takes each clip for;
what becomes of single words; losses. Every number is computed from those files at the moment of writing.
"""
import csv, json, os, sys
import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# ----------------------------------------------------------------------------
out = 'docs/results.md'         # results-*.png beside it
data = 'data/proof'             # of make_speech.py
runs = 'out/proof/dpo'          # test_NAME of dpo_sample.py and dpo_score.py --eval
base = 'out/proof/base'         # of pretrain.py: metrics.jsonl
codec = 'assets/tiny/codec.nemo'
asr = '.cache/whisper-base.pt'  # as in config/proof_dpo.py
asr_window = 8.0
samples = False                 # True: clips of the last stage that is there into assets/samples
# ----------------------------------------------------------------------------
SMALL = ' of 15 million parameters'
NAMES = {'base': 'base', 'sft': 'SFT', 'sft_cfg': 'SFT + guidance', 'dpo1': 'DPO 1', 'dpo2': 'DPO 2', 'plain': 'SFT without repetition', 'dpo1_cfg': 'DPO 1, guided pairs', 'dpo2_cfg': 'DPO 2, guided pairs',
         'nosupcon': 'base without SupCon', 'all': 'base on texts of all lengths', 'all_sft': 'SFT of that', 'small_sft': 'SFT' + SMALL, 'small_sft_cfg': f'SFT{SMALL} + guidance',
         'small_dpo1': 'DPO 1' + SMALL, 'small_dpo2': 'DPO 2' + SMALL, 'small_dpo1_cfg': f'DPO 1{SMALL}, guided pairs', 'small_dpo2_cfg': f'DPO 2{SMALL}, guided pairs'}
STAGES = ('base', 'SFT', 'SFT + guidance', 'DPO 1', 'DPO 2')        # of these the picture
BUCKETS = ('known', '1', '2-3', '4-7', '8-14', '15-30')
ALONE = {'all': ('known', '1'), 'said alone in the corpus': ('known',), 'within sentences only': ('1',)}      # single words
KINDS = ('seen', 'unseen', 'null')

def table(head, rows):
    return [f"| {' | '.join(head)} |", '|' + '---|' * len(head), *(f"| {' | '.join(r)} |" for r in rows), '']

def wer_cells(rows):
    """rows: dicts text, transcript (normalised), bucket -> a cell a bucket, and one for all."""
    import jiwer
    cells = []
    for bucket in (*BUCKETS, None):
        own = [r for r in rows if bucket in (r['bucket'], None)]
        cells.append(f"{jiwer.wer([r['text'] for r in own], [r['transcript'] for r in own]):.3f} ({len(own)})" if own else '-')
    return cells

def nearest(vectors, own, voices):
    """Unit vectors [n, d], their voices' names, {name: vector} -> share that is nearest to its own voice, mean cosine with it and with the nearest other."""
    names = list(voices)
    cosine = vectors @ np.stack([voices[n] for n in names]).T
    at = np.array([names.index(n) for n in own])
    mine = cosine[np.arange(len(at)), at]
    other = np.where(np.arange(len(names)) == at[:, None], -1, cosine).max(1)
    return float((mine > other).mean()), float(mine.mean()), float(other.mean())

def gain(rows, others):
    """Two lists of (word, kind of clip) -> mean over the words of both of the difference of their clean shares, and its standard error: words differ more than rollouts do."""
    share = lambda rows, word: np.mean([kind == 'clean' for w, kind in rows if w == word])
    d = np.array([share(rows, word) - share(others, word) for word in {w for w, _ in rows} & {w for w, _ in others}])
    return f'{round(d.mean(), 3) + 0:+.1%} ± {d.std(ddof=1) / len(d) ** 0.5:.1%}' if len(d) > 1 else ''

if __name__ == '__main__':
    sys.path[:0] = [ROOT, os.path.join(ROOT, 'assets', 'tiny')]
    from configurator import configure
    configure(globals())
    table_of = lambda name: list(csv.DictReader(open(os.path.join(data, name), encoding='utf-8')))
    try:
        recordings, training, references = table_of('eval.csv'), table_of('speech.csv'), table_of('voices.csv')
    except OSError as e:
        sys.exit(f'report.py: {e.filename} not found: run assets/proof/make_speech.py')
    there = {n: label for n, label in NAMES.items() if all(os.path.exists(os.path.join(runs, f'test_{n}', *x)) for x in (['report.json'], ['scores.jsonl'], ['rollouts', 'index.jsonl'], ['rollouts', 'tokens.bin']))}
    missing = [label for n, label in NAMES.items() if n not in there]
    print(f"runs: {'; '.join(there.values()) or 'none'}. Not there: {'; '.join(missing) or 'none'}", flush=True)

    import matplotlib, soundfile, soxr, torch
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    import model as M
    from codec import NanoCodec
    from dpo_score import Listener, normalise               # what is compared must be heard by the same ears
    from measure import embed, load_speaker_encoder
    from prepare import read_audio
    torch.set_num_threads(1)
    nano, encoder, ears = NanoCodec(codec), load_speaker_encoder(), None
    to16 = lambda wavs: [soxr.resample(w, nano.sample_rate, 16000) for w in wavs]
    read = lambda path, rate: read_audio(os.path.join(data, path), rate)

    # ---- the recordings, and what the codec leaves of them: heard once
    kept = os.path.join(runs, 'recordings.json')
    state = {'rows': [[r[k] for k in ('audio', 'text')] for r in recordings], 'asr': asr, 'asr_window': asr_window, 'codec': codec}
    heard = M.read_json(kept) if os.path.exists(kept) else {}
    if heard.get('state') != state:
        ears = Listener(asr, 'cpu', asr_window)
        originals = [read(r['audio'], nano.sample_rate) for r in recordings]
        heard, sets = {'state': state}, {'recordings': originals, 'through the codec': nano.decode(nano.encode(originals))}
        for what, wavs in sets.items():
            wavs = to16(wavs)
            heard[what] = {'transcripts': ears.hear(wavs, ['en'] * len(wavs)), 'vectors': embed(encoder, wavs).tolist()}
            print(f'{what}: {len(wavs)} clips heard', flush=True)
        os.makedirs(runs, exist_ok=True)
        M.write_json(kept + '.tmp', heard)
        os.replace(kept + '.tmp', kept)
    kind_of = {r['speaker']: r['kind'] for r in references} | {'null': 'null'}
    bucket_of = {r['text']: r['bucket'] for r in recordings}
    results = {what: [{'text': normalise(r['text']), 'transcript': normalise(t), 'bucket': r['bucket'], 'kind': r['kind']}
                      for r, t in zip(recordings, heard[what]['transcripts'])] for what in ('recordings', 'through the codec')}

    # ---- voices: a speaker vector of about 20 s of each; the unseen ones have their reference and held-out recordings only.
    # Those that make_speech.py draws between others are too near to these for any encoder
    clips = {}
    for r in (*training, *references, *recordings):
        if not r['speaker'].startswith(('between', 'mix')):
            clips.setdefault(r['speaker'], []).append(r['audio'])
    voices, coded = {}, {}          # and the same through the codec, which moves them all: what is spoken comes through it too
    for name, paths in clips.items():
        audio, k = np.zeros(0, np.float32), 0
        while k < len(paths) and len(audio) < 20 * nano.sample_rate:
            audio, k = np.concatenate((audio, read(paths[k], nano.sample_rate))), k + 1
        voices[name], coded[name] = (embed(encoder, to16([a]))[0] for a in (audio, nano.decode(nano.encode([audio]))[0]))
    print(f'{len(voices)} voices', flush=True)
    long = lambda row: row['bucket'] in ('8-14', '15-30')       # a word or two do not tell a voice
    similar = {}
    for what in ('recordings', 'through the codec'):
        for kind in KINDS[:2]:
            at = [i for i, r in enumerate(recordings) if long(r) and r['kind'] == kind]
            similar[what, kind] = (len(at), *nearest(np.array(heard[what]['vectors'])[at], [recordings[i]['speaker'] for i in at], voices if what == 'recordings' else coded))

    # ---- the runs
    import jiwer
    stress, ended, wavs_of = {}, {}, {}
    for label, rows in results.items():                         # what can be reached: these ears, this codec
        for what, buckets in ALONE.items():
            stress[label, what] = [(r['text'], 'clean' if r['transcript'] and jiwer.wer(r['text'], r['transcript']) <= 0.2 else 'wrong') for r in rows if r['bucket'] in buckets]
    for n, label in there.items():
        folder = os.path.join(runs, f'test_{n}')
        scores = [json.loads(line) for line in open(os.path.join(folder, 'scores.jsonl'), encoding='utf-8')]
        index = {g['group']: g for g in map(json.loads, open(os.path.join(folder, 'rollouts', 'index.jsonl'), encoding='utf-8'))}
        tokens = np.memmap(os.path.join(folder, 'rollouts', 'tokens.bin'), '<u2', 'r').reshape(-1, 8)
        for s in scores:
            g = index[s['group_id']]
            s['voice'] = s['voice'].split('/')[-1].split(':')[0]
            if g['text'] not in bucket_of or s['voice'] not in kind_of:
                sys.exit(f"report.py: {folder} has {g['text']!r} in the voice {s['voice']}, which {data}/eval.csv and voices.csv have not: a run of other prompts")
            s['bucket'], s['kind_of_voice'] = bucket_of[g['text']], kind_of[s['voice']]
            start = g['start'] + sum(g['frames'][:s['sample_idx']])
            s['place'] = start, start + g['frames'][s['sample_idx']]
        results[label] = [{k: s[k] for k in ('text', 'transcript', 'bucket')} | {'kind': s['kind_of_voice']} for s in scores]
        for what, buckets in ALONE.items():
            stress[label, what] = [(s['text'], s['kind']) for s in scores if s['bucket'] in buckets]
        ended[label] = 1 - float(np.mean([s['truncated'] for s in scores]))
        codes_of = lambda s, tokens=tokens: np.array(tokens[slice(*s['place'])])
        for kind in KINDS[:2]:
            own = [s for s in scores if long(s) and s['kind_of_voice'] == kind and s['sample_idx'] == 0 and not s['empty']]
            if own:
                similar[label, kind] = (len(own), *nearest(embed(encoder, to16(nano.decode([codes_of(s) for s in own]))), [s['voice'] for s in own], coded))
        wavs_of[label] = scores, codes_of
        print(f'{label}: {len(scores)} clips', flush=True)

    # ---- writing
    os.makedirs(os.path.dirname(out) or '.', exist_ok=True)
    picture = lambda name: os.path.splitext(out)[0] + f'-{name}.png'
    hours = sum(soundfile.info(os.path.join(data, r['audio'])).duration for r in training) / 3600
    lines = ['# Results of the proof', '', 'Written by `assets/proof/report.py` from measured files, at the end of `make proof`. In brackets: number of clips.', '',
             f"Corpus: {hours:.1f} hours, {len(training):,} clips, {len({r['speaker'] for r in training})} voices, all synthesized (`assets/proof/make_speech.py`). Measured on "
             f"{len(bucket_of)} texts and, of `unseen`, on {sum(k == 'unseen' for k in kind_of.values())} voices that are not in it. ASR: Whisper base, window {asr_window:g} s; it hears the recordings "
             'with the errors of the first rows below.']
    lines += [f"Not run: {'; '.join(missing)}."] * bool(missing) + ['', '## Word error rate by words of the text', '', '`known`: single words that the corpus has alone too; `1`: those that it has within sentences only.', '']
    lines += table(('', 'voices', *BUCKETS, 'all'), [(what, kind, *wer_cells(own)) for what, rows in results.items() for kind in KINDS if (own := [r for r in rows if r['kind'] == kind])])
    if there:
        lines += [f'![word error rates]({os.path.basename(picture("wer"))})', '']
    lines += ['## Voices', '', f'Clips of 8 words and more: how many a speaker encoder (Resemblyzer) finds nearer to their own voice than to each of {len(voices) - 1} others (the grid of warps, Kokoro\'s voices and their replays); mean cosine with their own and '
              'with the nearest other. What went through the codec is held against voices that did too.', '']
    lines += table(('', 'voices', 'clips', 'nearest to its own', 'own', 'nearest other'), [(what, kind, str(n), f'{share:.1%}', f'{mine:.3f}', f'{other:.3f}')
                   for (what, kind), (n, share, mine, other) in similar.items()])
    if there:
        faults = ('clean', 'timeout', 'runaway', 'empty', 'wrong')
        lines += ['## Single words', '', 'Clean: word error rate at most 0.2 and a plausible length. Last column: how much more of a word is clean than with SFT (of the same size), mean over words and its standard error.', '']
        lines += table(('', 'words', 'clips', *faults, 'clean, less SFT'), [
            (label, what, str(len(rows)), *(f'{sum(kind == k for _, kind in rows) / len(rows):.1%}' for k in faults), gain(rows, stress.get((sft, what), ())) if label != sft else '')
            for (label, what), rows in stress.items() if rows for sft in ['SFT' + SMALL * (SMALL in label)]])
        lines += ['## Stopping', '', 'Clips that end by themselves, before the frame cap.', ''] + table(tuple(ended), [[f'{v:.1%}' for v in ended.values()]])
        fig, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
        for ax, kind in zip(axes, KINDS):
            for what in ('recordings', 'through the codec', *(s for s in STAGES if s in results)):
                rows = results[what]
                y = [jiwer.wer([r['text'] for r in own], [r['transcript'] for r in own]) if (own := [r for r in rows if (r['bucket'], r['kind']) == (b, kind)]) else np.nan for b in BUCKETS]
                ax.plot(BUCKETS, y, 'o-', label=what)
            ax.set(title=f'{kind} voices', xlabel='words', ylabel='WER')
        axes[0].legend(fontsize=7)
        fig.tight_layout()
        fig.savefig(picture('wer'))
    metrics = os.path.join(base, 'metrics.jsonl')
    if os.path.exists(metrics):
        records = [json.loads(line) for line in open(metrics, encoding='utf-8') if line.endswith('}\n')]       # a kill cuts the last one
        fig, ax = plt.subplots(figsize=(6, 4))
        for key in ('code', 'val_code'):
            own = [r for r in records if key in r]
            ax.plot([r['step'] for r in own], [r[key] for r in own], label={'code': 'training', 'val_code': 'held-out texts'}[key])
        ax.set(xlabel='step', ylabel='code loss, nats a frame', ylim=(None, 62))
        ax.legend()
        fig.tight_layout()
        fig.savefig(picture('loss'))
        last = [r for r in records if 'val_code' in r][-1:]
        lines += ['## Pretraining', ''] + [f"Step {r['step']:,}, held-out texts: code loss {r['val_code']:.2f} (60.9 at step 0), stop recall {r['stop_recall']:.3f}, "
                                           f"stop precision {r['stop_precision']:.3f}." for r in last] + ['', f'![losses]({os.path.basename(picture("loss"))})', '']
    if samples and (spoken := [s for s in STAGES if s in wavs_of and '+' not in s]):
        (scores, codes_of), folder, reference = wavs_of[spoken[-1]], os.path.join(ROOT, 'assets', 'samples'), {r['speaker']: r['audio'] for r in references}
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):
            if name.endswith('.flac'):
                os.remove(os.path.join(folder, name))
        save = lambda name, wav: soundfile.write(os.path.join(folder, name), wav, nano.sample_rate, 'PCM_16')
        lines += ['## Samples', '', f'In `assets/samples`: {spoken[-1]}, of each kind of voice and length the first clip, good or bad; and the references that voices were taken from.', '']
        rows = []
        for kind in KINDS:
            for bucket in ('known', '4-7', '15-30'):
                for s in [s for s in scores if (s['bucket'], s['kind_of_voice'], s['sample_idx']) == (bucket, kind, 0)][:1]:
                    name, voice = f"{kind}-{bucket}-{s['voice']}.flac", f"reference-{s['voice']}.flac" if kind != 'null' else ''
                    save(name, nano.decode([codes_of(s)])[0])
                    if voice and not os.path.exists(os.path.join(folder, voice)):
                        save(voice, read(reference[s['voice']], nano.sample_rate))
                    rows.append((name, voice, s['text'], s['transcript']))
        lines += table(('clip', 'reference', 'text', 'Whisper heard'), rows)
    with open(out + '.tmp', 'w', encoding='utf-8') as f:
        f.write('\n'.join(lines).rstrip() + '\n')
    os.replace(out + '.tmp', out)
    print(f'{out} written')
