"""The generated code is what protoc makes of the .proto files, and the .proto files explain themselves."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
SOURCES = sorted((PROTOS / "starlings_protos").glob("*.proto"))

DECLARATION = re.compile(r"(message|enum|service|rpc|oneof) (\w+)")
FIELD = re.compile(r"(?:repeated |optional )?(map<.*>|[\w.]+) (\w+) = \d+;")
# Names that mean the same wherever they stand, and second halves of pairs whose first one is explained.
VOCABULARY = {
    "attempt", "block", "bound_microbatches_per_s", "ca_pem", "certificate_pem", "device_class", "fragment", "group",
    "job", "keep", "last_block", "last_stage", "listen_port", "microbatches_per_step", "plan_version", "protocol_max",
    "reason", "region", "site", "slot", "stage", "step", "version",
    "worker_id",
}  # fmt: skip
SCALARS = {"string", "bytes", "bool", "double", "float", "uint32", "uint64", "int32", "int64"}


def plugin(name: str) -> str:
    """A protoc plugin that is installed beside this interpreter."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found, f"{name} is not installed; run `make setup`"
    return found


def test_generated_code_is_current(tmp_path: Path) -> None:
    assert importlib.metadata.version("grpcio-tools") == "1.76.0", "newer generators refuse protobuf 6"
    command = [
        sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTOS),
        f"--plugin=protoc-gen-mypy={plugin('protoc-gen-mypy')}",
        f"--plugin=protoc-gen-mypy_grpc={plugin('protoc-gen-mypy_grpc')}",
        f"--python_out={tmp_path}", f"--mypy_out={tmp_path}",
        f"--grpc_python_out={tmp_path}", f"--mypy_grpc_out={tmp_path}",
        *(str(source.relative_to(PROTOS)) for source in SOURCES),
    ]  # fmt: skip
    subprocess.run(command, cwd=PROTOS, check=True, capture_output=True)
    made = {path.name: path.read_text("utf-8") for path in (tmp_path / "starlings_protos").iterdir()}
    kept = {path.name: path.read_text("utf-8") for path in (PROTOS / "starlings_protos").glob("*_pb2*.py*")}
    assert sorted(made) == sorted(kept)
    stale = [name for name in made if made[name] != kept[name]]
    assert not stale, f"run `make protos`: {stale}"


def declarations(source: Path) -> Iterator[tuple[int, str, str, str, bool]]:
    """(line number, enclosing name, kind, name, whether a comment stands right above), in order."""
    enclosing: list[str] = []
    commented = False
    for number, line in enumerate(source.read_text("utf-8").splitlines(), 1):
        text = line.strip()
        if text.startswith("//"):
            commented = True
            continue
        where = enclosing[-1] if enclosing else ""
        if match := DECLARATION.match(text) or FIELD.match(text):
            yield number, where, match[1], match[2], commented
        elif match := re.match(r"(\w+) = \d+;", text):
            yield number, where, "value", match[1], commented
        if text.endswith("{"):
            enclosing.append(text.split()[1])
        elif text == "}":
            enclosing.pop()
        commented = False


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_message_rpc_enum_and_field_that_needs_it_is_explained(source: Path) -> None:
    unexplained = []
    for number, where, kind, name, commented in declarations(source):
        needed = kind in ("message", "enum", "service", "rpc")
        if kind == "value":
            # DataType's values say all they mean.
            needed = where != "DataType" and not name.endswith("_UNSPECIFIED") and name != "LEASE_KIND_TRAIN"
        elif kind != "oneof" and not needed:
            needed = (kind in SCALARS or kind.startswith("map<")) and name not in VOCABULARY
        if needed and not commented:
            unexplained.append(f"{source.name}:{number}: {where} {kind} {name}")
    assert not unexplained


def test_names_are_words_with_units_last() -> None:
    for source in SOURCES:
        for number, _, kind, name, _ in declarations(source):
            if kind == "double" and name.endswith(("time", "interval", "lifetime", "timeout", "deadline")):
                pytest.fail(f"{source.name}:{number}: {name} has no unit")
