"""One contender in a process of its own, and what came of it."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.contenders.job import Job, Result, read_result, write_job
from benchmarks.peer_environments import error_line
from benchmarks.peer_works import OPTIMIZER, Technique, Work

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "frugal": "benchmarks.contenders.frugal",
    "trainer": "benchmarks.contenders.trainer",
    "litgpt": "benchmarks.contenders.litgpt_loop",
    "tutorial": "benchmarks.contenders.tutorial",
}
SWITCHED_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "3000",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
}
"""On a CPU, for a peer with every switch on: what this project sets for itself (stages/__init__.py and
stages/measure/host_allocator.py), as a peer's user could in the shell."""


@dataclass(frozen=True)
class Entry:
    """A contender as it comes, or with every one-line switch that helps."""

    contender: str
    switched: bool

    @property
    def name(self) -> str:
        return f"{self.contender}{' +' if self.switched else ''}"


@dataclass(frozen=True)
class Failure:
    """A run that gave no result; one clear line."""

    reason: str
    out_of_memory: bool = False


@dataclass(frozen=True)
class Machine:
    """What does not change over the runs."""

    device: str
    threads: int
    float32_matmul_precision: str
    pythons: dict[str, Path]
    """The interpreter of each contender."""
    scratch: Path
    """In a folder that stays; there, failed-CONTENDER.txt is what the contender's last failed run said."""
    timeout_seconds: float
    seed: int


def job_of(
    work: Work,
    technique: Technique,
    entry: Entry,
    machine: Machine,
    data: Path,
    warmup_steps: int,
    steps: int,
) -> Job:
    """The job at the work's largest micro-batch; `started` and the paths of the process are `run`'s."""
    return Job(
        contender=entry.contender,
        switched=entry.switched,
        model=work.model,
        vocab_size=work.vocab_size,
        sequence_length=work.sequence_length,
        micro_batch_size=work.micro_batch_size,
        accumulation_steps=technique.micro_batches,
        precision=technique.precision,
        recompute=technique.recompute,
        compiled=technique.compiled,
        warmup_steps=warmup_steps,
        steps=steps,
        seed=machine.seed,
        device=machine.device,
        threads=machine.threads,
        float32_matmul_precision="high"
        if technique.precision == "tf32"
        else machine.float32_matmul_precision,
        memory_limit_bytes=work.memory_limit_bytes if machine.device == "cuda" else None,
        data=str(data),
        scratch="",
        result="",
        started=0.0,
        **OPTIMIZER,
    )


def smaller(job: Job, work: Work) -> Job | None:
    """The same global batch in the work's next smaller micro-batches; None where there is none."""
    sizes = [size for size in work.micro_batch_sizes if size < job.micro_batch_size]
    if not sizes:
        return None
    return replace(job, micro_batch_size=sizes[0], accumulation_steps=job.global_batch_size // sizes[0])


def run(job: Job, machine: Machine, compile_cache: Path) -> Result | Failure:
    """Start the contender, wait for it, read what it measured.

    Args:
        compile_cache: where torch.compile keeps what it made. Emptied where the run does not come to its end:
            a library that is half written is found again and ends every later run.
    """
    outcome: Result | Failure = Failure("was stopped")
    try:
        with tempfile.TemporaryDirectory(dir=machine.scratch) as place:
            job = replace(job, scratch=f"{place}/scratch", result=f"{place}/result.json")
            output = _run_module(job, machine, Path(place), compile_cache)
            try:
                outcome = output if isinstance(output, Failure) else read_result(Path(job.result))
            except (FileNotFoundError, ValueError, TypeError):
                outcome = Failure(f"ended without a result: {error_line(str(output))}")
    finally:
        if isinstance(outcome, Failure):
            shutil.rmtree(compile_cache, ignore_errors=True)
    return outcome


def _run_module(job: Job, machine: Machine, place: Path, compile_cache: Path) -> str | Failure:
    """The process's standard error, or why it failed."""
    path, errors = place / "job.json", place / "stderr.txt"
    Path(job.scratch).mkdir(parents=True, exist_ok=True)
    python = machine.pythons[job.contender]
    environment = environment_of(job, compile_cache)
    with errors.open("w") as stderr:
        write_job(replace(job, started=time.monotonic()), path)
        process = subprocess.Popen(
            (str(python), "-m", MODULES[job.contender], str(path)),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=machine.timeout_seconds)
        except subprocess.TimeoutExpired:
            return Failure(f"not ready after {machine.timeout_seconds:.0f} s")
        finally:
            _end(process)
    text = errors.read_text(errors="replace")
    if code == 0:
        return text
    shutil.copyfile(errors, machine.scratch.parent / f"failed-{job.contender}.txt")
    out_of_memory = "OutOfMemoryError" in text or "out of memory" in text
    if code < 0:
        return Failure(f"ended by {signal.Signals(-code).name}", out_of_memory or -code == signal.SIGKILL)
    return Failure("out of memory" if out_of_memory else error_line(text)[:200], out_of_memory)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of it may run beside the next contender, the compiler's workers included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def environment_of(job: Job, compile_cache: Path) -> dict[str, str]:
    """The environment of the contender's process: this one's, without what would change a measurement."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("OMP_", "KMP_", "GOMP_", "MKL_", "MALLOC_", "TORCH", "PYTORCH_"))
    }
    set_here = {
        "OMP_NUM_THREADS": str(job.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(compile_cache),
        "TRITON_CACHE_DIR": str(compile_cache / "triton"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if job.switched and job.contender != "frugal" and job.device == "cpu":
        set_here |= SWITCHED_ENVIRONMENT
    return kept | set_here
