"""The commands of these tests meet the test's own account and addresses."""

import os

import pytest


@pytest.fixture(autouse=True)
def nothing_of_the_developers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
