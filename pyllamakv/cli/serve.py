"""Serve a model over the OpenAI API: `pyllamakv serve`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pyllamakv.cli.options import (
    Budget,
    Host,
    Json,
    Port,
    Threads,
    model_names,
    release_names,
    size,
)
from pyllamakv.cli.stdout import note, write_json, write_lines
from pyllamakv.errors import ToolMissing, UsageError

app = typer.Typer(add_completion=False)


@app.command()
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="GGUF file, or name of a model; see `model list`.",
            autocompletion=model_names,
        ),
    ],
    *,
    ctx: Annotated[
        int | None, typer.Option("--ctx", min=1, help="Cells of the context; default: the model's.")
    ] = None,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, max=256, help="Requests that decode at once.")
    ] = 4,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Requests that may wait.")] = 256,
    store: Annotated[
        Path | None, typer.Option("--store", help="Directory that keeps prefixes for restarts.")
    ] = None,
    budget: Budget = "8G",  # type: ignore[assignment]
    flush_every: Annotated[
        float, typer.Option("--flush-every", min=0.1, help="Seconds between flushes of the store.")
    ] = 10.0,
    flush_bytes: Annotated[
        int,
        typer.Option(
            "--flush-bytes", parser=size, metavar="BYTES", help="New bytes that cause a flush."
        ),
    ] = "64M",  # type: ignore[assignment]
    host: Host = "127.0.0.1",
    port: Port = 8080,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File of accepted keys, one per line.")
    ] = None,
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="Let API keys share cached prefixes.")
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option("--chat-template", help="Jinja file in place of the model's template."),
    ] = None,
    release: Annotated[
        str,
        typer.Option(
            "--release",
            help="Build, as 0.3.36+patched; default: newest verified.",
            autocompletion=release_names,
        ),
    ] = "",
    threads: Threads = None,
    grace: Annotated[
        float, typer.Option("--grace", min=0, max=86400, help="Seconds for requests after SIGTERM.")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Serve a model over the OpenAI API, with a cache that survives restarts.

    This server is pyllamakv's own; `pyllamakv server` runs upstream's llama-server.
    Its address is printed when it is ready. SIGTERM and Ctrl-C end it after a flush.
    """
    try:
        from pyllamakv.serve import service
    except ModuleNotFoundError as error:
        msg = f"pyllamakv serve needs the package {error.name}"
        raise ToolMissing(msg, error.name or "", hint="pip install 'pyllamakv[serve]'") from error
    path = _model_file(model)
    options = service.ServeOptions(
        model=path,
        name=path.stem if Path(model).is_file() else model,
        release=release or None,
        host=host,
        port=port,
        n_ctx=ctx,
        parallel=parallel,
        queue=queue,
        n_threads=threads,
        store=store,
        budget=budget,
        flush_every=flush_every,
        flush_bytes=flush_bytes,
        grace=grace,
        keys=() if api_key_file is None else service.read_keys(api_key_file),
        shares_prefixes=share_prefixes,
        template=None if chat_template is None else _text(chat_template),
    )
    if host not in ("127.0.0.1", "::1", "localhost") and not options.keys:
        note(f"warning: everyone who can reach {host} can use this server; see --api-key-file")

    def ready(url: str) -> None:
        facts = {"url": url, "pid": os.getpid(), "model": options.name}
        write_json(facts, indent=None) if as_json else write_lines([url])
        sys.stdout.flush()

    service.serve(options, ready)


def _model_file(name: str) -> Path:
    """Return the path of a model, fetched if it is one of the package index."""
    from pyllamakv import models
    from pyllamakv.scenarios import synthetic_models

    if name in models.known():
        from pyllamakv.cli import progress_bar

        with progress_bar.progress() as progress:
            return models.get(name, progress=progress)
    return synthetic_models.model(name)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
