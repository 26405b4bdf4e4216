"""Read the sources of packages from pip's environment variables and config files."""

from __future__ import annotations

import configparser
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from pyllamakv.errors import UsageError

#: pip's public default, used when pip's own configuration names no index.
DEFAULT_INDEX = "https://pypi.org/simple"

_SECTIONS = ("global", "download")
_NO = ("", "0", "no", "false", "off", "n", "f")


@dataclass(frozen=True)
class PipSettings:
    """pip's settings about the sources of packages."""

    index_urls: tuple[str, ...] = (DEFAULT_INDEX,)
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    #: A file or directory of certificates; None uses those of the HTTP client.
    cert: str | None = None
    proxy: str | None = None
    timeout: float = 60.0

    @property
    def sources(self) -> str:
        """Return the places without credentials, for messages."""
        return ", ".join(redacted(url) for url in (*self.index_urls, *self.find_links)) or "none"


def read() -> PipSettings:
    """Return pip's settings: environment variables first, then its config files, then defaults.

    Raises UsageError for a config file that cannot be read.
    """
    values = _from_files() | _from_environment()
    indexes = [values.get("index-url", "").strip() or DEFAULT_INDEX]
    indexes += values.get("extra-index-url", "").split()
    if values.get("no-index", "").strip().lower() not in _NO:
        indexes = []
    links = [_place(word) for word in values.get("find-links", "").split()]
    cert = values.get("cert", "").strip()
    cert = cert or os.environ.get("REQUESTS_CA_BUNDLE", "") or os.environ.get("CURL_CA_BUNDLE", "")
    return PipSettings(
        index_urls=tuple(dict.fromkeys(url.rstrip("/") for url in indexes)),
        find_links=tuple(dict.fromkeys(links)),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        cert=cert or None,
        proxy=values.get("proxy", "").strip() or None,
        timeout=_seconds(values.get("timeout") or values.get("default-timeout") or ""),
    )


def files() -> list[Path]:
    """Return pip's existing config files, the one with the highest precedence last."""
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path.home()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    if sys.platform == "darwin":
        system = [Path("/Library/Application Support/pip/pip.conf")]
        user = home / "Library" / "Application Support" / "pip"
        config = user.parent if user.is_dir() else config
    else:
        dirs = (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
        system = [*(Path(d) / "pip" / "pip.conf" for d in reversed(dirs)), Path("/etc/pip.conf")]
    found = [*system, home / ".pip" / "pip.conf", config / "pip" / "pip.conf"]
    found.append(Path(sys.prefix) / "pip.conf")
    if named:
        found.append(Path(named))
    return [path for path in found if path.is_file()]


def redacted(url: str) -> str:
    """Return a URL without the name and password in it."""
    return re.sub(r"^([^/?#]*://)[^/?#]*@", r"\1***@", url)


def _from_files() -> dict[str, str]:
    values: dict[str, str] = {}
    for path in files():
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text("utf-8"), str(path))
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            msg = f"cannot read pip's config file {path}: {error}"
            raise UsageError(msg) from error
        for section in _SECTIONS:
            if parser.has_section(section):
                found = parser.items(section)
                values |= {key.lower().replace("_", "-"): value for key, value in found}
    return values


def _from_environment() -> dict[str, str]:
    named = {key: value for key, value in os.environ.items() if key.startswith("PIP_") and value}
    return {key[4:].lower().replace("_", "-"): value for key, value in named.items()}


def _place(word: str) -> str:
    return word if "://" in word else str(Path(word).expanduser().absolute())


def _seconds(text: str) -> float:
    try:
        return max(1.0, float(text)) if text.strip() else 60.0
    except ValueError:
        return 60.0
