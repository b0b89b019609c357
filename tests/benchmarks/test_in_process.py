"""The swarm in one process that measurements of quality stand on: it must train as a plain model does."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from curves import Curve, draw_curves, draw_intervals
from inprocess.swarm import Setup, Swarm, cut_evenly
from inprocess.text import Text
from inprocess.training import train_synchronously
from paired import Results, interval

from starlings_job.model import initial_state
from starlings_job.prepared import load_prepared
from starlings_job.reference import train_reference
from starlings_job.sections import TrainSection
from starlings_worker.optimizers.adam import AdamW

SEED = 0
DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(tmp_path_factory.mktemp("text"), held_out=8, source=f"{DOCUMENTS}/*.md")


def make_swarm(text: Text, **chosen: object) -> Swarm:
    state = {block: dict(tensors) for block, tensors in initial_state(text.description, SEED)}
    return Swarm(text.description, state, Setup(AdamW(), **chosen))  # type: ignore[arg-type]


def test_an_exact_swarm_trains_as_a_plain_model_does(text: Text) -> None:
    """Two replicas of two stages, against the whole Hugging Face model with torch's own optimizer and clipping."""
    job = load_prepared(text.prepared)
    plain = train_reference(text.prepared, 3)
    swarm = make_swarm(text, replicas=2, stages=2)
    losses = train_synchronously(swarm, text, job.train, seed=SEED, steps=3, steps_total=job.steps_total)
    assert losses == pytest.approx(plain.losses, rel=1e-5)
    for replica in swarm.replicas:
        for worker in replica:
            for vector in worker.held.vectors.values():
                for slot in vector.slots:
                    expected = plain.state[slot.block, slot.name]
                    # A root of almost nothing makes Adam turn rounding into a good part of a step.
                    torch.testing.assert_close(vector.parameter_view(slot), expected, rtol=1e-3, atol=2e-5)
    first, second = ([w.held.vectors for w in replica] for replica in swarm.replicas)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name].parameters, other[name].parameters) for name in one)
    assert swarm.exchange_bytes == 3 * 2 * 4 * sum(v.size for vectors in first for v in vectors.values())


@pytest.mark.parametrize(
    ("chosen", "figure"),
    [
        ({"gradient_codec": "int4:64"}, "exchange_bytes"),
        ({"stages": 4, "boundary_codec": "int8:128"}, "boundary_bytes"),
    ],
)
def test_a_lossy_codec_loses_a_little_and_saves_bytes(
    text: Text, chosen: dict[str, object], figure: str
) -> None:
    train = TrainSection(batch=4, microbatch=2, lr=4e-3)
    exact, lossy = make_swarm(text, stages=chosen.get("stages", 1)), make_swarm(text, **chosen)
    expected = train_synchronously(exact, text, train, seed=SEED, steps=3)
    losses = train_synchronously(lossy, text, train, seed=SEED, steps=3)
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.02)
    assert getattr(lossy, figure) < 0.3 * getattr(exact, figure)
    held_out = text.held_out(8, 4)
    assert lossy.evaluate(0, held_out, through_codec=False) == pytest.approx(losses[-1], rel=0.3)
    owed = [values for worker in lossy.workers for _, _, values in worker.buffers.owed()]
    assert bool(owed) == ("gradient_codec" in chosen)


def test_layers_are_cut_evenly(text: Text) -> None:
    cut = [tuple(stage.blocks) for stage in cut_evenly(text.description, 3)]
    assert cut == [(0, 1, 2), (3,), (4, 5)]
    with pytest.raises(ValueError, match="4 layers make no 5 stages"):
        cut_evenly(text.description, 5)


def test_student_s_interval() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert (found.low, found.mean, found.high) == pytest.approx((2 - 2.484, 2.0, 2 + 2.484), abs=1e-3)
    assert interval([5.0]).high == float("inf")


def test_finished_runs_are_kept_and_a_broken_line_is_not(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    Results(file, {"steps": 3}).add("a", {"loss": 1.5})
    Results(file, {"steps": 4}).add("a", {"loss": 9.0})
    with file.open("a") as out:
        out.write('{"key": "b", "sett')
    again = Results(file, {"steps": 3})
    assert (again.get("a"), again.get("b")) == ({"loss": 1.5}, None)
    again.add("b", {"loss": 2.5})
    assert Results(file, {"steps": 3}).get("b") == {"loss": 2.5}
    assert Results(file, {"steps": 4}).get("a") == {"loss": 9.0}


def test_pictures_show_every_curve_and_interval(tmp_path: Path) -> None:
    draw_curves(
        tmp_path / "c.svg", "t", "x", "y", [Curve("a < b", [(0, 0), (1, 2)]), Curve("c", [(0, 1), (1, -1)])]
    )
    draw_intervals(tmp_path / "i.svg", "t", {"a": (0.1, -0.2, 0.4)}, [0.5])
    curves, intervals = (ElementTree.parse(tmp_path / name).getroot() for name in ("c.svg", "i.svg"))
    space = "{http://www.w3.org/2000/svg}"
    assert len(curves.findall(f"{space}polyline")) == 2
    assert "a < b" in [found.text for found in curves.iter(f"{space}text")]
    assert len(intervals.findall(f"{space}circle")) == 1
