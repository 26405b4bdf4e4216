"""Serve this machine's devices to other processes and machines: `pyllamakv rpc`."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated

import typer

from pyllamakv.cli.options import Json
from pyllamakv.errors import UsageError
from pyllamakv.source.releases import DEFAULT_RELEASE

app = typer.Typer(add_completion=False)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@app.callback()
def root() -> None:
    """Let models and their KV caches live on other processes and machines."""


@app.command()
def serve(
    spec: Annotated[
        str, typer.Argument(help="A built variant, 0.3.9+patched; clients need that release.")
    ] = DEFAULT_RELEASE,
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
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", min=1, help="At most so many compute.")
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="Which variant: cpu, cuda, metal or vulkan.")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Serve a device until Ctrl-C; the endpoint is printed once it answers.

    The protocol has no authentication and no encryption: only ever listen where everybody may use
    this machine's memory.
    """
    from pyllamakv.open_variant import serve_rpc as start

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
            sys.stderr.write(
                f"warning: {server.endpoint} is open to everybody who can reach it: RPC has no "
                "authentication; put it behind a firewall or an SSH tunnel\n"
            )
        facts = {"endpoint": server.endpoint, "pid": server.pid, "spec": spec}
        sys.stdout.write(f"{json.dumps(facts) if as_json else server.endpoint}\n")
        sys.stdout.flush()
        sys.stderr.write(f"serving {spec}; end with Ctrl-C\n")
        server.wait()


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip() or "0", re.IGNORECASE)
    if match is None:
        msg = f"--memory: expected a number of bytes such as 512M or 4G, found {text!r}"
        raise UsageError(msg)
    return int(match[1]) * _UNITS[match[2].upper()]
