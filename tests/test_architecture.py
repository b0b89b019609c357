"""Who may import whom, which modules are pure, what stays out of which process, and how big a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "starlings": ROOT / "cli/starlings",
    "starlings_coordinator": ROOT / "coordinator/starlings_coordinator",
    "starlings_worker": ROOT / "worker/starlings_worker",
    "starlings_compression": ROOT / "compression/starlings_compression",
    "starlings_protos": ROOT / "protos/starlings_protos",
    "starlings_job": ROOT / "job/starlings_job",
    "starlings_simulator": ROOT / "simulator/starlings_simulator",
}
MAY_IMPORT = {
    "starlings_compression": set(),
    "starlings_protos": {"starlings_compression"},
    "starlings_job": {"starlings_compression", "starlings_protos"},
    "starlings_coordinator": {"starlings_compression", "starlings_protos", "starlings_job"},
    "starlings_worker": {"starlings_compression", "starlings_protos", "starlings_job"},
    "starlings_simulator": set(PACKAGES) - {"starlings", "starlings_simulator"},
    "starlings": set(PACKAGES) - {"starlings"},
}
# Decisions: importable everywhere, the same answer for the same arguments, so no clock, no dice, no I/O, no
# frameworks.
PURE = (
    "coordinator/starlings_coordinator/core",
    "coordinator/starlings_coordinator/planner/gain.py",
    "coordinator/starlings_coordinator/planner/plan.py",
    "coordinator/starlings_coordinator/bus/notices.py",
    "worker/starlings_worker/core",
    "worker/starlings_worker/outer/fragments.py",
    "worker/starlings_worker/outer/outcome.py",
    "protos/starlings_protos/messages.py",
    "protos/starlings_protos/pair_messages.py",
    "protos/starlings_protos/stream_messages.py",
    "protos/starlings_protos/reach_messages.py",
    "protos/starlings_protos/advice_messages.py",
    "protos/starlings_protos/pacing.py",
    "protos/starlings_protos/relay/core.py",
    "protos/starlings_protos/relay/frames.py",
    "protos/starlings_protos/vocabulary.py",
    "coordinator/starlings_coordinator/reach/book.py",
    "protos/starlings_protos/bus/address.py",
    "protos/starlings_protos/bus/link.py",
    "protos/starlings_protos/bus/outbox.py",
    "protos/starlings_protos/bus/payloads.py",
    "protos/starlings_protos/bus/presence.py",
    "protos/starlings_protos/bus/topics.py",
    "job/starlings_job/devices.py",
    "job/starlings_job/schedule.py",
    "job/starlings_job/sampling.py",
    "job/starlings_job/codecs.py",
    "job/starlings_job/memory.py",
    "job/starlings_job/exchange_rules.py",
    "job/starlings_job/exchange_settings.py",
    "job/starlings_job/exchange_traffic.py",
    "job/starlings_job/noloco_stability.py",
    "job/starlings_job/profile.py",
    "compression/starlings_compression/spec.py",
    "compression/starlings_compression/sizes.py",
    "compression/starlings_compression/families.py",
    "compression/starlings_compression/policy.py",
    "compression/starlings_compression/layout.py",
    "simulator/starlings_simulator/fleets",
    "cli/starlings/views",
)
IMPURE = {
    "time",
    "datetime",
    "secrets",
    "uuid",
    "asyncio",
    "threading",
    "socket",
    "subprocess",
    "grpc",
    "torch",
    "transformers",
    "numpy",
    "sqlalchemy",
}
TREE_LIMIT_LINES = 500


def sources(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    return sorted(p for p in folder.rglob("*.py") if "_pb2" not in p.name)


def all_sources() -> list[Path]:
    found = [p for folder in PACKAGES.values() for p in sources(folder)]
    return found + sources(ROOT / "tests") + sources(ROOT / "benchmarks")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module's dotted name and line, wherever in the file it stands."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or "", node.lineno


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_point_downwards(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(PACKAGES[package])
        for name, line in imports(path)
        if (top := name.partition(".")[0]) in PACKAGES and top != package and top not in MAY_IMPORT[package]
    ]
    assert not wrong


@pytest.mark.parametrize("where", PURE)
def test_pure_modules_touch_no_clock_no_dice_and_no_framework(where: str) -> None:
    wrong = []
    for path in sources(ROOT / where):
        for name, line in imports(path):
            if name.partition(".")[0] in IMPURE:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                # random.Random(seed) is a value; everything else in the module shares one hidden state.
                if node.value.id == "random" and node.attr != "Random":
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} uses random.{node.attr}")
                if node.value.id == "os" and node.attr in ("urandom", "environ", "getenv"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} uses os.{node.attr}")
            if isinstance(node, ast.Call) and not node.args and not node.keywords:
                called = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                if called == "Random":
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} makes an unseeded Random")
    assert not wrong


def test_listed_pure_modules_exist() -> None:
    assert [where for where in PURE if not (ROOT / where).exists()] == []


def test_nothing_importable_lies_directly_in_a_top_level_folder() -> None:
    """A top-level package named `compression` would break gzip, zipfile and tarfile of Python 3.14."""
    folders = {path.parent for path in PACKAGES.values()}
    assert [str(p.relative_to(ROOT)) for folder in folders for p in folder.glob("*.py")] == []
    assert [str(p) for p in (ROOT / "tests").rglob("__init__.py")] == []


def test_files_stay_readable() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in all_sources()
        if (n := len(p.read_text("utf-8").splitlines())) > TREE_LIMIT_LINES
    }
    assert not long


def test_no_dangerous_calls() -> None:
    """No pickle, torch.load, eval, exec, insecure channel or remote code anywhere in the product."""
    wrong = []
    for path in (p for folder in PACKAGES.values() for p in sources(folder)):
        where = path.relative_to(ROOT)
        for name, line in imports(path):
            if name.partition(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"):
                wrong.append(f"{where}:{line} imports {name}")
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name in ("eval", "exec", "torch.load") or name.endswith(
                ("insecure_channel", "add_insecure_port")
            ):
                wrong.append(f"{where}:{node.lineno} calls {name}")
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False":
                    wrong.append(f"{where}:{node.lineno} trusts remote code")
    assert not wrong


PROCESSES = {
    "coordinator": (
        ("starlings_coordinator.run", "starlings_coordinator.core.core"),
        ("torch", "transformers", "tokenizers", "numpy", "scipy", "pandas"),
    ),
    "keeper": (("starlings_coordinator.keeper",), ("torch", "transformers", "tokenizers", "scipy")),
    "planner": (
        (
            "starlings_coordinator.planner.plan",
            "starlings_coordinator.planner.linear.planning",
            "starlings_coordinator.planner.dtfm.search",
        ),
        ("torch", "transformers", "tokenizers", "grpc"),
    ),
    "supervisor": (("starlings_worker.supervisor",), ("torch", "transformers", "tokenizers", "scipy")),
    "handover": (("starlings_worker.handover",), ("torch", "transformers", "tokenizers", "scipy", "numpy")),
    "command line": (
        ("starlings.main", "starlings.demo.run", "starlings.tether"),
        ("torch", "transformers", "tokenizers", "scipy", "numpy"),
    ),
    "coordinator core": (("starlings_coordinator.core.core",), ("grpc", "asyncio", "torch", "sqlalchemy")),
    "worker core": (("starlings_worker.core.core",), ("grpc", "asyncio", "torch", "numpy")),
    "simulator": (("starlings_simulator",), ("grpc", "torch", "transformers")),
    "planner of fleets": (("starlings_simulator.study.answer",), ("grpc", "torch", "transformers")),
    "fleet files": (("starlings_simulator.fleets.swarm",), ("grpc", "torch", "numpy", "scipy")),
}


@pytest.mark.parametrize("process", sorted(PROCESSES))
def test_what_each_process_never_imports(process: str) -> None:
    modules, forbidden = PROCESSES[process]
    code = f"import sys, {', '.join(modules)}; print(' '.join(m for m in {forbidden!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
