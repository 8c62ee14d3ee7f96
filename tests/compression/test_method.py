"""Names of regimes, settings, and discovery."""

from __future__ import annotations

import pytest

from perpend.compression import methods, regime, repairs
from perpend.compression.method import with_settings
from perpend.errors import InputError


def test_methods_and_repairs_are_found():
    assert {"rtn", "awq", "wanda", "magnitude"} <= set(methods())
    assert {"gain", "refit"} <= set(repairs())


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("rtn", {"bits": 4, "group": 128}),
        ("rtn:3", {"bits": 3, "group": 128}),
        ("rtn:bits=3,group=64", {"bits": 3, "group": 64}),
        ("wanda", {"pattern": "unstructured", "sparsity": 0.5}),
        ("wanda:2:4", {"pattern": "2:4", "sparsity": 0.5}),
        ("wanda:0.7", {"pattern": "unstructured", "sparsity": 0.7}),
        ("magnitude:pattern=4:8", {"pattern": "4:8", "sparsity": 0.5}),
    ],
)
def test_regimes_are_read(text, settings):
    read = regime(text)
    assert dict(read.settings) == settings
    assert read.name == text
    assert read.repair is None


def test_repairs_and_awq_settings_are_read():
    read = regime("wanda:2:4+refit:parallel=0.25,iterations=3")
    assert read.repair.name == "refit"
    assert read.repair_settings["parallel"] == 0.25
    assert read.repair_settings["iterations"] == 3
    assert regime("awq:clip=false").settings["clip"] is False
    assert regime("awq").described["clip"] is True, "scale search and clip are named in the result"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wonda", "did you mean 'wanda'"),
        ("wanda:sparcity=0.4", "did you mean 'sparsity'"),
        ("wanda+gian", "did you mean 'gain'"),
        ("rtn:bits=four", "must be a whole number"),
        ("awq:clip=maybe", "must be true or false"),
        ("rtn:bits=4,bits=3", "bits is set twice"),
        ("wanda:2:4,4:8", "pattern is set twice"),
        ("rtn:bits=nan", "bits must be a whole number, not 'nan'"),
        ("awq:clip=perhaps", "clip must be true or false"),
    ],
)
def test_names_and_settings_that_are_none_say_what_to_do(text, message):
    with pytest.raises(InputError, match=message):
        regime(text)


def test_changed_settings_make_a_name_that_reads_back():
    changed = with_settings(regime("wanda:2:4+gain"), sparsity=0.6)
    again = regime(changed.name)
    assert dict(again.settings) == dict(changed.settings)
    assert again.repair.name == "gain"
    with pytest.raises(InputError, match="setting of wanda"):
        with_settings(regime("wanda"), bits=3)


def test_numbers_are_read_in_every_spelling():
    assert regime("wanda:5e-1").settings["sparsity"] == 0.5
    assert regime("wanda:.25").settings["sparsity"] == 0.25
