"""`starlings bus config`: the files that it writes, for whom, and what it says."""

from __future__ import annotations

import ipaddress
import json
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from starlings.main import app
from starlings_coordinator.broker.configuration import BrokerSettings, access_list, mosquitto_conf
from starlings_coordinator.broker.files import Access, read_access, write_broker_files
from starlings_coordinator.enrolment import EnrolmentAuthority
from starlings_coordinator.token_journal import FileJournal
from starlings_coordinator.tokens import TokenCreated, TokenRedeemed, WorkerRevoked
from starlings_protos.authority import CertificateAuthority
from starlings_protos.errors import PeerFault, UsageError
from starlings_protos.identity import identity_of_certificate, new_key, read_certificate
from support.broker import MOSQUITTO, WITHIN_S, free_port, needs_mosquitto, until
from support.prepared_job import write_prepared_job

NOW = 1_800_000_000.0
ACCOUNT = "root" if sys.platform != "win32" and Path("/proc/self").owner() == "root" else None


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_prepared_job(tmp_path_factory.mktemp("jobs") / "job")
    EnrolmentAuthority(directory, "test")
    return directory


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bus", "config", *map(str, arguments)])
    return done.exit_code, done.output


def test_it_says_what_to_run_and_what_to_write_into_the_job_file(job: Path, tmp_path: Path):
    place = ("--at", "/srv/broker")  # nobody's files but ours
    code, told = call(tmp_path / "b", "--job", job, "--host", "swarm.example.org", *place)
    assert code == 0
    assert "mosquitto -c /srv/broker/mosquitto.conf" in told
    assert 'url = "mqtts://swarm.example.org:8883"' in told
    code, told = call(tmp_path / "b", "--job", job, "--host", "swarm.example.org", *place)
    assert code == 2
    assert "--force" in told
    code, told = call(
        tmp_path / "b", "--job", job, "--host", "2001:db8::7", "--port", 9883, "--force", "--json", *place
    )
    assert code == 0
    assert json.loads(told) | {"expires_s": 0} == {
        "directory": str(tmp_path / "b"),
        "hosts": ["2001:db8::7"],
        "port": 9883,
        "url": "mqtts://[2001:db8::7]:9883",
        "account": "",
        "expires_s": 0,
        "run": "mosquitto -c /srv/broker/mosquitto.conf",
    }
    certificate = read_certificate((tmp_path / "b" / "broker.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress)[0] == ipaddress.ip_address("2001:db8::7")
    assert "localhost" in names.get_values_for_type(x509.DNSName)
    for path in (p for p in (tmp_path / "b").rglob("*") if p.is_file()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_host_and_port_are_those_of_the_job_file(tmp_path: Path):
    extra = '[bus]\nurl = "mqtts://bus.example.org:9883"\n'
    job = write_prepared_job(tmp_path / "job", extra=extra)
    code, told = call(tmp_path / "b", "--job", job, "--at", "/srv/broker")
    assert code == 0, told
    assert "job.toml" not in told, "it says so already"
    assert "bus.example.org" in told
    assert "listener 9883\n" in (tmp_path / "b" / "mosquitto.conf").read_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--host"),
        (("--host", "a b"), "host name"),
        (("--host", "w0123456789abcdef.w.starlings"), "Starlings uses"),
        (("--host", "example.org", "--port", "70000"), "port"),
        (("--host", "example.org", "--account", "nobody-of-that-name"), "account"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(
    job: Path, tmp_path: Path, arguments: tuple[str, ...], word: str
):
    code, told = call(tmp_path / "b", "--job", job, *arguments)
    assert (code, word in told) == (2, True), told
    assert not (tmp_path / "b" / "mosquitto.conf").exists()


def test_a_brokers_certificate_is_nobodys_in_the_swarm():
    authority = CertificateAuthority.create("job", NOW)
    pem = authority.issue_broker(new_key().public_key(), ["broker.example.org"], NOW)
    with pytest.raises(PeerFault):
        identity_of_certificate(pem)
    for host in ("", "coordinator.starlings", "enrol.Starlings.", "-a.org", "a..b", "a/b", "x" * 64 + ".org"):
        with pytest.raises(ValueError, match=r"host name|Starlings"):
            authority.issue_broker(new_key().public_key(), [host], NOW)
    with pytest.raises(ValueError, match="name or an address"):
        authority.issue_broker(new_key().public_key(), [], NOW)


def test_paths_cannot_add_lines_to_the_configuration():
    with pytest.raises(ValueError, match="path"):
        BrokerSettings("job", 8883, "/tmp/a\nallow_anonymous true")
    assert "listener 8883\n" in mosquitto_conf(BrokerSettings("job", 8883, "/tmp/a"))


def test_the_access_list_names_observers_and_who_was_shut_out(tmp_path: Path):
    journal = FileJournal(tmp_path / "ca" / "tokens.jsonl")
    created = [
        TokenCreated(name * 10, "0" * 64, role, NOW, NOW + 60, 0)
        for name, role in (("a", "worker"), ("b", "observer"))
    ]
    journal.append(
        [
            *created,
            TokenRedeemed("a" * 10, "w1"),
            TokenRedeemed("b" * 10, "o1"),
            TokenRedeemed("b" * 10, "o2"),
            WorkerRevoked("w1"),
            WorkerRevoked("o2"),
        ]
    )
    # A coordinator is in the middle of a line: reading must neither fail nor cut it off.
    with (tmp_path / "ca" / "tokens.jsonl").open("ab") as file:
        file.write(b'{"kind": "worker_rev')
    size = (tmp_path / "ca" / "tokens.jsonl").stat().st_size
    access = read_access(tmp_path)
    assert access == Access(("o1", "o2"), ("o2", "w1"))
    assert (tmp_path / "ca" / "tokens.jsonl").stat().st_size == size
    text = access_list("job", access.observers, access.revoked)
    assert text.count("user o1\ntopic deny starlings/v1/job/worker/o1/#") == 1
    assert text.count("user o2\ntopic deny starlings/v1/job/#") == 1
    assert text.count("user w1\ntopic deny starlings/v1/job/#") == 1


def test_files_for_another_account_must_be_within_its_reach(tmp_path: Path):
    if sys.platform == "win32" or ACCOUNT != "root":
        pytest.skip("only root can give files away")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    settings = BrokerSettings("job", 8883, str(closed / "b"), "nobody")
    authority = CertificateAuthority.create("job", NOW)
    with pytest.raises(UsageError, match="cannot get through"):
        write_broker_files(closed / "b", settings, authority, ["localhost"], Access((), ()), now_s=NOW)
    assert {p.owner() for p in (closed / "b").rglob("*")} == {"nobody"}


@needs_mosquitto
def test_mosquitto_starts_with_what_the_command_wrote(job: Path, tmp_path: Path):
    port = free_port()
    account = ("--account", ACCOUNT) if ACCOUNT else ()
    code, told = call(tmp_path / "b", "--job", job, "--host", "localhost", "--port", port, "--json", *account)
    assert code == 0, told
    assert MOSQUITTO is not None
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen([MOSQUITTO, *json.loads(told)["run"].split()[1:]], stderr=file)
    try:
        until(lambda: "running" in log.read_text() or process.poll() is not None, "the broker", WITHIN_S)
        assert process.poll() is None, log.read_text()
        assert "Error" not in log.read_text()
        listens = [line for line in log.read_text().splitlines() if "listen socket" in line]
        assert listens
        assert time.time() < json.loads(told)["expires_s"]
    finally:
        process.terminate()
        process.wait(WITHIN_S)
