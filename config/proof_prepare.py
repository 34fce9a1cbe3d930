# Corpora of the proof, after assets/proof/make_speech.py: what is learned, then the reference clips of the voices that are measured.
#   python prepare.py config/proof_prepare.py
#   python prepare.py config/proof_prepare.py --sources="({'name': 'proof', 'path': 'data/proof/voices.csv'},)" --out_dir=data/proof_voices --val_share=0.0 --min_clips_per_speaker=1
sources = ({'name': 'proof', 'path': 'data/proof/speech.csv'},)     # columns audio, text, speaker
out_dir = 'data/proof_corpus'
codec = 'assets/tiny/codec.nemo'
tokenizer = 'assets/tiny/tokenizer'     # bytes and 185 merges: four or five tokens a word
special_tokens = {}                     # from assets/tiny/tokenizer/gepard_special_tokens.json
max_reject_share = 0.0                  # this speech is synthesized: every row must be good
val_share = 0.02                        # texts for the loss curve; the held-out texts of make_speech.py are not in here at all
