"""The commented job.toml that `starlings init` writes, made from the specification's fields and defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from starlings_job.families import FAMILIES
from starlings_job.presets import PRESETS
from starlings_job.spec import JobSpec, parse_job

# What a newcomer must decide, and what they get when they do not: everything else is written as a comment
# with its default. Volunteers come over the internet, where no uplink bears an exchange at every step.
CHOSEN: Mapping[str, Mapping[str, Any]] = {
    "job": {"name": "first-flight", "seed": 0, "tokens": "2M"},
    "model": {"preset": "tiny"},
    "data": {"source": "stdlib", "held_out": 256},
    "train": {"schedule": "async", "batch": 32, "microbatch": 4, "lr": 2e-3},
    "exchange": {"preset": "pairs"},
}
# Where all machines share a fast network, steps can be exactly those of one big machine.
CHOSEN_FOR_LAN: Mapping[str, Mapping[str, Any]] = {
    **CHOSEN,
    "train": {**CHOSEN["train"], "schedule": "sync"},
    "exchange": {"preset": "allreduce"},
}

ABOUT: Mapping[str, str] = {
    "job": "What this job is.",
    "model": "What is trained: exactly one of preset, config, from.",
    "data": "The text. It is tokenised once, by `starlings prepare`; volunteers need no copy of it.",
    "train": "How it is trained.",
    "pipeline": "How activations travel between the stages of the model.",
    "exchange": "How replicas of a stage come together: gradients every step, or weights now and then.",
    "swarm": "When training starts.",
    "checkpoint": "Where and how often the weights are saved.",
    "network": "How volunteers reach the coordinator.",
    "network.ports": "Port 0 means any free one; the chosen one is reported.",
    "bus": "An MQTT broker over which the swarm can be followed; training never depends on it.",
}

COMMENTS: Mapping[str, str] = {
    "job.name": "Letters, digits and . _ - ; names directories, certificates and the invite.",
    "job.seed": "Weights, held-out split and the order of samples all follow from it.",
    "job.tokens": "Train on this many tokens, then evaluate, save and end; a larger number later continues.",
    "model.preset": "One of " + ", ".join(sorted(PRESETS)) + ".",
    "model.config": "Or a Hugging Face config.json: weights start at random. Families: "
    + ", ".join(FAMILIES)
    + ".",
    "model.from": "Or a Hugging Face directory with config.json and safetensors: weights start from there.",
    "model.untie": "Give the input and the output embedding weights of their own; async does, but with one stage.",
    "data.source": '"stdlib" (Python\'s own sources), "shapes" (drawn images), or globs like "texts/**/*.txt".',
    "data.format": '"text", or "jsonl" with {"text"} or {"prompt", "completion"} on each line.',
    "data.tokenizer": '"bytes", or a tokenizer.json, or the directory that holds one.',
    "data.sequence_length": "Tokens per sample. Left out: what suits the preset.",
    "data.held_out": "About this many samples are kept back for evaluation.",
    "data.limit": 'Use about this much text, such as "8MB". Left out: all of it.',
    "data.skew": "async: unequal data; each worker leases from a few sources (0.1) or nearly all alike (100).",
    "train.schedule": '"async": nobody waits, for the internet; "sync": each step is just what one big machine does.',
    "train.batch": "Samples per optimizer step, over all workers.",
    "train.microbatch": "Samples that travel together through the stages; batch must be a multiple of it.",
    "train.inner_batch": "async: microbatches per step of a replica; 0 = as many as make a batch.",
    "train.max_staleness": "async: older gradients (in own steps) are passed upstream and not added.",
    "train.correction": 'async: "none"; "predict": weights ahead by the measured delay; "nadam" with that optimizer.',
    "train.evaluations": "async: how often held-out text is evaluated while training goes on; 0 = at the end only.",
    "train.optimizer": '"adamw", "nadam", "sgd", "muon" (AdamW where there is no hidden matrix) or "adamw8bit".',
    "train.lr": "The highest learning rate.",
    "train.lr_end": "The rate at the end, as a fraction of lr.",
    "train.decay": '"cosine" or "none".',
    "train.warmup": "Steps of linear warm-up; below 1: a fraction of all steps.",
    "train.clip": "Limit on the gradient norm of the whole model; 0 = none.",
    "train.beta1": "All but SGD: memory of the mean gradient.",
    "train.beta2": "All but SGD: memory of the squared gradient.",
    "train.epsilon": "All but SGD: keeps the division finite.",
    "train.weight_decay": "All but SGD: acts on matrices only, not on norms and biases.",
    "train.momentum": "SGD and Muon; left out, 0.95 with Muon.",
    "train.momentum_decay": "NAdam: momentum rises from half of beta1 to beta1, at this pace; 0 = stays at half.",
    "train.muon_scale": '"rms": updates as large as AdamW\'s, so that lr suits both; "original": Jordan\'s.',
    "train.muon_iterations": "Muon: Newton-Schulz iterations in each step.",
    "train.muon_adamw_lr": "Muon: the rate of what is left to AdamW, as a fraction of lr.",
    "train.trainable": 'Globs over parameter names such as "*.mlp.*"; the others stay as they are.',
    "pipeline.force": "Use the codec also where it is known to hurt.",
    "pipeline.codec": '"int8:128" (a quarter of the bytes), "fp8", "bf16", "fp16", "exact"; see `starlings codecs`.',
    "pipeline.stages": "0: the planner cuts. 3: three stages, which it balances. [3, 3, 2]: the blocks of each stage.",
    "exchange.preset": "sync: allreduce; async: pairs (default), noloco, palsgd, diloco, sparseloco, gossip, none.",
    "exchange.force": "Use codecs where they are known to hurt, and what is known to diverge.",
    "exchange.codec": 'How values travel; left out, async "int8:128", sparseloco "topk:64/4096|int2:64".',
    "exchange.every": "Steps between exchanges; async: 50 when left out, sparseloco 30.",
    "exchange.robust": 'diloco, sparseloco: "none", "clip", "trimmed" or "centered_clip".',
    "exchange.swaps": "pairs, palsgd: averagings with different partners each time; bytes rise in proportion.",
    "exchange.fragments": "async: parts of the weights that take turns; each is averaged that much more rarely.",
    "exchange.outer_rate": "pairs, palsgd, diloco, sparseloco: rate of the outer step; noloco: beta.",
    "exchange.outer_momentum": "pairs, palsgd, diloco: momentum of the outer step; noloco: alpha, 0.5 when left out.",
    "exchange.momentum_codec": 'pairs, palsgd: how that momentum travels, such as "int4:64"; "none": it stays at home.',
    "exchange.warmup_fraction": "Share of the tokens with frequent plain averaging at first; left out, of pairs alone.",
    "exchange.warmup_every": "Steps between exchanges until then; `every` where that is less.",
    "exchange.warmup_swaps": "pairs, palsgd: averagings each time until then; 0 = as later.",
    "exchange.seed": "Who meets whom follows from it and from the job's seed.",
    "exchange.gamma": "noloco: pull towards a pair's mean; stable above outer_momentum, and far below 2 + it.",
    "exchange.pull_probability": "palsgd: share of a replica's steps that are pulls towards its last average.",
    "exchange.merge_alpha": "diloco, sparseloco: share of what is trained beside a round that stays; 0 = waits.",
    "exchange.quasi_global": "gossip: adamw and sgd remember where gossip took the weights; false: each its own way.",
    "exchange.pull": "palsgd: how hard they pull, in units of lr; 0 = not at all.",
    "swarm.min_workers": "Training waits until this many workers are there,",
    "swarm.settle_s": "... until they can hold every stage, and until nobody has joined for this long.",
    "checkpoint.to": "A directory or an fsspec URL, of this job alone. Left out: the job's own directory.",
    "checkpoint.every": "Steps between checkpoints; 0 = only at the end.",
    "checkpoint.keep": "How many to keep.",
    "network.host": "Names or addresses under which volunteers reach this machine. Left out: found out.",
    "network.ports.control": "Workers keep one connection to it. Must be reachable from outside.",
    "network.ports.enrolment": "Invites are traded for certificates here. Must be reachable from outside.",
    "network.ports.page": "Reserved for the web page, on this machine only.",
    "bus.url": "Where the broker is; `starlings bus config` configures one. Left out: there is no bus.",
    "bus.payload": '"protobuf", or "json" for tools that have no schema compiler.',
}

# Shown instead of a default that is "none", so that the line still says what may stand there.
_EXAMPLES: Mapping[str, Any] = {
    "model.config": "path/to/config.json",
    "model.from": "path/to/model-directory",
    "data.limit": "8MB",
    "data.skew": 1.0,
    "checkpoint.to": "s3://bucket/path",
    "network.host": ["swarm.example.org"],
    "bus.url": "mqtts://swarm.example.org:8883",
}
_SKIPPED = ("prepared",)
_HEAD = """\
# A Starlings job. Lines that begin with '#' show defaults: remove the '#' to change one.
# Next:  starlings prepare {file}  &&  starlings coordinator {file}
"""


def fields(model: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    """Every key of the specification as ("section.key", default), sections in order; None where there is no
    default.
    """
    found: list[tuple[str, Any]] = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        inner = field.annotation
        if path in _SKIPPED:
            continue
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += fields(inner, path + ".")
        else:
            found.append((path, None if field.is_required() else field.default))
    return found


def _following(chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The default of every key beside what is chosen: some depend on it."""
    job = parse_job(render(chosen, comments=False)).model_dump(by_alias=True)

    def at(path: str) -> Any:
        value: Any = job
        for key in path.split("."):
            value = value[key]
        return value

    return {path: at(path) for path, default in fields(JobSpec) if default is not None}


def toml_value(value: Any) -> str:
    """A TOML literal of a string, number, boolean or list of these."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def render(
    chosen: Mapping[str, Mapping[str, Any]] = CHOSEN, *, file: str = "job.toml", comments: bool = True
) -> str:
    """The text of a job file. Chosen keys are set; with `comments` all others follow as comments with their
    defaults.
    """
    lines = [_HEAD.format(file=file)] if comments else []
    follows = _following(chosen) if comments else {}
    section = ""
    for path, default in fields(JobSpec):
        here, _, key = path.rpartition(".")
        if here != section:
            if not comments and not chosen.get(here):
                continue
            section = here
            lines += ["", f"# {ABOUT[here]}"] if comments else [""]
            lines.append(f"[{here}]")
        value = chosen.get(here, {}).get(key)
        if not comments:
            if value is not None:
                lines.append(f"{key} = {toml_value(value)}")
            continue
        lines.append(f"# {COMMENTS[path]}")
        if value is not None:
            lines.append(f"{key} = {toml_value(value)}")
        else:
            shown = _EXAMPLES.get(path, follows.get(path, default))
            lines.append(f"# {key} = {toml_value(shown)}")
    text = "\n".join(lines).replace("\n\n\n", "\n\n").strip() + "\n"
    parse_job(text, file)
    return text
