# Corpus of docs/new_language.md: the new language, and a replay of the old one. After assets/tiny/second_language.py:
#   python prepare.py config/tiny_spanish.py
# Without the replay: --sources="({'name': 'spanish', 'path': 'data/spanish/speech.csv'},)" --out_dir=data/tiny_spanish_alone
sources = (
    {'name': 'spanish', 'path': 'data/spanish/speech.csv'},
    {'name': 'tiny', 'path': 'data/speech/shuffled.csv', 'max_rows': 1200},    # a quarter of the rows. max_rows takes the first rows: shuffle a sorted table
)
out_dir = 'data/tiny_spanish'
codec = 'assets/tiny/codec.nemo'
tokenizer = 'assets/tiny/tokenizer'
special_tokens = {}
max_reject_share = 0.05                 # a speaker who says the same number the same way twice is a duplicate row
val_share = 0.05
batch_seconds = 60.0
unit_rows = 128
