"""job.toml: what is accepted, and that every refusal names line, key and what is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from starlings_job.errors import JobFileError
from starlings_job.exchange_rules import Phase, Preset, rules_for
from starlings_job.exchange_settings import BY_SLOTS, HEEDED_BY
from starlings_job.presets import PRESETS
from starlings_job.spec import JobSpec, PreparedSection, load_job, parse_job

MINIMAL = '[job]\nname = "demo"\ntokens = "0.8M"\n[model]\npreset = "tiny"\n'
PAIRS = '[train]\nschedule = "async"\n[exchange]\n'


def refusal(text: str) -> str:
    with pytest.raises(JobFileError) as caught:
        parse_job(text)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_defaults_are_filled_in() -> None:
    job = parse_job(MINIMAL)
    assert job.job.tokens == 800_000
    assert job.data.sequence_length == 128
    assert job.data.source == ("stdlib",)
    assert job.train.batch == 16
    assert job.microbatches_per_step == 4
    assert job.tokens_per_step == 16 * 128
    assert job.steps_total == 391
    assert job.network.ports.control == 7700
    assert job.swarm.settle_s == 10.0


def test_pairs_are_what_async_does_with_the_defaults_of_the_preset() -> None:
    job = parse_job(MINIMAL + '[train]\nschedule = "async"\n')
    assert job.pair_rules == rules_for("pairs", inner_beta1=job.train.beta1)
    assert (job.exchange.codec, job.exchange.every) == ("int8:128", 50)
    assert JobSpec.from_json(job.to_json()) == job
    assert parse_job(MINIMAL).pair_rules is None
    assert parse_job(MINIMAL + PAIRS + 'preset = "none"').pair_rules is None
    assert parse_job(MINIMAL + PAIRS + "seed = 1").digest() != job.digest()


@pytest.mark.parametrize(
    ("extra", "unties"),
    [
        ("", False),
        ('[train]\nschedule = "async"', True),
        ('[train]\nschedule = "async"\n[pipeline]\nstages = 2', True),
        ('[train]\nschedule = "async"\n[pipeline]\nstages = 1', False),
        ('[train]\nschedule = "async"\n[pipeline]\nstages = [8]', False),
    ],
)
def test_async_unties_embeddings_unless_every_worker_holds_both_ends(extra: str, unties: bool) -> None:
    assert parse_job(MINIMAL + extra + "\n").unties is unties


@pytest.mark.parametrize("preset", BY_SLOTS)
def test_presets_by_slots_have_their_papers_numbers_when_nothing_else_is_said(preset: Preset) -> None:
    job = parse_job(MINIMAL + PAIRS + f'preset = "{preset}"\n')
    inner = {"quasi_global": "adam", "quasi_global_mu": 0.0, "quasi_global_beta": 0.0}
    assert job.pair_rules == rules_for(preset, **(inner if preset == "gossip" else {}))
    assert job.exchange.pairs
    assert JobSpec.from_json(job.to_json()) == job


@pytest.mark.parametrize("key", HEEDED_BY)
def test_every_key_is_refused_where_nobody_heeds_it_and_reaches_the_rules_of_those_who_do(key: str) -> None:
    """So that no number of a job file is without effect."""
    others = {
        "momentum_codec": '"exact"', "warmup_fraction": 0.25, "outer_rate": 0.8, "outer_momentum": 0.6, "gamma": 0.75,
        "quasi_global": "false",
        "pull_probability": 0.3, "pull": 0.4, "warmup_swaps": 1, "swaps": 1, "robust": '"trimmed"', "merge_alpha": 0.5,
    }  # fmt: skip
    context = {
        "warmup_every": "warmup_fraction = 0.1\n",
        "warmup_swaps": "swaps = 2\nwarmup_fraction = 0.1\n",
    }
    for preset in BY_SLOTS:
        name = f'preset = "{preset}"\n'
        if preset not in HEEDED_BY[key]:
            wrong: object = {
                "momentum_codec": '"exact"',
                "robust": '"trimmed"',
                "quasi_global": "false",
                "swaps": 7,
                "seed": 7,
            }.get(key, 7 if key in ("every", "fragments", "warmup_swaps", "warmup_every") else 0.3)
            text = f"{key} = {wrong}\n"
            assert f'means nothing to "{preset}"' in refusal(MINIMAL + PAIRS + name + text)
            continue
        base = name + context.get(key, "")
        before, after = (
            parse_job(MINIMAL + PAIRS + base + more) for more in ("", f"{key} = {others.get(key, 3)}\n")
        )
        if key == "swaps" and preset == "palsgd":
            after = parse_job(MINIMAL + PAIRS + base + "swaps = 2\n")
        assert before.digest() != after.digest()
        assert key == "seed" or before.pair_rules != after.pair_rules, preset


def test_every_setting_of_pairs_reaches_the_rules() -> None:
    text = (
        'codec = "fp16"\nevery = 7\nswaps = 3\nfragments = 4\nouter_rate = 0.9\nouter_momentum = 0.5\n'
        'momentum_codec = "int8:128"\nwarmup_fraction = 0.3\nwarmup_every = 2\nwarmup_swaps = 1\n'
    )
    rules = parse_job(MINIMAL + PAIRS + text).pair_rules
    assert rules is not None
    assert (rules.main, rules.warmup) == (Phase(7, 0.9, 0.5), Phase(2, 1.0, 0.0))
    assert (rules.codec, rules.momentum_codec) == ("fp16", "int8:128")
    assert (rules.swaps, rules.warmup_swaps, rules.fragments, rules.warmup_fraction) == (3, 1, 4, 0.3)
    often = parse_job(MINIMAL + PAIRS + "every = 7").pair_rules
    assert often is not None
    assert (often.main.inner_steps, often.warmup) == (7, Phase(7, 1.0, 0.0))
    without = parse_job(MINIMAL + PAIRS + "warmup_fraction = 0.0").pair_rules
    assert without is not None
    assert without.warmup is None
    forced = parse_job(MINIMAL + PAIRS + 'force = true\ncodec = "int4:64"').pair_rules
    assert forced is not None
    assert forced.codec == "int4:64"


def test_nadam_forgets_its_first_moment_at_the_outer_step() -> None:
    text = '[train]\nschedule = "async"\ncorrection = "nadam"\nmax_staleness = 3\n'
    rules = parse_job(MINIMAL + text).pair_rules
    assert rules is not None
    assert (rules.correction, rules.reset_first_moment, rules.max_staleness) == ("nadam", True, 3)


def test_the_preset_gives_the_sequence_length_unless_said() -> None:
    assert parse_job(MINIMAL + "[data]\nsequence_length = 200\n").data.sequence_length == 200
    assert parse_job(MINIMAL.replace("tiny", "small")).data.sequence_length == 256
    shapes = parse_job(MINIMAL.replace("tiny", "shapes"))
    assert shapes.data.source == ("shapes",)
    assert shapes.tokens_per_sample == 1


def test_microbatch_follows_batch_when_left_out() -> None:
    assert parse_job(MINIMAL + "[train]\nbatch = 6\n").train.microbatch == 3
    assert parse_job(MINIMAL + "[train]\nbatch = 7\n").train.microbatch == 1


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            "[train]\nbatchh = 3",
            "job.toml line 7: [train] has no key 'batchh' (did you mean 'batch'?); allowed: schedule",
        ),
        (
            "[trian]\nbatch = 3",
            "line 6: there is no section [trian] (did you mean 'train'?); allowed: job, model",
        ),
        (
            "[train]\nbatch = 10\nmicrobatch = 4",
            "[train] batch = 10 is not a multiple of microbatch = 4; write batch = 12",
        ),
        ('[train]\nschedule = "local"', "'local' is not allowed; allowed: 'sync' or 'async'"),
        ("[train]\ninner_batch = 2", 'inner_batch = 2 is for schedule = "async"'),
        ('[train]\nschedule = "async"\ncorrection = "nadam"\noptimizer = "sgd"', 'needs optimizer = "nadam"'),
        ('[train]\nschedule = "async"\ncorrection = "nadam"\nbeta1 = 0.9', "stable with beta1 = 0.99"),
        (
            '[train]\nschedule = "async"\ncorrection = "nadam"\nmomentum_decay = 0.1',
            "stable with beta1 = 0.99",
        ),
        (
            '[train]\nschedule = "async"\ncorrection = "predict"\noptimizer = "muon"',
            'not of "muon"; write one',
        ),
        ('[train]\nschedule = "async"\ncorrection = "predict"\noptimizer = "sgd"', "with momentum above 0"),
        ('[train]\ncorrection = "predict"', 'is for schedule = "async"'),
        (
            '[train]\nschedule = "async"\ncorrection = "predict"\n[exchange]\npreset = "gossip"',
            'write correction = "none", or quasi_global = false',
        ),
        (
            '[train]\nschedule = "async"\n[exchange]\npreset = "allreduce"',
            '[exchange] preset = "allreduce" needs schedule = "sync"; write that, or with schedule = "async" one of '
            "pairs",
        ),
        ('[exchange]\npreset = "none"', 'needs schedule = "async"; write that, or with schedule = "sync"'),
        (
            '[exchange]\npreset = "pairs"',
            'preset = "pairs" needs schedule = "async"; write that, or with schedule = "sync" one of allreduce',
        ),
        (
            '[exchange]\npreset = "gossip"',
            'preset = "gossip" needs schedule = "async"; write that, or with schedule = "sync" one of allreduce',
        ),
        (
            "[exchange]\nswaps = 3",
            'swaps = 3 is for preset = "pairs" or "palsgd" (with schedule = "async"), and means nothing to '
            '"allreduce": remove',
        ),
        (
            '[train]\nschedule = "async"\n[exchange]\npreset = "none"\nevery = 5',
            'means nothing to "none": remove',
        ),
        (PAIRS + "gamma = 0.9", 'gamma = 0.9 is for preset = "noloco"'),
        (PAIRS + 'preset = "noloco"\nswaps = 2', "swaps"),
        (
            PAIRS + 'preset = "noloco"\nouter_momentum = 0.8',
            "write less than 0.8 (0.5 is its paper's), or preset",
        ),
        (
            PAIRS + 'preset = "noloco"\ngamma = 0.5',
            "keeps its replicas together for gamma between 0.5 and 2.5",
        ),
        (PAIRS + 'preset = "noloco"\ngamma = 1.4', "drives its replicas apart when swaps fail"),
        (PAIRS + 'preset = "noloco"\nmomentum_codec = "exact"', "momentum_codec = 'exact' is for preset"),
        (PAIRS + 'preset = "palsgd"\npull_probability = 1.0', "less than 1"),
        (PAIRS + 'preset = "palsgd"\ngamma = 1.0', 'means nothing to "palsgd"'),
        (PAIRS + 'preset = "gossip"\nevery = 5', "every = 5 is for preset"),
        (PAIRS + 'preset = "gossip"\nouter_rate = 0.7', "outer_rate = 0.7 is for preset"),
        (
            '[train]\nschedule = "async"\noptimizer = "muon"\n[exchange]\npreset = "gossip"',
            'forms of "adamw" and "sgd", not of "muon"; write one of them, or quasi_global = false',
        ),
        ('[exchange]\npreset = "noloco"', 'needs schedule = "async"; write that'),
        (PAIRS + "outer_momentum = 1.0", "less than 1"),
        (PAIRS + "outer_rate = 0.0", "greater than 0"),
        (PAIRS + "every = 0", "greater than or equal to 1"),
        (PAIRS + "fragments = 0", "greater than or equal to 1"),
        (PAIRS + "swaps = 1\nwarmup_swaps = 2", "warmup_swaps = 2 is out of range; write 1 to swaps = 1"),
        (PAIRS + "warmup_fraction = 1.0", "less than 1"),
        (PAIRS + 'codec = "int4:64"', "use exact, fp16 or int8:128; or set force = true"),
        (PAIRS + 'codec = "topk:64/4096"', "or set force = true"),
        (PAIRS + 'momentum_codec = "topk:64/4096"', "use int4:64, or set force = true"),
        (PAIRS + 'momentum_codec = "int9"', "unknown name 'int9'"),
        (PAIRS + "seed = -1", "greater than or equal to 0"),
        ('[train]\noptimizer = "lion"', "allowed: 'adamw', 'nadam', 'sgd', 'muon' or 'adamw8bit'"),
        (
            "[train]\nmomentum = 0.9",
            'momentum = 0.9 is for optimizer "sgd" and "muon", and means nothing to "adamw"',
        ),
        ('[train]\noptimizer = "sgd"\nbeta1 = 0.8', 'beta1 = 0.8 is for optimizer "adamw" and "adamw8bit"'),
        (
            '[train]\noptimizer = "muon"\nmomentum_decay = 0.1',
            'for optimizer "nadam", and means nothing to "muon"',
        ),
        ('[train]\noptimizer = "nadam"\nmuon_scale = "original"', "muon_scale = 'original' is for optimizer"),
        ("[train]\nlr = -1", "greater than 0"),
        ("[train]\nlr = nan", "finite"),
        ("[train]\nwarmup = 3.5", "whole number of steps"),
        ("[exchange]\nevery = 50", 'every = 50 is for preset = "pairs"'),
        ('[exchange]\nrobust = "trimmed"', "robust = 'trimmed' is for preset = \"diloco\""),
        ('[exchange]\ncodec = "rle:64/4096"', "unknown name 'rle'; allowed: topk:K/CHUNK, randk:K/CHUNK"),
        ('[pipeline]\ncodec = "int9"', "line 7: [pipeline] codec: codec 'int9': unknown name"),
        ("[pipeline]\nstages = -1", "line 7: [pipeline] stages: -1 is neither a number of stages, such as 3"),
        ("[pipeline]\nstages = true", "True is neither a number of stages"),
        ("[pipeline]\nstages = []", "nor the blocks of each stage, such as [3, 3, 2]"),
        ("[pipeline]\nstages = [3, 0, 5]", "[3, 0, 5] is neither a number of stages"),
        ('[pipeline]\nstages = "3"', "'3' is neither a number of stages"),
        (
            '[pipeline]\ncodec = "int4:64"\nstages = 6',
            "line 6: [pipeline] codec int4:64 bears 5 stages at most, and stages wants 6; write int8:128, fewer",
        ),
        ('[bus]\nurl = "mqtt://x"', "line 7: [bus] url: mqtt:// is not encrypted and only for localhost"),
        ('[bus]\nurl = ""', "does not begin with mqtts://"),
        ('[bus]\npayload = "xml"', "allowed: 'protobuf' or 'json'"),
        ("[network.ports]\ncontrol = 70000", "[network.ports] control: "),
        ("[network.ports]\ncontroll = 7", "[network.ports] has no key 'controll'"),
        ('[network]\nhost = "a b"', "no host name or address"),
        ('[data]\nformat = "csv"', "'text' or 'jsonl'"),
        ("[data]\nsource = []", '"stdlib", "shapes", a glob'),
        ('[data]\nlimit = "much"', 'such as 8000000, "8M" or "8MiB"'),
        ('[data]\nsource = "shapes"', "belong together"),
        ('[data]\nsource = ["shapes", "stdlib"]', "goes with no other source"),
        ("[swarm]\nmin_workers = 0", "greater than or equal to 1"),
        ("[checkpoint]\nkeep = true", "[checkpoint] keep"),
        ("[prepared]\nmodel = {}", "[prepared] is for `starlings prepare`"),
    ],
)
def test_refusals_say_what_is_allowed(extra: str, said: str) -> None:
    assert said in refusal(MINIMAL + extra + "\n")


def test_refusals_of_the_required_sections() -> None:
    assert "line 3, column" in refusal('[job]\nname = "a"\ntokens = = 3\n')
    assert "the section [model] is missing" in refusal('[job]\nname = "a"\ntokens = 3\n')
    assert "[job] needs the key 'tokens'" in refusal('[job]\nname = "a"\n[model]\npreset = "tiny"\n')
    assert "A-Z a-z 0-9" in refusal(MINIMAL.replace('"demo"', '"a/b"'))
    assert "allowed: micro, shapes, small, tiny" in refusal(MINIMAL.replace("tiny", "huge"))
    assert "it has none of them" in refusal(MINIMAL.replace('preset = "tiny"', "untie = true"))
    assert "it has preset and config" in refusal(MINIMAL + 'config = "c.json"\n')
    assert "positive whole number" in refusal(MINIMAL.replace('"0.8M"', "0"))
    assert "must be a table" in refusal("job = 3\n" + '[model]\npreset = "tiny"\n')


def test_several_faults_are_all_named() -> None:
    text = refusal(MINIMAL + '[train]\nbatchh = 3\nlr = "x"\n[data]\nformat = 3\n')
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "count"),
    [("800000", 800_000), ('"0.8M"', 800_000), ('"1_000"', 1000), ('"2k"', 2000), ('"1.5B"', 1_500_000_000)],
)
def test_counts_as_people_write_them(text: str, count: int) -> None:
    assert parse_job(MINIMAL.replace('"0.8M"', text)).job.tokens == count


@pytest.mark.parametrize(
    ("text", "count"), [("8000", 8000), ('"8M"', 8_000_000), ('"8MB"', 8_000_000), ('"8MiB"', 8 << 20)]
)
def test_bytes_as_people_write_them(text: str, count: int) -> None:
    assert parse_job(MINIMAL + f"[data]\nlimit = {text}\n").data.limit == count


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="cannot read the job file"):
        load_job(tmp_path / "absent.toml")
    with pytest.raises(JobFileError, match="cannot read the job file"):
        load_job(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'[job]\nname = "\xe9"\n')
    with pytest.raises(JobFileError, match="not UTF-8"):
        load_job(tmp_path / "latin.toml")
    (tmp_path / "job.toml").write_text(MINIMAL)
    assert load_job(tmp_path / "job.toml") == parse_job(MINIMAL)


def test_json_round_trip_and_digest() -> None:
    job = parse_job(MINIMAL)
    assert JobSpec.from_json(job.to_json()) == job
    longer = parse_job(
        MINIMAL.replace("0.8M", "2M") + '[network]\nhost = "10.0.0.1"\n[swarm]\nsettle_s = 0\n'
    )
    assert longer.digest() == job.digest()
    assert longer.preparation_digest() == job.preparation_digest()
    other = parse_job(MINIMAL + "[train]\nlr = 0.5\n")
    assert other.digest() != job.digest()
    assert other.preparation_digest() == job.preparation_digest()
    assert parse_job(MINIMAL.replace("tiny", "micro")).preparation_digest() != job.preparation_digest()


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"job": 3}', b"{" * 100_000])
def test_bytes_that_are_no_job_are_refused(data: bytes) -> None:
    with pytest.raises(JobFileError):
        JobSpec.from_json(data)


def test_tiny_is_what_the_sheet_says() -> None:
    assert PRESETS["tiny"].config["hidden_size"] == 128
    assert PRESETS["tiny"].config["intermediate_size"] == 336
    assert not PRESETS["tiny"].config["tie_word_embeddings"]


def test_the_torch_free_modules_are_torch_free() -> None:
    modules = (
        "spec, schedule, sampling, state, profile, memory, records, data, checkpoint, export, prepared, "
        "description, data.tokenizer, data.prepare_text, safetensors_io"
    )
    imports = ", ".join(f"starlings_job.{name.strip()}" for name in modules.split(","))
    heavy = ("torch", "transformers", "tokenizers", "numpy")
    code = f"import sys, {imports}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_workers_hear_of_the_bus_and_it_is_no_other_job_for_it() -> None:
    plain, bus = (
        parse_job(MINIMAL),
        parse_job(MINIMAL + '[bus]\nurl = "mqtts://broker.example"\npayload = "json"\n'),
    )
    assert bus.bus.url == "mqtts://broker.example:8883"
    assert bus.digest() == plain.digest()
    prepared = {"prepared": PreparedSection(model={}, dataset={})}
    heard = JobSpec.from_json(bus.model_copy(update=prepared).to_json())
    assert heard.bus == bus.bus
    assert JobSpec.from_json(plain.model_copy(update=prepared).to_json()).bus.url is None


def test_momentum_is_what_suits_the_optimizer() -> None:
    """Also after the way to a worker; zeros and defaults ask for nothing, so they may stand with any optimizer."""
    for text, momentum in (
        ('optimizer = "muon"', 0.95),
        ('optimizer = "muon"\nmomentum = 0.8', 0.8),
        ('optimizer = "sgd"\nweight_decay = 0.0', 0.0),
        ("momentum = 0.0", 0.0),
    ):
        job = parse_job(MINIMAL + f"[train]\n{text}\n", "job.toml")
        assert job.train.momentum == momentum
        assert JobSpec.from_json(job.to_json()) == job
