"""Read llama.cpp from a git URL, a git bundle or a directory."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyllamakv.errors import FetchError, GitError, HashMismatch, UnknownRelease, UsageError
from pyllamakv.printable import printable
from pyllamakv.source import era, git_command, git_limits, lockfile, tree_limits
from pyllamakv.source.files import inheritable_lock, translate_disk_errors
from pyllamakv.source.package_sources import find_package
from pyllamakv.source.pipconfig import redacted
from pyllamakv.source.quarantine import API_HEADERS, move
from pyllamakv.source.releases import Release, canonical_name
from pyllamakv.source.store import Store, open_store
from pyllamakv.source.tree_export import GENERATED_FILES, STAMP

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_HOST_ALONE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*")
_REF = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
_PASSWORD = re.compile(r"[^/?#]*://[^/?#]*:[^/?#]*@")
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{4,39}")
_INCOMING = "refs/incoming/x"
#: Timeout in seconds for the list of a remote's references.
_LIST_SECONDS = 120
#: Directories and files that are not part of the source.
_SKIPPED = (".git", "__pycache__")


def resolve(spec: str, lock: Path | None = None) -> Release:
    """Return the release that a spec means: ``0.3.9``, ``b4980``, ``git:URL@REF``, ``path:DIR``.

    Names are looked up in the shipped lock and in the lock of the data directory; `fetch.ensure`
    also asks the package indexes. `releases.canonical_name` has the other spellings of a name. A
    git reference is pinned when it is first resolved. The git commits of ``lock``, the lock file of
    a series, are known to this call only. Raises UnknownRelease with the closest names.
    """
    spec = spec.strip()
    if spec.startswith("path:"):
        return from_folder(spec)
    known = lockfile.known()
    name = canonical_name(spec, known)
    if name in known:
        return known[name]
    pinned = lockfile.pins(lock)
    if (of_series := canonical_name(spec, pinned)) in pinned:
        return pinned[of_series]
    if spec.startswith("git:"):
        return pin_git(spec)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    verb = f"add {name}` adds a new version" if find_package(name) else "list --new` new versions"
    msg = (
        f"there is no release {spec!r} in the lock: {hint}`pyllamakv upstream list` shows all, "
        f"`pyllamakv upstream {verb} from the package index; "
        "git:URL@REF and path:DIR select other sources"
    )
    raise UnknownRelease(msg, name=spec, suggestions=close)


def split_git(spec: str) -> tuple[str, str]:
    """Split ``git:URL@REF`` into URL and reference (default: ``HEAD``).

    Raises UsageError if git or a lock file cannot represent it, and for a URL with a password,
    which the shared lock file would contain.
    """
    rest = spec.removeprefix("git:")
    url, at, ref = rest.rpartition("@")
    if not at or not _REF.fullmatch(ref) or not url or _HOST_ALONE.fullmatch(url) or ".." in ref:
        url, ref = rest, "HEAD"
    if _PASSWORD.match(url):
        msg = (
            f"git:{redacted(url)} has a password, which the lock file would "
            "contain: remove it, and store it with git (`git credential approve`, or a helper), "
            "or use an ssh URL"
        )
        raise UsageError(msg)
    if not url or url.startswith("-") or re.search("[\n\0\ud800-\udfff]", url):
        msg = f"{spec!r} is not a git source; expected git:URL@REF"
        raise UsageError(msg)
    return url, ref


def pin_git(spec: str) -> Release:
    """Fetch the commit that a git URL or bundle has under a reference and pin it locally.

    Raises FetchError if the URL or the reference does not exist; the pins are then unchanged.
    """
    release = fetch_git(spec)
    lockfile.save(lockfile.added(), [release])
    return release


def fetch_git(spec: str, *, commit: str = "") -> Release:
    """Fetch the commit that a git URL or bundle has under a reference, without pinning it.

    ``commit``, if given, must be the one found. Raises HashMismatch for another one, and FetchError
    if the URL or the reference does not exist; the store is then unchanged.
    """
    url, ref = split_git(spec)
    here = existing_path(url)
    place = os.fspath(here.resolve()) if here else url
    store = open_store()
    with store.scratch() as folder:
        held = Store(folder)
        try:
            found = _bring(held, store, place, ref)
        except GitError as error:
            shown = printable(redacted(url))
            git_limits.raise_if_limit_hit(error, f"what {shown} has under {ref}")
            output = error.output.strip().replace(url, shown)
            msg = f"cannot fetch {ref} from {shown}: {output}"
            if _SHORT_COMMIT.fullmatch(ref):
                msg += "; git fetches a commit only by all its 40 digits"
            raise FetchError(msg) from error
        if commit and found != commit:
            msg = f"{redacted(spec)} is now {found}, was {commit}; add it again to use the new one"
            raise HashMismatch(msg, commit, found)
        release = _described(held, Release(spec, "git", found, "", "", "", url=place))
        held.parents(found)  # too many are refused while nothing is in the store
        move(held.path / "objects", store)
    store.update_ref(f"refs/upstream/{release.key}", found)
    return release


def remote_commit(release: Release) -> str:
    """Return the commit that the reference of a pinned ``git:URL@REF`` has now; fetch nothing.

    A bundle is not read: it does not state the commit of an annotated tag. Returns an empty text if
    the reference does not exist any more. Raises FetchError if git cannot read the URL.
    """
    url, ref = split_git(release.name)
    place = release.url or url
    if _COMMIT.fullmatch(ref) or Path(place).is_file():
        return release.commit
    words = ("ls-remote", "--", place, ref, f"{ref}^{{}}")
    try:
        listed = git_command.git(Path("/"), *words, network=True, timeout=_LIST_SECONDS)
    except GitError as error:
        shown = printable(redacted(place))
        msg = f"cannot list {ref} of {shown}: {error.output.strip().replace(place, shown)}"
        raise FetchError(msg) from error
    found = {name: commit for commit, _, name in (x.partition("\t") for x in listed.split("\n"))}
    # The order of `git fetch`. An annotated tag has a second line, with its commit.
    names = [f"{prefix}{ref}" for prefix in ("", "refs/", "refs/tags/", "refs/heads/")]
    name = next((each for each in names if each in found), "")
    return found.get(f"{name}^{{}}") or found.get(name, "")


def history(first: Release, last: Release) -> list[str]:
    """Return the releases between two, of which one is in a local repository, oldest first.

    Both are included. The others are the commits of the branch itself, not those of merged
    branches. Nothing is fetched. Raises UsageError if there is no local repository, or if none of
    the releases contains the other one there.
    """
    places = [(each.url or "").removeprefix("file://") for each in (last, first)
              if each.kind == "git"]  # fmt: skip
    place = next((each for each in places if each and Path(each).is_dir()), "")
    if not place:
        msg = (
            f"the history between {first.name} and {last.name} is not here: name two versions, or "
            "commits of a local repository (clone a remote one first)"
        )
        raise UsageError(msg)
    folder = Path(place)

    def contains(one: Release, other: Release) -> bool:
        words = ("merge-base", "--is-ancestor", other.commit, one.commit)
        return not git_command.run(folder, *words, timeout=git_limits.MAX_SECONDS).returncode

    if not contains(last, first):
        first, last = last, first
    if not contains(last, first):
        msg = f"neither {last.name} nor {first.name} contains the other one in {place}"
        raise UsageError(msg)
    words = ("rev-list", "--first-parent", "--reverse", f"{first.commit}..{last.commit}")
    after = git_command.git(folder, *words, timeout=git_limits.MAX_SECONDS).split()
    names = [f"git:{place}@{commit}" for commit in after[:-1]]
    return list(dict.fromkeys((first.name, *names, last.name)))


def existing_path(text: str) -> Path | None:
    """Return the file or folder that a text names on this machine, if it names one."""
    with suppress(OSError, RuntimeError, ValueError):  # no path here, or an unknown user
        place = Path(text).expanduser()
        return place if place.exists() else None
    return None


def _bring(held: Store, store: Store, place: str, ref: str) -> str:
    """Fetch into a temporary repository that uses the objects of the store; return the commit.

    Therefore, a refused fetch leaves nothing in the store. A pack that exceeds the limit is
    aborted. A server that does not answer is waited for up to a timeout.
    """
    near = place.startswith(("/", "file:"))
    # git cannot fetch a bundle with a limited depth.
    depth = [] if place.startswith("/") and Path(place).is_file() else ["--depth=1"]
    words = ["--quiet", "--no-tags", "--no-write-fetch-head", "--force", *depth]
    fetch = ("fetch", *words, "--", place, f"+{ref}:{_INCOMING}")
    with translate_disk_errors(store.path):
        git_command.git(held.path, "init", "-q", "--bare", ".")
        (held.path / "objects" / "info" / "alternates").write_text(f"{store.path}/objects\n")
        with suppress(FileNotFoundError):
            # Without this file, git would look for parents that the store does not have.
            shutil.copyfile(store.path / "shallow", held.path / "shallow")
        options = () if near else git_limits.NETWORK_OPTIONS
        bound = git_limits.MAX_SECONDS if near else git_limits.MAX_NETWORK_SECONDS
        git_command.git(held.path, *options, *fetch, network=True, bounded=True, timeout=bound)
        return git_command.git(held.path, "rev-parse", "--verify", f"{_INCOMING}^{{commit}}")


def from_folder(spec: str) -> Release:
    """Import a directory, including local changes, as a commit.

    Of a git work tree, files that git does not ignore are imported; of another directory,
    everything but ``build*`` at the top. Raises UnknownRelease if it is not llama.cpp.
    """
    try:
        folder = Path(spec.removeprefix("path:")).expanduser().resolve()
        found = any((folder / name).is_file() for name in API_HEADERS)
    except (OSError, RuntimeError, ValueError) as error:  # no path of this system
        msg = f"{spec[:200]!r} is not a directory: {error}"
        raise UnknownRelease(msg, name=spec) from error
    if not found:
        msg = f"{folder} has no llama.cpp: neither {' nor '.join(API_HEADERS)} exists"
        raise UnknownRelease(msg, name=spec)
    store = open_store()
    paths, date = _tracked(folder) or (_walk(folder), "")
    taken = tree_limits.within(folder, (p for p in paths if p not in (*GENERATED_FILES, STAMP)))
    tree = _write_tree(store, folder, taken)
    commit = store.commit_tree(tree, [], "llama.cpp as it stood in a folder")
    release = Release(f"path:{folder}", "path", commit, tree, "", date, url=str(folder))
    full = _described(store, release)
    store.update_ref(f"refs/upstream/{full.key}", commit)
    return full


def _tracked(folder: Path) -> tuple[Iterable[str], str] | None:
    """Return what git would take of a work tree and when its commit was made; None for others."""
    if not (folder / ".git").exists():
        return None
    listing = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    # `rev-list` obeys fewer settings than `git log`.
    asking = ("rev-list", "-1", "--format=%cd", "--date=format-local:%Y-%m-%dT%H:%M:%SZ")
    try:
        listed = git_command.git(folder, *listing, timeout=git_limits.MAX_SECONDS)
        output = git_command.git(
            folder, *asking, "HEAD^{commit}", "--", check=False, timeout=git_limits.MAX_SECONDS
        )
    except GitError as error:
        if error.code == git_command.TIMED_OUT:
            raise
        # An unpacked sdist has a link to a missing repository.
        return None
    date = output.rpartition("\n")[2]
    return [path for path in listed.split("\0") if path], date if _DATE.fullmatch(date) else ""


def _described(store: Store, release: Release) -> Release:
    """Fill in the facts of a commit, after checking that it is llama.cpp."""
    tree = store.tree_of(release.commit)
    tree_limits.check(store.path, tree)
    if not any(store.read_many(tree, API_HEADERS).values()):
        msg = f"{release.name} has no llama.cpp: neither {' nor '.join(API_HEADERS)} exists"
        raise UnknownRelease(msg, name=release.name)
    # The commit of a directory has a fixed date; two git references to one tree have their own.
    twin = "" if release.kind == "git" else _date_of_twin(tree)
    date = release.date or twin or store.date(release.commit)
    return replace(release, tree=tree, era=era.detect(store, tree), date=date)


def _date_of_twin(tree: str) -> str:
    """Return the date of a pinned release with the same tree: an unpacked copy has no other."""
    dates = (r.date for r in lockfile.known().values() if r.tree == tree)
    return next(dates, "")


def _write_tree(store: Store, folder: Path, paths: list[str]) -> str:
    # The index is kept, so that later calls read changed files only.
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    index = store.path.parent / "indexes" / name
    with translate_disk_errors(store.path), store.lock(f"index-{name}"):
        index.parent.mkdir(parents=True, exist_ok=True)
        with inheritable_lock(index.with_name(f"{name}.busy")) as held:
            return _indexed(store, folder, paths, index, held)


def _indexed(store: Store, folder: Path, paths: list[str], index: Path, held: int) -> str:
    # A killed git leaves this file, which would block every later write of the index.
    index.with_name(f"{index.name}.lock").unlink(missing_ok=True)
    env = {
        "GIT_DIR": str(store.path),
        "GIT_WORK_TREE": str(folder),
        "GIT_INDEX_FILE": str(index),
    }
    bound = git_limits.MAX_SECONDS
    old = git_command.git(folder, "ls-files", "-z", "--cached", env=env, timeout=bound).split("\0")
    taken = [p for p in paths if (folder / p).is_symlink() or (folder / p).is_file()]
    gone = sorted(set(old) - set(taken) - {""})
    for words, names in ((("--force-remove",), gone), (("--add",), taken)):
        command = ("update-index", "-z", *words, "--stdin")
        git_command.git(folder, *command, input=_nul(names), env=env, hold=(held,), timeout=bound)
    return git_command.git(folder, "write-tree", env=env, hold=(held,), timeout=bound)


def _nul(paths: list[str]) -> bytes:
    return b"".join(os.fsencode(path) + b"\0" for path in paths)


def _walk(folder: Path) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        below = Path(place).relative_to(folder).as_posix()
        top = below == "."
        kept = [n for n in folders if n not in _SKIPPED and not (top and n.startswith("build"))]
        links = [name for name in kept if (Path(place) / name).is_symlink()]
        folders[:] = sorted(set(kept) - set(links))
        for name in sorted([*files, *links]):
            if name not in _SKIPPED:
                yield name if top else f"{below}/{name}"
