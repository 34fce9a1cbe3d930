# A corpus of several sources at full size. Paths and column names are examples: put your own. All keys of a source: prepare.py --help
#   torchrun --nproc_per_node=8 prepare.py config/prepare.py
sources = (
    {'name': 'libri', 'path': 'data/raw/libri', 'kind': 'parquet', 'language_tag': 'en',                # an Audio column, as the Hub stores it
     'columns': {'audio': 'audio', 'text': 'text_normalized', 'speaker': 'speaker_id'}},
    {'name': 'lj', 'path': 'data/raw/LJSpeech-1.1/metadata.csv', 'language_tag': 'en'},                 # one voice without a name: null rows
    {'name': 'mls_es', 'path': 'data/raw/mls_es/train.tsv', 'language_tag': 'es', 'root': 'data/raw/mls_es/audio'},
    {'name': 'studio', 'path': 'data/raw/studio', 'language_tag': 'en'},                                # <speaker>/<clip>.wav + .txt
    {'name': 'hub', 'path': 'someone/speech', 'kind': 'hf', 'subset': 'es', 'language_tag': 'es', 'streaming': True},   # nothing of it is stored but the corpus
    {'name': 'tokens', 'path': 'data/raw/tokens', 'kind': 'hf', 'split': 'train', 'max_rows': 2_000_000, 'language_tag': 'en'},  # nano_layer_1..8, already encoded
)
out_dir = 'data/corpus'
val_share = 0.002           # of texts; at 20 million rows 1 % is more than an evaluation reads
val_speakers = 20
num_workers = 4             # of each rank; a core reads and resamples 1,400 (48 kHz flac) to 3,900 (16 kHz wav) seconds of audio a second
unit_rows = 2048            # 2,048 clips of 10 s are 1.8 GB, two units a rank are in memory; some 8 clips of each length share a batch
