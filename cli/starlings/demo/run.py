"""The demo from beginning to end: prepare, start the swarm, follow it, export, report."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from starlings import children, template
from starlings.commands.job import loading_lines, prepare_job
from starlings.demo.fleet import fleet
from starlings.demo.kill import Kill
from starlings.demo.report import final_panel, machine_report
from starlings.demo.swarm import Swarm
from starlings.failures import CommandError, ExitCode
from starlings.output import Throttle, console, emit, say
from starlings.owner_client import OwnerClient
from starlings.views.figures import duration
from starlings.views.status import History, status_line, status_panel
from starlings_protos import control_pb2
from starlings_protos.errors import StarlingsError

MARKER = ".starlings-demo"
# A step of the demo takes about a second, engines import for tens of seconds: longer than this and
# something hangs.
NO_PROGRESS_S = 180.0
LEAVING_S = 60.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line chose. `steps` of 16 samples of 128 bytes each."""

    workers: int
    steps: int
    seed: int
    directory: Path
    json_file: Path | None
    json_output: bool
    picture: Path | None = None
    kill_at_step: int | None = None


def job_text(options: DemoOptions) -> str:
    """The demo's job file: the `tiny` preset on the standard library, ports of the system's choice."""
    batch, sequence_length = 16, 128
    chosen: dict[str, dict[str, Any]] = {
        "job": {"name": "demo", "seed": options.seed, "tokens": options.steps * batch * sequence_length},
        "model": {"preset": "tiny"},
        "data": {"source": "stdlib", "sequence_length": sequence_length, "held_out": 128},
        "train": {"batch": batch, "microbatch": 4, "lr": 3e-3, "warmup": 0.05},
        "exchange": {"codec": "int8:128"},
        "swarm": {"min_workers": options.workers, "settle_s": 1.0},
        "network.ports": {"control": 0, "enrolment": 0},
    }
    return template.render(chosen, comments=False)


def claim_directory(directory: Path) -> None:
    """Makes `directory` an empty one for this run; an earlier demo's is replaced, anything else is left alone.

    Raises:
        CommandError: it holds something that no demo wrote.
    """
    if directory.exists():
        if not directory.is_dir() or (any(directory.iterdir()) and not (directory / MARKER).is_file()):
            raise CommandError(
                f"{directory} is not an earlier demo's directory and not empty: choose another one with --dir.",
                ExitCode.USAGE,
            )
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    (directory / MARKER).write_text("`starlings demo` may replace this directory.\n")


def run_demo(options: DemoOptions) -> None:
    """Runs everything; prints for people, or JSON lines for machines.

    Raises:
        CommandError: any process failed; the text holds the tail of its log.
    """
    begin = time.monotonic()
    directory = options.directory
    claim_directory(directory)
    job_file, job_directory = directory / "job.toml", directory / "job"
    job_file.write_text(job_text(options))
    if not options.json_output:
        say(f"One coordinator and {options.workers} workers on this machine, all files in {directory}")
    _, facts = prepare_job(job_file, job_directory, json_output=options.json_output)
    entropies = {"unigram": facts["unigram_entropy"], "bigram": facts["bigram_entropy"]}
    history = History()
    kill = Kill(options.kill_at_step) if options.kill_at_step is not None else None
    with Swarm(directory) as swarm:
        invite = swarm.start_coordinator([str(job_directory), "--listen", "127.0.0.1", "--host", "127.0.0.1"])
        for device in fleet(options.workers):
            swarm.start_worker(
                invite,
                [
                    "--emulate",
                    device.device_class,
                    "--memory",
                    device.memory,
                    "--listen",
                    "127.0.0.1",
                    "--port",
                    "0",
                    # Engines that fight for cores lose more to switching than threads gain.
                    "--threads",
                    str(max(1, (os.cpu_count() or 1) // options.workers)),
                ],
            )
        asyncio.run(follow(swarm, job_directory, history, kill, json_output=options.json_output))
        wait_for_exits(swarm)
    out = directory / "model"
    exported = children.run_heavy(
        "export",
        {"directory": str(job_directory.absolute()), "out": str(out.absolute()), "version": None},
        log=2,
        progress=lambda news: None,
    )
    report = machine_report(
        history, entropies, out.absolute(), seed=options.seed, elapsed_s=time.monotonic() - begin
    )
    if kill is not None:
        report["killed"] = kill.report(history.events)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report, indent=1) + "\n")
    panel = final_panel(report, history, loading_lines(out, str(exported.get("family", ""))))
    if options.picture is not None:
        save_picture(options.picture, history, panel)
    if options.json_output:
        emit({"event": "report", **report})
    else:
        console().print(panel)


def save_picture(path: Path, history: History, panel: RenderableType) -> None:
    """The last view of the training and the outcome, as an SVG."""
    screen = Console(
        record=True, width=118, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    if history.training is not None:
        shown = [event for event in history.events if event.at_s <= history.training.elapsed_s]
        screen.print(status_panel(history.training, history.losses, shown))
    screen.print(panel)
    # Without the web fonts that rich names: a picture must not fetch anything.
    picture = re.sub(r"@font-face \{.*?\}", "", screen.export_svg(title="starlings demo"), flags=re.DOTALL)
    path.write_text(picture, "utf-8")


async def follow(
    swarm: Swarm, job_directory: Path, history: History, kill: Kill | None, *, json_output: bool
) -> None:
    """Shows the job until it is done; kills a worker on the way if that was asked for.

    Raises:
        CommandError: it failed, a process died, or nothing happened for `NO_PROGRESS_S`.
    """
    live = sys.stdout.isatty() and not json_output
    throttle = Throttle()
    screen = Live(console=console(), refresh_per_second=4, transient=True) if live else None
    progress: object = None
    progress_at = time.monotonic()
    with screen or nullcontext():
        async for reply in replies(swarm, job_directory):
            now = time.monotonic()
            swarm.check()
            if reply is None:
                # The coordinator leaves when all is done; then there is nothing more to hear.
                if swarm.coordinator is not None and swarm.coordinator.process.poll() is not None:
                    break
            else:
                fresh = history.add(reply)
                if kill is not None and kill.look(reply, swarm) and screen is None:
                    tell_of(kill, json_output=json_output)
                if screen is not None:
                    screen.update(status_panel(reply, history.losses, history.events))
                else:
                    show_plain(reply, fresh, throttle, json_output=json_output)
                if reply.phase == "failed":
                    raise CommandError(f"The job failed: {reply.failure}", ExitCode.BUG)
                if (mark := (reply.phase, reply.waiting_for, reply.step, len(history.events))) != progress:
                    progress, progress_at = mark, now
                if reply.phase == "done":
                    break
            if now - progress_at > NO_PROGRESS_S:
                waiting = history.last.waiting_for if history.last else "the coordinator's first word"
                tails = "\n\n".join(f"The end of {c.log}:\n{children.tail(c.log)}" for c in swarm.all())
                raise CommandError(
                    f"Nothing moved for {NO_PROGRESS_S:.0f} s (waiting for {waiting}).\n{tails}", ExitCode.BUG
                )
    if kill is not None and not kill.done:
        raise CommandError(
            f"The job was done before step {kill.at_step}: nobody was killed. Choose an earlier step.",
            ExitCode.USAGE,
        )
    if history.last is None or history.last.phase != "done":
        last_words = swarm.coordinator.obituary() if swarm.coordinator else ""
        raise CommandError(f"The coordinator left before the job was done.\n{last_words}", ExitCode.BUG)


async def replies(swarm: Swarm, job_directory: Path) -> AsyncIterator[control_pb2.StatusReply | None]:
    """Status as it changes; None about once a second, so that the caller looks at the processes too."""
    async with OwnerClient(job_directory) as client:
        stream = client.watch(interval_s=0.25)
        waiting: asyncio.Task[control_pb2.StatusReply] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(anext(stream))
                done, _ = await asyncio.wait({waiting}, timeout=1.0)
                if not done:
                    yield None
                    continue
                finished, waiting = waiting, None
                try:
                    yield finished.result()
                except (StopAsyncIteration, StarlingsError):
                    # The stream ended: either all is done, or `swarm.check` knows who died.
                    await asyncio.sleep(0.2)
                    yield None
                    stream = client.watch(interval_s=0.25)
        finally:
            if waiting is not None:
                waiting.cancel()


def show_plain(
    reply: control_pb2.StatusReply, fresh: list[control_pb2.Event], throttle: Throttle, *, json_output: bool
) -> None:
    """Lines for a pipe: every event, and the state now and then."""
    for event in fresh:
        if json_output:
            emit({"event": event.kind, "at_s": event.at_s, "text": event.text})
        else:
            say(f"{duration(event.at_s)} {event.kind}: {event.text}")
    if throttle.ready(reply.phase):
        if json_output:
            emit(
                {
                    "event": "status",
                    "phase": reply.phase,
                    "step": reply.step,
                    "tokens": reply.tokens,
                    "tokens_per_second": reply.tokens_per_second,
                    "loss": reply.loss,
                }
            )
        else:
            say(status_line(reply))


def tell_of(kill: Kill, *, json_output: bool) -> None:
    if json_output:
        emit({"event": "killed", "worker_id": kill.worker_id, "step": kill.step, "at_s": kill.at_s})
    else:
        say(f"{duration(kill.at_s)} killed: {kill.name} ({kill.worker_id}) got SIGKILL in step {kill.step}")


def wait_for_exits(swarm: Swarm) -> None:
    """All processes must leave by themselves, with exit code 0.

    Raises:
        CommandError: one failed or stayed.
    """
    deadline = time.monotonic() + LEAVING_S
    while swarm.running() and time.monotonic() < deadline:
        swarm.check()
        time.sleep(0.1)
    swarm.check()
    if left := swarm.running():
        names = ", ".join(child.name for child in left)
        raise CommandError(
            f"The job is done, but after {LEAVING_S:.0f} s still there: {names}.\n{left[0].obituary()}",
            ExitCode.BUG,
        )
