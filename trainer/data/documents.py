"""From files to tokens: text, JSON Lines, Parquet, folders of Hugging Face `datasets`.

Reads in one pass, in bounded memory. Whatever is malformed is a `SettingsError` that names the
file, the place in it and the remedy; there is nothing that a retry could change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.encoding import Block, Part, encode_blocks, encode_passages
from trainer.data.files import (
    EXTRA,
    READ_ERRORS,
    open_file,
    plain_name,
    size_of,
    unreadable,
)
from trainer.data.tokenizer import Passage, Tokenizer
from trainer.host.json_text import parse_json
from trainer.settings import SettingsError

BLOCK_BYTES = 1 << 18
"""Text is encoded in blocks of about this size, each ending with a line."""

_LINE_BYTES = 1 << 16
_ROWS_AT_ONCE = 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TOLD = 10
"""So many mistakes in the data are told one by one, the others are counted."""

Record = Mapping[str, Any] | SettingsError
"""A record as it was read, or what is wrong with it."""


def read_texts(
    files: Iterable[Path], tokenizer: Tokenizer, *, held_out_fraction: float, bytes_max: int | None
) -> Iterator[Part]:
    """Each file is a document, and the tail of it another, which is held out.

    Reading stops after `bytes_max` bytes. Both documents begin and end as texts do.
    """
    blocks = _blocks_of_texts(files, held_out_fraction, bytes_max, tokenizer.reach)
    return encode_blocks(blocks, tokenizer)


def _blocks_of_texts(
    files: Iterable[Path], held_out_fraction: float, bytes_max: int | None, margin: int
) -> Iterator[Block]:
    left = bytes_max
    for file in files:
        size = size_of(file)
        size = size if left is None else min(size, left)
        if left is not None:
            left -= size
        cut = size - int(size * held_out_fraction)
        with open_file(file) as opened:
            learned = _texts(opened, file, range(cut))
            yield from _blocks(learned, margin, held_out=False)
            rest = _texts(opened, file, range(opened.tell(), size))
            yield from _blocks(rest, margin, held_out=True)
        if left == 0:
            return


def _blocks(texts: Iterator[str], margin: int, *, held_out: bool) -> Iterator[Block]:
    """One document; each block with `margin` characters of its neighbours."""
    before, text = "", next(texts, None)
    first = True
    while text is not None:
        following = next(texts, None)
        yield Block(
            before=before,
            text=text,
            after=(following or "")[:margin],
            held_out=held_out,
            first=first,
            last=following is None,
        )
        before, text, first = text[len(text) - min(margin, len(text)) :], following, False


def _texts(opened: BinaryIO, file: Path, place: range) -> Iterator[str]:
    """The bytes at `place`, and what is missing of the last character, in pieces of a fair size."""
    offset = place.start
    while offset < place.stop:
        # To the end of a line where there is one near, so that no word is cut in two.
        wanted = place.stop - offset
        wanted = wanted if wanted < 2 * BLOCK_BYTES else BLOCK_BYTES
        try:
            block = opened.read(wanted)
            block += opened.readline(min(_LINE_BYTES, place.stop - offset - len(block)))
            block += _rest_of_character(opened)
        except READ_ERRORS as error:
            raise unreadable(file, "text", error) from None
        if not block:
            raise SettingsError(f"{file}: became shorter while it was read; start again")
        text = decoded(block, file, offset)
        offset += len(block)
        yield text


def _rest_of_character(opened: Any) -> bytes:
    """What follows of a character of UTF-8 that was begun: three bytes at most."""
    rest = b""
    while len(rest) < 3 and (following := opened.peek(1)[:1]) and 0x80 <= following[0] < 0xC0:
        rest += opened.read(1)
    return rest


def read_records(
    records: Iterable[tuple[str, Record]], tokenizer: Tokenizer, text_key: str
) -> Iterator[Part]:
    """Each record is a document: "messages", or "prompt" and "completion", or the text.

    Of a conversation only what the assistant says counts, of a pair only the completion. Texts that
    are empty are passed over. `records` come with the place that they were read at. Raises
    `SettingsError` with the first mistakes in them, and how many there are, after the last record.
    """
    return encode_passages(_passages(records, tokenizer, text_key), tokenizer)


def _passages(
    records: Iterable[tuple[str, Record]], tokenizer: Tokenizer, text_key: str
) -> Iterator[Passage | None]:
    problems: list[str] = []
    number = bad = 0
    for number, (where, record) in enumerate(records, 1):
        try:
            if isinstance(record, SettingsError):
                raise record
            passage = _passage(record, where, tokenizer, text_key)
        except SettingsError as error:
            bad += 1
            if bad <= _TOLD:
                problems += error.problems
        else:
            if passage is not None and not bad:
                yield passage
        if bad and number % _ROWS_AT_ONCE == 0:
            yield None
    if bad > _TOLD:
        problems.append(f"{bad - _TOLD} more records: {bad} of {number} cannot be used in all")
    if problems:
        raise SettingsError(*problems)


def records_of(kind: str, files: Sequence[Path], text_key: str) -> Iterator[tuple[str, Record]]:
    """The records of files of `kind` (a format but "text"), each with its place.

    Raises `SettingsError` where there is none.
    """
    read = {"jsonl": _json, "dataset": _saved_dataset}.get(kind, _parquet)
    empty = True
    for file in files:
        for one in read(file, text_key):
            empty = False
            yield one
    if empty:
        raise SettingsError(f"{files[0]}: holds no records; name data in [trainer.data] path")


# ------------------------------------------------------------------------------- one record


def _passage(
    record: Mapping[str, Any], where: str, tokenizer: Tokenizer, text_key: str
) -> Passage | None:
    """None where there is nothing to learn. Raises `SettingsError` for a malformed one."""
    if record.get("messages") is not None:
        return _conversation(record["messages"], f"{where}: messages", tokenizer)
    if record.get("prompt") is not None and record.get("completion") is not None:
        return _pair(record["prompt"], record["completion"], where, tokenizer)
    if text_key not in record:
        raise SettingsError(_lacking(record, where, text_key))
    text = _as_text(record[text_key], f"{where}: {text_key}")
    return Passage(text=text, closes=True) if text else None


def _pair(prompt: object, completion: object, where: str, tokenizer: Tokenizer) -> Passage:
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation([*prompt, *completion], f"{where}: prompt, completion", tokenizer)
    before = _as_text(prompt, f"{where}: prompt")
    after = _as_text(completion, f"{where}: completion")
    if not after and not tokenizer.closing:
        raise SettingsError(f"{where}: completion is empty; there is nothing to learn from it")
    text = before + after
    return Passage(text=text, learned=((len(before), len(text)),), closes=True)


def _lacking(record: Mapping[str, Any], where: str, text_key: str) -> str:
    for one, other in (("prompt", "completion"), ("completion", "prompt")):
        if one in record and record.get(other) is None:
            remedy = (
                "a prompt alone teaches nothing: add the completion, or set [trainer.data] "
                f'text_key = "{one}" to learn it as a text'
                if one == "prompt"
                else f'add the prompt, which may be "", or set [trainer.data] text_key = "{one}"'
            )
            return f"{where}: has {one!r} but no {other!r}; {remedy}"
    return (
        f"{where}: has neither {text_key!r}, nor messages, nor prompt and completion, but "
        f"{', '.join(map(repr, record)) or 'nothing'}; name the key of the text in "
        "[trainer.data] text_key"
    )


def _conversation(messages: object, where: str, tokenizer: Tokenizer) -> Passage:
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
    try:
        return tokenizer.conversation(messages)
    except SettingsError as error:
        raise SettingsError(*(f"{where}: {problem}" for problem in error.problems)) from None


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
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        text = "a value nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------------------- one file


def _json(file: Path, text_key: str) -> Iterator[tuple[str, Record]]:
    """JSON Lines; a .json file may be one array of records instead."""
    if plain_name(file).endswith(".json") and _begins_with_bracket(file):
        return _json_array(file)
    return _json_lines(file)


def _begins_with_bracket(file: Path) -> bool:
    with open_file(file) as opened:
        try:
            start = opened.read(_LINE_BYTES)
        except READ_ERRORS as error:
            raise unreadable(file, "JSON", error) from None
    return start.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"[")


def _json_array(file: Path) -> Iterator[tuple[str, Record]]:
    """Read as a whole: an array cannot be read in part."""
    with open_file(file) as opened:
        try:
            text = opened.read().removeprefix(_BYTE_ORDER_MARK)
            found = parse_json(text)
        except READ_ERRORS as error:
            raise unreadable(file, "JSON", error) from None
        except ValueError as error:
            raise SettingsError(
                f"{file}: is not JSON: {error}; it must be one array of records, or one record in "
                "each line"
            ) from None
    for number, record in enumerate(found):
        where = f"{file}, record {number}"
        yield where, _as_record(record, where)


def _json_lines(file: Path) -> Iterator[tuple[str, Record]]:
    offset = 0
    with open_file(file) as opened:
        lines = enumerate(opened, 1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except READ_ERRORS as error:
                raise unreadable(file, "JSON Lines", error) from None
            where = f"{file}:{number}"
            if offset == 0:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            try:
                text = decoded(line, file, offset, f":{number}")
                if text.strip():
                    yield where, _as_record(parse_json(text), where)
            except SettingsError as error:
                yield where, error
            except ValueError as error:
                yield (
                    where,
                    SettingsError(
                        f"{where}: is not JSON: {error}; each line must be one whole object"
                    ),
                )
            offset += len(line)


def _as_record(value: object, where: str) -> Record:
    if isinstance(value, dict):
        return value
    return SettingsError(f"{where}: is {_shown(value)}, expected a JSON object")


def _parquet(file: Path, text_key: str) -> Iterator[tuple[str, Record]]:
    pyarrow = _pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            columns = columns_of(opened.schema_arrow.names, text_key, f"{file}")
            batches = opened.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns)
            yield from _rows(batches, f"{file}")
    except (pyarrow.ArrowException, OSError) as error:
        raise unreadable(file, "a Parquet file", error) from None


def _saved_dataset(folder: Path, text_key: str) -> Iterator[tuple[str, Record]]:
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


def _rows(batches: Iterable[Any], file: str) -> Iterator[tuple[str, Record]]:
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
        found = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise unreadable(file, "a file of a saved dataset", error) from None
    if not isinstance(found, dict):
        raise unreadable(file, "a file of a saved dataset", "it holds no object")
    return found


def decoded(block: bytes, file: Path, offset: int, line: str = "") -> str:
    """The text of some bytes of a file; raises `SettingsError` for what is no text."""
    try:
        text = block.decode()
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{file}{line}: is not UTF-8 (byte {offset + error.start} of the file); save it as "
            "UTF-8, or take it out of [trainer.data] path"
        ) from None
    if (place := block.find(0)) >= 0:
        raise SettingsError(
            f"{file}{line}: is no text: byte {offset + place} of the file is zero; save it as "
            "UTF-8, or take it out of [trainer.data] path"
        )
    return text
