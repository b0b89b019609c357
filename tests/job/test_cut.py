"""`[pipeline] stages`: a number, or the blocks of each stage; what a model cannot be cut into is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_job.cut import cut_problem, fixed_cut, parse_stages, stage_count
from starlings_job.errors import JobFileError
from starlings_job.prepare import prepare
from starlings_job.prepared import load_prepared
from starlings_job.spec import JobSpec, parse_job
from support.prepared_job import write_prepared_job

MINIMAL = '[job]\nname = "demo"\ntokens = "0.8M"\n[model]\npreset = "micro"\n'
BLOCKS = ("embed", "layers.0", "layers.1", "head")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_listed_blocks_are_the_cut(blocks: list[int]) -> None:
    cut = fixed_cut(parse_stages(blocks))
    assert [len(stage.blocks) for stage in cut] == blocks
    assert [block for stage in cut for block in stage.blocks] == list(range(sum(blocks)))
    assert stage_count(tuple(blocks)) == len(blocks)


def test_a_number_leaves_the_cut_to_the_planner() -> None:
    assert parse_job(MINIMAL).pipeline.stages == 0
    assert fixed_cut(3) == ()
    assert (stage_count(3), stage_count(0)) == (3, 0)
    assert cut_problem(0, BLOCKS) == cut_problem(4, BLOCKS) == cut_problem((1, 2, 1), BLOCKS) == ""


def test_what_a_model_cannot_be_cut_into_is_explained() -> None:
    assert cut_problem(5, BLOCKS) == (
        "[pipeline] stages: the model has 4 blocks (embed to head), and a block is never cut: 4 stages at most"
    )
    assert "4 stages at most" in cut_problem((1,) * 6, BLOCKS)
    listed = cut_problem((2, 1), BLOCKS)
    assert "[2, 1] are 3 blocks, and the model has 4 blocks (embed to head)" in listed
    assert listed.endswith("write numbers that add up to 4")


def test_the_cut_is_part_of_what_all_agree_on_but_not_of_the_preparation() -> None:
    plain, cut = parse_job(MINIMAL), parse_job(MINIMAL + "[pipeline]\nstages = [3, 3]\n")
    assert cut.pipeline.stages == (3, 3)
    assert plain.digest() != cut.digest()
    assert plain.preparation_digest() == cut.preparation_digest()
    assert JobSpec.from_json(cut.to_json()) == cut
    assert json.loads(cut.to_json())["pipeline"]["stages"] == [3, 3]


def test_a_coarse_codec_bears_few_stages_unless_forced() -> None:
    coarse = MINIMAL + '[pipeline]\ncodec = "int4:64"\n'
    assert parse_job(coarse + "stages = 5\n").pipeline.stages == 5
    assert parse_job(coarse + "force = true\nstages = 6\n").pipeline.stages == 6
    with pytest.raises(
        JobFileError, match=r"int4:64 bears 5 stages at most, and stages wants 6; write int8:128"
    ):
        parse_job(coarse + "stages = [1, 1, 1, 1, 1, 1]\n")


def test_prepare_refuses_a_cut_before_it_reads_any_text(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(MINIMAL + '[data]\nsource = "absent/*.txt"\n[pipeline]\nstages = 7\n')
    with pytest.raises(JobFileError, match=r"the model has 6 blocks .*: 6 stages at most"):
        prepare(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_prepared_job_is_held_to_it_as_well(tmp_path: Path) -> None:
    directory = write_prepared_job(tmp_path / "job")
    job = load_prepared(directory)
    count = len(job.description.blocks)
    wrong = job.model_copy(
        update={"prepared": None, "pipeline": job.pipeline.model_copy(update={"stages": (count, 1)})}
    )
    with pytest.raises(JobFileError, match=rf"{count} stages at most|add up to {count}"):
        load_prepared(directory, wrong)
