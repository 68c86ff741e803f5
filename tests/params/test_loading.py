"""What a user is told about a params file that is wrong."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.params import BlockGroups, Params, ParamsError, check_params, flatten, load_params

VALID: dict[str, Any] = {
    "seed": 1,
    "corpus": {"source": "embedded"},
    "tokenizer": {"vocab_size": 512},
    "model": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
    },
    "training": {
        "sequence_length": 64,
        "global_batch_size": 32,
        "token_budget": 1_000_000,
        "learning_rate": 0.001,
        "warmup_steps": 10,
    },
    "evaluation": {"samples": {"prompts": ["a"]}},
    "hardware": {"device": "auto"},
    "variants": {
        "baseline": {"micro_batch_size": 32},
        "frugal": {"micro_batch_size": 8, "recompute": {"every_n_blocks": 2}, "compile": "blocks"},
    },
}

REMOVE = object()


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """VALID with `{"training.token_budget": -1}` set; REMOVE takes a key out."""
    raw = copy.deepcopy(VALID)
    for path, value in changes.items():
        *parents, key = path.split(".")
        section = raw
        for parent in parents:
            section = section[parent]
        if value is REMOVE:
            del section[key]
        else:
            section[key] = value
    return raw


def problems(changes: dict[str, Any]) -> list[str]:
    with pytest.raises(ParamsError) as error:
        check_params(changed(changes))
    return error.value.problems


def test_valid_params() -> None:
    params = check_params(VALID)
    assert params.accumulation_steps("frugal") == 4
    assert params.accumulation_steps("baseline") == 1
    assert params.variants["frugal"].recompute == BlockGroups(every_n_blocks=2)
    assert params.training.num_steps == 489  # 1,000,000 / (32 x 64), rounded up
    assert list(params.variants) == ["baseline", "frugal"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # keys
        ({"trainning": {}}, "trainning: unknown key; did you mean training?"),
        ({"model.hiden_size": 1}, "model.hiden_size: unknown key; did you mean hidden_size?"),
        (
            {"evaluation.samples.temprature": 1},
            "evaluation.samples.temprature: unknown key; did you mean temperature?",
        ),
        (
            {"variants.frugal.precison": "fp32"},
            "variants.frugal.precison: unknown key; did you mean precision?",
        ),
        (
            {"corpus.zzz": 1},
            "corpus.zzz: unknown key; known keys: source, validation_every",
        ),
        ({"seed": REMOVE}, "seed: is missing"),
        ({"training.learning_rate": REMOVE}, "training.learning_rate: is missing"),
        ({"variants.frugal.micro_batch_size": REMOVE}, "variants.frugal.micro_batch_size: is missing"),
        # kinds
        ({"model": 3}, "model: must be a mapping of keys, found 3"),
        ({"variants": ["a"]}, "variants: must be a mapping of keys, found ['a']"),
        ({"variants": None}, "variants: must be a mapping of keys, found None"),
        ({"variants": {}}, "variants: is empty; add at least one variant"),
        ({"variants.frugal": None}, "variants.frugal: must be a mapping of keys, found None"),
        (
            {"variants": {"a-b": {"micro_batch_size": 1}}},
            "variants.a-b: a variant's name is a file name: letters, digits and _ only, "
            "starting with a letter",
        ),
        # values
        ({"seed": -1}, "seed: input should be greater than or equal to 0, found -1"),
        ({"training.token_budget": 0}, "training.token_budget: input should be greater than 0, found 0"),
        (
            {"training.sequences": "folded"},
            "training.sequences: input should be 'packed' or 'padded', found 'folded'",
        ),
        (
            {"hardware.device": "gpu"},
            "hardware.device: input should be 'auto', 'cuda' or 'cpu', found 'gpu'",
        ),
        # corpus
        (
            {"corpus": {"source": "web"}},
            "corpus.source: must be one of 'embedded', 'files', 'hub', found 'web'",
        ),
        ({"corpus": {}}, "corpus.source: must be one of 'embedded', 'files', 'hub', found None"),
        ({"corpus": {"source": "files"}}, "corpus.paths: is missing"),
        (
            {"corpus": {"source": "hub", "dataset": "a/b", "revision": "main"}},
            "corpus.revision: 'main' is a branch, which moves; use the commit hash that the "
            "dataset's page shows under Files and versions",
        ),
        # rules inside a section
        (
            {"model.num_attention_heads": 6},
            "model.num_attention_heads: 6 does not divide model.hidden_size 64; use 1, 2, 4, 8, 16, 32 or 64",
        ),
        (
            {"model.num_attention_heads": 64},
            "model.num_attention_heads: 64 heads make a head size of 1; rotary position embedding "
            "turns pairs of channels, so the head size must be even",
        ),
        (
            {"model.num_key_value_heads": 3},
            "model.num_key_value_heads: 3 does not divide model.num_attention_heads 4; use 1, 2 or 4",
        ),
        (
            {"training.warmup_steps": 489},
            "training.warmup_steps: 489 leaves nothing of the 489 steps that training.token_budget "
            "1000000 makes; lower it or raise the budget",
        ),
        # rules between sections
        (
            {"variants.frugal.micro_batch_size": 7},
            "variants.frugal.micro_batch_size: 7 does not divide training.global_batch_size 32; "
            "use 1, 2, 4, 8, 16 or 32",
        ),
        (
            {"training.sequence_length": 256, "training.warmup_steps": 1},
            "training.sequence_length: 256 is more than model.max_position_embeddings 128; raise the latter",
        ),
    ],
)
def test_one_mistake_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    assert problems(changes) == [message]


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (
            "sometimes",
            "variants.frugal.recompute: input should be 'none', 'every_block', 'selective' or 'offload', "
            "found 'sometimes'",
        ),
        (
            {"every_n_block": 2},
            "variants.frugal.recompute.every_n_block: unknown key; did you mean every_n_blocks?",
        ),
        (
            {"every_n_blocks": 0},
            "variants.frugal.recompute.every_n_blocks: input should be greater than 0, found 0",
        ),
        (
            {"budget": 1.5},
            "variants.frugal.recompute.budget: input should be less than or equal to 1, found 1.5",
        ),
        (
            {"budgte": 0.5},
            "variants.frugal.recompute.budgte: unknown key; did you mean budget?",
        ),
    ],
)
def test_recompute_is_a_word_or_a_mapping(value: Any, part: str) -> None:
    assert part in problems({"variants.frugal.recompute": value})


def test_all_problems_at_once() -> None:
    found = problems(
        {
            "seed": REMOVE,
            "model.hiden_size": 1,
            "training.token_budget": -1,
            "variants.frugal.precision": "fp4",
            "variants.baseline.micro_batch_size": 5,
        }
    )
    # The rule on micro_batch_size needs the training section, which is broken itself.
    assert [problem.split(":")[0] for problem in found] == [
        "model.hiden_size",
        "training.token_budget",
        "variants.frugal.precision",
        "seed",
    ]
    found = problems(
        {"seed": -1, "variants.baseline.micro_batch_size": 5, "variants.frugal.micro_batch_size": 7}
    )
    assert [problem.split(":")[0] for problem in found] == [
        "seed",
        "variants.baseline.micro_batch_size",
        "variants.frugal.micro_batch_size",
    ]


def test_message_counts_and_names_the_file() -> None:
    with pytest.raises(ParamsError, match=r"^my\.yaml: 1 problem\n  seed: ") as one:
        check_params(changed({"seed": "x"}), source="my.yaml")
    assert "1 problems" not in str(one.value)
    with pytest.raises(ParamsError, match=r"^params: 2 problems\n  "):
        check_params(changed({"seed": "x", "b": 1}))


@pytest.mark.parametrize("raw", [None, 3, "text", ["a"]])
def test_not_a_mapping(raw: Any) -> None:
    with pytest.raises(ParamsError, match="must be a mapping of sections, found " + type(raw).__name__):
        check_params(raw)


def test_params_are_frozen() -> None:
    params = check_params(VALID)
    with pytest.raises(ValueError, match="frozen"):
        params.training.learning_rate = 1.0  # type: ignore[misc]


def test_a_bare_off_is_the_word_in_both_yaml_versions() -> None:
    for value in ("off", False):
        params = check_params(changed({"variants.frugal.compile": value}))
        assert params.variants["frugal"].compile == "off"


def test_flatten() -> None:
    flat = flatten(check_params(VALID))
    assert flat["training.learning_rate"] == 0.001
    assert flat["variants.frugal.recompute.every_n_blocks"] == 2
    assert flat["evaluation.samples.prompts"] == ("a",)
    assert not any(isinstance(value, dict) for value in flat.values())


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_reads_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "params.yaml", yaml.safe_dump(VALID, sort_keys=False).encode())
    assert load_params(path) == check_params(VALID)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="no such file; run from the repository's root"):
        load_params(tmp_path / "params.yaml")


@pytest.mark.parametrize(
    "content",
    [
        b"seed: [1",
        b"a: b: c",
        b"\tseed: 1",
        b"seed: \xff\xfe",
        b"seed: \x00",
        b"seed: !!python/object:os.system {}",
        b"? [a, b]\n: 1",
        # A date that no calendar has, a number of 5,000 digits and deep nesting leave PyYAML as a
        # ValueError and a RecursionError.
        b"seed: 2001-99-99",
        b"seed: " + b"9" * 5000,
        b"[" * 3000,
    ],
    ids=lambda content: content[:16].decode("latin-1"),
)
def test_not_yaml(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="cannot be read as YAML"):
        load_params(write(tmp_path / "params.yaml", content))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="cannot be read"):
        load_params(tmp_path)


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="must be a mapping of sections, found NoneType"):
        load_params(write(tmp_path / "params.yaml", b""))


# Numbers stay below a million: the rules list divisors, see the report on section.py.
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-5, 10**6)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["off", "none", "fp32", "tf32", "cpu", "hub", "files", "embedded"])
)
keys = (
    st.sampled_from(["source", "every_n_blocks", "budget", "model", "precision", "revision"])
    | st.text(max_size=4)
    | st.integers()
    | st.none()
    | st.booleans()
)
nested = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


def paths(section: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in section.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += paths(value, (*prefix, key))
    return found


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """VALID with one to three places set to anything, removed or added."""
    raw = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        *parents, key = draw(st.sampled_from(paths(VALID)))
        section: Any = raw
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            continue
        action = draw(st.sampled_from(["set", "remove", "add"]))
        if action == "remove":
            section.pop(key, None)
        else:
            section[key if action == "set" else draw(keys)] = draw(nested)
    return raw


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(damaged() | nested)
def test_anything_is_params_or_a_params_error(raw: Any) -> None:
    try:
        params = check_params(raw)
    except ParamsError as error:
        assert error.problems
        assert all(problem.strip() for problem in error.problems)
        assert str(error)
    else:
        assert isinstance(params, Params)
        assert check_params(params.model_dump()) == params
