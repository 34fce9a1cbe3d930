"""Override a script's plain globals from files and flags. In a script, below its config block:

    from configurator import configure
    config = configure(globals())      # the dict of resolved values, to be stored with every output

    python pretrain.py config/pretrain.py config/no_vc.py --learning_rate=3e-4 --batch-size 8 --compile

Files first, in their order, then flags; the later one wins. After nanoGPT's configurator, but strict: an unknown name is
an error in a file as in a flag, and a value must be of its default's type. Every error is one line, exit code 2.
A config file is Python: it sees the values so far, and may import modules, define functions and `_helpers`.
"""
import ast, copy, difflib, os, sys, textwrap, traceback, types

WORDS = {'true': True, 'True': True, '1': True, 'false': False, 'False': False, '0': False}
INF = float('inf')
PLAIN = (int, float, str, type(None), tuple, list, dict)        # bool is an int

def literal(text):
    """'3', '(1, 2)', "{'a': 1}", 'true', 'none' -> the value; what is no literal stays a string."""
    try:
        return ast.literal_eval(text.title() if text in ('true', 'false', 'none') else text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text

def coerce(value, default, text=False):
    """value in the type of default, or ValueError. text: value is a flag's string and is to be read."""
    if isinstance(default, str) and isinstance(value, str):     # before any literal: --name=007 stays '007'
        return value
    if isinstance(default, bool) and str(value) in WORDS:       # before int: a bool is an int in Python
        return WORDS[str(value)]
    if isinstance(default, (tuple, list)):
        item = default[0] if default and len({type(x) for x in default}) == 1 else None     # the elements' type, if they have one
        bare = text and not value.startswith(('(', '['))        # --levels=8,7,6  --langs=en,es ; --langs= is empty
        parts = ([x.strip() for x in value.split(',')] if value else []) if bare else literal(value) if text else value
        if isinstance(parts, (tuple, list)):
            return type(default)(coerce(x, item, bare) for x in parts)
    if type(default) in (int, float):
        number = value if not text else float(value) if isinstance(default, float) else literal(value)
        endless = abs(number) == INF != abs(default) if type(number) in (int, float) else True
        if not endless and type(default)(number) == number:     # 1e3 is an int, 1.5 and nan are not
            return type(default)(number)
    value = literal(value) if text else value
    if default is None and isinstance(value, PLAIN) or isinstance(default, dict) and isinstance(value, dict):
        return value                                            # None tells no type: anything plain goes
    raise ValueError

def configure(g, argv=None):
    """Apply argv (default sys.argv[1:]) onto g, a script's globals(); print the result once (rank 0) and return it as a dict."""
    argv, script = sys.argv[1:] if argv is None else argv, g['__file__']
    default = {k: v for k, v in g.items()                       # LONG_CAPITALS are constants, not config (P and K are config)
               if isinstance(v, PLAIN) and k[0] != '_' and not (k.isupper() and len(k) > 1)}
    config, origin = copy.deepcopy(default), {}
    say = print if os.environ.get('RANK', '0') == '0' else lambda *a: None

    def fail(message):
        print(os.path.basename(script) + ': ' + ' '.join(message.split()), file=sys.stderr)
        sys.exit(2)

    def known(key, value, where, dash=''):
        if key not in default:
            near = difflib.get_close_matches(key, default, 1, 0.5)
            fail(f'{where}: unknown key {dash}{key}, got {value!r}' + ''.join(f'; did you mean {dash}{k} (default {default[k]!r})?' for k in near)
                 + ('' if dash else ' (a helper\'s name starts with _)'))

    def put(key, value, where, dash='', text=False):
        known(key, value, where, dash)
        try:
            value = coerce(value, default[key], text)
        except (ValueError, OverflowError):
            kind = 'true or false' if isinstance(default[key], bool) else type(default[key]).__name__
            fail(f'{where}: {dash}{key} takes {kind} (default {default[key]!r}), got {value!r}')
        if repr(value) != repr(config[key]):
            config[key], origin[key] = value, where

    if '--help' in argv:                                        # the config block is the documentation: print it as it stands
        source, below = open(script, encoding='utf-8').read(), sys._getframe(1).f_lineno
        keys = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Assign) and n.lineno < below and getattr(n.targets[0], 'id', '') in default]
        block = source.splitlines()[min(n.lineno for n in keys) - 1:max(n.end_lineno for n in keys)]
        say((g['__doc__'] or '').strip() + '\n\n' + textwrap.dedent('\n'.join(block)))
        sys.exit(0)

    files, flags, rest = [], [], list(argv)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith('--'):
            files.append(arg)
            continue
        key, eq, value = arg[2:].partition('=')                 # the first '=' splits: a value may hold more of them
        key = key.replace('-', '_')
        if not eq and (not rest or rest[0].startswith('--')):
            known(key, None, 'flag', '--')
        if not eq and isinstance(default.get(key), bool) and (not rest or rest[0] not in WORDS):
            if rest and not rest[0].startswith('--') and not rest[0].endswith('.py') and not os.path.exists(rest[0]):
                fail(f'flag: --{key} takes true or false (default {default[key]!r}), got {rest[0]!r}')
            value = 'true'                                      # --compile alone is --compile=true
        elif not eq and (not rest or rest[0].startswith('--')):
            fail(f'flag: --{key} takes a value (default {default[key]!r}), got none')
        elif not eq:
            value = rest.pop(0)
        flags.append((key, value))

    for name in files:
        beside = os.path.join(os.path.dirname(os.path.abspath(script)), name)               # the script started from elsewhere
        path = name if os.path.exists(name) or not os.path.exists(beside) else beside
        space = {**copy.deepcopy(config), '__file__': os.path.abspath(path), '__name__': 'config'}
        try:
            tree = ast.parse(open(path, 'rb').read().decode('utf-8-sig'), path)
            exec(compile(tree, path, 'exec'), space)
        except (Exception, SystemExit) as e:
            lines = [t.lineno for t in traceback.extract_tb(e.__traceback__) if t.filename == path]
            if isinstance(e, UnicodeDecodeError): lines = [e.object[:e.start].count(b'\n') + 1]
            if isinstance(e, SyntaxError) and e.filename == path: lines = [e.lineno]
            where = ':'.join([path, *(str(n) for n in lines[:1] if n)])                     # no line: the file is a folder, say
            fail(f'{path}: no such config file (a flag is --key=value)' if not os.path.exists(path) else f'{where}: {type(e).__name__}: {e}')
        names = [getattr(t, 'id', '') for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
        for key, value in space.items():
            if key in default or key[0] != '_' and not isinstance(value, types.ModuleType) and not callable(value):
                put(key, value, path)
            if key in default and names.count(key) > 1:
                say(f'{path}: {key} is set {names.count(key)} times, the last wins: {config[key]!r}')
    for n, (key, value) in enumerate(flags):
        put(key, value, 'flag', '--', text=True)
        if key in dict(flags[:n]):
            say(f'--{key} is given more than once, the last wins: {config[key]!r}')

    g.update(config)
    say(f'config of {os.path.basename(script)}:')
    for key, value in config.items():
        say(f'  {key} = {value!r}' + (f'  # {origin[key]}, default {default[key]!r}' if key in origin else ''))
    return config
