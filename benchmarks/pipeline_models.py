"""The pipeline's costs as the model grows by 2, 4 and 8."""

import json
from collections import defaultdict
from typing import Any

from benchmarks.pipeline_checkout import Checkout
from benchmarks.pipeline_growth import Curve
from benchmarks.pipeline_loop import CLOCKS, STEP, loop_cost, with_steps

MODELS: dict[int, dict[str, int]] = {
    # Twice the parameters each, with the vocabulary of params.yaml (4,096): 2.8, 5.7, 11.2 and 21.6 M.
    1: {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 512},
    2: {"hidden_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 704},
    4: {"hidden_size": 384, "num_hidden_layers": 5, "num_attention_heads": 6, "intermediate_size": 1024},
    8: {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1408},
}
_EVALUATION = "stages.evaluate:document_losses"
_STEPS, _SAVE_EVERY = 11, 5


def measure_models(checkout: Checkout, factors: tuple[int, ...], rounds: int) -> list[Curve]:
    """Every cost of the pipeline by parameters of the model, on the same tokens."""
    params = checkout.params()
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for factor in factors:
            checkout.set_params(_with_model(params, MODELS[factor]))
            plan = checkout.python("-m", "stages.plan", "baseline")
            report = checkout.train(CLOCKS)
            cost = loop_cost(report)
            facts = json.loads((checkout.root / "models/baseline/training.json").read_text())
            measured = json.loads((checkout.root / "results/measurements/baseline.json").read_text())
            judged = checkout.stage("stages.evaluate", "baseline", clocks=[_EVALUATION])
            (evaluation,) = judged.calls[_EVALUATION]
            size = facts["parameters"]
            for name, value in {
                "step": cost.step_seconds,
                "evaluate": evaluation.seconds,
                "checkpoint, training waits": cost.saving_seconds,
                "checkpoint, written beside": cost.writing_seconds,
                "peak memory": measured["peak_memory_bytes"] / 2**20,
                "plan": plan.seconds,
                "train, to the first step": report.calls[STEP][0].end.wall,
            }.items():
                found[name][size].append(value)
    checkout.set_params(params)
    units = defaultdict(lambda: "s", {"peak memory": "MiB"})
    return [Curve(name, units[name], costs, is_flat=name == "plan") for name, costs in found.items()]


def _with_model(params: dict[str, Any], model: dict[str, int]) -> dict[str, Any]:
    checkpoints = {"every_minutes": None, "every_steps": _SAVE_EVERY, "keep": 2}
    grown = params | {"model": params["model"] | model, "checkpoints": checkpoints}
    return with_steps(grown, _STEPS)
