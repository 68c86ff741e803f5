"""Tensors that several ranks hold together, to disk and back: PyTorch's distributed checkpoint (DCP).

Each rank writes what it has into files of its own; where all have the same, they share the work out.

    shard-00001-model-00001-of-00002.safetensors    of the first rank, its first file
    shard-00002-model-00001-of-00002.safetensors    of the second rank
    ...

DCP's usual files are pickles. These are safetensors, by DCP's Hugging Face writer: nothing in them could
run code. Names are those of our own modules, because a fused matrix is cut over the ranks elsewhere than
into Hugging Face's. Any number of ranks can read them, each the rows that it needs.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stages.training.ranks import Ranks

if TYPE_CHECKING:  # one rank alone need not import it
    from torch.distributed.tensor import DTensor

CANNOT = (OSError, MemoryError, RuntimeError)
"""What keeps a checkpoint from being made: the disk, or host memory for the copy."""

_PATIENCE = timedelta(hours=2)
"""How long the writing threads wait for one whose disk is slow. Who is gone is noticed at once."""

_FILE_BYTES = 2**30
"""Of one rank's file, about. The writer makes a file in memory, twice, before it goes to the disk."""


def is_distributed(folder: Path) -> bool:
    return any(folder.glob("shard-*.safetensors"))


def is_cut_up(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a rank has some rows of a tensor, as FSDP cuts them, or all of it."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if is_cut_up(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor, on the ranks' devices; all must ask together."""
    tensor = tensor.detach()
    if not is_cut_up(tensor):
        return tensor
    # What is kept in host memory travels over the devices as well, which is faster.
    on_device: Any = tensor.to(tensor.device_mesh.device_type)
    return on_device.full_tensor()


def local_rows(shape: torch.Size, like: Tensor) -> slice:
    """Which rows of a tensor of `shape` this rank has, if it is cut up as `like` is."""
    if not shape or not is_cut_up(like):
        return slice(0, shape[0] if shape else 1)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(shape, like.device_mesh, like.placements)
    return slice(offsets[0], offsets[0] + sizes[0])


def from_local_part(part: Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    """The tensor of `shape` of which each rank has a `part`, cut up as `like` is; in the same memory.

    A scalar is never cut up. Unlike `DTensor.from_local` this leaves the part on its device, also in host
    memory where the ranks' devices are GPUs.
    """
    if not shape or not is_cut_up(like):
        return part
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shape, stride, part.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)


def share_of_rank(tensors: Mapping[str, Tensor], ranks: Ranks, *, copy: bool) -> dict[str, Tensor]:
    """What this rank is to write of tensors that all ranks name alike, in host memory.

    Args:
        tensors: cut up or, alike on all ranks, whole.
        ranks: each gets about the same number of bytes of what is whole.
        copy: also of what is in host memory already.
    """
    share: dict[str, Tensor] = {}
    bytes_of_rank = [0] * ranks.count
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        part = local_part(tensor)
        if not is_cut_up(tensor):
            writer = bytes_of_rank.index(min(bytes_of_rank))
            bytes_of_rank[writer] += part.nbytes
            if writer != ranks.rank:
                continue
        if part.numel():  # more ranks than rows: some have none
            part = part.to("cpu", copy=copy).contiguous()
            share[name] = from_local_part(part, tensor.shape, tensor)
    return share


T = TypeVar("T")


class WritingRanks:
    """The threads that write for the ranks, one of each, over connections of their own.

    Training talks meanwhile and is not in their way. All must call every method together.
    """

    def __init__(self, ranks: Ranks):
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._count = ranks.count

    def from_first(self, value: T) -> T:
        """The first rank's value."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    @contextlib.contextmanager
    def all_can(self) -> Iterator[None]:
        """Around what each rank does: at its end each waits until all have done it.

        Raises:
            OSError: one rank could not, the same error on all.
            RuntimeError: one rank is gone or does not answer.
        """
        problem = None
        try:
            yield
        except CANNOT as error:
            problem = str(as_os_error(error))
        problems: list[str | None] = [None] * self._count
        dist.all_gather_object(problems, problem, group=self._group)
        for problem in problems:
            if problem is not None:
                raise OSError(problem)

    def write(self, share: Mapping[str, Tensor], folder: Path, files: Mapping[str, int]) -> None:
        """Write every rank's share into `folder`, which exists.

        Args:
            share: of this rank, in host memory.
            folder: for all ranks the same, on a disk that they share.
            files: `files_of` of all tensors.

        Raises:
            OSError: on every rank, if one could not write.
            RuntimeError: one rank is gone or does not answer.
        """
        from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageWriter, save
        from torch.distributed.checkpoint.api import CheckpointException

        writer = HuggingFaceStorageWriter(str(folder), dict(files), save_distributed=True)
        writer.per_thread_copy_ahead = 0  # all is in host memory: a thread of its own need not touch a GPU
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            save(dict(share), storage_writer=writer, planner=planner, process_group=self._group)
        except CheckpointException as error:
            raise OSError(f"{folder} cannot be written: {_words(error)}") from None


def files_of(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, int]:
    """In which of a rank's files each tensor goes, from 1: no file much over 1 GiB."""
    files: dict[str, int] = {}
    index, filled = 1, 0
    for name, tensor in tensors.items():
        # Of what is whole one rank has all and the others nothing: on average the same.
        part = tensor.numel() * tensor.element_size() // ranks.count
        if filled and filled + part > _FILE_BYTES:
            index, filled = index + 1, 0
        files[name] = index
        filled += part
    return files


def stored_layout(folder: Path) -> dict[str, Tensor]:
    """Names, shapes and types of the tensors in `folder`, in tensors without memory.

    Raises:
        OSError: a file cannot be read or rows of a tensor are in none of them.
    """
    from safetensors import SafetensorError, safe_open
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                continue
        except (OSError, SafetensorError) as error:
            raise OSError(f"{file} cannot be read: {error}") from None
    layout: dict[str, Tensor] = {}
    try:
        stored_tensors: Mapping[str, Any] = (
            HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        )
        for name, stored in stored_tensors.items():
            _check_rows(name, stored)
            layout[name] = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
    except Exception as error:  # whatever foreign bytes make of the reader
        raise OSError(f"{folder} cannot be read: {str(error) or type(error).__name__}") from None
    return layout


def read_parts(folder: Path, layout: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of each tensor, in host memory; every rank reads for itself.

    Args:
        folder: what `WritingRanks.write` wrote.
        layout: what `stored_layout` says of it.
        like: for each name a tensor that is cut up as the one that is read.

    Raises:
        OSError: a file cannot be read.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.api import CheckpointException

    parts: dict[str, Tensor] = {}
    wanted: dict[str, Any] = {}
    for name, stored in layout.items():
        rows = local_rows(stored.shape, like[name])
        shape = (rows.stop - rows.start, *stored.shape[1:]) if stored.dim() else ()
        parts[name] = torch.empty(shape, dtype=stored.dtype)
        if parts[name].numel():
            wanted[name] = from_local_part(parts[name], stored.shape, like[name])
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings(
            action="ignore", category=UserWarning
        ):  # that the ranks do not meet here
            load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), planner=planner, no_dist=True)
    except CheckpointException as error:
        raise OSError(f"{folder} cannot be read: {_words(error)}") from None
    return parts


def as_os_error(error: BaseException) -> OSError:
    return error if isinstance(error, OSError) else OSError(str(error) or type(error).__name__)


def _check_rows(name: str, stored: Any) -> None:
    """Every row must be there once: DCP reads over a gap without a word."""
    if not len(stored.size):
        if len(stored.chunks) != 1:
            raise ValueError(f"{name} is there {len(stored.chunks)} times")
        return
    rows = 0
    for chunk in sorted(stored.chunks, key=lambda chunk: chunk.offsets):
        if (
            tuple(chunk.offsets) != (rows, *[0] * (len(stored.size) - 1))
            or chunk.sizes[1:] != stored.size[1:]
        ):
            break
        rows += chunk.sizes[0]
    if (
        rows != stored.size[0]
        or sum(math.prod(chunk.sizes) for chunk in stored.chunks) != stored.size.numel()
    ):
        raise ValueError(f"rows {rows} and on of {name} are in no file, or in two")


def _words(error: BaseException) -> str:
    """What DCP's exception is about, without the tracebacks of every rank."""
    failures: Mapping[int, tuple[BaseException, Any]] = getattr(error, "failures", {})
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(failures.items())) or str(error)
