"""Validation errors as sentences: file, line, section, key, what is wrong and what is allowed."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

ERRORS_SHOWN = 8


def explain_syntax_error(error: Exception, where: str) -> str:
    """`job.toml line 3, column 5: ...` for text that is no TOML."""
    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error))
    if match is None:
        return f"{where}: not valid TOML: {error}"
    return f"{where} line {match[2]}, column {match[3]}: not valid TOML: {match[1]}"


def explain_validation_error(error: ValidationError, root: type[BaseModel], where: str, text: str) -> str:
    """One line per fault, at most eight.

    Args:
        root: the model that was validated; its field names are the allowed sections.
        where: the file's name.
        text: the TOML text, to find line numbers in; "" when there is none.
    """
    faults = [_explain(dict(fault), root, where, text) for fault in error.errors(include_url=False)]
    # A union reports each of its members; one sentence per place is enough.
    faults = list(dict.fromkeys(faults))
    more = [f"... and {len(faults) - ERRORS_SHOWN} more"] if len(faults) > ERRORS_SHOWN else []
    return "\n".join(faults[:ERRORS_SHOWN] + more)


def _explain(fault: Mapping[str, Any], root: type[BaseModel], where: str, text: str) -> str:
    path, owner = _walk(fault["loc"], root)
    line = _line_of(path, text)
    place = where + (f" line {line}" if line else "")
    kind = fault["type"]
    key, table = (
        ("", path) if path and isinstance(path[-1], int) else (str(path[-1]) if path else "", path[:-1])
    )
    section = _section(table)
    if kind == "extra_forbidden":
        allowed = [name for name in _keys(owner) if name != "prepared"]
        near = difflib.get_close_matches(key, allowed, n=1)
        guess = f" (did you mean {near[0]!r}?)" if near else ""
        what = f"{section} has no key {key!r}" if section else f"there is no section [{key}]"
        return f"{place}: {what}{guess}; allowed: {', '.join(allowed)}"
    if kind == "missing":
        what = f"{section} needs the key {key!r}" if section else f"the section [{key}] is missing"
        return f"{place}: {what}"
    subject = f"{section} {key}".rstrip() + ": " if section else f"[{key}] " if key else ""
    return f"{place}: {subject}{_message(fault)}"


def _section(path: Sequence[str | int]) -> str:
    """`[a.b]`, or `[[a]] 2` in the second of several tables of a name."""
    name = ".".join(part for part in path if isinstance(part, str))
    numbers = [part for part in path if isinstance(part, int)]
    if not name:
        return ""
    return f"[[{name}]] {numbers[-1] + 1}" if numbers else f"[{name}]"


def _message(fault: Mapping[str, Any]) -> str:
    kind, context, message = fault["type"], fault.get("ctx", {}), str(fault["msg"])
    given = repr(fault.get("input"))
    given = given if len(given) <= 60 else given[:57] + "..."
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind == "literal_error":
        return f"{given} is not allowed; allowed: {context.get('expected', message)}"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return f"must be a table with keys, not {given}"
    return f"{message[0].lower()}{message[1:]}, not {given}"


def _walk(parts: Sequence[str | int], root: type[BaseModel]) -> tuple[list[str | int], type[BaseModel]]:
    """The keys in an error's location (unions add their members' names), and the owner of the last one. Numbers are
    kept where several tables have one name, and not within lists of values.
    """
    path: list[str | int] = []
    owner: type[BaseModel] = root
    inner: Any = root
    for part in parts:
        options = _alternatives(inner)
        model = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        table = next((o for o in options if typing.get_origin(o) is dict), None)
        rows = next((o for o in options if typing.get_origin(o) in (tuple, list)), None)
        if isinstance(part, int):
            element = typing.get_args(rows)[0] if rows is not None else None
            if not (isinstance(element, type) and issubclass(element, BaseModel)):
                break
            inner = element
        elif model is not None:
            owner = model
            field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
            inner = field.annotation if field is not None else None
        elif table is not None:
            inner = typing.get_args(table)[1]
        else:
            break
        path.append(part)
    return path, owner


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, each without its `Annotated`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(inner for member in typing.get_args(annotation) for inner in _alternatives(member))
    if typing.get_origin(annotation) is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    return (annotation,)


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _line_of(path: Sequence[str | int], text: str) -> int | None:
    """Where `path` stands in TOML text: its key's line, else its section's, else None."""
    section: list[str | int] = []
    counts: dict[tuple[str, ...], int] = {}
    best = None
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([A-Za-z0-9_.\- ]+?)\s*\]", line)
        if header:
            names = tuple(part.strip() for part in header[2].split("."))
            section = list(names)
            if header[1] == "[[":
                section.append(counts.setdefault(names, 0))
                counts[names] += 1
            if section == list(path[: len(section)]) and best is None:
                best = number
            if section == list(path):
                return number
            continue
        key = re.match(r"\s*([A-Za-z0-9_-]+)\s*[.=]", line)
        if key and [*section, key[1]] == list(path[: len(section) + 1]):
            return number
    return best
