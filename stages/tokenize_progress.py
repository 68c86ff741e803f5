"""How far tokenizing is: a bar on a terminal, now and then a line elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stages.data.documents import Document
from stages.data.encoding_pool import Encoded
from stages.data.sources import Unit

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_UPDATES = 0.1


class ByteProgress:
    """Bytes done of all, and the speed of this process."""

    def __init__(self, what: str, total_bytes: int | None):
        self._what, self._total_bytes = what, total_bytes
        self.done_bytes = 0.0
        """Where the bar is, of `total_bytes`."""
        self._text_bytes = 0
        self._began = self._shown = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            disable=not sys.stdout.isatty(),
        )
        self._task = self._bar.add_task(what, total=total_bytes, figures="")
        self._interval = _SECONDS_BETWEEN_LINES if self._bar.disable else _SECONDS_BETWEEN_UPDATES

    def __enter__(self) -> Self:
        self._began = self._shown = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exception_type is None:
            self.done_bytes = self._total_bytes or self.done_bytes
            self._show()
        self._bar.stop()

    def add(self, text_bytes: int, bar_bytes: float | None = None) -> None:
        """So much more text is done; it moves the bar by `bar_bytes` where the two are not the same."""
        self._text_bytes += text_bytes
        self.done_bytes += text_bytes if bar_bytes is None else bar_bytes
        if time.monotonic() - self._shown >= self._interval:
            self._show()

    def _show(self) -> None:
        self._shown = time.monotonic()
        megabytes, seconds = self._text_bytes / 1e6, max(self._shown - self._began, 1e-3)
        figures = f"{megabytes:,.1f} MB, {megabytes / seconds:.1f} MB/s"
        self._bar.update(self._task, completed=self.done_bytes, figures=figures)
        if self._bar.disable:
            share = f", {self.done_bytes / self._total_bytes:.0%}" if self._total_bytes else ""
            print(f"{self._what}: {figures}{share}", flush=True)


def documents_with_progress(
    what: str, documents: Iterable[Document], total_bytes: int | None
) -> Iterator[Document]:
    """`documents`, and how many bytes of text were taken."""
    with ByteProgress(what, total_bytes) as progress:
        for document in documents:
            yield document
            progress.add(len(document.text.encode("utf-8")))


class EncodingProgress(ByteProgress):
    """A bar over bytes on disk, which are fewer than those of the text where that is compressed.

    A unit in work passes as much of them as its text would have taken in the units before.
    """

    def __init__(self, units: Sequence[Unit], missing: Sequence[Unit]):
        total = None if any(unit.num_bytes is None for unit in units) else _num_bytes(units)
        super().__init__("encoding", total)
        self._left = {unit.number: float(unit.num_bytes or 0) for unit in missing}
        self._text = dict.fromkeys(self._left, 0)
        self._whole_text = self._whole_disk = 0
        if len(missing) < len(units):
            print(f"{len(units) - len(missing)} of {len(units)} units were encoded before", flush=True)
        self.done_bytes = _num_bytes(units) - _num_bytes(missing)

    def show(self, event: Encoded) -> None:
        number = event.unit.number
        self._text[number] += event.num_bytes
        if event.is_whole:
            passed = self._left[number]
            self._whole_text += self._text[number]
            self._whole_disk += event.unit.num_bytes or 0
        else:
            disk_per_text = self._whole_disk / self._whole_text if self._whole_text else 1.0
            passed = min(self._left[number], event.num_bytes * disk_per_text)
        self._left[number] -= passed
        self.add(event.num_bytes, passed)


def _num_bytes(units: Sequence[Unit]) -> int:
    return sum(unit.num_bytes or 0 for unit in units)
