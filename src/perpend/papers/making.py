"""Making tables and figures: which models this machine has, the commands in their order, what came out.

    made = make([find("attention/table-6")], [Named.parse("gpt2=path/to/folder")], base=Path("runs/paper"))
    made[0].rows, made[0].failures

Every command is a process of its own, so that a fault in one model ends one run; a finished run of the same
words is used again, and an interrupted one goes on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perpend.errors import InputError, PerpendError
from perpend.papers.comparison import Comparison, compare
from perpend.papers.protocol import RUN, Item, Named, Step

if TYPE_CHECKING:
    from perpend.runs.reader import FinishedRun

STDERR = 2  # the descriptor: answers of the runs are progress here
Runner = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class Machine:
    """What there is: a reachable hub, an accelerator, the models by name, WikiText in the hub's cache."""

    hub: bool
    accelerator: bool
    models: tuple[str, ...]
    wikitext: bool = False

    def lacks(self, item: Item) -> list[str]:
        """Which of an item's needs this machine does not have, in words; time is not among them."""
        has_models = bool(item.models) and set(item.models) <= set(self.models)
        lacking = []
        if "hub" in item.needs and not self.hub and not has_models:
            lacking.append("hub")
        if "GPU" in item.needs and not self.accelerator:
            lacking.append("GPU")
        return lacking

    def here(self, item: Item) -> str:
        """In a few words: yes, with other models, or what is missing."""
        if item.steps is None:
            return "no command"
        lacking = self.lacks(item)
        if not item.needs or not lacking:
            return "yes"
        others = [name for name in (*item.models, *item.also) if name in self.models]
        if others and item.per_model:
            return f"with {', '.join(others)}"
        if item.per_model:
            return f"no {' and no '.join(lacking)}; --models FOLDER"
        return f"no {' and no '.join(lacking)}"


@cache
def machine() -> Machine:
    """This machine; asked once."""
    from perpend.commands.models import state
    from perpend.models._source import hub_reachable
    from perpend.models.catalog import CATALOG

    hub = hub_reachable()
    accelerator = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
    here = tuple(e.name for e in CATALOG.values() if hub or e.wheel or state(e, hub) == "yes")
    cache_folder = os.environ.get("HF_DATASETS_CACHE") or Path(
        os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface", "datasets"
    )
    return Machine(hub, accelerator, here, (Path(cache_folder) / "Salesforce___wikitext").is_dir())


def kind_of(place: str) -> str | None:
    """decoder, encoder or image, from the catalog or a folder's config.json; None where neither tells."""
    from perpend.models.catalog import find as entry_of

    entry = entry_of(place)
    if entry is not None:
        if entry.modality == "image":
            return "image"
        return "encoder" if entry.architecture.endswith(("ForMaskedLM", "BertModel")) else "decoder"
    if place.endswith(".gguf"):
        return "decoder"
    try:
        config = json.loads((Path(place) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    classes = " ".join(config.get("architectures") or [])
    if "patch_size" in config or "image_size" in config:
        return "image"
    if any(word in classes for word in ("CausalLM", "LMHead", "ForConditionalGeneration")):
        return "decoder"
    return "encoder" if classes else None


def check(item: Item, model: Named, more: Sequence[str] = ()) -> None:
    """InputError where the item is not defined for a model of this kind, or a folder is no model.

    An image model needs `--images` among the words of `more`.
    """
    place = Path(model.place)
    if model.place.startswith((".", "/", "~")) and not place.expanduser().exists():
        raise InputError(f"there is no model folder {model.place}")
    holder = (place / "config.json").is_file() or model.place.endswith(".gguf")
    if place.is_dir() and not holder and item.compare != "checkpoints":
        raise InputError(f"{model.place} is no model folder: it has no config.json")
    kind = kind_of(model.place)
    if kind is not None and kind not in item.accepts:
        wanted = {
            "decoder": "a causal language model",
            "encoder": "an encoder",
            "image": "an image model",
        }
        raise InputError(
            f"{item.item} is defined for {' or '.join(wanted[k] for k in item.accepts)}, and {model.name} is "
            f"{wanted[kind]}; {_remedy(item)}"
        )
    if kind == "image" and "--images" not in more:
        raise InputError(f"{model.name} reads images: add `-- --images FOLDER` at the end of the command")


def _remedy(item: Item) -> str:
    named = ", ".join((*item.models, *item.also)[:4])
    return f"models that fit: {named}" if named else "name one with models="


@dataclass
class Made:
    """One item made: comparisons by model, the runs behind them, and what failed, in words."""

    item: Item
    rows: list[tuple[str, Comparison]] = field(default_factory=list)
    runs: dict[str, list[Path]] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def process(words: Sequence[str]) -> int:
    """Run `perpend WORDS` as a process of its own; its answer goes to stderr."""
    import subprocess
    import sys

    return subprocess.run([sys.executable, "-m", "perpend", *words], stdout=STDERR, check=False).returncode


def chosen_models(item: Item, asked: Sequence[Named], own: Machine) -> list[Named]:
    """The models asked for, else the paper's and others that this machine has; InputError where none."""
    if not item.per_model or asked:
        return list(asked)
    found = item.default_models(own.models)
    if not found:
        raise InputError(
            f"{item.item} needs {' and '.join(item.needs)}: this machine has none of its models "
            f"({', '.join(item.models)}); give one with models=FOLDER or NAME=FOLDER"
        )
    return found


def steps(item: Item, asked: Sequence[Named], more: Sequence[str], own: Machine) -> list[list[Step]]:
    """The commands of an item on this machine, one list a model; InputError where there is none."""
    from perpend.models.catalog import CATALOG

    if item.steps is None:
        raise InputError(f"{item.item} has no command: {item.why}")
    offline = not own.hub and not own.wikitext
    if not item.per_model:
        return item.commands(more=more)
    made: list[list[Step]] = []
    for model in chosen_models(item, asked, own):
        # A model that would have to be fetched brings the hub, and its data sets, with it.
        fetched = model.place in CATALOG and model.place not in own.models
        builtin = offline and not fetched
        made += item.commands([model], more=more, builtin=builtin, accelerator=own.accelerator)
    return made


def chained(sequence: Sequence[Step], base: Path) -> Iterator[tuple[Step, list[str], Path]]:
    """Each step with its words as they are run and its folder; `{run}` filled in."""
    before: Path | None = None
    for step in sequence:
        folder = step.folder(base, before)
        yield step, [str(before) if word == RUN else word for word in step.words], folder
        before = folder


def make(
    items: Sequence[Item],
    asked: Sequence[Named] = (),
    *,
    base: Path,
    more: Sequence[str] = (),
    runner: Runner | None = None,
    own: Machine | None = None,
) -> list[Made]:
    """Run every step of every item, and compare. A model that fails is told and the others go on.

    Raises InputError where an item has no command or no model here; with several items that too is told
    and the others go on.
    """
    own = own or machine()
    made = []
    for item in items:
        one = Made(item)
        made.append(one)
        try:
            sequences = steps(item, asked, more, own)
        except InputError as error:
            if len(items) == 1:
                raise
            one.failures[""] = str(error)
            continue
        for sequence in sequences:
            model = sequence[0].model.name if sequence[0].model else ""
            try:
                if sequence[0].model:
                    check(item, sequence[0].model, more)
                runs = _run(sequence, base, runner or process, one, model)
                one.rows += [(model, row) for row in compare(item, model, runs)]
            except PerpendError as error:
                one.failures[model] = str(error)
    return made


def _run(sequence: Sequence[Step], base: Path, runner: Runner, made: Made, model: str) -> list[FinishedRun]:
    import shlex

    from perpend.runs import Run

    runs: list[FinishedRun] = []
    for _, words, folder in chained(sequence, base):
        made.commands.setdefault(model, []).append(shlex.join(["perpend", *words]))
        if not (folder / "run.json").exists():
            going_on = ["--resume"] if (folder / "partial.json").exists() else []
            code = runner([*words, "--out", str(folder), *going_on])
            if code == 130:
                raise KeyboardInterrupt
            if code:
                raise InputError(f"`perpend {shlex.join(words)}` ended with {code}; its message is above")
        made.runs.setdefault(model, []).append(folder)
        runs.append(Run.open(folder))
    return runs


def cost(words: Sequence[str]) -> dict[str, Any]:
    """What a verb's own `--plan` measures of a command here; {"error": …} where it cannot."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "perpend", *words, "--plan", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        document = json.loads(done.stdout)
    except ValueError:
        return {"error": (done.stderr.strip().splitlines() or ["no answer"])[-1]}
    return {"error": document["error"]} if done.returncode else document.get("plan", {})
