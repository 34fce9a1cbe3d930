"""pytest tests/test_codec.py: index arithmetic, and the NeMo codec by the tiny file (under a minute, a third of it NeMo's import)."""
import os, subprocess, sys, tarfile, types, wave
import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import codec
from codec import GROUPS, LEVELS, NanoCodec, check_codes, dequantize, fold, save_spectrogram, save_wav, unfold

TINY = os.path.join(ROOT, 'assets', 'tiny', 'codec.nemo')

@pytest.fixture(scope='module')
def nano():
    pytest.importorskip('nemo', reason='NeMo is not installed')
    return NanoCodec(TINY)

@pytest.fixture(scope='module')
def hifigan_file(nano, tmp_path_factory):
    """The tiny codec with a decoder of NanoCodec's class, narrow and of random weights."""
    from nemo.collections.tts.modules.audio_codec_modules import CausalHiFiGANDecoder
    def edit(config, weights):
        shape = dict(input_dim=32, up_sample_rates=[8, 8, 4, 2, 2], base_channels=64, activation='half_snake', output_activation='clamp')
        config['audio_decoder'] = {'_target_': f'{CausalHiFiGANDecoder.__module__}.CausalHiFiGANDecoder', **shape}
        for name in [name for name in weights if name.startswith('audio_decoder.')]: del weights[name]
        torch.manual_seed(0)
        weights.update({f'audio_decoder.{name}': w for name, w in CausalHiFiGANDecoder(**shape).state_dict().items()})
    path = str(tmp_path_factory.mktemp('codec') / 'hifigan.nemo')
    repack(TINY, path, edit)
    return path

@pytest.fixture(params=['tiny', 'hifigan'])
def file(request): return TINY if request.param == 'tiny' else request.getfixturevalue('hifigan_file')

def random_codes(rows, frames): return unfold(torch.randint(2016, (rows, frames, GROUPS), generator=torch.Generator().manual_seed(rows * frames)))

def clips(*lengths):
    rng = np.random.default_rng(0)
    out = []
    for n in lengths:                                                                # a voiced buzz that glides, and some noise
        pitch = np.cumsum(120 + 60 * np.sin(np.arange(n) / 5000)) / 22050
        out.append((0.3 * np.sign(np.sin(2 * np.pi * pitch)) * np.hanning(n + 2)[1:-1] + 0.02 * rng.standard_normal(n)).astype(np.float32))
    return out

def test_import_leaves_nemo_alone():
    subprocess.run([sys.executable, '-c', "import codec, sys; assert not any(m.split('.')[0] == 'nemo' for m in sys.modules)"], cwd=ROOT, check=True)

def test_fold_unfold_all():
    k = torch.arange(2016)
    packed = torch.stack([k.roll(i) for i in range(GROUPS)], -1)                     # every value in every group
    codes = unfold(packed)
    assert codes.shape == (2016, 32) and codes.dtype == torch.int64
    assert (fold(codes) == packed).all()
    assert codes[518, :4].tolist() == [518 % 8, 518 // 8 % 7, 518 // 56 % 6, 518 // 336]
    assert codes.amin(0).tolist() == [0] * 32 and codes.amax(0).tolist() == [n - 1 for n in LEVELS] * GROUPS
    assert (unfold(packed.to(torch.uint16)) == codes).all()                          # the corpus' type
    v = dequantize(codes)
    assert v.dtype == torch.float32 and v.amin() == -1
    assert v[:, :4].amax(0).tolist() == pytest.approx([3 / 4, 1, 2 / 3, 2 / 3])

def test_other_levels():
    packed = torch.arange(30).view(10, 3)
    assert (fold(unfold(packed, (5, 3, 2)), (5, 3, 2)) == packed).all()

def test_check_codes():
    good = np.zeros((5, 8), np.uint16)
    good[:] = 2015
    check_codes(good)
    check_codes(unfold(torch.from_numpy(good.astype(np.int64))))
    bad = good.copy()
    bad[3, 1] = 2016
    with pytest.raises(ValueError, match='code 2016 at frame 3, group 1: expected 0 to 2015'): check_codes(bad)
    bad = np.zeros((5, 32), np.int64)
    bad[4, 6] = -1
    with pytest.raises(ValueError, match='code -1 at frame 4, channel 6: expected 0 to 5'): check_codes(bad)
    with pytest.raises(ValueError, match='float'): check_codes(np.zeros((5, 8)))
    with pytest.raises(ValueError, match='7'): check_codes(np.zeros((5, 7), int))

def test_files(tmp_path):
    audio = np.array([0, 0.5, -1, 1.5, -1.5], np.float32)
    save_wav(tmp_path / 'a.wav', audio, 22050)
    with wave.open(str(tmp_path / 'a.wav')) as f:
        assert (f.getframerate(), f.getnchannels(), f.getsampwidth()) == (22050, 1, 2)
        assert np.frombuffer(f.readframes(9), '<i2').tolist() == [0, 16384, -32767, 32767, -32767]
    for a in (audio, np.zeros(0), np.random.default_rng(0).standard_normal(30000)):   # shorter than a window, nothing at all, ordinary
        save_spectrogram(tmp_path / 'a.png', a, 22050, 'costs $5')
        assert (tmp_path / 'a.png').read_bytes()[:4] == b'\x89PNG'

def test_attributes(nano):
    assert (nano.sample_rate, nano.hop, nano.levels, nano.groups, nano.id) == (22050, 1024, LEVELS, GROUPS, TINY)
    assert nano.frame_rate == 22050 / 1024

def test_dequantize_is_nemos(nano):
    packed = torch.stack([torch.arange(2016).roll(i) for i in range(GROUPS)])[None]  # [1, 8, 2016]
    theirs = nano.model.dequantize(tokens=packed, tokens_len=torch.tensor([2016]))
    assert torch.allclose(theirs, dequantize(unfold(packed.transpose(1, 2))).transpose(1, 2), atol=1e-6)

def test_equals_nemo(file):
    audio, = clips(30000)
    nano, nemo = NanoCodec(file), codec._load(file, 'cpu').eval()                    # the second as NeMo runs it
    with torch.inference_mode():
        tokens, n = nemo.encode(audio=torch.from_numpy(audio)[None], audio_len=torch.tensor([30000]))
        theirs, _ = nemo.decode(tokens=tokens, tokens_len=n)
    codes, = nano.encode([audio])
    assert codes.dtype == np.uint16 and codes.shape == (30, 8) and (codes == tokens[0].T.numpy()).all()
    ours, = nano.decode([codes])
    assert ours.dtype == np.float32 and ours.shape == (30 * 1024,)
    assert np.abs(ours - theirs[0].numpy()).max() < 1e-5
    again, = nano.decode([unfold(torch.from_numpy(codes.astype(np.int64)))])
    assert (again == ours).all()

def test_independent_of_the_batch(nano):
    lengths = [1, 1023, 1024, 1025, 5000, 20000, 20481, 21000, 21504, 21400, 44100]
    audio = clips(*lengths)
    together = nano.encode(audio)
    for n, a, c in zip(lengths, audio, together):
        alone, = nano.encode([a])
        assert c.shape == (-(-n // 1024), 8) and (alone == c).all(), n
    assert all((a == b).all() for a, b in zip(nano.encode(audio[::-1])[::-1], together))
    back = nano.decode(together)
    for n, a, c in zip(lengths, back, together):
        assert a.shape == (-(-n // 1024) * 1024,) and np.abs(a - nano.decode([c])[0]).max() < 1e-5

@pytest.mark.parametrize('size', [1, 3, 17])
def test_stream_equals_decode(nano, size):
    codes, = nano.encode(clips(60000))
    whole, = nano.decode([codes])
    pieces = list(nano.stream(codes[i:i + size] for i in range(0, len(codes), size)))
    assert [len(p) for p in pieces][:-1] == [size * 1024] * (len(pieces) - 1)
    assert np.abs(np.concatenate(pieces) - whole).max() < 1e-4
    assert nano.context < len(codes) // 2                                            # the test saw chunks with a cut past

def test_stream_measures_before_the_first_piece(nano):
    nano.__dict__.pop('context', None)                                               # a fresh codec
    before = nano.context
    del nano.__dict__['context']
    next(nano.stream([np.zeros((2, 8), np.uint16)]))
    assert nano.__dict__['context'] == before

def test_decoding_never_waits_for_the_device(file):
    """Else it could not be recorded. On the device `meta` a tensor that the host wants a number of raises; NeMo's own convolutions do."""
    for lean in (True, False):
        nano = NanoCodec(file)
        for m in nano.model.audio_decoder.to('meta').modules(): m.__dict__.pop('forward', None) if not lean else None
        nano.device = torch.device('meta')
        if lean: assert nano._decode(random_codes(2, 5).to('meta')).shape == (2, 5 * 1024)
        else:
            with pytest.raises(RuntimeError, match='meta'): nano._decode(random_codes(2, 5).to('meta'))

def test_recorded_batches(file):
    """Which recording a batch takes, what surrounds it there, and what comes back: a plain call stands for the CUDA graph."""
    nano, used = NanoCodec(file), []
    nano.record([(2, 5)])
    assert not nano.recorded                                                         # a CPU has none
    def recording(*shape):
        given, audio = random_codes(*shape), torch.zeros(shape[0], shape[1] * 1024)
        def replay(): used.append(shape); audio.copy_(nano._run(given))
        nano.recorded[shape] = types.SimpleNamespace(replay=replay), given, audio
    shapes = [(1, 5), (3, 5), (2, nano.context + 5)]
    for shape in shapes: recording(*shape)
    before = None
    for rows, frames, fit in [(1, 5, 0), (3, 5, 1), (2, 4, 1), (1, 1, 0), (1, 6, 2), (2, nano.context + 5, 2), (2, nano.context + 1, 2), (1, 5, 0), (3, 6, None), (4, 1, None)]:
        codes, known = random_codes(rows, frames), len(used)
        with torch.inference_mode(): plain = nano._run(codes)
        audio = nano._decode(codes)
        assert used[known:] == ([] if fit is None else [shapes[fit]])
        assert audio.shape == plain.shape and (audio - plain).abs().max() < 1e-5
        assert before is None or torch.equal(*before)                                # an earlier answer stays
        before = audio, audio.clone()
    used.clear()
    codes = fold(random_codes(1, 23)[0]).numpy()                                     # 4 pieces of 5 and one of 3
    nano.recorded.clear()
    whole, = nano.decode([codes])
    for frames in (5, nano.context + 5): recording(1, frames)
    pieces = list(nano.stream(codes[i:i + 5] for i in range(0, 23, 5)))
    assert [len(p) for p in pieces] == [5 * 1024] * 4 + [3 * 1024] and used == [(1, 5)] + [(1, nano.context + 5)] * 4
    assert np.abs(np.concatenate(pieces) - whole).max() < 1e-4

@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_cuda_graphs(file):
    nano, shapes = NanoCodec(file, 'cuda'), [(4, 6), (2, 30)]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), torch.inference_mode():     # TF32 rounds by batch size
        nano.record(shapes)
        assert sorted(nano.recorded) == [(2, 30), (4, 6)]
        for rows, frames in [(4, 6), (2, 30), (1, 6), (1, 30), (3, 6), (2, 30), (4, 6), (1, 4), (2, 29), (5, 6), (1, 31)]:
            codes = random_codes(rows, frames).cuda()
            assert (nano._decode(codes) - nano._run(codes)).abs().max() < 1e-5, (rows, frames)

@pytest.mark.parametrize('name, words', [('text.nemo', 'text.nemo: '), ('tar.nemo', 'tar.nemo: '), ('text.txt', 'neither a .nemo file nor a Hub name'), ('nobody/nothing', 'nobody/nothing')])
def test_foreign_codecs_are_one_line(nano, tmp_path, monkeypatch, name, words):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    monkeypatch.chdir(tmp_path)
    for text in ('text.nemo', 'text.txt'): (tmp_path / text).write_text('no codec')
    with tarfile.open('tar.nemo', 'w') as tar: tar.add('text.txt')
    with pytest.raises((OSError, ValueError)) as e: NanoCodec(name)
    assert words in str(e.value) and '\n' not in str(e.value)

def test_found_beside_the_code(nano, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert NanoCodec('assets/tiny/codec.nemo').id == 'assets/tiny/codec.nemo'        # what a checkpoint of the offline profile names

def test_bad_input(nano):
    with pytest.raises(ValueError, match='clip 1'): nano.encode([np.zeros(10, np.float32), np.zeros(0, np.float32)])
    with pytest.raises(ValueError, match='clip 0: .*one channel'): nano.encode([np.zeros((2, 10), np.float32)])
    with pytest.raises(ValueError, match='not finite at sample 3'): nano.encode([np.array([0, 0, 0, np.nan], np.float32)])
    with pytest.raises(ValueError, match='frame 0, group 7'): nano.decode([np.array([[0] * 7 + [2016]])])
    with pytest.raises(ValueError, match='frame 0, channel 0'): list(nano.stream([np.full((1, 32), 8)]))
    with pytest.raises(FileNotFoundError, match='absent.nemo'): NanoCodec('absent.nemo')
    assert nano.encode([]) == [] and nano.decode([]) == [] and list(nano.stream([])) == []
    assert len(nano.decode([np.zeros((0, 8), np.uint16)])[0]) == 0

def repack(source, target, edit):
    """A copy of a .nemo file with its config and weights edited."""
    import yaml
    folder = str(target) + '.d'
    with tarfile.open(source) as tar: tar.extractall(folder, filter='data')
    with open(f'{folder}/model_config.yaml') as f: config = yaml.safe_load(f)
    weights = torch.load(f'{folder}/model_weights.ckpt', weights_only=True)
    edit(config, weights)
    with open(f'{folder}/model_config.yaml', 'w') as f: yaml.safe_dump(config, f)
    torch.save(weights, f'{folder}/model_weights.ckpt')
    with tarfile.open(target, 'w') as tar: tar.add(folder, arcname='./')

def test_training_parts_are_cut(nano, tmp_path, capfd):
    def edit(config, weights):
        module = 'nemo.collections.tts.modules.audio_codec_modules.'
        config['discriminator'] = {'_target_': module + 'Discriminator', 'discriminators': [{'_target_': module + 'SLMDiscriminator'}]}
        config['use_scl_loss'] = True
        weights['discriminator.discriminators.0.x'] = torch.zeros(3)
    repack(TINY, tmp_path / 'big.nemo', edit)
    other = NanoCodec(str(tmp_path / 'big.nemo'))                                    # would fetch two models from the Hub
    assert other.model.discriminator is None
    assert (other.encode(clips(9000))[0] == nano.encode(clips(9000))[0]).all()
    said = capfd.readouterr()
    assert said.out == '' and said.err == ''

def test_missing_weights_are_an_error(nano, tmp_path):
    repack(TINY, tmp_path / 'less.nemo', lambda config, weights: weights.pop('audio_decoder.post_conv.conv.bias'))
    with pytest.raises(ValueError, match='audio_decoder.post_conv.conv.bias'): NanoCodec(str(tmp_path / 'less.nemo'))
