"""Reading settings: the text of every message is part of the promise."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from trainer.settings import Relation, Section, SettingsError, read_settings, show


class Heartbeats(Section):
    every_s: Annotated[float, Field(gt=0)] = 0.25
    lease_s: Annotated[float, Field(gt=0)] = 3.0


class Model(Section):
    layers: Annotated[int, Field(ge=1, le=9)] = 2


class Trainer(Section):
    steps: Annotated[int, Field(ge=1)] = 10
    deadline_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    drills: bool | Literal["auto"] = "auto"
    placement: Literal["pack", "spread"] = "pack"
    path: tuple[str, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)
    model: Model = Field(default_factory=Model)


class Root(Section):
    name: Annotated[str, Field(pattern="^[a-z]+$")] = "first"
    heartbeats: Heartbeats = Field(default_factory=Heartbeats)
    trainer: Trainer = Field(default_factory=Trainer)

    def relations(self) -> Iterator[Relation]:
        if self.heartbeats.every_s >= self.heartbeats.lease_s:
            yield Relation(
                keys=("heartbeats.every_s", "heartbeats.lease_s"), message="{raise} lease_s"
            )


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    """What is wrong with a file of this text, its path shortened."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings(Root, path, overrides)
    return [problem.replace(str(path), "job.toml") for problem in caught.value.problems]


def test_every_value_says_where_it_came_from(tmp_path: Path) -> None:
    """A run of last week with other settings than its file: nobody knew of the override."""
    path = tmp_path / "job.toml"
    path.write_text("[trainer]\nsteps = 20\npath = ['a']\n[trainer.model]\nlayers = 3\n")
    overrides = ["trainer.model.layers=4", "trainer.options.depth=[1, 2]", "name=second"]
    settings, origins = read_settings(Root, path, overrides)
    assert settings.trainer.steps == 20
    assert settings.trainer.path == ("a",)
    assert settings.trainer.model.layers == 4
    assert settings.trainer.options == {"depth": [1, 2]}
    assert settings.name == "second"
    assert {key: value for key, value in origins.items() if value != "default"} == {
        "name": "--set",
        "trainer.steps": "file",
        "trainer.path": "file",
        "trainer.options": "--set",
        "trainer.model.layers": "--set",
    }


def test_no_file_means_the_defaults() -> None:
    """Commands that only need defaults must not need a file."""
    settings, origins = read_settings(Root, None)
    assert settings == Root()
    assert set(origins.values()) == {"default"}


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """One mistake a start, ten starts a job: every one of them costs a place in the queue."""
    text = """
        name = "A"
        [heartbeats]
        evry_s = 1
        lease_s = 0.1
        [trainer]
        steps = "20"
        [trainer.model]
        layers = 10
    """
    assert problems(tmp_path, text, "trainer.drills=1", "nonsense") == [
        "--set nonsense: is not KEY=VALUE; write for example --set trainer.steps=200",
        'job.toml: name = "A": must be a text matching ^[a-z]+$; the default is "first"',
        (
            "job.toml: heartbeats.evry_s = 1: there is no such key; did you mean "
            "heartbeats.every_s (in seconds)?"
        ),
        (
            'job.toml: trainer.steps = "20": must be a whole number, at least 1; write steps = 20, '
            "without quotes"
        ),
        '--set: trainer.drills = 1: must be true or false or "auto"; the default is "auto"',
        (
            "job.toml: trainer.model.layers = 10: must be a whole number, at least 1 and at most "
            "9; the default is 2"
        ),
        "job.toml: heartbeats.every_s = 0.25, heartbeats.lease_s = 0.1: {raise} lease_s",
    ]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("[heartbeats]\nevry_s = 1", "did you mean heartbeats.every_s (in seconds)?"),
        ("[heartbeats]\nlease_ms = 1", "did you mean heartbeats.lease_s (in seconds)?"),
        ("[heartbeats]\nlease = 1", "did you mean heartbeats.lease_s (in seconds)?"),
        ("[heartbeats]\nsteps = 1", "no such key here; did you mean trainer.steps?"),
        ("[trainer]\nlayers = 1", "no such key here; did you mean trainer.model.layers?"),
        ("[model]\nlayers = 1", "no such key here; did you mean trainer.model?"),
        ("[trainr]\nsteps = 1", "did you mean trainer?"),
        ("[heartbeats]\nfoo = 1", "[heartbeats] has every_s, lease_s"),
        ("foo = 1", "a file of settings has name, heartbeats, trainer"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    tmp_path: Path, text: str, remedy: str
) -> None:
    """A misspelt `failures_max` was ignored for months, and the job restarted without a limit."""
    (problem,) = problems(tmp_path, text)
    assert problem.endswith(remedy)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('deadline_s = "5m"', 'a number of seconds, above 0 or "auto"; write deadline_s = 300'),
        ('deadline_s = "30"', "write deadline_s = 30"),
        ("deadline_s = inf", 'must be a number of seconds, above 0 or "auto"'),
        ("deadline_s = -1", 'must be a number of seconds, above 0 or "auto"'),
        ("steps = 2.5", "must be a whole number, at least 1; the default is 10"),
        ("steps = true", "must be a whole number, at least 1; the default is 10"),
        ("steps = 2030-01-01", "must be a whole number, at least 1; the default is 10"),
        ('drills = "on"', "write drills = true, without quotes"),
        ('placement = "Spread"', 'must be "pack" or "spread"; did you mean "spread"?'),
        ("path = 3", "must be a list of texts; the default is []"),
        ("path = [1]", "must be a list of texts; the default is []"),
        ("options = 3", "must be a table; the default is {}"),
        ("model = 3", "must be a table; write it as [trainer.model] with its keys below"),
    ],
)
def test_a_wrong_value_is_told_with_what_it_must_be(tmp_path: Path, line: str, reason: str) -> None:
    """`"30"` for 30 and minutes for seconds are what people write at night."""
    (problem,) = problems(tmp_path, f"[trainer]\n{line}\n")
    assert problem.startswith(f"job.toml: trainer.{line.partition(' =')[0]} = ")
    assert reason in problem


def test_a_relation_is_not_told_of_a_key_that_is_wrong_itself(tmp_path: Path) -> None:
    """A follow-up error about a value that must be changed anyway only hides the first."""
    text = "[heartbeats]\nevery_s = 'x'\nlease_s = 0.1\n"
    (problem,) = problems(tmp_path, text)
    assert "heartbeats.every_s" in problem
    assert "lease_s" not in problem


def test_a_relation_against_a_default_is_told(tmp_path: Path) -> None:
    """Only one side is in the file; the other is no less part of the contradiction."""
    assert problems(tmp_path, "", "heartbeats.lease_s=0.2") == [
        "--set: heartbeats.every_s = 0.25, heartbeats.lease_s = 0.2: {raise} lease_s"
    ]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("trainer.steps", "is not KEY=VALUE"),
        ("=3", "is not KEY=VALUE"),
        ("trainer..steps=3", "is not KEY=VALUE"),
        ("trainer.path=['a'", "the value is not valid TOML"),
        ("name=", "the value is not valid TOML"),
        ("trainer.steps.x=3", "steps is a value, not a table"),
        ("trainer.steps=3\nname='x'", "sets more than one value"),
        ("steps=3", "did you mean trainer.steps?"),
    ],
)
def test_a_wrong_override_is_told(tmp_path: Path, override: str, reason: str) -> None:
    """An override that sets nothing must not pass in silence."""
    (problem,) = problems(tmp_path, "[trainer]\nsteps = 2\n", override)
    assert problem.startswith("--set")
    assert reason in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[job\n", "job.toml:1: is not valid TOML"),
        ("a = 1\nname = foo\n", "job.toml:2: is not valid TOML: Invalid value: 'name = foo'"),
        ("a = 1\na = 2\n", "job.toml"),
    ],
)
def test_a_syntax_error_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    """`tomllib` alone says neither the file nor the line's text."""
    (problem,) = problems(tmp_path, text)
    assert problem.startswith(message)
    assert "is not valid TOML" in problem


def test_a_file_that_cannot_be_read_is_told_apart(tmp_path: Path) -> None:
    """A missing file, a directory and an UTF-16 file each have another remedy."""
    (tmp_path / "utf16.toml").write_text("name = 'x'", encoding="utf-16")
    for path, reason in (
        (tmp_path / "none.toml", "there is no such file"),
        (tmp_path, "is a directory; name the file in it"),
        (tmp_path / "utf16.toml", "is not UTF-8"),
    ):
        with pytest.raises(SettingsError, match=reason) as caught:
            read_settings(Root, path)
        assert str(path) in caught.value.problems[0]


def test_a_contradiction_cannot_be_built_in_code_either() -> None:
    """Sections made without a file, as tests and the trainer do, obey the same relations."""
    with pytest.raises(ValidationError, match="lease_s"):
        Root(heartbeats=Heartbeats(every_s=1.0, lease_s=0.5))


def test_values_are_shown_as_toml() -> None:
    """A message that shows Python's `True` invites to write it into the file."""
    assert show({"a": [1, "x", True], "b": 0.5}) == '{a = [1, "x", true], b = 0.5}'
    assert len(show("x" * 500)) == 120
