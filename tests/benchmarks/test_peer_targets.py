import pytest

from benchmarks.peer_summary import Row
from benchmarks.peer_targets import Target, targets
from tests.benchmarks.peer_runs_made import STANDING, result, rows, runs

MIB = 2**20


def find(found: list[Target], words: str) -> Target:
    [target] = [target for target in found if words in target.claim]
    return target


def group(technique: str, work: str = "W2", **figures: tuple[float, float]) -> list[Row]:
    """Of each contender (`trainer_plus` is the switched one): tokens/s, and MiB beyond what must stand."""
    every = []
    for name, (speed, beyond) in figures.items():
        contender, _, plus = name.partition("_")
        made = result(speed, int(STANDING + beyond * MIB))
        every.append(runs(contender, bool(plus), [made], micro_batch_size=4))
    return rows(every, work, technique)


def test_each_column_has_its_own_target_of_speed() -> None:
    found = targets(
        group("amp", frugal=(120, 1), frugal_plus=(110, 1), trainer=(100, 9), trainer_plus=(100, 9))
    )
    as_it_comes = find(found, "of Trainer, as they come")
    assert as_it_comes.claim.startswith("at least 1.25×")
    assert [finding.where for finding in as_it_comes.missed] == ["W2 amp"]
    switched = find(found, "of Trainer, with every switch")
    assert switched.findings[0].value == pytest.approx(1.1)
    assert switched.missed == []


def test_everything_is_held_against_the_faster_fp32_of_trainer() -> None:
    rest = group("everything", frugal=(150, 1), frugal_plus=(190, 1))
    slow = targets(rest + group("fp32", trainer=(50, 9), trainer_plus=(100, 9)))
    target = find(slow, "everything on")
    assert target.findings[0].value == pytest.approx(1.9)
    assert target.missed
    fast = targets(rest + group("fp32", trainer=(50, 9), trainer_plus=(95, 9)))
    assert not find(fast, "everything on").missed


def test_memory_is_the_chunked_loss_against_the_leaner_column() -> None:
    found = targets(group("amp", frugal=(1, 2), frugal_plus=(1, 6), trainer=(1, 10), trainer_plus=(1, 20)))
    target = find(found, "in W2 amp ")
    assert target.findings[0].value == pytest.approx(0.6)
    assert not target.missed
    leaner = targets(group("amp_recompute", frugal_plus=(1, 3), trainer=(1, 12), trainer_plus=(1, 10)))
    assert find(leaner, "in W2 amp_recompute ").missed


def test_memory_beyond_is_a_target_of_w2_alone() -> None:
    found = targets(group("amp", "W", frugal_plus=(1, 2), trainer=(1, 10)))
    assert not any("beyond" in target.claim for target in found)


def test_the_whole_peak_must_not_be_above_any_peers() -> None:
    figures = {"frugal_plus": (1, 5.0), "trainer": (1, 9.0), "litgpt": (1, 5.5), "tutorial_plus": (1, 4.9)}
    above = find(targets(group("amp", **figures)), "whole peak")
    assert [finding.where for finding in above.missed] == ["W2 amp"]
    below = find(targets(group("amp", **figures | {"tutorial_plus": (1, 5.0)})), "whole peak")
    assert not below.missed


def test_what_was_not_run_is_no_target() -> None:
    assert targets(group("amp", frugal=(1, 1))) == []
    broken = rows([runs("frugal", False, [result()]), runs("trainer", False, [], failure="x")])
    assert targets(broken) == []
