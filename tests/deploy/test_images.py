"""What the Dockerfiles run works, executed in a clean environment: their RUN lines, the entry point, the health check.

No container is needed, so these lines are not executed as they stand: see `NOT_EXECUTED` and `Image.path`. The cuda
target's differ from the cpu target's in the index that torch comes from; it would take gigabytes, so it is compared.
Where PyTorch's own index cannot be reached, torch comes from where pip finds it here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from support.deploy_files import DEPLOY, ROOT, Instruction, health_command, target
from swarms import job_text, prepared_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="the images are Linux's"),
]

# The first words of commands that only make sense in a container, and why.
NOT_EXECUTED = {"chown": "gives directories to a user that only the image has"}
# What each instruction means here; one that is not listed fails the test.
NOT_RUN = {
    "ENV": "variables of the processes, as in the image",
    "ARG": "a variable of the RUN lines after it; may be set in the environment, as --build-arg would",
    "USER": "its id is the image's",
    "WORKDIR": "the directory that processes start in",
    "EXPOSE": "documentation; test_files.py compares the ports",
    "HEALTHCHECK": "executed by the tests",
    "ENTRYPOINT": "executed by the tests",
    "CMD": "executed by the tests",
}


@dataclass(frozen=True)
class Image:
    """An environment below `root` that the RUN lines of a target filled."""

    root: Path
    instructions: Sequence[Instruction]
    executed: Sequence[str]

    def path(self, text: str) -> str:
        """The image's own directories are below `root`: /src, which RUN mounts, and the volumes."""
        return re.sub(r"(?<![\w./])/(src|job|data|invite|broker)(?![\w-])", rf"{self.root}/\1", text)

    def environment(self) -> dict[str, str]:
        """That of an image: our own shell's settings for Python and Starlings stay out, those for pip come along."""
        mine = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "STARLINGS"))
        }
        for instruction in self.instructions:
            if instruction.name == "ENV":
                mine |= dict(word.split("=", 1) for word in shlex.split(self.path(instruction.rest)))
        return mine | {
            "PATH": f"{self.root}/venv/bin:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            # HOME is another than ours, but where pip finds packages is this machine's matter.
            "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME", str(Path.home() / ".config")),
            "PIP_RETRIES": "1",
        }

    def working_directory(self) -> Path:
        (line,) = (i.rest for i in self.instructions if i.name == "WORKDIR")
        return Path(self.path(line))

    def command(self, *more: str) -> list[str]:
        """ENTRYPOINT and what follows it: CMD if nothing is given."""
        (entry,) = (i.words for i in self.instructions if i.name == "ENTRYPOINT")
        (default,) = (i.words for i in self.instructions if i.name == "CMD")
        return [self.path(word) for word in (*entry, *(more or default))]

    def shell(self, line: str, *, within_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", self.path(line)],
            cwd=self.working_directory(),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )

    def has(self, module: str) -> bool:
        found = self.shell(
            f"python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec(\"{module}\"))'"
        )
        assert found.returncode in (0, 1), found.stderr
        return found.returncode == 0

    @contextmanager
    def running(self, *more: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """The container's process: what it was started for, in its working directory."""
        with (self.root / "log").open("wb") as log:
            process = subprocess.Popen(
                self.command(*more),
                cwd=self.working_directory(),
                env=self.environment() | environment,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()

    def wait_healthy(self, process: subprocess.Popen[bytes], within_s: float) -> None:
        """Until HEALTHCHECK's command, run as Docker would, exits with 0."""
        deadline = time.monotonic() + within_s
        while True:
            assert process.poll() is None, (self.root / "log").read_text()
            if (checked := self.shell(health_command(self.instructions))).returncode == 0:
                return
            assert checked.returncode == 1, "the only failure that Docker knows"
            assert time.monotonic() < deadline, checked.stderr + (self.root / "log").read_text()
            time.sleep(0.5)


def build_context(to: Path) -> None:
    """What .dockerignore lets through, and nothing else."""
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        if line.startswith("!"):
            source, copy = ROOT / line[1:], to / line[1:]
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy)


def without_container_commands(line: str) -> str:
    """`a && b` without those of NOT_EXECUTED."""
    parts = [part.strip() for part in line.split("&&")]
    return " && ".join(part for part in parts if part.split()[0] not in NOT_EXECUTED)


def answers(index: str) -> bool:
    try:
        urllib.request.urlopen(index, timeout=20).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def torch_of_this_machine(root: Path) -> tuple[str, dict[str, str]]:
    """The index that pip uses here anyway, and variables for pip: this machine has the build of torch with which these
    tests run (a mirror, a folder of wheels), and a larger one would be another test.
    """
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    constraint = root / "torch.txt"
    constraint.write_text(f"torch=={version('torch')}\n")
    index = os.environ.get("PIP_INDEX_URL") or configured or "https://pypi.org/simple"
    return index, {"PIP_CONSTRAINT": str(constraint)}


def build(root: Path, file: str, name: str | None) -> Image:
    instructions = target(DEPLOY / file, name)
    build_context(root / "src")
    before = sorted((root / "src").rglob("*"))
    venv.create(root / "venv", with_pip=True)
    executed: list[str] = []
    image = Image(root, instructions, executed)
    arguments: dict[str, str] = {}
    of_pip: dict[str, str] = {}
    for instruction in instructions:
        if instruction.name == "ARG":
            key, _, default = instruction.rest.partition("=")
            arguments[key] = os.environ.get(key, default)
            if key == "TORCH_INDEX" and key not in os.environ and not answers(default):
                arguments[key], of_pip = torch_of_this_machine(root)
        elif instruction.name == "RUN":
            line = without_container_commands(instruction.rest)
            set_first = "".join(f"{key}={shlex.quote(value)}; " for key, value in arguments.items())
            # RUN starts in the working directory, which the first line here makes.
            done = subprocess.run(
                ["sh", "-c", set_first + image.path(line)],
                cwd=root,
                env=image.environment() | of_pip,
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
            assert done.returncode == 0, f"RUN {line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            executed.append(line)
        else:
            assert instruction.name in NOT_RUN, f"nobody said what {instruction.name} means here"
    assert sorted((root / "src").rglob("*")) == before, "Docker mounts it read-only"
    return image


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    root = tmp_path_factory.mktemp("coordinator-image")
    yield build(root, "coordinator.Dockerfile", None)
    # A gigabyte with torch, and pytest keeps what tests leave.
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    root = tmp_path_factory.mktemp("worker-image")
    yield build(root, "worker.Dockerfile", "cpu")
    shutil.rmtree(root)


@pytest.mark.parametrize("name", ["coordinator", "worker"])
def test_the_image_is_built_and_its_program_starts(name: str, request: pytest.FixtureRequest) -> None:
    image: Image = request.getfixturevalue(name)
    folders = "/job /data /invite /broker" if name == "coordinator" else "/job /data /invite"
    assert image.executed[0] == f"mkdir -p {folders}"
    assert [line.split()[:2] for line in image.executed[1:]] == [["pip", "install"]] * (
        len(image.executed) - 1
    )
    where = image.shell("python -c 'import starlings; print(starlings.__file__)'")
    assert Path(where.stdout.strip()).is_relative_to(image.root / "venv"), where.stdout + where.stderr
    helped = image.shell(shlex.join([*image.command(), "--help"]))
    assert helped.returncode == 0, helped.stderr
    (default,) = (i.words for i in image.instructions if i.name == "CMD")
    assert f"starlings {default[0]}" in helped.stdout
    assert image.has("torch") == image.has("transformers") == (name == "worker")
    unhealthy = image.shell(health_command(image.instructions))
    assert unhealthy.returncode == 1, "nothing runs"


def test_the_cuda_target_differs_in_the_index_only() -> None:
    def lines(name: str) -> list[tuple[str, tuple[str, ...], str]]:
        instructions = target(DEPLOY / "worker.Dockerfile", name)
        return [(i.name, i.flags, i.rest) for i in instructions if i.name not in ("ARG", "ENV")]

    assert lines("cuda") == lines("cpu")


def test_a_job_runs_in_the_images_and_is_healthy(coordinator: Image, worker: Image, tmp_path: Path) -> None:
    """The coordinator's process without torch, the worker's with it; each as its image starts it."""
    job = prepared_job(tmp_path, job_text(3 * 8 * 32))
    shutil.copytree(job, coordinator.root / "job", dirs_exist_ok=True)
    assert not coordinator.has("torch")
    with coordinator.running() as served:
        coordinator.wait_healthy(served, 60)
        invited = coordinator.shell("starlings invite create --job /job")
        (invite,) = re.findall(r"starlings://\S+", invited.stdout)
        with worker.running(STARLINGS_INVITE=invite) as joined:
            worker.wait_healthy(joined, 120)
            assert (joined.wait(120), served.wait(60)) == (0, 0), "the job's end ends both"
