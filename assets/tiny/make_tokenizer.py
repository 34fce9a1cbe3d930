"""Make the offline profile's tokenizer: python assets/tiny/make_tokenizer.py   (writes assets/tiny/tokenizer/)

Byte level: token id = byte value, no merges, so there is nothing to train and no text it cannot spell; a few-million-parameter
model has no use for Qwen's 248,320 rows. The special tokens follow the bytes. It loads like any other Hugging Face
tokenizer; the ids stand once more in gepard_special_tokens.json, under the names that gepard_config.json uses.
"""
import json, os, sys
from tokenizers import AddedToken, Tokenizer, decoders, models

out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), 'tokenizer')
SPECIAL = ['start_of_speech', 'end_of_speech', 'start_of_text', 'end_of_text', 'tts_pad']     # ids 256..260

# byte_fallback spells every character that is not in the vocabulary by its bytes; here that is every character
tokenizer = Tokenizer(models.BPE(vocab={f'<0x{b:02X}>': b for b in range(256)}, merges=[], byte_fallback=True))
tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
tokenizer.add_special_tokens([AddedToken(f'<|{name}|>', special=True, normalized=False) for name in SPECIAL])

ids = {name: tokenizer.token_to_id(f'<|{name}|>') for name in SPECIAL}
assert ids == {name: 256 + i for i, name in enumerate(SPECIAL)} and tokenizer.get_vocab_size() == 261
text = 'four two <0x41> \u00e9\u4e2d\U0001f600\n\t'
assert tokenizer.encode(text).ids == list(text.encode()) and tokenizer.decode(list(text.encode())) == text

os.makedirs(out, exist_ok=True)
tokenizer.save(os.path.join(out, 'tokenizer.json'))
for name, content in {
    'tokenizer_config.json': {'tokenizer_class': 'PreTrainedTokenizerFast', 'pad_token': '<|tts_pad|>', 'clean_up_tokenization_spaces': False},
    'gepard_special_tokens.json': {'tokeniser_length': tokenizer.get_vocab_size(), **{k: ids[k] for k in
                                   ('start_of_text', 'end_of_text', 'start_of_speech', 'end_of_speech', 'tts_pad')}}}.items():
    with open(os.path.join(out, name), 'w') as f:
        json.dump(content, f, indent=2)
print(f'{out}: {tokenizer.get_vocab_size()} tokens, {ids}')
