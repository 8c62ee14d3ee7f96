"""Mistakes that the words of a command show already, told before torch and transformers are imported.

    request("prune", {"model": "smolm2", "criteria": ("nonsense",)})    # InputError: did you mean ...

One light function an option, by the name of its parameter: names, rules and places that are not there. What
only the model or the text can tell (a width, a vocabulary, a length) is checked where they are read. Every
verb passes here (`perpend.options.Verb`). Importing this module imports nothing heavy.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from perpend.errors import InputError, unknown_name


def request(verb: str, options: Mapping[str, Any]) -> None:
    """InputError for the first option of a verb whose value cannot be used, with the remedy."""
    for name, value in options.items():
        check = CHECKS.get((verb, name)) or CHECKS.get(name)
        if check is not None and value is not None and value != ():
            check(value, options)


def _model(name: str | None, options: Mapping[str, Any]) -> None:
    from perpend.models._source import resolve

    resolve(name, options.get("revision"), None)


def _models(names: tuple[str, ...], options: Mapping[str, Any]) -> None:
    for name in names:
        if not Path(name).is_dir():  # a folder may hold checkpoints, each a model
            _model(name, {})


def _revision(revision: str, options: Mapping[str, Any]) -> None:
    if "model" in options:
        _model(options["model"], options)


def _subject(name: str, options: Mapping[str, Any]) -> None:
    if not (Path(name) / "run.json").is_file():  # else a finished run
        _model(name, options)


def _text(source: str | tuple[str, ...], options: Mapping[str, Any]) -> None:
    from perpend.reading import check_place

    for one in [source] if isinstance(source, str) else source:
        check_place(one)


def _trained_on(source: str, options: Mapping[str, Any]) -> None:
    if not source.startswith("hub:"):  # a name of the hub, which training streams
        _text(source, options)


def _images(folder: str, options: Mapping[str, Any]) -> None:
    from perpend.images import image_folder

    image_folder(folder)


def _held_out(place: str, options: Mapping[str, Any]) -> None:
    (_images if options.get("images") else _text)(place, options)


def _sink(rule: str, options: Mapping[str, Any]) -> None:
    if options.get("images"):  # rules of an image model are its own roles, known when it is loaded
        return
    from perpend.surveys.sink_rule import sink_positions

    sink_positions(rule, 2)


def _windows(windows: int | tuple[int, ...], options: Mapping[str, Any]) -> None:
    length = options.get("length")
    longest = max(windows) if isinstance(windows, tuple) else windows
    if length is not None and longest > length and not options.get("images"):
        raise InputError(
            f"a window of {longest} keys does not fit into sequences of {length} tokens; use longer "
            "sequences, length=, or a smaller window="
        )


def _criteria(names: tuple[str, ...], options: Mapping[str, Any]) -> None:
    from perpend.studies.criteria import check_criteria

    check_criteria(names)


def _methods(texts: tuple[str, ...], options: Mapping[str, Any]) -> None:
    _among("compression method", [text.partition("+")[0].partition(":")[0] for text in texts], *_COMPRESSION)


def _only(titles: tuple[str, ...], options: Mapping[str, Any]) -> None:
    _among("check", titles, *_VERIFICATION)


def _file_of(message: str) -> Callable[[tuple[str, ...], Mapping[str, Any]], None]:
    def check(paths: tuple[str, ...], options: Mapping[str, Any]) -> None:
        for path in paths:
            if not Path(path).expanduser().is_file():
                raise InputError(message.format(path))

    return check


_edit_file = _file_of("cannot read the edit {}: there is no such file")
_heads_file = _file_of("there is no file of heads {}")


def _edits(edits: tuple[str, ...], options: Mapping[str, Any]) -> None:
    _edit_file(tuple(one for one in edits if one.endswith(".json")), options)


def _tasks_data(folder: str, options: Mapping[str, Any]) -> None:
    if not Path(folder).is_dir():
        raise InputError(f"--tasks-data {folder} is not a folder; give the one with the tasks' .jsonl files")


def _tasks(tasks: str, options: Mapping[str, Any]) -> None:
    folder = options.get("tasks_data")
    if folder is not None:
        _tasks_data(folder, options)
    if not tasks.replace(",", "").strip():
        return  # none is named: the verb says what there is to score
    from perpend.evaluation.suite import check

    try:
        check(tasks, folder, fewshot=options.get("tasks_shots"))
    except InputError as error:  # in the words of this command, where data= may mean something else
        told = str(error).replace("data=FOLDER", "tasks_data=DIR").replace("fewshot=", "tasks_shots=")
        raise InputError(told) from error


def _double(device: str, options: Mapping[str, Any]) -> None:
    if device.partition(":")[0] == "mps":  # compression.statistics.check_double tells the same of a model
        raise InputError(f"compression is measured in float64, which {device} has not; use device=cpu")


_COMPRESSION = ("perpend.compression", "Method")
_VERIFICATION = ("perpend.models.checks", "check")

# by the parameter's name, or by (verb, parameter) where a verb means something else by it
CHECKS: dict[str | tuple[str, str], Callable[[Any, Mapping[str, Any]], None]] = {
    "model": _model,
    "revision": _revision,
    "base": _model,
    "other": _model,
    ("scale", "models"): _models,
    ("checkpoints", "models"): _models,
    ("taxonomy", "subject"): _subject,
    "text": _text,
    ("train", "text"): _trained_on,
    "calibration": _text,
    "images": _images,
    "held_out": _held_out,
    "sink": _sink,
    "window": _windows,
    "windows": _windows,
    "criteria": _criteria,
    "methods": _methods,
    "only": _only,
    "files": _edit_file,
    "heads_files": _heads_file,
    "edits": _edits,
    "tasks_data": _tasks_data,
    "tasks": _tasks,
    ("compress", "device"): _double,
    ("compare", "device"): _double,
}


def _among(kind: str, names: Any, module: str, maker: str) -> None:
    known = declared(module, maker)
    for name in names:
        if known is not None and name not in known:
            raise unknown_name(kind, name, known)


def declared(module: str, maker: str) -> set[str] | None:
    """The names that calls of `maker` give in the files of a module, read and not run: Method("rtn", ...).

    None where one of them computes its name, so that the list would not be whole.
    """
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    place = Path(spec.origin)
    files = sorted(place.parent.glob("*.py")) if place.name == "__init__.py" else [place]
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", None) != maker:
                continue
            given = [keyword.value for keyword in node.keywords if keyword.arg == "name"] or node.args[:1]
            if not given or not isinstance(given[0], ast.Constant) or not isinstance(given[0].value, str):
                return None
            found.add(given[0].value)
    return found
