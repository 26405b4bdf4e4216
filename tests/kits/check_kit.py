"""Simulated sources, builds and workers for `check`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.simulated import SimulatedNative
from runtime_kit import Opener

from pyllamakv.scenarios import runner
from pyllamakv.verification import check as checking
from pyllamakv.verification.check import CheckRequest, check

#: Scenarios that the fake libraries can run: a fix and a guard.
SOME = ("fragmented", "fork-then-defrag")


@dataclass
class CheckSandbox:
    """The simulated results; fields that are exceptions are raised."""

    build_stock: object = None
    build_patched: object = None
    applied: object = None
    fetched: object = None
    make: object = None
    skipped: tuple = ()
    carried: dict = field(default_factory=dict)
    why: str = ""
    opener: Opener = field(init=False)
    calls: list = field(default_factory=list)

    def variant(self, side: str, trouble: object) -> object:
        """Build a side, or raise the given error."""
        self.calls.append(side)
        if isinstance(trouble, Exception):
            raise trouble
        folder = Path("/nowhere") / side
        manifest = SimpleNamespace(library_sha256=side)
        return SimpleNamespace(folder=folder, id=f"id-{side}", manifest=manifest)


def make(monkeypatch: pytest.MonkeyPatch, home: Path) -> CheckSandbox:
    """Replace everything that `check` builds, applies, fetches and opens."""
    monkeypatch.setenv("PYLLAMAKV_HOME", str(home))
    monkeypatch.delenv("PYLLAMAKV_TEST_MODEL", raising=False)
    world = CheckSandbox()

    def build(spec, **_):
        return world.variant("stock", world.build_stock)

    def apply(release, names, **_):
        world.calls.append(("apply", names))
        if isinstance(world.applied, Exception):
            raise world.applied
        return SimpleNamespace(
            patches=("full-defrag",), skipped=world.skipped, tree="", carried=world.carried
        )

    def fetch(release, **_):
        if isinstance(world.fetched, Exception):
            raise world.fetched
        return release

    def by_side(path: Path):
        return (world.make or (lambda side: SimulatedNative(heals=side == "patched")))(path.name)

    by_side.by_path = True
    world.opener = Opener(by_side)
    monkeypatch.setattr(checking, "build", build)
    monkeypatch.setattr(
        checking, "build_series", lambda *_, **__: world.variant("patched", world.build_patched)
    )
    monkeypatch.setattr(checking.apply, "apply", apply)
    monkeypatch.setattr(checking.drift, "why", lambda *_: world.why)
    monkeypatch.setattr(checking.fetch, "fetch", fetch)
    monkeypatch.setattr(
        checking.spec_resolver, "resolve", lambda name, *_: SimpleNamespace(name=name)
    )
    monkeypatch.setattr(runner, "open_worker", world.opener)
    return world


def ask(**words) -> checking.CheckResult:
    """Return a request for the test release and some scenarios."""
    return check(CheckRequest("0.3.9", scenarios=words.pop("scenarios", SOME), **words))
