"""Where tokenizing keeps what it has encoded, and what that belongs to.

.work/tokenize/all/FINGERPRINT/            tokenizer.json, the parts, and `complete/`, ready to be linked
.work/tokenize/shard-3-of-16/FINGERPRINT/  tokenizer.json and the parts of `--shard 3/16`
"""

import contextlib
import hashlib
import json
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stages.container_image import container_image
from stages.data.encoding import is_last, whole_parts
from stages.data.sources import Unit, corpus_units, describe_corpus
from stages.data.tokenizer import TokenizerError, load_tokenizer
from stages.outs import write_out
from stages.params import Params
from stages.tracking import outs_md5_tags, work_root
from stages.work_folder import hold_work_folder

_STAGE = "tokenize"
_SEEN = "corpus.json"
"""In the folder of a shard: whose files it was encoded from, and when they were changed last."""


@dataclass(frozen=True)
class Shard:
    """Part `number` of `of`, counted from 1: one of several jobs that encode one corpus."""

    number: int
    of: int

    def units(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Consecutive ones, so that a job reads few files."""
        return units[len(units) * (self.number - 1) // self.of : len(units) * self.number // self.of]

    @property
    def name(self) -> str:
        return f"shard-{self.number}-of-{self.of}"


@dataclass(frozen=True)
class TokenizeWork:
    """A held work folder, and the folders of other jobs whose parts count too."""

    folder: Path
    others: tuple[Path, ...]
    units: Sequence[Unit]
    """Of the whole corpus."""

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def complete(self) -> Path:
        """The folder that holds every file of data/tokens once all is merged."""
        return self.folder / "complete"

    def whole_units(self, units: Sequence[Unit]) -> dict[int, Path]:
        """The folder of those units whose every part is there, by their numbers."""
        found = {}
        for unit in units:
            for folder in (self.folder, *self.others):
                parts = whole_parts(folder, unit)
                if parts and is_last(parts[-1]):
                    found[unit.number] = folder
                    break
        return found

    def known_tokenizer(self) -> bytes | None:
        """The tokenizer.json that this or another job has learned; one that was copied half is none."""
        for folder in (self.folder, *self.others):
            path = folder / self.tokenizer.name
            with contextlib.suppress(TokenizerError):  # a missing one is one too
                load_tokenizer(path)
                return path.read_bytes()
        return None

    def is_to_be_made_again(self, out: Path, began: float) -> bool:
        """Whether the complete tokens are what dvc.lock has of `out`: this is a `dvc repro --force` then.

        Args:
            began: seconds since the epoch; what another process has completed since is as good as made again.
        """
        committed = outs_md5_tags(_STAGE).get(f"md5.{out}")
        return (
            committed is not None
            and self.complete.exists()
            and (self.complete / "meta.json").stat().st_mtime < began
            and committed == _dvc_md5(self.complete)
        )

    def clear(self) -> None:
        shutil.rmtree(self.complete)
        self.tokenizer.unlink(missing_ok=True)
        _remove_parts(self.folder)

    def remove_parts(self) -> None:
        """Those of all jobs, which are merged now."""
        for folder in (self.folder, *self.others):
            _remove_parts(folder)
        for folder in self.others:  # learned from files that another machine may have changed since
            (folder / self.tokenizer.name).unlink(missing_ok=True)


def _remove_parts(folder: Path) -> None:
    for pattern in ("*.safetensors", ".*.partial"):
        for part in folder.glob(pattern):
            part.unlink()


@contextmanager
def hold_tokenize_work(params: Params, shard: Shard | None, *, fresh: bool) -> Iterator[TokenizeWork]:
    """The work folder of these params and this corpus; of a shard, or of all with what shards have made.

    Where other processes are at them, experiments perhaps that need the same tokens, it waits and says so.

    Raises:
        CorpusError: the corpus is not there.
        WorkFolderError: a folder cannot be used.
    """
    units = corpus_units(params.corpus)
    root, fingerprint = work_root(), _fingerprint(params, units)
    with ExitStack() as stack:
        if shard is not None:
            folder = root / _STAGE / shard.name / fingerprint[:16]
            again = fresh or _is_stale(folder, units)
            held = _hold(shard.name, fingerprint, fresh=again)
            work = TokenizeWork(stack.enter_context(held), (), units)
            write_out(work.folder / _SEEN, json.dumps({"place": _place(), "times": _times(units)}))
            yield work
            return
        others = [
            stack.enter_context(
                _hold(folder.parent.name, fingerprint, fresh=fresh or _is_stale(folder, units))
            )
            for folder in sorted((root / _STAGE).glob(f"shard-*-of-*/{fingerprint[:16]}"))
        ]
        local = _sha256([fingerprint, params.tokenizer.shard_tokens, _times(units)])
        held = _hold("all", local, fresh=fresh)
        yield TokenizeWork(stack.enter_context(held), tuple(others), units)


def _hold(part: str, fingerprint: str, *, fresh: bool) -> AbstractContextManager[Path]:
    return hold_work_folder(work_root(), _STAGE, part, fingerprint, fresh=fresh, waits_as=_STAGE)


def _is_stale(folder: Path, units: Sequence[Unit]) -> bool:
    """Whether it was encoded here, from files that have changed since; of another machine's nobody knows."""
    try:
        seen = json.loads((folder / _SEEN).read_text())
        return bool(seen["place"] == _place() and seen["times"] != _times(units))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _place() -> str:
    """This checkout on this machine."""
    return f"{socket.gethostname()}:{Path.cwd()}"


def _fingerprint(params: Params, units: Sequence[Unit]) -> str:
    """64 hex digits; equal for two jobs, on two machines perhaps, whose parts fit together."""
    stages = Path(__file__).parent
    others = ("params/data.py", "tokenize_data.py", "tokenize_work.py")
    code = [*sorted((stages / "data").glob("*.py")), *(stages / name for name in others)]
    parts = [part for unit in units for part in unit.parts]
    return _sha256(
        {
            "corpus": describe_corpus(params.corpus),
            "files": [(part.path.as_posix(), part.num_bytes, part.start, part.end) for part in parts],
            "vocab_size": params.tokenizer.vocab_size,
            "training_bytes": params.tokenizer.training_bytes,
            "code": {str(file.relative_to(stages)): _sha256(file.read_text()) for file in code},
            "environment": _sha256((stages.parent / "constraints.txt").read_text()),
            "base_image": image.base if (image := container_image()) else None,
        }
    )


def _dvc_md5(folder: Path) -> str:
    """As DVC writes it for a folder: of the list of its files and theirs."""
    files = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        files.append({"md5": md5, "relpath": path.name})
    return hashlib.md5(json.dumps(files, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"


def _times(units: Sequence[Unit]) -> list[int]:
    """When each file was last changed: of one machine's files, a change that leaves the size."""
    return [part.path.stat().st_mtime_ns for unit in units for part in unit.parts if part.start == 0]


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
