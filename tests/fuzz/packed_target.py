"""A coverage-guided fuzz target: any bytes decode to a bounded, finite tensor, or raise CodecError.

    python tests/fuzz/packed_target.py NEW_FINDINGS tests/fuzz/corpus [libFuzzer's options]
    python tests/fuzz/packed_target.py --write-corpus          after a change of the layout

Needs the package atheris (Linux). The corpus holds one Packed of every codec, and lies that once needed a check;
a fast test replays it.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import atheris

CORPUS = Path(__file__).with_name("corpus")

with atheris.instrument_imports(include=["starlings_compression"]):
    # Imported by make_codec when it is called, which is too late to be instrumented.
    import starlings_compression.registry  # noqa: F401
    from codec_cases import EVERY, check, normal
    from starlings_compression.codec import make_codec


def corpus() -> dict[str, bytes]:
    """By file name; "good" ones decode, "bad" ones are refused."""
    files = {}
    for spec in EVERY:
        name = spec.replace(":", "-").replace("/", "-").replace("|", "+")
        for shape in ((19,), (10, 11)):
            files[f"good {name} {'x'.join(map(str, shape))}"] = make_codec(spec).encode(normal(*shape))
    files["good empty"] = make_codec("topk:5/64|int2:8").encode(normal(0, 3))
    files["good bool"] = make_codec("exact").encode(normal(9) > 0)
    int8, topk = make_codec("int8:8").encode(normal(19)), make_codec("topk:3/16|fp16").encode(normal(19))
    squeezed = make_codec("exact|zstd:3").encode(normal(40).new_zeros(40))
    files["good zeros squeezed"] = squeezed
    files |= {
        "bad magic": b"SLPK\x02" + int8[5:],
        "bad huge shape": int8[:16] + struct.pack("<Q", 1 << 62) + int8[24:],
        "bad shape of one more": int8[:16] + struct.pack("<Q", 20) + int8[24:],
        "bad section length": int8[:24] + struct.pack("<Q", 7) + int8[32:],
        "bad spec": int8.replace(b"int8:8", b"int8:9"),
        "bad other spec": int8.replace(b"int8:8", b"sign:8"),
        "bad scale": int8[:48] + b"\xff\x7f" + int8[50:],
        "bad scale below normal": int8[:48] + b"\x7f\x00" + int8[50:],
        "bad index": topk[:64] + b"\x00\xff\x00" + topk[67:],
        "bad frame": squeezed[:-3] + b"\xff\xff\xff",
        "bad frame cut short": squeezed[:-1],
    }
    return files


def main() -> None:
    if sys.argv[1:] == ["--write-corpus"]:
        CORPUS.mkdir(exist_ok=True)
        for old in CORPUS.iterdir():
            old.unlink()
        for name, data in corpus().items():
            (CORPUS / name.replace(" ", "_")).write_bytes(data)
        return
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
