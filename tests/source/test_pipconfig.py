"""Test that pip's settings are read from the same variables and files, in pip's order."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from source_kit import isolate

from pyllamakv.errors import UsageError
from pyllamakv.source import pipconfig


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a HOME without a config of pip."""
    isolate(tmp_path, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "xdg"))
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_default_index_is_that_of_pip() -> None:
    """Without settings, the index is pip's public default."""
    found = pipconfig.read()
    assert found.index_urls == (pipconfig.DEFAULT_INDEX,)
    assert found.find_links == found.trusted_hosts == ()
    assert found.cert is None


def test_pip_environment_variables_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Environment variables name indexes, find-links, certificates, hosts, proxy and timeout."""
    monkeypatch.setenv("PIP_INDEX_URL", "https://a.example/simple/")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://b.example/s https://a.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} https://c.example/links")
    monkeypatch.setenv("PIP_CERT", "/ca.pem")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "a.example b.example:8080")
    monkeypatch.setenv("PIP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "180")
    found = pipconfig.read()
    assert found.index_urls == ("https://a.example/simple", "https://b.example/s")
    assert found.find_links == (str(tmp_path), "https://c.example/links")
    assert found.cert == "/ca.pem"
    assert found.trusted_hosts == ("a.example", "b.example:8080")
    assert found.proxy == "http://proxy:3128"
    assert found.timeout == 180


def test_no_index_leaves_only_find_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no-index, only find-links are used."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "https://c.example/links")
    assert pipconfig.read().index_urls == ()
    monkeypatch.setenv("PIP_NO_INDEX", "false")
    assert pipconfig.read().index_urls != ()


def test_pip_configuration_files_have_the_precedence_of_pip(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PIP_CONFIG_FILE overrides the user's file, and variables override all files."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "prefix", str(home / "venv"))
    text = "[global]\nindex_url = https://{0}.example/s\n[download]\ntimeout = {1}\n"
    write(home / ".config/pip/pip.conf", text.format("user", 11))
    named = write(home / "named.conf", "[global]\nextra-index-url =\n    https://x.example\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(named))
    assert named in pipconfig.files()
    found = pipconfig.read()
    assert found.index_urls == ("https://user.example/s", "https://x.example")
    assert found.timeout == 11
    write(home / "venv/pip.conf", text.format("venv", 12))
    assert pipconfig.read().index_urls[0] == "https://venv.example/s"
    named.write_text(text.format("named", 13))
    assert pipconfig.read().index_urls[0] == "https://named.example/s"
    monkeypatch.setenv("PIP_INDEX_URL", "https://env.example/s")
    assert pipconfig.read().index_urls[0] == "https://env.example/s"


def test_the_null_device_disables_configuration_files(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If PIP_CONFIG_FILE is the null device, no file is read, as in pip."""
    write(home / ".config/pip/pip.conf", "[global]\nindex-url = https://user.example\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert pipconfig.files() == []


def test_a_broken_file_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that pip could not read is named in the error."""
    named = write(home / "bad.conf", "no section = 1\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(named))
    with pytest.raises(UsageError, match=r"bad\.conf"):
        pipconfig.read()


def test_percent_signs_are_plain(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A percent sign in a URL is not interpolation."""
    named = write(home / "p.conf", "[global]\nindex-url = https://u:p%40x@a.example/s\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(named))
    found = pipconfig.read()
    assert found.index_urls == ("https://u:p%40x@a.example/s",)
    assert "p%40x" not in found.sources
    assert pipconfig.redacted("https://u:p@a.example:1/s") == "https://***@a.example:1/s"
