"""Moto's S3 server as a process of its own: real HTTP, real signatures, keys that it checks."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
import botocore.session
from botocore.config import Config

BUCKET = "results"
_SERVE = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
# Those of `_bucket_and_key`; all later ones must be signed with a key that the server knows.
_CALLS_WITHOUT_KEY = 4


@dataclass(frozen=True)
class S3Server:
    """One bucket, and the key of a user who may write there."""

    endpoint: str
    key_id: str
    secret: str
    empty_file: str

    def environment(self) -> dict[str, str]:
        """What a user sets, and nothing of the developer's own account or proxy."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": self.empty_file,
            "AWS_SHARED_CREDENTIALS_FILE": self.empty_file,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def objects(self) -> dict[str, int]:
        """Bytes by key."""
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", [])}

    def read(self, key: str) -> bytes:
        return self._client().get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def _client(self) -> Any:
        return _client("s3", self.endpoint, self.key_id, self.secret)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        env={"INITIAL_NO_AUTH_ACTION_COUNT": str(_CALLS_WITHOUT_KEY), "PATH": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with tempfile.NamedTemporaryFile() as empty:
            yield S3Server(endpoint, *_bucket_and_key(endpoint), empty_file=empty.name)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def _bucket_and_key(endpoint: str) -> tuple[str, str]:
    iam = _client("iam", endpoint, "nobody", "nothing")
    _client("s3", endpoint, "nobody", "nothing").create_bucket(Bucket=BUCKET)
    iam.create_user(UserName="trainer")
    policy = '{"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}}'
    iam.put_user_policy(UserName="trainer", PolicyName="storage", PolicyDocument=policy)
    key = iam.create_access_key(UserName="trainer")["AccessKey"]
    return key["AccessKeyId"], key["SecretAccessKey"]


def _client(service: str, endpoint: str, key_id: str, secret: str) -> Any:
    # No profile of the developer's: nothing is asked where it may be named.
    session = botocore.session.Session(session_vars={"profile": (None, None, None, None)})
    return boto3.Session(botocore_session=session).client(
        service,
        config=Config(proxies={}),
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
    )
