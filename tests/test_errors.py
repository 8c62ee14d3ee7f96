"""Errors that name the remedy: which names are near."""

from __future__ import annotations

import pytest

from perpend.errors import near_names, unknown_name


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("js", ["cosine", "jensen_shannon"], ["jensen_shannon"]),
        ("jensen_shannon", ["content_l1", "js", "js_l1"], ["js"]),
        ("smollm2", ["olmo2-1b", "smollm2-135m", "smollm2-1.7b"], ["smollm2-135m", "smollm2-1.7b"]),
        ("cosin", ["cosine", "content"], ["cosine"]),
        ("xyz", ["cosine"], []),
    ],
)
def test_near_names_are_short_forms_then_beginnings_then_spelling(
    name: str, known: list[str], near: list[str]
) -> None:
    assert near_names(name, known)[: len(near)] == near
    assert bool(near_names(name, known)) == bool(near)


def test_names_that_hold_commas_can_be_told_apart() -> None:
    told = str(unknown_name("check", "bits", ["observing changes no bit", "rows, gathered"]))
    assert told.endswith("known: 'observing changes no bit', 'rows, gathered'")
    assert str(unknown_name("metric", "x", ["a", "b"])).endswith("known: a, b")
