"""Test the configuration for Metal on Linux, with replacements for Apple's frameworks."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import TYPE_CHECKING

import pytest
from native_kit import built

from pyllamakv.building import backend, build, cmake, variant
from pyllamakv.home import shim
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

#: What the CMake files of all releases search for; this machine has replacements.
FRAMEWORKS = {
    "FOUNDATION_LIBRARY": "Foundation",
    "METAL_FRAMEWORK": "Metal",
    "METALKIT_FRAMEWORK": "MetalKit",
}
#: Number of kernel files that a release embeds.
KERNELS = {"0.3.9+patched": 1, "0.3.16+patched": 1, "0.3.36+patched": 34}


def configured(spec: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> cmake.BuildSession:
    """Configure a variant's tree for Metal in a directory, and return the job."""
    found = built(spec)
    with monkeypatch.context() as mac:
        mac.setattr(sys, "platform", "darwin")
        metal = backend.choose("metal")
    asked = dataclasses.replace(variant.request(spec), backend=metal)
    tree, objects = folder / "tree", folder / "objects"
    open_store().export(found.manifest.patched_tree, tree)
    objects.mkdir()
    places = {name: f"/stand-in/{each}.framework" for name, each in FRAMEWORKS.items()}
    definitions = {**build.definitions(asked, "metal"), **places, "PLK_LLAMA_SRC": str(tree)}
    job = cmake.BuildSession(objects, objects / "build.log", build.environment())
    cmake.configure(job, shim(), definitions)
    return job


@pytest.mark.slow
@pytest.mark.parametrize("spec", KERNELS)
def test_metal_configuration_links_backend_frameworks_and_kernels(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries of both kinds link the backend and its frameworks, with embedded kernels."""
    job = configured(spec, tmp_path, monkeypatch)
    rules = (job.folder / "build.ninja").read_text("utf-8")
    for product in ("libplk.", "dropin/libggml-metal."):
        link = next(line for line in rules.splitlines() if line.startswith(f"build {product}"))
        assert "libggml-metal.a" in link
        for name in FRAMEWORKS.values():
            assert f"/stand-in/{name}.framework" in link, product
    groups = json.loads((job.folder / "plk-capabilities.json").read_text("utf-8"))["groups"]
    assert groups == built(spec).manifest.probes
    kernels = set(re.findall(r"^build (\S*metal-embed\S*\.s)(?: |:)", rules, re.M))
    assert len(kernels) == KERNELS[spec]
    cmake.compile_targets(job, sorted(kernels), 2)
    for name in kernels:
        text = (job.folder / name).with_suffix(".metal").read_text("utf-8")
        assert "kernel void" in text, name
        # In its place are the types of quantized rows, which no user's Mac would find.
        assert "__embed_ggml-common.h__" not in text, name
