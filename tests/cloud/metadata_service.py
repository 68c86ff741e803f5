"""The address over which clouds talk to a machine, 169.254.169.254, in a network of the test's own.

`python metadata_service.py CLOUD NOTICE COMMAND…`, run in a new network namespace, answers there as CLOUD
(aws, google, azure) says that it does, and gives a spot machine's notice once the file NOTICE is there, while
it runs COMMAND.
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ADDRESS = "169.254.169.254"
_WAYS = (("unshare", "--net"), ("unshare", "--map-root-user", "--net"))
# <linux/sockios.h>, <linux/if.h>
_SET_ADDRESS, _SET_FLAGS, _UP = 0x8916, 0x8914, 1


def own_network() -> tuple[str, ...] | str:
    """The command that gives another one a network of its own; where none works here, why."""
    reasons = []
    for way in _WAYS:
        try:
            done = subprocess.run([*way, "true"], capture_output=True, text=True, check=False)
        except OSError as error:
            return f"unshare: {error.strerror}"
        if done.returncode == 0:
            return way
        reasons.append(f"{' '.join(way)}: {done.stderr.strip()}")
    return "; ".join(reasons)


def command(way: Sequence[str], cloud: str, notice: Path, *command: str) -> list[str]:
    return [*way, sys.executable, __file__, cloud, str(notice), *command]


class Cloud(BaseHTTPRequestHandler):
    """One of the three; which one decides the subclass."""

    notice: Path

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def refuse(self, status: int) -> None:
        self.answer(f"{status}\n", status)

    def do_PUT(self) -> None:
        self.refuse(405)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Amazon(Cloud):
    def do_PUT(self) -> None:
        is_token = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer("AQAEALOO==") if is_token else self.refuse(400)

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "AQAEALOO==":
            self.refuse(401)
        elif self.path == "/latest/meta-data/spot/instance-action" and self.notice.exists():
            self.answer('{"action": "terminate", "time": "2026-11-18T08:22:00Z"}')
        else:
            self.refuse(404)


class Google(Cloud):
    def do_GET(self) -> None:
        if self.headers["Metadata-Flavor"] != "Google":
            self.refuse(403)
        elif self.path == "/computeMetadata/v1/instance/preempted":
            self.answer("TRUE" if self.notice.exists() else "FALSE")
        else:
            self.refuse(404)


class Azure(Cloud):
    """A machine of a scale set, of which another one is always being taken."""

    def do_GET(self) -> None:
        if self.headers["Metadata"] != "true":
            self.refuse(400)
        elif self.path.startswith("/metadata/instance/compute/name?api-version=2021-02-01&format=text"):
            self.answer("trainer_1")
        elif self.path == "/metadata/scheduledevents?api-version=2020-07-01":
            taken = ["trainer_0", *(["trainer_1"] if self.notice.exists() else [])]
            events = [self._event("Reboot", "trainer_1"), *(self._event("Preempt", name) for name in taken)]
            self.answer(json.dumps({"DocumentIncarnation": 1, "Events": events}))
        else:
            self.refuse(404)

    def _event(self, kind: str, machine: str) -> dict[str, object]:
        when = "Mon, 19 Sep 2026 18:29:47 GMT"
        return {
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [machine],
            "NotBefore": when,
        }


CLOUDS = {"aws": Amazon, "google": Google, "azure": Azure}


def _give_the_machine_its_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        address = struct.pack("16sH2x4s8x", b"lo:0", socket.AF_INET, socket.inet_aton(ADDRESS))
        fcntl.ioctl(any_socket, _SET_ADDRESS, address)
        for name in (b"lo", b"lo:0"):
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", name, _UP))


def _serve(cloud: str, notice: str, arguments: list[str]) -> int:
    _give_the_machine_its_address()
    handler = type(cloud, (CLOUDS[cloud],), {"notice": Path(notice)})
    with ThreadingHTTPServer((ADDRESS, 80), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status = subprocess.run(arguments, env=os.environ, check=False).returncode
        server.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1], sys.argv[2], sys.argv[3:]))
