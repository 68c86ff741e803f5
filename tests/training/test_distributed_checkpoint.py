"""Several ranks' checkpoints: what one count of ranks saved, any other goes on from, to the bit."""

import json
import os
import pickle
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.multiprocessing import ProcessExitedException

from stages.data.sequences import make_sequences
from stages.data.token_files import TokenFile
from stages.measure.compilation import CompileWatch
from stages.measure.throughput import StepTimer
from stages.training import checkpoint_store, distributed_checkpoint
from stages.training.checkpoint import MODEL, OPTIMIZER, RNG, STATE, CheckpointError, load_checkpoint
from stages.training.checkpoint import save_checkpoint as save_alone
from stages.training.checkpoint_store import CheckpointStore
from stages.training.checksums import CHECKSUMS, PROGRESS, checksums_of, read_checked
from stages.training.loop import Measurements, training_steps
from stages.training.parallel import Parallel
from stages.training.ranks import ALONE, Ranks
from stages.training.state import TrainState, initial_state
from tests.training.rank_runs import start_ranks
from tests.training.small_run import CPU, small_params, token_file

FILES = {MODEL, OPTIMIZER, RNG, STATE}
FIRST_SHARD, SECOND_SHARD = (f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2))
TECHNIQUES: dict[str, dict[str, Any]] = {
    "ddp": {},
    # Codes and scales: of another type and shape than their weight.
    "ddp, 8 bits": {"optimizer": "adamw_8bit"},
    "fsdp": {"parallelism": "fsdp"},
}


class Run:
    """A small training by `ranks`; `train` goes on with it."""

    def __init__(self, folder: Path, ranks: Ranks, kind: str = "ddp", **training: Any):
        techniques = {"micro_batch_size": 1, **TECHNIQUES[kind]}
        # Three ranks cut 260 rows into 87, 87 and 86.
        batch = {"global_batch_size": 6, "token_budget": 20 * 6 * 16, "log_every_steps": 1}
        self.params = small_params(techniques, **{**batch, "ranks": ranks.count, **training})
        self.ranks = ranks
        self.state, self.policy = initial_state(self.params, "v", CPU, ranks)
        self.parallel = Parallel(self.state.model, self.params.variants["v"], ranks)
        tokens = TokenFile.open(folder / "train.safetensors")
        self.sequences = make_sequences(tokens, "packed", 16)

    def train(self, steps: int) -> "Run":
        stop = self.state.step + steps
        rows = training_steps(
            self.state,
            self.sequences,
            self.params,
            "v",
            self.policy,
            Measurements(StepTimer(), CompileWatch(enabled=False)),
            parallel=self.parallel,
        )
        while self.state.step < stop:
            next(rows)
        rows.close()
        return self


def contents(folder: Path) -> dict[str, bytes]:
    """Of a checkpoint in the form that one rank writes, without what the store adds."""
    return {name: (folder / name).read_bytes() for name in sorted(FILES)}


def of_one(state: TrainState, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    save_alone(state, folder)
    return contents(folder)


def flip_last_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def store_in(folder: Path, ranks: Ranks, keep: int = 2) -> CheckpointStore:
    if ranks.is_first:
        folder.mkdir(parents=True)
    ranks.gather(None)
    return CheckpointStore(folder, keep, ranks)


# What several ranks do. `whole` is the one rank's form of what was saved as `shares`.

SEVERAL_FILES = "ddp"
SAVED = ["ddp", "ddp, 8 bits", "fsdp"]
READ = {
    "1 -> ddp": ("alone", "ddp"),
    "1 -> fsdp": ("alone", "fsdp"),
    "ddp -> fsdp": ("shares/ddp", "fsdp"),
    "fsdp -> ddp": ("shares/fsdp", "ddp"),
    "fsdp -> fsdp": ("shares/fsdp", "fsdp"),
    "whole -> fsdp": ("whole/fsdp", "fsdp"),
    "8 bits": ("shares/ddp, 8 bits", "ddp, 8 bits"),
}


def _save(ranks: Ranks, folder: Path) -> None:
    for kind in SAVED:
        torch.rand(1 + ranks.rank)  # the first rank's generator is the one that counts
        run = Run(folder, ranks, kind).train(2)
        whole = store_in(folder / "whole" / kind, ranks)
        assert whole.save_now(run.state, {"kind": kind}, consolidated=True) == whole.checkpoints()[-1]
        shares = store_in(folder / "shares" / kind, ranks)
        distributed_checkpoint._FILE_BYTES = 2**30 if kind != SEVERAL_FILES else 2**15
        shares.save(run.state, {"kind": kind})
        run.train(1)  # while it is written
        shares.wait()
        warning = shares.take_warning()
        assert warning is None, warning
        assert shares.written_step == 2 and whole.written_step == 2, "known to every rank"
        assert sorted(path.name for path in shares.folder.iterdir()) == ["step-000000002"]
    _fail(ranks, folder / "failures", folder)
    _read(ranks, folder)


def _cases(count: int) -> dict[str, tuple[str, str]]:
    return {name: case for name, case in READ.items() if count == 2 or "-> fsdp" in name}


def _read(ranks: Ranks, folder: Path) -> None:
    for name, (source, kind) in [*_cases(ranks.count).items(), ("kept", ("alone", "fsdp"))]:
        torch.rand(1 + ranks.rank)
        run = Run(folder, ranks, kind)
        restored = CheckpointStore(folder / source, 2, ranks).restore(run.state)
        assert restored is not None and restored.damaged == ()
        assert restored.progress == {"kind": Path(source).name}
        generators = ranks.gather(torch.get_rng_state())
        assert all(torch.equal(generator, generators[0]) for generator in generators)
        again = store_in(folder / f"again by {ranks.count}" / name, ranks)
        again.save_now(run.state, {}, consolidated=True)
        again.save(run.train(1).state, {})
        again.wait()
        assert [path.name[-1] for path in again.checkpoints()] == ["2", "3"]
    last = CheckpointStore(again.folder, 1, ranks)
    last.save_now(run.train(1).state, {})
    assert [path.name[-1] for path in last.checkpoints()] == ["4"], "one is kept"


def _fail(ranks: Ranks, folder: Path, tokens: Path) -> None:
    run = Run(tokens, ranks, "fsdp").train(1)
    store = store_in(folder / "store", ranks, keep=3)
    store.save_now(run.state, {"at": 1})
    run.train(1)
    if ranks.rank == 1:
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    store.save(run.state, {"at": 2})
    store.wait()
    warning = store.take_warning()
    if ranks.is_first:
        assert warning is not None and "no checkpoint could be written" in warning, warning
        assert "rank 1" in warning and "File too large" in warning and "\n" not in warning, warning
    else:
        assert warning is None
    if ranks.is_first:  # which clears up
        assert [path.name for path in store.folder.iterdir()] == ["step-000000001"]
    with pytest.raises(OSError, match="File too large"):  # every rank is told
        store.save_now(run.state, {"at": 2})
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    # No memory for the copy on one rank.
    if ranks.rank == 1:
        take_share, checkpoint_store.take_share = checkpoint_store.take_share, _no_memory
    store.save(run.state, {"at": 2})
    store.wait()
    assert ("no memory" in (store.take_warning() or "")) is ranks.is_first
    if ranks.is_first:  # which clears up
        assert [path.name for path in store.folder.iterdir()] == ["step-000000001"]
    if ranks.rank == 1:
        checkpoint_store.take_share = take_share
    # Another process owns the name.
    if ranks.is_first:
        (store.folder / ".step-000000002").write_text("a file where a folder must be made")
    with pytest.raises(OSError, match="step-000000002"):
        store.save_now(run.state, {"at": 2})
    with pytest.raises(OSError, match="step-000000002"):
        store.save_now(run.state, {"at": 2}, consolidated=True)
    if ranks.is_first:
        (store.folder / ".step-000000002").unlink()
    store.take_warning()
    store.save(run.state, {"at": 2})
    store.wait()
    assert store.take_warning() is None and store.written_step == 2

    # Each to a disk of its own: the last rank's rows are not where the first one looks.
    apart = CheckpointStore(folder / f"disk of {ranks.rank}", 2, ranks)
    with pytest.raises(OSError, match="one disk that they share"):
        apart.save_now(run.state, {})

    # A damaged one, of the rank that does not check it.
    damaged = store.checkpoints()[-1]
    if ranks.is_first:
        shutil.copytree(store.folder, folder / "good")
        flip_last_bit(damaged / SECOND_SHARD)
    ranks.gather(None)
    fresh = Run(tokens, ranks, "fsdp")
    restored = store.restore(fresh.state)
    assert restored is not None and restored.progress == {"at": 1} and fresh.state.step == 1
    (problem,) = restored.damaged
    assert str(damaged / SECOND_SHARD) in problem
    # One of another model: refused by all, though each reads only its part.
    other = Run(tokens, ranks, "fsdp", model={"hidden_size": 64})
    before = other.state.model.state_dict()["norm.weight"].to_local().clone()
    with pytest.raises(CheckpointError, match=r"shard-.*embed_tokens.*has the shape"):
        store.restore(other.state)
    assert other.state.step == 0
    assert torch.equal(other.state.model.state_dict()["norm.weight"].to_local(), before)
    assert CheckpointStore(folder / "nothing", 2, ranks).restore(fresh.state) is None


def _read_and_die(ranks: Ranks, folder: Path) -> None:
    _read(ranks, folder)
    run = Run(folder, ranks, "fsdp").train(1)
    store = store_in(folder / "killed", ranks)
    store.save_now(run.state, {})
    run.train(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the others' end, when one is gone
    if ranks.rank == 1:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # its part is written, no more
    store.save(run.state, {})
    store.wait()
    if ranks.is_first:
        (folder / "warning").write_text(store.take_warning() or "none")
    with pytest.raises(RuntimeError, match="gloo"):  # who lost another rank is told so by the connection
        store.save_now(run.state, {})


def _no_memory(*_: object, **__: object) -> None:
    raise MemoryError("no memory")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two and three ranks saved and tried, beside a checkpoint of one rank in `alone`."""
    folder = tmp_path_factory.mktemp("saved")
    token_file(folder)
    CheckpointStore(folder / "alone", 2).save_now(Run(folder, ALONE).train(2).state, {"kind": "alone"})
    start_ranks(_save, 2, folder)
    with pytest.raises(ProcessExitedException):
        start_ranks(_read_and_die, 3, folder)
    return folder


@pytest.mark.parametrize("kind", SAVED)
def test_one_rank_goes_on_from_what_two_saved(saved: Path, tmp_path: Path, kind: str) -> None:
    """One rank that has read both parts writes the same bytes as the two that gathered them."""
    run = Run(saved, ALONE, "ddp" if kind == "fsdp" else kind)
    restored = CheckpointStore(saved / "shares" / kind, 2).restore(run.state)
    assert restored is not None and restored.progress == {"kind": kind}
    assert of_one(run.state, tmp_path / "again") == contents(saved / "whole" / kind / "step-000000002")
    run.train(1)


@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_ranks_goes_on_from_either_form(saved: Path, count: int) -> None:
    for name, (source, _) in _cases(count).items():
        found = contents(saved / f"again by {count}" / name / "step-000000002")
        assert found == contents(saved / source.replace("shares", "whole") / "step-000000002"), name


@pytest.mark.parametrize("kind", SAVED)
def test_the_work_is_shared_out_and_nothing_is_pickled(saved: Path, kind: str) -> None:
    folder = saved / "shares" / kind / "step-000000002"
    shards = sorted(folder.glob("shard-*.safetensors"))
    others = {file.name for file in folder.iterdir()} - {shard.name for shard in shards}
    assert others == {STATE, PROGRESS, CHECKSUMS}
    for name in others:
        json.loads((folder / name).read_text())
    if kind != SEVERAL_FILES:
        assert [shard.name for shard in shards] == [FIRST_SHARD, SECOND_SHARD]
    else:
        assert len(shards) > 10
    sizes = {"shard-00001": 0, "shard-00002": 0}
    for shard in shards:
        with safe_open(shard, "pt") as opened:
            size = sum(opened.get_tensor(tensor).nbytes for tensor in opened.keys())  # noqa: SIM118
        sizes[shard.name[:11]] += size
        assert kind != SEVERAL_FILES or size < 3 * 2**15
    assert abs(sizes["shard-00001"] - sizes["shard-00002"]) < 0.1 * sum(sizes.values())


def _payload_folder(source: Path, folder: Path, files: dict[str, bytes]) -> CheckpointStore:
    """A checkpoint with other files in it, and checksums that say it is whole."""
    place = folder / source.name
    shutil.copytree(source, place)
    for name, content in files.items():
        (place / name).write_bytes(content)
    (place / CHECKSUMS).unlink()
    (place / CHECKSUMS).write_text(json.dumps(checksums_of(place)))
    read_checked(place)
    return CheckpointStore(folder, 2)


class _Payload:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_pickle_in_it_does_not_run(saved: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    payload = pickle.dumps(_Payload(ran))
    pickle.loads(payload)
    assert ran.exists(), "the payload must be one"
    ran.unlink()
    torch.save(_Payload(ran), tmp_path / "saved")
    source = saved / "shares" / "fsdp" / "step-000000002"
    for number, content in enumerate((payload, (tmp_path / "saved").read_bytes())):
        store = _payload_folder(source, tmp_path / f"shard {number}", {SECOND_SHARD: content})
        with pytest.raises(CheckpointError, match="shard-00002"):
            store.restore(Run(saved, ALONE).state)
    # Where DCP by itself would look first.
    extra = {".metadata": payload, "__0_0.distcp": (tmp_path / "saved").read_bytes()}
    state = Run(saved, ALONE).state
    assert _payload_folder(source, tmp_path / "metadata", extra).restore(state) is not None
    assert state.step == 2
    assert not ran.exists()


def test_a_part_that_is_missing_or_twice_there_is_seen(saved: Path, tmp_path: Path) -> None:
    """With checksums that are right: DCP alone reads over a gap and leaves what was in memory."""
    source = saved / "shares" / "fsdp" / "step-000000002"
    for number, (removed, added) in enumerate(
        [(SECOND_SHARD, {}), (FIRST_SHARD, {}), (STATE, {}), ("", {"shard-00003.safetensors": SECOND_SHARD})]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        for name, original in added.items():
            shutil.copy(source / original, folder / name)
        if removed:
            (folder / removed).unlink()
        with pytest.raises(CheckpointError):
            load_checkpoint(Run(saved, ALONE).state, folder)


def test_a_rank_that_is_killed_while_saving_leaves_nothing_under_its_name(saved: Path) -> None:
    warning = (saved / "warning").read_text()
    assert "no checkpoint could be written (another rank is gone" in warning, warning
    store = CheckpointStore(saved / "killed", 2)
    assert [path.name for path in store.checkpoints()] == ["step-000000001"]
    run = Run(saved, ALONE)
    assert store.restore(run.state) is not None
    assert run.state.step == 1
