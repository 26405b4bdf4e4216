"""Serve this machine's devices to other processes and machines: `pyllamakv rpc`."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from pyllamakv.cli.options import Backend, Json, Threads
from pyllamakv.cli.stdout import note, write_json, write_lines
from pyllamakv.errors import UsageError
from pyllamakv.source.releases import DEFAULT

app = typer.Typer(add_completion=False)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@app.callback()
def root() -> None:
    """Let models and their KV caches live on other processes and machines."""


@app.command()
def serve(
    spec: Annotated[
        str, typer.Argument(help="A built variant, 0.3.9+patched; clients need that release.")
    ] = DEFAULT,
    *,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="0 takes a free one.")
    ] = 50052,
    device: Annotated[
        str | None, typer.Option("--device", help="Its name (default: the processor, or the GPU).")
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", help="What clients may use, 512M or 4G; to 0.3.16.")
    ] = "",
    threads: Threads = None,
    backend: Backend = "cpu",
    as_json: Json = False,
) -> None:
    """Serve a device until Ctrl-C; the endpoint is printed once it answers.

    The protocol has no authentication and no encryption: only ever listen where everybody may use
    this machine's memory.
    """
    from pyllamakv.opening import serve as start

    with start(
        spec,
        host=host,
        port=port,
        device=device,
        memory=_bytes(memory),
        threads=threads,
        backend=backend,
    ) as server:
        if server.open_to_others:
            note(
                f"warning: {server.endpoint} is open to everybody who can reach it: RPC has no "
                "authentication; put it behind a firewall or an SSH tunnel"
            )
        facts = {"endpoint": server.endpoint, "pid": server.pid, "spec": spec}
        write_json(facts, indent=None) if as_json else write_lines([server.endpoint])
        sys.stdout.flush()
        note(f"serving {spec}; end with Ctrl-C")
        server.wait()


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip() or "0", re.IGNORECASE)
    if match is None:
        msg = f"--memory: expected a number of bytes such as 512M or 4G, found {text!r}"
        raise UsageError(msg)
    return int(match[1]) * _UNITS[match[2].upper()]
