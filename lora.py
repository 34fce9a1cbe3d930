"""
LoRA, Hu 2021: a frozen linear layer plus a trained low-rank change, y = W x + alpha/rank * B A x.

Inject after the base weights are loaded, before FSDP and compile; both see plain modules. q_proj.weight becomes q_proj.base.weight,
beside q_proj.lora_A and lora_B. An adapter folder: adapter.safetensors, adapter_config.json (parent's hash included), never the base.
"""
import hashlib, math, os, shutil

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file

from model import TOKENIZER_FILES, config_from_json, read_json, read_tensors, write_folder, write_json

KEYS = ('rank', 'alpha', 'dropout', 'targets', 'layers', 'parent', 'parent_hash', 'tensors')    # of adapter_config.json; a stage adds its own


class LoRALinear(nn.Module):
    """base is frozen; A and B are fp32 whatever the base is: at lr 2e-4 a bf16 weight would swallow most updates."""
    def __init__(self, base, rank, alpha, dropout):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device, dtype=torch.float32))
        self.scaling, self.dropout = alpha / rank, nn.Dropout(dropout)
        self.kept = None        # the base weight while folded

    def forward(self, x):
        y = self.base(x)
        if self.kept is None:       # B starts at zero: an exact no-op
            low = F.linear(self.dropout(x), self.lora_A.to(x.dtype))
            y = y + self.scaling * F.linear(low, self.lora_B.to(x.dtype))
        return y


def adapters_of(model):
    return [m for m in model.modules() if isinstance(m, LoRALinear)]


def inject(model, targets, last_n_layers=0, rank=16, alpha=32, dropout=0.05, seed=0):
    """Put adapters on the backbone's linears named in targets ('q_proj', 'down_proj', ...), in the last n layers (0: all),
    and freeze everything else; the caller may thaw more, such as the stop head. Returns the adapter's config (dict)."""
    if rank < 1 or alpha <= 0 or not 0 <= dropout < 1 or last_n_layers < 0:
        raise ValueError(f'lora: rank {rank} must be >= 1, alpha {alpha} > 0, dropout {dropout} in [0, 1), last_n_layers {last_n_layers} >= 0')
    if adapters_of(model):
        raise ValueError('lora: this model has adapters already; fold or reload it first')
    total = len(model.model.layers)
    if last_n_layers > total:
        print(f'lora: last_n_layers {last_n_layers} is more than there are, taking all {total}')
    layers = list(range(total))[-last_n_layers:]
    # only the backbone: the speaker prefix has a q_proj and v_proj as well
    linears = [(m, n) for i in layers for m in model.model.layers[i].modules() for n, c in m.named_children() if isinstance(c, nn.Linear)]
    available = list(dict.fromkeys(n for _, n in linears))
    unknown = [t for t in targets if t not in available]
    if unknown or not targets:
        raise ValueError(f'lora: targets {unknown or list(targets)} match no linear layer; available: {", ".join(available)}')
    model.requires_grad_(False)
    g = torch.Generator().manual_seed(seed)
    for module, name in linears:
        if name in targets:
            new = LoRALinear(getattr(module, name), rank, alpha, dropout)
            setattr(module, name, new)
            # drawn on the CPU: the same on every rank and device
            new.lora_A.data.copy_(nn.init.kaiming_uniform_(torch.empty(new.lora_A.shape), a=math.sqrt(5), generator=g))
    return {'rank': rank, 'alpha': alpha, 'dropout': dropout, 'targets': list(targets), 'layers': layers}


def adapter_state(model, state=None):
    """The adapters and whatever else is trained (the stop head), by name. state: a full state dict already gathered
    over the ranks of an FSDP model; without one the model's own tensors."""
    state = model.state_dict() if state is None else state
    return {n: state[n].detach().cpu().contiguous() for n, p in model.named_parameters() if p.requires_grad}


def tensors_hash(folder):
    """'sha256:...' of a checkpoint's model.safetensors: an adapter fits one set of base weights and no other."""
    with open(os.path.join(folder, 'model.safetensors'), 'rb') as f:
        return 'sha256:' + hashlib.file_digest(f, 'sha256').hexdigest()


def save_adapter(path, state, config, parent, parent_hash, extra=None):
    """Write an adapter folder, whole or absent. config: inject's and what else the stage wants kept; parent: name of the
    base checkpoint, parent_hash: its tensors_hash; extra(folder) may write more files, such as the resume state."""
    def write(folder):
        save_file(state, os.path.join(folder, 'adapter.safetensors'), metadata={'format': 'pt'})
        write_json(os.path.join(folder, 'adapter_config.json'), config | {'parent': parent, 'parent_hash': parent_hash, 'tensors': len(state)})
        if extra:
            extra(folder)
    write_folder(path, write)


def read_adapter(path, parent=None):
    """Adapter folder -> tensors, config. parent: folder of the base; its weights must be those it was trained on."""
    config = read_json(os.path.join(path, 'adapter_config.json'))
    lacking = [k for k in KEYS if k not in config]
    if lacking:
        raise ValueError(f'{path}/adapter_config.json: no {", ".join(lacking)}')
    state = read_tensors(path, 'adapter.safetensors')
    if len(state) != config['tensors']:
        raise ValueError(f"{path}: {len(state)} tensors in adapter.safetensors, {config['tensors']} saved according to adapter_config.json")
    if parent is not None and tensors_hash(parent) != config['parent_hash']:
        raise ValueError(f"{path}: made from {config['parent']}, whose weights are not those of {parent}")
    return state, config


def load_adapter(model, path, parent=None):
    """Inject a folder's adapters and fill them; tensors loaded = tensors saved, or an error. Other trained tensors (the stop
    head) are filled and thawed with them. Returns the folder's config."""
    state, config = read_adapter(path, parent)
    inject(model, config['targets'], len(config['layers']), config['rank'], config['alpha'], config['dropout'])
    own = dict(model.named_parameters())
    wrong = [n for n in own if 'lora_' in n and n not in state] + [n for n in state if n not in own or own[n].shape != state[n].shape]
    if wrong:
        raise ValueError(f'{path}: {len(wrong)} tensors missing, unknown or of another shape: {wrong[:4]}')
    for name, t in state.items():
        own[name].requires_grad_(True).data.copy_(t)
    return config


def folded(w, a, b, scaling):
    """W + scaling * B A, in fp32, rounded once to W's dtype."""
    return (w.float() + scaling * (b.float() @ a.float())).to(w.dtype)


@torch.no_grad()
def fold(model):
    """Put the adapters into the base weights (for speed). unfold() brings the exact old weights back."""
    for m in adapters_of(model):
        if m.kept is None:
            m.kept = m.base.weight.detach().clone()
            m.base.weight.copy_(folded(m.kept, m.lora_A, m.lora_B, m.scaling))


def unfold(model):
    for m in adapters_of(model):
        if m.kept is not None:
            m.base.weight.copy_(m.kept)     # subtracting would leave the rounding behind
            m.kept = None


def fold_state(base, adapter, config):
    """fold on tensors alone: a base checkpoint's, an adapter's and its config -> merged, with the base's keys and dtypes."""
    out = dict(base)
    for name, t in adapter.items():
        layer, _, kind = name.rpartition('.')
        key = f'{layer}.weight' if kind in ('lora_A', 'lora_B') else name
        if key not in base:
            raise ValueError(f'adapter tensor {name} has no {key} in the base')
        if kind == 'lora_A':
            out[key] = folded(base[key], t, adapter[f'{layer}.lora_B'], config['alpha'] / config['rank'])
        elif kind != 'lora_B':
            out[key] = t.to(base[key].dtype)
    return out


def check(weights, adapter, config, path, base):
    """Raise ValueError unless every tensor that the adapter's config promises is there, whole and fits the base's weights."""
    inside = [k for k in weights if '.lora_' in k or '.base.' in k]
    if inside:
        raise ValueError(f'{base}: adapters inside model.safetensors ({inside[0]}): merge them before this one')
    want = {}
    for i in config['layers']:
        for target in config['targets']:
            found = [k.removesuffix('.weight') for k in weights if k.startswith(f'model.layers.{i}.') and k.endswith(f'.{target}.weight')]
            if not found:
                raise ValueError(f'{base}: no {target} in layer {i}, where {path} has adapters')
            for name in found:
                rows, columns = weights[f'{name}.weight'].shape
                want |= {f'{name}.lora_A': [config['rank'], columns], f'{name}.lora_B': [rows, config['rank']]}
    missing = [k for k in want if k not in adapter]
    if missing:
        raise ValueError(f'{path}/adapter.safetensors: {len(missing)} tensors missing, the first is {missing[0]}')
    for name, t in adapter.items():
        shape = want.get(name) or (list(weights[name].shape) if name in weights else None)
        if shape is None:
            raise ValueError(f'{path}/adapter.safetensors: {name} has no place in {base}')
        if list(t.shape) != shape:
            raise ValueError(f'{path}/adapter.safetensors: {name} is {list(t.shape)} instead of {shape}')
        if not t.isfinite().all():
            raise ValueError(f'{path}/adapter.safetensors: {name} is not finite')


def merge(path, base, out):
    """An adapter folder and the folder of its base -> out, an ordinary checkpoint. What was not trained is the base's: tensors and dtypes,
    files, unknown keys. ValueError where they do not fit. Returns the base's tensors, the merged ones, the adapter's and its config."""
    adapter, config = read_adapter(path, base)              # the hash of the base's weights is compared here
    layout = read_json(os.path.join(base, 'gepard_config.json'))
    config_from_json(layout, f'{base}/gepard_config.json')
    weights = read_tensors(base)
    check(weights, adapter, config, path, base)
    merged = {k: t.contiguous() for k, t in fold_state(weights, adapter, config).items()}
    layout['text_repetition'] = config.get('text_repetition', layout['text_repetition'])
    # what the stage said of itself, then how it got here: the stages before, oldest first
    own, before = (read_json(f) if os.path.exists(f) else {} for f in (os.path.join(folder, 'training_metadata.json') for folder in (path, base)))
    metadata = {k: v for k, v in config.items() if k not in KEYS} | own
    metadata |= {'parent': config['parent'], 'adapter': {k: config[k] for k in KEYS if k != 'parent'}, 'history': before.pop('history', []) + [before] * bool(before)}

    def write(folder):
        save_file(merged, os.path.join(folder, 'model.safetensors'), metadata={'format': 'pt'})
        write_json(os.path.join(folder, 'gepard_config.json'), layout)
        write_json(os.path.join(folder, 'training_metadata.json'), metadata)
        for name in ('config.json', *TOKENIZER_FILES):                  # the rotary factor stands twice in config.json: untouched
            if name == 'config.json' or os.path.exists(os.path.join(base, name)):
                shutil.copyfile(os.path.join(base, name), os.path.join(folder, name))
    write_folder(out, write)
    return weights, merged, adapter, config
