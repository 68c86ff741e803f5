"""`python docker/cloud/spot.py`: the pipeline on a machine that its cloud may take back; results are pushed.

Runs `python -m stages.repro` in the current folder, which saves on SIGTERM. To that it adds:

- AWS, Google and Azure tell the machine alone that they take it back, over HTTP, and no signal of theirs gets
  into a container before it is killed. Here they are asked, and the pipeline gets the SIGTERM.
- With FRUGAL_DVC_REMOTE=s3://BUCKET/FOLDER a complete run is pushed there: the objects of DVC's cache, and in
  runs/ID/ the dvc.lock and params.yaml that name them. Whether that will work is tried before training.

Exit status: 0 complete and pushed; 75 stopped and saved, start it again; any other is a failure's.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = os.EX_TEMPFAIL
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RECORDS = ("dvc.lock", "params.yaml")
_REMOTE = "frugal"

_METADATA = "http://169.254.169.254"
# Google and Azure give 30 seconds.
_ASK_EVERY_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 60.0


def main() -> int:
    remote = os.environ.get("FRUGAL_DVC_REMOTE", "").rstrip("/")
    runner = Runner()
    for number in _FORWARDED:
        signal.signal(number, runner.pass_on)
    threading.Thread(target=watch, args=[runner.machine_is_taken], name="spot-notice", daemon=True).start()
    if remote and (problem := try_remote(remote)):
        _say(f"FRUGAL_DVC_REMOTE is {remote}, and nothing can be written there: {problem}")
        return 1
    status = runner.run(sys.executable, "-m", "stages.repro")
    if status == 0 and remote:
        status = push(runner, remote)
    return status


class Runner:
    """Runs one command after another and ends the one that runs when the machine goes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._is_taken = False

    def run(self, *command: str) -> int:
        """Its exit status; 75 where a stop or a notice came before it was complete."""
        if self._is_stopped:
            return EXIT_INTERRUPTED
        # A group of its own: an init or a terminal that signals a whole group would make two signals of one,
        # and the second means "stop at once".
        self._process = subprocess.Popen(command, process_group=0)
        if self._is_stopped:  # between the last look and Popen
            self._process.send_signal(signal.SIGTERM)
        status = self._process.wait()
        if self._is_stopped and status != 0:
            return EXIT_INTERRUPTED
        return status if status >= 0 else 128 - status

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """A signal to this process. After a notice it is no news, and must not cut the saving short."""
        if not self._is_taken:
            self._stop(number)

    def machine_is_taken(self, notice: str) -> None:
        _say(f"this machine is being taken back ({notice}); the run is stopped and saved")
        self._is_taken = True
        if not self._is_stopped:
            self._stop(signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self._is_stopped = True
        if self._process is not None:
            self._process.send_signal(number)


# --- notices ----------------------------------------------------------------------------------------------


def watch(on_notice: Callable[[str], None]) -> None:
    """Ask this machine's cloud until it gives notice; returns then."""
    is_first, cloud = True, None
    while True:
        cloud = cloud or _find_cloud()
        if cloud is None and is_first:
            _say("no AWS, Google or Azure answers here: only a signal can stop this run in time")
        is_first = False
        if cloud is not None and (notice := _ask(cloud)):
            on_notice(f"{cloud}: {notice}")
            return
        time.sleep(_ASK_EVERY_SECONDS if cloud else _LOOK_AGAIN_SECONDS)


def _find_cloud() -> str | None:
    for cloud, ask in _CLOUDS.items():
        try:
            ask()
        except _NO_ANSWER:
            continue
        _say(f"asking {cloud} every second whether it takes this machine back")
        return cloud
    return None


def _ask(cloud: str) -> str | None:
    try:
        return _CLOUDS[cloud]()
    except _NO_ANSWER:
        return None  # busy for once


def _aws() -> str | None:
    token = _fetch("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    try:
        return _fetch("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except urllib.error.HTTPError as error:
        if error.code == 404:  # nothing is planned
            return None
        raise


def _google() -> str | None:
    is_preempted = _fetch("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if is_preempted not in ("TRUE", "FALSE"):
        raise ValueError(is_preempted)
    return "preempted" if is_preempted == "TRUE" else None


def _azure() -> str | None:
    headers = {"Metadata": "true"}
    me = _fetch("/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    # The first answer may take Azure two minutes. Machines of one scale set hear of each other.
    events = json.loads(_fetch("/metadata/scheduledevents?api-version=2020-07-01", headers, seconds=150))
    for event in events["Events"]:
        if event["EventType"] == "Preempt" and me in event["Resources"]:
            return f"Preempt, not before {event['NotBefore']}"
    return None


_CLOUDS: Mapping[str, Callable[[], str | None]] = {"AWS": _aws, "Google": _google, "Azure": _azure}
_NO_ANSWER = (OSError, HTTPException, ValueError, KeyError, TypeError)
# The address is the machine's own, whatever proxy the environment names.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def _fetch(path: str, headers: Mapping[str, str], *, method: str = "GET", seconds: float = 2) -> str:
    """
    Raises:
        OSError: no answer, or one that says no (urllib.error.HTTPError).
    """
    request = urllib.request.Request(_METADATA + path, headers=dict(headers), method=method)
    with _open(request, timeout=seconds) as answer:
        return answer.read().decode().strip()


# --- results ----------------------------------------------------------------------------------------------


def try_remote(remote: str) -> str | None:
    """Write something small there; what goes wrong, in one line, or None."""
    try:
        storage, folder = _storage(remote)
        storage.pipe_file(f"{folder}/runs/.writable", b"")
    except Exception as error:  # each kind of storage raises its own
        return " ".join(str(error).split()) or type(error).__name__
    return None


def push(runner: Runner, remote: str) -> int:
    """The exit status. What is there already is not sent again."""
    dvc = (sys.executable, "-m", "dvc")
    # --local: in a file that git ignores. DVC_* variables cannot name a remote.
    status = runner.run(*dvc, "remote", "add", "--quiet", "--local", "--default", "--force", _REMOTE, remote)
    status = status or runner.run(*dvc, "push")
    if status:
        return status
    storage, folder = _storage(remote)
    records = {name: Path(name).read_bytes() for name in _RECORDS}
    run = hashlib.sha256(b"".join(records.values())).hexdigest()[:12]
    for name, content in records.items():
        storage.pipe_file(f"{folder}/runs/{run}/{name}", content)
    _say(f"pushed to {remote}; {' and '.join(_RECORDS)} are in runs/{run}")
    return 0


def _storage(remote: str) -> tuple[Any, str]:
    """A file system of fsspec's, which is what DVC writes with, and the folder in it."""
    from fsspec.core import url_to_fs

    return url_to_fs(remote)


def _say(text: str) -> None:
    print(f"spot: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
