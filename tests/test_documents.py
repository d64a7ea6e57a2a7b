"""README and deploy/docs: short, without dead links, and in step with the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from supervisor import config
from tests.documents import PAGES, ROOT, commands

LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchor(heading: str) -> str:
    """As code hosts make them."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return "#" + kept.replace(" ", "-")


def test_the_readme_is_read_in_ten_minutes() -> None:
    """What is longer belongs into a page of deploy/docs."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_link_of_a_page_is_dead(page: Path) -> None:
    """Pages move; a reader at night must not search for them."""
    for target, place in LINK.findall((ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if place:
            assert place in map(anchor, HEADING.findall(path.read_text())), (
                f"{page}: {target}{place}"
            )


def test_the_page_of_settings_names_what_the_schema_has() -> None:
    """`python -m supervisor check --reference > deploy/docs/settings.md` brings it along."""
    assert (ROOT / "deploy/docs/settings.md").read_text() == config.reference()


def test_the_documents_have_commands() -> None:
    """The test that runs them would pass on none."""
    assert len(commands(Path("README.md"))) >= 5
    assert sum(len(commands(page)) for page in PAGES) >= 20
