"""Outs appear whole or not at all, and a file that DVC linked elsewhere is never written to."""

import os
from pathlib import Path

import pytest

from stages.outs import out_folder, write_out


def names(folder: Path) -> list[str]:
    """Everything under `folder`, hidden files included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("content", ["héllo\n", b"\x00\xff", "", b""])
def test_writes_a_file_and_its_parents(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "results" / "plan" / "v.json"
    write_out(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert names(tmp_path) == ["results", "results/plan", "results/plan/v.json"]


def test_a_linked_file_is_replaced_and_not_rewritten(tmp_path: Path) -> None:
    """DVC's cache and the workspace are one file with two names; root writes through a read-only one."""
    cached, path = tmp_path / "cache", tmp_path / "out.json"
    cached.write_text("old")
    cached.chmod(0o444)
    os.link(cached, path)
    write_out(path, "new")
    assert (cached.read_text(), path.read_text()) == ("old", "new")
    assert cached.stat().st_nlink == 1
    assert os.access(path, os.W_OK)


def test_an_open_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_out(path, "old")
    with path.open() as reader:
        write_out(path, "new")
        assert reader.read() == "old"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    write_out(path, "old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_out(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["out.json"]


def test_content_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_out(tmp_path / "out.txt", "\udcff")
    assert names(tmp_path) == []


def test_a_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "models" / "v"
    with out_folder(path) as folder:
        (folder / "old").write_text("1")
    with out_folder(path) as folder:
        assert (path / "old").exists(), "the old one stays until the new one is whole"
        assert not any(folder.iterdir())
        (folder / "new").write_text("2")
        (folder / "deep").mkdir()
        (folder / "deep" / "er").write_text("3")
    assert names(tmp_path) == ["models", "models/v", "models/v/deep", "models/v/deep/er", "models/v/new"]


def test_a_folder_of_linked_files_is_not_written_to(tmp_path: Path) -> None:
    cached, path = tmp_path / "cache", tmp_path / "v"
    cached.write_text("old")
    path.mkdir()
    os.link(cached, path / "model.safetensors")
    with out_folder(path) as folder:
        (folder / "model.safetensors").write_text("new")
    assert (cached.read_text(), (path / "model.safetensors").read_text()) == ("old", "new")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "v"
    with out_folder(path) as folder:
        (folder / "old").write_text("1")
    with pytest.raises(error), out_folder(path) as folder:
        (folder / "half").write_text("2")
        raise error
    assert names(tmp_path) == ["v", "v/old"]


def test_what_a_killed_process_left_is_not_taken_over(tmp_path: Path) -> None:
    """Another process may have had the same id."""
    left = tmp_path / f".v.{os.getpid()}.part"
    left.mkdir()
    (left / "half").write_text("half")
    with out_folder(tmp_path / "v") as folder:
        (folder / "whole").write_text("whole")
    assert names(tmp_path) == ["v", "v/whole"]
