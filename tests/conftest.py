"""Shared fixtures: built variants, libraries and models.

Tests marked ``native`` need stock and patched builds of the test release. ``make test`` and
``make build`` make them; where they are missing the tests are skipped, unless
``PYLLAMAKV_REQUIRE_NATIVE`` says that they must be there, as in CI.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from native_kit import TEST_RELEASE, built

if TYPE_CHECKING:
    from collections.abc import Iterator

    from source_kit import Server

    from pyllamakv.building.variant import Variant

ROOT = Path(__file__).resolve().parent.parent
#: Tests marked ``real_model`` are skipped unless this model was fetched.
REAL_MODEL = "smollm2-135m"

pytest_plugins = ["pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """Exit with the installation command if the package is not installed."""
    missing = []
    for name in (
        "cffi",
        "numpy",
        "gguf",
        "git",
        "unearth",
        "typer",
        "filelock",
        "cmake",
        "ninja",
        "hypothesis",
    ):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        activate = ROOT / ".venv" / "bin" / "activate"
        line = ". .venv/bin/activate && pytest" if activate.is_file() else "make build"
        pytest.exit(f"{', '.join(missing)} missing in this interpreter; run: {line}", returncode=4)
    # Parallel tests share the CPUs, and results of one thread do not depend on their number.
    os.environ.setdefault("PYLLAMAKV_THREADS", "1")
    import hypothesis_profile  # noqa: F401 (no deadlines: a loaded machine is not a fault)

    config.addinivalue_line("markers", "release(name): the release that a native test runs on")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data directory of the test, with a lock and pip settings of its own."""
    from source_kit import isolate

    return isolate(tmp_path, monkeypatch)


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Return a server that pip's settings name as the index."""
    from source_kit import serving

    with serving({}) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.url + "/simple")
        yield found


@pytest.fixture(scope="session")
def stock() -> Variant:
    """Return the stock variant of the test release."""
    return built(f"{TEST_RELEASE}+stock")


@pytest.fixture(scope="session")
def patched() -> Variant:
    """Return the patched variant of the test release."""
    return built(f"{TEST_RELEASE}+patched")


@pytest.fixture(scope="session", params=["stock", "patched"])
def variant(request: pytest.FixtureRequest) -> Variant:
    """Return stock, then patched."""
    found: Variant = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def library(variant: Variant) -> Iterator[Any]:
    """Open a variant in this process."""
    import pyllamakv

    with pyllamakv.open(variant.folder) as opened:
        yield opened


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a generated model of one layer."""
    from pyllamakv.scenarios import synthetic_models

    return Path(synthetic_models.tiny())


@pytest.fixture(scope="session")
def trained_model() -> Path:
    """Return the trained model that PYLLAMAKV_TEST_MODEL names, or skip."""
    named = os.environ.get("PYLLAMAKV_TEST_MODEL")
    if not named or not Path(named).is_file():
        pytest.skip("PYLLAMAKV_TEST_MODEL names no model")
    return Path(named)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Return the instruct model of the lock file, or skip."""
    from pyllamakv import models
    from pyllamakv.errors import NotFetched

    try:
        return models.find(REAL_MODEL)
    except NotFetched as error:
        pytest.skip(str(error))


@pytest.fixture
def fuzz_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the targets of `fuzz_kit` importable in the processes of the fuzzer."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "tests" / "kits"), str(ROOT))))
