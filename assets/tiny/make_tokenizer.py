"""Make the offline profile's tokenizer: python assets/tiny/make_tokenizer.py [FOLDER]   (default: assets/tiny/tokenizer/)

Byte-level BPE, trained on the small language's words until each is one token: a few-million-parameter model that sees some
thousand clips has enough to learn without spelling. Ids 0..255 are the bytes themselves, so no text is unspellable; then the special tokens, then
the merges. It loads like any other Hugging Face tokenizer; the special ids stand once more in gepard_special_tokens.json,
under the names that gepard_config.json uses.
"""
import json, os, sys
if sys.argv[1:2] and sys.argv[1].startswith('-'):               # --help is no folder
    print(__doc__.strip())
    sys.exit(0 if sys.argv[1] in ('-h', '--help') else 2)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
import make_speech as speech

out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, 'tokenizer')
SPECIAL = ['start_of_speech', 'end_of_speech', 'start_of_text', 'end_of_text', 'tts_pad']     # ids 256..260
words = sorted({w for group in (speech.SINGLE, speech.DIGITS, speech.COLORS, speech.ANIMALS, speech.THINGS, speech.PLACES,
                                speech.VERBS, speech.WHEN, ['the']) for w in group})
split = pre_tokenizers.ByteLevel(add_prefix_space=True)         # ' four', ' two': the first word is no exception

trained = Tokenizer(models.BPE())
trained.pre_tokenizer = split
trained.train_from_iterator(words, trainers.BpeTrainer(vocab_size=10000, show_progress=False))
merges = [tuple(m) if isinstance(m, list) else tuple(m.split(' ')) for m in json.loads(trained.to_str())['model']['merges']]

# ByteLevel writes byte b as the printable character of its own code, or as one from 256 on (GPT-2's table)
printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
rest = [b for b in range(256) if b not in printable]
vocab = {chr(b if b in printable else 256 + rest.index(b)): b for b in range(256)}
vocab |= {f'<|{name}|>': 256 + i for i, name in enumerate(SPECIAL)}
for a, b in merges:
    vocab.setdefault(a + b, len(vocab))
tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken(f'<|{name}|>', special=True, normalized=False) for name in SPECIAL])

os.makedirs(out, exist_ok=True)
tokenizer.save(os.path.join(out, 'tokenizer.json'))
for name, content in {
    'tokenizer_config.json': {'tokenizer_class': 'PreTrainedTokenizerFast', 'pad_token': '<|tts_pad|>', 'clean_up_tokenization_spaces': False},
    'gepard_special_tokens.json': {'tokeniser_length': tokenizer.get_vocab_size(), **{k: tokenizer.token_to_id(f'<|{k}|>') for k in
                                   ('start_of_text', 'end_of_text', 'start_of_speech', 'end_of_speech', 'tts_pad')}}}.items():
    with open(os.path.join(out, name), 'w') as f:
        json.dump(content, f, indent=2)
print(f'{out}: {tokenizer.get_vocab_size()} tokens, {len(merges)} merges, {len(words)} words')
