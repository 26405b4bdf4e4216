"""Define the options and arguments that several commands share, each once."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from pyllamakv.errors import UsageError
from pyllamakv.home import data, home


def release_names(incomplete: str) -> list[str]:
    """Return the known releases that start with a text, without the modules that edit locks."""
    names: dict[str, None] = {}
    for path in (data("vendor/upstream.lock.toml"), home() / "added.lock.toml"):
        try:
            entries = tomllib.loads(path.read_text(encoding="utf-8")).get("release", [])
            names |= dict.fromkeys(str(each["name"]) for each in entries)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # completion offers what it can read
    return [name for name in names if name.startswith(incomplete)]


def patch_names(incomplete: str) -> list[str]:
    """Return the shipped patches that start with a text."""
    found = sorted(path.parent.name for path in data("patches").glob("*/patch.toml"))
    return [name for name in found if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Return the models of the lock file that start with a text."""
    from pyllamakv.models import catalog

    return [name for name in catalog.known() if name.startswith(incomplete)]


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size(text: str) -> int:
    """Return a number of bytes such as 8G."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in _UNITS or len(number) > 15:
        raise typer.BadParameter(f"{text!r} is no size; write bytes, or for example 500M or 8G")
    return int(number) * _UNITS[unit]


# What a command works on.
ReleaseName = Annotated[
    str,
    typer.Argument(
        metavar="RELEASE",
        help="Release: 0.3.36, b11549, git:URL@REF, path:DIR.",
        autocompletion=release_names,
    ),
]
ReleaseOrNewest = Annotated[
    str,
    typer.Argument(
        metavar="RELEASE",
        help="Release, as 0.3.36 or b11549; default: newest verified.",
        autocompletion=release_names,
    ),
]
Releases = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RELEASE",
        help="Release: 0.3.36, b11549, git:URL@REF, path:DIR.",
        autocompletion=release_names,
    ),
]
ReleaseOrVariant = Annotated[
    str,
    typer.Argument(
        metavar="RELEASE",
        help="0.3.36 (both builds) or 0.3.36+stock; default: newest verified.",
        autocompletion=release_names,
    ),
]
BuiltVariant = Annotated[
    str,
    typer.Argument(
        metavar="VARIANT",
        help="Built variant, as 0.3.36+patched; default: newest verified.",
        autocompletion=release_names,
    ),
]
Patch = Annotated[
    str, typer.Argument(metavar="PATCH", help="Patch name.", autocompletion=patch_names)
]
PatchNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATCH", help="Patch names; default: all.", autocompletion=patch_names),
]
RebasedNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATCH", help="Patch names; required with --onto.", autocompletion=patch_names
    ),
]
Base = Annotated[
    str, typer.Argument(metavar="BASE", help="Base release of a port, or a patch file.")
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Model name; see `model list`.", autocompletion=model_names
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Recorded trace or decode script.")]


def _absolute(patches: str) -> str:
    """Return a series by a name that means the same in every directory; raise for a missing one."""
    from pyllamakv.patching import foreign_series

    return foreign_series.absolute(patches) if patches else ""


def _writable(folder: Path | None) -> Path | None:
    """Return a directory that exists, or can be made; raise UsageError for another one."""
    there = folder
    while there is not None and not there.exists() and there != there.parent:
        there = there.parent
    if there is not None and not (there.is_dir() and os.access(there, os.W_OK)):
        raise UsageError(f"--to {folder}: {there} is not a directory that can be written.")
    return folder


# Which releases and patches.
AllReleases = Annotated[bool, typer.Option("--all", help="Use every known release.")]
OlderReleases = Annotated[bool, typer.Option("--all", help="Also list older versions.")]
AllTrees = Annotated[bool, typer.Option("--all", help="Remove every tree.")]
Series = Annotated[str, typer.Option("--series", help="Use only these patches: a,b.")]
Isolate = Annotated[
    str,
    typer.Option(
        "--isolate",
        help="Verify this patch and its requirements.",
        autocompletion=patch_names,
    ),
]
Isolates = Annotated[
    list[str] | None,
    typer.Option(
        "--isolate",
        help="Use this patch and its requirements; repeatable.",
        autocompletion=patch_names,
    ),
]
Patches = Annotated[
    str,
    typer.Option(
        "--patches",
        metavar="SERIES",
        help="Directory, file or git:REPO@FROM..TO; default: shipped.",
        callback=_absolute,
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option("--base", help="Base release of the port.", autocompletion=release_names),
]

# How to verify.
Scenario = Annotated[str, typer.Option("--scenario", help="Run only this scenario.")]
Scenarios = Annotated[
    list[str] | None, typer.Option("--scenario", help="Run only this scenario; repeatable.")
]
VerifyingScenarios = Annotated[
    list[str] | None,
    typer.Option("--scenario", help="Scenario that the patch claims to pass; repeatable."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Ignore the result cache.")]

# Builds and devices.
Backend = Annotated[str, typer.Option("--backend", help="cpu, rpc, cuda, metal or vulkan.")]
Backends = Annotated[
    list[str] | None,
    typer.Option("--backend", help="cpu (default), rpc, cuda, metal, vulkan; repeatable."),
]
Portable = Annotated[bool, typer.Option("--portable", help="Build for any CPU, not this one.")]
PortableOnly = Annotated[
    bool, typer.Option("--portable", help="Use the portable build; default: tuned, else portable.")
]
BuildServer = Annotated[bool, typer.Option("--server", help="Build llama-server as well.")]
CheckServer = Annotated[bool, typer.Option("--server", help="Verify llama-server over HTTP.")]
Quick = Annotated[bool, typer.Option("--quick", help="Run fewer cache types and layouts.")]
VariantName = Annotated[
    str, typer.Option("--variant", help="Build, as 0.3.36+patched; default: newest verified.")
]
PlayedOn = Annotated[
    str,
    typer.Option("--variant", help="Build to play on: stock, patched, 0.3.9+stock, …"),
]
FailingOn = Annotated[
    str, typer.Option("--variant", help="Build that fails; default: as recorded.")
]
Variants = Annotated[
    list[str] | None,
    typer.Option("--variant", help="Build, `stock`, `patched`, `recorded` (default); repeatable."),
]
Model = Annotated[
    str,
    typer.Option("--model", help="GGUF file, or name of a model.", autocompletion=model_names),
]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, help="Maximum number of compute threads.")
]
Budget = Annotated[
    int | None,
    typer.Option(
        "--budget", parser=size, metavar="BYTES", help="Maximum bytes to keep, for example 8G."
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any.")]

# Output.
TraceFile = Annotated[Path, typer.Option("--output", "-o", help="File of the trace.")]
SmallestTrace = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Output file; default: NAME.min.jsonl in its directory."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show details and reasons.")]
WithServer = Annotated[bool, typer.Option("--server", help="Include patches of llama-server.")]
Github = Annotated[bool, typer.Option("--github", help="Print GitHub Actions syntax.")]
Junit = Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML to this file.")]
To = Annotated[
    Path | None, typer.Option("--to", help="Write to this directory.", callback=_writable)
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep archives in the data directory.")]
