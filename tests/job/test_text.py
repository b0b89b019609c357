"""Text to records: sources, the held-out split, masks, limits, tokenizers; and reading them back."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starlings_job.data.batch import decode_prompt, decode_records, loss_sum
from starlings_job.data.prepare_text import write_text
from starlings_job.data.sources import Document, find_documents, limited, split_documents
from starlings_job.data.tokenizer import ByteTokenizer, load_tokenizer, resolve_tokenizer
from starlings_job.errors import JobFileError, NoDataMatched, NotPrepared
from starlings_job.records import DatasetMeta, RecordStore, pack_tokens, unpack_tokens
from starlings_job.sections import DataSection


def write(folder: Path, base: Path, vocabulary: int = 256, **settings: Any) -> DatasetMeta:
    data = DataSection(**{"source": "*.txt", "sequence_length": 8, "held_out": 4, **settings})
    folder.mkdir(exist_ok=True)
    meta = write_text(
        folder,
        data,
        base,
        load_tokenizer(resolve_tokenizer(data.tokenizer, None, base), base),
        vocabulary_size=vocabulary,
        context_tokens=16,
        seed=1,
    )
    (folder / "dataset.json").write_text(meta.to_json())
    return meta


def texts(base: Path, count: int = 12, size: int = 100) -> dict[str, bytes]:
    rng = random.Random(0)
    found = {}
    for number in range(count):
        found[f"{number:02}.txt"] = bytes(rng.choices(range(97, 123), k=size)) + b"\n"
        (base / f"{number:02}.txt").write_bytes(found[f"{number:02}.txt"])
    return found


def test_records_are_windows_that_share_one_token(tmp_path: Path) -> None:
    found = texts(tmp_path, count=60, size=60)
    meta = write(tmp_path / "out", tmp_path)
    store = RecordStore(tmp_path / "out")
    train = (tmp_path / "out" / "tokens.bin").read_bytes()
    held = (tmp_path / "out" / "held_out.bin").read_bytes()
    assert store.population == (len(train) - 1) // 8 == meta.population
    assert store.read([0, 3]) == train[0:9] + train[24:33]
    last = store.population - 1
    assert store.read([last]) == train[8 * last : 8 * last + 9]
    # Held-out records lie apart, four of them, drawn from whole documents that no training sample touches.
    assert len(held) == 4 * 9
    assert store.read_held_out([1, 3]) == held[9:18] + held[27:36]
    outside = [name for name in sorted(found) if found[name] not in train]
    assert train == b"".join(found[name] for name in sorted(found) if name not in outside)
    pool = b"".join(found[name] for name in outside)
    assert len(outside) > 3
    positions = [pool.index(held[9 * i : 9 * i + 9]) for i in range(4)]
    assert positions == sorted(positions)
    assert positions[-1] - positions[0] > len(pool) // 2
    assert store.target_count([0, 1, 2]) == 24
    assert store.held_out_target_count([0]) == 8
    assert store.held_out_tokens(0, 5) == tuple(held[:5])
    everything = b"".join(found[name] for name in sorted(found))
    assert meta.source_sha256 == hashlib.sha256(everything).hexdigest()
    assert (meta.source_bytes, meta.source_files) == (len(everything), 60)
    batch = decode_records(store.read([1, 2]), store.meta)
    assert batch.inputs.tolist() == [list(train[8:16]), list(train[16:24])]
    assert batch.targets.tolist() == [list(train[9:17]), list(train[17:25])]
    assert batch.mask is None
    assert batch.target_count == 16


@pytest.mark.parametrize("bad", [-1, 10**9, True, 1.0, "0", None])
def test_ids_are_checked(tmp_path: Path, bad: Any) -> None:
    texts(tmp_path)
    write(tmp_path / "out", tmp_path)
    with RecordStore(tmp_path / "out") as store:
        for read in (store.read, store.read_held_out, store.target_count, store.held_out_target_count):
            with pytest.raises(ValueError, match="is not one of 0 to"):
                read([0, bad])


def test_entropies_by_counting(tmp_path: Path) -> None:
    texts(tmp_path)
    meta = write(tmp_path / "out", tmp_path)
    held = (tmp_path / "out" / "held_out.bin").read_bytes()
    rows = [held[9 * i : 9 * i + 9] for i in range(meta.held_out)]
    pairs = Counter(pair for row in rows for pair in pairwise(row))
    ones, n = Counter(b for _, b in pairs.elements()), 8 * len(rows)
    assert meta.unigram_entropy == pytest.approx(-sum(c / n * log(c / n) for c in ones.values()))
    first = Counter(a for a, _ in pairs.elements())
    expected = -sum(c / n * log(c / first[a]) for (a, _), c in pairs.items())
    assert meta.bigram_entropy == pytest.approx(expected)


def test_prompts_are_no_targets(tmp_path: Path) -> None:
    lines = [{"prompt": "2+2=", "completion": "4"} for _ in range(40)] + [{"text": "hello there"}] * 3
    (tmp_path / "pairs.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    meta = write(tmp_path / "out", tmp_path, source="pairs.jsonl", format="jsonl", sequence_length=5)
    assert meta.masked
    store = RecordStore(tmp_path / "out")
    total = 0
    for sample in range(store.population):
        batch = decode_records(store.read([sample]), meta)
        assert batch.mask is not None
        assert batch.target_count == store.target_count([sample]) > 0
        total += batch.target_count
        # The loss sees masked targets only.
        logits = torch.zeros(1, 5, 256)
        loss, count = loss_sum(logits, batch)
        assert float(loss) == pytest.approx(count * log(256), rel=1e-6)
    tokens = (tmp_path / "out" / "tokens.bin").read_bytes()
    masks = (tmp_path / "out" / "mask.bin").read_bytes()
    counted = bytes(t for t, m in zip(tokens, masks, strict=True) if m)
    assert set(counted) <= set(b"4\nhello there\n")
    assert total > 0


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"text": 3}', '{"prompt": "x"}', "{" * 100_000])
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' * 3 + line + "\n")
    with pytest.raises(JobFileError, match=r"x\.jsonl line 4: "):
        write(tmp_path / "out", tmp_path, source="x.jsonl", format="jsonl")


def test_nothing_matched(tmp_path: Path) -> None:
    with pytest.raises(NoDataMatched, match=r"'\*\.txt' matches no file \(looked from") as caught:
        write(tmp_path / "out", tmp_path)
    assert caught.value.exit_code == 12
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(NoDataMatched, match="all files that match are empty"):
        write(tmp_path / "out", tmp_path)
    (tmp_path / "a.txt").write_bytes(b"too short")
    with pytest.raises(NoDataMatched, match="too little for one training"):
        write(tmp_path / "out", tmp_path)


def test_one_large_file_gives_its_end(tmp_path: Path) -> None:
    text = bytes(random.Random(1).choices(range(97, 123), k=5000))
    (tmp_path / "a.txt").write_bytes(text)
    meta = write(tmp_path / "out", tmp_path)
    held = (tmp_path / "out" / "held_out.bin").read_bytes()
    train = (tmp_path / "out" / "tokens.bin").read_bytes()
    assert text.startswith(train)
    assert len(text) - len(train) == 4 * 9 * 8
    assert all(held[9 * i : 9 * i + 9] in text[len(train) :] for i in range(4))
    assert meta.held_out == 4


def test_directories_and_lists_of_globs(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    for name in ("d/a.txt", "d/e/b.txt", "c.md"):
        (tmp_path / name).write_text("x" * 50)
    names = [d.name for d in find_documents(("d", "*.md", "c.md"), "text", tmp_path)]
    assert names == ["c.md", "d/a.txt", "d/e/b.txt"]


def test_stdlib_leaves_tests_out() -> None:
    names = [d.name for d in find_documents(("stdlib",), "text", Path("/"))]
    assert names == sorted(names)
    assert "json/decoder.py" in names
    parts = {part for name in names for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "idlelib", "site-packages"}


def documents(*sizes: int) -> list[Document]:
    return [Document(f"{i}", Path(f"{i}"), 0, size) for i, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 20_000), st.integers(0, 3))
def test_splits_never_take_all_and_never_take_much(sizes: list[int], wanted: int, seed: int) -> None:
    found = documents(*sizes)
    split = split_documents(found, wanted, seed)
    held = sum(found[i].byte_count for i in split.held_out) + split.tail_bytes
    assert held <= 1.2 * min(wanted, sum(sizes) / 10) + 1
    assert len(split.held_out) < len(found) or not split.held_out
    if split.tail_of is not None:
        assert split.tail_of not in split.held_out
        assert split.tail_bytes < found[split.tail_of].byte_count or split.tail_bytes == 0
    assert split == split_documents(found, wanted, seed)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 20_000), st.integers(0, 3))
def test_limits_are_kept(sizes: list[int], limit: int, seed: int) -> None:
    found = documents(*sizes)
    chosen = limited(found, limit, seed)
    total = sum(d.byte_count for d in chosen)
    assert total <= limit or total == sum(sizes) <= limit
    assert total >= min(limit // 2, sum(sizes))
    assert [d.name for d in chosen] == sorted((d.name for d in chosen), key=int)


def test_the_limit_counts(tmp_path: Path) -> None:
    texts(tmp_path, count=30)
    meta = write(tmp_path / "out", tmp_path, limit=1000)
    assert 800 <= meta.source_bytes <= 1000


def small_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator(["hello there the cat sat on the mat"] * 5, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "auto_map": {"x": "y"}}))
    return folder


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    small_tokenizer(tmp_path / "tok")
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("hello there the cat sat on the mat" * 4)
    meta = write(tmp_path / "out", tmp_path, vocabulary=50_000, tokenizer="tok")
    assert (meta.token_bytes, meta.tokenizer, meta.unigram_entropy) == (2, "huggingface", None)
    store = RecordStore(tmp_path / "out")
    batch = decode_records(store.read([0]), meta)
    tokenizer = load_tokenizer("tok", tmp_path)
    assert tokenizer.end_of_file == (0,)
    expected = list(tokenizer.encode(b"hello there the cat sat on the mat" * 4))[:8]
    assert batch.inputs[0].tolist() == expected
    tokens = unpack_tokens((tmp_path / "out" / "tokens.bin").read_bytes(), 2)
    assert 0 in tokens
    with pytest.raises(JobFileError, match="there is no"):
        load_tokenizer("nowhere", tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(JobFileError, match="no tokenizer that can be read"):
        load_tokenizer("bad.json", tmp_path)


def test_records_from_outside_are_checked(tmp_path: Path) -> None:
    texts(tmp_path)
    meta = write(tmp_path / "out", tmp_path, vocabulary=256)
    assert decode_prompt(b"abc", meta).tolist() == [[97, 98, 99]]
    # Only as much as the model can take.
    assert decode_prompt(bytes(range(40)), meta).tolist() == [list(range(24, 40))]
    small = DatasetMeta.from_record({**meta.to_record(), "vocabulary_size": 100})
    for data in (b"", b"x" * 10, b"x" * 8):
        with pytest.raises(ValueError, match="no whole number"):
            decode_records(data, meta)
    with pytest.raises(ValueError, match="token 120 is not one of the 100"):
        decode_records(b"x" * 9, small)
    with pytest.raises(ValueError, match="token 120"):
        decode_prompt(b"x", small)


def test_descriptions_from_outside_are_checked(tmp_path: Path) -> None:
    texts(tmp_path)
    meta = write(tmp_path / "out", tmp_path)
    assert DatasetMeta.from_json(meta.to_json()) == meta
    record = meta.to_record()
    for change in (
        {"format": 9},
        {"kind": "sound"},
        {"token_bytes": 3},
        {"population": 0},
        {"sequence_length": -1},
        {"stride_tokens": 1},
        {"held_out": "4"},
        {"kind": "images"},
        {"image_shape": [1] * 9},
    ):
        with pytest.raises(JobFileError):
            DatasetMeta.from_record({**record, **change})
    for data in ("", "[]", "{" * 10**5):
        with pytest.raises(JobFileError):
            DatasetMeta.from_json(data)


def test_files_that_are_short_or_absent(tmp_path: Path) -> None:
    with pytest.raises(NotPrepared):
        RecordStore(tmp_path)
    texts(tmp_path)
    write(tmp_path / "out", tmp_path)
    whole = (tmp_path / "out" / "tokens.bin").read_bytes()
    (tmp_path / "out" / "tokens.bin").write_bytes(whole[:100])
    with pytest.raises(NotPrepared, match="fewer bytes"):
        RecordStore(tmp_path / "out")
    (tmp_path / "out" / "tokens.bin").write_bytes(b"")
    with pytest.raises(NotPrepared, match="absent or empty"):
        RecordStore(tmp_path / "out")


@given(st.lists(st.integers(0, 255), min_size=1), st.sampled_from([1, 2, 4]))
def test_tokens_pack_both_ways(tokens: list[int], token_bytes: int) -> None:
    assert list(unpack_tokens(pack_tokens(tokens, token_bytes), token_bytes)) == tokens


def test_the_byte_tokenizer_is_the_identity() -> None:
    assert ByteTokenizer().encode(b"\x00\xffab") == b"\x00\xffab"
