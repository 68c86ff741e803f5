"""How long each command of the pipeline takes until its own work begins, and when there is nothing to do."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.pipeline_checkout import Checkout
from benchmarks.pipeline_loop import STEP
from benchmarks.pipeline_probe import Moment
from benchmarks.pipeline_process import Spread

_EVALUATION = "stages.evaluate:document_losses"

TORCH = "import torch"
TRAIN = "train, to the end of the first step"


@dataclass(frozen=True)
class Startup:
    """Seconds from the start of the process."""

    what: str
    seconds: Spread
    cpu_seconds: Spread
    """Of all threads: on a machine that is shared, nearer to what an idle one would take."""
    of_torch: Spread
    """The same over what importing torch took in the same round."""


def measure_startup(untouched: Checkout, checkout: Checkout, rounds: int) -> list[Startup]:
    """
    Args:
        untouched: where everything was made by `dvc repro`, so that nothing is left to do.
        checkout: the same, to run single stages in.
    """

    def train() -> Moment:
        return checkout.train([STEP]).calls[STEP][0].end

    def evaluate() -> Moment:
        return checkout.stage("stages.evaluate", "baseline", clocks=[_EVALUATION]).calls[_EVALUATION][0].begin

    def ready(module: str, *arguments: str) -> Callable[[], Moment]:
        return lambda: checkout.stage(module, *arguments).ready

    def whole(place: Checkout, *arguments: str) -> Callable[[], Moment]:
        def ended() -> Moment:
            done = place.python(*arguments)
            return Moment(done.seconds, done.cpu_seconds)

        return ended

    commands: dict[str, Callable[[], Moment]] = {
        TORCH: whole(checkout, "-c", "import torch"),
        "`dvc repro`, nothing to do": whole(untouched, "-m", "dvc", "repro"),
        "`make repro`, nothing to do": whole(untouched, "-m", "stages.repro"),
        "plan, to its first prediction": ready("stages.plan", "baseline"),
        "plan, one variant": whole(checkout, "-m", "stages.plan", "baseline"),
        "evaluate, to the first batch": evaluate,
        "tokenize, to the first document": ready("stages.tokenize_data"),
        "compare, to reading the results": ready("stages.compare"),
        "compare": whole(checkout, "-m", "stages.compare"),
        TRAIN: train,
    }
    found: dict[str, list[Moment]] = defaultdict(list)
    for _ in range(rounds):
        for what, command in commands.items():
            found[what].append(command())
    return [
        Startup(
            what,
            Spread.of([moment.wall for moment in moments]),
            Spread.of([moment.cpu for moment in moments]),
            Spread.of([own.wall / torch.wall for own, torch in zip(moments, found[TORCH], strict=True)]),
        )
        for what, moments in found.items()
    ]
