"""Which code counts as the user's own when a resume says what has changed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import supervisor.fsm.machine
import trainer.data.files
from trainer.training import code_digests


def test_no_module_of_this_project_is_taken_for_the_users() -> None:
    """After an update of everstep a resume would report some hundred changed modules of theirs."""
    assert supervisor.fsm.machine
    assert trainer.data.files
    loaded = {name for name in sys.modules if name.startswith(("supervisor.", "trainer."))}
    assert len(loaded) > 10
    found = code_digests.digests_of("language_model")
    assert {name for name in found if name in loaded} == set()
    assert __name__ in found  # a module beside the packages is the user's


def test_a_module_of_the_users_counts_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is what a later resume compares."""
    (tmp_path / "users_sources.py").write_text("RATE = 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("users_sources")
    try:
        first = code_digests.digests_of("users_sources:Mine")["users_sources"]
        (tmp_path / "users_sources.py").write_text("RATE = 0.5\n")
        assert code_digests.digests_of("users_sources:Mine")["users_sources"] != first
    finally:
        del sys.modules["users_sources"]
