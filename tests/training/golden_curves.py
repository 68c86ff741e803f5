"""Loss curves that every later version must reproduce: `python -m tests.training.golden_curves` makes them.

They change only when the training is meant to change, and then the commit says why.
"""

import hashlib
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from stages.measure.hardware import describe_device
from stages.params import load_params
from stages.training.compilation import apply_compile
from stages.training.precision import set_float32_matmul
from stages.training.recompute import apply_recompute
from tests.training.small_run import CPU, small_params, small_run

GOLDEN = Path(__file__).with_name("golden_curves.json")
ROOT = Path(__file__).parents[2]
STEPS = 20
DEFAULT_VARIANTS = load_params(ROOT / "params.yaml").variants


def machine() -> dict[str, str]:
    """What may change the last bits of a sum: another processor or another build of torch.

    Two processors may share a name and not their instructions, for which the libraries choose kernels.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "cpu": describe_device(CPU).name,
        "model": f"{facts.get('cpu family')}/{facts.get('model')}",
        "instructions": hashlib.sha256(facts.get("flags", "").encode()).hexdigest()[:16],
        "system": platform.machine(),
        "torch": torch.__version__,
    }


def loss_curve(variant: str, folder: Path) -> list[float]:
    """Losses of the first steps of a variant of params.yaml, on a small model, in one thread."""
    techniques = DEFAULT_VARIANTS[variant].model_dump() | {"loss_chunk_tokens": 16}
    run = small_run(folder, small_params(techniques))
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    set_float32_matmul(run.variant.precision, CPU)
    try:
        apply_recompute(run.state.model, run.variant)
        apply_compile(run.state.model, run.variant)
        return [float(run.step().loss) for _ in range(STEPS)]
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)


def main() -> None:
    golden: dict[str, Any] = {"machine": machine(), "losses": {}}
    for variant in DEFAULT_VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            golden["losses"][variant] = loss_curve(variant, Path(folder))
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
