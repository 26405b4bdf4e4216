"""Verify a patch series in llama-server: run the server scenarios on stock and patched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyllamakv.building import variant
from pyllamakv.building.variant import Spec
from pyllamakv.errors import (
    BuildError,
    CommandFailed,
    HarnessError,
    LoadError,
    NoPortApplies,
    PatchConflict,
    SourceError,
    Unsupported,
    UsageError,
)
from pyllamakv.patching import apply, port_choice
from pyllamakv.scenarios.outcome import Outcome, classify
from pyllamakv.server import server_client, server_patches
from pyllamakv.server.server_build import build_server
from pyllamakv.server.server_lab import SETTING, ServerLab
from pyllamakv.server.server_scenarios import SCENARIOS
from pyllamakv.source import spec_resolver
from pyllamakv.verification.verdict import Decision, Pair, decide

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pyllamakv.patching.series import Series
    from pyllamakv.server.server_artifact import BuiltServer
    from pyllamakv.server.server_scenarios import ServerScenario
    from pyllamakv.source.progress import Progress


@dataclass(frozen=True)
class ServerCheck:
    """A verdict with the pairs that led to it; ``notes`` are counts by scenario and side.

    ``patches`` are those of the variant, and ``server_patches`` those of the server. ``left_out``
    has the reason for each other patch of the server, and ``carried`` the base of the port from
    which a patch of either was carried.
    """

    release: str
    decision: Decision
    pairs: tuple[Pair, ...] = ()
    notes: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    servers: dict[str, str] = field(default_factory=dict)
    patches: tuple[str, ...] = ()
    server_patches: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        found = self.decision
        return {
            "schema": 1,
            "release": self.release,
            "verdict": str(found.verdict),
            "reason": found.reason,
            "exit_code": found.exit_code,
            "runs": found.runs,
            "stock_failed": found.stock_failed,
            "patched_failed": found.patched_failed,
            "patches": list(self.patches),
            "server_patches": list(self.server_patches),
            "left_out": self.left_out,
            "carried": self.carried,
            "servers": self.servers,
            "scenarios": {name: str(verdict) for name, verdict in found.scenarios.items()},
            "results": [
                {
                    "scenario": pair.scenario,
                    "setting": pair.setting,
                    "side": side,
                    "status": outcome.status,
                    "failure": outcome.failure,
                    "message": outcome.message,
                    "notes": self.notes.get((pair.scenario, side), {}),
                }
                for pair in self.pairs
                for side, outcome in (("stock", pair.stock), ("patched", pair.patched))
                if outcome is not None
            ],
        }


def check_server(
    release: str,
    *,
    patches: str = "",
    series: Sequence[str] = (),
    scenarios: Sequence[str] = (),
    backend: str = "cpu",
    native: bool = True,
    progress: Progress | None = None,
) -> ServerCheck:
    """Build both servers of a release, run the scenarios on them, and decide the verdict.

    ``patches`` is the series (default: the shipped one), and ``series`` are ids of its patches
    (empty: all that apply). Raises UsageError for an unknown
    scenario or a patch of the server, UnknownPatch for an unknown patch, ToolMissing without a
    package that a scenario needs, and HarnessError for an internal error. A stock server that
    cannot be fetched, built or run here has the verdict untestable.
    """
    chosen = select(scenarios)
    whole = port_choice.load_series(patches)
    _check_names(series, whole, patches)
    for name in dict.fromkeys(name for each in chosen for name in each.packages):
        server_client.package(name)
    try:
        stock = build_server(
            Spec(release, ()), patches=patches, backend=backend, native=native, progress=progress
        )
    except (BuildError, SourceError, Unsupported) as error:
        if isinstance(error, SourceError) and error.exit_code != SourceError.exit_code:
            raise
        return ServerCheck(release, decide((), untestable=f"no stock server: {error}"))
    if reason := _cannot_run(stock):
        return ServerCheck(release, decide((), untestable=f"stock's server cannot run: {reason}"))
    sides, conflict = {"stock": stock}, ""
    known, names = spec_resolver.resolve(release, whole.lock), tuple(series) or None
    undecided: dict[str, str] = {}
    facts: dict[str, Any] = {}
    try:
        library = names if len(whole) else ()
        applied = apply.apply(known, library, series=whole, progress=progress)
        # No server scenario is that of a patch, so no run decides on one that is not applied.
        undecided = {each.id: each.reason for each in applied.skipped if each.failed}
        conflict = "; ".join(undecided.values())
        patched = build_server(
            Spec(release, names),
            patches=patches,
            backend=backend,
            native=native,
            progress=progress,
        )
        if patched.variant.manifest.stock and not patched.manifest.server_patches:
            conflict = conflict or "no patch of the series applies"
        else:
            sides["patched"] = patched
            made = patched.manifest
            facts = {
                "patches": made.patches,
                "server_patches": made.server_patches,
                "left_out": made.left_out,
                "carried": {**patched.variant.manifest.carried, **made.carried},
            }
    except (PatchConflict, NoPortApplies) as error:
        conflict = str(error).split("\n", 1)[0]
    except CommandFailed as error:
        sources = server_patches.choose(known, names, series=whole, progress=progress)
        carried = applied.carried | sources.carried
        decision = decide((), build_error=error.first_error or str(error), carried=_listed(carried))
        return ServerCheck(release, decision, carried=carried)
    if "patched" in sides and (reason := _cannot_run(patched)):
        failed = f"the patched server cannot run: {reason}"
        decision = decide((), build_error=failed, carried=_listed(facts["carried"]))
        return ServerCheck(release, decision, **facts)
    meant = {each.id for each in whole.server if each.covers_release(known.name)}
    outcomes: dict[tuple[str, str], Outcome] = {}
    notes: dict[tuple[str, str], dict[str, int]] = {}
    for done, scenario in enumerate(chosen):
        for side, built in sides.items():
            if side == "patched" and not _is_claimed(scenario, built.manifest.server_patches):
                continue
            if progress:
                progress(f"{scenario.id} on {side}", done, len(chosen))
            key = scenario.id, side
            outcomes[key], notes[key] = run_scenario(scenario, built)
    pairs = tuple(
        Pair(
            each.id,
            each.kind,
            SETTING,
            outcomes[each.id, "stock"],
            outcomes.get((each.id, "patched")),
            claimed=_is_claimed(each, meant),
        )
        for each in chosen
    )
    missing = {
        each.patch: facts["left_out"][each.patch]
        for each in chosen
        if each.patch in facts.get("left_out", ())
    }
    decision = decide(
        pairs,
        untestable="" if any(pair.claimed for pair in pairs) else _no_claim(chosen, whole),
        conflict="; ".join(filter(None, (conflict, *(f"{k}: {v}" for k, v in missing.items())))),
        carried=_listed(facts.get("carried", {})),
        undecided=() if scenarios else tuple(undecided),
    )
    servers = {side: built.id for side, built in sides.items()}
    return ServerCheck(release, decision, pairs, notes, servers, **facts)


def _check_names(names: Sequence[str], whole: Series, patches: str) -> None:
    """Raise UnknownPatch or UsageError for a name that is no library patch of the series."""
    if not patches:
        return variant.check_patches(names)
    for name in names:
        if whole.definition(name).target == "server":
            msg = f"{name} changes llama-server and not the libraries: leave it out of --series"
            raise UsageError(msg)
    return None


def _cannot_run(built: BuiltServer) -> str:
    """Return why a server cannot be run on this machine, or an empty text."""
    try:
        _ = ServerLab(built).flags
    except LoadError as error:
        return str(error)
    return ""


def _is_claimed(scenario: ServerScenario, patches: Collection[str]) -> bool:
    """Return whether one of the patches of a server claims a scenario, or every series does."""
    return not scenario.patch or scenario.patch in patches


def _no_claim(chosen: Sequence[ServerScenario], whole: Series) -> str:
    """Return why no scenario is claimed on a release."""
    own = {each.id: each.meant_for for each in whole.server}
    reasons = (
        f"{each.id} is a claim of {each.patch}, which is "
        + (f"for {own[each.patch]}" if own.get(each.patch) else "not in the series")
        for each in chosen
    )
    return "; ".join(reasons)


def _listed(carried: dict[str, str]) -> list[str]:
    return [f"{id_} from {base}" for id_, base in carried.items()]


def select(names: Sequence[str]) -> list[ServerScenario]:
    """Return the scenarios with these ids, or all. Raises UsageError for an unknown id."""
    known = {each.id: each for each in SCENARIOS}
    for name in names:
        if name not in known:
            expected = ", ".join(known)
            raise UsageError(f"there is no server scenario {name!r}: expected one of {expected}")
    return [known[name] for name in names] or list(SCENARIOS)


def run_scenario(scenario: ServerScenario, built: BuiltServer) -> tuple[Outcome, dict[str, int]]:
    """Run a scenario on a server; return its outcome and its counts.

    Raises HarnessError for an error that neither the server nor the scenario explains.
    """
    lab = ServerLab(built)
    try:
        scenario.run(lab)
    except BuildError:
        raise  # a tool is missing here: this is no result
    except Exception as error:
        outcome = classify(error)
        if outcome.status == "fault":
            raise HarnessError(f"{scenario.id}: {outcome.message}") from error
        return outcome, lab.notes
    return Outcome("pass"), lab.notes
