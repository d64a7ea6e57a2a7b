"""Settings from a TOML file and `--set` overrides: read, checked as a whole, explained.

Every mistake is found in one pass, and each message names where the value came from, the key, the
value and the remedy. Knows nothing of any particular schema, and never imports the supervisor.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

Origin = Literal["default", "file", "--set"]
Table = dict[str, Any]

_RELATIONS = "relations"
_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_UNITS = {"_s": "seconds", "_steps": "steps"}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NO_CONTROL = "holds a control character; no name, path or address has one, so take it out"
_PASSWORD = re.compile(r"(://)[^\s\"']*@")


class SettingsError(Exception):
    """The settings are wrong and the operator must act.

    `problems` holds one message for each mistake: where it stands, key, value, remedy.
    """

    exit_status = 2

    def __init__(self, *problems: str) -> None:
        # A URL may hold a password, and messages end in logs.
        self.problems = tuple(_PASSWORD.sub(r"\1***@", problem) for problem in problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """Two or more settings that contradict each other.

    `keys` are dotted and relative to the section that found it; `message` says what must hold, why,
    and what to change.
    """

    keys: tuple[str, ...]
    message: str


class Section(BaseModel):
    """A table of settings: immutable, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    def relations(self) -> Iterator[Relation]:
        """The relations between settings of this table, and of those below it, that do not hold."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _take_arrays_as_tuples(cls, value: Any) -> Any:
        # TOML and JSON know only lists; what is immutable holds tuples.
        if not isinstance(value, dict):
            return value
        return {key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        broken = tuple(self.relations())
        if broken:
            text = "; ".join(relation.message for relation in broken)
            raise PydanticCustomError(_RELATIONS, "{text}", {"text": text, _RELATIONS: broken})
        return self


def _expanded(path: str) -> str:
    """A path as it is opened: `~` is a home, and no part is longer than a file's name may be."""
    whole = os.path.expanduser(path)  # noqa: PTH111 - pathlib would also take away "./"
    if whole.startswith("~"):
        user = whole.partition("/")[0]
        raise ValueError(f"there is no user {user[1:]!r}; write ./{user} for a folder of that name")
    if len(os.fsencode(whole)) > PATH_BYTES_MAX:
        raise ValueError(f"is longer than the {PATH_BYTES_MAX} bytes of a path; shorten it")
    if any(len(os.fsencode(part)) > NAME_BYTES_MAX for part in whole.split("/")):
        raise ValueError(f"has a part longer than the {NAME_BYTES_MAX} bytes of a name; shorten it")
    return whole


PATH_BYTES_MAX, NAME_BYTES_MAX = 3800, 255
"""What Linux takes, less room for the names below a run directory."""

PathText = Annotated[str, AfterValidator(_expanded)]
"""A file or directory on this machine; `~` is expanded when the settings are read."""

S = TypeVar("S", bound=Section)


def read_settings(
    schema: type[S], path: Path | str | None, overrides: Sequence[str] = ()
) -> tuple[S, dict[str, Origin]]:
    """Read `path` (None: nothing but defaults), apply the overrides `a.b=VALUE`, check everything.

    VALUE is TOML; a bare word that is no TOML is taken as text. Returns the settings and, for every
    dotted key of the schema, where its value came from. Raises SettingsError with all mistakes.
    """
    name = str(path) if path is not None else "the defaults"
    data = _read_toml(Path(path)) if path is not None else {}
    problems: list[str] = []
    set_keys: set[str] = set()
    for override in overrides:
        problem = _apply(override, schema, data, set_keys)
        problems += [problem] if problem else []
    settings, mistakes = _validate(schema, data, name, set_keys)
    problems += mistakes
    if problems or settings is None:
        raise SettingsError(*problems)
    return settings, _origins(schema, data, set_keys)


def walk(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting of the schema in order: its dotted key and its field."""
    for name, field in schema.model_fields.items():
        section = section_of(field)
        if section is None:
            yield prefix + name, field
        else:
            yield from walk(section, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section a field holds, or None when it holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def show(value: Any) -> str:
    """A value as one would write it in TOML; long ones are cut."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{k} = {show(v)}" for k, v in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(show(item) for item in value) + "]"
    elif isinstance(value, str | bool | int):
        text = json.dumps(value, ensure_ascii=False)
    else:
        text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


# ------------------------------------------------------------------------------- reading


def _read_toml(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        remedy = "name the file of settings with --config FILE"
        raise SettingsError(f"{path}: there is no such file; {remedy}") from None
    except IsADirectoryError:
        remedy = f"name the file in it, for example --config {path / 'job.toml'}"
        raise SettingsError(f"{path}: is a directory; {remedy}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{path}: is not UTF-8 (byte {error.start}); save it as UTF-8, as TOML requires"
        ) from None
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(_explain_syntax(path, error)) from None


def _explain_syntax(path: Path, error: tomllib.TOMLDecodeError) -> str:
    found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    reason = str(error).split(" (at ")[0]
    if found is None:
        return f"{path}: is not valid TOML: {reason}; see https://toml.io"
    number = int(found[1])
    lines = path.read_text(encoding="utf-8").splitlines()
    line = lines[number - 1].strip() if number <= len(lines) else ""
    remedy = 'texts need quotes: key = "value"' if "Invalid value" in reason else "see toml.io"
    return f"{path}:{number}: is not valid TOML: {reason}: {line!r}; {remedy}"


def _apply(override: str, schema: type[Section], data: Table, set_keys: set[str]) -> str | None:
    """Put one `a.b=VALUE` into the data; returns the problem, if any."""
    key, equals, text = override.partition("=")
    key = key.strip()
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        return f"--set {override}: is not KEY=VALUE; write for example --set trainer.steps=200"
    try:
        parsed = tomllib.loads(f"value = {text}")
        if set(parsed) != {"value"}:
            return f"--set {override}: sets more than one value; repeat --set instead"
        value = parsed["value"]
    except tomllib.TOMLDecodeError as error:
        if text.strip()[:1] in ("", '"', "'", "[", "{"):
            return f"--set {override}: the value is not valid TOML ({error})"
        value = text.strip()
    table = data
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            return f"--set {override}: {part} is a value, not a table; it has nothing below it"
        table = inner
    table[parts[-1]] = value
    set_keys.add(key)
    return None


def _origins(schema: type[Section], data: Table, set_keys: set[str]) -> dict[str, Origin]:
    origins: dict[str, Origin] = {}
    for key, _ in walk(schema):
        if _touched(key, set_keys):
            origins[key] = "--set"
        else:
            origins[key] = "file" if _lookup(data, key.split("."))[0] else "default"
    return origins


def _touched(key: str, keys: Iterable[str]) -> bool:
    """Whether this key, a table it lies in, or a key below it is among the given ones."""
    return any(
        key == other or key.startswith(other + ".") or other.startswith(key + ".") for other in keys
    )


def _below(key: str, wrong: Iterable[str]) -> bool:
    return any(key == other or key.startswith(other + ".") for other in wrong)


def _lookup(data: Any, parts: Sequence[str]) -> tuple[bool, Any]:
    for part in parts:
        if not isinstance(data, Mapping) or part not in data:
            return False, None
        data = data[part]
    return True, data


# ------------------------------------------------------------------------------- checking


def _validate(
    schema: type[S], data: Table, name: str, set_keys: set[str]
) -> tuple[S | None, list[str]]:
    """Validate until nothing new turns up.

    Relations can be checked only on whole tables, so each round takes the keys found wrong out of
    the data (their defaults stand in) and looks again; relations on such keys are left alone.
    """
    problems: dict[str, str] = {}
    wrong: set[str] = set()
    data = json.loads(json.dumps(data, default=str))
    for key, value in tuple(_unprintable(schema, data)):
        where = _source(name, (key,), set_keys)
        problems[key] = f"{where}: {key} = {show(value)}: {_NO_CONTROL}"
        wrong.add(key)
        _drop(data, key.split("."))
    while True:
        try:
            return schema.model_validate(data), list(problems.values())
        except ValidationError as error:
            found = _explain(schema, data, error, name, set_keys)
        news = {
            name_: text for name_, keys, text in found if not any(_below(k, wrong) for k in keys)
        }
        dropped = [key for _, keys, _ in found for key in keys if _drop(data, key.split("."))]
        problems.update(news)
        wrong.update(dropped)
        if not dropped:  # what is left contradicts the defaults alone: nothing more can be learned
            return None, list(problems.values())


def _unprintable(schema: type[Section], data: Table) -> Iterator[tuple[str, Any]]:
    """The settings whose texts hold control characters, but for the free tables of a task."""
    for key, field in walk(schema):
        found, value = _lookup(data, key.split("."))
        free = field.annotation == dict[str, Any]
        if found and not free and any(_CONTROL.search(text) for text in _texts(value)):
            yield key, value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _drop(data: Table, parts: Sequence[str]) -> bool:
    """Take a key out of the data; False when it is not there."""
    found, table = _lookup(data, parts[:-1])
    if not found or not isinstance(table, dict) or parts[-1] not in table:
        return False
    del table[parts[-1]]
    return True


def _explain(
    schema: type[Section], data: Table, error: ValidationError, name: str, set_keys: set[str]
) -> list[tuple[str, tuple[str, ...], str]]:
    """One (identity, keys, message) a mistake; the branches of a union are one mistake."""
    found: dict[str, tuple[str, tuple[str, ...], str]] = {}
    sections = {k for k, field in _all_fields(schema) if section_of(field)}
    for detail in error.errors(include_url=False):
        parts = _key_of(schema, detail)
        key = ".".join(parts)
        relations: tuple[Relation, ...] = detail.get("ctx", {}).get(_RELATIONS, ())
        for relation in relations:
            keys = tuple(f"{key}.{k}" if key else k for k in relation.keys)
            where = _source(name, keys, set_keys)
            found[f"{keys}"] = (
                f"{keys}",
                keys,
                f"{where}: {_pairs(schema, data, keys)}: {relation.message}",
            )
        if not relations and key not in found:
            present, value = _lookup(data, parts)
            where = _source(name, (key,), set_keys)
            # A whole table is shown only where a table is the value.
            whole = key in sections and isinstance(value, dict)
            shown = f" = {show(value)}" if present and not whole else ""
            reason = _reason(schema, parts, value, detail)
            found[key] = (key, (key,), f"{where}: {key or 'settings'}{shown}: {reason}")
    return list(found.values())


def _key_of(schema: type[Section], detail: ErrorDetails) -> list[str]:
    """The part of an error's location that is a key of the settings, without union branches."""
    parts: list[str] = []
    section: type[Section] | None = schema
    for part in detail["loc"]:
        if section is None:
            break
        parts.append(str(part))
        field = section.model_fields.get(str(part))
        section = section_of(field) if field else None
    return parts


def _source(name: str, keys: Sequence[str], set_keys: set[str]) -> str:
    return "--set" if any(_touched(key, set_keys) for key in keys) else name


def _pairs(schema: type[Section], data: Table, keys: Sequence[str]) -> str:
    fields = dict(walk(schema))
    shown = []
    for key in keys:
        present, value = _lookup(data, key.split("."))
        if not present and key in fields:
            value = fields[key].get_default(call_default_factory=True, validated_data={})
        shown.append(f"{key} = {show(value)}")
    return ", ".join(shown)


def _reason(schema: type[Section], parts: list[str], value: Any, detail: ErrorDetails) -> str:
    field = dict(_all_fields(schema)).get(".".join(parts))
    if detail["type"] == "extra_forbidden" and field is None:
        return _unknown(schema, parts)
    if field is None or section_of(field) is not None:
        if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
            return f"must be a table; write it as [{'.'.join(parts)}] with its keys below"
        return detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"is missing; it must be {_expectation(parts[-1], field)}"
    if detail["type"] in ("value_error", "assertion_error"):
        return detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"must be {_expectation(parts[-1], field)}{_remedy(parts[-1], field, value)}"


def _all_fields(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in schema.model_fields.items():
        yield prefix + name, field
        section = section_of(field)
        if section is not None:
            yield from _all_fields(section, f"{prefix}{name}.")


# ------------------------------------------------------------------------------- wording


def _unknown(schema: type[Section], parts: list[str]) -> str:
    """The remedy for a key that does not exist: the nearest that does, here or elsewhere."""
    keys = [key for key, _ in _all_fields(schema)]
    parent, name = ".".join(parts[:-1]), parts[-1]
    prefix = f"{parent}." if parent else ""
    siblings = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    siblings = [key for key in siblings if "." not in key]
    elsewhere = [key for key in keys if key.rpartition(".")[2] == name]
    stem = re.sub(r"_(s|sec|secs|seconds|ms|min|minutes|steps)$", "", name)
    same = [key for key in siblings if re.sub(r"_(s|steps)$", "", key) == stem]
    near = same or difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    close = bool(near) and difflib.SequenceMatcher(None, name, near[0]).ratio() > 0.8
    if elsewhere and not close:
        return f"there is no such key here; did you mean {' or '.join(elsewhere)}?"
    if near:
        unit = _unit(near[0], " (in {})")
        return f"there is no such key; did you mean {prefix}{near[0]}{unit}?"
    leaves: dict[str, str] = {}
    for key in keys:
        leaves.setdefault(key.rpartition(".")[2], key)
    near = difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
    if near:
        return f"there is no such key; did you mean {leaves[near[0]]}?"
    table = f"[{parent}]" if parent else "a file of settings"
    return f"there is no such key; {table} has {', '.join(siblings)}"


def _expectation(name: str, field: FieldInfo) -> str:
    """What a field takes, in words: kind, unit, limits, choices."""
    return " or ".join(
        _kind(kind, name, notes) for kind, notes in branches(field.annotation, field.metadata)
    )


def branches(annotation: Any, notes: Sequence[Any] = ()) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The alternatives of a type, each with the constraints that bind it."""
    if hasattr(annotation, "__metadata__"):
        inner, *more = get_args(annotation)
        flat = [part for note in more for part in getattr(note, "metadata", [note])]
        yield from branches(inner, [*notes, *flat])
    elif get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        for branch in get_args(annotation):
            yield from branches(branch, notes)
    else:
        yield annotation, notes


def _note(notes: Sequence[Any], name: str) -> Any:
    return next((getattr(n, name) for n in notes if getattr(n, name, None) is not None), None)


def _kind(kind: Any, name: str, notes: Sequence[Any]) -> str:
    if kind in (int, float):
        limits = [
            f"{word} {show(_note(notes, bound))}"
            for bound, word in _LIMITS.items()
            if _note(notes, bound) is not None
        ]
        return (
            _KINDS[kind] + _unit(name, " of {}") + (f", {' and '.join(limits)}" if limits else "")
        )
    if kind is str:
        pattern = _note(notes, "pattern")
        return _KINDS[kind] + (f" matching {pattern}" if pattern else "")
    if kind in _KINDS:
        return _KINDS[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(show(choice) for choice in arguments)
    if origin in (tuple, list):
        return "a list of texts" if arguments[:1] == (str,) else "a list"
    if origin is dict or kind is dict:
        return "a table of numbers" if arguments[-1:] in ((float,), (int,)) else "a table"
    return "nothing" if kind is type(None) else str(kind)


def _unit(name: str, form: str) -> str:
    return next((form.format(unit) for end, unit in _UNITS.items() if name.endswith(end)), "")


def _remedy(name: str, field: FieldInfo, value: Any) -> str:
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value)
        factor = _SECONDS.get(found[2] or "s") if found else None
        if found and name.endswith("_s") and factor is not None:
            return f"; write {name} = {float(found[1]) * factor:g}"
        if found and not found[2]:
            return f"; write {name} = {found[1]}, without quotes"
        if value.lower() in ("true", "false", "yes", "no", "on", "off"):
            yes = value.lower() in ("true", "yes", "on")
            return f"; write {name} = {show(yes)}, without quotes"
        kinds = [kind for kind, _ in branches(field.annotation)]
        choices = [c for kind in kinds for c in get_args(kind) if isinstance(c, str)]
        near = difflib.get_close_matches(value.lower(), choices, n=1)
        if near:
            return f"; did you mean {show(near[0])}?"
    if field.is_required():
        return ""
    default = field.get_default(call_default_factory=True, validated_data={})
    return f"; the default is {show(default)}"
