"""A compiler without its slowest part."""

from collections.abc import Iterator
from functools import partial

import pytest


@pytest.fixture
def without_code_generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` traces, splits forward from backward and recomputes as ever, in seconds: the graphs
    are then run operator by operator. A graph break is an error."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition", fullgraph=True)
    )
    yield
    torch._dynamo.reset()
