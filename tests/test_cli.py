"""The command line: quick help, near names, one JSON document, readable errors, exit codes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from perpend import cli, commands

FAKES = {
    "weigh_it": '''
import sys, time
import click
from perpend.errors import InputError
from perpend.options import Near, run_options, seed_options, verb


@verb("perpend weigh-it --kind heavy")
@click.option("--kind", type=Near(["heavy", "light"]), default="light")
@click.option("--do", default="nothing")
@seed_options((0, 1, 2))
@run_options
def command(kind, do, seeds, out, resume, json, quiet, plan):
    """How much it weighs."""
    from perpend import output
    from perpend.progress import progress
    from perpend.runs import Run
    if do == "bad":
        raise InputError("the scale is empty; put something on it")
    if do == "fault":
        raise ZeroDivisionError("oops")
    if do == "memory":
        raise MemoryError
    if do == "fail":
        return 1
    print("a library says hello")
    with Run.start(out, command="weigh-it", request={"kind": kind, "seeds": seeds}, resume=resume) as run:
        with progress(3, "stones", "weighing") as advance:
            for i in range(3):
                run.step(f"stone-{i}", lambda: i)
                print("stone", i, file=sys.stderr, flush=True)
                if do == "slow":
                    time.sleep(3)
                if do == "late":
                    raise InputError("the scale broke")
                advance(1)
        run.finish({"weight": float("nan")}, {}, ["it is light"])
    import pandas as pd
    told = {**run.document, "folder": str(run.folder)}
    output.answer(told, ("Stones", pd.DataFrame({"x": [0.123456, None]})))
''',
}


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A verb added by putting one file into perpend.commands, and nothing else."""
    (tmp_path / "verbs").mkdir()
    (tmp_path / "verbs" / "weigh_it.py").write_text(FAKES["weigh_it"])
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path / "verbs")])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("perpend.commands.weigh_it", None)


def shell(folder: Path, *words: str, **more: object) -> subprocess.Popen[str]:
    """`perpend …` as a process of its own that also knows the verbs in `folder`."""
    code = (
        "import sys; from perpend import commands, cli\n"
        f"commands.__path__.append({str(folder / 'verbs')!r})\n"
        "cli.main(sys.argv[1:])"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder, **more}
    # Started in the background of a shell script, the tests would hand on an ignored SIGINT.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, "-c", code, *words], **pipes)


# --- help ---


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time\n"
        "from perpend import cli; cli.run(['--help'])\n"
        "heavy = {'torch', 'transformers', 'pandas', 'altair', 'scipy', 'numpy'} & set(sys.modules)\n"
        "print(time.process_time(), sorted(heavy), file=sys.stderr)"  # since the interpreter's start
    )
    done = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    told = [run.stderr.strip().partition(" ") for run in done]
    assert {heavy for _, _, heavy in told} == {"[]"}
    assert min(float(seconds) for seconds, _, _ in told) < 0.5
    assert "Read what a transformer computes" in done[0].stdout


def test_help_says_of_every_verb_what_it_does_in_a_whole_sentence() -> None:
    with click.Context(cli.verbs, info_name="perpend", terminal_width=80) as ctx:
        text = " ".join(cli.verbs.get_help(ctx).split())
    for name in cli.verbs.list_commands(None):
        command = cli.verbs.get_command(None, name)
        assert command is not None
        assert f"{name} {' '.join(command.get_short_help_str(1000).split())}" in text
    assert "..." not in text


@pytest.mark.parametrize("name", cli.verbs.list_commands(None))
def test_every_verb_has_an_example_first_and_a_figure_maker(name: str) -> None:
    command = cli.verbs.get_command(None, name)
    assert command is not None
    with click.Context(command, info_name=name) as ctx:
        text = command.get_help(ctx)
    assert text.startswith("Example")
    assert text.splitlines()[1].strip().startswith(f"perpend {name}")
    assert command.get_short_help_str().strip(".")
    module = importlib.import_module(f"perpend.commands.{name.replace('-', '_')}")
    makes_runs = any(param.name == "resume" for param in command.params)
    assert callable(getattr(module, "figures", None)) or not makes_runs


@pytest.mark.parametrize("name", cli.verbs.list_commands(None))
def test_every_verb_that_costs_anything_can_tell_its_cost_first(name: str) -> None:
    command = cli.verbs.get_command(None, name)
    assert command is not None
    plans = any(param.name == "plan" for param in command.params)
    assert plans == (name not in {"models", "report"})


@pytest.mark.parametrize("name", cli.verbs.list_commands(None))
def test_every_example_parses(name: str) -> None:
    import shlex

    command = cli.verbs.get_command(None, name)
    assert command is not None
    for example in command.examples:
        words = shlex.split(example.partition("#")[0])
        if words[0] != "perpend":  # as with torchrun … -m perpend
            words = words[words.index("perpend") :]
        command.make_context(words[1], words[2:], parent=None)


def test_a_verb_is_one_file(fakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    assert "weigh-it" in capsys.readouterr().out
    assert cli.run(["weigh-it", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Example:\n  perpend weigh-it --kind heavy\n")


def test_version_and_module_entry() -> None:
    done = subprocess.run([sys.executable, "-m", "perpend", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("perpend 0.1.0 (python 3.")


# --- near names ---


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["wiegh-it"], "did you mean 'weigh-it'"),
        (["weigh-it", "--kimd", "x"], "--kind"),
        (["weigh-it", "--kind", "heavi"], "did you mean 'heavy'"),
        (["weigh-it", "--seeds", "0-x"], "write 0 or 0,1,2 or 0-4"),
        (["weigh-it", "--seeds", "1,1"], "repeats a seed"),
        (["nothing-like-it"], "known: "),
    ],
)
def test_unknown_words_are_answered_with_near_ones(
    fakes: Path, capsys: pytest.CaptureFixture[str], words: list[str], hint: str
) -> None:
    assert cli.run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert hint in err
    assert cli.run([*words, "--json"]) == 2
    assert hint in json.loads(capsys.readouterr().out)["error"]


# --- outcomes ---


def test_json_is_one_document_and_nothing_else(fakes: Path) -> None:
    process = shell(fakes, "weigh-it", "--json", "--out", "r")
    out, err = process.communicate()
    assert process.returncode == 0
    document = json.loads(out)
    assert document["results"] == {"weight": None}
    assert document["folder"] == "r"
    assert document["request"]["seeds"] == [0, 1, 2]
    assert "a library says hello" in err


def test_people_get_a_table(fakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["weigh-it"]) == 0
    out, _ = capsys.readouterr()
    assert "Stones" in out
    assert "0.1235" in out
    assert "–" in out


@pytest.mark.parametrize(
    ("do", "code", "message"),
    [
        ("bad", 2, "the scale is empty"),
        ("memory", 2, "lower --batch"),
        ("fault", 70, "a fault in perpend"),
        ("late", 2, "to go on: perpend weigh-it --do late --out r --resume"),
    ],
)
def test_errors_have_codes_and_messages(
    fakes: Path, capsys: pytest.CaptureFixture[str], do: str, code: int, message: str
) -> None:
    words = ["weigh-it", "--do", do, "--out", "r"]
    assert cli.run(words) == code
    out, err = capsys.readouterr()
    assert out in ("", "a library says hello\n")
    assert message in err
    assert ("Traceback" in err) == (code == 70)


def test_a_failed_check_is_exit_one(fakes: Path) -> None:
    assert cli.run(["weigh-it", "--do", "fail"]) == 1


def test_an_error_is_json_too(fakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["weigh-it", "--do", "late", "--json", "--out", "r"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["error"] == "the scale broke"
    assert document["code"] == 2
    assert "--resume" in document["hint"]


def test_a_run_keeps_the_command_line_that_made_it(fakes: Path, tmp_path: Path) -> None:
    assert cli.run(["weigh-it", "--kind", "heavy", "--out", "r"]) == 0
    document = json.loads((tmp_path / "r" / "run.json").read_text())
    assert document["invocation"] == ["perpend", "weigh-it", "--kind", "heavy", "--out", "r"]
    from perpend.runs import Run

    with Run.start(tmp_path / "s", command="mine", request={}) as run:
        run.finish({}, {}, [])
    assert run.document["invocation"] is None


def test_resuming_a_finished_run_gives_its_answer(fakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["weigh-it", "--out", "r"]) == 0
    capsys.readouterr()
    assert cli.run(["weigh-it", "--out", "r", "--resume", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["findings"] == ["it is light"]
    assert "nothing to resume" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_says_how_to_go_on(fakes: Path, number: signal.Signals) -> None:
    process = shell(fakes, "weigh-it", "--do", "slow", "--out", "r")
    assert process.stderr is not None
    assert [process.stderr.readline() for _ in range(2)] == ["weighing: 0 of 3 stones\n", "stone 0\n"]
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "to go on: perpend weigh-it --do slow --out r --resume" in err
    assert "Traceback" not in err
    assert (fakes / "r" / "partial.json").exists()


def test_a_reader_that_leaves_early_is_no_fault(fakes: Path) -> None:
    read, write = os.pipe()
    process = shell(fakes, "--help", stdout=write)
    os.close(write)
    os.close(read)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0
    assert err == ""


# --- progress ---


def run_on_a_terminal(folder: Path, *words: str) -> str:
    """What a person sees on stderr."""
    main, terminal = pty.openpty()
    process = shell(folder, *words, stderr=terminal, stdout=subprocess.DEVNULL)
    os.close(terminal)
    seen = b""
    end = time.time() + 200
    while time.time() < end:
        try:
            part = os.read(main, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not part:
            break
        seen += part
    os.close(main)
    assert process.wait(timeout=200) == 0
    return seen.decode()


def test_progress_is_a_bar_on_a_terminal_a_line_in_a_log_and_quiet_silences_it(fakes: Path) -> None:
    loud = run_on_a_terminal(fakes, "weigh-it")
    assert "weighing" in loud
    assert "stones" in loud
    assert "weighing" not in run_on_a_terminal(fakes, "weigh-it", "--quiet")
    _, err = shell(fakes, "weigh-it").communicate()
    assert err.count("weighing: 0 of 3 stones") == 1
    _, err = shell(fakes, "weigh-it", "--quiet").communicate()
    assert "weighing" not in err


def test_a_log_gets_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from perpend import progress

    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_told", {})
    for _ in range(2):  # a loop that starts again is told once in that time
        with progress.progress(total=100, unit="stones", description="weighing") as advance:
            for _ in range(4):
                now[0] += 4
                advance(10)
    assert capsys.readouterr().err.splitlines() == [
        "weighing: 0 of 100 stones",
        "weighing: 40 of 100 stones, 2.5 stones/s, about 24 s left",
    ]


def test_a_shell_can_complete_verbs_and_options(fakes: Path) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "perpend")],
        env={**os.environ, "_PERPEND_COMPLETE": "bash_source"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "complete -o nosort -F" in done.stdout


def test_the_reference_in_the_docs_is_current() -> None:
    script = Path(__file__).resolve().parent.parent / "scripts" / "command_line.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_reference_explains_every_row_of_its_tables() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "command-line.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if row.replace(" ", "").endswith("||")] == []


def test_quiet_ends_with_the_verb(fakes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from perpend.progress import note

    cli.run(["models", "--json"])
    with contextlib.suppress(SystemExit):
        cli.run(["attention", "no-such-model", "--quiet"])
    capsys.readouterr()
    note("heard again")
    assert "heard again" in capsys.readouterr().err
