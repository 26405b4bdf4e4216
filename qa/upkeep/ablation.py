"""Switch off each mechanism of carrying and placing, over our series and queues of our own.

A queue has a port for each state on which its script has a place. In *leave one out*, a state has
the ports of the others, in *forward* those of the states before, and in *carry first* those of them
that do not fit it. A tree of a queue is *wrong*
if it differs from that of the script, and a change is in another function, lacks the variable that
it uses, or copies an object without one of its members. A run without a mechanism repeats only what
the mechanism took part in.
"""

from __future__ import annotations

import functools
import itertools
import json
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard
from unittest import mock

from pyllamakv.home import home
from pyllamakv.patching import (
    carry,
    carry_comparison,
    headings,
    port_comparison,
    port_writer,
    strict_apply,
    trees,
    used_names,
)
from pyllamakv.patching.carry import Carrier
from pyllamakv.patching.definition import Definition, Port
from pyllamakv.patching.port_choice import AppliedPort, choose
from pyllamakv.patching.series import Series
from pyllamakv.patching.strict_apply import TreeOverlay
from pyllamakv.source import lockfile
from pyllamakv.source.files import write_text_atomic
from pyllamakv.source.store import Store
from qa.upkeep import queues
from qa.upkeep.measurement import CARRY_FIRST, FORWARD, LEAVE_ONE_OUT, TODAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyllamakv.patching.port_choice import Skipped
    from pyllamakv.patching.strict_apply import DraftEntry
    from pyllamakv.source.progress import Progress
    from pyllamakv.source.releases import Release
    from qa.upkeep.measurement import Measurement
    from qa.upkeep.queues import Mail

MODES = (LEAVE_ONE_OUT, FORWARD, CARRY_FIRST)
#: The name of our series among the queues, and of the run with every mechanism.
OURS, NOTHING = "ours", "nothing"
#: The states that the queues are carried to.
STEPS = ("b6845", "0.3.20", "0.3.30", "0.3.35", "b11063", "b11549")

#: What determines a result, besides the modules of `Measurement`.
_MODULES = (Path(__file__), Path(queues.__file__), Path(port_comparison.__file__))

_Off = tuple[Any, str, Any]
#: A patch, a state and a mode, and whether the tree is wrong.
_Row = dict[tuple[str, str, str], bool]


def _empty(*_args: Any, **_options: Any) -> str:
    return ""


_TOKENS: _Off = (carry, "_by_tokens", lambda *_: None)
_CONTAINED: _Off = (carry, "_without_contained", lambda _store, _base, _ours, after: (after, ()))
_USED: _Off = (used_names, "lost", _empty)
_COMPARED: _Off = (carry_comparison, "difference", _empty)
#: Mechanism of carrying -> what replaces its functions.
CARRYING: dict[str, tuple[_Off, ...]] = {
    "merge by tokens": (_TOKENS,),
    "changes that upstream made as well": (_CONTAINED,),
    "comparison of changes": (_COMPARED,),
    "functions of the changes": ((carry_comparison, "_difference", _empty),),
    "functions that upstream renamed": ((carry_comparison, "_renamed", lambda *_: {}),),
    "files that upstream renamed": ((carry_comparison, "_renamed_files", lambda *_: {}),),
    "names that the patch uses": (_USED,),
    "numbers of arguments": (
        (used_names.Sources, "arguments", lambda _self, names: {name: set() for name in names}),
    ),
    "the second and third port": ((carry, "TRIED", 1),),
    "the nearest port first": ((Carrier, "_distance", lambda *_: (0.0, False)),),
    "git's merge alone": (_TOKENS, _CONTAINED, _COMPARED, _USED),
}
#: Mechanism of placing -> what replaces its function.
PLACING: dict[str, tuple[_Off, ...]] = {
    "markers": ((Port, "failed_markers", lambda *_: ()),),
    "function of a hunk": ((headings.Headings, "differs", lambda *_: b""),),
    "changes that are present": ((strict_apply._Search, "_present", lambda *_, **__: None),),
}


@dataclass(frozen=True)
class Ablated:
    """What a mechanism does for a part of a queue: one of its mails, or one state for our series.

    ``good`` and ``wrong`` count the trees of a run without it; of ``nothing``, those of the full
    run. ``gained`` are right trees that only a run with it makes, ``lost`` right ones that only a
    run without it makes, and ``allowed`` wrong ones that only a run without it makes. ``carried``
    counts the merged ports of the full run, and ``alarms`` those for which a deleted line is
    reported. ``resolved`` counts the ports of the scripts and of our series that change other lines
    than the port before, and ``resolved_alarms`` those with such a report.
    """

    queue: str
    part: str
    mechanism: str
    good: int
    wrong: int
    gained: int
    lost: int
    allowed: int
    examples: tuple[str, ...] = ()
    carried: int = 0
    alarms: int = 0
    resolved: int = 0
    resolved_alarms: int = 0
    parts: int = 1

    def plus(self, other: Ablated) -> Ablated:
        """Return the sum of two parts of a queue."""
        counts = {
            name: value + getattr(other, name)
            for name, value in asdict(self).items()
            if isinstance(value, int)
        }
        return replace(self, part="", examples=(*self.examples, *other.examples), **counts)


def run(names: Sequence[str], measurement: Measurement, progress: Progress) -> None:
    """Measure the named queues, and keep the results for the page.

    An interrupted run continues with the next mail or state; results of other code are replaced.
    """
    with ExitStack() as held:
        for name in ("_merge", "_diff", "_sources"):
            plain = getattr(carry, name)
            cached = functools.cache(getattr(plain, "__wrapped__", plain))
            held.enter_context(mock.patch.object(carry, name, cached))
        # The same trees are read for each mechanism.
        held.enter_context(mock.patch.object(trees, "StoreTree", _shared(trees.StoreTree)))
        held.enter_context(mock.patch.object(Store, "_resolve", functools.cache(Store._resolve)))
        # A cached merge would hide the mechanisms that took part in it.
        plain = carry._merge_changes.__wrapped__
        held.enter_context(mock.patch.object(carry, "_merge_changes", plain))
        for name in names:
            queue = _Ours(measurement) if name == OURS else _Queue(name, measurement)
            code = measurement.code(*_MODULES, ports=name == OURS)
            known = [row for row in _read(name) if row["code"] == code]
            done = {row["part"] for row in known}
            for number, part in enumerate(queue.parts):
                progress(f"{name}: {part}", number, len(queue.parts))
                if part not in done:
                    known += ({**asdict(one), "code": code} for one in queue.measure(part))
                    write_text_atomic(_file(name), json.dumps(known))


def _shared(plain: Callable[[Store, str], trees.StoreTree]) -> Callable[..., trees.StoreTree]:
    """Return a constructor of readers that returns the same reader for the same tree."""
    return functools.lru_cache(maxsize=400)(plain)


def kept() -> dict[tuple[str, str], Ablated]:
    """Return the results of the last runs, by queue and mechanism."""
    found: dict[tuple[str, str], Ablated] = {}
    for row in itertools.chain.from_iterable(map(_read, (OURS, *queues.SHAPES))):
        plain = {key: row[key] for key in row if key != "code"}
        one = Ablated(**{**plain, "examples": tuple(row["examples"])})
        key = one.queue, one.mechanism
        found[key] = found[key].plus(one) if key in found else one
    return found


def _read(queue: str) -> list[dict[str, Any]]:
    file = _file(queue)
    return json.loads(file.read_text("utf-8")) if file.is_file() else []


def _file(queue: str) -> Path:
    return home() / "results" / f"ablation-{queue}.json"


@contextmanager
def _watched(fired: set[str]) -> Iterator[None]:
    """Add each mechanism that changes a result in the block to a set."""
    with ExitStack() as held:
        for mechanism, offs in CARRYING.items():
            for module, name, off in offs if len(offs) == 1 else ():
                if callable(off) and name not in ("_distance", "arguments"):
                    call = _watching(getattr(module, name), off, mechanism, fired)
                    held.enter_context(mock.patch.object(module, name, call))
        yield


def _watching(
    plain: Callable[..., Any], off: Callable[..., Any], mechanism: str, fired: set[str]
) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        result = plain(*args, **options)
        if hasattr(result, "__next__"):
            result = list(result)
        if result != off(*args, **options):
            fired.add(mechanism)
            if mechanism == "names that the patch uses" and str(result).endswith("arguments"):
                fired.add("numbers of arguments")
        return result

    return call


@contextmanager
def _without(offs: Sequence[_Off]) -> Iterator[None]:
    with ExitStack() as held:
        for off in offs:
            held.enter_context(mock.patch.object(*off))
        yield


class _Queue:
    """One generated queue on the states after its base."""

    def __init__(self, name: str, measurement: Measurement) -> None:
        self._name = name
        self._store = measurement.store
        self._states = [one for one in measurement.states if one.name in STEPS]
        self._bases = {one.name: one for one in self._states}
        self._stock = {one.name: trees.StoreTree(self._store, one.tree) for one in self._states}
        mails = queues.generate(name, self._stock[queues.SHAPES[name].base])
        self._mails = {mail.id: mail for mail in mails}
        self._scripts: dict[str, Mapping[str, DraftEntry] | None] = {}
        self._ports: dict[str, Port] = {}
        self._modes: dict[tuple[str, ...], tuple[str, str, str]] = {}
        self._alarms = _Alarms()

    @property
    def parts(self) -> list[str]:
        """Return the ids of the mails."""
        return [*self._mails]

    def measure(self, part: str) -> list[Ablated]:
        """Return the full run for a mail, and each run without a mechanism."""
        mail = self._mails[part]
        full: _Row = {}
        rows: dict[str, _Row] = {name: {} for name in (*CARRYING, *PLACING)}
        self._scripts = {one.name: mail.apply(self._stock[one.name]) for one in self._states}
        self._ports = {
            one.name: self._port(mail, one, script)
            for one in self._states
            if (script := self._scripts[one.name]) is not None
        }
        self._alarms = _Alarms()
        self._modes = {}
        for state in self._states:
            for mode in MODES:
                self._measure(mail, state, mode, full, rows)
        whole = _result(self._name, part, NOTHING, full, full)
        whole = self._alarms.counted(whole, [[*self._ports.values()]])
        return [whole] + [_result(self._name, part, name, row, full) for name, row in rows.items()]

    def _kept(self, state: Release, mode: str) -> list[Port]:
        """Return the ports that a mode keeps for a state."""
        before = self._states[: self._states.index(state)]
        others = [one for one in self._states if one is not state]
        among = others if mode == LEAVE_ONE_OUT else before
        ports = [self._ports[one.name] for one in among if one.name in self._ports]
        if mode == CARRY_FIRST:
            ports = [one for one in ports if self._applied([one], state, carried=False)[0] is None]
        return ports

    def _measure(
        self, mail: Mail, state: Release, mode: str, full: _Row, rows: dict[str, _Row]
    ) -> None:
        key = mail.id, state.name, mode
        ports = self._kept(state, mode)
        if not ports:
            return
        before = self._modes.setdefault((state.name, *(port.base for port in ports)), key)
        if before != key:  # a mode with the same ports has the same results
            for row in (full, *rows.values()):
                row.update({key: row[before]} if before in row else {})
            return
        fired: set[str] = set()
        with _watched(fired):
            changes, found = self._applied(ports, state)
        if isinstance(found, AppliedPort) and found.port.carried_from:
            self._alarms.add(found.port, ports)
        carried = isinstance(found, AppliedPort) and bool(found.port.carried_from)
        if len(found.manual) + carried > 1:
            fired.add("the second and third port")
        if (found.manual or carried) and len(ports) > 1:
            fired.add("the nearest port first")
        if fired & {"merge by tokens", "comparison of changes", "names that the patch uses",
                    "changes that upstream made as well"}:  # fmt: skip
            fired.add("git's merge alone")
        if changes is not None:
            full[key] = self._wrong(mail, state, changes)
        for mechanism, off in CARRYING.items():
            other = changes
            if mechanism in fired:
                with _without(off):
                    other, _ = self._applied(ports, state)
            if other is not None:
                rows[mechanism][key] = self._wrong(mail, state, other)
        for mechanism, off in PLACING.items():
            with _without(off):
                placed, _ = self._applied(ports, state, carried=False)
            other = changes if placed is None else placed
            if other is not None:
                rows[mechanism][key] = self._wrong(mail, state, other)

    def _wrong(self, mail: Mail, state: Release, changes: Mapping[str, DraftEntry | None]) -> bool:
        if changes == self._scripts[state.name]:
            return False
        edits = [edit for edit in mail.edits if edit.anchor]
        return any(edit.copies or edit.misplaced(changes) for edit in edits)

    def _port(self, mail: Mail, state: Release, script: Mapping[str, DraftEntry]) -> Port:
        tree = self._stock[state.name]
        made = trees.write(self._store, state.tree, TreeOverlay(tree, dict(script)))
        patch = carry._diff(self._store, state.tree, made)
        markers = port_writer.propose_markers(patch, tree)
        return Port(mail.id, patch, state.name, state.era, markers, title=mail.id)

    def _applied(
        self, ports: Sequence[Port], state: Release, *, carried: bool = True
    ) -> tuple[Mapping[str, DraftEntry | None] | None, AppliedPort | Skipped]:
        """Return the changes of a mail on a state, or None, and how its port was found."""
        id_ = ports[0].id
        definition = Definition(
            id_, id_, author="Fork <fork@example.org>", ports=tuple(ports), folder=Path("/queue")
        )
        tree = self._stock[state.name]
        draft = TreeOverlay(tree)
        carrier = Carrier(self._store, state, Series((definition,)), bases=self._bases)
        found = choose(definition, draft, tree, state.name, (), carrier if carried else None)
        return (draft.changes if isinstance(found, AppliedPort) else None), found


class _Ours:
    """Our series; a carried tree is wrong if it is not that of a port that fits strictly today.

    A state without such a port is not counted for a carried patch.
    """

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement
        self._fits = measurement.fits()
        self._states = {one.name: one for one in measurement.states}

    @property
    def parts(self) -> list[str]:
        """Return the names of the states, the newest first."""
        return [*reversed(self._states)]

    def measure(self, part: str) -> list[Ablated]:
        """Return the full run for a state, and each run without a mechanism."""
        release = self._states[part]
        full: _Row = {}
        rows: dict[str, _Row] = {name: {} for name in (*CARRYING, *PLACING)}
        alarms = _Alarms()
        today = self._apply(release, TODAY)
        for mode in MODES:
            fired: set[str] = set()
            with _watched(fired):
                found = self._apply(release, mode)
            series = self._measurement.unseen(release, mode, self._fits)
            carried = [one for one in found.values() if _carried(one)]
            for one in carried:
                alarms.add(one.port, series.definition(one.port.id).ports)
            if any(each.manual for each in found.values()):
                fired |= {"the second and third port"}
            if carried or any(each.manual for each in found.values()):
                fired.add("the nearest port first")
            if fired:
                fired.add("git's merge alone")
            for mechanism, off in {NOTHING: (), **CARRYING, **PLACING}.items():
                other = found
                if mechanism in fired or mechanism in PLACING:
                    with _without(off):
                        other = self._apply(release, mode)
                row = rows.get(mechanism, full)
                for id_, tried in other.items():
                    differs = self._differs(tried, today[id_], release)
                    if differs is not None:
                        row[id_, release.name, mode] = differs
        whole = _result(OURS, part, NOTHING, full, full)
        whole = alarms.counted(whole, self._written() if part == self.parts[0] else [])
        return [whole] + [_result(OURS, part, name, row, full) for name, row in rows.items()]

    def _written(self) -> list[list[Port]]:
        """Return the ports of each patch, oldest base first."""
        bases = lockfile.bases(self._measurement.whole.lock)
        found = []
        for each in self._measurement.whole:
            ports = [port for port in each.ports if port.base in bases]
            found.append(sorted(ports, key=lambda port: bases[port.base].order))
        return found

    def _differs(
        self, one: AppliedPort | Skipped, today: AppliedPort | Skipped, release: Release
    ) -> bool | None:
        """Return whether a port changes other lines than the one that fits a state today.

        A port that fits the state is right. Returns None for a patch that is not applied, and
        without a port to compare with.
        """
        if not isinstance(one, AppliedPort):
            return None
        if not one.port.carried_from and release in self._fits.get(one.port.digest, ()):
            return False
        if not isinstance(today, AppliedPort) or today.port.carried_from:
            return None
        return port_comparison.change_of(one.port.patch, today.port.patch) == "content"

    def _apply(self, release: Release, mode: str) -> dict[str, AppliedPort | Skipped]:
        return self._measurement.apply(release, mode, self._fits).found


def _carried(one: AppliedPort | Skipped) -> TypeGuard[AppliedPort]:
    return isinstance(one, AppliedPort) and bool(one.port.carried_from)


class _Alarms:
    """Count the reports of deleted lines: of carried ports, and of those that a person wrote."""

    def __init__(self) -> None:
        self._carried: list[bool] = []

    def add(self, carried: Port, ports: Sequence[Port]) -> None:
        """Compare a carried port with the one that it was merged from."""
        old = next(port for port in ports if port.base == carried.carried_from)
        self._carried.append(bool(port_comparison.deletions(old.patch, carried.patch)))

    def counted(self, whole: Ablated, series: Sequence[Sequence[Port]]) -> Ablated:
        """Return a result with the counts, and those of the ports of each patch, oldest first.

        A port and the next one are what a person resolved; equal changes are no resolution.
        """
        pairs = [
            pair for ports in series for pair in itertools.pairwise(ports)
            if port_comparison.change_of(pair[0].patch, pair[1].patch) == "content"
        ]  # fmt: skip
        resolved = [bool(port_comparison.deletions(one.patch, two.patch)) for one, two in pairs]
        return replace(whole, carried=len(self._carried), alarms=sum(self._carried),
                       resolved=len(resolved), resolved_alarms=sum(resolved))  # fmt: skip


def _result(queue: str, part: str, mechanism: str, row: _Row, full: _Row) -> Ablated:
    good = [key for key, wrong in row.items() if not wrong]
    gained = [key for key, wrong in full.items() if not wrong and row.get(key, True)]
    lost = [key for key in good if full.get(key, True)]
    allowed = [key for key, wrong in row.items() if wrong and not full.get(key, False)]
    counts = (len(good), len(row) - len(good), len(gained), len(lost), len(allowed))
    examples = [" ".join(key) for key in (*allowed[:4], *gained[:4], *lost[:4])]
    return Ablated(queue, part, mechanism, *counts, tuple(examples))
