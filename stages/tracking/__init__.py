"""MLflow, kept at arm's length: no other room imports mlflow, and training never waits for it.

The trainer writes a journal on disk (`journal`), and that is all it does. A process of its own, at
the lowest CPU priority, carries the journal to the MLflow server (`background`, `send`, `sender`).
What it could not send, `python -m stages.tracking.sync` sends later.
"""

from stages.tracking.provenance import outs_md5_tags, provenance_tags
from stages.tracking.run_tracker import RunTracker, TokensDataset, append_to_run
from stages.tracking.store import project_root, work_root

__all__ = [
    "RunTracker",
    "TokensDataset",
    "append_to_run",
    "outs_md5_tags",
    "project_root",
    "provenance_tags",
    "work_root",
]
