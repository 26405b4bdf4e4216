"""Steps with one defect each, and a correct one, for the tests of fault injection."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from pyllamakv.errors import SourceError, Unsupported
from pyllamakv.source.files import locked, write_text_atomic
from qa.faults.step import FaultTarget

FACTS = {"numbers": list(range(200))}


class Careful(FaultTarget):
    """Write a file as the product does, and read it."""

    name = "careful"

    def run(self, folder: Path) -> Any:
        place = folder / "home" / "facts.json"
        with locked(folder / "home" / "lock"):
            if not place.exists():
                write_text_atomic(place, json.dumps(FACTS))
            return json.loads(place.read_text())


class InPlace(Careful):
    """Write the file in place: a kill leaves half of it."""

    name = "in place"

    def run(self, folder: Path) -> Any:
        place = folder / "home" / "facts.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.write_text(json.dumps(FACTS))
        return json.loads(place.read_text())


class Littering(Careful):
    """Write under a random name that is never removed."""

    name = "littering"

    def run(self, folder: Path) -> Any:
        place = folder / "home" / "facts.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(FACTS, file)
        Path(name).replace(place)
        return json.loads(place.read_text())


class Locking(Careful):
    """Hold a lock that outlives its holder."""

    name = "locking"

    def run(self, folder: Path) -> Any:
        lock = folder / "lock"
        try:
            lock.touch(exist_ok=False)
        except FileExistsError as error:
            raise SourceError("another run holds the lock") from error
        (folder / "facts").write_text("x")
        lock.unlink()
        return 1


class Believing(Careful):
    """Trust the clock."""

    name = "believing"

    def run(self, folder: Path) -> Any:
        begin = time.time()
        (folder / "facts").write_text("x")
        if abs(time.time() - begin) > 600:
            raise SourceError("the lock is too old")
        return 1


class Silent(Careful):
    """Treat a failed write as a success."""

    name = "silent"

    def run(self, folder: Path) -> Any:
        try:
            (folder / "facts").write_text("x" * 100)
        except OSError:
            return (folder / "facts").read_text() if (folder / "facts").exists() else ""
        return (folder / "facts").read_text()


class Forgiving(Careful):
    """Ignore a failed write, as for a cache."""

    name = "forgiving"

    def run(self, folder: Path) -> Any:
        with contextlib.suppress(OSError):
            (folder / "facts").write_bytes(bytes(700))
        (folder / "facts").unlink(missing_ok=True)
        return 1


class Starved(Careful):
    """Import like the interpreter does without memory."""

    name = "starved"
    error: Exception = OSError(errno.ENOMEM, "Cannot allocate memory")

    def run(self, folder: Path) -> Any:
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            raise self.error
        return 0


class Confused(Starved):
    """Report a lack of memory as another error."""

    name = "confused"
    error = ValueError("no such file")


class Hungry(Careful):
    """Take more memory than some runs get."""

    name = "hungry"

    def run(self, folder: Path) -> Any:
        return len(bytearray(48 << 20))


class Refusing(FaultTarget):
    """Need a capability that the library lacks."""

    name = "refusing"

    def run(self, folder: Path) -> Any:
        msg = "several states"
        raise Unsupported(msg)


class Refused(Refusing):
    """The same, as a step that a release may lack."""

    name = "refused"
    optional = True
