"""The fingerprint changes with everything that decides a training's result, and with nothing else."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.params import Params, check_params

ROOT = Path(__file__).parents[1]

BASE: dict[str, Any] = {
    "seed": 1,
    "corpus": {"source": "embedded"},
    "tokenizer": {"vocab_size": 300},
    "model": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    },
    "training": {
        "sequence_length": 16,
        "global_batch_size": 8,
        "token_budget": 12800,
        "learning_rate": 0.01,
        "warmup_steps": 3,
    },
    "variants": {"v": {"micro_batch_size": 8}, "other": {"micro_batch_size": 4}},
}


def changed(*path_and_value: Any) -> Params:
    raw = yaml.safe_load(yaml.safe_dump(BASE))
    *path, value = path_and_value
    section = raw
    for key in path[:-1]:
        section = section.setdefault(key, {})
    section[path[-1]] = value
    return check_params(raw)


class Project:
    """A copy of the code, so that a file of it can be changed."""

    def __init__(self, folder: Path):
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "stages", folder / "stages", ignore=ignore)
        (folder / "constraints.txt").write_text("torch==2.13.0\n")
        self.meta = folder / "meta.json"
        self.meta.write_text('{"splits": 1}')

    def fingerprint(self, params: Params | None = None, variant: str = "v", device: str = "cpu") -> str:
        spec = importlib.util.spec_from_file_location("fingerprint", self.folder / "stages/fingerprint.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        value = module.train_fingerprint(params or check_params(BASE), variant, device, self.meta)
        assert isinstance(value, str)
        return value


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_it_is_a_hash_and_stable(project: Project, tmp_path: Path) -> None:
    first = project.fingerprint()
    assert len(first) == 64 and set(first) <= set("0123456789abcdef")
    assert project.fingerprint() == first
    elsewhere = Project(tmp_path / "elsewhere")
    assert elsewhere.fingerprint() == first, "where the project lies must not matter"


def _other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    return {"packed": "padded"}[value]


MODEL_KEYS = [*check_params(BASE).model.model_dump()]
PATIENCE = ("max_bad_steps", "max_overflows_in_a_row")
TRAINING_KEYS = [*check_params(BASE).training.model_dump()]


def test_every_key_of_model_and_training_counts(project: Project) -> None:
    """A key that is added counts too, or this test fails."""
    params = check_params(BASE)
    seen = {project.fingerprint()}
    for section in ("model", "training"):
        values = getattr(params, section)
        for key, value in values.model_dump().items():
            # Rules between keys are not what is tested here.
            other = values.model_copy(update={key: _other_value(value)})
            seen.add(project.fingerprint(params.model_copy(update={section: other})))
    assert len(seen) == 1 + len(MODEL_KEYS) + len(TRAINING_KEYS) - len(PATIENCE) - 1  # ranks


def test_how_many_ranks_train_is_no_part_of_a_result(project: Project) -> None:
    """A run goes on with another number of them."""
    params = check_params(BASE)
    training = params.training.model_copy(update={"ranks": 2})
    assert project.fingerprint(params.model_copy(update={"training": training})) == project.fingerprint()


@pytest.mark.parametrize("key", PATIENCE)
def test_when_to_give_up_is_no_part_of_a_result(project: Project, key: str) -> None:
    """A run that stopped at a bad batch goes on from its last checkpoint when more of them are allowed."""
    assert project.fingerprint(changed("training", key, 7)) == project.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        ("seed", 2),
        ("tokenizer", "vocab_size", 301),
        ("variants", "v", "micro_batch_size", 4),
        ("variants", "v", "precision", "amp_bf16"),
        ("variants", "v", "recompute", "every_block"),
        ("variants", "v", "recompute", {"every_n_blocks": 2}),
        ("variants", "v", "compile", "blocks"),
        ("variants", "v", "loss", "chunked"),
        ("variants", "v", "loss_chunk_tokens", 99),
    ],
    ids=str,
)
def test_other_params_that_decide(project: Project, change: tuple[Any, ...]) -> None:
    assert project.fingerprint(changed(*change)) != project.fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        ("variants", "other", "precision", "amp_bf16"),
        ("variants", "third", {"micro_batch_size": 1}),
        ("tracking", "experiment", "another"),
        ("evaluation", "batch_size", 5),
        ("evaluation", "samples", "max_new_tokens", 5),
        ("hardware", "compile_cache", "elsewhere"),
        ("hardware", "device", "cpu"),
        ("variants", "v", "parallelism", "fsdp"),
    ],
    ids=str,
)
def test_params_that_do_not_decide(project: Project, change: tuple[Any, ...]) -> None:
    assert project.fingerprint(changed(*change)) == project.fingerprint()


def test_variant_and_device_count(project: Project) -> None:
    same = changed("variants", "other", {"micro_batch_size": 8})
    assert project.fingerprint(same, "v") != project.fingerprint(same, "other")
    assert project.fingerprint(device="cuda") != project.fingerprint(device="cpu")


def append(name: str) -> Callable[[Project], None]:
    def edit(project: Project) -> None:
        with (project.folder / name).open("a") as file:
            file.write("\n")

    return edit


def new_file(project: Project) -> None:
    (project.folder / "stages/training/another.py").write_text("")


def removed_file(project: Project) -> None:
    (project.folder / "stages/model/loss.py").unlink()


def renamed_file(project: Project) -> None:
    file = project.folder / "stages/model/loss.py"
    file.rename(file.with_name("losses.py"))


@pytest.mark.parametrize(
    "edit",
    [
        *[
            append(name)
            for name in (
                "stages/model/llama.py",
                "stages/training/step.py",
                "stages/data/sequences.py",
                "stages/params/run.py",
                "stages/train.py",
                "constraints.txt",
                "meta.json",
            )
        ],
        new_file,
        removed_file,
        renamed_file,
    ],
)
def test_code_data_and_environment_that_decide(project: Project, edit: Callable[[Project], None]) -> None:
    before = project.fingerprint()
    edit(project)
    assert project.fingerprint() != before


@pytest.mark.parametrize(
    "name", ["stages/tracking/journal.py", "stages/report/page.py", "stages/evaluate.py", "stages/compare.py"]
)
def test_code_that_does_not_decide(project: Project, name: str) -> None:
    before = project.fingerprint()
    append(name)(project)
    assert project.fingerprint() == before
