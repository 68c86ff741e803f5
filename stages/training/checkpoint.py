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
from stages.training.optimizer_state import state_layout
from stages.training.state import TrainState

FORMAT = 2
MODEL, OPTIMIZER, RNG, STATE = "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Snapshot:
    """A state at one moment, in host memory and in the form it has on disk."""

    tensors: dict[str, dict[str, Tensor]]
    """By file name, then by tensor name."""
    scalars: dict[str, Any]


def take_snapshot(state: TrainState, *, copy: bool = True) -> Snapshot:
    """Every field of `state`, waiting for the device once.

    With `copy` the snapshot stays as it is while training goes on. Without, tensors that are in host
    memory are shared, for a snapshot that is written before the next step.
    """
    weights = to_hugging_face(state.model.state_dict(), state.model.params)
    kept = {name: state.optimizer.state.get(p, {}) for name, p in state.model.named_parameters()}
    return Snapshot(
        {
            MODEL: _on_disk(weights, copy),
            OPTIMIZER: _on_disk(_optimizer_to_hugging_face(kept, state.model), copy),
            RNG: _rng_tensors(_device(state)),
        },
        _scalars(state),
    )


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
    (folder / STATE).write_text(json.dumps(snapshot.scalars, indent=1, sort_keys=True) + "\n")


def save_checkpoint(state: TrainState, folder: Path) -> None:
    """Write every field of `state` into `folder`, which must exist and be empty."""
    write_snapshot(take_snapshot(state, copy=False), folder)


def load_checkpoint(state: TrainState, folder: Path) -> None:
    """Put what `save_checkpoint` wrote into a freshly made `state` of the same shape.

    Everything is read and checked before the first field changes. Tensors are read to the CPU: a second
    copy on the GPU would not fit where training fitted.

    Raises:
        CheckpointError: a file is missing, cut short, or from another model, optimizer or precision;
            `state` is as it was.
    """
    model = state.model
    scalars = _read_scalars(folder / STATE, _scalars(state))
    weights, kept, rng = (_read_tensors(folder / name) for name in (MODEL, OPTIMIZER, RNG))
    _check_names_and_shapes(folder / MODEL, weights, to_hugging_face(model.state_dict(), model.params))
    _check_types(folder / MODEL, weights, to_hugging_face(model.state_dict(), model.params))
    # Optimizers make their state in the first step.
    layout = {
        name: state_layout(state.optimizer, p) if scalars["step"] else {}
        for name, p in model.named_parameters()
    }
    expected = _optimizer_to_hugging_face(layout, model)
    _check_names_and_shapes(folder / OPTIMIZER, kept, expected)
    _check_types(folder / OPTIMIZER, kept, expected)
    generators = _rng_tensors(_device(state))
    _check_names_and_shapes(folder / RNG, rng, generators)
    _check_types(folder / RNG, rng, generators)

    model.load_state_dict(from_hugging_face(weights, model.params))
    _restore_optimizer(state, kept)
    state.schedule.restore(scalars["schedule_steps_taken"])
    if state.scaler.is_enabled():
        state.scaler.load_state_dict(scalars["scaler"])
    state.step, state.tokens = scalars["step"], scalars["tokens"]
    state.skipped_steps.fill_(scalars["skipped_steps"])
    state.skipped_in_a_row.fill_(scalars["skipped_in_a_row"])
    state.losses_since_row.fill_(scalars["losses_since_row"])
    state.loss_since_row.fill_(scalars["loss_since_row"])
    torch.set_rng_state(rng["torch_cpu"])
    if "torch_cuda" in rng:
        torch.cuda.set_rng_state(rng["torch_cuda"], _device(state))


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


def _on_disk(tensors: dict[str, Tensor], copy: bool) -> dict[str, Tensor]:
    on_cpu = {name: tensor.detach().to("cpu", copy=copy).contiguous() for name, tensor in tensors.items()}
    # A scalar that went to all pieces of a split matrix is one tensor; safetensors wants one each.
    return {name: tensor if tensor.dim() else tensor.clone() for name, tensor in on_cpu.items()}


def _optimizer_to_hugging_face(kept: Mapping[str, Mapping[str, Tensor]], model: Llama) -> dict[str, Tensor]:
    """From {parameter name: {key: tensor}} to {"key.name": tensor}; all keys are cut by rows like weights."""
    by_key: dict[str, dict[str, Tensor]] = {}
    for name, tensors in kept.items():
        for key, tensor in tensors.items():
            by_key.setdefault(key, {})[name] = tensor
    return {
        f"{key}.{name}": tensor
        for key, tensors in by_key.items()
        for name, tensor in to_hugging_face(tensors, model.params).items()
    }


def _restore_optimizer(state: TrainState, kept: Mapping[str, Tensor]) -> None:
    by_key: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in kept.items():
        key, _, name = full_name.partition(".")
        by_key.setdefault(key, {})[name] = tensor
    own = {key: from_hugging_face(tensors, state.model.params) for key, tensors in by_key.items()}
    for name, parameter in state.model.named_parameters():
        # Copied also on the CPU, or the state would live in the mapped file.
        state.optimizer.state[parameter] = {
            key: tensors[name].to(parameter.device, copy=True)
            for key, tensors in own.items()
            if name in tensors
        }


def _device(state: TrainState) -> torch.device:
    return state.model.embed_tokens.weight.device


def _rng_tensors(device: torch.device) -> dict[str, Tensor]:
    tensors = {"torch_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["torch_cuda"] = torch.cuda.get_rng_state(device)
    return tensors
