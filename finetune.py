"""
Fine-tuning from a base checkpoint. At present this file holds the arithmetic of the stage: which rows an epoch has.
"""
import numpy as np


def epoch_rows(lengths, short_below, short_fraction, longest, rng):
    """Row numbers of one epoch (int64, ascending). lengths: text tokens of each row, without layout and repetition.

    Short texts are where a base model fails and are rare in speech corpora, so all rows below short_below tokens are kept,
    rows over `longest` are dropped, and the rest is thinned at random until short rows are short_fraction of the epoch;
    0 thins nothing. If there are no short rows, or as many as that already, all stay. rng (np.random.Generator) draws, so
    the caller decides whether epochs differ."""
    if not 0 <= short_fraction <= 1:
        raise ValueError(f'short_fraction must be in 0..1, got {short_fraction}')
    lengths = np.asarray(lengths)
    fits = lengths <= longest
    short, rest = np.flatnonzero(fits & (lengths < short_below)), np.flatnonzero(fits & (lengths >= short_below))
    if short_fraction > 0 and len(short):
        wanted = round(len(short) * (1 - short_fraction) / short_fraction)
        rest = rng.choice(rest, min(wanted, len(rest)), replace=False)
    return np.sort(np.concatenate((short, rest))).astype(np.int64)
