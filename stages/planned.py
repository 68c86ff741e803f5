"""What the plan decided, for the stages after it: params in which every variant is whole."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stages.measure.units import readable_bytes
from stages.params import Params, VariantParams, VariantToPlan

PLAN_FOLDER = Path("results/plan")


class PlanError(RuntimeError):
    """A plan is missing, is of other params, or cannot be kept; the message says what to do."""


def planned_params(
    params: Params, variants: Iterable[str] | None = None, folder: Path = PLAN_FOLDER
) -> Params:
    """The params with what the plan chose in the place of every `auto`.

    Variants that leave nothing to the plan stay as they are, and no file is read for them.

    Args:
        variants: only these are looked up; the others stay as they are written. None: all.

    Raises:
        PlanError: the plan of a variant that needs one is missing, cannot be read or is of other params.
    """
    wanted = set(params.variants if variants is None else variants)
    whole: dict[str, VariantParams] = {
        name: _planned(params, name, folder)
        if name in wanted and isinstance(variant, VariantToPlan)
        else variant
        for name, variant in params.variants.items()
    }
    return params.model_copy(update={"variants": whole})


def planned_memory_bytes(params: Params, variant: str, folder: Path = PLAN_FOLDER) -> int | None:
    """What the plan says that training needs of the device, allowances included.

    None where `hardware` names no memory to plan for: then the plan may be of other kernels than train.

    Raises:
        PlanError: the plan is missing, cannot be read or is of other params.
    """
    if not params.hardware.has_capacity:
        return None
    needed = _read_plan(params, variant, folder, "needed_memory_bytes")
    if not isinstance(needed, int):
        raise _unreadable(folder, variant, TypeError(f"needed_memory_bytes is {needed!r}"))
    return needed


def plan_digest(params: Params, variant: str) -> str:
    """Of everything that a variant's choice follows from; 16 hex digits."""
    decides = {
        "model": params.model.model_dump(mode="json"),
        "vocab_size": params.tokenizer.vocab_size,
        "training": params.training.model_dump(mode="json"),
        "hardware": params.hardware.model_dump(
            mode="json", include={"device", "target", "memory_gib", "memory_reserve_gib"}
        ),
        "variant": params.variants[variant].model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def check_device_memory(planned_bytes: int, device_memory_bytes: int) -> None:
    """Refuse a device that has less memory than the plan needs.

    Args:
        planned_bytes: the plan's `needed_memory_bytes`.
        device_memory_bytes: all of the device's memory.

    Raises:
        PlanError: it has less.
    """
    if device_memory_bytes < planned_bytes:
        raise PlanError(
            f"the plan needs {readable_bytes(planned_bytes)} and this device has "
            f"{readable_bytes(device_memory_bytes)}; set hardware.target or hardware.memory_gib to what it "
            "has and plan again with `dvc repro`, or train on a larger device"
        )


def _planned(params: Params, variant: str, folder: Path) -> VariantParams:
    techniques = _read_plan(params, variant, folder, "techniques")
    try:
        return VariantParams(**techniques)
    except (TypeError, ValidationError) as error:
        raise _unreadable(folder, variant, error) from None


def _read_plan(params: Params, variant: str, folder: Path, key: str) -> Any:
    path = folder / f"{variant}.json"
    try:
        plan: Any = json.loads(path.read_text(encoding="utf-8"))
        digest, value = plan["params_digest"], plan[key]
    except FileNotFoundError:
        raise PlanError(
            f"variants.{variant} is planned for a device and there is no {path}; "
            f"run `dvc repro plan@{variant}`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder, variant, error) from None
    if digest != plan_digest(params, variant):
        raise PlanError(f"{path} was made from other params than these; run `dvc repro plan@{variant}`")
    return value


def _unreadable(folder: Path, variant: str, error: Exception) -> PlanError:
    reason = " ".join(str(error).split())
    return PlanError(
        f"{folder / variant}.json cannot be read as a plan ({reason}); run `dvc repro plan@{variant}`"
    )
