"""`python -m stages.tracking.ui`: the MLflow UI over this repository's runs, on 127.0.0.1."""

import argparse
import os
import socket
import sys
from typing import TYPE_CHECKING

from stages.params import ParamsError, load_params
from stages.tracking.store import connect, in_words, project_root, set_mlflow_defaults, store_from_environment

if TYPE_CHECKING:
    from mlflow import MlflowClient


def main() -> int:
    parser = argparse.ArgumentParser(description="Show the runs in the MLflow UI.")
    parser.add_argument("--port", type=int, default=5000)
    port = parser.parse_args().port
    store = store_from_environment()
    if store.uri.startswith(("http://", "https://", "databricks")):
        print(f"tracking: MLFLOW_TRACKING_URI names a server that has a UI of its own: {store.name}")
        return 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            print(
                f"tracking: port {port} cannot be used ({error}); choose another: "
                "python -m stages.tracking.ui --port 5001",
                file=sys.stderr,
            )
            return 1
    set_mlflow_defaults()
    # Background jobs (gateway, evaluations) would cost 2 GB and are of no use here.
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    try:
        curves = _curves_page(connect(store))
    except Exception as error:  # one sentence, whatever the store throws
        print(f"tracking: {store.name} cannot be opened: {in_words(error)}", file=sys.stderr)
        return 1
    artifacts = store.artifact_location or (project_root() / "mlartifacts").as_uri()
    print(f"tracking: in a moment at http://127.0.0.1:{port}/{curves} (Ctrl-C ends it)", flush=True)
    os.execv(
        sys.executable,
        [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
            *("--workers", "1", "--backend-store-uri", store.uri, "--default-artifact-root", artifacts),
        ],
    )


def _curves_page(client: "MlflowClient") -> str:
    """The page with all curves overlaid: MLflow opens on one for language-model applications."""
    try:
        experiment = client.get_experiment_by_name(load_params().tracking.experiment)
    except ParamsError:
        experiment = None
    return f"#/experiments/{experiment.experiment_id}/runs?compareRunsMode=CHART" if experiment else ""


if __name__ == "__main__":
    sys.exit(main())
