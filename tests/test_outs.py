"""Outs appear whole or not at all, and a file that DVC linked elsewhere is never written to."""

import errno
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stages.outs import out_folder, publish_folder, write_out

REPOSITORY = Path(__file__).parents[1]


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


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".v.part/deep").mkdir(parents=True)
    (tmp_path / ".v.part/half").write_text("half")
    (tmp_path / ".v.old.part").mkdir()
    (tmp_path / ".v.json.part").write_text("a longer half")
    with out_folder(tmp_path / "v") as folder:
        (folder / "whole").write_text("whole")
    write_out(tmp_path / "v.json", "whole")
    assert names(tmp_path) == ["v", "v.json", "v/whole"]
    assert (tmp_path / "v.json").read_text() == "whole"


KILLED_WHILE_IT_WRITES = """
import os, sys, time
from pathlib import Path
from stages import outs

calls = 0
def killed_at(frame, event, argument):
    global calls
    if event in ("line", "return") and frame.f_code.co_filename == outs.__file__:
        calls += 1
        if calls == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
    return killed_at

path = Path(sys.argv[1])
sys.settrace(killed_at)
outs.write_out(path / "v.json", "new")
outs.publish_folder({"model": path / "source", "a/b.json": "new"}, path / "v")
"""


def run_and_kill_at(folder: Path, line: int) -> int:
    """Writes `v.json` and `v/` anew, killed by SIGKILL at the given line that `outs` executes."""
    code = [sys.executable, "-c", KILLED_WHILE_IT_WRITES, str(folder), str(line)]
    return subprocess.run(code, cwd=REPOSITORY, check=False).returncode


@pytest.mark.slow
def test_a_run_killed_at_any_line_leaves_whole_outs_and_the_next_removes_its_leftovers(
    tmp_path: Path,
) -> None:
    kills = 0
    for line in itertools.count(1, 2):
        folder = tmp_path / str(line)
        (folder / "v/a").mkdir(parents=True)
        (folder / "v.json").write_text("old")
        (folder / "v/model").write_text("old")
        (folder / "v/a/b.json").write_text("old")
        (folder / "source").write_text("new")
        status = run_and_kill_at(folder, line)
        if status == 0:
            break
        assert status == -9
        kills += 1
        assert (folder / "v.json").read_text() in ("old", "new")
        if (folder / "v").exists():  # between two renames it has another name
            assert {(folder / "v" / name).read_text() for name in ("model", "a/b.json")} in ({"old"}, {"new"})
        else:
            assert (folder / ".v.old.part/model").read_text() == "old"
        assert run_and_kill_at(folder, -1) == 0
        assert names(folder) == ["source", "v", "v.json", "v/a", "v/a/b.json", "v/model"]
        assert (folder / "v/model").read_text() == (folder / "v/a/b.json").read_text() == "new"
    assert kills > 30


def test_publishing_links_files_and_writes_texts(tmp_path: Path) -> None:
    source, path = tmp_path / "work" / "step-7.safetensors", tmp_path / "models" / "v"
    source.parent.mkdir()
    source.write_bytes(b"weights")
    publish_folder({"model.safetensors": source, "training.json": "{}\n"}, path)
    assert names(path) == ["model.safetensors", "training.json"]
    assert (path / "model.safetensors").samefile(source)
    assert (path / "training.json").read_text() == "{}\n"


def test_publishing_again_leaves_the_linked_file_alone(tmp_path: Path) -> None:
    """DVC makes an out read-only, and with it the file in the work folder: they are one."""
    old, new, path = tmp_path / "old", tmp_path / "new", tmp_path / "v"
    old.write_text("old")
    new.write_text("new")
    publish_folder({"model": old}, path)
    (path / "model").chmod(0o444)
    publish_folder({"model": new}, path)
    assert (old.read_text(), (path / "model").read_text()) == ("old", "new")


@pytest.mark.parametrize("number", ["EXDEV", "EPERM", "EMLINK", "ENOTSUP"])
def test_where_no_link_is_possible_the_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    def refuse(source: Path, place: Path) -> None:
        raise OSError(getattr(errno, number), "no link")

    monkeypatch.setattr(os, "link", refuse)
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    publish_folder({"model": source}, tmp_path / "v")
    assert (tmp_path / "v/model").read_bytes() == b"weights"
    assert not (tmp_path / "v/model").samefile(source)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system here")
def test_a_file_of_another_file_system_is_copied(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as source:
        source.write(b"weights")
        source.flush()
        publish_folder({"model": Path(source.name)}, tmp_path / "v")
    assert (tmp_path / "v/model").read_bytes() == b"weights"


def test_a_missing_source_leaves_the_old_folder(tmp_path: Path) -> None:
    publish_folder({"model": "old"}, tmp_path / "v")
    with pytest.raises(FileNotFoundError, match="gone"):
        publish_folder({"config": "new", "model": tmp_path / "gone"}, tmp_path / "v")
    assert names(tmp_path) == ["v", "v/model"]


def test_a_full_disk_names_the_out_and_leaves_the_old_ones(tmp_path: Path) -> None:
    """The limit on a file's size stands for the full disk: both fail in `write`, without a name."""
    write_out(tmp_path / "v.json", "old")
    publish_folder({"model": "old"}, tmp_path / "v")
    code = f"""
import resource, signal
from pathlib import Path
from stages.outs import publish_folder, write_out
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
folder = Path({str(tmp_path)!r})
for write in (
    lambda: write_out(folder / "v.json", "n" * 200),
    lambda: publish_folder({{"model": "n" * 200}}, folder / "v"),
):
    try:
        write()
    except OSError as error:
        print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "".join(
        f"[Errno 27] File too large: '{tmp_path / name}'\n" for name in ("v.json", "v")
    )
    assert names(tmp_path) == ["v", "v.json", "v/model"]
    assert {(tmp_path / name).read_text() for name in ("v.json", "v/model")} == {"old"}


def test_files_and_folders_are_flushed_before_the_name_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, bool]] = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        flushed.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), (tmp_path / "v").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    publish_folder({"model": "new", "a/b": "new"}, tmp_path / "v")
    half = tmp_path / ".v.part"
    before = {str(half), str(half / "a"), str(half / "a/b"), str(half / "model")}
    assert {name for name, is_there in flushed if not is_there} == before
    assert flushed[-1] == (str(tmp_path), True)
