"""Read what a commit says of itself; one of others may say anything, or nothing."""

from __future__ import annotations

from datetime import UTC, datetime

from pyllamakv.errors import ArchiveError

#: More than any merge has; each is looked for in the store.
PARENTS = 64


def parents(text: str) -> list[str]:
    """Return the parents that a commit names, each once. Raises ArchiveError for too many."""
    found = list(dict.fromkeys(value for key, value in _header(text) if key == "parent"))
    if len(found) > PARENTS:
        msg = f"the commit has {len(found)} parents; no commit of a release has more than {PARENTS}"
        raise ArchiveError(msg)
    return found


def date(text: str) -> str:
    """Return when a commit was made, ISO 8601 in UTC. Raises ArchiveError where it has no date."""
    said = next((value for key, value in _header(text) if key == "committer"), "")
    try:
        when = datetime.fromtimestamp(int(said.rsplit(" ", 2)[1]), tz=UTC)
    except (IndexError, ValueError, OverflowError, OSError) as error:
        msg = f"the commit says nothing of when it was made: committer {said[:200]!r}"
        raise ArchiveError(msg) from error
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


def _header(text: str) -> list[tuple[str, str]]:
    lines = text.split("\n\n", 1)[0].split("\n")
    return [(key, value) for key, _, value in (line.partition(" ") for line in lines)]
