"""Where an invite comes from, which job or swarm a command means, what sizes and lifetimes may look like."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from starlings import directories
from starlings.commands import owner, swarm
from starlings.demo.fleet import fleet
from starlings.failures import CommandError
from starlings.output import as_dict
from starlings_protos import control_pb2
from starlings_worker.device_classes import device_class


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user data directory of the test's own."""
    monkeypatch.setattr("platformdirs.user_data_dir", lambda name, appauthor: str(tmp_path / name))
    monkeypatch.delenv("STARLINGS_INVITE", raising=False)
    return tmp_path / "starlings"


def test_an_invite_comes_from_argument_file_stdin_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "invite.txt"
    file.write_text("starlings://file\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("starlings://stdin\nmore\n"))
    monkeypatch.setenv("STARLINGS_INVITE", "starlings://environment")
    assert swarm.read_invite(" starlings://argument ", None) == "starlings://argument"
    assert swarm.read_invite(None, file) == "starlings://file"
    assert swarm.read_invite("-", None) == "starlings://stdin"
    assert swarm.read_invite(None, None) == "starlings://environment"
    with pytest.raises(CommandError) as twice:
        swarm.read_invite("starlings://argument", file)
    assert twice.value.exit_code == 2


def test_coming_back_needs_no_invite_when_there_is_one_swarm(data: Path) -> None:
    with pytest.raises(CommandError, match="Which swarm"):
        swarm.joined_before()
    one, two = data / "workers" / "one", data / "workers" / "two"
    (one / "devices" / "cuda-0").mkdir(parents=True)
    (one / "devices" / "cuda-0" / "id.pem").touch()
    assert swarm.joined_before() == one
    two.mkdir()
    (two / "id.pem").touch()
    with pytest.raises(CommandError, match="one"):
        swarm.joined_before()


def test_the_only_job_is_meant_and_several_are_named(data: Path) -> None:
    with pytest.raises(CommandError, match="starlings init"):
        directories.choose_job(None)
    for name in ("a", "b"):
        (data / "jobs" / name).mkdir(parents=True)
    (data / "jobs" / "a" / "prepared.json").touch()
    assert directories.choose_job(None) == data / "jobs" / "a"
    (data / "jobs" / "b" / "prepared.json").touch()
    with pytest.raises(CommandError, match="a, b"):
        directories.choose_job(None)
    assert directories.choose_job(Path("b")) == data / "jobs" / "b"
    assert directories.choose_job(data / "jobs" / "b") == data / "jobs" / "b"
    with pytest.raises(CommandError, match="no prepared job"):
        directories.choose_job(Path("c"))


def test_lifetimes() -> None:
    assert [owner.parse_lifetime(t) for t in ("90s", "30m", "24h", "7d", "1.5h")] == [
        90,
        1800,
        86400,
        604800,
        5400,
    ]
    for text in ("", "h", "24", "-1h", "0s", "1w"):
        with pytest.raises(CommandError):
            owner.parse_lifetime(text)


def test_messages_become_plain_data_with_numbers_as_numbers() -> None:
    reply = control_pb2.StatusReply(job="x", tokens=2**40)
    reply.workers.add(worker_id="w1").bytes_sent["forward"] = 7
    plain = as_dict(reply)
    assert plain["tokens"] == 2**40
    assert plain["workers"][0]["bytes_sent"] == {"forward": 7}
    assert plain["workers"][0]["span"] is None
    assert plain["loss_curve"] == []


def test_the_fleet_has_three_known_classes_and_any_size() -> None:
    assert len({device.device_class for device in fleet(4)}) == 3
    assert [len(fleet(n)) for n in (1, 4, 9)] == [1, 4, 9]
    assert all(0 < device_class(device.device_class).relative_speed <= 1 for device in fleet(9))
