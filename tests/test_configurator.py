"""python -m pytest tests/test_configurator.py -- the whole behaviour of configurator.py, a row a case."""
import os, subprocess, sys
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = '''"""A script. Launch: python script.py"""
import sys
sys.path.insert(0, {root!r})
# -----
batch_size = 64           # rows; 0 = none
lr = 9e-4                 # peak
compile = False           # off on CPU
name = 'run'              # a string
seed_from = None          # None = none
levels = (8, 7, 6, 6)     # a tuple
langs = ['en']            # a list of strings
betas = (0.9, 0.999)
extra = {{'a': 1}}
eq = 'x'
top = float('inf')        # no limit
P = 4
CONSTANT = 3              # not config
_hidden = 1
# -----
from configurator import configure
config = configure(globals())
derived = batch_size * 2
assert 'torch' not in sys.modules
assert derived == 2 * config['batch_size'] and 'CONSTANT' not in config and '_hidden' not in config
print('RESULT', repr(config))
'''
FILES = {
    'good.py': b'batch_size = 8\nlr = 1\n',
    'second.py': b'batch_size = batch_size * 2\n',
    'helpers.py': b'import math, os.path as p\nfrom math import sqrt\n_n = 3\ndef twice(x): return 2 * x\nfor _i in range(3): _n += 1\nbatch_size = twice(_n)\nlangs.append("de")\n',
    'typo.py': b'batch_sise = 8\n',
    'type.py': b'batch_size = "8"\n',
    'half.py': b'batch_size = 1.5\n',
    'number.py': b'name = 7\n',
    'bool.py': b'compile = 1\nbatch_size = True\n',
    'double.py': b'batch_size = 8\nbatch_size = 9\n',
    'latin.py': '\n\nname = "\u00e9"\n'.encode('latin-1'),
    'inf.py': b'lr = float("inf")\n',
    'utf8.py': '\ufeffname = "\u00e9"\n'.encode(),
    'syntax.py': b'lr = 1\nlr = = 2\n',
    'raises.py': b'lr = 1\nlr = 1 / 0\n',
    'array.py': b'import sys\nseed_from = sys\n',
}
# command line, then what must differ from the defaults, or the parts of the one error line
TABLE = [
    ('', {}),
    ('--lr=1', {'lr': 1.0}),                                    # int widens to float
    ('--lr 3e-4 --lr=1e300', {'lr': 1e300}), ('--top=5', {'top': 5.0}), ('--top=-inf', {'top': float('-inf')}),
    ('--batch_size=1e3', {'batch_size': 1000}),                 # a whole float is an int
    ('--batch-size=3', {'batch_size': 3}),
    ('--batch_size 3', {'batch_size': 3}),
    ('--batch-size -3', {'batch_size': -3}),
    ('--batch_size=123456789012345678901', {'batch_size': 123456789012345678901}),
    ('--P=2', {'P': 2}),
    ('--compile=true', {'compile': True}), ('--compile=True', {'compile': True}), ('--compile=1', {'compile': True}),
    ('--compile 1 --compile=0', {'compile': False}), ('--compile=false', {'compile': False}), ('--compile=False', {'compile': False}),
    ('--compile', {'compile': True}), ('--compile good.py', {'compile': True, 'batch_size': 8, 'lr': 1.0}),
    ('--seed-from=out/x', {'seed_from': 'out/x'}), ('--seed_from=3', {'seed_from': 3}), ('--seed_from=true', {'seed_from': True}),
    ('--seed_from=none', {'seed_from': None}),
    ('--eq=a=b', {'eq': 'a=b'}), ('--eq=', {'eq': ''}),
    ('--name=007', {'name': '007'}), ('--name=1e3', {'name': '1e3'}), ('--name=true', {'name': 'true'}),
    ('--levels=1,2', {'levels': (1, 2)}), ('--levels=(1,2)', {'levels': (1, 2)}), ('--levels=[3]', {'levels': (3,)}),
    ('--levels=5', {'levels': (5,)}),
    ('--langs=en,es', {'langs': ['en', 'es']}), ('--langs=1,2', {'langs': ['1', '2']}), ('--langs=', {'langs': []}),
    ('--betas=0.9,1', {'betas': (0.9, 1.0)}),
    ("--extra={'b':(1,2)}", {'extra': {'b': (1, 2)}}),
    ('good.py', {'batch_size': 8, 'lr': 1.0}),
    ('good.py second.py', {'batch_size': 16, 'lr': 1.0}),
    ('--batch_size=5 good.py', {'batch_size': 5, 'lr': 1.0}),   # flags come after files wherever they stand
    ('helpers.py', {'batch_size': 12, 'langs': ['en', 'de']}),
    ('utf8.py', {'name': '\u00e9'}),
    ('double.py', {'batch_size': 9}, 'double.py: batch_size is set 2 times, the last wins: 9'),
    ('--lr=1 --lr=2', {'lr': 2.0}, '--lr is given more than once, the last wins: 2.0'),
    ('--batch_sise=3', 'unknown key --batch_sise', '--batch_size', '64', "'3'"),
    ('--zzzzzz=3', 'unknown key --zzzzzz', "'3'"),
    ('--CONSTANT=4', 'unknown key --CONSTANT'), ('--_hidden=4', 'unknown key'),
    ('typo.py', 'typo.py: unknown key batch_sise', 'batch_size', '64', '8', "a helper's name starts with _"),
    ('type.py', 'type.py: batch_size takes int (default 64)', "got '8'"),
    ('half.py', 'half.py: batch_size takes int (default 64)', 'got 1.5'),
    ('number.py', "number.py: name takes str (default 'run')", 'got 7'),
    ('bool.py', 'bool.py: batch_size takes int', 'got True'),
    ('--compil', 'unknown key --compil', 'did you mean --compile (default False)?'), ('--batch_sise --lr=1', 'did you mean --batch_size'),
    ('array.py', 'array.py: seed_from takes NoneType'),
    ('--batch_size=1.5', '--batch_size takes int (default 64)', "got '1.5'"),
    ('--batch_size=inf', '--batch_size takes int'), ('--batch_size=1e999', '--batch_size takes int'), ('--batch_size=true', '--batch_size takes int'),
    ('--lr=fast', '--lr takes float (default 0.0009)', "got 'fast'"), ('--lr=nan', '--lr takes float'), ('--lr=-inf', '--lr takes float'), ('--lr=1e999', '--lr takes float'), ('inf.py', 'inf.py: lr takes float'), ('--lr=', '--lr takes float'),
    ('--compile=yes', '--compile takes true or false (default False)', "got 'yes'"), ('--compile maybe', '--compile takes true or false (default False)', "got 'maybe'"),
    ('--levels=1,x', '--levels takes tuple', "got '1,x'"),
    ('--levels=(1,', '--levels takes tuple'), ('--extra=3', '--extra takes dict'),
    ('--lr', '--lr takes a value (default 0.0009), got none'), ('--lr --name=x', '--lr takes a value'),
    ('-lr=3', '-lr=3: no such config file (a flag is --key=value)'), ('lr=3', 'lr=3: no such config file'), ('absent.py', 'absent.py: no such config file'), ('.', '.: IsADirectoryError'),
    ('latin.py', 'latin.py:3: UnicodeDecodeError'), ('syntax.py', 'syntax.py:2: SyntaxError'), ('raises.py', 'raises.py:2: ZeroDivisionError'),
]

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp('script')
    (path / 'script.py').write_text(SCRIPT.format(root=ROOT))
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    (path / 'elsewhere').mkdir()
    return path

def run(folder, args, cwd='.', **env):
    p = subprocess.run([sys.executable, str(folder / 'script.py'), *args], cwd=folder / cwd, capture_output=True, encoding='utf-8',
                       env={**os.environ, 'PYTHONIOENCODING': 'utf-8', **env})
    last = p.stdout.splitlines()[-1] if p.stdout else ''
    return p, eval(last.removeprefix('RESULT '), {'inf': float('inf')}) if last.startswith('RESULT') else None

def test_table(folder, capsys):
    """In this process, for speed: the script's block as a dict of globals. The cases below start real processes."""
    from configurator import configure
    block = SCRIPT.split('# -----')[1]
    wrong, home = [], os.getcwd()
    os.chdir(folder)
    try:
        for line, want, *parts in TABLE:
            g = {'__file__': str(folder / 'script.py')}
            exec(block.replace('{{', '{').replace('}}', '}'), g)
            base = {k: v for k, v in g.items() if k[0] != '_' and k != 'CONSTANT'}
            code = 0
            try:
                got = configure(g, line.split())
            except SystemExit as e:
                code = e.code
            out, err = capsys.readouterr()
            if isinstance(want, dict):
                ok = code == 0 and repr(got) == repr({**base, **want}) and all(repr(g[k]) == repr(got[k]) for k in got) and all(p in out for p in parts)
            else:
                ok = code == 2 and err.count('\n') == 1 and all(p in err for p in [want, *parts])
            wrong += [] if ok else [(line, code, out[-300:], err)]
    finally:
        os.chdir(home)
    assert not wrong, '\n'.join(map(str, wrong))

def test_process(folder):
    p, config = run(folder, ['good.py', '--name=a b'])
    assert p.returncode == 0 and config['name'] == 'a b' and config['batch_size'] == 8 and config['lr'] == 1.0, p.stderr
    assert '  batch_size = 8  # good.py, default 64' in p.stdout and p.stdout.count('config of script.py:') == 1
    p, config = run(folder, ['good.py'], RANK='1')
    assert config['batch_size'] == 8 and 'config of' not in p.stdout                # printed once, on rank 0
    p, config = run(folder, ['good.py'], cwd='elsewhere')
    assert config['batch_size'] == 8, p.stderr                                      # found beside the script
    p, config = run(folder, ['--lr=fast'])
    assert p.returncode == 2 and p.stdout == '' and 'Traceback' not in p.stderr and p.stderr.count('\n') == 1

def test_help(folder):
    p, _ = run(folder, ['typo.py', '--help'])
    assert p.returncode == 0 and p.stderr == ''
    assert p.stdout.startswith('A script. Launch: python script.py\n\nbatch_size = 64           # rows; 0 = none\n')
    assert 'configure' not in p.stdout and 'derived' not in p.stdout and "extra = {'a': 1}" in p.stdout
