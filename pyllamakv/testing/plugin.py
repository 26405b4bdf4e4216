"""Provide pytest with a library, a context and a worker of a patched llama.cpp: see docs/plugin.md.

pytest imports this module in every project whose environment has the package, so it imports nothing
but pytest until a fixture is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.runtime.context import Context
    from pyllamakv.testing.build_under_test import BuildUnderTest
    from pyllamakv.testing.device_library import DeviceLibrary

#: Default timeout of one call into a worker in seconds.
TIMEOUT = 120.0

_MARKERS = (
    "kv(model, env, timeout, **options): arguments of kv_context and kv_worker; "
    "options are those of pyllamakv.Model.context",
    "kv_fix: the test fails on stock llama.cpp and passes on a patched one",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select builds."""
    group = parser.getgroup("pyllamakv", "llama.cpp under test")
    group.addoption(
        "--llama-release",
        action="append",
        metavar="RELEASE",
        help="a release, such as 0.3.36 or path:DIR; default: newest verified; repeatable",
    )
    group.addoption(
        "--llama-series",
        action="append",
        metavar="SERIES",
        help="patched (default), stock, or PATCH,PATCH; repeatable",
    )
    group.addoption(
        "--llama-patches",
        default="",
        metavar="SERIES",
        help="directory, file or git:REPO@FROM..TO of the patches; default: shipped",
    )
    group.addoption(
        "--llama-backend",
        default="cpu",
        metavar="BACKEND",
        help="device of models and caches: cpu (default), rpc, cuda, metal or vulkan",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, so that strict projects may use them."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that uses one of the fixtures once per release and series."""
    if "kv_build" not in metafunc.fixturenames:
        return
    found = _subjects(metafunc.config)
    fix = metafunc.definition.get_closest_marker("kv_fix") is not None
    expected = pytest.mark.xfail(reason="a fix: stock fails this test", strict=True)
    metafunc.parametrize(
        "kv_build",
        [pytest.param(one, marks=[expected] if fix and one.stock else []) for one in found],
        ids=[one.name for one in found],
        scope="session",
        indirect=True,
    )


@pytest.fixture(scope="session")
def kv_build(request: pytest.FixtureRequest) -> BuildUnderTest:
    """Return the release and series under test; it is built when it is not there yet."""
    subject: BuildUnderTest = request.param
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    subject.build(None if terminal is None else terminal.write_line)
    return subject


@pytest.fixture(scope="session")
def kv_library(kv_build: BuildUnderTest) -> Iterator[DeviceLibrary]:
    """Return the library under test, open for the whole session, in this process on a CPU."""
    with kv_build.open(timeout=kv_build.place.call_timeout) as library:
        yield library


@pytest.fixture
def kv_worker(kv_build: BuildUnderTest, request: pytest.FixtureRequest) -> Iterator[DeviceLibrary]:
    """Return the library under test in a process of this test's own, which may abort or hang."""
    asked = _asked(request)
    timeout = asked.get("timeout", kv_build.place.call_timeout or TIMEOUT)
    with kv_build.open(isolated=True, env=asked.get("env"), timeout=timeout) as library:
        yield library


@pytest.fixture
def kv_context(request: pytest.FixtureRequest, kv_build: BuildUnderTest) -> Iterator[Context]:
    """Return a context for the test's `kv` marker: by default, 256 cells of a tiny model.

    It is in this process, unless the marker has ``env``, ``timeout`` or ``guard="off"``.
    """
    from pyllamakv.testing import build_under_test

    asked = _asked(request)
    apart = asked.keys() & {"env", "timeout"} or asked.get("guard") == "off"
    library = request.getfixturevalue("kv_worker" if apart else "kv_library")
    with build_under_test.context(library, asked) as made:
        yield made


def _asked(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the arguments of a test's markers; the closest marker has precedence."""
    asked: dict[str, Any] = {}
    for marker in request.node.iter_markers("kv"):
        asked = {**marker.kwargs, **asked}
    return asked


def _subjects(config: pytest.Config) -> list[BuildUnderTest]:
    """Return the tested builds, once per session."""
    from pyllamakv.errors import UsageError
    from pyllamakv.testing import build_under_test

    try:
        return build_under_test.choose(
            config.getoption("--llama-release") or (),
            config.getoption("--llama-series") or (),
            config.getoption("--llama-backend"),
            config.getoption("--llama-patches"),
        )
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
