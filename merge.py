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

import shutil

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import model as M
from lora import fold_state, read_adapter

LORA_KEYS = ('rank', 'alpha', 'dropout', 'targets', 'layers', 'parent', 'parent_hash', 'tensors')    # what lora.py itself keeps


def check(weights, adapter, config):
    """Raise ValueError unless every tensor that the adapter's config promises is there, whole and fits the base."""
    inside = [k for k in weights if '.lora_' in k or '.base.' in k]
    if inside:
        raise ValueError(f'{base_folder}: adapters inside model.safetensors ({inside[0]}): merge them before this one')
    want = {}
    for i in config['layers']:
        for target in config['targets']:
            found = [k.removesuffix('.weight') for k in weights if k.startswith(f'model.layers.{i}.') and k.endswith(f'.{target}.weight')]
            if not found:
                raise ValueError(f'{base_folder}: no {target} in layer {i}, where {ckpt} has adapters')
            for name in found:
                rows, columns = weights[f'{name}.weight'].shape
                want |= {f'{name}.lora_A': [config['rank'], columns], f'{name}.lora_B': [rows, config['rank']]}
    missing = [k for k in want if k not in adapter]
    if missing:
        raise ValueError(f'{ckpt}/adapter.safetensors: {len(missing)} tensors missing, the first is {missing[0]}')
    for name, t in adapter.items():
        shape = want.get(name) or (list(weights[name].shape) if name in weights else None)
        if shape is None:
            raise ValueError(f'{ckpt}/adapter.safetensors: {name} has no place in {base_folder}')
        if list(t.shape) != shape:
            raise ValueError(f'{ckpt}/adapter.safetensors: {name} is {list(t.shape)} instead of {shape}')
        if not t.isfinite().all():
            raise ValueError(f'{ckpt}/adapter.safetensors: {name} is not finite')


def rounding(weights, merged, adapter, config):
    """How much of the change the rounding to the base's dtype has lost, relative (0 = none)."""
    lost = change = 0.0
    for name in (k.removesuffix('.lora_A') for k in adapter if k.endswith('.lora_A')):
        delta = config['alpha'] / config['rank'] * (adapter[f'{name}.lora_B'].float() @ adapter[f'{name}.lora_A'].float())
        lost += float((merged[f'{name}.weight'].float() - weights[f'{name}.weight'].float() - delta).square().sum())
        change += float(delta.square().sum())
    return (lost / change) ** 0.5 if change else 0.0


def write(folder):
    save_file(merged, os.path.join(folder, 'model.safetensors'), metadata={'format': 'pt'})
    shutil.copyfile(os.path.join(base_folder, 'config.json'), os.path.join(folder, 'config.json'))  # the rotary factor stands twice in it: untouched
    M.write_json(os.path.join(folder, 'gepard_config.json'), layout)
    M.write_json(os.path.join(folder, 'training_metadata.json'), metadata)
    for name in M.TOKENIZER_FILES:
        if os.path.exists(os.path.join(base_folder, name)):
            shutil.copyfile(os.path.join(base_folder, name), os.path.join(folder, name))


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
    config = M.read_json(os.path.join(ckpt, 'adapter_config.json'))
    lacking = [k for k in LORA_KEYS if k not in config]
    if lacking:
        fail(f'{ckpt}/adapter_config.json: no {", ".join(lacking)}')
    base = base or config['parent']
    try:
        base_folder = M.local_or_hub(M.latest_checkpoint(base) or base, ['*.json', '*.safetensors', '*.txt', '*.jinja'])
    except Exception as e:      # the Hub's client has many kinds
        fail(f'base {base!r}: {e}; --base= names it where it is now')
    adapter, config = read_adapter(ckpt, base_folder)       # the hash of the base's weights is compared here
    layout = M.read_json(os.path.join(base_folder, 'gepard_config.json'))
    M.config_from_json(layout, f'{base_folder}/gepard_config.json')
    weights = M.read_tensors(base_folder)
    check(weights, adapter, config)

    merged = {k: t.contiguous() for k, t in fold_state(weights, adapter, config).items()}
    layout['text_repetition'] = config.get('text_repetition', layout['text_repetition'])
    # what the stage said of itself, then how it got here: the stages before, oldest first
    own, before = os.path.join(ckpt, 'training_metadata.json'), os.path.join(base_folder, 'training_metadata.json')
    before = M.read_json(before) if os.path.exists(before) else {}
    metadata = {k: v for k, v in config.items() if k not in LORA_KEYS} | (M.read_json(own) if os.path.exists(own) else {})
    metadata |= {'parent': config['parent'], 'adapter': {k: config[k] for k in LORA_KEYS if k != 'parent'},
                 'history': before.pop('history', []) + [before] * bool(before)}
    M.write_folder(out, write)
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
print(f"text repetition: {'on' if layout['text_repetition']['enabled'] else 'off'}, from {'the adapter' if 'text_repetition' in config else 'the base: the adapter says nothing'}")
print(f'{out}: {len(merged)} tensors, {dtype}')
