"""The bar of tokenizing: it passes as many bytes as there are on disk, never more, compressed or not."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data.encoding_pool import Encoded
from stages.data.sources import Unit
from stages.tokenize_progress import EncodingProgress

sizes = st.lists(st.tuples(st.integers(1, 1000), st.floats(0.2, 9.0)), min_size=1, max_size=6)


@given(units=sizes, kept=st.integers(0, 5), pieces=st.integers(1, 4), order=st.randoms())
def test_the_bar_ends_full_and_never_goes_back_or_beyond(
    units: list[tuple[int, float]], kept: int, pieces: int, order: random.Random
) -> None:
    all_units = [Unit(number, size) for number, (size, _) in enumerate(units)]
    missing = all_units[kept:]
    progress = EncodingProgress(all_units, missing)
    seen = [progress.done_bytes]
    assert seen[0] == sum(size for size, _ in units[:kept])
    for unit in order.sample(missing, len(missing)):
        text = int(units[unit.number][0] * units[unit.number][1])
        for _ in range(pieces):
            progress.show(Encoded(unit, text // pieces, is_whole=False))
            seen.append(progress.done_bytes)
        progress.show(Encoded(unit, 0, is_whole=True))
        seen.append(progress.done_bytes)
    assert all(later >= earlier - 1e-6 for earlier, later in itertools.pairwise(seen))
    assert max(seen) == pytest.approx(seen[-1])
    assert seen[-1] == pytest.approx(sum(size for size, _ in units))


def test_a_corpus_of_unknown_size_has_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    unit = Unit(0, None)
    with EncodingProgress([unit], [unit]) as progress:
        progress.show(Encoded(unit, 2_500_000, is_whole=True))
    line = capsys.readouterr().out
    assert line.startswith("encoding: 2.5 MB, ") and "%" not in line


def test_what_was_encoded_before_is_said_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    units = [Unit(number, 1_000_000) for number in range(4)]
    with EncodingProgress(units, units[3:]) as progress:
        assert capsys.readouterr().out == "3 of 4 units were encoded before\n"
        assert progress.done_bytes == 3_000_000
        progress.show(Encoded(units[3], 1_000_000, is_whole=True))
    assert capsys.readouterr().out.endswith("MB/s, 100%\n")
