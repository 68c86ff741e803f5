"""The full training checkpoint: a folder from which training goes on as if it had never stopped.

| file | what it holds |
| --- | --- |
| model.safetensors | weights in the type they train in, under Hugging Face's names and shapes |
| optimizer.safetensors | moments (or their 8-bit codes and scales) and step counts, under the same names |
| rng.safetensors | states of torch's generators, the CPU's and the training device's |
| state.json | step, tokens, schedule, GradScaler, version of torch |

There is no pickle in it: nothing that could run code, and the same state is always the same bytes, which
is what makes two runs comparable by hash (`torch.save` writes the file's name and the identity of
strings into the file). Stochastic rounding draws from torch's generators, so they are part of the result.

Python's and numpy's global generators are not in it: nothing in training draws from them (the order of
the data is a function of seed and step), but libraries beside it do, so their state is not a result.

Several ranks in the middle of a training write another form of it, each its part of the tensors
(stages/training/distributed_checkpoint.py), beside one state.json. Any number of ranks can read either
form. The generators' states are the first rank's: what is drawn from them is drawn alike on all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.model.hugging_face import from_hugging_face, to_hugging_face
from stages.model.llama import Llama
from stages.training.distributed_checkpoint import (
    files_of,
    is_distributed,
    read_parts,
    share_of_rank,
    stored_layout,
    whole,
)
from stages.training.ranks import ALONE, Ranks
from stages.training.state import TrainState
from stages.training.state_tensors import (
    cut_up_like,
    hugging_face_tensors,
    own_layout,
    own_tensors,
    part_of,
    put_tensors,
)

FORMAT = 2
MODEL, OPTIMIZER, RNG, STATE = "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"
_GENERATOR = "rng."
"""Prefix of what the first rank writes beside the tensors of stages/training/state_tensors.py."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Snapshot:
    """A state at one moment, in host memory and in the form it has on disk."""

    tensors: dict[str, dict[str, Tensor]]
    """By file name, then by tensor name."""
    scalars: dict[str, Any]


@dataclass(frozen=True)
class Share:
    """One rank's part of a state at one moment, in host memory."""

    tensors: dict[str, Tensor]
    """By own name."""
    shapes: dict[str, torch.Size]
    """Of all ranks' tensors, whole."""
    files: dict[str, int]
    """Of the same, see `distributed_checkpoint.files_of`."""
    scalars: dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """A checkpoint that was read, and held against the state it is for, but is not yet in it."""

    scalars: dict[str, Any]
    parts: dict[str, Tensor]
    """By own name, in host memory: all of a tensor, or of one that is cut up what this rank has of it."""
    generators: dict[str, Tensor]


def take_snapshot(state: TrainState, *, copy: bool = True, ranks: Ranks = ALONE) -> Snapshot:
    """Every field of `state`, waiting for the device once.

    With `copy` the snapshot stays as it is while training goes on. Without, tensors that are in host
    memory are shared, for a snapshot that is written before the next step. All `ranks` must ask together;
    only the first is given the tensors, the others an empty snapshot.

    Raises:
        MemoryError: they do not fit in host memory; the other ranks do not notice.
        RuntimeError: they could not be gathered; the other ranks may wait.
    """
    own = _whole_tensors(own_tensors(state), copy, ranks.is_first)
    weights, kept = hugging_face_tensors(own, state.model)
    return Snapshot(
        {MODEL: _on_disk(weights), OPTIMIZER: _on_disk(kept), RNG: _rng_tensors(_device(state))},
        _scalars(state),
    )


def take_share(state: TrainState, ranks: Ranks, *, copy: bool = True) -> Share:
    """What this rank is to write of `state`; no rank waits for another.

    `copy` is that of `take_snapshot`.
    """
    own = own_tensors(state)
    generators = {_GENERATOR + name: tensor for name, tensor in _rng_tensors(_device(state)).items()}
    share = share_of_rank(own, ranks, copy=copy)
    if ranks.is_first:
        share |= generators
    every = {**own, **generators}
    shapes = {name: tensor.shape for name, tensor in every.items()}
    return Share(share, shapes, files_of(every, ranks), _scalars(state))


def write_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Write the files of a checkpoint into `folder`, which must exist and be empty.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    from safetensors import SafetensorError  # not needed to import the engine
    from safetensors.torch import save_file

    for name, tensors in snapshot.tensors.items():
        try:
            save_file(tensors, folder / name, {"format": "pt"} if name == MODEL else None)
        except SafetensorError as error:  # what it makes of the system's error
            raise OSError(f"{folder / name} cannot be written: {error}") from None
    write_scalars(snapshot.scalars, folder)


def write_scalars(scalars: dict[str, Any], folder: Path) -> None:
    """The part of a checkpoint that is no tensor."""
    (folder / STATE).write_text(json.dumps(scalars, indent=1, sort_keys=True) + "\n")


def check_share(share: Share, folder: Path) -> None:
    """Look whether all ranks' parts are in `folder`, by the files' headers alone.

    Raises:
        OSError: a part is missing.
    """
    found = stored_layout(folder)
    for name, shape in share.shapes.items():
        if name not in found or found[name].shape != shape:
            raise OSError(f"{folder} lacks rows of {name}: the ranks must write to one disk that they share")


def save_checkpoint(state: TrainState, folder: Path) -> None:
    """Write every field of `state` into `folder`, which must exist and be empty."""
    write_snapshot(take_snapshot(state, copy=False), folder)


def load_checkpoint(state: TrainState, folder: Path) -> None:
    """Put what `save_checkpoint` or several ranks wrote into a freshly made `state` of the same shape.

    Everything is read and checked before the first field changes. Of a state that is cut up over the ranks
    each reads and fills its part.

    Raises:
        CheckpointError: a file is missing, cut short, or from another model, optimizer or precision;
            `state` is as it was.
    """
    put_into_state(state, read_checkpoint(state, folder))


def read_checkpoint(state: TrainState, folder: Path) -> Reading:
    """Read a checkpoint, as far as this rank needs it, and check it against `state`, which does not change.

    Tensors are read to the CPU: a second copy on the GPU would not fit where training fitted.

    Raises:
        CheckpointError: see `load_checkpoint`.
    """
    scalars = _read_scalars(folder / STATE, _scalars(state))
    layout = own_layout(state, has_trained=scalars["step"] > 0)
    like = cut_up_like(state, layout)
    generators = _rng_tensors(_device(state))
    if is_distributed(folder):
        return Reading(scalars, *_read_shares(folder, layout, like, generators))
    files = {name: _read_tensors(folder / name) for name in (MODEL, OPTIMIZER, RNG)}
    weights, kept = hugging_face_tensors(layout, state.model)
    for name, expected in ((MODEL, weights), (OPTIMIZER, kept), (RNG, generators)):
        _check_names_and_shapes(folder / name, files[name], expected)
        _check_types(folder / name, files[name], expected)
    parts = {name: part_of(name, like[name], files[MODEL], files[OPTIMIZER], state.model) for name in layout}
    return Reading(scalars, parts, files[RNG])


def put_into_state(state: TrainState, reading: Reading) -> None:
    """Change every field of `state` to what was read for it."""
    scalars = reading.scalars
    put_tensors(state, reading.parts)
    state.schedule.restore(scalars["schedule_steps_taken"])
    if state.scaler.is_enabled():
        state.scaler.load_state_dict(scalars["scaler"])
    state.step, state.tokens = scalars["step"], scalars["tokens"]
    state.skipped_steps.fill_(scalars["skipped_steps"])
    state.skipped_in_a_row.fill_(scalars["skipped_in_a_row"])
    state.losses_since_row.fill_(scalars["losses_since_row"])
    state.loss_since_row.fill_(scalars["loss_since_row"])
    torch.set_rng_state(reading.generators["torch_cpu"])
    if "torch_cuda" in reading.generators:
        torch.cuda.set_rng_state(reading.generators["torch_cuda"], _device(state))


def load_weights(model: Llama, folder: Path) -> None:
    """Put a checkpoint's weights alone into `model`, in whatever type it has.

    Raises:
        CheckpointError: the file is missing, cut short, or from another model.
    """
    path = folder / MODEL
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; train the variant first")
    weights = _read_tensors(path)
    _check_names_and_shapes(path, weights, to_hugging_face(model.state_dict(), model.params))
    model.load_state_dict(from_hugging_face(weights, model.params))


def _scalars(state: TrainState) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "torch": torch.__version__.partition("+")[0],
        "step": state.step,
        "tokens": state.tokens,
        "skipped_steps": int(state.skipped_steps),
        "skipped_in_a_row": int(state.skipped_in_a_row),
        "losses_since_row": int(state.losses_since_row),
        "loss_since_row": float(state.loss_since_row),
        "schedule_steps_taken": int(state.schedule.steps_taken),
        "scaler": state.scaler.state_dict(),
    }


def _read_scalars(path: Path, own: dict[str, Any]) -> dict[str, Any]:
    """What `_scalars` wrote; `own` says which keys and types that is."""
    try:
        scalars = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(scalars, dict) or "format" not in scalars:
        raise CheckpointError(f"{path} is not a checkpoint's: it has no format")
    if scalars["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {scalars['format']}, this version reads {FORMAT}")
    for key, value in own.items():
        if type(scalars.get(key)) is not type(value):
            raise CheckpointError(f"{path}: {key} must be a {type(value).__name__}")
    if scalars["scaler"].keys() != own["scaler"].keys():
        raise CheckpointError(
            f"{path}: the scaler's state is {scalars['scaler'] or 'empty'} and this variant's precision "
            f"{'needs' if own['scaler'] else 'has none of'} {', '.join(own['scaler']) or 'it'}"
        )
    return scalars


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _check_names_and_shapes(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(f"{path} lacks {missing[0]}: it is of another model, optimizer or device")
    if unknown := sorted(found.keys() - expected.keys()):
        raise CheckpointError(f"{path} holds {unknown[0]}: it is of another model, optimizer or device")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} has the shape {list(found[name].shape)}, "
                f"this model's is {list(tensor.shape)}"
            )


def _check_types(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        if found[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"{path}: {name} is {found[name].dtype}, this variant's is {tensor.dtype}: "
                "it is of another precision"
            )


def _whole_tensors(tensors: Mapping[str, Tensor], copy: bool, keep: bool) -> dict[str, Tensor]:
    """Every tensor whole and in host memory. The ranks give each other their parts, one tensor at a time."""
    kept: dict[str, Tensor] = {}
    problem: Exception | None = None
    for name, tensor in tensors.items():
        gathered = whole(tensor)
        try:
            if keep and problem is None:
                kept[name] = gathered.to("cpu", copy=copy)
        except (MemoryError, RuntimeError) as error:
            problem = error  # the other ranks wait for this one's parts of the rest
    if problem is not None:
        raise MemoryError(str(problem)) from problem
    return kept


def _on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # A scalar that went to all pieces of a split matrix is one tensor; safetensors wants one each.
    return {name: tensor.contiguous() if tensor.dim() else tensor.clone() for name, tensor in tensors.items()}


def _read_shares(
    folder: Path, layout: Mapping[str, Tensor], like: Mapping[str, Tensor], generators: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    path = folder / "shard-*.safetensors"
    expected = {**layout, **{_GENERATOR + name: tensor for name, tensor in generators.items()}}
    try:
        found = stored_layout(folder)
        _check_names_and_shapes(path, found, expected)
        _check_types(path, found, expected)
        parts = read_parts(folder, found, {name: like.get(name, tensor) for name, tensor in expected.items()})
    except OSError as error:
        raise CheckpointError(str(error)) from None
    return parts, {name: parts.pop(_GENERATOR + name) for name in generators}


def _device(state: TrainState) -> torch.device:
    return state.skipped_steps.device  # with fsdp_cpu_offload the weights are in host memory


def _rng_tensors(device: torch.device) -> dict[str, Tensor]:
    tensors = {"torch_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["torch_cuda"] = torch.cuda.get_rng_state(device)
    return tensors
