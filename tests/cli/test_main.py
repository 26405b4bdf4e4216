"""Test the command line as a whole: help, completion, errors, exit statuses."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from cli_kit import cli

import pyllamakv
from pyllamakv import errors
from pyllamakv.cli import lazy_group, main
from pyllamakv.source import lockfile

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]


def complete(words: str, *, modules: bool = False) -> list[str]:
    """Return bash's completions of the last word; or the modules imported for them."""
    code = (
        "import sys, atexit; from pyllamakv.cli import main; "
        f"atexit.register(lambda: {modules} and print(*sys.modules, sep='\\n')); main.main()"
    )
    split = words.split(" ")
    environment = {
        **os.environ,
        "_PYLLAMAKV_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(split) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_every_module_of_a_verb_is_listed(capsys) -> None:
    """Help shows every verb with its text on one screen, without importing its module."""
    modules = {path.stem for path in Path(main.__file__).parent.glob("*.py")}
    assert set(main.VERBS) <= modules
    assert len(main.VERBS) <= 14, "group what belongs together"
    code, out, _ = cli(capsys, "--help")
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    for verb, text in main.VERBS.items():
        assert re.search(rf"\b{verb} +{re.escape(text)}", out)
    assert cli(capsys, "-h")[1] == out
    assert cli(capsys, "--version")[1] == f"pyllamakv {pyllamakv.__version__}\n"
    assert cli(capsys)[0] == 2


def leaf_commands() -> list[str]:
    """Return every verb, or its subcommands, as typed."""

    def walk(words: str, command: Any) -> list[str]:
        below = getattr(command, "commands", None)
        if below is None:
            return [words]
        return [leaf for name, sub in below.items() for leaf in walk(f"{words} {name}", sub)]

    modules = {verb: importlib.import_module(f"pyllamakv.cli.{verb}") for verb in main.VERBS}
    return [
        leaf
        for verb, module in modules.items()
        for leaf in walk(verb, typer.main.get_command(module.app))
    ]


@pytest.mark.parametrize("words", leaf_commands())
def test_every_verb_answers_help_and_takes_json(words: str, capsys) -> None:
    """Help is a page of this command, and the option is on it."""
    code, out, _ = cli(capsys, *words.split(), "--help")
    assert code == 0
    assert "Usage: pyllamakv" in out
    assert "--json" in out


def test_a_verb_is_imported_when_it_is_called() -> None:
    """Help imports no module of a verb."""
    code = (
        "import sys\nfrom pyllamakv.cli import main\n"
        "try: main.main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit([name for name in sys.modules if name.startswith('pyllamakv.cli.')"
        " and name.split('.')[2] in main.VERBS])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"


def test_misspelt_verb_or_option_gets_a_suggestion(capsys) -> None:
    """Verbs, subcommands and options have one, with exit status 2."""
    for words, close in (
        (("chck",), "check"),
        (("patch", "statu"), "status"),
        (
            ("check", "--scenari", "x"),
            "--scenario",
        ),
    ):
        code, out, err = cli(capsys, *words)
        assert (code, out) == (2, "")
        assert close in err
        code, out, err = cli(capsys, *words, "--json")
        found = json.loads(out)["error"]
        assert (code, err) == (2, "")
        assert (found["type"], found["exit_code"]) == ("UsageError", 2)
        assert close in found["message"]


@pytest.mark.slow
def test_completion_offers_verbs_options_and_releases() -> None:
    """They depend on the current word."""
    assert complete("pyllamakv trace mi") == ["minimize"]
    assert "status" in complete("pyllamakv patch s")
    assert "--scenario" in complete("pyllamakv check --sc")
    assert "--github" in complete("pyllamakv matrix plan --gi")
    assert "0.3.16" in complete("pyllamakv check 0.3.1")
    assert "0.3.9" in complete("pyllamakv matrix bisect 0.3.16 0.3.")
    assert "full-defrag" in complete("pyllamakv patch show full")
    assert complete("pyllamakv model get smol") == ["smollm2-135m"]
    assert complete("pyllamakv run --model smol") == ["smollm2-135m"]


@pytest.mark.slow
def test_completion_imports_no_heavy_packages() -> None:
    """A completion imports neither numpy nor cffi, nor the parser that edits locks."""
    for words in (
        "pyllamakv mi",
        "pyllamakv build 0.3.1",
        "pyllamakv patch status 0.3.1",
        "pyllamakv model get smol",
    ):
        imported = set(complete(words, modules=True))
        assert "pyllamakv.cli.main" in imported
        assert not imported & {"numpy", "cffi", "tomlkit", "git", "gguf"}, words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_program_and_variable(capsys, shell: str) -> None:
    """Each script contains the program and the variable that it uses."""
    code, out, _ = cli(capsys, "--show-completion", shell)
    assert code == 0
    assert "pyllamakv" in out and "_PYLLAMAKV_COMPLETE" in out


def test_completion_is_installed_below_the_home_directory(
    capsys, monkeypatch, tmp_path: Path
) -> None:
    """The path is on stderr."""
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = cli(capsys, "--install-completion", "bash")
    assert (code, out) == (0, "")
    (script,) = tmp_path.rglob("pyllamakv.sh")
    assert str(script) in err.replace("\n", "")


def test_an_error_is_json_on_stdout(capsys, monkeypatch) -> None:
    """One object with type, message and status; stderr is empty."""
    code, out, err = cli(capsys, "check", "7.7.7", "--json")
    assert (code, err) == (2, "")
    found = json.loads(out)["error"]
    assert found["type"] == "UnknownRelease" and "7.7.7" in found["message"]
    assert set(found) <= {"type", "message", "hint", "exit_code"}

    class Hinted(errors.KvError):
        exit_code = 3
        hint = "do this"

    def raising(error: BaseException):
        def run(_words: list[str]) -> int:
            raise error

        monkeypatch.setattr(main, "_run", run)

    raising(Hinted("no"))
    assert json.loads(cli(capsys, "x", "--json")[1])["error"] == {
        "type": "Hinted",
        "message": "no",
        "exit_code": 3,
        "hint": "do this",
    }
    assert cli(capsys, "x")[::2] == (3, "Hinted: no\nhint: do this\n")
    raising(KeyboardInterrupt())
    code, out, err = cli(capsys, "x", "--json")
    assert (code, err, json.loads(out)["error"]["type"]) == (130, "", "Interrupted")
    raising(ZeroDivisionError("oops"))
    code, out, err = cli(capsys, "x", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (128, "InternalError")
    assert "Traceback" in err
    code, out, err = cli(capsys, "x")
    assert (code, out) == (128, "") and "oops" in err


def test_error_after_a_json_document_writes_no_second_document(capsys, monkeypatch) -> None:
    """The document before an error is the only one; JSON lines get one more line."""
    from pyllamakv.cli import stdout

    def run(indent: int | None):
        def verb(_words: list[str]) -> int:
            stdout.write_json({"found": 1}, indent)
            raise errors.UsageError("no")

        return verb

    monkeypatch.setattr(main, "_run", run(2))
    code, out, err = cli(capsys, "x", "--json")
    assert (code, json.loads(out), err) == (2, {"found": 1}, "")
    monkeypatch.setattr(main, "_run", run(None))
    _, second = cli(capsys, "x", "--json")[1].splitlines()
    assert json.loads(second)["error"]["message"] == "no"


@pytest.mark.slow
def test_sigterm_ends_a_verb_as_ctrl_c_does() -> None:
    """It ends its subprocesses, and returns the status of a shell; a caller's handler is kept."""
    code = (
        "import signal\n"
        "from pyllamakv.cli import main\n"
        "def run(words):\n"
        "    try:\n"
        "        print('runs', flush=True)\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        print('ended', flush=True)\n"
        "main._run = run\n"
        "main.main([])\n"
    )
    verb = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert verb.stdout is not None
    assert verb.stdout.readline() == "runs\n"
    verb.send_signal(signal.SIGTERM)
    assert verb.communicate() == ("ended\n", None)
    assert verb.returncode == 143


def test_a_handler_of_sigterm_is_kept(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the caller of `main` has one, it is restored; otherwise there is none afterwards."""
    seen: list[Any] = []
    monkeypatch.setattr(main, "_run", lambda _words: seen.append(signal.getsignal(signal.SIGTERM)))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        cli(capsys)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        cli(capsys)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen[0] is signal.SIG_IGN
    assert callable(seen[1])


def test_the_table_of_exit_statuses_is_complete() -> None:
    """docs/cli.md has a row for each status of an error or a verdict."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    classes = [errors.KvError]
    for one in classes:
        classes += one.__subclasses__()
    used = {one.exit_code for one in classes if one.__module__.startswith("pyllamakv.errors")}
    assert used | {0, 1, 130, 143} == rows
    assert lockfile.known()


def described(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield each command below a command, with its words."""
    yield name, command
    lazy = getattr(command, "modules", {})
    for word, below in getattr(command, "commands", {}).items():
        loaded = lazy_group.load(lazy[word][0]) if word in lazy else below
        yield from described(f"{name} {word}", loaded)


@pytest.mark.parametrize("verb", main.VERBS)
def test_help_explains_every_word(verb: str) -> None:
    """Each command, argument and option has a help text in one line, and every command --json."""
    for name, command in described(verb, lazy_group.load(f"pyllamakv.cli.{verb}")):
        first = (command.help or "").split("\n")[0]
        assert 10 < len(first) <= 80, name
        texts = {one.name: one.help for one in command.params}
        for parameter, text in texts.items():
            assert text and len(text) <= 64 and text[0] not in " ", (name, parameter, text)
        for text in (command.help, *texts.values()):
            assert not re.search(r"\b(judge|home|tell|lie|what no)\w*", text), (name, text)
        if not hasattr(command, "commands"):
            assert "--json" in {flag for one in command.params for flag in one.opts}, name


def test_short_options_have_one_meaning_in_all_verbs() -> None:
    """-v is --verbose everywhere."""
    found: dict[str, set[str]] = {}
    for verb in main.VERBS:
        for _, command in described(verb, lazy_group.load(f"pyllamakv.cli.{verb}")):
            for one in command.params:
                for short in (flag for flag in one.opts if len(flag) == 2):
                    found.setdefault(short, set()).add(one.name)
    assert all(len(names) == 1 for names in found.values()), found
