"""Homes behind routers, in network namespaces: whoever has the invite takes part, reachable or not."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lab import net
from lab.link import Direction, order
from lab.spec import Site, World, WorldError, load_world, parse_world
from starlings.demo.kill import kill_at_once
from starlings_protos import control_pb2
from swarms import LiveSwarm, job_text, prepared_job, starlings

WORLDS = Path(__file__).resolve().parents[1] / "lab" / "worlds"
STEPS, BATCH, LENGTH = 300, 8, 32
needs_lab = pytest.mark.skipif(bool(net.why_not()), reason=net.why_not() or "there is a lab")


def test_a_world_says_what_is_wrong_with_it() -> None:
    assert len(load_world(WORLDS / "two_homes.toml").sites) == 2
    for text, why in (
        ("", "entries"),
        ('[[site]]\nname = "a"\nnat = "round"', "nat is one of"),
        ('[[site]]\nname = "a"\nspeed = 3', "unknown key 'speed'"),
        ('[[site]]\nname = "a"\nup = "fast"', "20mbit"),
        ('[[site]]\nname = "a"\n[[site]]\nname = "a"', "differ"),
        ("[[site", "TOML"),
    ):
        with pytest.raises(WorldError, match=why):
            parse_world(text)


def test_a_line_delays_keeps_order_loses_and_is_cut_each_way() -> None:
    up = Direction(0.1, 0.05, 0.0, random.Random(1))
    down = Direction(0.1, 0.0, 0.0, random.Random(1))
    for number in range(50):
        up.takes(bytes([number]), 0.0)
    assert up.due(0.099) == []
    assert up.due(0.151) == [bytes([number]) for number in range(50)]
    order("cut up", up, down)
    up.takes(b"x", 1.0)
    down.takes(b"y", 1.0)
    assert (up.due(9.0), down.due(9.0)) == ([], [b"y"])
    order("mend", up, down)
    order("delay 2", up, down)
    up.takes(b"x", 10.0)
    assert (up.due(11.9), up.due(12.1)) == ([], [b"x"])
    lossy = Direction(0.0, 0.0, 0.3, random.Random(2))
    for _ in range(1000):
        lossy.takes(b"x", 0.0)
    assert 600 < len(lossy.due(1.0)) < 800


@needs_lab
def test_routers_let_in_what_they_should_and_lines_can_be_cut() -> None:
    world = World((Site("open", nat="none"), Site("cone", nat="full-cone"), Site("home", nat="symmetric")))
    serve = (
        "import socket; s = socket.create_server(('', 7777)); print('up', flush=True)\n"
        "while 1: s.accept()[0].send(b'x')"
    )
    with net.Lab(world) as lab:
        servers = [
            subprocess.Popen([*lab.through(site.name), sys.executable, "-c", serve], stdout=subprocess.PIPE)
            for site in world.sites
        ]
        try:
            for server in servers:
                assert server.stdout is not None
                assert server.stdout.readline() == b"up\n"

            def reached(site: str) -> bool:
                try:
                    with socket.create_connection((lab.public_address(site), 7777), 2) as connection:
                        return connection.recv(1) == b"x"
                except OSError:
                    return False

            assert {site.name: reached(site.name) for site in world.sites} == {
                "open": True,
                "cone": True,
                "home": False,
            }
            lab.lines["open"].cut("down")
            assert not reached("open")
            lab.lines["open"].mend()
            assert reached("open")
        finally:
            for server in servers:
                server.kill()
                server.wait(10)
                if server.stdout is not None:
                    server.stdout.close()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert lab._tag not in left


@needs_lab
@pytest.mark.slow
def test_two_workers_behind_routers_train_with_the_one_invite(tmp_path: Path) -> None:
    world = load_world(WORLDS / "two_homes.toml")
    sections = {
        "train": {"schedule": "async", "batch": BATCH, "microbatch": 2, "lr": 3e-3},
        "exchange": {"warmup_every": 1, "warmup_fraction": 0.9},
        "swarm": {"min_workers": 2, "settle_s": 0.3},
    }
    job = prepared_job(tmp_path, job_text(STEPS * BATCH * LENGTH, **sections))
    with net.Lab(world) as lab, LiveSwarm.of(job, tmp_path, lab.address) as swarm:
        for site in world.sites:
            options = ("--site", site.name, "--region", site.region)
            swarm.join(*options, host="0.0.0.0", through=lab.through(site.name))
        training = swarm.wait(
            lambda r: len(r.workers) == 2 and all(w.reach == "relayed" for w in r.workers), 240
        )
        assert all(list(w.relays) == ["relay"] for w in training.workers)
        done = swarm.finish(400)
    assert done.step >= STEPS
    assert done.samples_trained >= STEPS * BATCH
    # They met, and only a relay leads from one to the other.
    assert sum(stage.rounds_averaged for stage in done.exchanges) > 0, done.exchanges
    exported = starlings("export", tmp_path / "model", "--job", job, cwd=tmp_path, within_s=120)
    assert exported.code == 0, exported.err
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@needs_lab
@pytest.mark.slow
def test_a_worker_relays_for_others_and_its_end_moves_their_links(tmp_path: Path) -> None:
    world = load_world(WORLDS / "helper.toml")
    sections = {
        "train": {"schedule": "async", "batch": BATCH, "microbatch": 2, "lr": 3e-3},
        "exchange": {"warmup_every": 1, "warmup_fraction": 0.9},
        "swarm": {"min_workers": 3, "settle_s": 0.3},
    }
    job = prepared_job(tmp_path, job_text(2 * STEPS * BATCH * LENGTH, **sections))
    with net.Lab(world) as lab, LiveSwarm.of(job, tmp_path, lab.address) as swarm:
        children = {}
        for site in world.sites:
            options = ["--site", site.name, "--region", site.region]
            options += ["--relay", "20MB"] if site.name == "open" else []
            children[site.name] = swarm.join(*options, host="0.0.0.0", through=lab.through(site.name))

        def hidden(reply: control_pb2.StatusReply) -> list[list[str]]:
            return [list(w.relays) for w in reply.workers if w.reach == "relayed"]

        reply = swarm.wait(lambda r: len(hidden(r)) == 2 and all(len(rs) == 2 for rs in hidden(r)), 300)
        (helper,) = [w.worker_id for w in reply.workers if w.reach == "direct"]
        assert hidden(reply) == [[helper, "relay"]] * 2
        swarm.wait(lambda r: r.step > 0, 300)
        children["open"].expendable = True
        kill_at_once(children["open"].process)
        swarm.wait(lambda r: hidden(r) == [["relay"]] * 2, 30)
        reply = swarm.wait(lambda r: r.phase in ("done", "failed"), 400)
    assert reply.phase == "done", reply.failure
