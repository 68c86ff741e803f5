"""Every pair of techniques trains, or is refused with a reason that docs/techniques.md gives.

A pair is one value of each of two fields on top of the defaults. There is no third outcome: no crash, no
loss that is not a number, no refusal that a reader cannot look up.
"""

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch._functorch import config as compiler_config

from stages.params import BlockGroups, MemoryBudget, Params, ParamsError, TrainingParams, VariantParams
from stages.training.compilation import apply_compile
from stages.training.device_rules import DeviceRuleError, check_device_rules
from stages.training.fp8 import fp8_problems
from stages.training.parallel import is_sharded
from stages.training.precision import PrecisionError, precision_policy
from stages.training.ranks import ALONE, join_ranks, leave_ranks
from stages.training.recompute import apply_recompute
from tests.training.small_run import GLOBAL_BATCH_SIZE, small_params, small_run

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "techniques.md"
STEPS = 3

Settings = dict[str, Any]

# The first value of each field is the default. Clipping is off by default here: it refuses
# optimizer_in_backward whatever else is set, and would hide every other pair of it.
FIELDS: dict[str, list[Settings]] = {
    "precision": [{"precision": name} for name in ("fp32", "tf32", "amp_bf16", "amp_fp16", "bf16", "fp8")],
    "recompute": [
        {"recompute": policy}
        for policy in ("none", "every_block", "selective", "offload", {"every_n_blocks": 2}, {"budget": 0.5})
    ],
    "compile": [{"compile": unit} for unit in ("off", "blocks", "model")],
    "loss": [{"loss": "full"}, {"loss": "chunked", "loss_chunk_tokens": 48}],
    "optimizer": [{"optimizer": name} for name in ("adamw", "adamw_8bit", "muon")],
    "optimizer_in_backward": [{"optimizer_in_backward": False}, {"optimizer_in_backward": True}],
    "parallelism": [{"parallelism": name} for name in ("ddp", "fsdp", "fsdp_cpu_offload")],
    "accumulation": [{"micro_batch_size": GLOBAL_BATCH_SIZE}, {"micro_batch_size": GLOBAL_BATCH_SIZE // 4}],
    "sequences": [{"sequences": "packed"}, {"sequences": "padded"}],
    "clipping": [{"max_grad_norm": None}, {"max_grad_norm": 1.0}],
}
DEFAULTS = {key: value for values in FIELDS.values() for key, value in values[0].items()}

# Compiling the whole model is the blocks' compilation once more at many times the price. Code is generated
# for what changes the graph; the other pairs are traced and split, and run operator by operator.
GENERATED_WITH_MODEL: list[Settings] = [
    {"precision": "amp_bf16"},
    {"recompute": "every_block"},
    {"recompute": "offload"},
    {"recompute": {"budget": 0.5}},
    {"loss": "chunked", "loss_chunk_tokens": 48},
]


def cells() -> Iterator[Settings]:
    """Each pair once, without the default values."""
    yield {}
    values = {field: choices[1:] for field, choices in FIELDS.items()}
    yield from itertools.chain.from_iterable(values.values())
    for first, second in itertools.combinations(values, 2):
        for one, other in itertools.product(values[first], values[second]):
            yield one | other


def name_of(settings: Settings) -> str:
    return "-".join(str(value) for value in settings.values()) or "defaults"


CELLS = list(cells())
EAGER = [cell for cell in CELLS if cell.get("compile", "off") == "off"]
TRACED = [
    cell
    for cell in CELLS
    if cell.get("compile") == "model"
    and {key: value for key, value in cell.items() if key != "compile"} not in GENERATED_WITH_MODEL
]
COMPILED = [cell for cell in CELLS if cell not in EAGER and cell not in TRACED]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Threads wait for each other longer than these sizes take; and policies set what is process-wide."""
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(matmul)
    compiler_config.activation_memory_budget = 1.0  # type: ignore[attr-defined]


def read(settings: Settings) -> Params:
    """Raises ParamsError."""
    chosen = DEFAULTS | settings
    training = {key: value for key, value in chosen.items() if key in TrainingParams.model_fields}
    variant = {key: value for key, value in chosen.items() if key in VariantParams.model_fields}
    assert training.keys() | variant.keys() == chosen.keys()
    # Wide enough that a block's largest matrix has moments in 8 bits.
    return small_params(variant, model={"intermediate_size": 64}, **training)


def refusals(settings: Settings) -> list[str]:
    """What params refuse, each as `key: reason`."""
    try:
        read(settings)
    except ParamsError as error:
        return [problem.removeprefix("variants.v.") for problem in error.problems]
    return []


def train(settings: Settings, folder: Path) -> None:
    """Three steps, set up in the order of the train stage: weights, recompute, compilation.

    One that shards does so on one rank; several are in tests/training/test_ranks.py.
    """
    params = read(settings)
    if is_sharded(params.variants["v"]):
        join_ranks(ALONE, torch.device("cpu"), timeout_minutes=1)
    try:
        _train(params, folder)
    finally:
        leave_ranks()


def _train(params: Params, folder: Path) -> None:
    run = small_run(folder, params)
    apply_recompute(run.state.model, run.variant)
    apply_compile(run.state.model, run.variant)
    losses = torch.stack([run.step().loss for _ in range(STEPS)])
    assert losses.isfinite().all(), losses
    assert all(tensor.isfinite().all() for tensor in run.state.model.state_dict().values())
    assert run.state.step == STEPS
    assert int(run.state.skipped_steps) < STEPS, "nothing was trained"


def check(settings: Settings, folder: Path) -> None:
    reasons = refusals(settings)
    for reason in reasons:
        assert row_of(reason) is not None, f"not in {DOCUMENTATION.name}: {reason}"
    if not reasons:
        train(settings, folder)


class Row(NamedTuple):
    """Of the documentation's table of refusals."""

    key: str
    known: str
    """params: when they are read. device: when training starts on it."""
    message: re.Pattern[str]


@functools.cache
def documented() -> list[Row]:
    text = DOCUMENTATION.read_text(encoding="utf-8")
    table = text.split("<!-- refusals -->")[1].split("<!-- /refusals -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    return [
        # An ellipsis stands for what differs from case to case.
        Row(key.strip("`"), known, re.compile(".+".join(map(re.escape, message.strip("`").split("…")))))
        for key, _, known, message in rows
    ]


def row_of(reason: str) -> int | None:
    key, _, message = reason.partition(": ")
    for number, row in enumerate(documented()):
        if key == row.key and row.message.fullmatch(message):
            return number
    return None


def test_the_grid_knows_every_value() -> None:
    """A technique that is added must be added here."""
    fields = VariantParams.model_fields.keys() - {"loss_chunk_tokens"}
    in_grid = {key for values in FIELDS.values() for key in values[0]} & VariantParams.model_fields.keys()
    assert in_grid == fields
    for field in fields - {"micro_batch_size", "optimizer_in_backward"}:
        annotation = VariantParams.model_fields[field].annotation
        words = {word for part in [annotation, *get_args(annotation)] for word in get_args(part)}
        words |= set(get_args(annotation))
        words = {word for word in words if isinstance(word, str)}
        assert words == {v[field] for v in FIELDS[field] if isinstance(v[field], str)}, field
    forms = get_args(VariantParams.model_fields["recompute"].annotation)
    assert BlockGroups in forms and MemoryBudget in forms


@pytest.mark.parametrize("settings", EAGER, ids=name_of)
def test_trains_or_is_refused_with_a_documented_reason(settings: Settings, tmp_path: Path) -> None:
    check(settings, tmp_path)


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("settings", TRACED, ids=name_of)
def test_traced_trains_or_is_refused_with_a_documented_reason(settings: Settings, tmp_path: Path) -> None:
    check(settings, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("settings", COMPILED, ids=name_of)
def test_compiled_trains_or_is_refused_with_a_documented_reason(settings: Settings, tmp_path: Path) -> None:
    torch._dynamo.reset()  # or the pairs would use up the number of recompilations that one function has
    check(settings, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "amp_bf16", "recompute": "every_block", "loss": "chunked"},
        {"precision": "amp_fp16", "recompute": "selective", "micro_batch_size": 2, "max_grad_norm": 1.0},
        {"precision": "bf16", "optimizer_in_backward": True, "loss": "chunked"},
        {"precision": "amp_bf16", "optimizer": "adamw_8bit", "optimizer_in_backward": True},
        {"precision": "amp_bf16", "optimizer": "muon", "micro_batch_size": 2, "max_grad_norm": 1.0},
    ],
    ids=name_of,
)
def test_what_belongs_together_is_not_refused(settings: Settings, tmp_path: Path) -> None:
    """Or rules that refuse everything would pass."""
    train(settings, tmp_path)


def policy(name: str, device: str) -> None:
    precision_policy(VariantParams(micro_batch_size=1, precision=name), torch.device(device))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["tf32", "fp8"])
def test_a_cpu_found_by_auto_refuses_with_a_documented_reason(precision: str) -> None:
    with pytest.raises(PrecisionError) as error:
        policy(precision, "cpu")
    assert row_of(f"precision: {error.value}") is not None


@pytest.mark.parametrize(
    ("precision", "capability"), [("tf32", (7, 5)), ("amp_bf16", (7, 0)), ("bf16", (7, 5)), ("fp8", (8, 6))]
)
def test_an_older_gpu_refuses_with_a_documented_reason(
    precision: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such GPU is at hand: only what it says about itself is put in."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    with pytest.raises(PrecisionError) as error:
        policy(precision, "cuda")
    assert row_of(f"precision: {error.value}") is not None


@pytest.mark.parametrize(
    ("settings", "model", "device", "path"),
    [
        ({"recompute": "offload"}, {}, "cpu", None),
        ({"compile": "blocks"}, {}, "cpu", ""),
        ({"compile": "blocks"}, {}, "cuda", ""),
        ({}, {"num_attention_heads": 8}, "cuda", None),
        ({"precision": "amp_bf16"}, {"hidden_size": 416, "num_attention_heads": 2}, "cuda", None),
    ],
    ids=str,
)
def test_a_device_refuses_with_a_documented_reason(
    settings: Settings, model: Settings, device: str, path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    if path is not None:
        monkeypatch.setenv("PATH", path)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.delenv("CC", raising=False)
    variant = VariantParams(micro_batch_size=1, **settings)
    with pytest.raises(DeviceRuleError) as error:
        check_device_rules(small_params(model=model).model, variant, torch.device(device))
    assert row_of(str(error.value)) is not None


def test_a_model_that_fp8_cannot_take_is_refused_with_a_documented_reason() -> None:
    problems = fp8_problems(small_params(model={"intermediate_size": 72}).model)
    assert problems
    for problem in problems:
        assert row_of(f"precision: {problem}") is not None


def test_every_documented_refusal_happens() -> None:
    """No row of the table is about a rule that is gone. Rows of a device have tests above."""
    others: list[Settings] = [
        {"micro_batch_size": 3},
        {"ranks": 2},
        {"ranks": 2, "optimizer_in_backward": True},
        {"parallelism": "fsdp", "compile": "blocks", "recompute": "selective"},
    ]
    happened = {row_of(reason) for cell in [*CELLS, *others] for reason in refusals(cell)}
    gone = [
        row for number, row in enumerate(documented()) if row.known == "params" and number not in happened
    ]
    assert not gone
