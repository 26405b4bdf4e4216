"""Look for a project's files on the configured package indexes."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from pyllamakv.errors import FetchError
from pyllamakv.source import pipconfig, tree_limits
from pyllamakv.source.package_sources import LLAMA_CPP_PYTHON, find_archive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyllamakv.source.pipconfig import PipSettings


@dataclass(frozen=True)
class IndexFile:
    """Describe a file that an index offers."""

    name: str
    version: str
    url: str
    #: The hash on the index; None if there is none.
    sha256: str | None
    yanked: bool = False
    #: Time of the upload, ISO 8601 in UTC; empty if the index has none.
    uploaded: str = ""

    @property
    def order(self) -> Version:
        """Return the version as a sorting key."""
        return Version(self.version)


class PackageIndex:
    """List the files of a project on pip's indexes and find-links."""

    def __init__(
        self,
        settings: PipSettings | None = None,
        *,
        project: str = LLAMA_CPP_PYTHON.project,
    ) -> None:
        self.settings = settings or pipconfig.read()
        self.project = project
        self._session: Any = None
        #: Errors of the sources that did not answer the last request.
        self.unreachable: list[str] = []

    def __enter__(self) -> PackageIndex:
        return self

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    @property
    def session(self) -> Any:
        """Return the HTTP client for requests and downloads; it also reads ``file://``."""
        if self._session is None:
            from unearth.auth import MultiDomainBasicAuth
            from unearth.fetchers import PyPIClient

            chosen = self.settings
            options: dict[str, Any] = {"proxy": chosen.proxy} if chosen.proxy else {}
            session = PyPIClient(
                trusted_hosts=chosen.trusted_hosts,
                verify=_certificates(chosen.cert),
                timeout=chosen.timeout,
                follow_redirects=True,
                event_hooks={"response": [_bounded]},
                **options,
            )
            session.auth = MultiDomainBasicAuth(prompting=False, index_urls=list(chosen.index_urls))
            self._session = session
        return self._session

    def sdists(self) -> list[IndexFile]:
        """Return every sdist on all sources, ordered by version.

        Raises FetchError with the errors of all sources if none responds.
        """
        return self.files(self._sdist_version, "sdist")

    def files(self, version_of: Callable[[str], str | None], what: str) -> list[IndexFile]:
        """Return the files for whose names ``version_of`` returns a version, ordered by version.

        ``what`` names the wanted file in errors. Raises FetchError with the errors of all sources
        if none responds.
        """
        found: dict[tuple[str, str], IndexFile] = {}
        problems_found: list[str] = []
        self.unreachable = []
        chosen = self.settings
        sources = [("index", url) for url in chosen.index_urls]
        sources += [("find-links", url) for url in chosen.find_links]
        for kind, url in sources:
            notes: list[str] = []
            try:
                with _warnings(notes):
                    for file in self._ask(kind, url, version_of):
                        found.setdefault((file.name, file.url), file)
            # The HTTP clients of unearth's versions share no base class for what they raise.
            except Exception as error:
                problem = f"{pipconfig.redacted(url)}: {type(error).__name__}: {error}"
                self.unreachable.append(problem)
            problems_found += notes
            self.unreachable += [note for note in notes if not _is_answer(kind, note)]
        problems = list(dict.fromkeys([*self.unreachable, *problems_found]))
        if not found and problems:
            listed = "; ".join(problems)
            msg = (
                f"no {what} of {self.project} was found on {chosen.sources}: {listed}. "
                "Check the network and pip's settings (`pip config list`)"
            )
            raise FetchError(msg)
        return sorted(found.values(), key=lambda file: (file.order, file.yanked))

    def _sdist_version(self, name: str) -> str | None:
        found = find_archive(name)
        return found[1] if found and found[0].project == self.project else None

    def _ask(
        self, kind: str, url: str, version_of: Callable[[str], str | None]
    ) -> Iterator[IndexFile]:
        from unearth import PackageFinder

        finder = PackageFinder(
            session=self.session,
            index_urls=[url] if kind == "index" else [],
            find_links=[url] if kind != "index" else [],
            trusted_hosts=self.settings.trusted_hosts,
            ignore_compatibility=True,
        )
        for package in finder.find_all_packages(self.project, allow_yanked=True):
            link = package.link
            version = version_of(link.filename) or ""
            if is_version(version):
                yield IndexFile(
                    name=link.filename,
                    version=version,
                    url=link.normalized.split("#", 1)[0],
                    sha256=_stated_hash(link),
                    yanked=bool(link.is_yanked),
                    uploaded=utc(link.upload_time),
                )


def _is_answer(kind: str, note: str) -> bool:
    """Return whether unearth's message about a source only says that it lacks the project.

    An archive as find-links is no page.
    """
    return "Client Error(404)" in note or (kind != "index" and "Content-Type unsupported" in note)


def _bounded(response: Any) -> None:
    """Limit responses that the client would read into memory completely.

    These are pages, redirects and errors. A download is read in pieces and limited by its writer.
    """
    pieces, whole = response.iter_bytes, response.read

    def few() -> Iterator[bytes]:
        length = 0
        for piece in pieces():
            length += len(piece)
            if length > tree_limits.MAX_INDEX_PAGE_BYTES:
                limit = tree_limits.MAX_INDEX_PAGE_BYTES
                msg = f"the index page is longer than {limit} bytes; refused"
                raise FetchError(msg)
            yield piece

    def read() -> bytes:
        response.iter_bytes = few
        return bytes(whole())

    response.read = read


def is_version(text: str) -> bool:
    """Return whether a text is a comparable version."""
    try:
        Version(text)
    except (InvalidVersion, ValueError):  # Python converts no number of thousands of digits
        return False
    return True


def utc(when: datetime | None) -> str:
    """Return a time as ISO 8601 in UTC, or an empty text for none."""
    if when is None:
        return ""
    with contextlib.suppress(OverflowError, ValueError):
        when = when.replace(tzinfo=when.tzinfo or UTC)
        return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ""


def _stated_hash(link: Any) -> str | None:
    # The JSON pages fill `hashes`, the HTML pages put the hash behind the URL.
    stated = dict(link.hashes or {})
    fragment = dict(getattr(link, "hash_option", None) or {})
    value = stated.get("sha256") or fragment.get("sha256")
    value = value[0] if isinstance(value, list) and value else value
    return str(value) if value else None


def _certificates(cert: str | None) -> ssl.SSLContext | bool:
    if cert is None:
        return True
    place = Path(cert).expanduser()
    try:
        folder = place.is_dir()
        return ssl.create_default_context(
            cafile=None if folder else os.fspath(place), capath=os.fspath(place) if folder else None
        )
    except (OSError, ssl.SSLError) as error:
        msg = f"cannot read the certificates that pip is configured to use, {place}: {error}"
        raise FetchError(msg) from error


@contextlib.contextmanager
def _warnings(into: list[str]) -> Iterator[None]:
    """Collect the log messages of unearth about unreadable pages, for the error message."""

    class _Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            into.append(record.getMessage())

    logger = logging.getLogger("unearth.collector")
    handler, before = _Keep(logging.WARNING), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
