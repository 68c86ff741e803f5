"""`python -m stages.tracking.initialise`: create MLflow's database, once, before any stage.

Nothing depends on it: who comes first creates the schema, under a lock. It takes two seconds of CPU
that are better spent at set-up than beside a training.
"""

import contextlib
import json
import sqlite3
import sys
from importlib.metadata import version
from pathlib import Path

from stages.tracking.store import Store, connect, in_words, sqlite_file, store_from_environment, work_root


def main() -> int:
    store = store_from_environment()
    known = work_root() / "tracking" / "schema.json"
    if (schema := _schema(store)) and schema == _read(known):
        return _say_ready(store)  # known without importing mlflow, which takes seconds
    try:
        connect(store)
    except Exception as error:  # one sentence, whatever the store throws
        print(
            f"tracking: {store.name} is not ready: {in_words(error)}; training is not affected, "
            "`make sync` sends its runs later",
            file=sys.stderr,
        )
        return 0
    if schema := _schema(store):
        with contextlib.suppress(OSError):  # it only saves time
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(json.dumps(schema))
    return _say_ready(store)


def _say_ready(store: Store) -> int:
    print(f"tracking: {store.name} is ready")
    return 0


def _schema(store: Store) -> dict[str, str] | None:
    """MLflow's version and the revision of the schema in the file; None for a server and for no database."""
    file = sqlite_file(store)
    if file is None or not file.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as database:
            (revision,) = database.execute("select version_num from alembic_version").fetchone()
    except (sqlite3.Error, TypeError):  # no database, or none of MLflow's
        return None
    return {"mlflow": version("mlflow"), "store": store.uri, "revision": str(revision)}


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
