"""Texts are cut into the tokens that the tokenizer of the model makes of the whole, everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import tokenizers_made as made
from trainer.data.documents import BLOCK_BYTES, read_records, read_texts, records_of
from trainer.data.tokenizer import SubwordTokenizer
from trainer.settings import SettingsError

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra finetune")
pytest.importorskip("jinja2", reason="needs the extra finetune")

from trainer.language.pretrained.tokenizer_files import read_tokenizer  # noqa: E402

KINDS = tuple(made.MADE)


def opened(folder: Path, kind: str) -> tuple[SubwordTokenizer, Any]:
    """Ours, and that of the package `tokenizers` from the same file."""
    config = made.write(folder, kind)
    ours = read_tokenizer(folder, config)
    return ours, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def tokens_of(parts: Any) -> list[int]:
    return [token for part in parts for token in part.tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_longer_than_a_block_has_no_token_that_its_tokenizer_does_not_see(
    kind: str, tmp_path: Path
) -> None:
    """Each border of 256 KiB put a space into the text that is not there."""
    ours, whole = opened(tmp_path / "model", kind)
    text = (made.TEXT + "\n\n   no end of it \n" + " " * 5000 + "ü" * 4000) * 16
    assert len(text.encode()) > 2 * BLOCK_BYTES
    file = tmp_path / "text.txt"
    file.write_text(text)
    found = tokens_of(read_texts([file], ours, held_out_fraction=0.0, bytes_max=None))
    assert found == [*whole.encode(text).ids, *ours.closing]


@pytest.mark.parametrize("letter", ["=", "a", " ", "\n"])
def test_a_text_of_one_letter_has_the_tokens_of_the_whole(letter: str, tmp_path: Path) -> None:
    """No place in it says where a token begins: only the whole does."""
    ours, whole = opened(tmp_path / "model", "bytes-chatml")
    text = letter * (2 * BLOCK_BYTES + 12_345)
    file = tmp_path / "text.txt"
    file.write_text(text)
    found = tokens_of(read_texts([file], ours, held_out_fraction=0.0, bytes_max=None))
    assert found == [*whole.encode(text).ids, *ours.closing]


def read_one(folder: Path, record: dict[str, Any], ours: SubwordTokenizer) -> tuple[list[int], str]:
    """All ids of a record, and the text of those that count."""
    file = folder / "data.jsonl"
    file.write_text(json.dumps(record) + "\n")
    (part,) = read_records(records_of("jsonl", [file], "text"), ours, "text")
    counts = part.counts or [True] * len(part.tokens)
    learned = [token for token, counted in zip(part.tokens, counts, strict=True) if counted]
    return list(part.tokens), "".join(ours.piece(token) for token in learned)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt", "completion", "learned"),
    [
        ("def f(", "a): on", "a):▁on"),
        ("The square of 3 is ", "9", "▁9"),
        ("", "all of it", "▁all▁of▁it"),
    ],
)
def test_a_prompt_and_its_completion_are_cut_as_the_text_that_they_make(
    kind: str, prompt: str, completion: str, learned: str, tmp_path: Path
) -> None:
    """Encoded apart, "def f(" and "a): on" get a space between them that nobody wrote."""
    ours, whole = opened(tmp_path / "model", kind)
    record = {"prompt": prompt, "completion": completion}
    ids, found = read_one(tmp_path, record, ours)
    assert ids == [*whole.encode(prompt + completion).ids, *ours.closing]
    end = "".join(ours.piece(token) for token in ours.closing)
    wanted = (learned + end).removeprefix("▁")
    assert found.replace("Ġ", "▁").removeprefix("▁") == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_begins_as_the_tokenizer_of_its_model_begins_texts(
    kind: str, tmp_path: Path
) -> None:
    """Llama 3 was trained further without its first token, and met it again in the export."""
    ours, whole = opened(tmp_path / "model", kind)
    for text in made.NASTY[1:]:
        ids, _ = read_one(tmp_path, {"text": text}, ours)
        assert ids == [*whole.encode(text).ids, *ours.closing]
        assert ours.encode(text) == whole.encode(text).ids
    begins = kind.startswith("spm") or kind == "bytes-llama3"
    assert len(ours.opening) == begins


LEARNED = {
    "spm-legacy": "It▁is▁9,▁▁of▁course.\n</s>That▁one▁is▁not.</s>",
    "spm-chat": "▁It▁is▁9,▁▁of▁course.▁</s>▁That▁one▁is▁not.▁</s>",
    "bytes-chatml": "It▁is▁9,▁▁of▁course.\n<|im_end|>That▁one▁is▁not.<|im_end|>",
    "bytes-llama3": "It▁is▁9,▁▁of▁course.<|eot_id|>That▁one▁is▁not.<|eot_id|>",
}


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_conversation_the_words_of_the_assistant_and_their_end_are_learned(
    kind: str, tmp_path: Path
) -> None:
    """A model that never learned to end its turn talks on for the user."""
    ours, whole = opened(tmp_path / "model", kind)
    ids, found = read_one(tmp_path, {"messages": made.TALK}, ours)
    readable = re.sub(r"<0x(..)>", lambda byte: chr(int(byte[1], 16)), found)
    readable = readable.replace("Ġ", "▁").replace("Ċ", "\n")
    assert readable == LEARNED[kind]
    text = ours.conversation(made.TALK).text
    assert ids == whole.encode(text, add_special_tokens=kind == "spm-legacy").ids


def test_a_template_that_leaves_words_out_is_refused_with_the_place(tmp_path: Path) -> None:
    """What is not written cannot be learned, and a guess would be learned without a word."""
    config = made.write(tmp_path / "model", "bytes-chatml")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
    )
    ours = read_tokenizer(tmp_path / "model", config)
    with pytest.raises(SettingsError, match=r"data\.jsonl:1: messages: .*does not write it as it"):
        read_one(tmp_path, {"messages": made.TALK}, ours)


def test_a_template_that_refuses_is_named_with_its_reason(tmp_path: Path) -> None:
    """Llama 2 wants user and assistant in turns."""
    ours, _ = opened(tmp_path / "model", "spm-chat")
    twice = [made.TALK[1], made.TALK[1], made.TALK[2]]
    with pytest.raises(SettingsError, match=r"data\.jsonl:1: messages: .*roles must alternate"):
        read_one(tmp_path, {"messages": twice}, ours)


def test_a_template_can_neither_reach_files_nor_the_date(tmp_path: Path) -> None:
    """It came with a model, and the same data must be the same tokens tomorrow."""
    config = made.write(tmp_path / "model", "bytes-chatml")
    for source, complaint in (
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses the conversation"),
        ("{{ strftime_now('%Y') }}", "strftime_now"),
        ("{% for %}", "is damaged"),
    ):
        (tmp_path / "model" / "chat_template.jinja").write_text(source)
        with pytest.raises(SettingsError, match=complaint):
            read_tokenizer(tmp_path / "model", config).conversation(made.TALK)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fingerprint_follows_whatever_decides_the_tokens(kind: str, tmp_path: Path) -> None:
    """Data that were tokenised with another template must not be taken for these."""
    ours, _ = opened(tmp_path / "model", kind)
    again, _ = opened(tmp_path / "again", kind)
    assert ours.fingerprint == again.fingerprint
    (tmp_path / "again" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    other = read_tokenizer(tmp_path / "again", made.write(tmp_path / "again", kind))
    assert other.fingerprint != ours.fingerprint
