"""Test that an RPC server runs in its own process, reports its address and ends with its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakes.build import ROOT, fake
from library_kit import variant

import pyllamakv as kv
from pyllamakv.binding.remote import Remote
from pyllamakv.binding.rpc_server import RpcServer
from pyllamakv.errors import DeviceLost, LoadError, UsageError

LONG = 120.0


def connect(endpoint: str) -> socket.socket:
    """Connect to a server like a client."""
    host, _, port = endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LONG)


def gone(endpoint: str) -> bool:
    """Wait until no connection is accepted."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        try:
            connect(endpoint).close()
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_server_answers_until_it_is_closed() -> None:
    """It listens on loopback as soon as it is returned, and not after it is closed."""
    with RpcServer(fake(), threads=1) as server:
        assert server.alive
        assert not server.open_to_others
        connect(server.endpoint).close()
        server.wait(0.01)
        assert server.endpoint in repr(server)
    assert gone(server.endpoint)
    server.close()


@pytest.mark.slow
def test_gpu_variant_serves_its_first_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named device is used instead; without a GPU, it is refused."""
    asked: list[str | None] = []
    serve = Remote.rpc_serve

    def note(self: Remote, endpoint: str, device: str | None, memory: int) -> None:
        asked.append(device)
        serve(self, endpoint, device, memory)

    monkeypatch.setattr(Remote, "rpc_serve", note)
    gpu = variant(tmp_path / "gpu", fake("FAKE_KIND=1"), backend="cuda")
    for where, device in ((gpu, None), (gpu, "FAKE"), (variant(tmp_path / "cpu"), None)):
        kv.serve_rpc(where, device=device).close()
    assert asked == ["FAKE", "FAKE", None]
    with pytest.raises(LoadError, match="no such device was found"):
        kv.serve_rpc(variant(tmp_path / "none", backend="cuda"))


@pytest.mark.slow
def test_host_name_is_resolved_to_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp accepts only numeric addresses, which show whether the server is public."""
    with RpcServer(fake(), host="localhost") as server:
        assert server.endpoint.startswith("127.0.0.1:")
        assert not server.open_to_others
    asked = socket.getaddrinfo
    places = {"here.example": "127.0.0.2", "everywhere.example": "0.0.0.0"}

    def resolve(host: str, *words: Any) -> Any:
        return asked(places.get(host, host), *words)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(RpcServer, "_await", lambda *_words: None)
    for name, address in places.items():
        with RpcServer(fake(), host=name) as server:
            assert server.endpoint.startswith(f"{address}:")
            assert server.open_to_others == (address == "0.0.0.0")


def test_killed_rpc_server_raises_device_lost() -> None:
    """Waiting for the server raises the error; closing it is still possible."""
    with RpcServer(fake()) as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(DeviceLost, match=r"SIGKILL"):
            server.wait(LONG)
        assert not server.alive


def test_aborted_rpc_server_raises_device_lost() -> None:
    """A client can end only the server."""
    with RpcServer(fake()) as server:
        with connect(server.endpoint) as client:
            client.send(b"x")
        with pytest.raises(DeviceLost, match=r"SIGABRT"):
            server.wait(LONG)


def test_used_port_unknown_host_and_device_are_refused() -> None:
    """Each error names the value and a remedy."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UsageError, match="port that is free"):
            RpcServer(fake(), port=other.getsockname()[1])
    with pytest.raises(UsageError, match="IPv4"):
        RpcServer(fake(), host="no.such.host.invalid")
    with pytest.raises(UsageError, match="no such device"):
        RpcServer(fake(), device="abacus")
    with pytest.raises(UsageError, match="threads"):
        RpcServer(fake(), threads=0)


def test_missing_library_raises_a_load_error(tmp_path: Path) -> None:
    """The error is the library's own."""
    with pytest.raises(LoadError):
        RpcServer(tmp_path / "libplk.so")


@pytest.mark.slow
def test_a_server_ends_with_its_owner() -> None:
    """If a program is killed, its server ends."""
    code = (
        "import sys, time; from pathlib import Path;"
        " from pyllamakv.binding.rpc_server import RpcServer;"
        "server = RpcServer(Path(sys.argv[1])); print(server.endpoint, flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(fake())], stdout=subprocess.PIPE, text=True, env=env
    ) as owner:
        assert owner.stdout is not None
        endpoint = owner.stdout.readline().strip()
        connect(endpoint).close()
        owner.kill()
    assert gone(endpoint)
