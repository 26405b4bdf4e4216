"""Route ``pyllamakv VERB …`` to one module per verb, imported only when it is called.

Errors of this package become one message on stderr and the exit status that their class names:
0 good, 1 regression, 2 usage, 3 a conflict waits for a person, 4 network or hash; `check` keeps
git bisect's code beside them (125 untestable, 128 and above a fault of the harness).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from pyllamakv import errors
from pyllamakv.cli import stdout

#: What a shell reports of a program that a Ctrl-C ended.
_INTERRUPTED = 130

#: Verb -> the line that help shows for it; importing a module for its help would cost seconds.
VERBS = {
    "upstream": "List, fetch, verify and add upstream releases.",
    "vendor": "Put a release's tree in place, verify it, clean up.",
    "patch": "Show, apply, export, lint and rebase the patches.",
    "build": "Build a release, stock and patched.",
    "check": "Judge a patch series on a release: stock against patched, with a verdict.",
    "matrix": "Judge every release, and compare with what is expected.",
    "bisect": "Find the release where a verdict changed.",
    "run": "Run a decode script, or prompts on a model.",
    "replay": "Run a recorded trace again and compare.",
    "view": "Show the cells of a run: live, as a timeline, as pictures.",
    "stats": "Print the numbers of a cache after a run: text, JSON, Prometheus.",
    "shrink": "Make a failing trace minimal.",
    "env": "Print the environment under which llama-cpp-python loads a variant.",
    "dropin": "Try llama-cpp-python on stock and patched libraries, with its own tests.",
    "rpc": "Serve this machine's devices to other processes and machines.",
    "doctor": "Look for what is missing on this machine, and name the cure.",
}


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    leave(lambda: _status(words))


def leave(run: Callable[[], Any]) -> NoReturn:
    """Exit with the status that ``run`` returns; errors become one message on stderr."""
    status: Any = 0
    try:
        with stdout.guarded():
            status = run()
    except errors.KvError as error:
        _fail(error)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except stdout.ReaderLeft:
        pass  # not a fault, and nothing more can be said to it; a verdict that is there stands
    if status == _INTERRUPTED:
        # Typer's versions differ in what they make of a Ctrl-C; none of them says it.
        sys.stderr.write("interrupted\n")
    sys.exit(status if isinstance(status, int) else 0)


def _status(words: list[str]) -> Any:
    if not words or words[0] in ("-h", "--help", "help"):
        _say(_help())
        return 0 if words else errors.UsageError.exit_code
    if words[0] == "--version":
        import pyllamakv

        _say(f"pyllamakv {pyllamakv.__version__}")
        return 0
    return _run(words[0], words[1:])


def verbs() -> list[str]:
    """Return the verbs whose modules exist, in the order of the work."""
    return [verb for verb in VERBS if importlib.util.find_spec(f"pyllamakv.cli.{verb}")]


def _run(verb: str, words: list[str]) -> Any:
    if verb not in verbs():
        close = difflib.get_close_matches(verb, verbs(), n=1)
        hint = f"did you mean `{close[0]}`?" if close else "`pyllamakv --help` lists them."
        msg = f"there is no verb `{verb}`: {hint}"
        raise errors.UsageError(msg)
    module = importlib.import_module(f"pyllamakv.cli.{verb}")
    return invoke(module.app, f"pyllamakv {verb}", words)


def invoke(app: Any, name: str, words: list[str]) -> Any:
    """Run a Typer app under a name and return its exit status; usage errors are printed."""
    import typer

    command = typer.main.get_command(app)
    _unwrap(command)
    try:
        return command.main(args=words, prog_name=name, standalone_mode=False)
    except typer.Exit as leaving:
        return leaving.exit_code
    except typer.Abort:
        return _INTERRUPTED
    except Exception as error:
        # Typer carries a click of its own: its usage errors are known by what they can do.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            return error.exit_code
        raise


def _unwrap(command: Any) -> None:
    """Let paragraphs of a docstring fill the terminal; typer keeps the line breaks of all but one.

    Paragraphs with an indented line, as lists and examples have, stay as they are.
    """
    if command.help:
        parts = inspect.cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(
            part if "\n " in part or part.startswith((" ", "\b")) else part.replace("\n", " ")
            for part in parts
        )
    for each in getattr(command, "commands", {}).values():
        _unwrap(each)


def _help() -> str:
    width = max(map(len, VERBS)) + 2
    lines = [f"  {verb:<{width}}{VERBS[verb]}" for verb in verbs()]
    return "\n".join(
        [
            "Usage: pyllamakv VERB [OPTIONS] …",
            "",
            "Own the KV cache of llama.cpp: build it, patch it, drive it, judge it.",
            "",
            "Verbs:",
            *lines,
            "",
            "`pyllamakv VERB --help` tells more; every verb takes --json.",
        ]
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _fail(error: errors.KvError) -> NoReturn:
    if os.environ.get("PYLLAMAKV_TRACEBACK"):
        raise error
    from pyllamakv.printable import printable

    sys.stderr.write(printable(f"{type(error).__name__}: {error}", keep="\n\t") + "\n")
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
