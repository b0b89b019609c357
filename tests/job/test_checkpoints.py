"""Checkpoints: whole or not there, checked by hash, kept in number; readable by safetensors itself."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from starlings_job import checkpoint
from starlings_job.checkpoint import (
    CheckpointWriter,
    Manifest,
    load_manifest,
    newest_version,
    read_block,
    versions,
)
from starlings_job.errors import CheckpointError, DiskFull
from starlings_job.model import raw_tensor, torch_tensor
from starlings_job.safetensors_io import read_buffer
from starlings_job.state import RawTensor, block_digest


def state(seed: int) -> dict[str, RawTensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "param:a.weight": torch.randn(3, 4, generator=generator),
        "param:b": torch.randn(5, generator=generator).bfloat16(),
        "param:empty": torch.zeros(0, 2),
        "exp_avg:a.weight": torch.randn(3, 4, generator=generator),
    }
    return {name: raw_tensor(tensor) for name, tensor in tensors.items()}


def write(url: str | Path, version: int, seed: int = 0, keep: int = 0) -> Manifest:
    with CheckpointWriter(url, version, keep=keep) as writer:
        writer.add_block("embed", state(seed), 123)
        writer.add_block("layers.0", {"param:w": raw_tensor(torch.ones(2) * seed)})
        return writer.finish({"tokens": 12})


@pytest.mark.parametrize("where", ["path", "memory"])
def test_what_is_written_is_read(tmp_path: Path, where: str) -> None:
    url: str | Path = tmp_path / "c" if where == "path" else f"memory://{tmp_path.name}/c"
    assert versions(url) == ()
    manifest = write(url, 40, seed=3)
    assert newest_version(url) == 40
    assert load_manifest(url, 40) == manifest
    assert manifest.facts["tokens"] == 12
    read = read_block(url, 40, "embed")
    assert block_digest(read) == block_digest(state(3)) == manifest.blocks["embed"].digest
    assert set(read_block(url, 40, "embed", optimizer=False)) == {"param:a.weight", "param:b", "param:empty"}
    assert manifest.blocks["layers.0"].optimizer is None
    assert [manifest.blocks[block].optimizer_steps for block in ("embed", "layers.0")] == [123, 0]
    with pytest.raises(CheckpointError, match="no block"):
        read_block(url, 40, "layers.1")
    with pytest.raises(CheckpointError, match="there is no"):
        load_manifest(url, 41)


def test_safetensors_itself_reads_the_files(tmp_path: Path) -> None:
    write(tmp_path, 1)
    loaded = safetensors.torch.load_file(tmp_path / "00000001" / "embed.safetensors")
    for name in ("a.weight", "b", "empty"):
        assert torch.equal(loaded[name], torch_tensor(state(0)[f"param:{name}"]))
    ours = read_buffer(
        safetensors.torch.save({"x": torch.arange(3), "y": torch.ones(2, 2, dtype=torch.bool)})
    )
    assert torch.equal(torch_tensor(ours["x"]), torch.arange(3))


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    for version in (10, 20, 30, 40):
        write(tmp_path, version, keep=2)
    assert versions(tmp_path) == (30, 40)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000030", "00000040"]


def test_a_crash_while_writing_leaves_the_previous_one(tmp_path: Path) -> None:
    write(tmp_path, 10)
    writer = CheckpointWriter(tmp_path, 20)
    writer.add_block("embed", state(1))
    # The process dies here.
    assert versions(tmp_path) == (10,)
    assert block_digest(read_block(tmp_path, 10, "embed")) == block_digest(state(0))
    write(tmp_path, 20, seed=5, keep=3)
    assert versions(tmp_path) == (10, 20)
    assert block_digest(read_block(tmp_path, 20, "embed")) == block_digest(state(5))
    assert all(not p.name.endswith(".building") for p in tmp_path.iterdir())


def test_writing_a_version_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 10, seed=1)
    write(tmp_path, 10, seed=2)
    assert block_digest(read_block(tmp_path, 10, "embed")) == block_digest(state(2))
    assert [p.name for p in tmp_path.iterdir()] == ["00000010"]


def test_a_crash_between_the_two_renames_is_healed(tmp_path: Path) -> None:
    write(tmp_path, 10, seed=1)
    (tmp_path / "00000010").rename(tmp_path / "00000010.replaced")
    assert versions(tmp_path) == (10,)
    assert block_digest(read_block(tmp_path, 10, "embed")) == block_digest(state(1))


def test_a_full_disk_keeps_the_previous_one_and_gives_space_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 10)
    original, written = checkpoint.write_file, 0

    def failing(*arguments: Any) -> Any:
        nonlocal written
        written += 1
        if written == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(checkpoint, "write_file", failing)
    with pytest.raises(DiskFull, match="free some space") as caught:
        write(tmp_path, 20)
    assert caught.value.exit_code == 9
    assert [p.name for p in tmp_path.iterdir()] == ["00000010"]


def test_damage_is_found(tmp_path: Path) -> None:
    write(tmp_path, 10)
    file = tmp_path / "00000010" / "embed.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        read_block(tmp_path, 10, "embed")
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        read_block(tmp_path, 10, "embed")
    file.unlink()
    with pytest.raises(CheckpointError, match="there is no"):
        read_block(tmp_path, 10, "embed")


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path, 10)
    path = tmp_path / "00000010" / "manifest.json"
    record = json.loads(path.read_text())
    record["blocks"]["embed"]["parameters"]["name"] = "../../../etc/passwd"
    path.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="malformed"):
        load_manifest(tmp_path, 10)


def test_how_many_steps_an_optimizer_made_may_be_unsaid_and_is_no_nonsense(tmp_path: Path) -> None:
    write(tmp_path, 10)
    path = tmp_path / "00000010" / "manifest.json"
    record = json.loads(path.read_text())
    # As in checkpoints that were written before it was noted.
    del record["blocks"]["embed"]["optimizer_steps"]
    path.write_text(json.dumps(record))
    assert load_manifest(tmp_path, 10).blocks["embed"].optimizer_steps == 0
    for nonsense in (-1, 1 << 62, 1.5, True, "7"):
        record["blocks"]["embed"]["optimizer_steps"] = nonsense
        path.write_text(json.dumps(record))
        with pytest.raises(CheckpointError, match="malformed"):
            load_manifest(tmp_path, 10)


def test_blocks_are_added_once_and_have_sane_names(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1)
    writer.add_block("embed", state(0))
    with pytest.raises(CheckpointError, match="already"):
        writer.add_block("embed", state(0))
    with pytest.raises(CheckpointError, match="no block name"):
        writer.add_block("../x", state(0))
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_random_bytes_are_refused_not_believed() -> None:
    rng = random.Random(0)
    whole = safetensors.torch.save({"x": torch.arange(30), "y": torch.ones(4, 4)})
    for round_number in range(10_000):
        if round_number % 2:
            data = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(min(len(data), 200))] = rng.randrange(256)
        else:
            data = bytearray(rng.randbytes(rng.randrange(64)))
        try:
            tensors = read_buffer(bytes(data))
        except CheckpointError:
            continue
        assert sum(t.data.nbytes for t in tensors.values()) <= len(data) * len(tensors)
    for _ in range(2_000):
        with pytest.raises(CheckpointError):
            Manifest.from_json(rng.randbytes(rng.randrange(64)))


def test_digests_tell_states_apart() -> None:
    one = {"param:a": raw_tensor(torch.zeros(4))}
    assert block_digest(one) == block_digest({"param:a": raw_tensor(torch.zeros(4))})
    others = [
        {"param:b": raw_tensor(torch.zeros(4))},
        {"param:a": raw_tensor(torch.zeros(2, 2))},
        {"param:a": raw_tensor(torch.zeros(4, dtype=torch.int32))},
        {"param:a": raw_tensor(torch.tensor([0.0, 0.0, 0.0, -0.0]))},
        {**one, "exp_avg:a": raw_tensor(torch.zeros(4))},
        {},
    ]
    digests = {block_digest(one), *(block_digest(other) for other in others)}
    assert len(digests) == len(others) + 1


def test_raw_tensors_check_their_size() -> None:
    with pytest.raises(ValueError, match="cannot have"):
        RawTensor("F32", (3,), memoryview(b"123"))
    with pytest.raises(ValueError, match="unknown data type"):
        RawTensor("F8", (3,), memoryview(b"123"))
