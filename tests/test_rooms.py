"""The shape of the house: who may import whom, and what the engine needs to be installed."""

import ast
import subprocess
import sys
from pathlib import Path

STAGES = Path(__file__).parents[1] / "stages"
FLOORS = {
    "params": 0,
    "data": 1,
    "model": 1,
    "measure": 1,
    "training": 2,
    "evaluation": 2,
    "memory": 2,
    "tracking": 3,
    "report": 3,
}
_ENGINE = ("model", "measure", "memory", "training")

# Runs in a process of its own: only what the engine promises to need may be found.
_IMPORT_THE_ENGINE = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ModuleNotFoundError(f"{{name}} is not needed by the engine")

sys.meta_path.insert(0, Refuse())
for module in {modules}:
    importlib.import_module(module)
"""


def modules() -> list[Path]:
    found = sorted(STAGES.rglob("*.py"))
    assert len(found) > 50
    return found


def imports(module: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def floor(parts: list[str]) -> int:
    return FLOORS.get(parts[1], 4) if len(parts) > 1 else 4


def test_a_room_imports_only_from_floors_below_and_from_itself() -> None:
    upwards = []
    for module in modules():
        own = ["stages", *module.relative_to(STAGES).with_suffix("").parts]
        for name in imports(module):
            parts = name.split(".")
            if parts[0] != "stages" or own == ["stages", "__init__"] or floor(own) == 4:
                continue
            if parts[1] != own[1] and floor(parts) > floor(own):
                upwards.append(f"{'.'.join(own)} imports {name}")
    assert upwards == []


def test_only_the_tracking_room_knows_mlflow() -> None:
    others = [
        str(module.relative_to(STAGES))
        for module in modules()
        if module.parent.name != "tracking"
        and any(name.split(".")[0] == "mlflow" for name in imports(module))
    ]
    assert others == []


def test_the_engine_imports_with_torch_numpy_pydantic_and_yaml_alone() -> None:
    names = [
        ".".join(["stages", *module.relative_to(STAGES).with_suffix("").parts]).removesuffix(".__init__")
        for module in modules()
        if module.relative_to(STAGES).parts[0] in _ENGINE
    ]
    refused = {
        "dvc",
        "datasets",
        "matplotlib",
        "mlflow",
        "pyarrow",
        "rich",
        "safetensors",
        "scipy",
        "tokenizers",
        "transformers",
    }
    code = _IMPORT_THE_ENGINE.format(refused=refused, modules=names)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=STAGES.parent, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
