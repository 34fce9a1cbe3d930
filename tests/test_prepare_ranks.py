"""pytest tests/test_prepare_ranks.py          prepare.py under torchrun, and killed at random moments; a fake codec, half a minute on one core"""
import os, random, shutil, signal, socket, subprocess, sys, time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prepare import Corpus
from test_prepare import FAKE, ROOT, TOKENIZER, fake, files, prepare, script_with_fake_codec, speech, write      # noqa: F401
from test_prepare_arrow import tokens

@pytest.fixture
def mixed(tmp_path):
    """An audio table and a tokenized source, a folder with the script and the fake codec, and the corpus's files of one plain run."""
    audio = speech(tmp_path / 'in', n=30)
    pq.write_table(pa.table(tokens(100)[0]), tmp_path / 'tokens.parquet', row_group_size=9)
    os.remove(tmp_path / 'in/3.wav')
    script_with_fake_codec(tmp_path / 'bin')
    return audio, {'name': 't', 'path': str(tmp_path / 'tokens.parquet')}

def command(tmp_path, sources, *flags):
    return [str(tmp_path / 'bin/prepare.py'), f'--out_dir={tmp_path}/out', f'--sources={sources!r}', '--codec=fake', '--device=cpu', f'--tokenizer={TOKENIZER}', '--special_tokens={}',
            '--val_share=0.2', '--picture=False', '--check_rows=0', *flags]

def test_ranks_share_the_work(tmp_path, fake, mixed):
    """Two ranks give the bytes of one, and each unit is encoded by one of them; a rank that dies takes the run along, and the next one goes on.
    Then there is nothing to do, for all."""
    one = files(prepare(tmp_path / 'one', mixed, '--val_share=0.2').path)
    argv = command(tmp_path, mixed, '--unit_rows=2', '--num_workers=1')
    env = {**os.environ, 'OMP_NUM_THREADS': '1'}
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', *argv]
    assert subprocess.run(torchrun, env={**env, 'KILL_AT': '2'}, capture_output=True, timeout=120).returncode and not os.path.exists(tmp_path / 'out')
    done = len([f for f in os.listdir(tmp_path / 'out.building') if f.endswith('.npz')])
    assert 1 <= done < 19
    audio = 15 - len([f for f in os.listdir(tmp_path / 'out.building') if f.endswith('.npz') and int(f[-10:-4]) < 15])      # units that wait for the codec
    log = 'NanoCodec.calls += 1; __import__("time").sleep(0.3); open(os.environ["OUT"] + os.environ["RANK"], "a").write("x")'
    write(tmp_path / 'bin/codec.py', FAKE.replace('NanoCodec.calls += 1', log))
    env['OUT'] = str(tmp_path / 'encoded')
    def run():                          # what torchrun starts, without torchrun: one import of torch less
        with socket.create_server(('127.0.0.1', 0)) as s:
            port = str(s.getsockname()[1])
        ranks = [subprocess.Popen([sys.executable, *argv], env={**env, 'WORLD_SIZE': '2', 'RANK': str(r), 'LOCAL_RANK': str(r), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port},
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in range(2)]
        said = [r.communicate(timeout=120) for r in ranks]
        assert not any(r.returncode for r in ranks), said
        return said[0][0], said[1][0]
    said, other = run()
    assert f'19 units of 2 rows, {done} of them done before' in said and not other
    assert files(tmp_path / 'out') == one
    by = [len((tmp_path / f'encoded{rank}').read_text()) for rank in range(2)]
    assert min(by) >= 2 and sum(by) == audio, by        # none waits for the other, none does the other's
    said, other = run()
    assert 'nothing to do' in said and not other

def test_all_ranks_read_one_commit(tmp_path):
    """A Hub dataset gets a commit while the ranks start: rank 1 finds it, and opens the one of rank 0 still. Here a commit is a folder."""
    pytest.importorskip('datasets')
    os.mkdir(tmp_path / '0')
    pq.write_table(pa.table(tokens(60)[0]), tmp_path / '0/train-0.parquet')
    start = ('import datasets, huggingface_hub, os, runpy, sys; from types import SimpleNamespace as N; load, rank = datasets.load_dataset, os.environ["RANK"]\n'
             'huggingface_hub.HfApi = lambda: N(dataset_info=lambda name: N(sha=rank))\n'
             f'datasets.load_dataset = lambda name, *a, revision=None, **k: print("opened", revision, file=sys.stderr) or load(f"{tmp_path}/{{revision or 0}}", *a, **k)\n'
             'sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name="__main__")')
    argv = [f'{ROOT}/prepare.py', f'--out_dir={tmp_path}/out', f"--sources={({'name': 'a', 'path': 'someone/speech', 'kind': 'hf', 'streaming': True},)!r}", f'--tokenizer={TOKENIZER}',
            '--special_tokens={}', '--picture=False', '--check_rows=0', '--unit_rows=1']
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = str(s.getsockname()[1])
    ranks = [subprocess.Popen([sys.executable, '-c', start, *argv], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1',
                              'WORLD_SIZE': '2', 'RANK': str(r), 'LOCAL_RANK': str(r), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}) for r in range(2)]
    said = [r.communicate(timeout=120)[1] for r in ranks]
    assert not any(r.returncode for r in ranks), said
    assert 'opened 0\n' in said[0] and 'opened 0\n' in said[1] and len(Corpus(f'{tmp_path}/out')) == 60

def test_killed_at_random_moments(tmp_path, fake, mixed):
    """Twenty times, anywhere: while it starts, reads, encodes, joins or renames. Each run goes on; the end is an unbroken run's."""
    one = files(prepare(tmp_path / 'one', mixed, '--val_share=0.2').path)
    write(tmp_path / 'bin/codec.py', FAKE.replace('NanoCodec.calls += 1', 'NanoCodec.calls += 1; __import__("time").sleep(0.02)'))
    argv, rng, kills, ends = [sys.executable, *command(tmp_path, mixed, '--unit_rows=3')], random.Random(0), 0, 0
    begin = time.time()
    subprocess.run(argv, capture_output=True, check=True)
    whole = time.time() - begin
    while kills < 20:
        if os.path.exists(tmp_path / 'out'):
            assert files(tmp_path / 'out') == one           # whole, or not there
            shutil.rmtree(tmp_path / 'out')
            ends += 1
        run = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(whole * rng.uniform(0.3, 1.0))
        run.send_signal(signal.SIGKILL)
        said = run.communicate()[1].decode()
        assert run.returncode in (0, -signal.SIGKILL), said
        kills += run.returncode != 0
    subprocess.run(argv, capture_output=True, check=True)
    assert files(tmp_path / 'out') == one and ends > 1
