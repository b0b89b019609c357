"""How the benchmark of unequal data deals images by their classes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import skew


def test_replicas_get_few_classes_each_and_their_samples_once_per_epoch(tmp_path: Path) -> None:
    text = skew.open_data("shapes", tmp_path, "200K", 8)
    samples, sources = skew._by_source(text, "shapes")
    labels = text.batch(samples).targets.tolist()
    assert sorted(samples) == list(range(text.population))
    for source in sources:
        own = labels[source.first : source.first + source.samples]
        assert set(own) == {int(source.name)}
    deal = skew._deal(text, skew.Way("shapes", True, 0.1), seed=0)
    per_epoch = text.population // skew.REPLICAS // skew.MICROBATCH["shapes"]
    for replica in range(0, skew.REPLICAS, 5):
        dealt = [sample for step in range(per_epoch) for sample in deal(step, replica)]
        assert len(set(dealt)) == len(dealt)
        of_class = Counter(text.batch(dealt).targets.tolist())
        assert sum(count for _, count in of_class.most_common(3)) > 0.7 * len(dealt), of_class
    text.close()
