"""Find the build that a test needs, or skip the test."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyllamakv.building.variant import Variant

#: What `make test` and `make build` build; only of it a build can be demanded.
TEST_RELEASE = "0.3.9"


def built(spec: str) -> Variant:
    """Return a built variant, or skip; fail if the test release is required and missing."""
    from pyllamakv.building import variant

    found = variant.find(spec)
    if found is None:
        message = f"{spec} is not built here: pyllamakv build {spec}"
        if spec.startswith(f"{TEST_RELEASE}+") and os.environ.get("PYLLAMAKV_REQUIRE_NATIVE"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def swept_releases() -> list[str]:
    """Return the releases that sweeps of arguments use: ``PYLLAMAKV_SWEEP_RELEASES``."""
    named = os.environ.get("PYLLAMAKV_SWEEP_RELEASES", TEST_RELEASE)
    if named != "eras":
        return named.split(",")
    from pyllamakv.verification import matrix

    return [cell.release for cell in matrix.plan(matrix.MatrixSelection(sample=True))]
