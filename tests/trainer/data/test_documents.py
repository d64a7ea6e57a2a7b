"""From files to tokens, and what is said of files that are not what they should be."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from trainer.config import DataSettings
from trainer.data.documents import BLOCK_BYTES, read_records, read_texts, records_of
from trainer.data.encoding import Part
from trainer.data.files import find_files, format_of
from trainer.data.source import open_source
from trainer.data.tokenizer import BytesTokenizer
from trainer.settings import SettingsError


class Ended(BytesTokenizer):
    """Bytes, and one more token that ends a text."""

    vocabulary = 257
    closing = (256,)


def read(kind: str, file: Path, text_key: str = "text") -> list[Part]:
    return list(read_records(records_of(kind, [file], text_key), Ended(), text_key))


def learned(part: Part) -> str:
    """What counts of a document; | is the end of a text."""
    counts = part.counts or [True] * len(part.tokens)
    kept = [token for token, counted in zip(part.tokens, counts, strict=True) if counted]
    return "".join("|" if token == 256 else chr(token) for token in kept)


def save_dataset(folder: Path, rows: Sequence[Mapping[str, Any]], shards: int = 1) -> None:
    """What `Dataset.save_to_disk` of Hugging Face writes."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05}-of-{shards:05}.arrow" for index in range(shards)]
    share = -(-len(rows) // shards)
    for index, name in enumerate(names):
        table = pa.Table.from_pylist(rows[index * share : (index + 1) * share])
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as w,
        ):
            w.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


RECORDS: list[tuple[Mapping[str, Any], str]] = [
    ({"text": "one two"}, "one two|"),
    ({"prompt": "2+2=", "completion": "4"}, "4|"),
    (
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ]
        },
        "hello\n\n",
    ),
    (
        {
            "prompt": [{"role": "user", "content": "hi"}],
            "completion": [{"role": "assistant", "content": "yes"}],
        },
        "yes\n\n",
    ),
]


@pytest.mark.parametrize(("record", "wanted"), RECORDS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_what_counts_is_the_text_the_completion_or_what_the_assistant_says(
    tmp_path: Path, kind: str, record: Mapping[str, Any], wanted: str
) -> None:
    """A model that is trained on the user's questions learns to ask them."""
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps(record) + "\n")
    elif kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist([record]), path)
    else:
        save_dataset(path, [record])
    (part,) = read(kind, path)
    assert learned(part) == wanted
    assert part.ends


def test_records_keep_their_order_over_lines_and_shards(tmp_path: Path) -> None:
    """The order is the only name that a sample has."""
    rows = [{"text": f"document {number}", "other": number} for number in range(2500)]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    save_dataset(tmp_path / "saved", rows, shards=3)
    wanted = [f"document {number}|" for number in range(2500)]
    assert [learned(part) for part in read("jsonl", lines)] == wanted
    assert [learned(part) for part in read("parquet", tmp_path / "a.parquet")] == wanted
    assert [learned(part) for part in read("dataset", tmp_path / "saved")] == wanted


def test_of_several_splits_the_one_to_train_on_is_read(tmp_path: Path) -> None:
    """`DatasetDict.save_to_disk` writes a folder a split, and "test" is not for training."""
    save_dataset(tmp_path / "all" / "train", [{"text": "learn"}])
    save_dataset(tmp_path / "all" / "test", [{"text": "hide"}])
    marks = tmp_path / "all" / "dataset_dict.json"
    marks.write_text(json.dumps({"splits": ["train", "test"]}))
    assert [learned(part) for part in read("dataset", tmp_path / "all")] == ["learn|"]
    marks.write_text(json.dumps({"splits": ["test"]}))
    with pytest.raises(SettingsError, match='holds the splits test and none called "train"'):
        read("dataset", tmp_path / "all")


def test_empty_texts_are_passed_over_and_another_key_can_be_named(tmp_path: Path) -> None:
    """Every second line of WikiText is empty."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": ""}\n{"body": "x"}\n')
    assert [learned(part) for part in read("jsonl", file, "body")] == ["x|"]


def texts(
    files: list[Path], *, fraction: float = 0.0, bytes_max: int | None = None
) -> Iterator[tuple[bool, str]]:
    """(held out, text) of each document."""
    text = ""
    for part in read_texts(files, Ended(), held_out_fraction=fraction, bytes_max=bytes_max):
        ids = bytearray()
        for token in part.tokens:
            ids += b"|" if token == 256 else bytes([token])
        text += ids.decode()
        if part.ends:
            yield part.held_out, text
            text = ""


def test_the_tail_of_each_file_is_a_document_of_its_own(tmp_path: Path) -> None:
    """What is held out must not be joined to what is trained on, and no character be halved."""
    (tmp_path / "a.txt").write_text("a" * 90 + "é" * 5)
    (tmp_path / "b.txt").write_text("b" * 100)
    (tmp_path / "c.txt").write_text("")
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    assert list(texts(files, fraction=0.05)) == [
        (False, "a" * 90 + "ééé|"),
        (True, "éé|"),
        (False, "b" * 95 + "|"),
        (True, "b" * 5 + "|"),
    ]
    assert list(texts(files, bytes_max=120)) == [
        (False, "a" * 90 + "é" * 5 + "|"),
        (False, "b" * 20 + "|"),
    ]


def test_a_long_text_is_read_in_blocks_and_comes_out_whole(tmp_path: Path) -> None:
    """A text larger than memory must not be read at once, and no word may fall between blocks."""
    lines = "".join(f"line {number}: ünïcode\n" for number in range(100_000))
    endless = "ß" * BLOCK_BYTES
    (tmp_path / "lines.txt").write_text(lines)
    (tmp_path / "endless.txt").write_text(endless)
    found = list(texts([tmp_path / "lines.txt", tmp_path / "endless.txt"]))
    assert found == [(False, lines + "|"), (False, endless + "|")]


def jsonl(text: str | bytes) -> Mapping[str, bytes]:
    return {"bad.jsonl": text if isinstance(text, bytes) else text.encode()}


def parquet(rows: list[Mapping[str, Any]]) -> Mapping[str, bytes]:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), sink)
    return {"bad.parquet": sink.getvalue().to_pybytes()}


MALFORMED: list[tuple[str, Mapping[str, bytes], str]] = [
    ("jsonl", jsonl('{"text": "a"}\n{"text": \n'), r"bad\.jsonl:2: is not JSON: Expecting value"),
    ("jsonl", jsonl('{"text": "a"}\n["b"]\n'), r'bad\.jsonl:2: is \["b"\], expected a JSON object'),
    ("jsonl", jsonl('{"txt": "a"}'), r"bad\.jsonl:1: has neither 'text'.*but 'txt'; name the key"),
    ("jsonl", jsonl('{"text": 5}'), r"bad\.jsonl:1: text: is 5, expected a text"),
    ("jsonl", jsonl('{"text": null}'), r"text: is missing or null, expected a text"),
    ("jsonl", jsonl('{"text": "\\ud800"}'), r"bad\.jsonl:1: text: character 0 is half of a sur"),
    ("jsonl", jsonl('{"prompt": "a", "completion": 1}'), r":1: completion: is 1, expected a text"),
    ("jsonl", jsonl('{"messages": []}'), r":1: messages: is \[\], expected a list of messages"),
    (
        "jsonl",
        jsonl('{"messages": ["hi"]}'),
        r"messages\[0\]: is \"hi\", expected role and content",
    ),
    ("jsonl", jsonl('{"messages": [{"role": "user"}]}'), r"messages\[0\]\.content: is missing"),
    (
        "jsonl",
        jsonl('{"messages": [{"role": "user", "content": "hi"}]}'),
        r'nothing in it has the role "assistant"',
    ),
    (
        "jsonl",
        jsonl(b'{"text": "a"}\n{"text": "\xe9"}'),
        r"bad\.jsonl:2: is not UTF-8 \(byte 24 of",
    ),
    ("jsonl", jsonl("\n\n"), r"bad\.jsonl: holds no records"),
    (
        "jsonl",
        jsonl('{"text": "a"}\n{"n": ' + "7" * 5000 + "}"),
        r"bad\.jsonl:2: is not JSON: a number with more than 4300 digits; each line must be",
    ),
    (
        "jsonl",
        jsonl("[" * 100_000 + "]" * 100_000),
        r"bad\.jsonl:1: is not JSON: nested too deeply; each line must be one whole object",
    ),
    ("jsonl", jsonl('{"\\udc80": 1}'), r"bad\.jsonl:1: has neither 'text'.*but '\\udc80'"),
    (
        "jsonl",
        jsonl('{"messages": [{"role": "\\ud800", "content": ""}]}'),
        r"messages\[0\]\.role: character 0 is half of a surrogate pair",
    ),
    (
        "jsonl",
        jsonl('{"prompt": "x"}'),
        r":1: has 'prompt' but no 'completion'; a prompt alone teaches nothing",
    ),
    (
        "jsonl",
        jsonl('{"prompt": "x", "completion": null}'),
        r":1: has 'prompt' but no 'completion'",
    ),
    (
        "jsonl",
        jsonl('{"completion": "x"}'),
        r":1: has 'completion' but no 'prompt'; add the prompt, which may be \"\"",
    ),
    ("parquet", {"bad.parquet": b""}, r"bad\.parquet: cannot be read as a Parquet file"),
    (
        "parquet",
        {"bad.parquet": b"PAR1 no PAR1"},
        r"bad\.parquet: cannot be read as a Parquet file",
    ),
    ("parquet", parquet([{"txt": "a"}]), r"bad\.parquet: has neither a column 'text'.*but 'txt'"),
    ("parquet", parquet([{"text": "a"}, {"text": None}]), r"bad\.parquet, row 1: text: is missing"),
    ("parquet", parquet([{"text": b"a"}]), r"bad\.parquet, row 0: text: is .*, expected a text"),
    (
        "dataset",
        {"bad.dataset/state.json": b"{"},
        r"state\.json: cannot be read as a file of a sav",
    ),
    (
        "dataset",
        {"bad.dataset/state.json": b'{"_data_files": [{"filename": "gone.arrow"}]}'},
        r"gone\.arrow: cannot be read as an Arrow file",
    ),
    (
        "dataset",
        {
            "bad.dataset/state.json": b'{"_data_files": [{"filename": "a.arrow"}]}',
            "bad.dataset/a.arrow": b"no arrow at all",
        },
        r"a\.arrow: cannot be read as an Arrow file",
    ),
]


@pytest.mark.parametrize(("kind", "files", "complaint"), MALFORMED)
def test_what_is_malformed_is_named_with_its_place(
    tmp_path: Path, kind: str, files: Mapping[str, bytes], complaint: str
) -> None:
    """In a million lines, "invalid JSON" is no help; and no retry can change it."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=complaint) as caught:
        read(kind, tmp_path / f"bad.{kind}")
    assert len(caught.value.problems) == 1


def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path: Path) -> None:
    """Latin-1 read as something else would be trained on as noise."""
    file = tmp_path / "latin.txt"
    file.write_bytes(b"caf\xe9 au lait\n")
    with pytest.raises(SettingsError, match=r"latin\.txt: is not UTF-8 \(byte 3 of the file\)"):
        list(texts([file]))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A folder, or a file of another user."""
    with pytest.raises(SettingsError, match="cannot be read as text"):
        list(texts([tmp_path / "gone.txt"]))


def test_the_first_ten_mistakes_are_told_and_the_others_counted(tmp_path: Path) -> None:
    """Of a million lines with a thousand bad ones, each start told one."""
    lines = [json.dumps({"text": str(n)}) if n % 2 else "{" for n in range(3000)]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(SettingsError) as caught:
        read("jsonl", tmp_path / "bad.jsonl")
    problems = caught.value.problems
    assert len(problems) == 11
    assert [f"bad.jsonl:{number}: is not JSON" in problems[number // 2] for number in range(1, 20)]
    assert problems[-1] == "1490 more records: 1500 of 3000 cannot be used in all"


ROWS = [{"text": "one"}, {"text": "twö"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PACKED: dict[str, bytes] = {
    "a.jsonl.gz": gzip.compress(LINES),
    "a.ndjson.bz2": bz2.compress(LINES),
    "a.jsonl.xz": lzma.compress(LINES),
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "b.json": b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode(),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "lines.json": LINES,
}


@pytest.mark.parametrize("name", PACKED)
def test_records_are_read_from_packed_files_and_from_arrays(name: str, tmp_path: Path) -> None:
    """The compressed bytes themselves were learned, without a word."""
    (tmp_path / name).write_bytes(PACKED[name])
    settings = DataSettings.model_validate({"path": name})
    kind = format_of(settings, tmp_path)
    assert kind == "jsonl"
    (file,) = find_files(settings, kind, tmp_path)
    assert [bytes(part.tokens[:-1]).decode() for part in read(kind, file)] == ["one", "twö"]


def test_packed_text_is_unpacked_before_its_tail_is_held_out(tmp_path: Path) -> None:
    """Its length is that of the text."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a" * 90 + b"b" * 10))
    found = list(texts([tmp_path / "a.txt.gz"], fraction=0.1))
    assert found == [(False, "a" * 90 + "|"), (True, "b" * 10 + "|")]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", random.Random(0).randbytes(5000), r"a\.txt: is not UTF-8"),
        ("a.txt", "utf-16".encode("utf-16-le") * 50, r"a\.txt: is no text: byte 1 of the file is"),
        ("a.txt", gzip.compress(LINES), r"a\.txt: is compressed by gzip; let its name end in \.gz"),
        ("a.txt", b"\x28\xb5\x2f\xfd....", r"a\.txt: is compressed by zstd, which is not read"),
        ("a.txt", b"PK\x03\x04....", r"a\.txt: is a zip archive, which is not read; unpack it"),
        ("a.txt.gz", b"no gzip at all", r"a\.txt\.gz: cannot be read as text: Not a gzipped file"),
        ("a.txt.gz", gzip.compress(LINES * 99)[:-20], r"a\.txt\.gz: cannot be read as text: Compr"),
        ("a.txt.xz", lzma.compress(LINES * 99)[:-20], r"a\.txt\.xz: cannot be read as text"),
        (
            "a.jsonl.gz",
            gzip.compress(LINES * 99)[:-20],
            r"a\.jsonl\.gz: cannot be read as JSON Lin",
        ),
        ("a.json", b'[{"text": "a"}', r"a\.json: is not JSON: .*; it must be one array of rec"),
        ("a.json", b"[5]", r"a\.json, record 0: is 5, expected a JSON object"),
    ],
)
@pytest.mark.parametrize("packing", ["auto", "documents"])
def test_what_is_no_text_is_refused_by_name(
    name: str, content: bytes, complaint: str, packing: str, tmp_path: Path
) -> None:
    """Noise was learned as if it were text: the quick way for bytes did not look at them."""
    (tmp_path / name).write_bytes(content)
    settings = DataSettings.model_validate(
        {"path": name, "packing": packing, "batch_size": 1, "sequence_length": 8}
    )
    with pytest.raises(SettingsError, match=complaint):
        open_source(settings, BytesTokenizer(), tmp_path, seed=1, held_out_batches=1)


def test_linked_folders_are_followed_once_and_loops_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of a data set lay behind a link to another disk, and was left out without a word."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "far.jsonl").write_bytes(LINES)
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "near.jsonl").write_bytes(LINES)
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "data" / "sub" / "again").symlink_to(tmp_path / "disk")
    (tmp_path / "data" / "sub" / "up").symlink_to(tmp_path / "data")
    settings = DataSettings.model_validate({"path": "data"})
    assert format_of(settings, tmp_path) == "jsonl"
    found = find_files(settings, "jsonl", tmp_path)
    names = [path.relative_to(tmp_path / "data").as_posix() for path in found]
    assert names == ["linked/far.jsonl", "near.jsonl"]
    said = capsys.readouterr().out
    assert said.count("linked_folder_skipped") == 2
    assert "sub/again" in said
    assert "sub/up" in said


def test_a_file_about_the_data_does_not_make_a_folder_of_texts_one_of_records(
    tmp_path: Path,
) -> None:
    """A README and a license.json lie beside many a text."""
    (tmp_path / "about.json").write_text("{}")
    settings = DataSettings.model_validate({"path": "."})
    assert format_of(settings, tmp_path) == "jsonl"
    (tmp_path / "a.txt").write_text("text")
    assert format_of(settings, tmp_path) == "text"
    assert [file.name for file in find_files(settings, "text", tmp_path)] == ["a.txt"]


def test_a_pipe_among_the_files_is_refused_by_name(tmp_path: Path) -> None:
    """A start waited for ever for somebody to write into it, and so did whoever prepared data."""
    (tmp_path / "near.jsonl").write_bytes(LINES)
    os.mkfifo(tmp_path / "pipe.jsonl")
    settings = DataSettings.model_validate({"path": "."})
    with pytest.raises(SettingsError, match=r"pipe\.jsonl is a pipe, a socket or a device; take"):
        find_files(settings, format_of(settings, tmp_path), tmp_path)
