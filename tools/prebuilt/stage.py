"""Write the project of pyllamakv-prebuilt: `python tools/prebuilt/stage.py FOLDER [RELEASE]`.

It contains the portable builds of a release, stock and patched, without the libraries for
llama-cpp-python; they are built if necessary. The default is the newest verified release.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import pyllamakv
from pyllamakv.building import build, variant
from pyllamakv.errors import BuildError
from pyllamakv.home import PREBUILT_MODULE
from pyllamakv.source import store, verified

_HERE = Path(__file__).resolve().parent
_LICENSE = _HERE.parents[1] / "LICENSE"


def stage(folder: Path, release: str = "") -> list[variant.Variant]:
    """Write the project into an empty folder, and return the variants in it."""
    release = release or verified.newest().name
    specs = [variant.Spec(release, series) for series in ((), None)]
    module = folder / PREBUILT_MODULE
    made = [_copy(spec, module / "built") for spec in specs]
    text = f'"""Contain llama.cpp {release} for pyllamakv."""\n\n'
    text += f'__version__ = "{pyllamakv.__version__}"\n'
    (module / "__init__.py").write_text(text, encoding="utf-8")
    for name in ("pyproject.toml", "platform_tag.py"):
        shutil.copy2(_HERE / name, folder / name)
    shutil.copy2(_LICENSE, folder / "LICENSE")
    licence = store.open_store().read(made[0].manifest.tree, "LICENSE")
    if licence is None:
        raise BuildError(f"{release} has no LICENSE, which its binaries must contain")
    (folder / "LICENSE.llama.cpp").write_bytes(licence)
    return made


def _copy(spec: variant.Spec, root: Path) -> variant.Variant:
    found = build.build(spec, native=False)
    copy = variant.Variant(root / found.id)
    copy.folder.mkdir(parents=True)
    shutil.copy2(found.library, copy.folder)
    dataclasses.replace(found.manifest, dropin=()).save(copy.folder)
    variant.add_to_index(variant.request(spec, native=False), copy)
    return copy


if __name__ == "__main__":
    for each in stage(Path(sys.argv[1]), *sys.argv[2:]):
        sys.stdout.write(f"{each.id}\n")
