"""Every failure is one sentence with its exit code; tracebacks only on demand."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from starlings import failures
from starlings_job.errors import DiskFull, JobFileError, NoDataMatched
from starlings_protos.errors import RULES, ExitCode, RefusedError, Unreachable
from starlings_protos.locks import DirectoryInUse
from starlings_protos.messages import Refusal

KNOWN = [
    (JobFileError("job.toml line 3: no"), 2),
    (NoDataMatched("'*.txt' matches nothing: check [data] source"), 12),
    (DiskFull("The disk is full"), 9),
    (Unreachable("nobody listens at 10.0.0.1:7701 (TCP)"), 3),
    (RefusedError(Refusal.INVITE_WRONG, "wrong"), 4),
    (RefusedError(Refusal.INVITE_EXPIRED, "expired"), 5),
    (RefusedError(Refusal.INVITE_USED_UP, "used up"), 6),
    (RefusedError(Refusal.REVOKED, "revoked"), 7),
    (RefusedError(Refusal.VERSION, "old"), 8),
    (RefusedError(Refusal.NO_ROOM, "needs 3 GB more"), 13),
    (RefusedError(Refusal.CLOCK, "ten minutes behind"), 15),
    (DirectoryInUse(Path("/somewhere"), None), 11),
    (OSError(errno.ENOSPC, "No space left on device", "/x/tokens.bin"), 9),
    (OSError(errno.EADDRINUSE, "Address already in use"), 10),
    (PermissionError(errno.EACCES, "Permission denied", "/srv/x"), 2),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), 2),
    (ModuleNotFoundError("No module named 'torch'", name="torch"), 2),
    (ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"), 2),
    (KeyboardInterrupt(), 130),
]


@pytest.mark.parametrize(("error", "code"), KNOWN, ids=lambda value: type(value).__name__)
def test_known_failures_have_their_exit_code_and_no_bug_in_the_text(error: BaseException, code: int) -> None:
    message, found = failures.explain(error)
    assert found == code
    assert "bug" not in message
    assert "Traceback" not in message


def test_an_unforeseen_failure_says_that_it_is_a_bug() -> None:
    message, code = failures.explain(ZeroDivisionError("division by zero"))
    assert code == 1
    assert "bug" in message
    assert "ZeroDivisionError: division by zero" in message


def test_every_refusal_has_an_exit_code_of_the_sheet() -> None:
    assert set(RULES) == set(Refusal)
    assert all(0 < failures.explain(RefusedError(refusal, "no"))[1] <= max(ExitCode) for refusal in Refusal)


def test_report_prints_a_traceback_only_when_debugging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("odd")

    for debug in ("", "1"):
        monkeypatch.setenv("STARLINGS_DEBUG", debug)
        with pytest.raises(ValueError, match="odd") as raised:
            fail()
        assert failures.report(raised.value, as_json=True) == 1
        printed = capsys.readouterr()
        assert ("Traceback" in printed.err) == bool(debug)
        assert json.loads(printed.out)["exit_code"] == 1


def test_guarded_ends_with_the_code_and_passes_typer_through() -> None:
    @failures.guarded
    def fails(json_output: bool = False) -> None:
        raise DiskFull("full")

    @failures.guarded
    def misused() -> None:
        raise typer.BadParameter("no such thing")

    with pytest.raises(typer.Exit) as ended:
        fails()
    assert ended.value.exit_code == 9
    with pytest.raises(typer.BadParameter):
        misused()


@pytest.mark.skipif(os.name == "nt", reason="pipes end in another way there")
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["init"], 141, ""),
        (["init", "--json"], 141, ""),
        # A failure of its own keeps its code and its sentence.
        (["init", "--json", "no/such/folder/job.toml"], 2, "starlings: No such file or directory"),
    ],
    ids=["words", "json", "failure"],
)
def test_a_reader_that_has_gone_ends_a_command_quietly(
    tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    """As with `| head`, only that nobody ever read."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "starlings", *arguments],
            cwd=tmp_path,
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write_end)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.startswith(says)
    assert ended.stderr.count("\n") == bool(says), "one sentence at most"


def test_a_broken_pipe_of_another_kind_is_still_a_bug(capfd: pytest.CaptureFixture[str]) -> None:
    assert failures.report(BrokenPipeError(errno.EPIPE, "Broken pipe"), as_json=True) == 1
    printed = capfd.readouterr()
    assert "bug" in printed.err
    assert json.loads(printed.out)["exit_code"] == 1
