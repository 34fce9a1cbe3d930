"""
Folds trained adapters into their base: an adapter folder (fine-tuning or preference training) -> an ordinary checkpoint.

    python merge.py --ckpt=out/finetune                                # newest adapters of a run -> out/finetune/checkpoint-300-merged
    python merge.py --ckpt=out/finetune --out=out/finetune/merged      # the same under another name
    python merge.py --ckpt=out/dpo/round1/train --base=/disk/gepard-1.0    # the base has moved since; its weights must be the same

Works on tensors alone, on the CPU: no model is built. Rank and alpha are the adapter's own. W + alpha/rank * B A is made in
float32 and rounded once to the base's dtype; every other tensor is the base's, bit for bit, but those that were trained
whole beside the adapters (the stop head after preference training). Config files and tokenizer are the base's, with
the fine-tune's text repetition. Logits before and after agree to 2e-5 of the largest for a float32 base and
to 1e-2 for a bfloat16 one, which has 8 bits for the sum (tests/test_merge.py, where a small model shows 2e-7 and 2e-3).
"""
import os, sys

# -----------------------------------------------------------------------------
ckpt = 'out/finetune'           # a folder with adapter.safetensors, or a run's folder (its newest)
out = ''                        # the merged checkpoint, must not exist; '' = <ckpt>-merged
base = ''                       # the base: a checkpoint folder, a run's folder or a Hub name; '' = the parent named in adapter_config.json
# -----------------------------------------------------------------------------
from configurator import configure
configure(globals())


def fail(message):
    print('merge.py: ' + ' '.join(str(message).split()), file=sys.stderr)
    sys.exit(2)

from safetensors import SafetensorError

import model as M
from lora import merge, read_adapter


def rounding(weights, merged, adapter, config):
    """How much of the change the rounding to the base's dtype has lost, relative (0 = none)."""
    lost = change = 0.0
    for name in (k.removesuffix('.lora_A') for k in adapter if k.endswith('.lora_A')):
        delta = config['alpha'] / config['rank'] * (adapter[f'{name}.lora_B'].float() @ adapter[f'{name}.lora_A'].float())
        lost += float((merged[f'{name}.weight'].float() - weights[f'{name}.weight'].float() - delta).square().sum())
        change += float(delta.square().sum())
    return (lost / change) ** 0.5 if change else 0.0


ckpt = (M.latest_checkpoint(ckpt, file='adapter.safetensors') or ckpt).rstrip('/')
out = out or f'{ckpt}-merged'
for name in (ckpt, base.rstrip('/')):
    if name.endswith('.tmp'):
        fail(f'{name}: a save that was not finished; choose a whole one')
if not os.path.isdir(ckpt):
    fail(f'{ckpt}: no such folder')
if not os.path.exists(os.path.join(ckpt, 'adapter.safetensors')):
    whole = os.path.exists(os.path.join(ckpt, 'model.safetensors'))
    fail(f'{ckpt}: ' + ('a whole checkpoint, merged already or never adapted: there is nothing to fold' if whole else 'no adapter.safetensors there'))
if os.path.exists(out):
    fail(f'{out} exists already: merged before? Choose another --out')
try:
    base = base or read_adapter(ckpt)[1]['parent']
    try:
        base_folder = M.local_or_hub(M.latest_checkpoint(base) or base, ['*.json', '*.safetensors', '*.txt', '*.jinja'])
    except Exception as e:      # the Hub's client has many kinds
        fail(f'base {base!r}: {e}; --base= names it where it is now')
    weights, merged, adapter, config = merge(ckpt, base_folder, out)
    repetition = M.read_json(os.path.join(out, 'gepard_config.json'))['text_repetition']
except (OSError, ValueError) as e:
    fail(e)
except SafetensorError as e:        # disk full
    fail(f'{out}: {e}')

dtype = str(merged['model.norm.weight'].dtype).removeprefix('torch.')
folded = sum(k.endswith('.lora_A') for k in adapter)
trained = [k for k in adapter if '.lora_' not in k]
print(f"{ckpt}: {folded} adapters of rank {config['rank']}, alpha {config['alpha']} ({', '.join(config['targets'])}) folded into {base_folder}"
      + (f'; taken over whole: {", ".join(trained)}' if trained else ''))
if dtype != 'float32':
    print(f'rounding to {dtype} loses {rounding(weights, merged, adapter, config):.1%} of the change to the weights')
print(f"text repetition: {'on' if repetition['enabled'] else 'off'}, from {'the adapter' if 'text_repetition' in config else 'the base: the adapter says nothing'}")
print(f'{out}: {len(merged)} tensors, {dtype}')
