"""One rank of torch's DistributedDataParallel over gloo, whose computing takes a fixed time; started by `wan.py`.

Prints one JSON line: the seconds and the mean loss of each step. Every rank trains one microbatch per step: DDP knows
no other way to share work among unequal machines.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from starlings_job.data.batch import Batch, decode_records, loss_sum
from starlings_job.prepared import load_prepared
from starlings_job.records import RecordStore
from starlings_job.reference import forward, load_whole
from starlings_job.sampling import samples_of_step
from starlings_worker.emulation import FORWARD_PART


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True, help="tcp://HOST:PORT of rank 0")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pass-s", type=float, required=True)
    parser.add_argument("--power-rank", type=int, default=0, help="of PowerSGD; 0 = exact float32")
    parser.add_argument("--lr", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=options.store, rank=options.rank, world_size=options.world)
    job = load_prepared(options.job)
    plain = load_whole(options.job, job.description).train()
    model = DistributedDataParallel(plain)
    if options.power_rank:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=options.power_rank, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    size = job.train.microbatch
    steps = []
    with RecordStore(options.job) as store:
        dist.barrier()
        begin_s = time.monotonic()
        for step in range(options.steps):
            samples = samples_of_step(job.job.seed, store.population, step, size * options.world)
            own = samples[options.rank * size : (options.rank + 1) * size]
            batch = decode_records(store.read(own), job.dataset)
            loss = _step(model, optimizer, batch, options.pass_s, job.train.clip)
            steps.append((time.monotonic() - begin_s, loss))
    if options.rank == 0:
        print(json.dumps({"steps": steps}), flush=True)
    dist.destroy_process_group()


def _step(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    pass_s: float,
    clip: float,
) -> float:
    """Its mean loss. All computing that is only pretended comes before the backward pass, which sends as it goes."""
    begin_s = time.monotonic()
    total, count = loss_sum(forward(model, batch.inputs), batch)
    loss = total / count
    time.sleep(max(0.0, pass_s - (time.monotonic() - begin_s) / FORWARD_PART))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


if __name__ == "__main__":
    main()
