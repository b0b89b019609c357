"""What each codec costs and what it loses: bytes on the wire, errors, speed and memory, on one core.

Quality on five inputs: normal and heavy-tailed values; and the gradients, boundary activations and their gradients of a
real training run (`codec_data.py`), tensor by tensor, without error feedback. `bits` are those of the whole Packed,
header included, per value.

Speed on a float32 matrix that no cache holds, into buffers that were made beforehand, in turns within one run: each
encoding and decoding beside a `copy_` of the same tensor into a preallocated one, in CPU seconds, as the median of the
ratios: 1 is as fast as `copy_`. `clone` is another unit; it is slower, because fresh memory is mapped page by page.
`int8` is encoded twice: eagerly, and by compiled code where a compiler is present.

Memory is the highest resident size while a tensor of 32 MiB is encoded (the bytes included) and decoded (into a
tensor that is there), beside what was resident before, as a multiple of the tensor.

    python benchmarks/codecs.py [--quick] [--json FILE] [--picture FILE] [--rounds N]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from report import Claim, environment, show, write_json

# Before torch is imported: threads that spin would take the one core away.
os.environ.update(OMP_WAIT_POLICY="PASSIVE", OMP_NUM_THREADS="1")

import torch
from codec_data import captured, drawn
from plot import write_panels
from torch import Tensor

from starlings.codec_figures import SPECS as PRODUCT_SPECS
from starlings_compression import compiled
from starlings_compression.codec import Codec, make_codec
from starlings_compression.errors import SpecError

SPECS = (
    *PRODUCT_SPECS,
    "int4:64/means",
    "int2:64/means",
    "topk:64/4096|int8",
    "lowrank:4|int8",
    "exact|zstd:3",
)
MEMORY_BOUND = 1.5
# Of `copy_`, at least.
SPEED_BOUNDS = {
    ("int8:128", "encode"): 0.3,
    ("int8:128", "decode"): 0.5,
    ("int8:128 compiled", "encode"): 0.4,
    ("topk:64/4096", "encode"): 0.03,
}
LOWRANK_BOUND = 3.0
CLEAR = Path("/proc/self/clear_refs")


def codecs() -> dict[str, Codec]:
    """By canonical spec; those that need a package that is not here are left out, with a word."""
    found = {}
    for spec in SPECS:
        try:
            codec = make_codec(spec)
        except SpecError as error:
            print(f"{spec} is not measured: {error}", file=sys.stderr)
            continue
        found[codec.spec.text] = codec
    return found


# ---------------------------------------------------------------------- quality


def quality(codec: Codec, tensors: list[Tensor]) -> tuple[float, float, float]:
    """(bits per value, relative error, cosine) over all tensors together."""
    sent = count = 0
    dropped = square = product = decoded_square = 0.0
    for tensor in tensors:
        data = codec.encode(tensor)
        decoded = codec.decode(data, limit_bytes=tensor.nbytes).double()
        wide = tensor.double()
        sent, count = sent + len(data), count + tensor.numel()
        dropped += float((decoded - wide).square().sum())
        square += float(wide.square().sum())
        decoded_square += float(decoded.square().sum())
        product += float((decoded * wide).sum())
    return 8 * sent / count, math.sqrt(dropped / square), product / math.sqrt(square * decoded_square)


# ---------------------------------------------------------------------- speed


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this thread, which does all of the work: others on the machine count less."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


class Stand:
    """One tensor, and buffers for everything that is measured on it."""

    def __init__(self, side: int) -> None:
        self.tensor = torch.randn(side, side, generator=torch.Generator().manual_seed(3))
        self.copy = torch.ones_like(self.tensor)
        self.back = torch.ones_like(self.tensor)
        # Touched everywhere: the first writing to fresh memory costs more than encoding.
        self.out = bytearray(b"\1") * (self.tensor.nbytes + (1 << 20))
        self.copy_s: list[float] = []

    def unit_s(self) -> float:
        """Seconds of a `copy_`, now."""
        self.copy_s.append(seconds(lambda: self.copy.copy_(self.tensor)))
        return self.copy_s[-1]

    def encode(self, codec: Codec) -> float:
        """The share of the speed of `copy_`."""
        return self.unit_s() / seconds(lambda: codec.encode_into(self.tensor, self.out))

    def decode(self, codec: Codec) -> float:
        length = codec.encode_into(self.tensor, self.out)
        packed = memoryview(self.out)[:length]
        limit_bytes = self.tensor.nbytes
        return self.unit_s() / seconds(lambda: codec.decode(packed, limit_bytes=limit_bytes, out=self.back))


def speeds(side: int, rounds: int) -> tuple[dict[tuple[str, str], float], float, str | None]:
    """Ratios to `copy_` by (spec, direction), GB/s of `copy_`, and why int8 is not compiled here."""
    stand, every = Stand(side), codecs()
    found: dict[tuple[str, str], list[float]] = {}

    def note(name: str, what: str, ratio: float, turn: int) -> None:
        # The first turn warms up.
        if turn:
            found.setdefault((name, what), []).append(ratio)

    for turn in range(rounds + 1):
        note("clone", "copy", stand.unit_s() / seconds(stand.tensor.clone), turn)
        for name, codec in every.items():
            note(name, "encode", stand.encode(codec), turn)
            note(name, "decode", stand.decode(codec), turn)
    why_not = compiled.prepare("int8:128")
    if why_not is None:
        for turn in range(rounds + 1):
            note("int8:128 compiled", "encode", stand.encode(every["int8:128"]), turn)
        compiled.forget()
    medians = {key: statistics.median(ratios) for key, ratios in found.items()}
    return medians, stand.tensor.nbytes / statistics.median(stand.copy_s) / 1e9, why_not


def lowrank_to_products(rounds: int) -> float:
    """Encoding of a 4096 x 4096 matrix by `lowrank:4`, in units of the two products that PowerSGD is made of.

    Factors lie in rows, as the codec has them: torch takes several times as long with them in columns.
    """
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randn(4096, 4096, generator=generator)
    right, left = torch.randn(4, 4096, generator=generator), torch.empty(4, 4096)
    codec, out, again = make_codec("lowrank:4"), bytearray(1 << 20), torch.empty(4, 4096)

    def products() -> None:
        torch.mm(right, matrix.t(), out=left)
        torch.mm(left, matrix, out=again)

    ratios = [seconds(lambda: codec.encode_into(matrix, out)) / seconds(products) for _ in range(rounds + 1)]
    return statistics.median(ratios[1:])


# ---------------------------------------------------------------------- memory


def resident_bytes(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def memory_child(names: list[str]) -> None:
    """In a process of its own: prints spec and the multiples of encoding and decoding, a line each."""
    torch.set_num_threads(1)
    tensor = torch.randn(2048, 4096)
    for name in names:
        codec = make_codec(name)
        # What is loaded at the first use does not count.
        codec.decode(codec.encode(tensor[:64]), limit_bytes=1 << 30)
        out, data, extra = torch.ones_like(tensor), b"", []
        for what in ("encode", "decode"):
            CLEAR.write_text("5")
            before = resident_bytes("VmRSS")
            if what == "encode":
                data = codec.encode(tensor)
            else:
                codec.decode(data, limit_bytes=1 << 30, out=out)
            extra.append((resident_bytes("VmHWM") - before) / tensor.nbytes)
        print(name, *extra, flush=True)


def memory(names: list[str]) -> dict[str, tuple[float, float]]:
    """Extra memory of encoding and decoding; nothing where the kernel does not tell the peak."""
    if not CLEAR.exists():
        print("memory is not measured: that needs Linux's /proc/self/clear_refs", file=sys.stderr)
        return {}
    # Freed memory goes back at once: otherwise the next codec seems to need nothing.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--memory", *names]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: (float(encode), float(decode)) for name, encode, decode in lines}


# ---------------------------------------------------------------------- all of it


def run(quick: bool, rounds: int, picture: Path | None) -> tuple[list[dict[str, Any]], list[Claim]]:
    torch.set_num_threads(1)
    print("a real training run", file=sys.stderr)
    real = captured(12 if quick else 80)
    print(f"loss {real.losses[0]:.3f} to {real.losses[-1]:.3f} in {len(real.losses)} steps", file=sys.stderr)
    inputs = {**drawn(512 if quick else 1024), **real.tensors()}
    print("speed", file=sys.stderr)
    ratios, copy_gb_per_s, why_not = speeds(2048 if quick else 4096, rounds)
    clone = ratios.pop(("clone", "copy"))
    print(f"copy_: {copy_gb_per_s:.1f} GB/s, clone: {clone:.2f} of it", file=sys.stderr)
    lowrank = lowrank_to_products(rounds)
    print("memory", file=sys.stderr)
    every = codecs()
    used = memory(list(every))
    speed_rows: list[dict[str, Any]] = []
    quality_rows: dict[str, list[dict[str, Any]]] = {"bits per value": [], "relative error": [], "cosine": []}
    for name, codec in every.items():
        encode, decode = ratios[name, "encode"], ratios[name, "decode"]
        row: dict[str, Any] = {
            "speed": name,
            "encode / copy_": encode,
            "decode / copy_": decode,
            "encode / clone": encode / clone,
            "decode / clone": decode / clone,
            "encode GB/s": encode * copy_gb_per_s,
            "decode GB/s": decode * copy_gb_per_s,
        }
        if name in used:
            row |= {"memory to encode": used[name][0], "to decode": used[name][1]}
        if (f"{name} compiled", "encode") in ratios:
            row["compiled / copy_"] = ratios[f"{name} compiled", "encode"]
        speed_rows.append(row)
        figures = {what: quality(codec, tensors) for what, tensors in inputs.items()}
        for number, (title, table) in enumerate(quality_rows.items()):
            table.append({title: name} | {what: found[number] for what, found in figures.items()})
    if picture is not None:
        bits, errors = quality_rows["bits per value"], quality_rows["relative error"]
        panels = {
            what: {str(b["bits per value"]): (b[what], e[what]) for b, e in zip(bits, errors, strict=True)}
            for what in inputs
        }
        title = "Codecs: what is lost of each input, against what it takes"
        write_panels(picture, title, panels, "bits per value", "relative error")
    rows = [row for table in quality_rows.values() for row in table] + speed_rows
    return rows, _claims(ratios, lowrank, used, why_not)


def _claims(
    ratios: dict[tuple[str, str], float],
    lowrank: float,
    used: dict[str, tuple[float, float]],
    why_not: str | None,
) -> list[Claim]:
    claims = []
    for (name, what), bound in SPEED_BOUNDS.items():
        if (name, what) in ratios:
            ratio = ratios[name, what]
            claims.append(Claim(f"{name}, {what}: speed to copy_", ratio, bound, ratio >= bound))
        else:
            print(f"{name} is not measured: {why_not}", file=sys.stderr)
    claims.append(
        Claim("lowrank:4 of 4096 x 4096: seconds to its products'", lowrank, LOWRANK_BOUND, lowrank <= LOWRANK_BOUND)
    )  # fmt: skip
    if used:
        worst = max(used, key=lambda name: max(used[name]))
        most = max(used[worst])
        claims.append(
            Claim(f"extra memory, at most ({worst}), of the input", most, MEMORY_BOUND, most < MEMORY_BOUND)
        )
    return claims


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument(
        "--quick", action="store_true", help="smaller tensors, a short training run: under a minute"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write error against bits as SVG there")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        memory_child(options.memory)
        return 0
    environ = environment()
    rows, claims = run(options.quick, 2 if options.quick else options.rounds, options.picture)
    show("Codecs", rows, claims, hidden={"encode GB/s", "decode GB/s"})
    write_json(options.json, "codecs", environ, rows, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
