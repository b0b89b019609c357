"""What deploy/ names exists: commands, options, ports, paths, exit codes, images; and it fits together."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from starlings_coordinator.broker.configuration import CONFIGURATION, MQTTS_PORT, BrokerSettings
from starlings_job.spec import load_job
from starlings_protos.errors import RULES, ExitCode
from starlings_worker.options import WorkerOptions
from support.deploy_files import (
    DEPLOY,
    ROOT,
    check,
    dockerfile,
    health_command,
    own_commands,
    page_commands,
    target,
    unit,
)

IMAGES = [("coordinator.Dockerfile", None), ("worker.Dockerfile", "cpu"), ("worker.Dockerfile", "cuda")]
UNITS = ["starlings-coordinator.service", "starlings-worker.service"]
# Control, enrolment, keeper, and the first of the workers' own.
CONTROL, ENROLMENT, KEEPER, RELAY, DATA = 7700, 7701, 7703, 7704, 7710
BROKER_UNIT = "starlings-broker.service"


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8")))


def documented_codes() -> dict[int, str]:
    """Of docs/reference.md: each exit code, and whether a restart may help ("", "yes", "no")."""
    text = (ROOT / "docs" / "reference.md").read_text("utf-8")
    return {
        int(code): helps for code, helps in re.findall(r"^\| (\d+) \|.*\| *(\w*) *\|$", text, re.MULTILINE)
    }


# ------------------------------------------------------------------ commands


def commands() -> list[tuple[str, list[str]]]:
    """Every command line of ours in deploy/: where, arguments."""
    found: list[tuple[str, list[str]]] = []
    for file, name in IMAGES:
        instructions = target(DEPLOY / file, name)
        (command,) = (i.words for i in instructions if i.name == "CMD")
        found.append((file, command))
        found += [(file, arguments) for arguments in own_commands(health_command(instructions))]
    for file in ("coordinator.Dockerfile", "worker.Dockerfile", "compose.yaml"):
        text = (DEPLOY / file).read_text("utf-8").replace("\\\n#", " ")
        found += [(file, a) for c in re.findall(r"^#   (.*)", text, re.MULTILINE) for a in own_commands(c)]
    for name, service in compose()["services"].items():
        if name == "broker":
            continue  # another's program: see test_the_broker_finds_what_the_command_writes
        command = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in service["command"]]
        if service.get("entrypoint") == ["sh", "-c"]:
            found += [(name, arguments) for arguments in own_commands(command[0])]
        else:
            found.append((name, command))
    for file in UNITS:
        (line,) = unit(DEPLOY / file)["ExecStart"]
        found += [(file, a) for a in own_commands(line.replace("$STARLINGS_OPTIONS", ""))]
        (example,) = re.findall(
            r"^# For example: STARLINGS_OPTIONS=(.*)$", (DEPLOY / file).read_text(), re.MULTILINE
        )
        found.append((file, ["coordinator" if "coordinator" in file else "join", *shlex.split(example)]))
    for line in page_commands(DEPLOY / "README.md"):
        # In prose an ellipsis stands for the part of the command before it.
        found += [("README.md", a) for part in line.split("... ") for a in own_commands(part)]
    return found


def test_every_command_and_option_exists():
    all_of_them = commands()
    for where, arguments in all_of_them:
        try:
            check(arguments)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None
    told = {
        " ".join(arguments[:2] if arguments[0] in ("invite", "bus") else arguments[:1])
        for _, arguments in all_of_them
    }
    assert told == {
        "prepare", "coordinator", "join", "invite create", "status", "health", "leave", "export", "bus config",
    }  # fmt: skip


def test_the_check_itself_finds_what_is_wrong():
    for wrong in (
        ["joyn"],
        ["join", "--dirr", "x"],
        ["coordinator", "--port", "many"],
        ["invite"],
        ["invite", "make"],
    ):
        with pytest.raises(AssertionError):
            check(wrong)
    assert list(
        own_commands("sudo -u starlings /opt/starlings/bin/starlings status && pip install starlings")
    ) == [["status"]]


def test_every_file_that_the_page_names_exists():
    text = (DEPLOY / "README.md").read_text("utf-8")
    named = set(re.findall(r"[\w./-]*\b[\w-]+\.(?:yaml|Dockerfile|service|toml|md)\b", text))
    mine = {name for name in named if not name.startswith(("/", "PWD"))}
    assert {p.name for p in DEPLOY.iterdir()} - {"README.md"} <= {Path(name).name for name in mine}
    for name in mine:
        assert (DEPLOY / name).exists() or (ROOT / name).exists() or name in ("compose.yaml", "job.toml"), (
            name
        )


def test_each_file_is_a_screen_long():
    for path in DEPLOY.iterdir():
        assert len(path.read_text("utf-8").splitlines()) <= 100, path


# ------------------------------------------------------------------ ports


def test_ports_are_the_documented_ones():
    text = (ROOT / "docs" / "reference.md").read_text("utf-8")
    for row in (
        "| control | 7700 |",
        "| enrolment | 7701 |",
        "| keeper | control + 3 |",
        "| relay | control + 4 |",
        "| worker data | 7710 upward |",
    ):
        assert row in text
    ports = load_job(DEPLOY / "job.toml").network.ports
    assert (ports.control, ports.enrolment) == (CONTROL, ENROLMENT)
    assert WorkerOptions(invite="x").listen_port == DATA
    exposed = {
        file: [int(p) for i in target(DEPLOY / file, name) if i.name == "EXPOSE" for p in i.words]
        for file, name in IMAGES
    }
    assert exposed == {
        "coordinator.Dockerfile": [CONTROL, ENROLMENT, KEEPER, RELAY],
        "worker.Dockerfile": [DATA],
    }
    assert compose()["services"]["coordinator"]["ports"] == [
        f"{p}:{p}" for p in (CONTROL, ENROLMENT, KEEPER, RELAY)
    ]
    page = (DEPLOY / "README.md").read_text("utf-8")
    known = {CONTROL, ENROLMENT, KEEPER, RELAY, DATA}
    assert {int(p) for p in re.findall(r"\b77\d\d\b", page)} == known
    assert {(int(a), int(b)) for a, b in re.findall(r"-p (\d+):(\d+)", page)} == {(p, p) for p in known}


# ------------------------------------------------------------------ images


@pytest.mark.parametrize(("file", "name"), IMAGES)
def test_images_are_not_root_and_own_their_directories(file: str, name: str | None):
    instructions = target(DEPLOY / file, name)
    (user,) = (i.rest for i in instructions if i.name == "USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    last_run = max(at for at, i in enumerate(instructions) if i.name == "RUN")
    assert last_run < next(at for at, i in enumerate(instructions) if i.name == "USER")
    (made,) = (i.rest for i in instructions if i.name == "RUN" and "chown" in i.rest)
    for directory in ("/job", "/data", "/invite"):
        assert directory in made.partition("&&")[0].split()
        assert f"chown {user}" in made
        assert directory in made.partition("&&")[2].split()
    assert [i.words for i in instructions if i.name == "ENTRYPOINT"] == [["starlings"]]


def test_only_the_workers_image_has_torch():
    torch_less = "\n".join(i.rest for i in target(DEPLOY / "coordinator.Dockerfile"))
    assert "torch" not in torch_less
    assert "[worker]" not in torch_less
    assert {s.name for s in dockerfile(DEPLOY / "worker.Dockerfile")} == {"base", "cpu", "cuda"}


def test_what_an_image_is_built_from_is_let_through():
    """.dockerignore lets in exactly what the wheel's build needs."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (included,) = re.findall(r"only-include = \[(.*?)\]", project, re.DOTALL)
    assert let_in == {*re.findall(r'"([^"]+)"', included), "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / path).exists() for path in let_in)


# ------------------------------------------------------------------ compose


def test_compose_follows_the_schema_of_the_specification():
    """The schema comes with check-jsonschema, so nothing is fetched."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            "vendor.compose-spec",
            DEPLOY / "compose.yaml",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_fits_together():
    file = compose()
    services = file["services"]
    images = {i.words[0] for f, n in IMAGES for i in target(DEPLOY / f, n) if i.name == "ENTRYPOINT"}
    assert images == {"starlings"}
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        if name == "broker":
            continue
        context = (DEPLOY / service["build"]["context"]).resolve()
        assert context == ROOT
        stages = {s.name for s in dockerfile(context / service["build"]["dockerfile"])}
        assert service["build"].get("target", "") in stages
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services
            assert how["condition"] in ("service_healthy", "service_completed_successfully")
            if how["condition"] == "service_healthy":
                assert "healthcheck" not in services[needed]
        for volume in service["volumes"]:
            source, where, *mode = volume.split(":")
            assert source in file["volumes"]
            assert where in ("/job", "/data", "/invite", "/broker")
            assert mode in ([], ["ro"])
        # Every directory that a command names is one of its volumes.
        mounted = [v.split(":")[1] for v in service["volumes"]] + [
            c["target"] for c in service.get("configs", [])
        ]
        for path in re.findall(r"(?<![\w.])/[\w./]+", " ".join(service["command"])):
            assert any(path == m or path.startswith(f"{m}/") for m in mounted), (name, path)
    assert all((DEPLOY / config["file"]).is_file() for config in file["configs"].values())
    # Two machines cannot be one worker.
    data = [v for s in services.values() for v in s["volumes"] if v.endswith(":/data")]
    assert len(data) == len(set(data)) == 2
    for name in ("worker-1", "worker-2"):
        assert float(services[name]["stop_grace_period"].rstrip("s")) > WorkerOptions(invite="x").drain_s


def test_the_broker_finds_what_the_command_writes():
    """In compose.yaml and in the unit: the same directory, the same user, the port, descriptors for every client."""
    services = compose()["services"]
    files, broker = services["broker-files"], services["broker"]
    directory = files["command"][2]
    assert broker["command"] == ["mosquitto", "-c", f"{directory}/{CONFIGURATION}"]
    assert broker["volumes"] == [f"broker:{directory}"]
    assert f"broker:{directory}" in files["volumes"]
    (user,) = (i.rest for i in target(DEPLOY / "coordinator.Dockerfile") if i.name == "USER")
    assert broker["user"] == user, "the files are open to their owner alone"
    assert broker["ports"] == [f"{MQTTS_PORT}:{MQTTS_PORT}"]
    # Its name in the network of the containers, and outside.
    assert "broker" in files["command"]
    # The authority is made by one of the two, not by both at once.
    assert "broker-files" in services["coordinator"]["depends_on"]
    settings = unit(DEPLOY / BROKER_UNIT)
    (line,) = settings["ExecStart"]
    page = (DEPLOY / "README.md").read_text("utf-8")
    (written,) = re.findall(r"starlings bus config (\S+)", page)
    assert line == f"/usr/sbin/mosquitto -c {written}/{CONFIGURATION}"
    assert settings["User"] == unit(DEPLOY / UNITS[0])["User"]
    connections = BrokerSettings("job", MQTTS_PORT, written).connections
    assert int(settings["LimitNOFILE"][0]) > connections
    assert broker["ulimits"]["nofile"] > connections


# ------------------------------------------------------------------ units


@pytest.mark.parametrize("file", UNITS)
def test_units_restart_only_what_a_restart_may_cure(file: str):
    settings = unit(DEPLOY / file)
    (prevented,) = settings["RestartPreventExitStatus"]
    codes = documented_codes()
    assert {int(code) for code in prevented.split()} == {
        code for code, helps in codes.items() if helps == "no"
    }
    assert settings["Restart"] == ["on-failure"]
    # The page agrees with the table that the code acts on, as far as that has an opinion.
    for refusal, rule in RULES.items():
        if rule.exit_code not in (ExitCode.BUG, ExitCode.UNREACHABLE) and rule.restart_may_cure:
            assert codes[rule.exit_code] != "no" or rule.exit_code in (
                ExitCode.CAP_REACHED,
                ExitCode.USAGE,
            ), refusal


@pytest.mark.parametrize("file", UNITS)
def test_units_are_ready_when_the_process_says_so_and_give_it_time(file: str):
    settings = unit(DEPLOY / file)
    assert settings["Type"] == ["notify"]
    assert settings["KillMode"] == ["mixed"], "children are ended by their parent, in order"
    (stop_s,) = settings["TimeoutStopSec"]
    worker = "worker" in file
    assert int(stop_s) > (WorkerOptions(invite="x").drain_s if worker else 30)
    assert settings["TimeoutStartSec"] == ["infinity" if worker else "10min"]
    assert int(settings["WatchdogSec"][0]) >= 60
    assert settings["User"] == ["starlings"]
    assert settings["StateDirectory"] == ["starlings"]
    (line,) = settings["ExecStart"]
    paths = [word for word in shlex.split(line) if word.startswith("/") and not word.startswith("/opt/")]
    assert paths
    assert all(path.startswith("/var/lib/starlings/") for path in paths), (
        "the only place that it may write to"
    )


def test_the_workers_unit_gets_its_invite_as_a_credential():
    settings = unit(DEPLOY / "starlings-worker.service")
    assert settings["LoadCredential"] == ["invite:/etc/starlings/invite"]
    assert settings["SetCredential"] == ["invite:\\n"], (
        "the default once the file is gone; must be no empty value"
    )
    assert "--invite-file ${CREDENTIALS_DIRECTORY}/invite" in settings["ExecStart"][0]
    page = (DEPLOY / "README.md").read_text("utf-8")
    for path in ("/etc/starlings/invite", "/etc/starlings/worker.env", "/etc/starlings/coordinator.env"):
        assert path in page


@pytest.mark.parametrize("file", [*UNITS, BROKER_UNIT])
def test_systemd_accepts_the_units(file: str, tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    text = (DEPLOY / file).read_text("utf-8")
    # The program must exist.
    there = re.sub(r"(?m)(?<=^ExecStart=)\S+", sys.executable, text)
    (tmp_path / file).write_text(there)
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / file],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours = [line for line in verified.stderr.splitlines() if file in line]
    assert (verified.returncode, ours) == (0, [])
    # In tenths; 10 = nothing is restricted.
    secured = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", tmp_path / file],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert secured.returncode == 0, secured.stdout[-2000:]
