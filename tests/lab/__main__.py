"""Networks of homes on one machine, with real processes in them. Needs root on Linux (namespaces, nft, tc, TUN).

    spec       what a world is: sites with their NAT, rates, delay and workers, from TOML
    link       a site's access line: a process between two TUN devices that delays, loses and can be cut
    net        namespaces, routers and address translation, built and always taken down
    __main__   `python -m lab WORLD.toml JOB`: a coordinator on this machine, workers at the sites

This machine is a host of the "internet" with a public address, and the coordinator runs here. Each site has a router
and hosts behind it:

    this machine --veth-- [internet] ==link== [router of a site: NAT, firewall] --veth-- [host]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from lab.net import Lab, why_not
from lab.spec import WorldError, load_world
from swarms import LiveSwarm


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab", description="Train a prepared job in a world of homes."
    )
    parser.add_argument("world", type=Path, help="a TOML file such as lab/worlds/two_homes.toml")
    parser.add_argument("job", type=Path, help="a directory that `starlings prepare` wrote")
    parser.add_argument("--within", type=float, default=3600.0, metavar="SECONDS", help="give up after this")
    chosen = parser.parse_args()
    if reason := why_not():
        print(f"There can be no lab here: it {reason}.", file=sys.stderr)
        return 2
    try:
        world = load_world(chosen.world)
    except (WorldError, OSError) as error:
        print(f"{chosen.world}: {error}", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(world) as lab,
        LiveSwarm.of(chosen.job, Path(folder), lab.address) as swarm,
    ):
        for site in world.sites:
            for _ in range(site.workers):
                options = ("--site", site.name, "--region", site.region)
                swarm.join(*options, host="0.0.0.0", through=lab.through(site.name))
        said, began_s = "", time.monotonic()

        def show(reply: object) -> bool:
            nonlocal said
            phase, step, workers = (getattr(reply, name) for name in ("phase", "step", "workers"))
            ways = ", ".join(f"{w.worker_id[:6]} {w.reach or 'unknown'}" for w in workers)
            if (line := f"{phase}: step {step}; {ways}") != said:
                said = line
                print(f"{time.monotonic() - began_s:7.1f} s  {line}", flush=True)
            return phase in ("done", "failed")

        reply = swarm.wait(show, chosen.within)
        return 0 if reply.phase == "done" else 1


if __name__ == "__main__":
    sys.exit(main())
