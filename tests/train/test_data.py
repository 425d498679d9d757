"""The order of the data is a function of seed and position."""

from pathlib import Path

import numpy as np
import pytest
import torch

from greylag.spec import SpecError
from greylag.train.data import STDLIB, Corpus, find_files


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "b.txt").write_bytes(b"hello world" * 50)
    return Corpus(find_files([str(tmp_path)]), sequence=32, seed=1)


def test_an_epoch_shows_every_window_once(corpus: Corpus) -> None:
    rows = corpus.windows(0, corpus.num_windows)
    seen = sorted(bytes(row[:-1].to(torch.uint8).numpy()) for row in rows)
    text = corpus.tokens.tobytes()
    assert seen == sorted(text[i * 32 : i * 32 + 32] for i in range(corpus.num_windows))


def test_targets_follow_inputs(corpus: Corpus) -> None:
    text = corpus.tokens.tobytes()
    for row in corpus.windows(0, 5):
        assert bytes(row.to(torch.uint8).numpy()) in text


def test_any_portion_reads_the_same_order(corpus: Corpus) -> None:
    whole = corpus.windows(0, 100)
    assert torch.equal(whole, torch.cat([corpus.windows(i, 1) for i in range(100)]))
    assert torch.equal(whole[40:], corpus.windows(40, 60))


def test_epochs_and_seeds_differ(corpus: Corpus) -> None:
    n = corpus.num_windows
    assert not torch.equal(corpus.windows(0, n), corpus.windows(n, n))
    other = Corpus.__new__(Corpus)
    other.__dict__ |= {**corpus.__dict__, "seed": 2, "_epoch": (-1, np.empty(0))}
    assert not torch.equal(corpus.windows(0, n), other.windows(0, n))


def test_the_standard_library_is_there() -> None:
    files = find_files([STDLIB])
    assert any(f.name == "argparse.py" for f in files)
    assert files == sorted(files)


def test_what_matches_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nothing-here"):
        find_files([str(tmp_path / "nothing-here*.txt")])
