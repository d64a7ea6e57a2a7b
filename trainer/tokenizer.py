"""Text to token ids and back: bytes for models of our own, `tokenizers` for pretrained ones.

Knows neither models nor data; what a batch is made of is decided elsewhere. Importing this module
imports no package beyond the standard library.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.settings import SettingsError

EXTRA = "pip install 'everstep[finetune]'"

Message = Mapping[str, str]
"""One turn of a conversation: "role" ("system", "user", "assistant", ...) and "content"."""

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


class Tokenizer(Protocol):
    """What data and generation need of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """All ids lie below it."""

    @property
    def end(self) -> int | None:
        """The id that ends a text, if there is one."""

    @property
    def fingerprint(self) -> str:
        """Another one where the same text may give other ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text; nothing is put before or after it."""

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, over all cores where that is possible."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, what is malformed replaced."""

    def chat(
        self, messages: Sequence[Message], *, reply: bool = False
    ) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and for each whether the assistant says it.

        What ends the assistant's turn is said by the assistant; the role's name is not. `reply`
        opens one more turn for the assistant.
        """

    def pieces(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """The texts that a conversation is made of, and whether the assistant says them.

        Each is encoded by itself, so that no token is half the assistant's.
        """


@dataclass(frozen=True, slots=True)
class BytesTokenizer:
    """Every byte of UTF-8 is a token."""

    @property
    def vocabulary(self) -> int:
        return 256

    @property
    def end(self) -> int | None:
        return None

    @property
    def fingerprint(self) -> str:
        return "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def chat(
        self, messages: Sequence[Message], *, reply: bool = False
    ) -> tuple[list[int], list[bool]]:
        return _chat(self, _PLAIN, messages, reply)

    def pieces(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        return _pieces(_PLAIN, messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turns:
    """How a turn of a conversation is written; `{role}` stands for who says it."""

    opening: str
    end: str
    gap: str = ""


_PLAIN = _Turns(opening="{role}:\n", end="\n\n")
_FORMATS = (
    _Turns(opening="<|im_start|>{role}\n", end="<|im_end|>", gap="\n"),
    _Turns(opening="<|start_header_id|>{role}<|end_header_id|>\n\n", end="<|eot_id|>"),
)
"""ChatML (SmolLM2, Qwen) and Llama 3; a model whose vocabulary lacks the marks gets plain turns."""


class SubwordTokenizer:
    """A tokenizer of the package `tokenizers`.

    Conversations are written in the format whose marks the vocabulary has: ChatML, Llama 3, or
    plain turns. The template that came with a model is not run (it cannot say which ids are the
    assistant's), and no system prompt is added that was not given.
    """

    def __init__(self, inner: Any, *, end: int | None) -> None:
        self._inner, self._end = inner, end
        known = inner.get_vocab(with_added_tokens=True)
        self._vocabulary = 1 + max(known.values(), default=-1)
        self._turns = next(
            (
                one
                for one in _FORMATS
                if one.opening.partition("{")[0] in known and one.end in known
            ),
            _PLAIN,
        )

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    @property
    def end(self) -> int | None:
        return self._end

    @functools.cached_property
    def _text(self) -> str:
        text: str = self._inner.to_str()
        return text

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._end} {self._text}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast form leaves out what we do not need: where in the text each token lies.
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(one.ids) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def chat(
        self, messages: Sequence[Message], *, reply: bool = False
    ) -> tuple[list[int], list[bool]]:
        return _chat(self, self._turns, messages, reply)

    def pieces(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        return _pieces(self._turns, messages)

    def piece(self, token: int) -> str:
        """How the vocabulary writes an id."""
        return str(self._inner.id_to_token(token))

    def save(self, path: Path) -> None:
        """Write it as tokenizer.json."""
        path.write_text(self._text, encoding="utf-8")


def _pieces(turns: _Turns, messages: Sequence[Message]) -> list[tuple[str, bool]]:
    found = []
    for message in messages:
        said = message["role"] == "assistant"
        found += [
            (turns.opening.format(role=message["role"]), False),
            (message["content"] + turns.end, said),
            (turns.gap, False),
        ]
    return found


def _chat(
    tokenizer: Tokenizer, turns: _Turns, messages: Sequence[Message], reply: bool
) -> tuple[list[int], list[bool]]:
    pieces = _pieces(turns, messages)
    if reply:
        pieces.append((turns.opening.format(role="assistant"), False))
    ids: list[int] = []
    counts: list[bool] = []
    for (_, said), piece in zip(
        pieces, tokenizer.encode_many([text for text, _ in pieces]), strict=True
    ):
        ids += piece
        counts += [said] * len(piece)
    return ids, counts


def read_tokenizer(path: Path, *, end: int | None) -> SubwordTokenizer:
    """From a tokenizer.json. Raises `SettingsError` where it is missing or malformed."""
    tokenizers = _library(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: there is no such file; put the tokenizer.json of the model beside its weights"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise SettingsError(
            f"{path}: is no tokenizer that the package tokenizers can read: {error}"
        ) from None
    inner.no_truncation()
    inner.no_padding()
    return SubwordTokenizer(inner, end=end)


def build_tokenizer(
    *,
    where: str,
    tokens: Sequence[str],
    merges: Sequence[str],
    kinds: Sequence[int],
    split: str,
    end: int | None,
) -> SubwordTokenizer:
    """Byte-level BPE from the vocabulary, merges, token types and pre-tokenizer of a GGUF file.

    Raises `SettingsError` for a pre-tokenizer that we do not know.
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
    return SubwordTokenizer(inner, end=end)


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


def end_of_text(folder: Path, config: Mapping[str, Any]) -> int | None:
    """The id that ends a text, from config.json or generation_config.json of a model's folder."""
    found = config.get("eos_token_id")
    generation = folder / "generation_config.json"
    if found is None and generation.is_file():
        try:
            found = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError):
            raise SettingsError(f"{generation}: is not a JSON object; fetch it anew") from None
    if isinstance(found, list):
        found = found[0] if found else None
    return found if isinstance(found, int) else None


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
    except ModuleNotFoundError:
        raise SettingsError(
            f"{where}: the package tokenizers is not installed, and a pretrained model needs it: "
            f"{EXTRA}"
        ) from None
    return tokenizers
