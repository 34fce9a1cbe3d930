"""
Publishes a checkpoint on the Hugging Face Hub, with a model card. Private unless --public.

    python upload.py --ckpt=out/finetune/merged --repo=you/name --dry_run    # checks, casts, shows the card, sends nothing
    python upload.py --ckpt=out/finetune/merged --repo=you/name --public --languages=en,es --license=apache-2.0
    python upload.py --ckpt=out/pretrain --repo=you/name-resume --training_state            # a run to be gone on with elsewhere

Before anything is sent the folder is checked: required files, names and shapes of all tensors, finite weights, no adapters
inside, rotary factor in both places, tokenizer. An allow-list of files goes up, in one commit: it is there whole or not at all. After a
break run it again: files that had arrived are not sent twice. The access token comes from where the Hub's client looks for it
(`hf auth login`, or HF_TOKEN) and is never printed. From training_metadata.json local paths, tokens and wandb settings are cut; with --training_state
relative paths stay, since a run that goes on compares them.
"""
import glob, os, sys

# -----------------------------------------------------------------------------
ckpt = 'out/pretrain'           # a checkpoint folder, or a run's folder (its newest)
repo = ''                       # 'you/name', made if it does not exist
public = False                  # a repository that exists the other way is refused, not changed
dtype = 'auto'                  # published weights: 'auto' = bfloat16 for float32 ones, others as they are; 'keep'; 'float32', 'bfloat16', 'float16'
training_state = False          # the optimizer state (resume.pt, or resume.json and resume/) too, and float32 weights as they are
languages = ()                  # codes for the card, e.g. en,es; () = the language tags of the training data
base_model = ''                 # Hub name for the card; '' = the nearest parent that has one
license = ''                    # of the weights, for the card, e.g. apache-2.0; '' = not stated
dry_run = False                 # everything but the network
# -----------------------------------------------------------------------------
from configurator import configure
configure(globals())


def fail(message):
    print('upload.py: ' + ' '.join(str(message).split()), file=sys.stderr)
    sys.exit(2)

if repo.count('/') != 1 or not all(repo.split('/')):
    fail(f'--repo is you/name, got {repo!r}')
if dtype not in ('auto', 'keep', 'float32', 'bfloat16', 'float16'):
    fail(f"--dtype is auto, keep, float32, bfloat16 or float16, got {dtype!r}")
if training_state and dtype not in ('auto', 'keep'):
    fail(f'--training_state takes the weights as they are: leave out --dtype={dtype}')

import json, re, tempfile

import torch
from huggingface_hub import CommitOperationAdd, HfApi, ModelCardData, get_token
from safetensors import SafetensorError
from safetensors.torch import save_file

import model as M
from prepare import load_tokenizer

REQUIRED = ('config.json', 'gepard_config.json', 'training_metadata.json', 'tokenizer.json', 'model.safetensors')
SETTINGS = ('learning_rate', 'batch_size', 'gradient_accumulation', 'epochs', 'max_steps', 'lora_dropout', 'short_fraction', 'beta')      # shown if a stage has them
LOCAL = re.compile(r'(/|~/|\.\.?/|[A-Za-z]:\\)')             # how a path of a disk begins; WHERE: surely one, for the last look
WHERE = re.compile(r'(/|~/|[A-Za-z]:\\)[^\s/\\]+[/\\]')


def published_state(folder, cfg):
    """The weights under their published names and shapes ([1] scalars), each checked. Raises ValueError."""
    state = M.read_tensors(folder)
    inside = [k for k in state if '.lora_' in k or '.base.' in k]
    if inside:
        raise ValueError(f'{folder}/model.safetensors: adapters inside ({inside[0]}): merge.py folds them in')
    state = M.published(M.fused(state, cfg, f'{folder}/model.safetensors'), cfg)
    if not cfg.supcon_hidden:           # left over from training; load_checkpoint passes over it as well
        state = {k: t for k, t in state.items() if not k.startswith('supcon_head.')}
    with torch.device('meta'):
        want = {k: list(t.shape) for k, t in M.published(M.Gepard(cfg).state_dict(), cfg).items()}
    wrong = [f'missing {k}' for k in want if k not in state and not k.startswith('supcon_head.')] + [f'unexpected {k}' for k in state if k not in want]
    wrong = wrong or [f'{k} is {list(t.shape)} instead of {want[k]}' for k, t in state.items() if list(t.shape) != want[k]]
    if wrong:
        raise ValueError(f'{folder}/model.safetensors: {"; ".join(wrong[:4])}')
    return state


def check_rotary(cfg, configs):
    """transformers reads the rotary factor nested, vLLM flat: where one is missing its reader takes 0.25 and speaks noise."""
    for where, c in configs.items():
        flat, nested = c.get('partial_rotary_factor'), (c.get('rope_parameters') or {}).get('partial_rotary_factor')
        if not flat == nested == cfg.partial_rotary_factor:
            raise ValueError(f'{where}: partial_rotary_factor {flat} flat, {nested} in rope_parameters; both must be there and be {cfg.partial_rotary_factor}')


def hub_name(s):
    if not isinstance(s, str) or s in kinds:                    # a stage has said what it was
        return isinstance(s, str) and kinds[s] == 'hub'
    return s.count('/') == 1 and not LOCAL.match(s) and not s.startswith(('out/', 'data/')) and not os.path.exists(s)


def cut(x):
    """Metadata without what is nobody's business: paths become their last part, tokens and wandb settings go."""
    if isinstance(x, dict):
        return {cut(k): cut(v) for k, v in x.items() if not k.startswith('wandb') and not k.endswith(('token', 'key', 'secret', 'password'))}
    if isinstance(x, list):
        return [cut(v) for v in x]
    path = isinstance(x, str) and re.search(r'[/\\]', x) and '://' not in x and not hub_name(x) and (
        LOCAL.match(x) and x[0] != '.' if training_state else LOCAL.match(x) or os.path.exists(x) or x.startswith(('out/', 'data/')) or not re.search(r'\s', x))
    return re.split(r'[/\\]', x.rstrip('/\\'))[-1] if path else x


def strings(x):
    """All strings in a JSON value."""
    if isinstance(x, (dict, list)):
        for v in (*x, *x.values()) if isinstance(x, dict) else x:
            yield from strings(v)
    elif isinstance(x, str):
        yield x


def flat(x, name=''):
    """{'a': {'b': 1}} -> ('a b', 1): evaluation numbers, however deep."""
    if isinstance(x, dict):
        for k, v in x.items():
            yield from flat(v, f'{name} {k}'.strip())
    else:
        yield name, f'{x:.4g}' if isinstance(x, float) else str(x)


def scores_of(evaluation):
    """(name, value) of each number; those that finetune.py measured before and after stand side by side."""
    was = dict(flat(evaluation.get('before', {}))) if 'after' in evaluation else {}
    for name, value in flat(evaluation['after'] if was else evaluation):
        if not (was and name.endswith(' rows')):
            yield name, f'{was[name]} -> {value}' if name in was else value


def card(cfg, stages, tensors, published_dtype):
    """README.md: the front matter that the Hub reads, then what training_metadata.json and gepard_config.json say."""
    parents = [s.get('parent') for s in reversed(stages) if hub_name(s.get('parent'))]
    base = base_model or (parents[0] if parents else None)
    tags = {s['language_tag'] for m in stages for s in m.get('corpus', {}).get('sources', []) if s.get('language_tag')} | {t for m in stages for t in m.get('corpus', {}).get('languages') or () if t}
    spoken = sorted(languages or tags)
    data = ModelCardData(language=spoken or None, license=license or None, base_model=base, pipeline_tag='text-to-speech', tags=['gepard', 'nanogepard'],
                         **({'base_model_relation': 'finetune'} if base else {}))
    for what, value, flag in (('languages', spoken, '--languages=en'), ('licence', license, '--license='), ('base model', base, '--base_model=')):
        if not value:
            print(f'the card names no {what} ({flag} does)')

    rows, scores = [], []
    for m in stages:
        c, corpus, a = m.get('config', {}), m.get('corpus', {}), m.get('adapter')
        hours = f"{corpus['frames'] * 1024 / cfg.codec['sample_rate'] / 3600:,.2f} h, {corpus.get('rows', 0):,} clips" if corpus.get('frames') else ''
        how = ([f"LoRA rank {a['rank']}, alpha {a['alpha']} on {', '.join(a['targets'])}"] if a else []) + [f'{k} {c[k]}' for k in SETTINGS if c.get(k)]
        rows.append(f"| {m.get('stage', '')} | {m.get('step', '')} | {hours} | {'; '.join(how)} |")
        scores += [f"| {m.get('stage', '')} | {name} | {value} |" for name, value in scores_of(m.get('evaluation', {}))]
    known = M.language_tags(ckpt)
    codec, voice = cfg.codec['codec_id'], (f' --language={known[0]}' if known else '') + ' --ref=voice.wav' * bool(cfg.num_queries)
    r = cfg.text_repetition
    parts = [f'---\n{data.to_yaml()}\n---\n\n# {repo.split("/")[1]}\n', f'''A text-to-speech model of the GEPARD kind: a Qwen3.5 decoder of {cfg.num_hidden_layers} full-attention layers, {sum(t.numel() for t in tensors) / 1e6:.1f}M
parameters ({published_dtype}), reads text and predicts speech, one frame of {len(cfg.levels)} codec channels a step, {cfg.codec['sample_rate'] / 1024:.1f} frames a second.
{f"The voice is {cfg.num_queries} vectors made from a reference clip of 3-15 s; without one it speaks in some voice of its training data." if cfg.num_queries else "It has no voice cloning."}
{f"Texts below {r['apply_below']} tokens are repeated in the prompt (not in the speech); the setting is in gepard_config.json." if r['enabled'] else "Text repetition is off."}
''', f'## Use\n\nWith the scripts of nanoGepard:\n\n```sh\npython sample.py --ckpt={repo} --text="Hello."{voice} --out=hello.wav\n```\n']
    if training_state:
        parts.append('This is a resume snapshot: float32 weights and the optimizer state of a run.\n')
    parts.append('## Training\n\n| stage | step | data | settings |\n|---|---|---|---|\n' + '\n'.join(rows) + '\n')
    if scores:
        parts.append('## Evaluation\n\n| stage | measure | value |\n|---|---|---|\n' + '\n'.join(scores) + '\n')
    parts.append(f'## Codec\n\nThe waveform codec is not part of this repository: `{codec}`' + (
        ' is downloaded from its own,\nunder the licence on its model card, which whoever uses it accepts.\n' if hub_name(codec) else
        ' is a file of the scripts\' own repository, or of whoever\ntrained this model; `--codec=` names another place for it.\n'))
    return '\n'.join(parts)


ckpt = (M.latest_checkpoint(ckpt) or M.latest_checkpoint(ckpt, file='adapter.safetensors') or ckpt).rstrip('/')
if ckpt.endswith('.tmp'):
    fail(f'{ckpt}: a save that was not finished; choose a whole checkpoint')
if not os.path.isdir(ckpt):
    fail(f'{ckpt}: no such folder')
if os.path.exists(os.path.join(ckpt, 'adapter.safetensors')):
    fail(f'{ckpt}: these are adapters: merge.py makes a checkpoint of them')
resume = [os.path.relpath(p, ckpt) for pattern in ('resume.pt', 'resume.json', 'resume/*.safetensors') for p in sorted(glob.glob(os.path.join(glob.escape(ckpt), pattern)))]
lacking = [n for n in REQUIRED if not os.path.isfile(os.path.join(ckpt, n))] + ['resume.pt or resume.json'] * (training_state and not resume)
if lacking:
    fail(f'{ckpt}: no {", ".join(lacking)}')
try:
    config, gepard_config, metadata = (M.read_json(os.path.join(ckpt, n)) for n in REQUIRED[:3])
    cfg = M.config_from_json(gepard_config, f'{ckpt}/gepard_config.json')
    M.backbone_fields(config, f'{ckpt}/config.json')
    check_rotary(cfg, {f'{ckpt}/config.json': config, f'{ckpt}/gepard_config.json, backbone_config': gepard_config['backbone_config']})
    state = published_state(ckpt, cfg)
    tokenizer = load_tokenizer(ckpt)[0].get_vocab_size()
except (OSError, ValueError) as e:
    fail(e)
highest = max(v for k, v in cfg.special_tokens.items() if k != 'tokeniser_length')
if tokenizer > cfg.vocab_size or highest >= cfg.vocab_size:
    fail(f'{ckpt}: the tokenizer has {tokenizer} ids, special tokens go up to {highest}, the model has {cfg.vocab_size}')
stored = state['model.norm.weight'].dtype
if training_state and stored != torch.float32:
    fail(f'{ckpt}: --training_state needs the float32 weights of a run, these are {stored}')
wanted = stored if training_state or dtype == 'keep' or dtype == 'auto' and stored != torch.float32 else torch.bfloat16 if dtype == 'auto' else getattr(torch, dtype)
name_of = str(wanted).removeprefix('torch.')

with tempfile.TemporaryDirectory() as tmp:
    files = {n: os.path.join(ckpt, n) for n in ('model.safetensors', 'config.json', 'gepard_config.json', *M.TOKENIZER_FILES, *(resume if training_state else ()))
             if os.path.isfile(os.path.join(ckpt, n))}
    cast = {k: t.to(wanted).contiguous() for k, t in state.items()}
    for k, t in cast.items():
        if not t.isfinite().all():
            fail(f'{ckpt}/model.safetensors: {k} is not finite' + f' in {name_of}' * bool(state[k].isfinite().all()))
    if not training_state:
        files |= {n: os.path.join(tmp, n) for n in ('model.safetensors', 'config.json', 'gepard_config.json')}
        try:
            save_file(cast, files['model.safetensors'], metadata={'format': 'pt'})
        except (OSError, SafetensorError) as e:
            fail(f'{tmp}: {e} (TMPDIR names a roomier place for the copy to be published)')
        M.write_json(files['config.json'], config | {'dtype': name_of} | ({'torch_dtype': name_of} if 'torch_dtype' in config else {}))
        M.write_json(files['gepard_config.json'], gepard_config | {'model_dtype': name_of})
    files |= {n: os.path.join(tmp, n) for n in ('training_metadata.json', 'README.md')}
    kinds = {m.get('parent'): m['parent_kind'] for m in (*metadata.get('history', []), metadata) if m.get('parent_kind')}
    metadata = cut(metadata)
    M.write_json(files['training_metadata.json'], metadata)
    with open(files['README.md'], 'w', encoding='utf-8') as f:
        f.write(card(cfg, metadata.get('history', []) + [metadata], cast.values(), name_of))

    # the last look: nothing of this machine or its owner leaves it
    token = get_token()
    for name in set(files) - {'model.safetensors', 'tokenizer.json', 'vocab.json', 'merges.txt', *resume}:
        text = open(files[name], encoding='utf-8').read()
        found = [s for s in strings(json.loads(text)) if WHERE.match(s)] if name.endswith('.json') else []
        found += [p for p in (os.path.expanduser('~'), os.getcwd(), os.path.abspath(ckpt)) if len(p) > 1 and p in text]
        if found:
            fail(f'{name} would publish a path of this machine: {found[0]!r}; change it there')
        if token and token in text or re.search(r'\bhf_\w{20,}', text):
            fail(f'{name} would publish an access token; take it out there')

    print(f"{ckpt} -> {repo} ({'public' if public else 'private'}), weights {str(stored).removeprefix('torch.')} -> {name_of}")
    for name, path in files.items():
        print(f'  {os.path.getsize(path):>14,} bytes  {name}')
    if dry_run:
        print('\n' + open(files['README.md'], encoding='utf-8').read() + '\ndry run: nothing was sent')
        sys.exit(0)
    if not token:
        fail('no access token: `hf auth login`, or HF_TOKEN in the environment')
    try:
        api = HfApi()
        api.create_repo(repo, private=not public, exist_ok=True)
        info = api.model_info(repo)
        if info.private == public:      # exist_ok leaves an older repository as it is
            fail(f"{repo} exists and is {'private' if info.private else 'public'}: change that on the Hub, " + ('or leave out --public' if public else 'or say --public'))
        commit = api.create_commit(repo, [CommitOperationAdd(n, p) for n, p in files.items()], commit_message=f"{metadata.get('stage', 'checkpoint')}, step {metadata.get('step', '?')}")
    except Exception as e:              # of many kinds; a server may send our own headers back
        text = f'{type(e).__name__}: {e}' + (f' ({e.__cause__})' if e.__cause__ else '')
        fail(f'{repo}: {text.replace(token, "<token>")}; run it again to go on: what has arrived is not sent twice')
    left = [s.rfilename for s in info.siblings or [] if s.rfilename not in files and s.rfilename != '.gitattributes']
    print((f"left as they were: {', '.join(left)}\n" if left else '') + f'published {commit.commit_url}')
