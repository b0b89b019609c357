"""An engine whose device never ends what it began in an earlier life makes way for another process."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator

import pytest

from starlings_protos import process_pb2
from starlings_protos.authority import CertificateAuthority
from starlings_worker import engine_process
from starlings_worker.engine_pipe import EnginePipe
from starlings_worker.engine_process import EngineProcess
from starlings_worker.errors import ExitCode
from support.broker import new_identity


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    monkeypatch.setattr(engine_process, "HUNG_AFTER_S", 0.3)
    identity = new_identity(CertificateAuthority.create("hang", time.time()))
    start = process_pb2.StartEngine(
        worker_id=identity.peer.id,
        key_pem=identity.key_pem,
        certificate_pem=identity.certificate_pem,
        ca_pem=identity.ca_pem,
        device="cpu",
    )
    made = EngineProcess(start, EnginePipe(io.BytesIO(), io.BytesIO()))
    yield made
    made._compute.shutdown(wait=True)


async def test_a_device_that_hangs_ends_the_process_and_its_supervisor_is_told(
    engine: EngineProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    released = threading.Event()
    engine._compute.submit(released.wait, 30.0)
    try:
        await engine._device_answers()
    finally:
        released.set()
    assert engine._ended.is_set()
    assert engine._exit_code == ExitCode.BUG, "the supervisor starts another engine after this code"
    assert "the device hangs" in capfd.readouterr().err


async def test_a_device_that_ends_what_it_began_goes_on(engine: EngineProcess) -> None:
    ended = threading.Event()
    engine._compute.submit(ended.wait, 0.05)
    await engine._device_answers()
    assert not engine._ended.is_set()
