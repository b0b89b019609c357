"""Text to tokens: bytes, or a Hugging Face tokenizer file. `tokenizers` is imported only when needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlings_job.errors import JobFileError

FOLDER = "tokenizer"
AUTO = "auto"
BYTES = "bytes"
HUGGING_FACE = "huggingface"
JSON_LIMIT_BYTES = 256 << 20
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")


class ByteTokenizer:
    """Every byte is a token. Files follow each other as they are; a document of JSON lines ends with a newline."""

    kind = BYTES
    vocabulary_size = 256
    end_of_file: tuple[int, ...] = ()
    end_of_line: tuple[int, ...] = (10,)

    def encode(self, text: bytes) -> Sequence[int]:
        return text


class HuggingFaceTokenizer:
    """A `tokenizer.json`. Documents end with its end-of-text token, where it names one."""

    kind = HUGGING_FACE

    def __init__(self, file: Path) -> None:
        """Raises JobFileError when the file cannot be read or is no tokenizer."""
        try:
            from tokenizers import Tokenizer as Fast
        except ModuleNotFoundError:
            raise JobFileError(
                '[data] tokenizer: reading it needs the tokenizers library: pip install "starlings[worker]"'
            ) from None
        try:
            self._fast: Any = Fast.from_file(str(file))
        except Exception as error:
            raise JobFileError(f"[data] tokenizer {file}: no tokenizer that can be read ({error})") from None
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocabulary_size = int(self._fast.get_vocab_size(with_added_tokens=True))
        end = _end_of_text(file.parent)
        number = self._fast.token_to_id(end) if end is not None else None
        self.end_of_file: tuple[int, ...] = () if number is None else (int(number),)
        self.end_of_line = self.end_of_file

    def encode(self, text: bytes) -> Sequence[int]:
        ids: list[int] = self._fast.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._fast.decode(list(tokens), skip_special_tokens=False))


# Both have: kind, vocabulary_size, encode, and what is appended behind each file (`end_of_file`) and each
# line of JSON (`end_of_line`).
Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def load_tokenizer(name: str, base: Path) -> Tokenizer:
    """The tokenizer of `[data] tokenizer`; paths are relative to `base`."""
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(tokenizer_file(name, base))


def resolve_tokenizer(name: str, model_path: str | None, base: Path) -> str:
    """What "auto" means: the tokenizer in the model's own directory, or bytes where there is none."""
    if name != AUTO or model_path is None:
        return BYTES if name == AUTO else name
    path = base / Path(model_path).expanduser()
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    return BYTES if not file.is_file() or _is_byte_tokenizer(file) else str(file)


def tokenizer_file(name: str, base: Path) -> Path:
    """The tokenizer.json that `name` (a directory or a file) points to. Raises JobFileError when there is none."""
    path = base / Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise JobFileError(
            f'[data] tokenizer {name!r}: there is no {file}; write "bytes", or the path of a tokenizer.json'
        )
    return file


def save_tokenizer(name: str, base: Path, directory: Path, context_tokens: int) -> None:
    """Writes files to `directory`/tokenizer that transformers' AutoTokenizer loads without any code of its own."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if name == BYTES:
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json(), ensure_ascii=False), "utf-8")
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context_tokens,
            "clean_up_tokenization_spaces": False,
        }
        _write_json(folder / "tokenizer_config.json", config)
        return
    file = tokenizer_file(name, base)
    shutil.copyfile(file, folder / "tokenizer.json")
    for companion in _COMPANIONS:
        record = _read_json(file.parent / companion)
        if record is not None:
            record.pop("auto_map", None)
            _write_json(folder / companion, record)
    if not (folder / "tokenizer_config.json").exists():
        _write_json(
            folder / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context_tokens},
        )


def byte_tokenizer_json() -> dict[str, Any]:
    """A tokenizers file whose token i is the byte i: byte-level BPE without merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    characters, spare = [], 256
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters


def decode_text(directory: str | Path, tokens: Sequence[int]) -> str:
    """Tokens of a prepared job as text; without the tokenizers library, as numbers."""
    file = Path(directory) / FOLDER / "tokenizer.json"
    if _is_byte_tokenizer(file):
        return bytes(token & 255 for token in tokens).decode("utf-8", "replace")
    try:
        return HuggingFaceTokenizer(file).decode(tokens)
    except JobFileError:
        return " ".join(map(str, tokens))


def _is_byte_tokenizer(file: Path) -> bool:
    model = (_read_json(file) or {}).get("model")
    return isinstance(model, dict) and model.get("vocab") == byte_tokenizer_json()["model"]["vocab"]


def _end_of_text(folder: Path) -> str | None:
    for companion in _COMPANIONS:
        end = (_read_json(folder / companion) or {}).get("eos_token")
        if isinstance(end, dict):
            end = end.get("content")
        if isinstance(end, str):
            return end
    return None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > JSON_LIMIT_BYTES:
            return None
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
