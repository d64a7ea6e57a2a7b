"""From files to tokens: text, JSON Lines, Parquet, folders of Hugging Face `datasets`.

Reads in one pass, in bounded memory. Whatever is malformed is a `SettingsError` that names the
file, the place in it and the remedy; there is nothing that a retry could change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.files import open_file, size_of, unreadable
from trainer.settings import SettingsError
from trainer.tokenizer import Tokenizer

BLOCK_BYTES = 1 << 18
"""Text is encoded in blocks of about this size, each ending with a line."""

_LINE_BYTES = 1 << 16
_CHARACTERS_AT_ONCE = 1 << 22
_DRAFTS_AT_ONCE = 1024
_ROWS_AT_ONCE = 1024
EXTRA = "pip install 'everstep[finetune]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens of a document, in order; `ends` with the last of them.

    `counts` says of each token whether it counts as a target; None: all do.
    """

    tokens: Sequence[int]
    counts: Sequence[bool] | None = None
    held_out: bool = False
    ends: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A part that is not yet encoded: texts, and of each whether it counts."""

    pieces: Sequence[tuple[str, bool]]
    masked: bool = False
    held_out: bool = False
    ends: bool = True
    end_of_text: bool = False


def read_texts(
    files: Iterable[Path], tokenizer: Tokenizer, *, held_out_fraction: float, bytes_max: int | None
) -> Iterator[Part]:
    """Each file is a document, and the tail of it another, which is held out.

    Reading stops after `bytes_max` bytes. Both documents end as texts end.
    """
    return _encoded(_drafts_of_texts(files, held_out_fraction, bytes_max), tokenizer)


def _drafts_of_texts(
    files: Iterable[Path], held_out_fraction: float, bytes_max: int | None
) -> Iterator[_Draft]:
    left = bytes_max
    for file in files:
        size = size_of(file)
        size = size if left is None else min(size, left)
        if left is not None:
            left -= size
        cut = size - int(size * held_out_fraction)
        with open_file(file) as opened:
            yield from _blocks(opened, file, range(cut), held_out=False)
            yield from _blocks(opened, file, range(opened.tell(), size), held_out=True)
        if left == 0:
            return


def _blocks(opened: BinaryIO, file: Path, place: range, *, held_out: bool) -> Iterator[_Draft]:
    """One document: the bytes at `place`, and what is missing of the last character."""
    offset = place.start
    while offset < place.stop:
        block = opened.read(min(BLOCK_BYTES, place.stop - offset))
        # To the end of a line where there is one near, so that no word is cut in two.
        block += opened.readline(min(_LINE_BYTES, place.stop - offset - len(block)))
        block += _rest_of_character(opened)
        if not block:
            raise SettingsError(f"{file}: became shorter while it was read; start again")
        text = _decoded(block, file, offset)
        offset += len(block)
        ends = offset >= place.stop
        yield _Draft(pieces=[(text, True)], held_out=held_out, ends=ends, end_of_text=ends)


def _rest_of_character(opened: Any) -> bytes:
    """What follows of a character of UTF-8 that was begun: three bytes at most."""
    rest = b""
    while len(rest) < 3 and (following := opened.peek(1)[:1]) and 0x80 <= following[0] < 0xC0:
        rest += opened.read(1)
    return rest


def read_records(
    records: Iterable[tuple[str, Mapping[str, Any]]], tokenizer: Tokenizer, text_key: str
) -> Iterator[Part]:
    """Each record is a document: "messages", or "prompt" and "completion", or the text.

    Of a conversation only what the assistant says counts, of a pair only the completion. Texts that
    are empty are passed over. `records` come with the place that they were read at.
    """
    drafts = (_document(record, where, tokenizer, text_key) for where, record in records)
    return _encoded((draft for draft in drafts if draft.pieces), tokenizer)


def _encoded(drafts: Iterable[_Draft], tokenizer: Tokenizer) -> Iterator[Part]:
    """Encode many at once, which the tokenizer spreads over the cores; in the same order."""
    group: list[_Draft] = []
    size = 0
    for draft in drafts:
        group.append(draft)
        size += sum(len(text) for text, _ in draft.pieces)
        if size >= _CHARACTERS_AT_ONCE or len(group) >= _DRAFTS_AT_ONCE:
            yield from _encoded_group(group, tokenizer)
            group, size = [], 0
    yield from _encoded_group(group, tokenizer)


def _encoded_group(group: Sequence[_Draft], tokenizer: Tokenizer) -> Iterator[Part]:
    end = [] if tokenizer.end is None else [tokenizer.end]
    encoded = iter(tokenizer.encode_many([text for draft in group for text, _ in draft.pieces]))
    for draft in group:
        tokens: list[int] = []
        counts: list[bool] = []
        for _, counted in draft.pieces:
            ids = next(encoded)
            tokens += ids
            counts += [counted] * len(ids)
        if draft.end_of_text:
            tokens += end
            counts += [True] * len(end)
        yield Part(
            tokens=tokens,
            counts=counts if draft.masked else None,
            held_out=draft.held_out,
            ends=draft.ends,
        )


def records_of(kind: str, files: Sequence[Path], text_key: str) -> Iterator[tuple[str, Any]]:
    """The records of files of `kind` (a format but "text"), each with its place.

    Raises `SettingsError` where there is none.
    """
    read = {"jsonl": _json_lines, "dataset": _saved_dataset}.get(kind, _parquet)
    empty = True
    for file in files:
        for one in read(file, text_key):
            empty = False
            yield one
    if empty:
        raise SettingsError(f"{files[0]}: holds no records; name data in [trainer.data] path")


# ------------------------------------------------------------------------------- one record


def _document(record: Mapping[str, Any], where: str, tokenizer: Tokenizer, text_key: str) -> _Draft:
    if record.get("messages") is not None:
        return _conversation(record["messages"], f"{where}: messages", tokenizer)
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return _conversation([*prompt, *completion], f"{where}: prompt, completion", tokenizer)
        before = _as_text(prompt, f"{where}: prompt")
        after = _as_text(completion, f"{where}: completion")
        if not after and tokenizer.end is None:
            raise SettingsError(f"{where}: completion is empty; there is nothing to learn from it")
        return _Draft(pieces=[(before, False), (after, True)], masked=True, end_of_text=True)
    if text_key not in record:
        raise SettingsError(
            f"{where}: has neither {text_key!r}, nor messages, nor prompt and completion, but "
            f"{', '.join(map(repr, record)) or 'nothing'}; name the key of the text in "
            "[trainer.data] text_key"
        )
    text = _as_text(record[text_key], f"{where}: {text_key}")
    return _Draft(pieces=[(text, True)] if text else [], end_of_text=True)


def _conversation(messages: object, where: str, tokenizer: Tokenizer) -> _Draft:
    if not isinstance(messages, list) or not messages:
        raise SettingsError(f"{where}: is {_shown(messages)}, expected a list of messages")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise SettingsError(
                f"{where}[{number}]: is {_shown(message)}, expected role and content"
            )
        for key in ("role", "content"):
            _as_text(message.get(key), f"{where}[{number}].{key}")
    if all(message["role"] != "assistant" for message in messages):
        raise SettingsError(
            f'{where}: nothing in it has the role "assistant", and only that is learned; its roles '
            f"are {', '.join(sorted({message['role'] for message in messages}))}"
        )
    return _Draft(pieces=tokenizer.pieces(messages), masked=True)


def _as_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise SettingsError(f"{where}: is {_shown(value)}, expected a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(
            f"{where}: character {error.start} is half of a surrogate pair, which is no text; "
            "write the file anew from its source"
        ) from None
    return value


def _shown(value: object) -> str:
    if value is None:
        return "missing or null"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------------------- one file


def _json_lines(file: Path, _: str) -> Iterator[tuple[str, Any]]:
    offset = 0
    with open_file(file) as opened:
        for number, line in enumerate(opened, 1):
            where = f"{file}:{number}"
            if offset == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
            text = _decoded(line, file, offset, f":{number}")
            offset += len(line)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                raise SettingsError(
                    f"{where}: is not JSON: {error.msg} (column {error.colno}); each line must be "
                    "one whole object"
                ) from None
            if not isinstance(record, dict):
                raise SettingsError(f"{where}: is {_shown(record)}, expected a JSON object")
            yield where, record


def _parquet(file: Path, text_key: str) -> Iterator[tuple[str, Any]]:
    pyarrow = _pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            columns = columns_of(opened.schema_arrow.names, text_key, f"{file}")
            batches = opened.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns)
            yield from _rows(batches, f"{file}")
    except (pyarrow.ArrowException, OSError) as error:
        raise unreadable(file, "a Parquet file", error) from None


def _saved_dataset(folder: Path, text_key: str) -> Iterator[tuple[str, Any]]:
    """A folder of `save_to_disk`: Arrow streams and a state.json that names them in order.

    Of a folder of several splits it is the one called "train".
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _json_of(folder / "dataset_dict.json").get("splits", [])
        if "train" not in splits:
            raise SettingsError(
                f'{folder}: holds the splits {", ".join(splits)} and none called "train"; name the '
                "folder of the one to train on"
            )
        folder = folder / "train"
    pyarrow = _pyarrow()
    names = [one.get("filename") for one in _json_of(folder / "state.json").get("_data_files", [])]
    for name in names:
        file = folder / str(name)
        try:
            with pyarrow.memory_map(str(file)) as opened, pyarrow.ipc.open_stream(opened) as stream:
                columns = columns_of(stream.schema.names, text_key, f"{file}")
                small = (
                    batch.select(columns).slice(start, _ROWS_AT_ONCE)
                    for batch in stream
                    for start in range(0, batch.num_rows, _ROWS_AT_ONCE)
                )
                yield from _rows(small, f"{file}")
        except (pyarrow.ArrowException, OSError) as error:
            raise unreadable(file, "an Arrow file of a saved dataset", error) from None


def _rows(batches: Iterable[Any], file: str) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            yield f"{file}, row {number}", record
            number += 1


def columns_of(names: Sequence[str], text_key: str, where: str) -> list[str]:
    """The columns that hold a document; the others are not even read."""
    if "messages" in names:
        return ["messages"]
    if "prompt" in names and "completion" in names:
        return ["prompt", "completion"]
    if text_key in names:
        return [text_key]
    raise SettingsError(
        f"{where}: has neither a column {text_key!r}, nor messages, nor prompt and completion, but "
        f"{', '.join(map(repr, names))}; name the column of the text in [trainer.data] text_key"
    )


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise SettingsError(
            f"[trainer.data] format: this one needs the package pyarrow: {EXTRA}"
        ) from None
    return pyarrow


def _json_of(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise unreadable(file, "a file of a saved dataset", error) from None
    if not isinstance(found, dict):
        raise unreadable(file, "a file of a saved dataset", "it holds no object")
    return found


def _decoded(block: bytes, file: Path, offset: int, line: str = "") -> str:
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{file}{line}: is not UTF-8 (byte {offset + error.start} of the file); save it as "
            "UTF-8, or take it out of [trainer.data] path"
        ) from None
