"""Recorded replies of a coordinator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import json_format

from starlings_protos import control_pb2

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def recorded() -> Callable[[str], control_pb2.StatusReply]:
    def load(name: str) -> control_pb2.StatusReply:
        return json_format.Parse((RECORDED / f"{name}.json").read_text(), control_pb2.StatusReply())

    return load
