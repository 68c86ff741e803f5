"""The tensors of a `TrainState` under names of their own, and under Hugging Face's.

| own name | tensor |
| --- | --- |
| model.PARAMETER | a weight |
| optimizer.KEY.PARAMETER | what the optimizer keeps for that weight under KEY |
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from stages.model.hugging_face import from_hugging_face, to_hugging_face
from stages.model.llama import Llama
from stages.training.distributed_checkpoint import from_local_part, is_cut_up, local_part, local_rows
from stages.training.optimizer_state import state_layout
from stages.training.state import TrainState

_WEIGHT, _KEPT = "model.", "optimizer."


def own_tensors(state: TrainState) -> dict[str, Tensor]:
    """All weights and all that the optimizer keeps, by own name: in the same order on every rank."""
    tensors = {_WEIGHT + name: tensor for name, tensor in _weights(state.model).items()}
    for name, parameter in state.model.named_parameters():
        for key, tensor in state.optimizer.state.get(parameter, {}).items():
            tensors[f"{_KEPT}{key}.{name}"] = tensor
    return tensors


def own_layout(state: TrainState, *, has_trained: bool) -> dict[str, Tensor]:
    """Names, whole shapes and types that `own_tensors` has after a step, without memory."""
    tensors = {_WEIGHT + name: tensor for name, tensor in _weights(state.model).items()}
    if has_trained:  # optimizers make their state in the first step
        for name, parameter in state.model.named_parameters():
            for key, tensor in state_layout(state.optimizer, parameter).items():
                tensors[f"{_KEPT}{key}.{name}"] = tensor
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}


def cut_up_like(state: TrainState, layout: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For every own name the parameter that it belongs to: what is kept for it is cut up as it is."""
    parameters = dict(state.model.named_parameters())
    return {name: parameters[_split(name)[1]] for name in layout}


def hugging_face_tensors(
    own: Mapping[str, Tensor], model: Llama
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights, and what is kept for them as "KEY.NAME": all of it is cut by rows like the weight."""
    by_key: dict[str | None, dict[str, Tensor]] = {}
    for own_name, tensor in own.items():
        key, name = _split(own_name)
        by_key.setdefault(key, {})[name] = tensor
    named = {key: to_hugging_face(tensors, model.params) for key, tensors in by_key.items()}
    weights = named.pop(None, {})
    return weights, {f"{key}.{name}": t for key, tensors in named.items() for name, t in tensors.items()}


def part_of(
    own_name: str, like: Tensor, weights: Mapping[str, Tensor], kept: Mapping[str, Tensor], model: Llama
) -> Tensor:
    """This rank's part of one tensor out of what `hugging_face_tensors` gave.

    Args:
        like: a tensor that is cut up as this one is.
    """
    key, name = _split(own_name)
    pieces = to_hugging_face({name: torch.empty(like.shape, device="meta")}, model.params)
    found = {piece: weights[piece] if key is None else kept[f"{key}.{piece}"] for piece in pieces}
    tensor = from_hugging_face(found, model.params)[name]
    if not tensor.dim() or not is_cut_up(like):
        return tensor
    return tensor[local_rows(tensor.shape, like)].clone()  # the rest of it can go


def put_tensors(state: TrainState, parts: Mapping[str, Tensor]) -> None:
    """Fill the weights, and make the optimizer's state.

    Args:
        parts: by own name, in host memory what this rank has of each tensor.
    """
    for name, tensor in _weights(state.model).items():
        local_part(tensor).copy_(parts[_WEIGHT + name])
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for own_name, part in parts.items():
        key, name = _split(own_name)
        if key is not None:
            by_parameter.setdefault(name, {})[key] = part
    for name, parameter in state.model.named_parameters():
        device = local_part(parameter).device
        layout = state_layout(state.optimizer, parameter)
        state.optimizer.state[parameter] = {
            # Copied also on the CPU, or the state would live in the mapped file.
            key: from_local_part(part.to(device, copy=True), layout[key].shape, parameter)
            for key, part in by_parameter.get(name, {}).items()
        }


def _weights(model: Llama) -> dict[str, Tensor]:
    """To be asked for before `named_parameters`: with it FSDP cuts up again what it has gathered."""
    weights: dict[str, Tensor] = model.state_dict()
    if model.params.tie_word_embeddings:
        weights.pop("lm_head.weight")
    return weights


def _split(own_name: str) -> tuple[str | None, str]:
    """The optimizer's key, None for a weight; and the parameter's name."""
    if own_name.startswith(_WEIGHT):
        return None, own_name.removeprefix(_WEIGHT)
    key, _, name = own_name.removeprefix(_KEPT).partition(".")
    return key, name
