"""
The arithmetic of fine-tuning. The reference's numbers are in test_golden.py.

    pytest tests/test_finetune.py
"""
import numpy as np
import pytest

from finetune import epoch_rows

LENGTHS = [1, 5, 12, 13, 20, 40, 150, 151, 14, 15]


def rows(fraction, seed=0, lengths=LENGTHS, short_below=13, longest=150):
    return epoch_rows(lengths, short_below, fraction, longest, np.random.default_rng(seed))


def test_epoch_rows():
    assert rows(0).tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9]          # off: only the too long one goes
    assert rows(1).tolist() == [0, 1, 2]
    half = rows(0.5)
    assert half.dtype == np.int64 and len(half) == 6 and {0, 1, 2} <= set(half.tolist()) and 7 not in half
    assert rows(0.3).tolist() == rows(0).tolist()                   # as many short rows as that already
    assert rows(0.5, lengths=[20, 30]).tolist() == [0, 1]           # no short rows to weigh against
    assert rows(0.5, longest=4).tolist() == [0]
    assert len(rows(0.5, lengths=[])) == 0
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match='short_fraction'):
            rows(bad)


def test_epochs_are_redrawn_from_the_seed():
    lengths = [5] * 10 + [50] * 100
    draws = [rows(0.5, seed, lengths).tolist() for seed in range(5)]
    assert draws[0] == rows(0.5, 0, lengths).tolist() and len(set(map(tuple, draws))) == 5 and all(len(d) == 20 for d in draws)
    generator = np.random.default_rng(0)
    assert epoch_rows(lengths, 13, 0.5, 150, generator).tolist() != epoch_rows(lengths, 13, 0.5, 150, generator).tolist()
