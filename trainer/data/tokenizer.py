"""Text to token ids and back: bytes for models of our own, `tokenizers` for pretrained ones.

Knows neither models nor data; what a batch is made of is decided elsewhere. Importing this module
imports no package beyond the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.data.chat import MARKED, PLAIN, Chat, Message, Spans, Template, Turns, plain_turns
from trainer.settings import SettingsError

EXTRA = "pip install 'everstep[finetune]'"

_REACH = 2048

# The pre-tokenizers that GGUF files name, as regular expressions (llama.cpp, src/llama-vocab.cpp).
# None = the expression of GPT-2 that `tokenizers` has built in.
_DIGIT = r"\p{N}"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPLITS: Mapping[str, tuple[str | None, ...]] = {
    "gpt-2": (None,),
    "smollm": (_DIGIT, None),
    "qwen2": (_QWEN,),
    "llama-bpe": (_LLAMA,),
    "llama3": (_LLAMA,),
}
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A text that is encoded as one, and which of its characters are learned (None: all are).

    `opens`: what the tokenizer puts before a text comes before it; `closes`: what ends a text
    comes after it and is learned.
    """

    text: str
    learned: Spans | None = None
    opens: bool = True
    closes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Tokens, and from which character to before which one each of them reaches."""

    ids: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]


Encoded = tuple[list[int], list[bool] | None]
"""The ids of a passage, and of each whether it is learned; None: all are."""


class Tokenizer(Protocol):
    """What data and generation need of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """All ids lie below it."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end what a model generates, if there are any."""

    @property
    def opening(self) -> tuple[int, ...]:
        """What comes before a text."""

    @property
    def closing(self) -> tuple[int, ...]:
        """What comes after a text."""

    @property
    def reach(self) -> int:
        """How many characters on either side decide, as a rule, how a text is cut into tokens.

        0: each character stands by itself.
        """

    @property
    def fingerprint(self) -> str:
        """Another one where the same text or conversation may give other ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text to go on from: with what comes before it, without what ends it."""

    def encode_many(self, passages: Sequence[Passage]) -> list[Encoded]:
        """The ids of each passage, over all cores where that is possible.

        A token is learned if one of its characters is.
        """

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        """The ids of pieces of a text; nothing comes before or after them."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, what is malformed replaced."""

    def conversation(self, messages: Sequence[Message], *, reply: bool = False) -> Passage:
        """A conversation of which what the assistant says is learned, the end of its turn too.

        `reply` opens one more turn for the assistant. Raises `SettingsError`.
        """


@dataclass(frozen=True, slots=True)
class BytesTokenizer:
    """Every byte of UTF-8 is a token."""

    @property
    def vocabulary(self) -> int:
        return 256

    @property
    def ends(self) -> tuple[int, ...]:
        return ()

    @property
    def opening(self) -> tuple[int, ...]:
        return ()

    @property
    def closing(self) -> tuple[int, ...]:
        return ()

    @property
    def reach(self) -> int:
        return 0

    @property
    def fingerprint(self) -> str:
        return "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_many(self, passages: Sequence[Passage]) -> list[Encoded]:
        return [self._encoded(passage) for passage in passages]

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        raise AssertionError("a text of bytes is cut anywhere")

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def conversation(self, messages: Sequence[Message], *, reply: bool = False) -> Passage:
        text, learned = PLAIN.write(messages, reply=reply)
        return Passage(text=text, learned=learned)

    def _encoded(self, passage: Passage) -> Encoded:
        closing = list(self.closing if passage.closes else ())
        if passage.learned is None:
            return [*self.encode(passage.text), *closing], None
        ids: list[int] = []
        learned: list[bool] = []
        at = 0
        for start, end in (*passage.learned, (len(passage.text), len(passage.text))):
            for piece, counted in (
                (passage.text[at:start], False),
                (passage.text[start:end], True),
            ):
                found = piece.encode()
                ids += found
                learned += [counted] * len(found)
            at = end
        return ids + closing, learned + [True] * len(closing)


class SubwordTokenizer:
    """A tokenizer of the package `tokenizers`.

    What comes before and after a text is what its tokenizer.json says. Conversations are written
    by the template that came with the model, else in the format whose marks the vocabulary has
    (ChatML, Llama 3), else in plain turns.
    """

    def __init__(
        self,
        inner: Any,
        *,
        end: int | None,
        ends: Sequence[int] = (),
        template: Template | None = None,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """`end`: what ends a text, if tokenizer.json does not say; `ends`: see `Tokenizer`.

        `beside`: the files that belong to it, texts by names, for an export.
        """
        self.beside = beside or {}
        self._inner, self._end = inner, end
        self._ends = tuple(dict.fromkeys((*ends, *(() if end is None else (end,)))))
        known = inner.get_vocab(with_added_tokens=True)
        self._vocabulary = 1 + max(known.values(), default=-1)
        self.text: str = inner.to_str()
        """The tokenizer.json."""
        self._opening, closing = _around(inner)
        self._closing = closing or (() if end is None else (end,))
        # It adds what is known now, and may move the places of tokens.
        inner.post_processor = None
        self._chat: Chat = template or self._turns(known)

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    @property
    def end(self) -> int | None:
        """The id that ends a text, if there is one."""
        return self._end

    @property
    def ends(self) -> tuple[int, ...]:
        return self._ends

    @property
    def opening(self) -> tuple[int, ...]:
        return self._opening

    @property
    def closing(self) -> tuple[int, ...]:
        return self._closing

    @property
    def reach(self) -> int:
        return _REACH

    @functools.cached_property
    def fingerprint(self) -> str:
        parts = [self._end, self.text, self._chat.described]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return [*self._opening, *self._inner.encode(text, add_special_tokens=False).ids]

    def encode_many(self, passages: Sequence[Passage]) -> list[Encoded]:
        whole = all(passage.learned is None for passage in passages)
        # The fast form leaves out where in the text each token lies.
        encode = self._inner.encode_batch_fast if whole else self._inner.encode_batch
        found = encode([passage.text for passage in passages], add_special_tokens=False)
        return [self._framed(passage, one) for passage, one in zip(passages, found, strict=True)]

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        placed = []
        for found in self._inner.encode_batch(list(texts), add_special_tokens=False):
            offsets = found.offsets
            starts, ends = array("q"), array("q")
            for start, end in offsets:
                starts.append(start)
                ends.append(end)
            placed.append(Placed(ids=array("q", found.ids), starts=starts, ends=ends))
        return placed

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def conversation(self, messages: Sequence[Message], *, reply: bool = False) -> Passage:
        text, learned = self._chat.write(messages, reply=reply)
        return Passage(text=text, learned=learned, opens=not self._chat.complete)

    def piece(self, token: int) -> str:
        """How the vocabulary writes an id."""
        return str(self._inner.id_to_token(token))

    def token(self, piece: str) -> int | None:
        """The id that the vocabulary writes so, if there is one."""
        found = self._inner.token_to_id(piece)
        return None if found is None else int(found)

    def _framed(self, passage: Passage, found: Any) -> Encoded:
        before = self._opening if passage.opens else ()
        after = self._closing if passage.closes else ()
        ids = [*before, *found.ids, *after]
        if passage.learned is None:
            return ids, None
        inside = _learned(found.offsets, passage.learned)
        return ids, [False] * len(before) + inside + [True] * len(after)

    def _turns(self, known: Mapping[str, int]) -> Turns:
        for turns in MARKED:
            if turns.opening.partition("{")[0] in known and turns.end in known:
                return turns
        end = "" if self._end is None else self.piece(self._end)
        # Only a token that is found in a text can be written into one.
        written = bool(end) and self._inner.encode(end, add_special_tokens=False).ids == [self._end]
        return plain_turns(end if written else "")


def _around(inner: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a text."""
    found = inner.encode("a")
    added = [bool(one) for one in found.special_tokens_mask]
    before = next((place for place, one in enumerate(added) if not one), len(added))
    after = next((place for place, one in enumerate(reversed(added)) if not one), 0)
    return tuple(found.ids[:before]), tuple(found.ids[len(added) - after :])


def _learned(offsets: Sequence[tuple[int, int]], spans: Spans) -> list[bool]:
    """Of each token whether one of its characters lies in a span."""
    found = []
    number = 0
    for start, end in offsets:
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        found.append(number < len(spans) and spans[number][0] < max(end, start + 1))
    return found


def parse_tokenizer(text: str, where: str) -> Any:
    """What a tokenizer.json holds. Raises `SettingsError` for what cannot be read."""
    tokenizers = _library(where)
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise SettingsError(
            f"{where}: is no tokenizer that the package tokenizers can read: {error}"
        ) from None
    inner.no_truncation()
    inner.no_padding()
    return inner


def build_tokenizer(
    *,
    where: str,
    tokens: Sequence[str],
    merges: Sequence[str],
    kinds: Sequence[int],
    split: str,
    opening: int | None,
) -> Any:
    """Byte-level BPE from the vocabulary, merges, token types and pre-tokenizer of a GGUF file.

    `opening` comes before each text. Raises `SettingsError` for a pre-tokenizer that we do not
    know.
    """
    tokenizers = _library(where)
    if split not in _SPLITS:
        raise SettingsError(
            f"{where}: tokenizer.ggml.pre = {split!r} is not supported (known: "
            f"{', '.join(_SPLITS)}); use the model's folder with tokenizer.json instead"
        )
    try:
        pairs = [(left, right) for left, right in (one.split(" ") for one in merges)]
        bpe = tokenizers.models.BPE(
            vocab={token: index for index, token in enumerate(tokens)}, merges=pairs
        )
    except Exception as error:  # the library raises bare Exception
        raise SettingsError(f"{where}: the merges of the tokenizer are damaged: {error}") from None
    inner = tokenizers.Tokenizer(bpe)
    steps = [
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in _SPLITS[split]
        if pattern is not None
    ]
    byte_level = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=None in _SPLITS[split]
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*steps, byte_level])
    inner.decoder = tokenizers.decoders.ByteLevel()
    added = [
        tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    inner.add_special_tokens([one for one in added if one.special])
    inner.add_tokens([one for one in added if not one.special])
    if opening is not None and 0 <= opening < len(tokens):
        token = tokens[opening]
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, opening)]
        )
    return inner


def bytes_as_subwords() -> SubwordTokenizer:
    """The bytes tokenizer in the form of a tokenizer.json: 256 tokens, no merges, the same ids."""
    tokenizers = _library("tokenizer.json")
    vocabulary = {_letter(byte): byte for byte in range(256)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    return SubwordTokenizer(inner, end=None)


def _letter(byte: int) -> str:
    """How byte-level BPE writes a byte: itself where it can be seen, else a letter from 256 on.

    Radford et al., 2019 (the table of GPT-2).
    """
    if _seen(byte):
        return chr(byte)
    return chr(256 + sum(not _seen(one) for one in range(byte)))


def _seen(byte: int) -> bool:
    return 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255


def _library(where: object) -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.processors
    except ModuleNotFoundError:
        raise SettingsError(
            f"{where}: the package tokenizers is not installed, and a pretrained model needs it: "
            f"{EXTRA}"
        ) from None
    return tokenizers
