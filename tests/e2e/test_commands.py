"""Commands as a user types them: what they print, and how they fail."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from starlings.main import app
from support.small_disk import small_disk
from swarms import LiveSwarm, job_text, prepared_job, starlings, write_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_job(tmp_path_factory.mktemp("job"), job_text(4096))


@pytest.fixture(scope="module")
def live(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveSwarm]:
    """A coordinator without workers."""
    with LiveSwarm.of(job, tmp_path_factory.mktemp("live")) as swarm:
        yield swarm


def plain(text: str) -> str:
    return " ".join(text.split())


# ------------------------------------------------------------------ init, prepare


def test_init_writes_once_and_says_what_next(tmp_path: Path) -> None:
    first = starlings("init", cwd=tmp_path)
    assert first.code == 0
    assert "starlings prepare job.toml" in first.out
    again = starlings("init", cwd=tmp_path)
    assert again.code == 2
    assert "exists already" in again.err
    forced = starlings("init", "--force", "--name", "other", "--json", cwd=tmp_path)
    assert forced.records == [{"path": "job.toml", "job": "other"}]
    assert 'name = "other"' in (tmp_path / "job.toml").read_text()
    assert '\nschedule = "async"' in (tmp_path / "job.toml").read_text()
    assert starlings("init", "lan.toml", "--links", "lan", cwd=tmp_path).code == 0
    assert '\nschedule = "sync"' in (tmp_path / "lan.toml").read_text()


def test_prepare_reports_progress_and_facts_as_json_lines(tmp_path: Path) -> None:
    job_file = write_job(tmp_path, job_text(4096))
    done = starlings("prepare", job_file, "--dir", tmp_path / "out", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    *progress, facts = done.records
    assert {r["phase"] for r in progress} >= {"text", "weights"}
    assert facts["event"] == "prepared"
    assert facts["parameters"] > 0
    assert 0 < facts["bigram_entropy"] < facts["unigram_entropy"]
    assert (tmp_path / "out" / "prepared.json").is_file()


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("[job]\nname = 'x'\ntokens = 10\n[model]\npresett = 'micro'\n", 2, "did you mean 'preset'?"),
        ("[job]\nname = 'x'\ntokens = 10\n[model]\npreset = 'huge'\n", 2, "micro"),
        ("[job\n", 2, "line 1"),
        (job_text(4096, data={"source": "nothing/*.txt"}), 12, "nothing/*.txt"),
        (job_text(4096, model={"config": "missing.json"}), 2, "missing.json"),
    ],
)
def test_a_wrong_job_file_is_one_sentence(tmp_path: Path, text: str, code: int, says: str) -> None:
    job_file = write_job(tmp_path, text)
    done = starlings("prepare", job_file, "--dir", tmp_path / "out", cwd=tmp_path)
    assert done.code == code, done.err
    assert says in plain(done.err)
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_an_absent_job_file_says_who_writes_one(tmp_path: Path) -> None:
    done = starlings("coordinator", "job.toml", cwd=tmp_path)
    assert done.code == 2
    assert "starlings init" in done.err


@pytest.mark.slow
def test_a_full_disk_is_code_nine_and_leaves_nothing_prepared(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        job_file = write_job(tmp_path, job_text(4096))
        done = starlings("prepare", job_file, "--dir", disk / "job", cwd=tmp_path)
        assert done.code == 9, done.err
        assert "disk is full" in done.err.lower()
        assert not (disk / "job" / "prepared.json").exists()


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path) -> None:
    for arguments in (("--debug", "prepare", "none.toml"), ("prepare", "none.toml", "--debug")):
        done = starlings(*arguments, cwd=tmp_path)
        assert done.code == 2
        assert "Traceback" in done.err


# ------------------------------------------------------------------ coordinator and the owner's commands


def test_status_and_invites_of_a_running_coordinator(live: LiveSwarm, tmp_path: Path) -> None:
    status = starlings("status", "--job", live.job, "--json", cwd=tmp_path)
    assert status.code == 0, status.err
    assert status.records[0]["phase"] == "gathering"
    assert status.records[0]["steps_total"] == 16
    human = starlings("status", "--job", live.job, cwd=tmp_path)
    assert "waiting for" in human.out

    made = starlings(
        "invite", "create", "--job", live.job, "--uses", "3", "--lifetime", "30m", "--json", cwd=tmp_path
    )
    (invite,) = made.records
    assert invite["invite"].startswith("starlings://127.0.0.1:")
    listed = starlings("invite", "list", "--job", live.job, "--json", cwd=tmp_path).records[0]["invites"]
    assert {i["token_id"]: i["uses"] for i in listed}[invite["token_id"]] == 3
    assert all(i["invite"] == "" for i in listed)
    revoked = starlings("invite", "revoke", invite["token_id"], "--job", live.job, cwd=tmp_path)
    assert revoked.code == 0, revoked.err
    assert "revoked" in starlings("invite", "list", "--job", live.job, cwd=tmp_path).out


def test_the_only_local_job_needs_no_name(live: LiveSwarm, tmp_path: Path) -> None:
    none = starlings("status", cwd=tmp_path)
    assert none.code == 2
    assert "starlings init" in none.err
    jobs = tmp_path / "data" / "starlings" / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "one").symlink_to(live.job)
    assert starlings("status", cwd=tmp_path).code == 0
    assert starlings("status", "--job", "one", cwd=tmp_path).code == 0
    (jobs / "two").symlink_to(live.job)
    several = starlings("status", cwd=tmp_path)
    assert several.code == 2
    assert "one, two" in several.err


def test_a_second_coordinator_in_the_directory_is_refused(live: LiveSwarm, tmp_path: Path) -> None:
    done = starlings("coordinator", live.job, "--port", "0", "--enrolment-port", "0", "--json", cwd=tmp_path)
    assert done.code == 11
    assert "in use by" in done.err
    assert done.records[-1]["exit_code"] == 11


def test_a_busy_port_is_named(job: Path, tmp_path: Path) -> None:
    copy = prepared_job(tmp_path, job_text(4096))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = starlings("coordinator", copy, "--listen", "127.0.0.1", "--port", str(port), cwd=tmp_path)
    assert done.code == 10
    assert str(port) in done.err


def test_no_coordinator_runs(job: Path, tmp_path: Path) -> None:
    copy = prepared_job(tmp_path, job_text(4096))
    for command in (("status",), ("stop",), ("invite", "list")):
        done = starlings(*command, "--job", copy, cwd=tmp_path)
        assert done.code == 3, done.err
        assert "starlings coordinator" in done.err


def test_export_before_any_checkpoint_says_so(job: Path, tmp_path: Path) -> None:
    done = starlings("export", tmp_path / "model", "--job", job, cwd=tmp_path)
    assert done.code == 2
    assert "no checkpoint yet" in done.err


# ------------------------------------------------------------------ join


def test_join_without_or_with_a_broken_invite(tmp_path: Path) -> None:
    nothing = starlings("join", cwd=tmp_path, environment={"STARLINGS_INVITE": ""})
    assert nothing.code == 2
    assert "--invite-file" in nothing.err
    for invite in ("nonsense", "starlings://host", "http://example.org"):
        done = starlings("join", invite, cwd=tmp_path)
        assert done.code == 4, done.err
        assert "Traceback" not in done.err


def test_every_way_to_be_refused_has_its_code(live: LiveSwarm, tmp_path: Path) -> None:
    def join(invite: str, name: str) -> tuple[int, str]:
        done = starlings(
            "join", "-", "--dir", tmp_path / name, "--devices", "cpu", cwd=tmp_path, stdin=invite + "\n"
        )
        assert "Traceback" not in done.err
        return done.code, done.err

    head, job, pin, token, expiry = live.invite.rsplit("/", 4)
    token_id, _, secret = token.partition(".")

    def with_parts(**parts: str) -> str:
        p = {"head": head, "job": job, "pin": pin, "token": token, "expiry": expiry, **parts}
        return "/".join((p["head"], p["job"], p["pin"], p["token"], p["expiry"]))

    code, text = join(with_parts(token=f"{token_id}.{secret[::-1]}"), "wrong")
    assert code == 4, text
    code, text = join(with_parts(pin=pin[:-2] + ("AA" if pin[-2:] != "AA" else "BA")), "pin")
    assert code == 4, text
    code, text = join(with_parts(expiry=str(int(expiry) - 10**6)), "expired")
    assert code == 5, text
    made = starlings("invite", "create", "--job", live.job, "--json", cwd=tmp_path).records[0]
    starlings("invite", "revoke", made["token_id"], "--job", live.job, cwd=tmp_path)
    code, text = join(made["invite"], "revoked")
    assert code == 7, text
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    code, text = join(with_parts(head=f"starlings://127.0.0.1:{port}"), "away")
    assert code == 3, text
    assert "127.0.0.1" in text
    assert str(port) in text
    assert "TCP" in text


def test_a_gpu_that_is_not_there(live: LiveSwarm, tmp_path: Path) -> None:
    done = starlings(
        "join",
        "--devices",
        "cuda:7",
        "--dir",
        tmp_path / "w",
        cwd=tmp_path,
        environment={"STARLINGS_INVITE": live.invite},
    )
    assert done.code == 13, done.err
    assert "cuda:7" in done.err
    assert "Traceback" not in done.err


def test_usage_errors_are_code_two(tmp_path: Path) -> None:
    for arguments in (("frobnicate",), ("join", "--nope"), ("demo", "--workers", "0"), ("invite", "revoke")):
        assert starlings(*arguments, cwd=tmp_path).code == 2
    bad = starlings("join", "starlings://x", "--memory", "lots", cwd=tmp_path)
    assert bad.code == 2
    assert "8MiB" in bad.err


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "init",
        "prepare",
        "coordinator",
        "join",
        "status",
        "stop",
        "export",
        "workers",
        "why",
        "pause",
        "resume",
        "drain",
        "evict",
        "rebalance",
        "invite create",
        "invite list",
        "invite revoke",
    ],
)
def test_help_teaches_by_example(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: the same program, without the start of a process for each command."""
    monkeypatch.setenv("COLUMNS", "120")
    done = CliRunner().invoke(app, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"starlings {command}" in done.output
    assert "--json" in done.output


def test_version_is_the_package_s(tmp_path: Path) -> None:
    assert json.dumps(starlings("--version", cwd=tmp_path).out.strip()).startswith('"starlings ')
