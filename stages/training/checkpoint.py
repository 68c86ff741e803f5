"""The full training checkpoint: a folder from which training goes on as if it had never stopped.

| file | what it holds |
| --- | --- |
| model.safetensors | weights in fp32, under Hugging Face's names; loads in `transformers` as it is |
| optimizer.safetensors | AdamW's moments and step counts, under the same names |
| rng.safetensors | states of torch's generators, CPU and CUDA |
| state.json | step, tokens, schedule, GradScaler, version of torch |

There is no pickle in it: nothing that could run code, and the same state is always the same bytes, which
is what makes two runs comparable by hash (`torch.save` writes the file's name and the identity of
strings into the file).

Python's and numpy's global generators are not in it: nothing in training draws from them (the order of
the data is a function of seed and step), but libraries beside it do, so their state is not a result.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.model.hugging_face import from_hugging_face, to_hugging_face
from stages.model.llama import Llama
from stages.training.state import TrainState

FORMAT = 1
MODEL, OPTIMIZER, RNG, STATE = "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


def save_checkpoint(state: TrainState, folder: Path) -> None:
    """Write every field of `state` into `folder`, which must exist and be empty."""
    from safetensors.torch import save_file  # not needed to import the engine

    params = state.model.params
    save_file(_on_disk(to_hugging_face(state.model.state_dict(), params)), folder / MODEL, {"format": "pt"})
    moments = {
        f"{key}.{name}": tensor
        for key, tensors in _optimizer_tensors(state).items()
        for name, tensor in to_hugging_face(tensors, params).items()
    }
    save_file(_on_disk(moments), folder / OPTIMIZER)
    save_file(_rng_tensors(), folder / RNG)
    (folder / STATE).write_text(json.dumps(_scalars(state), indent=1, sort_keys=True) + "\n")


def load_checkpoint(state: TrainState, folder: Path) -> None:
    """Put what `save_checkpoint` wrote into a freshly made `state` of the same shape.

    Tensors are read to the CPU and copied into those that exist: a second copy on the GPU would not fit
    where training fitted.

    Raises:
        CheckpointError: a file is missing, cut short, or from another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        scalars = json.loads((folder / STATE).read_text())
        if scalars["format"] != FORMAT:
            raise CheckpointError(
                f"{folder / STATE}: format {scalars['format']}, this version reads {FORMAT}"
            )
        moments = load_file(folder / OPTIMIZER)
        rng = load_file(folder / RNG)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint: {error}") from None
    load_weights(state.model, folder)
    _restore_optimizer(state, moments)
    state.schedule.restore(scalars["schedule_steps_taken"])
    if state.scaler.is_enabled():
        state.scaler.load_state_dict(scalars["scaler"])
    state.step, state.tokens = scalars["step"], scalars["tokens"]
    state.skipped_steps.fill_(scalars["skipped_steps"])
    state.loss_since_row.fill_(scalars["loss_since_row"])
    _restore_rng(rng)


def load_weights(model: Llama, folder: Path) -> None:
    """Put a checkpoint's weights alone into `model`.

    Raises:
        CheckpointError: the file is missing, cut short, or from another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / MODEL
    try:
        model.load_state_dict(from_hugging_face(load_file(path), model.params))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; train the variant first") from None
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} does not hold this model's weights: {error}") from None


def _scalars(state: TrainState) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "torch": torch.__version__.partition("+")[0],
        "step": state.step,
        "tokens": state.tokens,
        "skipped_steps": int(state.skipped_steps),
        "loss_since_row": float(state.loss_since_row),
        "schedule_steps_taken": int(state.schedule.steps_taken),
        "scaler": state.scaler.state_dict(),
    }


def _on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    on_cpu = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    # A scalar that went to all pieces of a split matrix is one tensor; safetensors wants one each.
    return {name: tensor if tensor.dim() else tensor.clone() for name, tensor in on_cpu.items()}


def _optimizer_tensors(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state as {"exp_avg": {parameter name: tensor}, ...}."""
    by_key: dict[str, dict[str, Tensor]] = {}
    for name, parameter in state.model.named_parameters():
        for key, tensor in state.optimizer.state.get(parameter, {}).items():
            by_key.setdefault(key, {})[name] = tensor
    return by_key


def _restore_optimizer(state: TrainState, moments: dict[str, Tensor]) -> None:
    by_key: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in moments.items():
        key, _, name = full_name.partition(".")
        by_key.setdefault(key, {})[name] = tensor
    own = {key: from_hugging_face(tensors, state.model.params) for key, tensors in by_key.items()}
    for name, parameter in state.model.named_parameters():
        state.optimizer.state[parameter] = {
            key: tensors[name].to(parameter.device) for key, tensors in own.items() if name in tensors
        }


def _rng_tensors() -> dict[str, Tensor]:
    tensors = {"torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"torch_cuda_{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def _restore_rng(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["torch_cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"torch_cuda_{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"torch_cuda_{index}"], index)
