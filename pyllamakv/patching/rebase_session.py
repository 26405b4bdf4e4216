"""Store the state of a rebase until its conflict is resolved.

There is one directory per patch, below ``rebase/`` next to the store, with ``state.json`` and the
work tree. The state is written first and removed last, so that the remains of a killed process can
be found and removed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pyllamakv.errors import PatchError
from pyllamakv.patching import worktree
from pyllamakv.source.files import write_text_atomic

if TYPE_CHECKING:
    from pyllamakv.source.store import Store

_SCHEMA = 1


@dataclass(frozen=True)
class Session:
    """One rebase of the patch ``id`` onto the release ``onto``.

    ``stock`` is the commit of the target release, ``parent`` that commit with the required patches
    applied, ``picked_commit`` the commit of the port on ``picked_from``. ``patches`` and ``to`` are
    the caller's paths, ``remaining`` the ids of the patches that follow.
    """

    id: str
    onto: str
    era: str
    stock: str
    parent: str
    picked_from: str
    base: str
    picked_commit: str
    requires: tuple[str, ...] = ()
    patches: str | None = None
    to: str | None = None
    remaining: tuple[str, ...] = ()
    phase: Literal["starting", "waiting"] = "starting"

    def folder(self, store: Store) -> Path:
        """Return the work tree of the conflict."""
        return place(store, self.id) / "tree"

    def write(self, store: Store, *, phase: Literal["starting", "waiting"]) -> Session:
        """Write the state; return it in its new phase."""
        now = replace(self, phase=phase)
        text = json.dumps({"schema": _SCHEMA, **asdict(now)}, indent=2)
        write_text_atomic(place(store, self.id) / "state.json", text + "\n")
        return now


def place(store: Store, id_: str) -> Path:
    """Return the folder of a patch's rebase."""
    return store.path.parent / "rebase" / id_


def load(store: Store, id_: str) -> Session | None:
    """Return the unfinished or interrupted rebase of a patch, or None.

    Raises PatchError when its state cannot be read.
    """
    file = place(store, id_) / "state.json"
    try:
        facts: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if facts.pop("schema") != _SCHEMA:
            raise ValueError("it was written by another version")
        facts |= {key: tuple(facts[key]) for key in ("requires", "remaining")}
        return Session(**facts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"{file} cannot be read: {error}; `pyllamakv patch rebase {id_} --abort` clears it"
        raise PatchError(msg) from error


def ids(store: Store) -> tuple[str, ...]:
    """Return the patches with an unfinished rebase, or with its remains."""
    folder = store.path.parent / "rebase"
    return tuple(sorted(path.name for path in folder.glob("*") if path.is_dir()))


def clear(store: Store, id_: str) -> bool:
    """Remove all data of a patch's rebase; return whether there was any."""
    folder = place(store, id_)
    there = folder.is_dir()
    worktree.remove(store, folder / "tree")
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name != "state.json":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (folder / "state.json").unlink(missing_ok=True)
        folder.rmdir()
    if store.ref(ref(id_)):
        store.delete_ref(ref(id_))
    return there


def ref(id_: str) -> str:
    """Return the ref that protects the picked commit during a rebase."""
    return f"refs/rebase/{id_}"
