"""Conversations as text: by the template that came with a model, or by turns of our own.

Says of each character whether the assistant says it. Knows no token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from trainer.settings import SettingsError

Message = Mapping[str, Any]
"""One turn of a conversation: "role" ("system", "user", "assistant", ...) and "content"."""

Spans = tuple[tuple[int, int], ...]
"""Ranges of characters, in order, that do not overlap."""


class Chat(Protocol):
    """How a conversation is written."""

    @property
    def complete(self) -> bool:
        """Whether the text has in it what the tokenizer would put before a text."""

    @property
    def described(self) -> str:
        """Another one where the same conversation may be another text."""

    def write(self, messages: Sequence[Message], *, reply: bool = False) -> tuple[str, Spans]:
        """The text, and what of it the assistant says; `reply` opens one more turn for it.

        Raises `SettingsError` for a conversation that cannot be written.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """A `Chat` in which every turn looks alike; `{role}` stands for the role.

    `end` ends a turn of the assistant and is said by it. `others_end` ends any other turn, `gap`
    follows both. No system prompt is added that was not given.
    """

    opening: str
    end: str
    others_end: str
    gap: str = ""

    @property
    def complete(self) -> bool:
        """It is not: turns know nothing of what begins a text."""
        return False

    @property
    def described(self) -> str:
        """See `Chat`."""
        return repr(self)

    def write(self, messages: Sequence[Message], *, reply: bool = False) -> tuple[str, Spans]:
        """See `Chat`."""
        text, spans = "", []
        for message in messages:
            text += self.opening.format(role=message["role"])
            start = len(text)
            if message["role"] == "assistant":
                text += message["content"] + self.end
                spans.append((start, len(text)))
            else:
                text += message["content"] + self.others_end
            text += self.gap
        if reply:
            text += self.opening.format(role="assistant")
        return text, tuple(spans)


PLAIN = Turns(opening="{role}:\n", end="\n\n", others_end="\n\n")
MARKED = (
    Turns(opening="<|im_start|>{role}\n", end="<|im_end|>", others_end="<|im_end|>", gap="\n"),
    Turns(
        opening="<|start_header_id|>{role}<|end_header_id|>\n\n",
        end="<|eot_id|>",
        others_end="<|eot_id|>",
    ),
)
"""ChatML (SmolLM2, Qwen) and Llama 3."""


def plain_turns(end: str) -> Turns:
    """Turns for a vocabulary without marks for them; `end` is what ends a text, if anything."""
    if not end:
        return PLAIN
    return Turns(opening=PLAIN.opening, end=end, others_end="", gap="\n\n")


class Template:
    """A `Chat` written by the Jinja template that came with a model, as transformers runs it.

    It runs in Jinja's sandbox and does not learn the date, so that the same conversation is the
    same text tomorrow and on every node.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """`tokens`: the special tokens by their names ("bos_token", ...)."""
        self._where, self._source, self._tokens = where, source, dict(tokens)
        self._jinja = _library(where)
        try:
            self._compiled = _environment(self._jinja).from_string(source)
        except self._jinja.TemplateError as error:
            raise SettingsError(f"{where}: the chat template is damaged: {error}") from None

    @property
    def complete(self) -> bool:
        """It is: a template writes what begins a text."""
        return True

    @property
    def described(self) -> str:
        """See `Chat`."""
        return json.dumps([self._source, self._tokens], sort_keys=True)

    def write(self, messages: Sequence[Message], *, reply: bool = False) -> tuple[str, Spans]:
        """See `Chat`.

        What the assistant says begins where its turn would be opened for it, and ends with what
        the template puts after its words, white space left out.
        """
        text = self._rendered(messages, reply)
        spans: list[tuple[int, int]] = []
        at = 0
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                at = self._span(text, messages, number, at, spans)
        return text, tuple(spans)

    def _span(
        self,
        text: str,
        messages: Sequence[Message],
        number: int,
        at: int,
        spans: list[tuple[int, int]],
    ) -> int:
        words = str(messages[number]["content"]).strip()
        opened = self._rendered(messages[:number], True) if number else ""
        if not (text.startswith(opened) and len(opened) >= at):
            opened = ""  # a template that writes earlier turns in another way
        place = text.find(words, max(at, len(opened)))
        # What follows these words where they are the last: the end of the turn.
        alone = self._rendered(messages[: number + 1], False)
        found = alone.rfind(words)
        if place < 0 or found < 0:
            raise SettingsError(
                f"messages[{number}].content: the chat template of {self._where} does not write it "
                "as it is, so that nobody can tell what is to be learned; change the conversation "
                "or the template"
            )
        end = place + len(words)
        follows = alone[found + len(words) :]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text[end:], follows, strict=False))
        end += len(follows[: sum(1 for _ in same)].rstrip())
        spans.append((len(opened) or place, end))
        return end

    def _rendered(self, messages: Sequence[Message], reply: bool) -> str:
        given = [dict(message) for message in messages]
        try:
            return str(
                self._compiled.render(
                    messages=given,
                    tools=None,
                    documents=None,
                    add_generation_prompt=reply,
                    **self._tokens,
                )
            )
        except (self._jinja.TemplateError, TypeError, ValueError, LookupError) as error:
            raise SettingsError(
                f"the chat template of {self._where} refuses the conversation: {error}"
            ) from None


def _environment(jinja: Any) -> Any:
    """As `transformers.utils.chat_template_utils` makes it."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant says; here it only has to be read."""

        tags = {"generation"}  # noqa: RUF012  (how jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            """The body as it is."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> Iterator[str]:
        raise jinja.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment


def _library(where: str) -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ModuleNotFoundError:
        raise SettingsError(
            f"{where}: the package jinja2 is not installed, and the model's chat template needs "
            "it: pip install 'everstep[finetune]'"
        ) from None
    return jinja2
