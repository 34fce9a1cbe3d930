"""
upload.py through the real Hub client, against a server of this file that speaks the Hub's commit protocol on 127.0.0.1.

    pytest tests/test_upload.py
"""
import base64, hashlib, http.server, json, os, re, shutil, subprocess, sys, threading, urllib.parse

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import lora
import model as M
from test_lora import logits
from test_merge import GOLDEN, REPETITION, ROOT, run
from test_model import random_rows, spread

TOKEN = 'hf_' + 'aBcD' * 8
TOKENIZER = os.path.join(ROOT, 'assets', 'tiny', 'tokenizer')
SPECIAL = {'tokeniser_length': 446, 'start_of_text': 258, 'end_of_text': 259, 'start_of_speech': 256, 'end_of_speech': 257, 'tts_pad': 260}


class Hub(http.server.BaseHTTPRequestHandler):
    """Repositories in memory: create, preupload, LFS batch + PUT + verify, commit (ndjson), info, tree, resolve."""
    protocol_version = 'HTTP/1.1'
    repos, blobs, calls, broken = {}, {}, [], {}      # broken: {'commit': status} answers once with that status
    log_message = lambda self, *a: None

    def answer(self, status, body=b'', **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for k, v in {'Content-Length': len(body), **headers}.items():
            self.send_header(k.replace('_', '-'), str(v))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    def serve(self):
        path, query = urllib.parse.unquote(self.path.partition('?')[0]), self.path.partition('?')[2]
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        if self.headers.get('Transfer-Encoding') == 'chunked':
            while n := int(self.rfile.readline(), 16):
                body += self.rfile.read(n)
                self.rfile.readline()
            self.rfile.readline()
        what = re.sub(r'[0-9a-f]{40,}', '*', path)
        self.calls.append(f'{self.command} {what}')
        for part in [p for p in self.broken if p in what]:
            status = self.broken.pop(part)
            return self.answer(status, {'error': f"out of order, you sent {self.headers.get('Authorization')}"}, X_Error_Message=f"out of order: {self.headers.get('Authorization')}")
        if path.startswith('/lfs/') and self.command == 'PUT':      # a signed address: no token
            assert path[5:] == hashlib.sha256(body).hexdigest()
            self.blobs[path[5:]] = body
            return self.answer(200)
        known = self.headers.get('Authorization') == f'Bearer {TOKEN}'
        writes = self.command == 'POST'
        if writes and not known:
            return self.answer(401, {'error': 'Invalid username or password.'})
        if path == '/api/repos/create':
            j = json.loads(body)
            name = f"{j['organization']}/{j['name']}"
            if j['organization'] != 'you':
                return self.answer(403, {'error': "You don't have the rights to create a model under this namespace"})
            if name in self.repos:
                return self.answer(409, {'error': 'You already created this model repo', 'url': f'http://{self.headers["Host"]}/{name}'})
            self.repos[name] = {'private': j.get('visibility') == 'private', 'files': {}, 'sha': '0' * 40}
            return self.answer(200, {'url': f'http://{self.headers["Host"]}/{name}'})
        if path == '/api/validate-yaml':
            front = yaml.safe_load(json.loads(body)['content'].split('---')[1])
            good = front['pipeline_tag'] == 'text-to-speech' and (not front.get('base_model') or re.fullmatch(r'[\w.-]+/[\w.-]+', front['base_model']))
            return self.answer(200 if good else 400, {'warnings': [], 'errors': [] if good else [{'message': 'bad front matter'}]})
        match = re.match(r'/(?:api/models/)?([\w-]+/[\w-]+)(?:\.git/info/lfs/objects/batch)?(?:/([\w-]+)(?:/([\w-]+)(?:/(.*))?)?)?$', path)
        name, action, revision, file = match.groups()
        repo = self.repos.get(name)
        if repo is None or repo['private'] and not known:
            return self.answer(404 if known else 401, {'error': 'Repository not found'}, X_Error_Code='RepoNotFound')
        oid_of = lambda f: hashlib.sha256(f).hexdigest() if f in self.blobs.values() else hashlib.sha1(b'blob %d\0' % len(f) + f).hexdigest()
        files = repo['files']
        if action == 'preupload':
            old = {p: oid_of(f) for p, f in files.items()}
            self.answer(200, {'files': [{'path': f['path'], 'uploadMode': 'lfs' if f['path'].endswith(('.safetensors', '.pt')) else 'regular', 'shouldIgnore': False,
                                         'oid': old.get(f['path'])} for f in json.loads(body)['files']]})
        elif path.endswith('/objects/batch'):
            address = f'http://{self.headers["Host"]}'
            self.answer(200, {'transfer': 'basic', 'objects': [o | ({} if o['oid'] in self.blobs else {'actions': {
                'upload': {'href': f"{address}/lfs/{o['oid']}"}, 'verify': {'href': f'{address}/{name}/verify'}}}) for o in json.loads(body)['objects']]})
        elif action == 'verify':
            j = json.loads(body)
            self.answer(200 if len(self.blobs.get(j['oid'], b'')) == j['size'] else 400, {})
        elif action == 'commit':
            lines = [json.loads(line) for line in body.splitlines()]
            assert lines[0]['key'] == 'header' and lines[0]['value']['summary']
            for line in lines[1:]:
                v = line['value']
                files[v['path']] = base64.b64decode(v['content']) if line['key'] == 'file' else self.blobs[v['oid']]
            repo['sha'] = hashlib.sha1(body).hexdigest()
            self.answer(200, {'commitUrl': f"http://{self.headers['Host']}/{name}/commit/{repo['sha']}", 'commitOid': repo['sha'], 'pullRequestUrl': None})
        elif action == 'tree':
            self.answer(200, [{'type': 'file', 'path': p, 'size': len(f), 'oid': hashlib.sha1(f).hexdigest()}
                              | ({'lfs': {'oid': oid_of(f), 'size': len(f), 'pointerSize': 130}} if len(oid_of(f)) == 64 else {}) for p, f in files.items()])
        elif action == 'resolve':
            self.answer(200, files[file], ETag=f'"{oid_of(files[file])}"', X_Repo_Commit=repo['sha']) if file in files else self.answer(404, {}, X_Error_Code='EntryNotFound')
        elif action in (None, 'revision'):
            self.answer(200, {'id': name, 'private': repo['private'], 'sha': repo['sha'], 'siblings': [{'rfilename': p} for p in files]})
        else:
            self.answer(404, {'error': path})

    do_GET = do_POST = do_PUT = do_HEAD = serve


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The server, empty, and the client in this process turned to it; .env is the same for another process."""
    import huggingface_hub.constants as c
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    Hub.repos, Hub.blobs, Hub.calls, Hub.broken = {}, {}, [], {}
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    Hub.url = f'http://127.0.0.1:{server.server_port}'
    settings = {'HF_ENDPOINT': Hub.url, 'HF_TOKEN': TOKEN, 'HF_HUB_DISABLE_XET': '1', 'HF_HUB_DISABLE_PROGRESS_BARS': '1', 'HF_HOME': str(tmp_path / 'hf'), 'NO_PROXY': '127.0.0.1'}
    Hub.env = {k: v for k, v in os.environ.items() if not k.startswith('HF_')} | settings
    for k, v in settings.items():
        monkeypatch.setenv(k, v)
    for k, v in {'ENDPOINT': Hub.url, 'HF_HUB_DISABLE_XET': True, 'HF_HUB_CACHE': str(tmp_path / 'hf' / 'hub'), 'HUGGINGFACE_CO_URL_TEMPLATE': Hub.url + '/{repo_id}/resolve/{revision}/{filename}',
                 'HF_HUB_OFFLINE': False}.items():
        monkeypatch.setattr(c, k, v)
    disable_progress_bars()
    yield Hub
    enable_progress_bars()
    server.shutdown()
    server.server_close()


def save(path, seed=0, metadata=None, **kw):
    """A small random checkpoint -> its model."""
    cfg = M.Config(**(dict(vocab_size=448, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                           rope_theta=1e4, max_position_embeddings=512, audio_embed_dim=4, prefix_heads=2, special_tokens=SPECIAL) | kw))
    cfg.codec = cfg.codec | {'codec_id': 'assets/tiny/codec.nemo'}
    model = M.Gepard(cfg)
    model.init_weights(seed)
    M.save_checkpoint(path, model.state_dict(), cfg, TOKENIZER, metadata or {
        'stage': 'pretrain', 'step': 10, 'parent': 'nineninesix/qwen3_5-full-attn-only-14',
        'config': {'learning_rate': 9e-4, 'batch_size': 64, 'out_dir': path, 'data': 'data/tiny', 'wandb_project': 'mine', 'speak': ['either/or this and/or that']},
        'corpus': {'sources': [{'name': 'tiny', 'path': f'{path}/speech.csv', 'language_tag': 'en'}], 'rows': 12800, 'frames': 305926}})
    return model.eval()


@pytest.fixture
def folder(tmp_path):
    save(str(tmp_path / 'ckpt'))
    return tmp_path / 'ckpt'


def test_base_to_adapter_to_hub_to_speech(hub, tmp_path, capsys, monkeypatch):
    """Adapters on a base, merged, published, downloaded afresh by name, spoken: a user's commands."""
    model = save(str(tmp_path / 'base'))
    config = lora.inject(model, ('q_proj', 'v_proj'), rank=4, alpha=8, dropout=0.0)
    for m in lora.adapters_of(model):
        m.lora_B.data.normal_(std=0.1)
    lora.save_adapter(str(tmp_path / 'ft'), lora.adapter_state(model), config | {
        'text_repetition': REPETITION, 'stage': 'finetune', 'step': 30, 'config': {'learning_rate': 2e-4, 'data': str(tmp_path)},
        'evaluation': {'WER': {'before': 0.25, 'after': 0.125}}}, str(tmp_path / 'base'), lora.tensors_hash(str(tmp_path / 'base')))
    run(capsys, 'merge.py', f'--ckpt={tmp_path}/ft')

    def process(*args):
        p = subprocess.run([sys.executable, *args], cwd=ROOT, env=hub.env | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}, capture_output=True, text=True)
        assert p.returncode == 0, p.stdout + p.stderr
        assert TOKEN not in p.stdout + p.stderr
        return p.stdout
    text = process('upload.py', f'--ckpt={tmp_path}/ft-merged', '--repo=you/name', '--languages=en', '--license=apache-2.0')
    assert f'published {hub.url}/you/name/commit/' in text and 'weights float32 -> bfloat16' in text
    assert hub.repos['you/name']['private']
    names = ['README.md', 'config.json', 'gepard_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json', 'training_metadata.json']
    assert sorted(hub.repos['you/name']['files']) == names

    got = str(tmp_path / 'got')
    process('-c', f'from huggingface_hub import snapshot_download as s; s("you/name", local_dir={got!r})')
    assert sorted(n for n in os.listdir(got) if n != '.cache') == names
    was, now = load_file(f'{tmp_path}/ft-merged/model.safetensors'), load_file(f'{got}/model.safetensors')
    assert was.keys() == now.keys() and all(torch.equal(was[k].bfloat16(), now[k]) for k in was)
    assert M.read_json(f'{got}/config.json')['dtype'] == M.read_json(f'{got}/gepard_config.json')['model_dtype'] == 'bfloat16'
    assert list(M.read_json(f'{got}/gepard_config.json')['audio_heads']) == [f'level_audio_{i}' for i in range(32)]
    again = M.load_checkpoint(got)[0]
    assert again.cfg.text_repetition == REPETITION
    batch = M.pack(random_rows(model.cfg, [5, 1, 9]), model.cfg)
    assert spread(logits(again, batch), logits(model, batch)) < 2e-2

    # the card
    readme = open(f'{got}/README.md', encoding='utf-8').read()
    front = yaml.safe_load(readme.split('---')[1])
    assert front == {'language': ['en'], 'license': 'apache-2.0', 'pipeline_tag': 'text-to-speech', 'tags': ['gepard', 'nanogepard'],
                     'base_model': 'nineninesix/qwen3_5-full-attn-only-14', 'base_model_relation': 'finetune'}
    for words in ('| pretrain | 10 | 3.95 h, 12,800 clips | learning_rate 0.0009; batch_size 64 |', '| finetune | 30 |  | LoRA rank 4, alpha 8 on q_proj, v_proj; learning_rate 0.0002 |',
                  '| finetune | WER before | 0.25 |', 'python sample.py --ckpt=you/name', 'assets/tiny/codec.nemo', 'below 9 tokens'):
        assert words in readme, words
    sent = readme + open(f'{got}/training_metadata.json', encoding='utf-8').read()
    assert str(tmp_path) not in sent and 'wandb' not in sent and 'data/tiny' not in sent and 'either/or this and/or that' in sent

    wav = str(tmp_path / 'a.wav')
    monkeypatch.chdir(ROOT)         # where the small codec is
    text = run(capsys, 'sample.py', '--ckpt=you/name', '--text=four two', f'--out={wav}', '--max_seconds=1', '--device=cpu')     # here: NeMo takes 10 s to import
    assert 'RTF' in text and os.path.getsize(wav) > 1024 and os.path.isdir(tmp_path / 'hf' / 'hub' / 'models--you--name')


def upload(capsys, folder, *flags, **kw):
    text = run(capsys, 'upload.py', f'--ckpt={folder}', *(('--repo=you/name',) if not any(f.startswith('--repo') for f in flags) else ()), *flags, **kw)
    assert TOKEN not in text
    return text


def test_goes_on_after_a_break(hub, folder, capsys):
    hub.broken = {'/commit/': 503}
    text = upload(capsys, folder, code=2)
    assert 'run it again to go on' in text and text.count('\n') == 1
    assert hub.repos['you/name']['files'] == {}                     # nothing is seen of half an upload
    assert sum(c.startswith('PUT') for c in hub.calls) == 1
    upload(capsys, folder)
    assert sum(c.startswith('PUT') for c in hub.calls) == 1 and len(hub.repos['you/name']['files']) == 7      # the weights had arrived
    assert 'POST /you/name/verify' in hub.calls
    commits = lambda: sum('/commit/' in c for c in hub.calls)
    before = commits()
    assert 'published' in upload(capsys, folder) and commits() == before          # the same once more: nothing to do
    meta = M.read_json(f'{folder}/training_metadata.json')
    M.write_json(f'{folder}/training_metadata.json', meta | {'step': 11})
    hub.repos['you/name']['files']['notes.txt'] = b'mine'
    assert 'left as they were: notes.txt' in upload(capsys, folder) and hub.repos['you/name']['files']['notes.txt'] == b'mine'
    assert json.loads(hub.repos['you/name']['files']['training_metadata.json'])['step'] == 11


def test_token_is_never_printed(hub, folder, capsys, monkeypatch):
    for part, status in (('/repos/create', 400), ('/preupload/', 403), ('/lfs/', 400), ('/commit/', 403)):
        hub.broken = {part: status}
        text = upload(capsys, folder, code=2)
        assert text.count('\n') == 1 and 'upload.py: you/name: ' in text and not hub.broken, text
    monkeypatch.setenv('HF_TOKEN', 'hf_' + 'wrong' * 6)
    text = upload(capsys, folder, code=2)
    assert '401' in text and 'wrong' not in text
    monkeypatch.delenv('HF_TOKEN')
    monkeypatch.setattr('huggingface_hub.constants.HF_TOKEN_PATH', f'{folder}/none')
    monkeypatch.setattr('huggingface_hub.constants.HF_STORED_TOKENS_PATH', f'{folder}/none')
    assert 'no access token' in upload(capsys, folder, code=2)


def test_private_and_public(hub, folder, capsys):
    upload(capsys, folder)
    assert 'exists and is private' in upload(capsys, folder, '--public', code=2)
    upload(capsys, folder, '--public', '--repo=you/open')
    assert hub.repos['you/name']['private'] and not hub.repos['you/open']['private']
    files = dict(hub.repos['you/open']['files'])
    save(f'{folder}-2', seed=1)
    assert 'exists and is public' in upload(capsys, f'{folder}-2', '--repo=you/open', code=2)
    assert hub.repos['you/open']['files'] == files
    assert 'rights' in upload(capsys, folder, '--repo=them/name', code=2)


def test_dry_run_and_dtypes(hub, folder, capsys):
    text = upload(capsys, folder, '--dry_run')
    assert hub.calls == [] and 'nothing was sent' in text and 'pipeline_tag: text-to-speech' in text and '- en' in text
    for flag, want in (('keep', 'float32'), ('float16', 'float16'), ('auto', 'bfloat16')):
        upload(capsys, folder, f'--dtype={flag}', f'--repo=you/{flag}')
        files = hub.repos[f'you/{flag}']['files']
        assert json.loads(files['gepard_config.json'])['model_dtype'] == json.loads(files['config.json'])['dtype'] == want
        kept = f'{folder}-{flag}.safetensors'
        open(kept, 'wb').write(files['model.safetensors'])
        assert {t.dtype for t in load_file(kept).values()} == {getattr(torch, want)}
    assert torch.equal(load_file(f'{folder}-keep.safetensors')['stop_head.weight'], load_file(f'{folder}/model.safetensors')['stop_head.weight'])


def test_training_state(hub, folder, capsys):
    """A resume snapshot: weights and optimizer byte for byte."""
    assert 'no resume.pt' in upload(capsys, folder, '--training_state', code=2)
    torch.save({'step': 10, 'optimizer': {}}, f'{folder}/resume.pt')
    upload(capsys, folder, '--repo=you/plain')
    assert 'resume.pt' not in hub.repos['you/plain']['files']
    upload(capsys, folder, '--training_state')
    files = hub.repos['you/name']['files']
    os.makedirs(folder / 'resume')                  # as pretrain.py writes it
    (folder / 'resume' / 'shard-00001-model-00001-of-00001.safetensors').write_bytes(b'moments')
    (folder / 'resume.json').write_text('{"step": 10}')
    upload(capsys, folder, '--training_state')
    files = hub.repos['you/name']['files']
    for name in ('model.safetensors', 'resume.pt', 'resume.json', 'resume/shard-00001-model-00001-of-00001.safetensors', 'config.json', 'gepard_config.json'):
        assert files[name] == (folder / name).read_bytes(), name
    assert str(folder).encode() not in files['training_metadata.json']
    for flags, path, want in (['--training_state'], 'data/mine', 'data/mine'), (['--training_state'], '../mine', '../mine'), ([], 'data/mine', 'mine'), ([], '../mine', 'mine'):      # a run that goes on compares it
        metadata = M.read_json(f'{folder}/training_metadata.json')
        M.write_json(f'{folder}/training_metadata.json', metadata | {'config': {'data': path}})
        upload(capsys, folder, *flags)
        assert json.loads(hub.repos['you/name']['files']['training_metadata.json'])['config']['data'] == want
    assert 'leave out --dtype' in upload(capsys, folder, '--training_state', '--dtype=bfloat16', code=2)
    state = load_file(f'{folder}/model.safetensors')
    save_file({k: t.bfloat16() for k, t in state.items()}, f'{folder}/model.safetensors')
    assert 'needs the float32 weights' in upload(capsys, folder, '--training_state', code=2)


def test_only_the_allow_list(hub, folder, capsys):
    for name in ('resume.pt', 'optimizer.pt', '.env', 'wandb', 'metrics.jsonl', 'adapter_config.json.bak', 'notes.md', 'README.md'):
        (folder / name).write_text('secret')
    os.makedirs(folder / 'wandb-run')
    (folder / 'wandb-run' / 'log.json').write_text('{}')
    upload(capsys, folder)
    files = hub.repos['you/name']['files']
    assert len(files) == 7 and b'secret' not in files['README.md']


def test_published_checkpoint_again(hub, tmp_path, capsys):
    """The published layout, scalars without a dimension as older files have them: same names, [1] scalars, heads in order."""
    old = str(tmp_path / 'old')
    os.mkdir(old)
    for name in os.listdir(GOLDEN):
        shutil.copyfile(os.path.join(GOLDEN, name), os.path.join(old, name))
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        shutil.copyfile(os.path.join(ROOT, 'tests', 'data', 'byte_tokenizer', name), os.path.join(old, name))
    M.write_json(f'{old}/training_metadata.json', {'stage': 'pretrain', 'step': 1, 'parent': 'scratch'})
    new = load_file(f'{old}/model.safetensors')
    save_file({k: t.reshape(()) if t.numel() == 1 and 'scale' in k else t for k, t in new.items()}, f'{old}/model.safetensors')
    M.load_checkpoint(old)
    upload(capsys, old, '--dtype=keep')
    files = hub.repos['you/name']['files']
    open(tmp_path / 'new.safetensors', 'wb').write(files['model.safetensors'])
    got = load_file(str(tmp_path / 'new.safetensors'))
    assert got.keys() == new.keys() and all(torch.equal(got[k], new[k]) and got[k].shape == new[k].shape for k in new)
    theirs, ours = M.read_json(f'{GOLDEN}/gepard_config.json'), json.loads(files['gepard_config.json'])
    assert ours == theirs and list(ours['audio_heads']) == list(theirs['audio_heads'])
    assert 'base_model' not in files['README.md'].decode()
    # a module that the config has switched off since, its tensors still in the file
    config = M.read_json(f'{old}/gepard_config.json')
    config['voice_cloning']['training']['supcon']['use_projection'] = False
    M.write_json(f'{old}/gepard_config.json', config)
    M.load_checkpoint(old)
    upload(capsys, old, '--repo=you/less')
    open(tmp_path / 'less.safetensors', 'wb').write(hub.repos['you/less']['files']['model.safetensors'])
    assert set(new) - set(load_file(str(tmp_path / 'less.safetensors'))) == {k for k in new if k.startswith('supcon_head.')}


def test_refusals(hub, folder, capsys, tmp_path):
    def refused(words, *flags, change=None, file=None, weights=None, where=None):
        bad = str(tmp_path / 'bad')
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(folder, bad)
        if change:
            j = M.read_json(f'{bad}/{file}')
            change(j)
            M.write_json(f'{bad}/{file}', j)
        elif file:
            os.remove(f'{bad}/{file}')
        if weights:
            save_file(weights(load_file(f'{bad}/model.safetensors')), f'{bad}/model.safetensors')
        text = upload(capsys, where or bad, *flags, code=2)
        assert text.startswith('upload.py: ') and text.count('\n') == 1 and words in text, text

    for flag in ('--repo=', '--repo=name', '--repo=a/b/c', '--repo=/b'):
        refused('--repo is you/name', flag)
    refused('--dtype is auto', '--dtype=int8')
    refused('no such folder', where=f'{tmp_path}/nowhere')
    for name in ('model.safetensors', 'config.json', 'gepard_config.json', 'tokenizer.json', 'training_metadata.json'):
        refused(f'no {name}', file=name)
    for value in (float('nan'), float('inf')):
        refused('stop_head.weight is not finite', weights=lambda s: s | {'stop_head.weight': s['stop_head.weight'] + value})
    refused('stop_head.weight is not finite in float16', '--dtype=float16', weights=lambda s: s | {'stop_head.weight': s['stop_head.weight'] + 1e5})
    q = 'model.layers.0.self_attn.q_proj'
    refused(f'adapters inside ({q}.lora_A)', weights=lambda s: s | {f'{q}.lora_A': torch.zeros(4, 32)})
    refused('adapters inside', weights=lambda s: {k.replace('q_proj.', 'q_proj.base.'): t for k, t in s.items()})
    refused(f'missing {q}.weight', weights=lambda s: {k: t for k, t in s.items() if k != f'{q}.weight'})
    refused("missing 'codebook_heads.7.bias'", weights=lambda s: {k: t for k, t in s.items() if k != 'codebook_heads.7.bias'})
    refused('unexpected lm_head.weight', weights=lambda s: s | {'lm_head.weight': torch.zeros(1)})
    refused(f'{q}.weight is [64, 31]', weights=lambda s: s | {f'{q}.weight': s[f'{q}.weight'][:, 1:].contiguous()})
    shutil.copytree(folder, tmp_path / 'adapter')
    os.rename(tmp_path / 'adapter' / 'model.safetensors', tmp_path / 'adapter' / 'adapter.safetensors')
    refused('adapter: these are adapters: merge.py makes a checkpoint of them', where=f'{tmp_path}/adapter')
    shutil.copytree(tmp_path / 'adapter', tmp_path / 'run' / 'checkpoint-3')
    refused('run/checkpoint-3: these are adapters: merge.py', where=f'{tmp_path}/run')
    shutil.copytree(folder, tmp_path / 'checkpoint-3.tmp')
    refused('checkpoint-3.tmp: a save that was not finished', where=f'{tmp_path}/checkpoint-3.tmp/')
    for name, words in (('model.safetensors', 'cannot be read as safetensors'), ('tokenizer.json', 'tokenizer.json: '), ('config.json', 'not JSON')):
        cut = tmp_path / f'cut-{name}'
        shutil.copytree(folder, cut)
        os.truncate(cut / name, 100)
        refused(words, where=cut)
    # the rotary factor: flat and nested, in both files
    refused('config.json: partial_rotary_factor None flat', file='config.json', change=lambda j: j.pop('partial_rotary_factor'))
    refused('None in rope_parameters', file='config.json', change=lambda j: j['rope_parameters'].pop('partial_rotary_factor'))
    refused('0.25 in rope_parameters', file='config.json', change=lambda j: j['rope_parameters'].update(partial_rotary_factor=0.25))
    refused('gepard_config.json, backbone_config: partial_rotary_factor None flat', file='gepard_config.json', change=lambda j: j['backbone_config'].pop('partial_rotary_factor'))
    refused('config.json: partial_rotary_factor 0.25 flat', file='config.json', change=lambda j: (j.update(partial_rotary_factor=0.25), j['rope_parameters'].update(partial_rotary_factor=0.25)))
    refused('linear_attention', file='config.json', change=lambda j: j.update(layer_types=['linear_attention', 'full_attention']))
    refused('audio_heads are out of order', file='gepard_config.json', change=lambda j: j.update(audio_heads=dict(reversed(j['audio_heads'].items()))))
    refused('special tokens go up to 999', file='gepard_config.json', change=lambda j: j['special_tokens'].update(tts_pad=999))
    # what must not leave the machine
    refused('tokenizer_config.json would publish a path', file='tokenizer_config.json', change=lambda j: j.update(name_or_path='/some/where/tokenizer'))
    refused('gepard_config.json would publish a path', file='gepard_config.json', change=lambda j: j['codec'].update(codec_id='/some/where/codec.nemo'))
    refused('training_metadata.json would publish a path', file='training_metadata.json', change=lambda j: j.update(note=f'made in {ROOT} today'))
    refused('training_metadata.json would publish an access token', file='training_metadata.json', change=lambda j: j.update(note=f'used {TOKEN}'))
    assert hub.calls == []          # all this before the network


def test_paths_are_cut(hub, folder, capsys):
    j = M.read_json(f'{folder}/training_metadata.json') | {'paths': {
        'a': '/x/y/speech.csv', 'b': '~/clips/', 'c': './wavs/a', 'd': 'C:\\Users\\me\\speech.csv', 'e': 'out/base', 'f': 'data/tiny', 'g': 'sets/own/part1', 'h': '../up'},
        'kept': ['user/model', 'https://example.org/a/b', 'and/or', 'q_proj', 'I said this/that and so on'], 'hub_token': 'x', 'wandb_entity': 'me'}
    M.write_json(f'{folder}/training_metadata.json', j)
    upload(capsys, folder)
    sent = json.loads(hub.repos['you/name']['files']['training_metadata.json'])
    assert sent['paths'] == {'a': 'speech.csv', 'b': 'clips', 'c': 'a', 'd': 'speech.csv', 'e': 'base', 'f': 'tiny', 'g': 'part1', 'h': 'up'}
    assert sent['kept'] == j['kept'] and 'hub_token' not in sent and 'wandb_entity' not in sent and 'wandb_project' not in sent['config']


def test_a_folder_that_looks_like_a_hub_name(hub, folder, capsys, tmp_path, monkeypatch):
    """The parent's kind is the stage's own word, not what lies on this disk today; without it, as older files are, it is guessed."""
    os.makedirs(tmp_path / 'models' / 'here')
    monkeypatch.chdir(tmp_path)
    for parent, kind, base in (('models/gone', 'folder', None), ('models/here', 'hub', 'models/here'), ('models/gone', None, 'models/gone'), ('models/here', None, None)):
        stage = {'stage': 'finetune', 'step': 3, 'parent': parent, 'config': {'ckpt': parent}} | ({'parent_kind': kind} if kind else {})
        M.write_json(f'{folder}/training_metadata.json', stage)
        upload(capsys, folder)
        files = hub.repos['you/name']['files']
        sent = json.loads(files['training_metadata.json'])
        assert yaml.safe_load(files['README.md'].decode().split('---')[1]).get('base_model') == base, (parent, kind)
        assert sent['parent'] == sent['config']['ckpt'] == (base or parent.split('/')[1])


def test_the_written_contract():
    """docs/checkpoint.md's table against the published checkpoint: every key, every shape."""
    text = open(os.path.join(ROOT, 'docs', 'checkpoint.md'), encoding='utf-8').read()
    real = {k: list(t.shape) for k, t in load_file(f'{GOLDEN}/model.safetensors').items()}
    cfg = M.load_checkpoint(GOLDEN)[0].cfg
    sizes = dict(d=cfg.hidden_size, V=cfg.vocab_size, h=cfg.num_attention_heads, k=cfg.num_key_value_heads, c=cfg.head_dim, m=cfg.intermediate_size, e=cfg.audio_embed_dim,
                 n=32, Q=cfg.num_queries, f=cfg.prefix_ffn, s=cfg.supcon_hidden, t=cfg.supcon_dim)
    seen = set()
    for key, shape in re.findall(r'^\| `([\w.{},]+)` \| `([\w*, ]+)` \|', text.split('\n## ')[1], re.M):
        pattern = key.replace('.', r'\.').replace('{i}', r'(?P<i>\d+)')
        pattern = re.sub(r'\{(.+?)\}', lambda m: f"({m[1].replace(',', '|')})", pattern)
        found = [m for k in real if (m := re.fullmatch(pattern, k))]
        assert found, key
        for m in found:
            L = cfg.levels[int(m['i'])] if 'L' in shape else None
            assert list(eval(f'({shape},)', sizes | {'L': L})) == real[m[0]], m[0]
            seen.add(m[0])
    assert seen == set(real)
