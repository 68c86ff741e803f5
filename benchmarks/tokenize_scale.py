"""Tokenizing at scale: `python -m benchmarks.tokenize_scale --gib 2`.

Generates a parquet corpus of that much text, tokenizes it as the stage does, and shows that memory does not
grow with what is read: benchmarks/results/tokenize_scale.png, and the figures beside it as .md. With
`--compare 1,4` the corpus is tokenized again with so many workers, and with `--kills 5` once more while the
stage is killed (SIGKILL) so often at random moments: all must give the same bytes.

Beside it stands the bare loop: `encode_batch_fast` of the tokenizers library over text in memory, with its
own threads. On a busy machine compare MB per CPU second.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pyarrow
import pyarrow.parquet
import yaml

from stages.data.sources import iterate_documents
from stages.params import EmbeddedCorpus

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks/results"
_FILE_BYTES = 2**28
_ROWS_PER_GROUP = 5_000
_SAMPLE_SECONDS = 0.5
_BARE_SECONDS = 20.0

# In a process of its own: the library reads the number of threads once.
_BARE = """
import resource, sys, time
import numpy as np, pyarrow.parquet
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
seconds = float(sys.argv[3])
with pyarrow.parquet.ParquetFile(sys.argv[2]) as file:
    texts = next(file.iter_batches(20_000, columns=["text"])).column(0).to_pylist()
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
began, cpu_began, num_bytes, at = time.perf_counter(), cpu(), 0, 0
while time.perf_counter() - began < seconds:
    batch = texts[at : at + 1000]
    for encoding in tokenizer.encode_batch_fast(batch):
        np.array(encoding.ids, np.uint16)
    num_bytes += sum(len(text.encode()) for text in batch)
    at = (at + 1000) % len(texts)
print(num_bytes / 1e6 / (time.perf_counter() - began), num_bytes / 1e6 / (cpu() - cpu_began))
"""


@dataclass
class Run:
    """One tokenizing, from start to end."""

    workers: int
    seconds: float = 0.0
    encoding_seconds: float = 0.0
    cpu_seconds: float = 0.0
    outs: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file of data/tokens."""
    samples: list[tuple[float, float, dict[int, float]]] = field(default_factory=list)
    """(seconds, MB of text encoded, MB of memory of each process: its own, without what is mapped)."""

    @property
    def peaks(self) -> list[float]:
        """MB: the highest of the stage's process, then of those that it started."""
        highest: dict[int, float] = {}
        for _, _, memory in self.samples:
            for pid, megabytes in memory.items():
                highest[pid] = max(highest.get(pid, 0.0), megabytes)
        return list(highest.values())


def generate(folder: Path, num_bytes: int, seed: int = 0) -> int:
    """Parquet files of documents put together from paragraphs of the embedded corpus; bytes of text.

    Lengths are log-normal around 3 kB, as of web pages, and every document has a number of its own.
    """
    paragraphs = [
        paragraph
        for document in iterate_documents(EmbeddedCorpus(source="embedded"))
        for paragraph in document.text.split("\n")
        if paragraph.strip()
    ]
    chance = np.random.default_rng(seed)
    schema = pyarrow.schema([("text", pyarrow.string()), ("id", pyarrow.int64())])
    written = rows = number = 0
    while written < num_bytes:
        path = folder / f"part-{number:04d}.parquet"
        in_file, number = 0, number + 1
        with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            while in_file < _FILE_BYTES and written < num_bytes:
                texts: list[str] = []
                for target in chance.lognormal(8.0, 1.0, _ROWS_PER_GROUP):
                    if written >= num_bytes:
                        break
                    text = f"No. {chance.integers(10**9):,}\n"
                    while len(text) < target:
                        text += paragraphs[chance.integers(len(paragraphs))] + "\n"
                    texts.append(text)
                    size = len(text.encode())
                    written, in_file = written + size, in_file + size
                ids = range(rows, rows + len(texts))
                writer.write_table(pyarrow.table({"text": texts, "id": list(ids)}, schema))
                rows += len(texts)
    print(f"generated {rows:,} documents, {written / 1e6:,.0f} MB of text in {number} files", flush=True)
    return written


def write_params(folder: Path, corpus: Path, vocab_size: int) -> None:
    params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    params["corpus"] = {"source": "files", "paths": [f"{corpus}/*.parquet"], "validation_every": 100}
    params["tokenizer"] = {"vocab_size": vocab_size}
    (folder / "params.yaml").write_text(yaml.safe_dump(params))


def start(folder: Path, workers: int) -> "subprocess.Popen[str]":
    # Lines about progress come every 10 seconds; a second, so that the figure has points.
    program = (
        "import sys, stages.tokenize_progress as progress\n"
        "progress._SECONDS_BETWEEN_LINES = 1.0\n"
        "from stages.tokenize_data import main\n"
        f"sys.exit(main(['--workers', '{workers}']))"
    )
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=log,
            text=True,
        )


def tokenize(folder: Path, workers: int) -> Run:
    """Run the stage to its end, watching its memory."""
    run = Run(workers)
    began, cpu_began = time.monotonic(), os.times()
    process = start(folder, workers)
    while process.poll() is None:
        done = re.findall(r"encoding: ([\d,.]+) MB", (folder / "log").read_text())
        megabytes = float(done[-1].replace(",", "")) if done else 0.0
        run.samples.append((time.monotonic() - began, megabytes, memory_of(process.pid)))
        time.sleep(_SAMPLE_SECONDS)
    if process.returncode != 0:
        sys.exit(f"tokenize ended with status {process.returncode}")
    run.seconds = time.monotonic() - began
    encoding = [seconds for seconds, megabytes, _ in run.samples if megabytes > 0]
    run.encoding_seconds = run.seconds - encoding[0]
    ended = os.times()
    run.cpu_seconds = (
        ended.children_user - cpu_began.children_user + ended.children_system - cpu_began.children_system
    )
    run.outs = outs_of(folder)
    return run


def tokenize_killed(folder: Path, workers: int, kills: int, seconds: float) -> dict[str, str]:
    """Kill the stage so often, at random moments of a run of about `seconds`; what it makes in the end."""
    chance = random.Random(0)
    for number in range(kills):
        process = start(folder, workers)
        try:
            process.wait(seconds * chance.uniform(0.2, 0.7))
            print(f"kill {number + 1}: too late, it is complete", flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kept = len(list(folder.glob(".work/tokenize/all/*/0*.safetensors")))
            print(f"kill {number + 1}: {kept} parts are kept", flush=True)
    if start(folder, workers).wait() != 0:
        sys.exit("tokenize failed after kills")
    return outs_of(folder)


def memory_of(pid: int) -> dict[int, float]:
    """MB of each process, the stage's first. Pages of mapped files are the system's and can be dropped."""
    found = {}
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return {}
    for process in (pid, *(int(child) for child in children)):
        try:
            status = Path(f"/proc/{process}/status").read_text()
            if "resource_tracker" in Path(f"/proc/{process}/cmdline").read_text():
                continue  # multiprocessing's own, of 6 MB
        except FileNotFoundError:
            continue
        if match := re.search(r"RssAnon:\s+(\d+) kB", status):
            found[process] = int(match[1]) * 1024 / 1e6
    return found


def outs_of(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted((folder / "data/tokens").iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def bare_loop(tokenizer: Path, corpus: Path, threads: int) -> tuple[float, float]:
    """MB/s, and MB per second of CPU, of the tokenizers library alone."""
    parallel = {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}
    first = str(min(corpus.glob("*.parquet")))
    command = [sys.executable, "-c", _BARE, str(tokenizer), first, str(_BARE_SECONDS)]
    output = subprocess.run(command, env=os.environ | parallel, check=True, capture_output=True, text=True)
    wall, cpu = (float(value) for value in output.stdout.split())
    return wall, cpu


def draw(run: Run, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    pids = list(dict.fromkeys(pid for _, _, memory in run.samples for pid in memory))
    for number, pid in enumerate(pids):
        points = [(done, memory[pid]) for _, done, memory in run.samples if pid in memory and done > 0]
        label = "main process (merges)" if number == 0 else f"worker {number}"
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.5)
    total = [(done, sum(memory.values())) for _, done, memory in run.samples if done > 0 and memory]
    axes.plot(*zip(*total, strict=True), label="all", color="black", linewidth=1.5)
    axes.set(
        xlabel="text encoded (MB)", ylabel="resident memory of its own (MB)", xlim=(0, None), ylim=(0, None)
    )
    axes.set_title(f"Tokenizing with {run.workers} workers: memory does not grow with the corpus", loc="left")
    axes.legend(frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.0, help="text to generate, in GiB (2)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="(all cores)")
    parser.add_argument("--compare", default="", metavar="N,M", help="tokenize again with so many workers")
    parser.add_argument("--kills", type=int, default=0, help="and again, killed so often")
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--scratch", type=Path, help="a folder on a disk with about 2x the text free")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figure and the table go")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="tokenize_scale_", dir=options.scratch) as scratch:
        corpus, first = Path(scratch, "corpus"), Path(scratch, "first")
        for folder in (corpus, first):
            folder.mkdir()
        num_bytes = generate(corpus, int(options.gib * 2**30))
        write_params(first, corpus, options.vocab_size)
        run = tokenize(first, options.workers)
        rates = {n: bare_loop(first / "data/tokens/tokenizer.json", corpus, n) for n in {1, options.workers}}
        meta = json.loads((first / "data/tokens/meta.json").read_text())
        same = compare(Path(scratch), corpus, run, options)
        options.out.mkdir(parents=True, exist_ok=True)
        draw(run, options.out / "tokenize_scale.png")
        text = table(run, num_bytes, meta, rates, same)
        (options.out / "tokenize_scale.md").write_text(text)
        print(text)


def compare(scratch: Path, corpus: Path, wanted: Run, options: argparse.Namespace) -> list[str]:
    """What gave the same bytes, in words; exits where something did not."""
    same = []
    for workers in [int(number) for number in options.compare.split(",") if number]:
        folder = fresh_folder(scratch, corpus, options.vocab_size)
        other = tokenize(folder, workers)
        if other.outs != wanted.outs:
            sys.exit(f"{workers} workers gave other bytes than {wanted.workers}")
        same.append(f"{workers} worker{'s' if workers > 1 else ''} ({other.seconds:.0f} s)")
    if options.kills:
        folder = fresh_folder(scratch, corpus, options.vocab_size)
        if tokenize_killed(folder, options.workers, options.kills, wanted.seconds) != wanted.outs:
            sys.exit("a run that was killed gave other bytes")
        same.append(f"{options.kills} kills")
    return same


def fresh_folder(scratch: Path, corpus: Path, vocab_size: int) -> Path:
    folder = scratch / "again"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_params(folder, corpus, vocab_size)
    return folder


def table(
    run: Run, num_bytes: int, meta: dict[str, Any], rates: dict[int, tuple[float, float]], same: list[str]
) -> str:
    tokens = sum(split["tokens"] for split in meta["splits"].values())
    main_peak, *worker_peaks = run.peaks
    lines = [
        "# Tokenizing at scale",
        "",
        f"`python -m benchmarks.tokenize_scale`: {num_bytes / 2**30:.2f} GiB of text, {tokens:,} tokens, "
        f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}.",
        "",
        "| | MB/s | MB per CPU second |",
        "| --- | ---: | ---: |",
        f"| the stage, {run.workers} workers, from the first token to the published files | "
        f"{num_bytes / 1e6 / run.encoding_seconds:.2f} | {num_bytes / 1e6 / run.cpu_seconds:.2f} (with "
        "learning the tokenizer) |",
    ]
    for threads, (wall, cpu) in sorted(rates.items()):
        name = f"bare `encode_batch_fast` loop, {threads} thread{'s' if threads > 1 else ''}"
        lines.append(f"| {name} | {wall:.2f} | {cpu:.2f} |")
    workers = ", ".join(f"{peak:.0f}" for peak in worker_peaks) or "none"
    lines += [
        "",
        f"Seconds in all: {run.seconds:.0f}. Peak memory of its own: main process {main_peak:.0f} MB "
        f"(learns the tokenizer, then merges), workers {workers} MB.",
    ]
    if same:
        lines += ["", f"The same bytes: {', '.join(same)}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
