"""The tokenizer in a model's folder, with all that stands beside tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.data.chat import Template
from trainer.data.tokenizer import SubwordTokenizer, parse_tokenizer
from trainer.host.disk_errors import reason, refusal
from trainer.host.json_text import parse_json
from trainer.settings import SettingsError

TOKENIZER = "tokenizer.json"
ABOUT = "tokenizer_config.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
SPECIAL = "special_tokens_map.json"
BESIDE = (ABOUT, GENERATION, TEMPLATE, SPECIAL)
"""What belongs to a tokenizer, or to what is generated with it."""


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> SubwordTokenizer:
    """The tokenizer of the folder, as transformers would read it; `config`: its config.json.

    Raises `SettingsError` where it is missing or malformed.
    """
    path = folder / TOKENIZER
    inner = parse_tokenizer(_text(path), str(path))
    beside = {name: _text(folder / name) for name in BESIDE if (folder / name).is_file()}
    about = _table(folder, beside, ABOUT)
    names = special_tokens({**_table(folder, beside, SPECIAL), **about})
    _frame(inner, about, names)
    ends = ids_of(_table(folder, beside, GENERATION).get("eos_token_id"))
    ends = [*ids_of(config.get("eos_token_id")), *ends]
    named = inner.token_to_id(names["eos_token"]) if "eos_token" in names else None
    end = named if named is not None else next(iter(ends), None)
    return SubwordTokenizer(
        inner,
        end=end,
        ends=ends,
        template=_template(folder, beside, about, names),
        beside=beside,
    )


def special_tokens(table: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names: "bos_token", "eos_token", ..."""
    found = {}
    for name, value in table.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def ids_of(value: object) -> list[int]:
    """One id, or several, as config.json and generation_config.json write them."""
    several = value if isinstance(value, list) else [value]
    return [one for one in several if type(one) is int]


def _frame(inner: Any, about: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Where tokenizer_config.json says whether a text begins and ends with a token, it counts."""
    if "add_bos_token" not in about and "add_eos_token" not in about:
        return
    from tokenizers import processors

    begin, end = (
        names.get(name) if about.get(f"add_{name}") is True else None
        for name in ("bos_token", "eos_token")
    )
    frame = [token for token in (begin, "$A", end) if token]
    ids = {token: inner.token_to_id(token) for token in (begin, end) if token}
    if None in ids.values():
        return
    inner.post_processor = processors.TemplateProcessing(
        single=frame,
        pair=[*frame, *("$B" if one == "$A" else one for one in frame)],
        special_tokens=list(ids.items()),
    )


def _template(
    folder: Path, beside: Mapping[str, str], about: Mapping[str, Any], names: Mapping[str, str]
) -> Template | None:
    """The file counts before the key, of several templates the one called "default"."""
    source: object = beside.get(TEMPLATE, about.get("chat_template"))
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if not isinstance(source, str) or not source:
        return None
    return Template(source, names, str(folder))


def _table(folder: Path, beside: Mapping[str, str], name: str) -> Mapping[str, Any]:
    if name not in beside:
        return {}
    try:
        found = parse_json(beside[name])
    except ValueError as error:
        raise SettingsError(f"{folder / name}: is not valid JSON: {error}; fetch it anew") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{folder / name}: is not a JSON object; fetch it anew")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: there is no such file; put the tokenizer.json of the model beside its weights"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(f"{path}: cannot be read: {reason(error)}", error) from None
