#!/bin/bash
# docs/new_language.md on the offline profile, after `make demo`: base and second language, with and without a replay of the first.
#   .venv/bin/python -m pip install --no-deps espeakng-loader==0.2.4 && bash assets/tiny/second_language.sh
set -e
PY=${PY:-.venv/bin/python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
$PY assets/tiny/second_language.py
(head -1 data/speech/speech.csv; tail -n +2 data/speech/speech.csv | shuf --random-source=data/speech/speech.csv) > data/speech/shuffled.csv
$PY prepare.py config/tiny_spanish.py
$PY prepare.py config/tiny_spanish.py --sources="({'name': 'spanish', 'path': 'data/spanish/speech.csv'},)" --out_dir=data/tiny_spanish_alone
$PY finetune.py config/tiny_finetune.py
$PY finetune.py config/tiny_finetune.py --data=data/tiny_spanish_alone --out_dir=out/spanish_alone --max_steps=300
for run in spanish spanish_alone; do rm -rf out/$run/merged; $PY merge.py --ckpt=out/$run --out=out/$run/merged; done
$PY assets/tiny/second_language.py --ckpt=out/tiny
$PY assets/tiny/second_language.py --ckpt=out/spanish/merged --ceiling=false
$PY assets/tiny/second_language.py --ckpt=out/spanish_alone/merged --ceiling=false
