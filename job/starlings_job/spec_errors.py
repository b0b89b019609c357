"""Validation errors as sentences: file, line, section, key, what is wrong and what is allowed."""

from __future__ import annotations

import difflib
import re
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
    names = [part for part in fault["loc"] if isinstance(part, str)]
    path, owner = _walk(names, root)
    line = _line_of(path, text)
    place = where + (f" line {line}" if line else "")
    kind, key = fault["type"], path[-1] if path else ""
    section = f"[{'.'.join(path[:-1])}]" if len(path) > 1 else ""
    if kind == "extra_forbidden":
        allowed = [name for name in _keys(owner) if name != "prepared"]
        near = difflib.get_close_matches(key, allowed, n=1)
        guess = f" (did you mean {near[0]!r}?)" if near else ""
        what = f"{section} has no key {key!r}" if section else f"there is no section [{key}]"
        return f"{place}: {what}{guess}; allowed: {', '.join(allowed)}"
    if kind == "missing":
        what = f"{section} needs the key {key!r}" if section else f"the section [{key}] is missing"
        return f"{place}: {what}"
    subject = f"{section} {key}: " if section else f"[{key}] " if key else ""
    return f"{place}: {subject}{_message(fault)}"


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


def _walk(names: Sequence[str], root: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """The keys in an error's location (unions add their members' names), and the owner of the last one."""
    path: list[str] = []
    owner: type[BaseModel] = root
    current: type[BaseModel] | None = root
    for name in names:
        if current is None:
            break
        owner = current
        path.append(name)
        field = next((f for n, f in current.model_fields.items() if name in (n, f.alias)), None)
        inner = field.annotation if field is not None else None
        options = typing.get_args(inner) or (inner,)
        current = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
    return path, owner


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _line_of(path: Sequence[str], text: str) -> int | None:
    """Where `path` stands in TOML text: its key's line, else its section's, else None."""
    section: list[str] = []
    best = None
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([A-Za-z0-9_.\- ]+?)\s*\]", line)
        if header:
            section = [part.strip() for part in header[1].split(".")]
            if section == list(path[: len(section)]) and best is None:
                best = number
            if section == list(path):
                return number
            continue
        key = re.match(r"\s*([A-Za-z0-9_-]+)\s*[.=]", line)
        if key and [*section, key[1]] == list(path[: len(section) + 1]):
            return number
    return best
