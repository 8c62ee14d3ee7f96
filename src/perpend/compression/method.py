"""What a compression method is, where the methods are found, and the names of regimes.

A method is one file of this folder that holds a `METHOD`; nothing else changes. A regime is a method with its
settings and an optional repair, written as one word on the command line and in every table:

    rtn   rtn:3   awq   awq:clip=false,group=64   wanda   wanda:2:4   wanda:sparsity=0.6   wanda:2:4+gain
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from perpend.errors import InputError, unknown_name

if TYPE_CHECKING:
    from perpend.compression.blockwise import Calibrated
    from perpend.compression.matrices import Matrix

Settings = Mapping[str, Any]
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}


@dataclass(frozen=True)
class Method:
    """A way to compress the matrices of a block, in place.

    defaults: every setting with its default; a setting not in it is an error. needs: which statistics of the
    inputs (see statistics.NEEDS). check: refuse a matrix by name before anything is changed. compress: change
    the block and return, per matrix name, facts for the result. bytes: stored size of one matrix.
    """

    name: str
    summary: str
    defaults: Settings
    needs: frozenset[str]
    check: Callable[[Matrix, Settings], None]
    compress: Callable[[Calibrated, Callable[[Matrix], Settings]], dict[str, dict[str, Any]]]
    bytes: Callable[[Matrix, Settings], float]
    plain: str = ""  # the setting that a bare value stands for: "bits" in "rtn:3"


@dataclass(frozen=True)
class Repair:
    """Corrects a compressed block against its uncompressed self; fit(block) -> facts per projection.

    check: refuse settings before anything is changed.
    """

    name: str
    summary: str
    defaults: Settings
    fit: Callable[[Calibrated, Settings], dict[str, dict[str, Any]]]
    check: Callable[[Settings], None] = lambda settings: None


@dataclass(frozen=True)
class Regime:
    """A method with all its settings, and a repair with its own. `name` is as written."""

    name: str
    method: Method
    settings: Settings
    repair: Repair | None = None
    repair_settings: Settings = field(default_factory=dict)

    @property
    def described(self) -> dict[str, Any]:
        """For a result: method, settings and repair in full."""
        return {
            "method": self.method.name,
            **self.settings,
            "repair": {"name": self.repair.name, **self.repair_settings} if self.repair else None,
        }


@cache
def _found(kind: type) -> dict[str, Any]:
    import perpend.compression as folder

    found: dict[str, Any] = {}
    for entry in sorted(pkgutil.iter_modules(folder.__path__), key=lambda item: item.name):
        module = importlib.import_module(f"{folder.__name__}.{entry.name}")
        for value in vars(module).values():
            if isinstance(value, kind):
                found[value.name] = value
    return found


def methods() -> dict[str, Method]:
    """All methods by name: every file of this folder that holds one."""
    return dict(_found(Method))


def repairs() -> dict[str, Repair]:
    """All repairs by name."""
    return dict(_found(Repair))


def regime(text: str | Regime) -> Regime:
    """Read a regime from its name, METHOD[:SETTINGS][+REPAIR[:SETTINGS]]; see the module.

    InputError: an unknown method, repair or setting (with the known ones), or a value of the wrong kind.
    """
    if isinstance(text, Regime):
        return text
    head, plus, tail = text.partition("+")
    name, _, rest = head.partition(":")
    if name not in methods():
        raise unknown_name("compression method", name, methods())
    method = methods()[name]
    settings = {**method.defaults, **_read(rest, method.defaults, method.plain, name)}
    if not plus:
        return Regime(text, method, settings)
    name, _, rest = tail.partition(":")
    if name not in repairs():
        raise unknown_name("repair", name, repairs())
    repair = repairs()[name]
    return Regime(
        text, method, settings, repair, {**repair.defaults, **_read(rest, repair.defaults, "", name)}
    )


def with_settings(base: Regime, **changes: Any) -> Regime:
    """The same regime with some settings changed, under a name that says so."""
    for key in changes:
        if key not in base.method.defaults:
            raise unknown_name(f"setting of {base.method.name}", key, base.method.defaults)
    settings = {**base.settings, **changes}
    differing = ",".join(f"{k}={v}" for k, v in settings.items() if v != base.method.defaults[k])
    name = base.method.name + (f":{differing}" if differing else "")
    if base.repair:
        name += f"+{base.repair.name}"
    return Regime(name, base.method, settings, base.repair, base.repair_settings)


def _read(text: str, defaults: Settings, plain: str, owner: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            value = key
            key = "pattern" if "pattern" in defaults and not _number(value) else plain
            if not key:
                raise InputError(
                    f"{owner}: {item!r} is no setting; write NAME=VALUE with one of {', '.join(defaults)}"
                )
        if key not in defaults:
            raise unknown_name(f"setting of {owner}", key, defaults)
        if key in out:
            raise InputError(f"{owner}: {key} is set twice in {text!r}; give it once")
        out[key] = converted(owner, key, value, defaults[key])
    return out


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def converted(owner: str, key: str, value: str, like: Any) -> Any:
    """A setting's value from its words, of the kind of its default; InputError for words of another kind."""
    try:
        if isinstance(like, bool):
            return {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}[
                value.lower()
            ]
        return type(like)(value)
    except (KeyError, ValueError):
        raise InputError(f"{owner}: {key} must be {_KINDS[type(like)]}, not {value!r}") from None
