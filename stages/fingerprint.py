"""What decides the result of a training, as one hash: params, code, data, environment."""

import hashlib
import json
from pathlib import Path

from stages.container_image import container_image
from stages.params import Params

_CODE = ("params", "data", "model", "training")
"""The rooms whose code a trained model depends on; what only measures or tracks is not among them."""
_MODULES = (
    "train.py", "train_end.py", "train_results.py", "train_run.py",
    "measure/peak_memory.py", "measure/throughput.py",
)  # fmt: skip
"""Besides: those that decide what is published, and how a checkpoint keeps what was measured."""
_PATIENCE = {"max_bad_steps", "max_overflows_in_a_row"}
"""When a run gives up: no part of the result of a run that did not."""
_RANKS = {"ranks", "parallelism"}
"""How many train it and how they share the model: it goes on with others, the same but for rounding."""


def train_fingerprint(params: Params, variant: str, device_type: str, tokens_meta: Path) -> str:
    """64 hex digits; equal for two runs that must end in the same bytes on one machine.

    Args:
        params: of which only what this variant's training reads counts.
        variant: its name counts too: results carry it.
        device_type: cpu or cuda, as resolved.
        tokens_meta: the tokenize stage's meta.json, which holds hashes of all its text and settings.
    """
    stages = Path(__file__).parent
    files = sorted(file for room in _CODE for file in (stages / room).rglob("*.py"))
    files += [stages / name for name in _MODULES]
    decides = {
        "variant": variant,
        "device": device_type,
        "seed": params.seed,
        "vocab_size": params.tokenizer.vocab_size,
        "model": params.model.model_dump(mode="json"),
        "training": params.training.model_dump(mode="json", exclude=_PATIENCE | _RANKS),
        "techniques": params.variants[variant].model_dump(mode="json", exclude=_RANKS),
        "tokens": _sha256(tokens_meta),
        "code": {str(file.relative_to(stages)): _sha256(file) for file in files},
        "environment": _sha256(stages.parent / "constraints.txt"),
        # Not its digest: an image that is built again on the same base with the same versions goes on.
        "base_image": image.base if (image := container_image()) else None,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
