"""init, prepare, coordinator, join, status, stop, export: the whole way of a job, by the commands of the README."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from starlings_job.prepared import load_prepared
from starlings_job.records import RecordStore
from starlings_job.reference import evaluate, load_whole, train_reference
from swarms import LiveSwarm, job_text, prepared_job, starlings, write_job


def test_a_job_from_init_to_export_and_on_from_there(tmp_path: Path) -> None:
    assert starlings("init", cwd=tmp_path).code == 0
    job_file = write_job(tmp_path, job_text(10**7, train={"lr": 3e-3, "warmup": 2}))
    prepared = starlings("prepare", job_file, "--json", cwd=tmp_path)
    assert prepared.code == 0, prepared.err
    job = Path(prepared.records[-1]["directory"])
    assert job == tmp_path / "data" / "starlings" / "jobs" / "test"

    with LiveSwarm.of(job, tmp_path) as swarm:
        swarm.join()
        swarm.join("--json")
        swarm.wait(lambda r: r.phase == "training" and r.step >= 20, within_s=120)
        shown = starlings("status", cwd=tmp_path)
        assert shown.code == 0, shown.err
        assert "training" in shown.out
        stopped = starlings("stop", "--reason", "enough for a test", cwd=tmp_path)
        assert stopped.code == 0, stopped.err
        reply = swarm.finish(within_s=120)
    assert reply.has_validation_loss
    assert 0 < reply.step < reply.steps_total
    assert len(reply.sample_text) > 32
    assert reply.samples_lost == 0
    log = (tmp_path / "swarm" / "logs" / "worker-2.log").read_text()
    assert any(json.loads(line)["event"] for line in log.splitlines() if line.startswith("{"))

    out = tmp_path / "model"
    exported = starlings("export", out, "--json", cwd=tmp_path)
    assert exported.code == 0, exported.err
    assert exported.records[-1]["version"] == reply.step
    again = starlings("export", out, cwd=tmp_path)
    assert again.code == 2
    assert "not empty" in again.err
    check_export(job, out, reply.validation_loss)
    check_second_job(tmp_path, out, reply.validation_loss)


def check_export(job: Path, out: Path, validation_loss: float) -> None:
    """transformers loads it, and it is the model that the swarm evaluated."""
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("def f", return_tensors="pt").input_ids
    assert bytes(ids[0].tolist()) == b"def f"
    generated = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(generated[0]).startswith("def f")
    with RecordStore(job) as store, torch.no_grad():
        assert abs(evaluate(model, store, 2) - validation_loss) < 1e-3


def check_second_job(folder: Path, exported: Path, validation_loss: float) -> None:
    """The export is where a second job begins: its first loss is the exported one's, to float32's last bits."""
    second = prepared_job(folder / "second", job_text(4096, model={"from": str(exported)}))
    spec = load_prepared(second)
    with RecordStore(second) as store:
        assert abs(evaluate(load_whole(second, spec.description), store, 2) - validation_loss) < 1e-3
    first = train_reference(second, 1).losses[0]
    assert abs(first - validation_loss) < 0.2, "an untrained model's loss is about 5.5"


@pytest.mark.slow
def test_a_worker_leaves_in_order_and_the_coordinator_says_so(tmp_path: Path) -> None:
    job = prepared_job(tmp_path, job_text(10**7))
    with LiveSwarm.of(job, tmp_path) as swarm:
        leaver, _stayer = swarm.join(), swarm.join()
        swarm.wait(lambda r: r.phase == "training" and r.step >= 2 and len(r.workers) == 2, within_s=120)
        leaver.process.send_signal(signal.SIGTERM)
        swarm.wait(lambda r: any(e.kind == "leave" for e in swarm.history.events), within_s=60)
        assert leaver.process.wait(30) == 0
        at = swarm.history.last.step if swarm.history.last else 0
        swarm.wait(lambda r: r.phase == "training" and r.step >= at + 2, within_s=60)
