import json
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peer_works import WORKS, Work

TINY = Work(
    "tiny",
    300,
    WORKS["W"].model
    | {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    },
    32,
    (2,),
)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(WORKS, "tiny", TINY)
    monkeypatch.setattr(peers, "FOLDER", tmp_path / "bench")
    return tmp_path


@pytest.mark.slow
def test_two_contenders_side_by_side_and_the_rest_of_the_rounds_later(
    bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command with the contenders that need no installation."""
    begin = ["--work", "tiny", "--techniques", "amp", "--contenders", "frugal,tutorial", "--switched-only"]
    arguments = [*begin, "--steps", "2", "--warmup-steps", "1", "--output", str(bench), "--resume"]
    assert peers.main([*arguments, "--rounds", "1"]) == 0
    said = capsys.readouterr()
    assert "with every switch on both sides" in said.out
    page = Path(said.out.splitlines()[-1])
    assert page.parent == bench
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "| amp | tutorial loop + | " in page.read_text()

    # The first round is not run again.
    assert peers.main([*arguments, "--rounds", "2"]) == 0
    [journal] = (bench / "bench").glob("*.jsonl")
    _, *lines = [json.loads(line) for line in journal.read_text().splitlines()]
    order = [line["entry"]["contender"] for line in lines]
    assert order == ["frugal", "tutorial", "tutorial", "frugal"]
    assert all(line["result"]["peak_bytes"] > 0 for line in lines)
    losses = [line["result"]["losses"] for line in lines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] == losses[3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--work", "W9"], "--work W9: unknown; use one or more of W, W2, R"),
        (["--device", "cpu", "--techniques", "tf32"], "--techniques tf32: unknown"),
        (["--device", "cpu", "--work", "R"], "--work R is for a GPU, and there is none; use W,W2"),
        (["--python", "trainer"], "--python trainer: must be CONTENDER=PATH"),
        (["--python", "trainer=/nowhere/python"], "--python trainer=/nowhere/python: there is no such file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: list[str], words: str, bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("peers: ")
    assert words in error
    assert error.count("\n") == 1
    assert not (bench / "bench").exists()


@pytest.mark.parametrize("flag", ["--rounds", "--steps", "--warmup-steps", "--threads"])
def test_nothing_less_than_one(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main([flag, "0"])
    assert f"{flag} 0: must be 1 or more" in capsys.readouterr().err
