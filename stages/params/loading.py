"""Reads `params.yaml` and reports everything that is wrong with it at once."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, SerializeAsAny, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from stages.params.data import CorpusParams, TokenizerParams
from stages.params.run import (
    CheckpointParams,
    EvaluationParams,
    HardwareParams,
    ModelParams,
    TrackingParams,
    TrainingParams,
)
from stages.params.section import Section
from stages.params.variant import VariantParams, VariantToPlan


class _NoDuplicates(yaml.SafeLoader):
    """YAML lets a key stand twice and keeps the last: of two variants of one name one would vanish."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1 and key != "<<":
                raise yaml.YAMLError(f"the key {key} stands twice in one mapping{node.start_mark}")
        return super().construct_mapping(node, deep)


_VARIANT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class Params(Section):
    """The whole of `params.yaml`."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Initial weights and the order of the data follow from it."""
    corpus: CorpusParams
    tokenizer: TokenizerParams
    model: ModelParams
    training: TrainingParams
    evaluation: EvaluationParams = EvaluationParams()
    checkpoints: CheckpointParams = CheckpointParams()
    hardware: HardwareParams = HardwareParams()
    tracking: TrackingParams = TrackingParams()
    variants: Annotated[dict[str, SerializeAsAny[VariantParams]], Field(min_length=1)]
    """By name, in the order of the report; the first is what the others are compared with. One that leaves
    something to the plan is a VariantToPlan; `stages.planned.planned_params` gives what it became."""

    def accumulation_steps(self, variant: str) -> int:
        return self.variants[variant].accumulation_steps(self.training.global_batch_size, self.training.ranks)

    def require_variant(self, variant: str) -> None:
        """Raises ParamsError, naming the nearest, where there is no variant of this name."""
        if variant not in self.variants:
            raise ParamsError(
                "params.yaml",
                [f"variants.{variant}: no such variant{_nearest(variant, list(self.variants))}"],
            )


class ParamsError(ValueError):
    """Everything that is wrong with a params file, one line each, each starting with its key."""

    def __init__(self, source: str, problems: list[str]):
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count}", *problems]))


def load_params(path: str | Path = "params.yaml") -> Params:
    """Read and check a params file.

    Raises:
        ParamsError: the file is missing, not YAML, or breaks a rule; it lists every problem.
    """
    path = Path(path)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _NoDuplicates)
    except FileNotFoundError:
        message = "no such file; run from the repository's root, where params.yaml is"
        raise ParamsError(str(path), [message]) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ParamsError(str(path), [f"cannot be read as YAML: {error}"]) from None
    return check_params(raw, source=str(path))


def check_params(raw: Any, source: str = "params") -> Params:
    """Turn plain data into `Params`.

    Raises:
        ParamsError: lists every broken rule, also those between sections that are whole.
    """
    if not isinstance(raw, dict):
        raise ParamsError(source, [f"must be a mapping of sections, found {type(raw).__name__}"])
    problems: list[str] = []
    sections: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in Params.model_fields:
            problems.append(f"{name}: unknown key{_nearest(str(name), list(Params.model_fields))}")
        elif name == "variants" and isinstance(value, dict):
            sections[name] = {
                key: _read(f"variants.{key}", _variant_kind(variant), variant, problems)
                for key, variant in value.items()
            }
            problems += [
                f"variants.{key}: a variant's name is a file name: letters, digits and _ only, "
                "starting with a letter"
                for key in value
                if not isinstance(key, str) or not _VARIANT_NAME.fullmatch(key)
            ]
            if not value:
                problems.append("variants: is empty; add at least one variant")
        else:
            field = Params.model_fields[name]
            annotation = (
                Annotated[field.annotation, *field.metadata, field] if field.metadata else field.annotation
            )
            if name == "corpus":
                annotation = CorpusParams
            sections[name] = _read(name, annotation, value, problems)
    problems += [
        f"{name}: is missing"
        for name, field in Params.model_fields.items()
        if field.is_required() and name not in raw
    ]
    problems += list(_problems_between(sections))
    if problems:
        raise ParamsError(source, problems)
    return Params(**sections)


def _variant_kind(value: Any) -> type[VariantParams]:
    """The class that reads a variant; a section that was read already stays of its kind."""
    if isinstance(value, dict) and ("fit" in value or value.get("micro_batch_size") == "auto"):
        return VariantToPlan
    return VariantParams


def _read(path: str, annotation: Any, value: Any, problems: list[str]) -> Any:
    """Validate one section; add its problems under `path`. None where it cannot be made."""
    try:
        section = TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        # Members of a union complain alike; one line is enough.
        problems += dict.fromkeys(_in_words(path, annotation, value, details) for details in error.errors())
        return None
    if isinstance(section, Section):
        problems += [f"{path}.{key}: {message}" for key, message in section.problems()]
    return section


def _problems_between(sections: dict[str, Any]) -> Iterator[str]:
    training, model = sections.get("training"), sections.get("model")
    hardware = sections.get("hardware")
    if training and model and training.sequence_length > model.max_position_embeddings:
        yield (
            f"training.sequence_length: {training.sequence_length} is more than "
            f"model.max_position_embeddings {model.max_position_embeddings}; raise the latter"
        )
    if training and hardware and training.ranks > 1 and hardware.on_out_of_memory == "halve":
        yield (
            f"hardware.on_out_of_memory: halve is for one rank and training.ranks is {training.ranks}: the "
            "others cannot know that one ran out of memory; use stop"
        )
    for name, variant in (sections.get("variants") or {}).items():
        if variant is not None:
            for key, message in variant.conflicts(training, hardware):
                yield f"variants.{name}.{key}: {message}"


def _in_words(path: str, annotation: Any, value: Any, details: ErrorDetails) -> str:
    """One pydantic error as `key: what was found, what is allowed`."""
    keys, model = _follow(annotation, value, details["loc"])
    place = ".".join([path, *keys])
    found = details["input"]
    match details["type"]:
        case "extra_forbidden":
            known = list(model.model_fields) if model else []
            return f"{place}: unknown key{_nearest(keys[-1], known)}"
        case "missing":
            return f"{place}: is missing"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{place}: must be a mapping of keys, found {found!r}"
        case "union_tag_not_found" | "union_tag_invalid":
            allowed = details["ctx"].get("expected_tags", "'embedded', 'files', 'hub'")
            found_source = found.get("source") if isinstance(found, dict) else found
            return f"{place}.source: must be one of {allowed}, found {found_source!r}"
        case _:
            message = details["msg"].removeprefix("Value error, ")
            return f"{place}: {message[:1].lower()}{message[1:]}, found {found!r}"


def _follow(
    annotation: Any, value: Any, loc: tuple[int | str, ...]
) -> tuple[list[str], type[BaseModel] | None]:
    """The keys of an error's location without pydantic's union tags, and the section it is in."""
    keys: list[str] = []
    for part in loc:
        is_key = isinstance(value, dict) and part in value
        if is_key or (isinstance(value, list | tuple) and isinstance(part, int)):
            value = value[part]
            keys.append(str(part))
    parents = [str(part) for part in loc[: -1 if loc else None]]
    if loc and (not keys or keys[-1] != str(loc[-1])) and not _is_union_tag(str(loc[-1])):
        keys.append(str(loc[-1]))
    return keys, _section_at(annotation, parents)


def _is_union_tag(part: str) -> bool:
    branches = ("literal[", "function-", "constrained-")
    return part.startswith(branches) or part in ("BlockGroups", "MemoryBudget")


def _section_at(annotation: Any, parents: list[str]) -> type[BaseModel] | None:
    """The section class that the keys `parents` lead to."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    candidates += [arg for c in candidates for arg in getattr(c, "__args__", ())]
    classes = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    if not parents:
        return classes[0] if classes else None
    for cls in classes:
        source = cls.model_fields.get("source")
        if source is not None and parents[0] in getattr(source.annotation, "__args__", ()):
            return _section_at(cls, parents[1:])
        if parents[0] in cls.model_fields:
            return _section_at(cls.model_fields[parents[0]].annotation, parents[1:])
        if cls.__name__ == parents[0]:
            return _section_at(cls, parents[1:])
    return None


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known keys: {', '.join(known)}" if known else ""


def flatten(section: Section | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested params as `{"training.learning_rate": 0.001}`, the form of MLflow and `dvc params`."""
    items = section.model_dump() if isinstance(section, Section) else section
    flat: dict[str, Any] = {}
    for key, value in items.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
