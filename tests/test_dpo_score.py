"""
The arithmetic of scoring. The reference's numbers are in test_golden.py.

    pytest tests/test_dpo_score.py
"""
import pytest

from dpo_score import make_pairs, normalise, reward


def test_normalise():
    assert normalise('  Über [noise] (laugh) Café, ﬁve!  ') == 'über café five'
    assert [normalise(x) for x in ('', ' ', '...', '(all gone)', '¿?')] == [''] * 5


@pytest.mark.parametrize('transcript', ['', '   ', '...', '[noise]'])
def test_blank_transcripts_are_empty(transcript):
    r = reward('two words', transcript, 1.0)
    assert r['empty'] and r['wer'] == 1.0 and r['reward'] == -1.0 - 2.0


def test_blank_text_has_no_reward():
    r = reward('?!', 'something', 1.0, 0.9)
    assert r['wer'] is None and r['reward'] is None and r['expected'] == pytest.approx(1.1)


def test_duration_terms():
    """Expected 1.5 s for two words: nothing from 0.45 to 3.0 s, bounds included."""
    score = lambda seconds: reward('two words', 'two words', seconds)['reward']
    assert [score(s) for s in (0.45, 1.5, 3.0)] == [0.0, 0.0, 0.0]
    assert score(0.4) == -2.0 and score(4.0) == pytest.approx(-0.5)
    assert reward('two words', 'two words', 1.5, 0.5)['reward'] == pytest.approx(-0.25)


def rollout(i, **kw):
    return dict(group_id='g', sample_idx=i, reward=-0.1, wer=0.0, empty=False, truncated=False, seconds=1.5, dur_min=0.45, dur_max=3.0) | kw


@pytest.mark.parametrize('fault', [dict(wer=0.21), dict(empty=True), dict(truncated=True), dict(seconds=0.44), dict(seconds=3.01)])
def test_each_gate(fault):
    """A rollout with one fault is rejected however good its reward, and then is a rejected candidate."""
    assert make_pairs([rollout(0, **fault), rollout(1, reward=-5.0, wer=1.0)])[1]['no_chosen'] == 1
    pairs, counts = make_pairs([rollout(0), rollout(1, reward=-1.0, **fault)])
    assert [(p['chosen']['sample_idx'], p['rejected']['sample_idx']) for p in pairs] == [(0, 1)]
    assert counts == {'groups': 1, 'paired': 1, 'pairs': 1, 'blank_text': 0, 'no_chosen': 0, 'no_rejected': 0, 'no_margin': 0}


def test_every_group_has_one_reason():
    groups = {'alone': [rollout(0)], 'all bad': [rollout(0, wer=1.0), rollout(1, wer=1.0)], 'close': [rollout(0), rollout(1, wer=0.3, reward=-0.5)],
              'blank': [rollout(0, reward=None, wer=None)]}
    _, counts = make_pairs([s | {'group_id': name} for name, g in groups.items() for s in g])
    assert counts == {'groups': 4, 'paired': 0, 'pairs': 0, 'blank_text': 1, 'no_chosen': 1, 'no_rejected': 1, 'no_margin': 1}
    assert make_pairs([]) == ([], {k: 0 for k in counts})
