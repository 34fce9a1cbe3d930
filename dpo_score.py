"""
Scoring rollouts for preference training. At present this file holds the arithmetic of the stage: the reward of a
transcript and the choice of pairs.
"""
from functools import cache


@cache
def normaliser():
    """Whisper's basic normaliser: lower case, no brackets, punctuation to spaces; the same for every language."""
    from whisper.normalizers import BasicTextNormalizer
    return BasicTextNormalizer()


def normalise(text):
    """Text as WER sees it. Stripped: the normaliser turns '...' into one space, which is not an empty string but is blank."""
    return normaliser()(text.strip()).strip()


def reward(text, transcript, seconds, similarity=None, *, sec_base=0.7, sec_per_word=0.4, min_ratio=0.3, max_ratio=2.0,
           w_wer=1.0, w_over=0.5, w_short=2.0, w_empty=2.0, w_similarity=0.5):
    """How good a rollout is -> dict: wer, empty, expected, dur_min, dur_max (seconds), terms, reward (their sum, <= 0).

    text: what was asked for; transcript: what ASR heard; seconds: length of the audio; similarity: speaker cosine, None
    where there is no voice to compare with. Expected length = sec_base + sec_per_word * words. WER can exceed 1; a blank
    transcript has WER 1. A text that is blank after normalising has no WER and no reward (both None): count such rows."""
    import jiwer
    expected = sec_base + sec_per_word * max(1, len(text.split()))
    low, high = min_ratio * expected, max_ratio * expected
    said, heard = normalise(text), normalise(transcript)
    r = {'text': said, 'transcript': heard, 'empty': not heard, 'expected': expected, 'dur_min': low, 'dur_max': high,
         'wer': None, 'terms': None, 'reward': None}
    if not said:
        return r
    r['wer'] = jiwer.wer(said, heard) if heard else 1.0
    r['terms'] = {'wer': -w_wer * r['wer'], 'over': -w_over * max(0.0, seconds - high), 'short': -w_short * (seconds < low),
                  'empty': -w_empty * r['empty'], 'similarity': 0.0 if similarity is None else -w_similarity * (1 - similarity)}
    r['reward'] = sum(r['terms'].values())
    return r


def make_pairs(scores, *, max_wer=0.2, not_truncated=True, duration_in_bounds=True, min_margin=0.5, max_pairs=2):
    """Preference pairs among rollouts of the same prompt and voice -> pairs, counts.

    scores: dicts with group_id, sample_idx, reward, wer, empty, truncated, seconds, dur_min, dur_max. A rollout passes if its
    WER is at most max_wer, it is not empty, was not cut at the frame cap (not_truncated) and has a plausible length
    (duration_in_bounds). The best that passes is chosen over the worst that does not, then the second best over the second
    worst, up to max_pairs, as long as the rewards are min_margin apart. Pairs: dicts group_id, chosen, rejected (the
    score dicts), gap. counts: groups, paired, pairs, and groups without a pair by their one reason: blank_text (no reward),
    no_chosen (none passes), no_rejected (all pass), no_margin."""
    groups = {}
    for s in scores:
        groups.setdefault(s['group_id'], []).append(s)

    def passes(s):
        return (s['wer'] <= max_wer and not s['empty'] and not (not_truncated and s['truncated'])
                and (not duration_in_bounds or s['dur_min'] <= s['seconds'] <= s['dur_max']))

    pairs = []
    counts = {'groups': len(groups), 'paired': 0, 'pairs': 0, 'blank_text': 0, 'no_chosen': 0, 'no_rejected': 0, 'no_margin': 0}
    for name, group in groups.items():
        if any(s['reward'] is None for s in group):
            counts['blank_text'] += 1
            continue
        ranked = sorted(group, key=lambda s: -s['reward'])          # stable: equal rewards stay in sampling order
        good = [s for s in ranked if passes(s)]
        bad = [s for s in reversed(ranked) if not passes(s)]
        # gaps only shrink from one pair to the next
        new = [{'group_id': name, 'chosen': c, 'rejected': r, 'gap': c['reward'] - r['reward']} for c, r in zip(good[:max_pairs], bad)
               if c['reward'] - r['reward'] >= min_margin]
        pairs += new
        counts['pairs'] += len(new)
        counts['paired' if new else 'no_chosen' if not good else 'no_rejected' if not bad else 'no_margin'] += 1
    return pairs, counts
