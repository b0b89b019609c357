"""`python -m starlings.heavy STEP ARGUMENTS`: what needs torch or transformers, away from the `starlings` process.

Speaks JSON lines on stdout: {"progress": ...} now and then, at the end {"result": ...} or {"error",
"exit_code"}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlings.failures import explain
from starlings.tether import die_with_parent

Emit = Callable[[dict[str, Any]], None]


def prepare(arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
    from starlings_job.prepare import prepare as prepare_job

    def progress(phase: str, fraction: float, detail: str = "") -> None:
        emit({"progress": {"phase": phase, "fraction": fraction, "detail": detail}})

    return dict(prepare_job(Path(arguments["job_file"]), Path(arguments["directory"]), progress))


def export(arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
    from starlings_job.export import export_checkpoint

    return dict(
        export_checkpoint(Path(arguments["directory"]), Path(arguments["out"]), version=arguments["version"])
    )


def codecs(arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
    from starlings.codec_figures import rows

    return {"rows": rows()}


def profile(arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
    from starlings_job.profile_of_job import profile_of_job
    from starlings_job.spec import load_job

    path = Path(arguments["job_file"])
    found = profile_of_job(
        load_job(path),
        path.parent,
        lambda done: emit({"progress": {"phase": "measuring the model", "fraction": done}}),
    )
    out = Path(arguments["out"])
    # Whole or not at all: another command may be writing the same.
    building = out.with_name(f"{out.name}.{os.getpid()}")
    building.write_bytes(found.to_json())
    os.replace(building, out)
    return {"out": str(out)}


def plan(arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
    from starlings_simulator.study.answer import plan_answer

    return plan_answer(arguments, lambda news: emit({"progress": news}))


def advise(arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
    from starlings_simulator.study.answer import advise_answer

    return advise_answer(arguments, lambda news: emit({"progress": news}))


def simulate(arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
    from starlings_simulator.study.simulated import simulate_answer

    return simulate_answer(arguments, lambda news: emit({"progress": news}))


STEPS: dict[str, Callable[[dict[str, Any], Emit], dict[str, Any]]] = {
    "prepare": prepare,
    "export": export,
    "codecs": codecs,
    "profile": profile,
    "plan": plan,
    "advise": advise,
    "simulate": simulate,
}


def main() -> int:
    die_with_parent()
    # A busy-waiting OpenMP starves whoever else works on this machine; must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Libraries that print must not break the protocol: our lines keep the real stdout, theirs go to stderr.
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(record: dict[str, Any]) -> None:
        protocol.write(json.dumps(record) + "\n")
        protocol.flush()

    try:
        emit({"result": STEPS[sys.argv[1]](json.loads(sys.argv[2]), emit)})
    except Exception as error:
        if os.environ.get("STARLINGS_DEBUG"):
            import traceback

            traceback.print_exc()
        message, code = explain(error)
        emit({"error": message, "exit_code": int(code)})
        return int(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
