"""Test the verdict of a server from both sides; a failed build is no result."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from patching_kit import SeriesSandbox

from pyllamakv.building.variant import Spec
from pyllamakv.errors import (
    CommandFailed,
    HarnessError,
    LoadError,
    NoPortApplies,
    ScenarioFailed,
    ServerDied,
    ToolMissing,
    UnknownPatch,
    Unsupported,
    UsageError,
)
from pyllamakv.patching.port_choice import Manual, Skipped
from pyllamakv.server import server_check
from pyllamakv.server.server_check import check_server, select
from pyllamakv.server.server_lab import ServerLab
from pyllamakv.server.server_scenarios import SCENARIOS, ServerScenario
from pyllamakv.source.store import open_store
from pyllamakv.verification.verdict import Verdict


def sides(
    monkeypatch: pytest.MonkeyPatch,
    patched: Exception | None = None,
    *,
    carried: bool = False,
    skipped: tuple[Skipped, ...] = (),
    unable: str = "",
) -> None:
    """Replace the builds by fakes; with ``carried``, a patch of each part was carried.

    The server of the side ``unable`` cannot run.
    """
    library = {"full-defrag": "0.3.8"} if carried else {}
    server = {"server-metrics": "0.3.9"} if carried else {}
    applied = SimpleNamespace(carried=library, skipped=skipped)
    monkeypatch.setattr(server_check.apply, "apply", lambda *_args, **_options: applied)
    sources = SimpleNamespace(carried=server)
    monkeypatch.setattr(server_check.server_patches, "choose", lambda *_args, **_options: sources)

    def build_server(spec: Spec, **_options: object) -> Any:
        kind = "stock" if spec.series == () else "patched"
        if patched and kind == "patched":
            raise patched
        manifest = SimpleNamespace(stock=kind == "stock", carried=library, backend="cpu")

        def check_program() -> Path:
            if kind == unable:
                raise LoadError("it needs avx512f")
            return Path(sys.executable)

        return SimpleNamespace(
            id=kind,
            manifest=SimpleNamespace(
                patches=("full-defrag",),
                server_patches=("server-metrics",),
                left_out={"server-defrag-thold": "requires compaction"},
                carried=server,
            ),
            variant=SimpleNamespace(manifest=manifest),
            check_program=check_program,
        )

    monkeypatch.setattr(server_check, "build_server", build_server)


def scenarios(monkeypatch: pytest.MonkeyPatch, patch: str = "", **errors: Exception) -> None:
    """Replace the scenarios by one fix that raises an error per side, and by one of a patch."""

    def run(lab: ServerLab) -> None:
        lab.note(requests=3)
        if lab.built.id in errors:
            raise errors[lab.built.id]

    own = ServerScenario("server-y", "fix", "", run, (), patch=patch)
    found = (ServerScenario("server-x", "fix", "", run, ()), *([own] if patch else []))
    monkeypatch.setattr(server_check, "SCENARIOS", found)


def test_a_missing_package_is_reported_before_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builds take minutes; only packages of the selected scenarios count."""
    for name in ("httpx", "openai"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(server_check, "build_server", None)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ToolMissing, match="openai, which is not installed: pip install"):
        check_server("0.3.9")
    with pytest.raises(TypeError, match="not callable"):
        check_server("0.3.9", scenarios=("server-parallel",))


def test_fixed_server_crash_has_the_verdict_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON has the data of both sides."""
    sides(monkeypatch)
    scenarios(monkeypatch, stock=ServerDied("llama-server was ended by SIGABRT: x"))
    found = check_server("0.3.9")
    assert found.decision.verdict is Verdict.NEEDED
    assert found.patches == ("full-defrag",)
    facts = found.to_json()
    assert facts["server_patches"] == ["server-metrics"]
    assert facts["left_out"] == {"server-defrag-thold": "requires compaction"}
    assert facts["carried"] == {}
    assert facts["scenarios"] == {"server-x": "needed"}
    assert facts["servers"] == {"stock": "stock", "patched": "patched"}
    stock, patched = facts["results"]
    assert (stock["status"], stock["failure"]) == ("fail", "crash")
    assert (patched["status"], patched["notes"]) == ("pass", {"requests": 3})


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ({}, Verdict.REDUNDANT),
        ({"patched": ScenarioFailed("text", failure="data")}, Verdict.HARMFUL),
        (
            {"stock": ScenarioFailed("retries"), "patched": ScenarioFailed("retries")},
            Verdict.INEFFECTIVE,
        ),
    ],
)
def test_server_outcomes_decide_the_verdict(
    monkeypatch: pytest.MonkeyPatch, errors: dict[str, Exception], verdict: Verdict
) -> None:
    """The rules are those of every other check."""
    sides(monkeypatch)
    scenarios(monkeypatch, **errors)
    assert check_server("0.3.9").decision.verdict is verdict


def test_scenarios_of_patches_for_other_releases_decide_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They run on stock, to show its defect; no patched server is expected to pass them."""
    sides(monkeypatch)
    scenarios(monkeypatch, patch="server-reuse", stock=ScenarioFailed("x", failure="lost"))
    found = check_server("0.3.9")
    assert (found.decision.verdict, found.decision.runs) == (Verdict.NEEDED, 1)
    results = [(each["scenario"], each["side"]) for each in found.to_json()["results"]]
    assert results == [("server-x", "stock"), ("server-x", "patched"), ("server-y", "stock")]
    alone = check_server("0.3.9", scenarios=("server-y",)).decision
    reason = "server-y is a claim of server-reuse, which is for b11549 and later"
    assert (alone.verdict, alone.reason) == (Verdict.UNTESTABLE, reason)


def test_a_claim_of_a_server_patch_that_does_not_fit_is_broken_apply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A release that a patch is meant for, and where it does not fit, is reported."""
    sides(monkeypatch)
    scenarios(monkeypatch, patch="server-defrag-thold", stock=ScenarioFailed("x", failure="lost"))
    found = check_server("0.3.36").decision
    assert found.verdict is Verdict.BROKEN_APPLY
    assert found.reason == "stock fails server-y; server-defrag-thold: requires compaction"
    scenarios(monkeypatch, patch="server-defrag-thold")
    native = check_server("0.3.36").decision
    assert native.scenarios == {"server-x": Verdict.REDUNDANT, "server-y": Verdict.NATIVE}


@pytest.mark.parametrize(
    "errors",
    [
        {"patched": ScenarioFailed("text", failure="data")},
        {"stock": ScenarioFailed("retries"), "patched": ScenarioFailed("retries")},
    ],
)
def test_failing_carried_server_patch_is_broken_carry(
    monkeypatch: pytest.MonkeyPatch, errors: dict[str, Exception]
) -> None:
    """The verdict names carried patches of the library and of the server."""
    sides(monkeypatch, carried=True)
    scenarios(monkeypatch, **errors)
    found = check_server("0.3.9")
    assert found.decision.verdict is Verdict.BROKEN_CARRY
    assert "carried full-defrag from 0.3.8, server-metrics from 0.3.9" in found.decision.reason
    assert found.to_json()["carried"] == {"full-defrag": "0.3.8", "server-metrics": "0.3.9"}


def test_uncompilable_carried_server_patch_is_broken_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing has a manifest."""
    scenarios(monkeypatch)
    sides(monkeypatch, CommandFailed("x", ["ninja"], 1, "", "server.cpp:1: error"), carried=True)
    found = check_server("0.3.9")
    assert found.decision.verdict is Verdict.BROKEN_CARRY
    assert found.carried == {"full-defrag": "0.3.8", "server-metrics": "0.3.9"}


def test_a_patch_that_is_not_applied_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is, whatever the others do; a selected scenario has its own verdict."""
    torn = Skipped("window-rollback", "its hunk 1 does not apply", manual=(Manual("0.3.9", "x"),))
    other = Skipped("mmap-kv", "requires kv-counters")
    scenarios(monkeypatch, stock=ScenarioFailed("retries"))
    sides(monkeypatch, skipped=(torn, other))
    found = check_server("0.3.9").decision
    assert (found.verdict, found.reason) == (Verdict.BROKEN_APPLY, "its hunk 1 does not apply")
    found = check_server("0.3.9", scenarios=("server-x",)).decision
    assert found.verdict is Verdict.NEEDED


def test_missing_patched_server_is_broken_apply_or_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no port, or a server that does not compile."""
    scenarios(monkeypatch, stock=ScenarioFailed("retries"))
    sides(monkeypatch, NoPortApplies("no port of full-defrag applies\nmore"))
    found = check_server("0.3.9").decision
    assert found.verdict is Verdict.BROKEN_APPLY
    assert "no port of full-defrag applies" in found.reason
    sides(monkeypatch, CommandFailed("x", ["ninja"], 1, "", "server.cpp:1: error"))
    found = check_server("0.3.9").decision
    assert (found.verdict, found.reason) == (Verdict.BROKEN_BUILD, "server.cpp:1: error")


@pytest.mark.slow
def test_missing_stock_server_is_untestable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is a release without a server."""

    def build_server(*_args: object, **_options: object) -> None:
        raise Unsupported("release 0.0 contains no llama-server")

    monkeypatch.setattr(server_check, "build_server", build_server)
    found = check_server("0.0").decision
    assert found.verdict is Verdict.UNTESTABLE
    assert "no llama-server" in found.reason


def test_server_for_another_cpu_is_untestable(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is stock's, nothing is decided; if only the patched one, the patches broke it."""
    scenarios(monkeypatch, stock=AssertionError("was run"))
    sides(monkeypatch, unable="stock")
    found = check_server("0.3.9").decision
    assert (found.verdict, found.exit_code) == (Verdict.UNTESTABLE, 125)
    assert "stock's server cannot run: it needs avx512f" in found.reason
    sides(monkeypatch, unable="patched")
    checked = check_server("0.3.9")
    assert checked.decision.verdict is Verdict.BROKEN_BUILD
    assert checked.decision.reason == "the patched server cannot run: it needs avx512f"
    assert checked.patches == ("full-defrag",)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ToolMissing("no httpx"), ToolMissing), (KeyError("content"), HarnessError)],
)
def test_errors_of_the_server_check_are_raised(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    """A missing client, and a defect of this package."""
    sides(monkeypatch)
    scenarios(monkeypatch, stock=error)
    with pytest.raises(raised):
        check_server("0.3.9")


def test_selected_server_scenarios_are_found_by_id() -> None:
    """Without ids, all are run; ids are unique."""
    assert select(()) == list(SCENARIOS)
    assert [each.id for each in select(["server-slots"])] == ["server-slots"]
    assert len({each.id for each in SCENARIOS}) == len(SCENARIOS)
    with pytest.raises(UsageError, match="expected one of server-context-shift"):
        select(["fragmented"])


@pytest.mark.parametrize(("name", "error"), [("page", UsageError), ("nothing", UnknownPatch)])
def test_names_of_another_series_are_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, error: type[Exception]
) -> None:
    """Its own patches name them; the ids of the shipped series are unknown then."""
    queue = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "queue")
    queue.add_patch("page", {"0.3.9": ({}, {"tools/server/a.txt": b"a\n"})}, target="server")
    monkeypatch.setattr(server_check, "build_server", None)
    for names in ((name,), ("full-defrag",)):
        with pytest.raises(error if names == (name,) else UnknownPatch):
            check_server("0.3.9", patches=str(queue.folder), series=names)


@pytest.mark.parametrize(
    ("name", "error"), [("server-metrics", UsageError), ("no-such-patch", UnknownPatch)]
)
def test_patches_are_checked_before_the_builds(
    monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception]
) -> None:
    """A build takes minutes."""
    built: list[object] = []
    monkeypatch.setattr(server_check, "build_server", lambda spec, **_: built.append(spec))
    with pytest.raises(error):
        check_server("0.3.9", series=(name,))
    assert built == []
