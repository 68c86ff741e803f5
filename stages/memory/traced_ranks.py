"""One rank of several, for a step on fake tensors: what it allocates for working together with the others.

FSDP2's own code runs, on a process group that moves nothing. It allocates and frees in the order of the host,
on CUDA as here: it leaves no tensor to the allocator's keeping (record_stream) and makes streams wait for one
another instead, so that the allocator's count of live bytes does not depend on when kernels run. Its streams
share no memory; cuda_allocator.py follows that.

DDP's reducer is C++ and reads addresses, which fake tensors have not. `_gradients_in_buckets` stands for it
(torch/csrc/distributed/c10d/reducer.cpp of PyTorch 2.13), once the loop has settled it: buckets for good, of
which gradients are views.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stages.memory.storage_tracker import StorageTracker
from stages.model.llama import Llama
from stages.params import VariantParams
from stages.training.parallel import Parallel, is_sharded
from stages.training.ranks import ALONE, Ranks

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""DDP's defaults (_DEFAULT_FIRST_BUCKET_BYTES, bucket_cap_mb); a bucket is full that has reached so much."""


class TracedRanks(Ranks):
    """The first of `count` ranks, which hears from the others what it says itself."""

    def sum_on_host(self, numbers: Any) -> list[int]:
        return list(numbers)

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor


@contextmanager
def fake_group(variant: VariantParams, ranks: int) -> Iterator[None]:
    """Inside, a variant that shards can be cut up over so many ranks. Goes around the mode of fake tensors.

    Raises:
        RuntimeError: this process has a real group already.
    """
    if not is_sharded(variant):
        yield
        return
    import torch.distributed._tools.fake_collectives  # noqa: F401  # collectives on fake tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    make_mesh = dist.init_device_mesh
    try:
        mesh = make_mesh("cpu", (ranks,))  # it reads its own numbers, which fake ones have not
        dist.init_device_mesh = lambda *_: mesh  # type: ignore[assignment]
        yield
    finally:
        dist.init_device_mesh = make_mesh  # type: ignore[assignment]
        dist.destroy_process_group()


class TracedParallel(Parallel):
    """The model on several ranks, of which one is here."""

    def __init__(self, model: Llama, variant: VariantParams, ranks: Ranks, tracker: StorageTracker):
        super().__init__(model, variant, ranks if is_sharded(variant) else ALONE)
        self.ranks = ranks
        self.gradients: set[int] = set()
        """Blocks of gradients that no parameter shows as its own."""
        self._tracker = tracker
        self._in_buckets = ranks.has_others and not is_sharded(variant)
        if self._in_buckets:
            self.gradients |= {tracker.follow(bucket) for bucket in _gradients_in_buckets(model)}

    @property
    def keeps_gradients(self) -> bool:
        return self._in_buckets

    @contextmanager
    def gradients_travel(self, *, is_last: bool) -> Iterator[None]:
        travel = super().gradients_travel(is_last=is_last) if self.is_sharded else nullcontext()
        with travel:
            yield
        for gradient in self._kept_whole():
            if (block := self._tracker.block_of(gradient)) is not None:
                self.gradients.add(block)

    def _kept_whole(self) -> Iterator[Tensor]:
        """Gradients that wait for those of the next micro-batch before they are cut up."""
        if not self.is_sharded:
            return
        for parameter in sharded_parameters(self._model):
            for gradient in (parameter._unsharded_param.grad, parameter.unsharded_accumulated_grad):
                if gradient is not None:
                    yield gradient


def _gradients_in_buckets(model: nn.Module) -> list[Tensor]:
    """DDP's buckets, of which the gradients are views from now on."""
    buckets: list[Tensor] = []
    limit = FIRST_BUCKET_BYTES
    waiting: list[nn.Parameter] = []
    # In the order in which gradients come, which is about the reverse of the model's.
    for parameter in reversed(list(model.parameters())):
        waiting.append(parameter)
        if sum(p.numel() * p.element_size() for p in waiting) >= limit:
            buckets.append(_bucket(waiting))
            waiting, limit = [], BUCKET_BYTES
    return [*buckets, _bucket(waiting)] if waiting else buckets


def _bucket(parameters: list[nn.Parameter]) -> Tensor:
    bucket = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    for parameter, part in zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return bucket


def sharded_parameters(model: nn.Module) -> Iterator[Any]:
    """What FSDP2 keeps of each parameter of a sharded model."""
    from torch.distributed.fsdp import FSDPModule

    seen = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if id(group) not in seen:
                    seen.add(id(group))
                    yield from group.fsdp_params


@contextmanager
def shapes_unseen(tracker: StorageTracker) -> Iterator[None]:
    """Inside, what only finds out the shape of a sharded result, on fake tensors in real steps too, is not
    followed."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_unseen(*arguments: Any, **named: Any) -> Any:
        tracker.is_paused = True
        try:
            return propagate(*arguments, **named)
        finally:
            tracker.is_paused = False

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate_unseen  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]


@contextmanager
def weights_on_host(model: nn.Module, tracker: StorageTracker) -> Iterator[None]:
    """Inside, FSDP2 with its weights in host memory, as on a GPU: here host and device are one.

    A part of a weight is copied to the device before it is gathered, a part of a gradient back when summed.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    inputs, to_dtensor = FSDPParam.all_gather_inputs, FSDPParam.to_sharded_dtensor

    def copied_inputs(parameter: Any) -> list[Tensor]:
        on_device = parameter._sharded_param_data.clone()
        return [on_device if parameter.param_dtype is None else on_device.to(parameter.param_dtype)]

    def copied_gradient(parameter: Any, part: Tensor) -> Any:
        tracker.on_device = False
        try:
            on_host = part.clone()
        finally:
            tracker.on_device = True
        return to_dtensor(parameter, on_host)

    for parameter in sharded_parameters(model):
        parameter.offload_to_cpu = True
    FSDPParam.all_gather_inputs = property(copied_inputs)  # type: ignore[assignment]
    FSDPParam.to_sharded_dtensor = copied_gradient  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        FSDPParam.all_gather_inputs = inputs  # type: ignore[method-assign]
        FSDPParam.to_sharded_dtensor = to_dtensor  # type: ignore[method-assign]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut up; another one as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
