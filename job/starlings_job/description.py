"""A resolved model: family, checked configuration, its blocks. What `model.json` holds; torch-free."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlings_job.configuration import checked_config
from starlings_job.errors import JobFileError
from starlings_job.factories import checked_factory, factory_block_count
from starlings_job.families import FAMILIES
from starlings_job.family import Family

FORMAT = 1
JSON_LIMIT_BYTES = 1 << 20
SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class ModelDescription:
    """A model as a list of blocks. Made only by `describe` or `from_record`, so it is always checked."""

    family: str
    # A Hugging Face configuration by allow-listed keys; for "sequential" the factory's name and arguments.
    config: Mapping[str, Any]
    trainable: tuple[str, ...] = ("*",)
    notes: tuple[str, ...] = ()

    @property
    def is_language_model(self) -> bool:
        return self.family != SEQUENTIAL

    @property
    def rules(self) -> Family:
        """The Hugging Face family. Raises KeyError for sequential models."""
        return FAMILIES[self.family]

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings are one parameter."""
        return self.is_language_model and bool(self.config["tie_word_embeddings"])

    @property
    def layer_count(self) -> int:
        """Decoder layers, or children of the Sequential."""
        if self.is_language_model:
            return int(self.config[self.rules.layers_key])
        return factory_block_count(str(self.config["factory"]), self.config)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks in order of computation."""
        layers = tuple(f"layers.{i}" for i in range(self.layer_count))
        return ("embed", *layers, "head") if self.is_language_model else layers

    def is_hidden(self, block: str) -> bool:
        """Whether a block maps hidden states to hidden states: all but the first and the last one do."""
        return block not in (self.blocks[0], self.blocks[-1])

    def kind(self, block: str) -> str:
        """Blocks of one kind cost alike: one of each is measured. Each child of a Sequential is its own."""
        if self.is_language_model and block.startswith("layers."):
            return self.rules.layer_kind(self.config, int(block[7:]))
        return block

    @property
    def vocabulary_size(self) -> int:
        """Width of the last block's output: tokens, or classes."""
        if self.is_language_model:
            return int(self.config["vocab_size"])
        return SHAPES_CLASSES

    @property
    def context_tokens(self) -> int:
        """Longest sequence that the model can take."""
        return int(self.config[self.rules.positions_key]) if self.is_language_model else 1

    def tied_parameters(self) -> tuple[tuple[str, str], tuple[str, str]] | None:
        """((block, name), (block, name)) of the two copies of the shared embedding, or None when untied."""
        if not self.tied:
            return None
        return ("embed", self.rules.token_embedding), ("head", "lm_head.weight")

    def hugging_face_name(self, block: str, name: str) -> str:
        """The name in a whole model's state dict."""
        if self.is_language_model:
            return self.rules.hugging_face_name(block, name)
        return f"{block.removeprefix('layers.')}.{name}"

    def published_names(self, block: str, name: str) -> tuple[str, ...]:
        """The tensors of a checkpoint on disk that are, one after another, this parameter; mostly one."""
        if self.is_language_model:
            return self.rules.published_names(self.config, block, name)
        return (self.hugging_face_name(block, name),)

    def pieces(self, name: str) -> tuple[str, ...]:
        """The names inside its block under which a checkpoint may hold a parameter in pieces; () for most."""
        return self.rules.pieces(self.config, name) if self.is_language_model else ()

    def locate(self, hugging_face_name: str) -> tuple[str, str] | None:
        """The inverse of `hugging_face_name`; None for names of no parameter."""
        if self.is_language_model:
            return self.rules.locate(hugging_face_name)
        number, _, name = hugging_face_name.partition(".")
        return (f"layers.{int(number)}", name) if number.isdecimal() and name else None

    def is_trainable(self, block: str, name: str) -> bool:
        """Whether `[train] trainable` covers the parameter. A tied output embedding follows the input's."""
        tied = self.tied_parameters()
        if tied is not None and (block, name) == tied[1]:
            block, name = tied[0]
        full = self.hugging_face_name(block, name)
        return any(fnmatch.fnmatchcase(full, glob) for glob in self.trainable)

    def to_record(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "family": self.family,
            "config": dict(self.config),
            "trainable": list(self.trainable),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_record(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_record(cls, record: object) -> ModelDescription:
        """Checked anew, because it may come from another machine.

        Raises:
            JobFileError: malformed, of another format, or not allowed.
        """
        where = "the model description"
        if not isinstance(record, Mapping) or record.get("format") != FORMAT:
            raise JobFileError(f"{where} is not of format {FORMAT}; the job was prepared by another version")
        family, config, globs = record.get("family"), record.get("config"), record.get("trainable", ["*"])
        if not isinstance(family, str) or not isinstance(config, Mapping):
            raise JobFileError(f"{where} lacks family or config")
        if not isinstance(globs, list) or not all(isinstance(g, str) and len(g) <= 512 for g in globs):
            raise JobFileError(f"{where}: trainable must be a list of globs")
        notes = record.get("notes", [])
        if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
            raise JobFileError(f"{where}: notes must be a list of texts")
        described = describe(family, config, where, trainable=tuple(globs))
        return cls(described.family, described.config, described.trainable, tuple(notes))

    @classmethod
    def from_json(cls, data: str | bytes) -> ModelDescription:
        """As `from_record`, from JSON text."""
        if len(data) > JSON_LIMIT_BYTES:
            raise JobFileError(
                f"a model description of {len(data)} bytes is above the limit of {JSON_LIMIT_BYTES}"
            )
        try:
            record = json.loads(data)
        except (ValueError, RecursionError):
            raise JobFileError("the model description is no JSON") from None
        return cls.from_record(record)


SHAPES_CLASSES = 8


def describe(
    family: str,
    config: Mapping[str, Any],
    where: str,
    *,
    untie: bool = False,
    trainable: tuple[str, ...] = ("*",),
) -> ModelDescription:
    """The model that a family name and a raw configuration stand for; `where` names it in errors.

    Raises:
        JobFileError: unknown family, or a configuration that is not allowed.
    """
    if family == SEQUENTIAL:
        return ModelDescription(family, checked_factory(config, where), trainable)
    rules = FAMILIES.get(family)
    if rules is None:
        raise JobFileError(
            f"{where}: model_type {str(family)[:60]!r} is not supported; allowed: {', '.join(FAMILIES)}"
        )
    checked, notes = checked_config(rules, config, where, untie=untie)
    return ModelDescription(family, checked, trainable, tuple(notes))


def describe_config_file(path: Path, *, untie: bool, trainable: tuple[str, ...]) -> ModelDescription:
    """The model of a Hugging Face `config.json` (or of a directory that holds one)."""
    path = path / "config.json" if path.is_dir() else path
    try:
        data = path.read_bytes()
        if len(data) > JSON_LIMIT_BYTES:
            raise JobFileError(f"{path}: {len(data)} bytes are too many for a configuration")
        raw = json.loads(data)
    except OSError as error:
        raise JobFileError(f"[model] {path}: cannot read the configuration ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise JobFileError(f"[model] {path}: not valid JSON") from None
    if not isinstance(raw, dict):
        raise JobFileError(f"[model] {path}: must hold a JSON object")
    family = str(raw.get("model_type"))
    if family == SEQUENTIAL:
        raw.pop("model_type")
    return describe(family, raw, str(path), untie=untie, trainable=trainable)
