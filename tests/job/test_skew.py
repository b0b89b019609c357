"""Unequal data: whose samples are which, and what preparation says of the text's sources."""

from __future__ import annotations

import json
import random
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_job.apportion import apportion
from starlings_job.data.prepare_text import write_text
from starlings_job.data.tokenizer import ByteTokenizer
from starlings_job.errors import JobFileError, NotPrepared
from starlings_job.records import DatasetMeta, RecordStore
from starlings_job.sections import DataSection
from starlings_job.skew import SkewedOrder, dirichlet, shard_counts
from starlings_job.source_ranges import (
    SOURCES_MOST,
    SourceRange,
    read_sources,
    source_names,
    write_sources,
)
from starlings_job.spec import JobSpec, load_job, parse_job

JOB = '[job]\nname = "x"\ntokens = 1000\n[model]\npreset = "micro"\n'


def ranges(sizes: list[int]) -> list[SourceRange]:
    bounds = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [SourceRange(f"s{k}", first, end - first) for k, (first, end) in enumerate(pairwise(bounds))]


@given(st.integers(0, 1000), st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(any))
def test_apportioned_numbers_add_up_and_are_close(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights)
    assert sum(counts) == total
    assert all(
        abs(n - total * w / sum(weights)) < 1 + 1e-6 for n, w in zip(counts, weights, strict=True) if w
    )
    assert all(not n for n, w in zip(counts, weights, strict=True) if not w)


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -0.5], [float("nan")], [float("inf")]])
def test_what_has_no_proportion_is_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be finite"):
        apportion(3, weights)


sizes_of = st.lists(st.integers(1, 40), min_size=1, max_size=12)
alphas = st.sampled_from([1e-3, 0.1, 1.0, 10.0, 1e6])


@settings(max_examples=60, deadline=None)
@given(sizes_of, alphas, st.integers(1, 9), st.integers(0, 5))
def test_an_epoch_has_every_sample_once_whatever_the_shards(
    sizes: list[int], alpha: float, shards: int, seed: int
) -> None:
    total = sum(sizes)
    shards = min(shards, total)
    order = SkewedOrder(ranges(sizes), alpha, shards, seed)
    samples = order.samples_at(0, 0, total)
    assert sorted(samples) == list(range(total))
    lengths = [end - first for first, end in map(order.bounds, range(shards))]
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) <= 1
    assert [sum(column) for column in zip(*order.counts, strict=True)] == sizes
    for shard in range(shards):
        first, end = order.bounds(shard)
        own = order.samples_at(0, first, end)
        assert {order.shard_of(position) for position in range(first, end)} == {shard}
        # The next epoch has another order of the same samples.
        assert sorted(order.samples_at(1, first, end)) == sorted(own)
        found = [sum(r.first <= s < r.first + r.samples for s in own) for r in ranges(sizes)]
        assert found == order.counts[shard]
    assert SkewedOrder(ranges(sizes), alpha, shards, seed).samples_at(0, 0, total) == samples


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = SkewedOrder(ranges([50, 50]), 1.0, 2, 0)
    assert order.samples_at(0, 0, 50) != order.samples_at(1, 0, 50)
    assert order.samples_at(0, 0, 50) != SkewedOrder(ranges([50, 50]), 1.0, 2, 1).samples_at(0, 0, 50)


def unlikeness(alpha: float) -> float:
    """Mean total variation between a shard's distribution over sources and everybody's; 0: alike."""
    sizes, shards = [400, 300, 200, 100] * 3, 4
    found = []
    for seed in range(20):
        for row in shard_counts(sizes, alpha, shards, seed):
            parts = [n / sum(row) - s / sum(sizes) for n, s in zip(row, sizes, strict=True)]
            found.append(sum(map(abs, parts)) / 2)
    return statistics.fmean(found)


def test_a_smaller_alpha_makes_shards_less_alike() -> None:
    unlike = [unlikeness(alpha) for alpha in (1e5, 100.0, 10.0, 1.0)]
    assert unlike == sorted(unlike)
    assert unlike[0] < 0.02
    assert unlike[1] < 0.2
    assert unlike[-1] > 0.4


@pytest.mark.parametrize("alpha", [1e-4, 0.5, 50.0])
def test_dirichlet_has_the_moments_of_its_definition(alpha: float) -> None:
    """Mean p, variance p (1 - p) / (alpha + 1): also where every Gamma variate is below the least float."""
    prior, count = [0.5, 0.3, 0.2], 4000
    rng = random.Random(3)
    draws = [dirichlet([alpha * p for p in prior], rng) for _ in range(count)]
    for place, p in enumerate(prior):
        values = [draw[place] for draw in draws]
        variance = p * (1 - p) / (alpha + 1)
        assert abs(statistics.fmean(values) - p) < 5 * (variance / count) ** 0.5
        assert abs(statistics.pvariance(values) - variance) < 0.15 * variance
    assert all(abs(sum(draw) - 1) < 1e-9 for draw in draws)


# ---------------------------------------------------------------- sources


def test_sources_are_folders_and_files_that_lie_in_none() -> None:
    assert source_names(["json/a.py", "json/b/c.py", "os.py", "re/x.py"]) == ["json", "json", "os.py", "re"]
    # What all share says nothing.
    assert source_names(["lib/py/json/a", "lib/py/os"]) == ["json", "os"]
    assert source_names(["lib/a/x", "lib/a/y"]) == ["x", "y"]
    assert source_names(["only.txt"]) == ["only.txt"]


def test_very_many_sources_are_joined_with_their_neighbours() -> None:
    names = [f"{n:05}.txt" for n in range(3 * SOURCES_MOST + 7)]
    found = source_names(names)
    assert len(set(found)) == SOURCES_MOST
    assert found == sorted(found)
    assert found[0] == "00000.txt and after"


def prepared(folder: Path, base: Path, **values: Any) -> DatasetMeta:
    data = DataSection(**{"sequence_length": 8, "held_out": 2, **values})
    folder.mkdir()
    meta = write_text(folder, data, base, ByteTokenizer(), vocabulary_size=256, context_tokens=16, seed=1)
    (folder / "dataset.json").write_text(meta.to_json())
    return meta


def test_preparation_says_which_samples_are_of_which_source(tmp_path: Path) -> None:
    for number, letter in enumerate("abcdef"):
        (tmp_path / letter).mkdir()
        for part in range(3):
            text = letter.encode() * (50 + 17 * number + part)
            (tmp_path / letter / f"{part}.txt").write_bytes(text)
    # Too small to begin a sample.
    (tmp_path / "bb").mkdir()
    (tmp_path / "bb" / "0.txt").write_bytes(b"B")
    meta = prepared(tmp_path / "out", tmp_path, source="*/*.txt")
    store = RecordStore(tmp_path / "out")
    sources = read_sources(tmp_path / "out", meta.population)
    assert [source.name for source in sources] == list("abcdef")
    for source in sources:
        firsts = {store.read([s])[:1] for s in range(source.first, source.first + source.samples)}
        assert firsts == {source.name.encode()}


def test_sources_of_masked_text_skip_what_has_no_target(tmp_path: Path) -> None:
    for letter in "abc":
        lines = [
            json.dumps({"prompt": letter * 30, "completion": letter.upper() * (5 + n)}) for n in range(20)
        ]
        (tmp_path / f"{letter}.jsonl").write_text("\n".join(lines) + "\n")
    meta = prepared(tmp_path / "out", tmp_path, source="*.jsonl", format="jsonl")
    assert meta.masked
    store = RecordStore(tmp_path / "out")
    sources = read_sources(tmp_path / "out", meta.population)
    assert [source.name for source in sources] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    for source in sources:
        for sample in range(source.first, source.first + source.samples):
            tokens = store.read([sample])[:9].replace(b"\n", b"")
            assert tokens[:1].lower() == source.name[:1].encode()


@pytest.mark.parametrize(
    "rows",
    [[["a", 0, 5], ["b", 6, 4]], [["a", 0, 0], ["b", 0, 10]], [["a", 0, 9]], [["a"]], 3, [[1, "x", 2]]],
)
def test_a_malformed_list_of_sources_is_refused(tmp_path: Path, rows: Any) -> None:
    (tmp_path / "sources.json").write_text(json.dumps({"format": 1, "sources": rows}))
    with pytest.raises(NotPrepared, match="prepare the job again"):
        read_sources(tmp_path, 10)


def test_a_directory_of_an_older_version_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotPrepared, match=r"\[data\] skew needs that: prepare the job again"):
        read_sources(tmp_path, 10)
    write_sources(tmp_path, [SourceRange("a", 0, 10)])
    assert read_sources(tmp_path, 10) == (SourceRange("a", 0, 10),)


# ---------------------------------------------------------------- the job file


def test_skew_is_for_schedules_without_a_barrier(tmp_path: Path) -> None:
    with pytest.raises(
        JobFileError, match=r'skew = 1 needs \[train\] schedule = "async"; with "sync" each step'
    ):
        parse_job(JOB + "[data]\nskew = 1.0\n")
    with pytest.raises(JobFileError, match="skew"):
        parse_job(JOB + '[data]\nskew = 0.0\n[train]\nschedule = "async"\n')
    file = tmp_path / "job.toml"
    file.write_text(JOB + '[data]\nskew = 0.5\n[train]\nschedule = "async"\n')
    job = load_job(file)
    assert job.data.skew == 0.5
    assert JobSpec.from_json(job.to_json()).data.skew == 0.5


def test_images_have_no_sources() -> None:
    text = JOB.replace("micro", "shapes") + '[data]\nskew = 0.5\n[train]\nschedule = "async"\n'
    with pytest.raises(JobFileError, match="skew is for text"):
        parse_job(text)


def test_skew_is_no_reason_to_prepare_again() -> None:
    train = '[train]\nschedule = "async"\n'
    plain, skewed = parse_job(JOB + train), parse_job(JOB + "[data]\nskew = 0.5\n" + train)
    assert plain.preparation_digest() == skewed.preparation_digest()
    assert plain.digest() != skewed.digest()
