"""The scenarios on real servers of the default release: stock dies, patched answers everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from native_kit import TEST_RELEASE

from pyllamakv.errors import NotBuilt
from pyllamakv.server.server_artifact import find_server
from pyllamakv.server.server_check import run_scenario
from pyllamakv.server.server_scenarios import SCENARIOS

if TYPE_CHECKING:
    from pyllamakv.server.server_artifact import BuiltServer
    from pyllamakv.server.server_scenarios import ServerScenario

pytestmark = [pytest.mark.native, pytest.mark.long]

BY_ID = {each.id: each for each in SCENARIOS}


def server(side: str) -> BuiltServer:
    """Return a built server, or skip."""
    pytest.importorskip("httpx")
    pytest.importorskip("openai")
    try:
        return find_server(f"{TEST_RELEASE}+{side}")
    except NotBuilt as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.id)
def test_patched_passes(scenario: ServerScenario) -> None:
    """Every request is answered, without a retry."""
    outcome, notes = run_scenario(scenario, server("patched"))
    assert outcome.status == "pass", outcome.message
    assert notes["requests"] > 0
    assert not notes.get("retries")


def test_stock_dies_of_context_shifts() -> None:
    """The finding that the series fixes: an assertion of ggml ends the server."""
    outcome, _ = run_scenario(BY_ID["server-context-shift"], server("stock"))
    assert (outcome.status, outcome.failure) == ("fail", "crash")
    assert "SIGABRT" in outcome.message


@pytest.mark.parametrize("name", [each.id for each in SCENARIOS if each.kind == "guard"])
def test_stock_passes_guards(name: str) -> None:
    """A guard that stock fails would prove nothing about patches."""
    outcome, _ = run_scenario(BY_ID[name], server("stock"))
    assert outcome.status == "pass", outcome.message
