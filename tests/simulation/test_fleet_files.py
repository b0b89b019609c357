"""Fleet files: what they say is what workers, sites and distances become, and what is wrong says the fix."""

from __future__ import annotations

import contextlib
import math
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starlings_job.devices import DEVICES
from starlings_job.memory import GPU_CONTEXT_BYTES
from starlings_job.profile import BlockProfile, Profile
from starlings_protos.messages import WorkerId
from starlings_simulator.fleets.file import FleetFileError, load_fleet, parse_fleet
from starlings_simulator.fleets.networks import ACCESS, REGIONS, UNKNOWN_MS, region_rtt_ms
from starlings_simulator.fleets.swarm import Swarm

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "fleet.toml"
TWO_GPUS = '[[workers]]\nclass = "rtx3090"\ncount = 2\n'


def swarm(text: str) -> Swarm:
    return Swarm(parse_fleet(text))


def profile() -> Profile:
    blocks = [BlockProfile("embed", "embed", 100, 100, 0, 0, 400, 400)]
    blocks += [BlockProfile(f"layers.{i}", "layer", 1000, 1000, 6_000_000, 800, 400, 400) for i in range(2)]
    return Profile(
        (*blocks, BlockProfile("head", "head", 100, 100, 2_000_000, 40, 400, 400)), "llama", 8, 16, 32
    )


def test_the_example_has_what_it_says() -> None:
    made = Swarm(load_fleet(EXAMPLE))
    names = [worker.worker_id for worker in made.workers]
    assert len(names) == len(set(names)) == 18
    assert {"rtx3090-1", "rtx3090-4", "home-6", "rtx4070-3", "old"} <= set(names)
    by_name = {worker.worker_id: worker for worker in made.workers}
    assert by_name[WorkerId("rtx3090-1")].site == by_name[WorkerId("rtx3090-4")].site == "delft"
    assert by_name[WorkerId("home-1")].site == "home-1"
    assert made.sites["home-1"].uplink_bytes_per_s == ACCESS["cable"].up_mbit_per_s * 125_000
    assert made.sites["boston"].downlink_bytes_per_s == 900 * 125_000
    # 0.30 EUR per kWh at 350 W, and a price that is given.
    assert by_name[WorkerId("rtx3090-1")].price_per_hour == pytest.approx(0.105)
    assert by_name[WorkerId("rtxa6000-2")].price_per_hour == 0.80
    assert by_name[WorkerId("home-3")].lifetime_s == 9 * 3600
    assert math.isinf(by_name[WorkerId("rtx4090-1")].lifetime_s)


def test_workers_measure_what_their_class_or_their_numbers_say() -> None:
    model = profile()
    made = swarm(
        '[[workers]]\nclass = "RTX 3090"\nspeed = 0.5\n'
        '[[workers]]\nname = "own"\nmemory = "8GB"\n'
        "forward_seconds = { embed = 0.1, layer = 0.2, head = 0.3 }\nuplink_mbit_per_s = 8\n"
    )
    card, own = made.plan_workers(model, microbatch=4)
    device = DEVICES["rtx3090"]
    assert card.forward_seconds["layer"] == pytest.approx(4 * 6_000_000 / (device.flops_per_s / 2))
    assert card.backward_seconds["layer"] == 2 * card.forward_seconds["layer"]
    assert card.memory_bytes == device.memory_bytes - GPU_CONTEXT_BYTES
    assert card.uplink_bytes_per_s == 0.0
    assert own.forward_seconds == {"embed": 0.1, "layer": 0.2, "head": 0.3}
    assert own.memory_bytes == 8_000_000_000
    assert (own.uplink_bytes_per_s, own.downlink_bytes_per_s) == (1e6, 0.0)


def test_devices_without_bfloat16_run_in_single_precision() -> None:
    assert DEVICES["t4"].flops_per_s < DEVICES["rtx3060"].flops_per_s
    assert all(device.source and device.memory_gib > 0 < device.watts for device in DEVICES.values())
    assert all(line.source for line in ACCESS.values())


def test_distances_come_from_the_file_the_table_and_the_lines() -> None:
    text = (
        '[sites.a]\nregion = "us-east-1"\ndelay_ms = 3\n[sites.b]\nregion = "eu-west-1"\ndelay_ms = 5\n'
        '[[workers]]\nclass = "t4"\nsite = "a"\ncount = 2\nname = "x"\n[[workers]]\nclass = "t4"\nsite = "b"\n'
    )
    plain = swarm(text)
    one, two, far = (worker.worker_id for worker in plain.workers)
    assert plain.rtt_s(one, two) < 0.001
    assert plain.rtt_s(one, far) == plain.rtt_s(far, one) == pytest.approx(0.003 + 0.005 + 0.085)
    given_one = swarm(text + '[rtt_ms]\nnames = ["a", "b"]\nmatrix = [[0, 30], [31, 0]]\n')
    assert given_one.rtt_s(one, far) == pytest.approx(0.030)
    assert given_one.rtt_s(far, one) == pytest.approx(0.031)
    assert region_rtt_ms("us-east-1", "moon") == UNKNOWN_MS
    assert all(region_rtt_ms(a, b) == region_rtt_ms(b, a) > 0 for a in REGIONS for b in REGIONS)


def test_paths_bound_what_a_site_can_send() -> None:
    made = swarm(
        '[sites.a]\naccess = "campus"\n[sites.b]\n[[workers]]\nclass = "t4"\nsite = "a"\nname = "x"\n'
        '[[workers]]\nclass = "t4"\nsite = "b"\nname = "y"\n'
        '[path_mbit_per_s]\nnames = ["a", "b"]\nmatrix = [[0, 80], [0, 0]]\n'
    )
    assert made.sites["a"].uplink_bytes_per_s == 10e6
    assert made.sites["b"].downlink_bytes_per_s == 10e6
    assert made.sites["a"].downlink_bytes_per_s == 125e6
    assert math.isinf(made.sites["b"].uplink_bytes_per_s)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no workers: write [[workers]]"),
        ('[[workers]]\nclas = "t4"\n', "line 2: [[workers]] 1 has no key 'clas' (did you mean 'class'?)"),
        (
            '[[workers]]\nclass = "rtx309"\n',
            "line 2: [[workers]] 1 class: 'rtx309' is no known class (did you mean",
        ),
        (
            f'{TWO_GPUS}[[workers]]\nclass = "t4"\naccess = "cabel"\n',
            "line 6: [[workers]] 2 access: 'cabel' is no known",
        ),
        (f"{TWO_GPUS}[[workers]]\ncount = 3\n", "line 4: [[workers]] 2: needs class"),
        (
            f'{TWO_GPUS}[[workers]]\nmemory = "1GB"\n',
            'needs class (such as "rtx3090"), tflops, or forward_seconds',
        ),
        (f'{TWO_GPUS}site = "lab"\n', "write [sites.lab]"),
        (f'[sites.lab]\n{TWO_GPUS}site = "lba"\n', "did you mean 'lab'?"),
        (
            f"[sites.lab]\nuplnk_mbit_per_s = 3\n{TWO_GPUS}",
            "line 2: [sites.lab] has no key 'uplnk_mbit_per_s' (did you",
        ),
        (f'[sites.lab]\n{TWO_GPUS}site = "lab"\naccess = "dsl"\n', "move access to [sites.lab]"),
        (f"{TWO_GPUS}uplink_mbit_per_s = 0\n", "greater than 0"),
        (f'{TWO_GPUS}speed = "fast"\n', "valid number"),
        (f'{TWO_GPUS}[rtt_ms]\nnames = ["a"]\nmatrix = [[1, 2]]\n', "write 1 rows of 1 numbers"),
        (f'{TWO_GPUS}[rtt_ms]\nnames = ["a"]\nmatrix = [[-1]]\n', "write 0 or more"),
        ("[[workers]\n", "not valid TOML"),
        (f"{TWO_GPUS}[job]\n", "there is no section [job]; allowed: fleet, sites, workers"),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(text: str, said: str) -> None:
    with pytest.raises(FleetFileError) as failed:
        parse_fleet(text)
    assert said in str(failed.value)
    assert failed.value.exit_code == 2


def test_names_that_meet_are_refused() -> None:
    with pytest.raises(FleetFileError, match="give one of them another name"):
        swarm('[[workers]]\nclass = "t4"\nname = "x-1"\n[[workers]]\nclass = "t4"\nname = "x"\ncount = 2\n')
    with pytest.raises(FleetFileError, match="site = 'x'"):
        swarm('[sites.x]\n[[workers]]\nclass = "t4"\nname = "x"\n')


def test_a_missing_kind_of_block_is_named() -> None:
    made = swarm('[[workers]]\nmemory = "1GB"\nforward_seconds = { layer = 1.0 }\n')
    with pytest.raises(FleetFileError, match="lacks embed, head"):
        made.plan_workers(profile(), 1)


def test_a_missing_file_says_where_one_is(tmp_path: Path) -> None:
    with pytest.raises(FleetFileError, match=r"docs/fleet\.toml"):
        load_fleet(tmp_path / "none.toml")


@given(st.text(alphabet=string.printable, max_size=200))
def test_any_text_is_a_fleet_or_an_error_of_ours(text: str) -> None:
    with contextlib.suppress(FleetFileError):
        parse_fleet(text)
