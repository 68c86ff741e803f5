"""Saved activations in host memory: what goes, what stays, and in which order the streams are waited for.

A CPU has no streams, so the copies of the tests here are plain. `DelayedStreams` puts the waiting back:
a copy is not carried out when it is issued but when something waits for it, as late as CUDA may do it.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stages.model.llama import Llama
from stages.model.loss import full_loss
from stages.params import VariantParams
from stages.training.offload import BlockOffload, _Bag
from stages.training.recompute import apply_recompute
from tests.model.small_llama import small_llama, small_params, tokens
from tests.training.small_run import bit_equal, distance

CPU = torch.device("cpu")
IDS = tokens(4, 16)
DOCUMENTS = torch.tensor([0, 5, 16, 32, 40, 48, 64], dtype=torch.int32)


class DelayedStreams:
    """What `torch.get_device_module` gives, with one side stream that works as late as it is allowed to."""

    def __init__(self) -> None:
        self.side = _SideStream()
        self.compute = _ComputeStream(self.side)

    def Stream(self) -> "_SideStream":
        return self.side

    def current_stream(self) -> "_ComputeStream":
        return self.compute

    @contextmanager
    def stream(self, stream: "_SideStream") -> Iterator[None]:
        assert stream is self.side
        # What it reads was written, and what it writes to was last read, by kernels queued before.
        assert self.side.has_waited, "the side stream must wait for the compute stream before it copies"
        self.side.has_waited = False
        with _Delay(self.side):
            yield


class _SideStream:
    def __init__(self) -> None:
        self.queue: list[Any] = []
        self.done = 0
        self.has_waited = False

    def wait_stream(self, stream: "_ComputeStream") -> None:
        self.has_waited = True  # the compute stream of a CPU is always at its end

    def record_event(self) -> int:
        return self.done + len(self.queue)

    def run_until(self, event: int) -> None:
        while self.done < event:
            self.queue.pop(0)()
            self.done += 1


class _ComputeStream:
    def __init__(self, side: _SideStream):
        self.side = side

    def wait_event(self, event: int) -> None:
        self.side.run_until(event)


class _Delay(TorchDispatchMode):
    def __init__(self, side: _SideStream):
        super().__init__()
        self.side = side

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        target.fill_(255)  # NaN in every floating type: whoever reads too early will see it
        self.side.queue.append(lambda: target.copy_(source))
        return target


def prepared(streams: Any = None, *, min_bytes: int = 0, **params: Any) -> tuple[Llama, BlockOffload]:
    model = small_llama(small_params(**({"num_hidden_layers": 4} | params)))
    offload = BlockOffload(CPU, min_bytes=min_bytes, streams=streams)
    offload.apply(list(model.layers))
    return model, offload


def gradients(model: Llama, *, autocast: bool = False, micro_batches: int = 2) -> dict[str, Tensor]:
    for _ in range(micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = full_loss(model(IDS, DOCUMENTS), model.lm_head.weight, IDS)
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "amp_bf16"])
@pytest.mark.parametrize("delayed", [False, True], ids=["plain", "delayed"])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_gradients_are_bit_equal(autocast: bool, delayed: bool, layers: int) -> None:
    plain = small_llama(small_params(num_hidden_layers=layers))
    model, _ = prepared(DelayedStreams() if delayed else None, num_hidden_layers=layers)
    assert bit_equal(gradients(model, autocast=autocast), gradients(plain, autocast=autocast))


def test_reading_before_arrival_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is worth something only if it fails without the wait."""
    streams = DelayedStreams()
    model, _ = prepared(streams)
    loss = full_loss(model(IDS, DOCUMENTS), model.lm_head.weight, IDS)
    monkeypatch.setattr(streams.compute, "wait_event", lambda event: None)
    loss.backward()
    assert not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_nothing_is_freed_before_it_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = DelayedStreams()
    model, _ = prepared(streams)
    let_go, freed = _Bag.let_go, []

    def check(bag: _Bag) -> None:
        let_go(bag)
        freed.append(bag.copied)
        assert streams.side.done >= bag.copied

    monkeypatch.setattr(_Bag, "let_go", check)
    gradients(model)
    assert len(freed) == 6  # three of four blocks, two micro-batches


def test_the_device_holds_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After forward: the last block's. In backward: the block at work and the one before."""
    model, _ = prepared()
    bags: list[weakref.ref[_Bag]] = []
    original = _Bag.__init__

    def remember(bag: _Bag, *args: Any, **kwargs: Any) -> None:
        original(bag, *args, **kwargs)
        bags.append(weakref.ref(bag))

    monkeypatch.setattr(_Bag, "__init__", remember)
    loss = full_loss(model(IDS, DOCUMENTS), model.lm_head.weight, IDS)

    def on_device() -> list[int]:
        live = [bag() for bag in bags]
        return [
            index
            for index, bag in enumerate(live)
            if bag is not None and any(slot.on_device is not None for slot in bag.slots.values())
        ]

    assert len(bags) == 4
    assert on_device() == [3]
    seen: list[list[int]] = []
    for name, parameter in model.named_parameters():
        if name.endswith("o_proj.weight"):  # its gradient is there when the block's second half is done
            parameter.register_post_accumulate_grad_hook(lambda _: seen.append(on_device()))
    loss.backward()
    assert seen == [[2, 3], [1, 2], [0, 1], [0]]
    del loss
    assert all(bag() is None or not bag().slots for bag in bags)  # type: ignore[union-attr]


def saved(model: Llama, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[int]]:
    """Tensors that autograd saved in blocks, and bytes of the storages that were sent away."""
    tensors: list[Tensor] = []
    sent: list[int] = []
    pack, send = _Bag.pack, _Bag.send

    def remember(bag: _Bag, tensor: Tensor) -> object:
        tensors.append(tensor)
        return pack(bag, tensor)

    def count(bag: _Bag) -> None:
        send(bag)
        sent.extend(slot.on_host.nbytes for slot in bag.slots.values() if slot.on_host is not None)

    monkeypatch.setattr(_Bag, "pack", remember)
    monkeypatch.setattr(_Bag, "send", count)
    full_loss(model(IDS, DOCUMENTS), model.lm_head.weight, IDS).backward()
    return tensors, sent


def test_parameters_tables_and_views_of_them_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = prepared()
    tensors, sent = saved(model, monkeypatch)
    owners = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    saved_of_owners = [t for t in tensors if t.untyped_storage().data_ptr() in owners]
    assert any(not t.is_contiguous() for t in saved_of_owners), "a transposed weight is saved"
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.untyped_storage().data_ptr() not in owners
        and t.untyped_storage().data_ptr() != DOCUMENTS.untyped_storage().data_ptr()
    }
    # Three of four blocks send, each storage once, however many nodes saved it.
    assert sum(sent) == pytest.approx(sum(storages.values()) * 3 / 4)


def test_what_is_small_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = prepared(min_bytes=10_000)
    _, sent = saved(model, monkeypatch)
    assert sent and min(sent) >= 10_000


def test_evaluation_saves_nothing() -> None:
    model, offload = prepared()
    with torch.no_grad():
        model(IDS, DOCUMENTS)
    assert offload._last is None


def test_a_forward_that_failed_leaves_no_trace() -> None:
    model, _ = prepared()
    with pytest.raises(TypeError):
        model(IDS, DOCUMENTS.float())
    assert bit_equal(gradients(model), gradients(small_llama(small_params(num_hidden_layers=4))))


def test_the_policy_applies_it_to_every_block() -> None:
    model = small_llama(small_params())
    assert apply_recompute(model, VariantParams(micro_batch_size=1, recompute="offload")) == 2
    assert bit_equal(gradients(model), gradients(small_llama(small_params())))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "amp_bf16"])
def test_on_a_gpu_gradients_are_equal_and_memory_falls(autocast: bool) -> None:
    device = torch.device("cuda")
    ids = tokens(8, 512).to(device)
    shape = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "max_position_embeddings": 512,
    }

    def run(policy: Any) -> tuple[dict[str, Tensor], int]:
        model = small_llama(small_params(**shape)).to(device)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(0.1)
        apply_recompute(model, VariantParams(micro_batch_size=8, recompute=policy))
        for _ in range(3):  # the host's pinned blocks are used again from the second step on
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = full_loss(model(ids), model.lm_head.weight, ids)
            loss.backward()
        torch.cuda.synchronize()
        found = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        return found, torch.cuda.max_memory_allocated()

    expected, peak = run("none")
    found, peak_offloaded = run("offload")
    # Attention's backward adds atomically: the order, and so the last bit, may differ.
    assert distance(found, expected) < (1e-2 if autocast else 1e-5)
    assert peak_offloaded < 0.6 * peak
