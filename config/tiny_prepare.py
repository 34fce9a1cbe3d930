# Corpus of the offline profile: python assets/tiny/make_speech.py, then python prepare.py config/tiny_prepare.py
sources = ({'name': 'tiny', 'path': 'data/speech/speech.csv'},)     # columns audio, text, speaker
out_dir = 'data/tiny'
codec = 'assets/tiny/codec.nemo'
tokenizer = 'assets/tiny/tokenizer'     # bytes and 185 merges
special_tokens = {}                     # from assets/tiny/tokenizer/gepard_special_tokens.json
max_reject_share = 0.0                  # this speech is synthesized: every row must be good
val_share = 0.05                        # a few dozen held-out texts for the demo's WER
unit_rows = 128                         # short clips on two cores
