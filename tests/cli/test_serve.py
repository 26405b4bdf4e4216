"""Test the verb `serve`: its options, and refused ones before a server starts."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("uvicorn")

import serve_kit
from cli_kit import cli

from pyllamakv.binding.codes import Code
from pyllamakv.cli import serve as verb
from pyllamakv.errors import NativeError
from pyllamakv.serve import service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[service.ServeOptions]:
    """Return the options of started servers; each fake server reports that it is ready."""
    found: list[service.ServeOptions] = []

    def serve(options: service.ServeOptions, ready: Any) -> None:
        found.append(options)
        ready("http://127.0.0.1:1")

    monkeypatch.setattr(service, "serve", serve)
    return found


def test_serve_options_become_server_options(
    started, tmp_path: Path, tiny_model: Path, capsys
) -> None:
    """Sizes have units; the default name of a model is that of its file."""
    keys, template = tmp_path / "keys", tmp_path / "template"
    keys.write_text("one", encoding="utf-8")
    template.write_text("{{ messages }}", encoding="utf-8")
    code, out, _ = cli(
        capsys, "serve", tiny_model, "--ctx", 256, "--parallel", 2, "--queue", 3, "--threads", 1,
        "--store", tmp_path / "s", "--budget", "2m", "--flush-bytes", "5K", "--api-key-file", keys,
        "--chat-template", template, "--grace", 1.5, "--json",
    )  # fmt: skip
    assert code == 0
    facts = json.loads(out)
    assert (facts["url"], facts["model"]) == ("http://127.0.0.1:1", tiny_model.stem)
    (options,) = started
    assert (options.budget, options.flush_bytes) == (2 << 20, 5 << 10)
    assert (options.n_ctx, options.parallel, options.queue, options.n_threads) == (256, 2, 3, 1)
    assert (options.keys, options.template, options.grace) == (("one",), "{{ messages }}", 1.5)
    assert options.store == tmp_path / "s"


def test_defaults_have_a_budget_and_loopback(started, capsys) -> None:
    """A generated model has its name; another address without keys causes a warning."""
    assert cli(capsys, "serve", "tiny") == (0, "http://127.0.0.1:1\n", "")
    assert "everyone who can reach 0.0.0.0" in cli(capsys, "serve", "tiny", "--host", "0.0.0.0")[2]
    first, second = started
    assert (first.name, first.budget, first.host, first.port) == (
        "tiny",
        8 << 30,
        "127.0.0.1",
        8080,
    )
    assert second.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("no-such-model",), "there is no model"),
        (("tiny", "--budget", "8X"), "is no size"),
        (("tiny", "--budget", "-1"), "is no size"),
        (("tiny", "--parallel", "0"), "--parallel"),
        (("tiny", "--api-key-file", "/nothing"), "cannot read the API keys"),
        (("tiny", "--chat-template", "/nothing"), "cannot read /nothing"),
    ],
)
def test_invalid_options_are_refused(started, words: tuple[str, ...], text: str, capsys) -> None:
    """The status is 2, and no server starts."""
    code, _, err = cli(capsys, "serve", *words)
    assert code == 2
    assert text in " ".join(err.split())
    assert not started


def test_serve_without_uvicorn_names_the_package(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The error has the command that installs it."""
    monkeypatch.delitem(sys.modules, "pyllamakv.serve.service", raising=False)
    monkeypatch.delattr(verb.sys.modules["pyllamakv.serve"], "service", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = cli(capsys, "serve", "tiny")
    assert code == 2
    assert "needs the package uvicorn" in err
    assert "pip install 'pyllamakv[serve]'" in err


@pytest.mark.timeout(60)
def test_server_with_an_unusable_context_ends_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The status is 2, so that a supervisor starts it again."""
    engine = serve_kit.engine(tmp_path)

    @contextmanager
    def opened(_options: service.ServeOptions) -> Iterator[Any]:
        with engine.cache:
            yield engine

    lines = verb.write_lines

    def fail(words: list[str]) -> None:
        lines(words)
        engine.failure = NativeError("an assertion of llama.cpp failed", code=Code.EEXCEPTION)

    monkeypatch.setattr(service, "opened", opened)
    monkeypatch.setattr(verb, "write_lines", fail)
    code, out, err = cli(capsys, "serve", "tiny", "--port", 0)
    assert code == 2
    assert out.startswith("http://127.0.0.1:")
    assert "an assertion of llama.cpp failed" in err
