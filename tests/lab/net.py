"""Namespaces, routers, translation and lines of a world: built when entered, gone when left, whatever happens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from lab.spec import Site, World
from support import namespaces

TESTS = Path(__file__).resolve().parents[1]


def why_not() -> str:
    """Why there can be no lab here; "" when there can."""
    if not Path("/dev/net/tun").exists() or shutil.which("nft") is None or shutil.which("tc") is None:
        return "needs /dev/net/tun, nft and tc"
    return namespaces.why_not()


def run(*command: str, stdin: str = "") -> None:
    """Raises RuntimeError with what the command said."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Line:
    """The access line of a site; see link.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _order(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def cut(self, way: str = "") -> None:
        """`way`: "up" or "down"; both when empty. What is sent from now on vanishes."""
        self._order(f"cut {way}".strip())

    def mend(self) -> None:
        self._order("mend")

    def delay(self, seconds: float) -> None:
        self._order(f"delay {seconds}")


class Lab:
    """`with Lab(world) as lab`: `lab.address` is this machine's public one, `lab.through(site)` runs commands there."""

    def __init__(self, world: World, seed: int = 1) -> None:
        self.world, self._seed = world, seed
        self._tag = f"sl{os.getpid() % 100_000}"
        self._net = f"198.18.{os.getpid() % 250}"
        self.address = f"{self._net}.1"
        self._internet = f"{self._tag}i"
        self.lines: dict[str, Line] = {}
        self._stack = ExitStack()

    def public_address(self, site: str) -> str:
        """Of a site's router."""
        return f"{self._net}.{10 + [s.name for s in self.world.sites].index(site)}"

    def through(self, site: str) -> tuple[str, ...]:
        """Runs a command on the site's host."""
        return ("ip", "netns", "exec", f"{self._tag}h{site}")

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # ---------------------------------------------------------------- building

    def _namespace(self, name: str) -> None:
        run("ip", "netns", "add", name)
        self._stack.callback(self._remove, "netns", "del", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_forward=1")

    @staticmethod
    def _remove(*what: str) -> None:
        with suppress(RuntimeError):
            run("ip", *what)

    def _build(self) -> None:
        internet, here = self._internet, f"{self._tag}o"
        self._namespace(internet)
        run("ip", "link", "add", here, "type", "veth", "peer", "name", "owner", "netns", internet)
        self._stack.callback(self._remove, "link", "del", here)
        run("ip", "address", "add", f"{self.address}/24", "dev", here)
        run("ip", "link", "set", here, "up")
        run("ip", "-n", internet, "address", "add", f"{self._net}.2/24", "dev", "owner")
        run("ip", "-n", internet, "link", "set", "owner", "up")
        # Sites' addresses are part of this machine's own network there: the internet answers for them.
        run("ip", "netns", "exec", internet, "sysctl", "-qw", "net.ipv4.conf.owner.proxy_arp=1")
        for number, site in enumerate(self.world.sites):
            self._site(site, number)

    def _site(self, site: Site, number: int) -> None:
        router, host, far = f"{self._tag}r{site.name}", f"{self._tag}h{site.name}", f"l{number}"
        public, lan = self.public_address(site.name), f"192.168.{number + 10}"
        self._namespace(router)
        self._namespace(host)
        process = subprocess.Popen(
            [sys.executable, "-m", "lab.link", router, self._internet, "wan", far]
            + [str(x) for x in (site.delay_ms / 1e3, site.jitter_ms / 1e3, site.loss, self._seed + number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        self._stack.callback(self._end, process)
        assert process.stdout is not None
        if process.stdout.readline() != "open\n":
            raise RuntimeError(f"the line of {site.name} did not open")
        self.lines[site.name] = Line(process)
        # Without translation the host has the public address, and the router some other.
        outside = public if site.nat != "none" else f"{lan}.1"
        run("ip", "-n", router, "address", "add", f"{outside}/32", "dev", "wan")
        run("ip", "-n", router, "link", "set", "wan", "up", "mtu", "1400")
        run("ip", "-n", router, "route", "add", "default", "dev", "wan")
        run("ip", "-n", self._internet, "link", "set", far, "up", "mtu", "1400")
        run("ip", "-n", self._internet, "route", "add", f"{public}/32", "dev", far)
        for namespace, device, rate in ((router, "wan", site.up), (self._internet, far, site.down)):
            if rate:
                queue = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "100ms")
                run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, *queue)
        run("ip", "-n", router, "link", "add", "lan", "type", "veth", "peer", "name", "lan", "netns", host)
        run("ip", "-n", router, "link", "set", "lan", "up")
        run("ip", "-n", host, "link", "set", "lan", "up", "mtu", "1400")
        if site.nat == "none":
            run("ip", "-n", router, "address", "add", f"{lan}.1/24", "dev", "lan")
            run("ip", "-n", host, "address", "add", f"{public}/32", "dev", "lan")
            run("ip", "-n", host, "route", "add", f"{lan}.1", "dev", "lan")
            run("ip", "-n", host, "route", "add", "default", "via", f"{lan}.1", "src", public)
            run("ip", "-n", router, "route", "add", f"{public}/32", "dev", "lan")
        else:
            run("ip", "-n", router, "address", "add", f"{lan}.1/24", "dev", "lan")
            run("ip", "-n", host, "address", "add", f"{lan}.2/24", "dev", "lan")
            run("ip", "-n", host, "route", "add", "default", "via", f"{lan}.1")
        rules = _rules(site, f"{lan}.2")
        run("ip", "netns", "exec", router, "nft", "-f", "-", stdin=rules)

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _rules(site: Site, host: str) -> str:
    """For nft. Symmetric: another outside port for each connection, and nothing comes in that was not asked for.
    Full cone: whoever sends to the router reaches the host."""
    closed = site.nat == "symmetric" or site.firewall
    translate = {
        "none": "",
        "full-cone": 'oifname "wan" masquerade',
        "symmetric": 'oifname "wan" masquerade fully-random',
    }[site.nat]
    inward = f'iifname "wan" dnat to {host}' if site.nat == "full-cone" else ""
    drop = 'iifname "wan" ct state new drop' if closed else ""
    return f"""
table ip lab {{
  chain out {{ type nat hook postrouting priority 100; {translate}
  }}
  chain in {{ type nat hook prerouting priority -100; {inward}
  }}
  chain through {{ type filter hook forward priority 0; {drop}
  }}
  chain router {{ type filter hook input priority 0; {drop}
  }}
}}
"""
