"""Run a target of Python with Atheris: ``python program.py MODULE:FUNCTION FOLDER OPTIONS``.

The options are those of libFuzzer. This file runs as a script, not as a module: the package is
imported after Atheris, which instruments modules while they are imported. An exception that is no
error of the package ends the process like a crash; libFuzzer then writes the input to a file.
"""

from __future__ import annotations

import importlib
import mmap
import resource
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import atheris

if TYPE_CHECKING:
    from qa.fuzzing.target import Target


def main(name: str, folder: Path, options: list[str]) -> None:
    """Fuzz a target until libFuzzer ends the process."""
    module, _, function = name.partition(":")
    with atheris.instrument_imports(include=["pyllamakv", module.partition(".")[0]]):
        make = getattr(importlib.import_module(module), function)
        from pyllamakv.errors import KvError
        from pyllamakv.runtime.memory_estimate import mapped_bytes
        from qa.fuzzing.target import COUNTS, COUNTS_FORMAT, WrongAnswer
    files, seeds = folder / "files", folder / "seeds"
    for each in (files, seeds):
        each.mkdir(parents=True, exist_ok=True)
    target: Target = make(files)
    for number, data in enumerate(target.seeds):
        (seeds / f"{number}").write_bytes(data)
    place = folder / COUNTS
    if not place.exists():
        place.write_bytes(bytes(COUNTS_FORMAT.size))
    with place.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    counts = list(COUNTS_FORMAT.unpack_from(shared))

    def one_input(data: bytes) -> None:
        refused = False
        try:
            for _ in target.run(data):
                pass
        except KvError as error:
            if data in target.seeds:
                raise WrongAnswer(f"a valid input is refused: {error}") from error
            refused = True
        counts[refused] += 1
        COUNTS_FORMAT.pack_into(shared, 0, *counts)

    def mutate(data: bytes, room: int, seed: int) -> bytes:
        longest = min(room, target.longest)
        made = target.mutate(Random(seed), data, lambda part: atheris.Mutate(part, longest))
        return made[:room]

    argv = [sys.argv[0], *options, f"-max_len={target.longest}", str(seeds)]
    atheris.Setup(argv, one_input, custom_mutator=mutate)
    limit = mapped_bytes() + target.headroom
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
