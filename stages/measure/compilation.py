"""How long torch.compile took, and whether it compiled again after the first step."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class CompileWatch:
    """Counts compilations and their wall seconds inside a `with` block.

    PyTorch's compiler calls back when it starts and when it ends (torch/_dynamo/callback.py): for
    each frame that it traces (Dynamo, AOTAutograd and Inductor together) and, where the backward
    graph is compiled at its first use, for that as well. Nested starts are reported once, so the
    seconds are wall-clock and never counted twice. Triton's autotuning at run time is not reported
    by PyTorch 2.13 and appears as a slow first step instead.

    With `enabled=False` nothing is imported and every figure stays 0 (importing torch._dynamo takes
    about a second). `torch._dynamo.reset()` inside the block drops all callbacks, this watch's too.

    Example:
        with CompileWatch(enabled=variant.compile != "off") as watch:
            step()
            watch.mark_steady()
            ...
        watch.compile_seconds, watch.recompiles
    """

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self.compile_seconds = 0.0
        """Wall seconds in the compiler, forward and backward."""
        self.compilations = 0
        """Frames that were compiled. A graph break makes two frames of one function."""
        self.recompiles = 0
        """Those of them after `mark_steady`: a changed shape, dtype or Python number."""
        self._steady = False
        self._started: float | None = None
        self._remove: list[Callable[[], None]] = []

    def mark_steady(self) -> None:
        """Everything is compiled; what is compiled from now on is a recompile."""
        self._steady = True

    def __enter__(self) -> Self:
        if self.enabled:
            from torch._dynamo.callback import CallbackTrigger, callback_handler

            def start(args: Any) -> None:
                self._started = time.perf_counter()
                if args.callback_trigger is CallbackTrigger.DYNAMO:
                    self.compilations += 1
                    self.recompiles += self._steady

            def end(args: Any) -> None:
                if self._started is not None:
                    self.compile_seconds += time.perf_counter() - self._started
                    self._started = None

            callback_handler.register_start_callback(start)
            callback_handler.register_end_callback(end)

            def remove() -> None:
                # torch._dynamo.reset() may have emptied the lists in between.
                if start in callback_handler.start_callbacks:
                    callback_handler.remove_start_callback(start)
                if end in callback_handler.end_callbacks:
                    callback_handler.remove_end_callback(end)

            self._remove.append(remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._remove:
            self._remove.pop()()
