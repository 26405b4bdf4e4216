"""Serve this machine's devices to other processes and machines: `pyllamakv rpc`."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from pyllamakv.cli.options import Backend, BuiltVariant, Host, Json, Port, Threads
from pyllamakv.cli.stdout import note, write_json, write_lines
from pyllamakv.errors import UsageError

app = typer.Typer(add_completion=False)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@app.callback()
def root() -> None:
    """Serve this machine's devices over RPC."""


@app.command()
def serve(
    spec: BuiltVariant = "",
    *,
    host: Host = "127.0.0.1",
    port: Port = 50052,
    device: Annotated[
        str | None, typer.Option("--device", help="Device name; default: CPU or first GPU.")
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", help="Reported memory, as 512M or 4G (through 0.3.16).")
    ] = "",
    threads: Threads = None,
    backend: Backend = "cpu",
    as_json: Json = False,
) -> None:
    """Serve a device until Ctrl-C; print the endpoint.

    RPC has no authentication and no encryption: listen only on trusted networks.
    """
    from pyllamakv.building import variant
    from pyllamakv.open_variant import serve_rpc as start

    spec = spec or variant.newest_verified(backend=backend).id
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
                f"warning: {server.endpoint} accepts connections from other machines: RPC has "
                "no authentication; use a firewall or an SSH tunnel"
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
