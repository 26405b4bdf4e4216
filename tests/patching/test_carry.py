"""Test that a patch without a port is merged from the nearest one, and refusals of merges."""

from __future__ import annotations

import functools
import json
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from patching_kit import SeriesSandbox, code

from pyllamakv.errors import DiskFull, FetchError, GitError, Locked, NoPortApplies, UsageError
from pyllamakv.patching import (
    apply,
    carry,
    carry_acceptance,
    port_choice,
    series,
    status,
    trees,
)
from pyllamakv.patching.carry import Carrier
from pyllamakv.source import fetch, git_command, lockfile
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyllamakv.errors import SourceError

STOCK = {"src/a.cpp": code("first") + code("second"), "src/h.h": b"int size;\n" * 9}
FIXED = STOCK | {
    "src/a.cpp": code("first", "fix(a);") + code("second"),
    "src/new.h": b"void fix(int);\n",
}
#: Upstream changes a line next to the one that the patch adds: the context does not match.
NEAR = {**STOCK, "src/a.cpp": STOCK["src/a.cpp"].replace(b"first_7();", b"first_7(a);")}
#: Upstream adds a line where the patch adds one.
SAME = {**STOCK, "src/a.cpp": code("first", "other(b);") + code("second")}


def sandbox(folder: Path) -> SeriesSandbox:
    """Return a series with a port for the first of several releases, in a new store."""
    bench = SeriesSandbox(open_store(folder / "store.git"), folder / "patches")
    bench.add_release("0.3.1", STOCK, "2025-01-01")
    bench.add_release("0.3.2", NEAR, "2025-01-02")
    bench.add_release("0.3.3", SAME, "2025-01-03")
    bench.add_patch("fix", {"0.3.1": (STOCK, FIXED)}, marker=("src/a.cpp", "first_7"))
    return bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SeriesSandbox:
    """Return a series with a port for the first of several releases."""
    bench = sandbox(tmp_path)
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    return bench


def carried(bench: SeriesSandbox, release: str) -> port_choice.PortChoice:
    """Choose ports with a carrier; nothing is committed."""
    listed = series.load(bench.folder)
    carrier = Carrier(bench.store, bench.releases[release], listed)
    return port_choice.choose_for_release(
        bench.releases[release], series=listed, store=bench.store, carrier=carrier
    )


def file(bench: SeriesSandbox, tree: str, path: str) -> bytes:
    """Return a file of a tree in the store."""
    entry = trees.StoreTree(bench.store, tree).entry(path)
    return entry.data if entry else b""


@pytest.mark.slow
def test_a_changed_neighbour_is_merged(bench: SeriesSandbox) -> None:
    """The patch does not apply strictly; the carried one has the lines of both sides."""
    with pytest.raises(NoPortApplies):
        port_choice.choose_for_release(
            bench.releases["0.3.2"], series=series.load(bench.folder), store=bench.store
        )
    made = apply.apply(bench.releases["0.3.2"], series=series.load(bench.folder), store=bench.store)
    (port,) = made.ports
    assert (port.base, port.carried_from) == ("0.3.2", "0.3.1")
    assert port.name == "fix (0.3.2, carried from 0.3.1)"
    assert made.carried == {"fix": "0.3.1"}
    wanted = FIXED["src/a.cpp"].replace(b"first_7();", b"first_7(a);")
    assert file(bench, made.tree, "src/a.cpp") == wanted
    assert file(bench, made.tree, "src/new.h") == FIXED["src/new.h"]


def test_a_patch_is_carried_to_a_release_with_the_files_of_its_base(
    bench: SeriesSandbox,
) -> None:
    """The port is no candidate there, because its markers do not match."""
    definition = bench.folder / "fix" / "patch.toml"
    text = definition.read_text("utf-8").replace("first_7", "nowhere", 1)
    definition.write_text('author = "A <a@b>"\n' + text, "utf-8")
    (step,) = carried(bench, "0.3.1").steps
    assert (step.port.carried_from, len(step.placements)) == ("0.3.1", 2)


@pytest.mark.slow
def test_a_carried_tree_is_deterministic(bench: SeriesSandbox, tmp_path: Path) -> None:
    """Another store gives the same commit, and the port applies strictly to its release."""
    listed = series.load(bench.folder)
    one = apply.apply(bench.releases["0.3.2"], series=listed, store=bench.store)
    for cached in (carry._merge_changes, carry._sources, trees.cached):
        cached.cache_clear()
    trees._WRITTEN.clear()
    second = sandbox(tmp_path / "second")
    other = apply.apply(
        second.releases["0.3.2"], series=series.load(second.folder), store=second.store
    )
    assert one.commit == other.commit
    assert file(second, other.tree, "src/a.cpp") == file(bench, one.tree, "src/a.cpp")
    again = apply.apply(bench.releases["0.3.2"], list(one.ports), store=bench.store)
    assert again.tree == one.tree


def test_a_conflict_shows_both_sides(bench: SeriesSandbox) -> None:
    """The conflict has file and line of the target, and nothing is applied."""
    with pytest.raises(NoPortApplies):
        carried(bench, "0.3.3")
    (found,) = status.status(
        [bench.releases["0.3.3"]], series=series.load(bench.folder), store=bench.store
    )
    assert (found.state, found.good, found.bad) == ("manual", False, True)
    ((conflict,),) = [one.conflicts for one in found.manual]
    line = SAME["src/a.cpp"].split(b"\n").index(b"    other(b);") + 1
    assert (conflict.file, conflict.line) == ("src/a.cpp", line)
    assert (conflict.upstream, conflict.patch) == (("    other(b);",), ("    fix(a);",))
    assert conflict.function == "first"
    assert str(conflict).endswith(" changed the lines that the patch changes in `first`")
    assert json.loads(json.dumps(found.as_json()))["manual"][0]["conflicts"][0]["line"] == line


def test_status_of_a_carried_patch_names_its_port(bench: SeriesSandbox) -> None:
    """The status of a carried patch has the base of the port."""
    (found,) = status.status(
        [bench.releases["0.3.2"]], series=series.load(bench.folder), store=bench.store
    )
    assert (found.state, found.port, found.good) == ("carried", "0.3.1", True)


def test_the_nearest_port_is_tried_first(bench: SeriesSandbox) -> None:
    """Bases of a fork are compared by content; a farther port is used if the nearest conflicts.

    The status has the reason why the nearest is not used. The fork is older than both.
    """
    near = NEAR["src/a.cpp"].replace(b"second", b"third")
    release = bench.add_release("0.3.4", STOCK | {"src/a.cpp": near}, "2024-01-04")
    release = bench.releases["0.3.4"] = replace(release, kind="git")
    bench.store.update_ref(f"refs/upstream/{release.key}", release.commit)
    third = STOCK | {"src/a.cpp": code("first", "other(b);") + code("third")}
    bench.add_release("0.3.3", third, "2025-01-03")
    changed = third | {"src/a.cpp": code("first", "fixed(b);") + code("third")}
    bench.add_patch(
        "two",
        {"0.3.1": (STOCK, STOCK | {"src/a.cpp": FIXED["src/a.cpp"]}), "0.3.3": (third, changed)},
        marker=("src/h.h", "int size"),
    )
    listed = series.load(bench.folder)
    only = series.Series((listed.definition("two"),))
    carrier = Carrier(bench.store, release, only)
    assert [port.base for port in carrier.ports(only.definition("two"))] == ["0.3.3", "0.3.1"]
    dated = Carrier(bench.store, replace(release, kind="npm"), only)
    assert [port.base for port in dated.ports(only.definition("two"))] == ["0.3.1", "0.3.3"]
    made = apply.apply(release, series=only, store=bench.store)
    assert made.carried == {"two": "0.3.1"}
    (found,) = status.status([release], series=only, store=bench.store)
    assert (found.state, found.port) == ("carried", "0.3.1")
    assert "; not from 0.3.3: src/a.cpp:" in found.reason
    (nearest,) = found.as_json()["manual"]
    assert (nearest["base"], len(nearest["conflicts"])) == ("0.3.3", 1)
    assert nearest["reason"] in found.reason


def test_carry_markers_and_releases_limit_the_carried_patches(bench: SeriesSandbox) -> None:
    """``carry`` lists what the tree must contain, and ``releases`` limits the dates."""
    place = bench.folder / "fix" / "patch.toml"
    text = place.read_text("utf-8")
    named = 'carry = [{ file = "src/a.cpp", has = "no such line" }]\n\n[[port]]'
    place.write_text(text.replace("[[port]]", named), "utf-8")
    with pytest.raises(NoPortApplies) as caught:
        carried(bench, "0.3.2")
    assert "cannot be carried" not in str(caught.value)
    place.write_text(text.replace('releases = ""', 'releases = "<=0.3.1"'), "utf-8")
    listed = series.load(bench.folder)
    named_differently = bench.add_release("b100", NEAR, "2025-01-02")
    carrier = Carrier(bench.store, named_differently, listed)
    assert not carrier.covers(listed.definition("fix"))


@pytest.mark.parametrize(
    ("bound", "inside"),
    [(">0.3.2", "later"), (">=0.3.2", "same later"), ("<0.3.2", ""), ("<=0.3.2", "same")],
)
def test_carry_bound_is_compared_by_date(bench: SeriesSandbox, bound: str, inside: str) -> None:
    """The date of an exclusive bound is excluded."""
    place = bench.folder / "fix" / "patch.toml"
    text = place.read_text("utf-8")
    place.write_text(text.replace('releases = ""', f'releases = "{bound}"'), "utf-8")
    listed = series.load(bench.folder)
    releases = {
        "same": bench.add_release("b100", NEAR, "2025-01-02"),
        "later": bench.add_release("b101", NEAR, "2025-01-03"),
    }
    covered = [
        name
        for name, release in releases.items()
        if Carrier(bench.store, release, listed).covers(listed.definition("fix"))
    ]
    assert covered == inside.split()


def reason(bench: SeriesSandbox, release: str) -> str:
    """Return why a patch needs manual work on a release."""
    (found,) = status.status(
        [bench.releases[release]], series=series.load(bench.folder), store=bench.store
    )
    assert found.state == "manual"
    return found.reason


@pytest.mark.slow
def test_a_renamed_function_is_followed(bench: SeriesSandbox) -> None:
    """Upstream renamed the function that the patch changes; the renamed one is patched."""
    renamed = STOCK["src/a.cpp"].replace(b"static int first(", b"static int renamed(")
    release = bench.add_release("0.3.5", STOCK | {"src/a.cpp": renamed}, "2025-01-05")
    made = apply.apply(release, series=series.load(bench.folder), store=bench.store)
    assert made.carried == {"fix": "0.3.1"}
    wanted = FIXED["src/a.cpp"].replace(b"static int first(", b"static int renamed(")
    assert file(bench, made.tree, "src/a.cpp") == wanted


def test_uncarriable_named_patch_error_has_the_conflict(bench: SeriesSandbox) -> None:
    """The error has the conflict of the port, and the reason why the merge failed."""
    release = bench.releases["0.3.3"]
    with pytest.raises(
        NoPortApplies, match=r"cannot be carried from 0\.3\.1: src/a\.cpp:"
    ) as caught:
        apply.apply(release, ["fix"], series=series.load(bench.folder), store=bench.store)
    (conflict,) = caught.value.conflicts
    assert str(conflict) in str(caught.value)


def test_a_clean_merge_into_another_function_is_refused(bench: SeriesSandbox) -> None:
    """Git finds no conflict if two functions exchange their names; the place is ambiguous."""
    swapped = STOCK["src/a.cpp"].replace(b"static int first(", b"static int other(")
    swapped = swapped.replace(b"static int second(", b"static int first(")
    bench.add_release("0.3.5", STOCK | {"src/a.cpp": swapped}, "2025-01-05")
    wanted = "the merge moves lines in `first` of src/a.cpp to `other` of src/a.cpp: +fix(a);"
    assert wanted in reason(bench, "0.3.5")


@pytest.mark.slow
def test_changes_of_one_line_are_merged_by_tokens(bench: SeriesSandbox) -> None:
    """Upstream adds an argument to the call that the patch replaces."""
    old, new = (
        STOCK | {"src/a.cpp": code("first", call)} for call in ("go(a, b);", "run(a, b, 1);")
    )
    bench.add_release("0.3.6", old, "2025-01-06")
    further = STOCK | {"src/a.cpp": code("first", "go(a.get(), b);")}
    release = bench.add_release("0.3.7", further, "2025-01-07")
    bench.add_patch("swap", {"0.3.6": (old, new)}, marker=("src/a.cpp", "go("))
    made = apply.apply(release, series=series.load(bench.folder), store=bench.store)
    assert made.carried["swap"] == "0.3.6"
    assert b"    run(a.get(), b, 1);\n" in file(bench, made.tree, "src/a.cpp")
    *_, found = status.status([release], series=series.load(bench.folder), store=bench.store)
    assert found.reason.startswith("merged from port 0.3.6, by tokens at src/a.cpp:12; ")


@pytest.mark.slow
def test_merge_that_uses_a_missing_name_is_refused(bench: SeriesSandbox) -> None:
    """The merge has no conflict, but the patch uses a name that upstream changed elsewhere."""
    header = {"src/h.h": b"int cell_size;\n" * 9}
    new = {"src/a.cpp": code("first") + code("second", "use(cell_size);")}
    bench.add_release("0.3.6", STOCK | header, "2025-01-06")
    near = {"src/a.cpp": STOCK["src/a.cpp"].replace(b"second_7();", b"second_7(a);")}
    bench.add_release("0.3.7", {**near, "src/h.h": b"int n_cells;\n" * 9}, "2025-01-07")
    bench.add_patch("uses", {"0.3.6": (STOCK | header, new | header)}, marker=("src/h.h", "int "))
    listed = series.load(bench.folder)
    _, found = status.status([bench.releases["0.3.7"]], series=listed, store=bench.store)
    assert found.state == "manual"
    assert "the patch uses `cell_size`, which 0.3.7 lacks" in found.reason


def fail_merges(monkeypatch: pytest.MonkeyPatch, code: int, output: bytes) -> None:
    """Make `git merge-tree` fail; other commands of git run."""
    run = git_command.run

    def ask(folder: Path, *args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        if args[0] == "merge-tree":
            return subprocess.CompletedProcess(["git", *args], code, b"", output)
        return run(folder, *args, **options)

    monkeypatch.setattr(git_command, "run", ask)


def test_old_git_carries_nothing_and_names_the_required_version(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason names the required version of git."""
    fail_merges(monkeypatch, 129, b"usage: git merge-tree")
    assert "git 2.38 and later can" in reason(bench, "0.3.2")


@pytest.mark.parametrize(
    ("output", "error"),
    [(b"fatal: No space left on device", DiskFull), (b"fatal: failure to merge", GitError)],
)
def test_failed_merge_command_is_raised(
    bench: SeriesSandbox,
    monkeypatch: pytest.MonkeyPatch,
    output: bytes,
    error: type[SourceError],
) -> None:
    """Another failure of git is raised, not a reason of the patch; the next run merges."""
    with monkeypatch.context() as patch:
        fail_merges(patch, 128, output)
        with pytest.raises(error):
            carried(bench, "0.3.2")
    assert carried(bench, "0.3.2").ports[0].carried_from == "0.3.1"


def test_missing_base_release_is_named(bench: SeriesSandbox) -> None:
    """The reason names the base, not the port."""
    bench.store.delete_ref("refs/upstream/0.3.1")
    assert "release 0.3.1 is not available: " in reason(bench, "0.3.2")


@pytest.mark.parametrize(
    "error",
    [FetchError("HTTP 503"), DiskFull("full"), Locked("busy"), GitError(["git"], 128, "fatal")],
    ids=lambda error: type(error).__name__,
)
def test_failed_fetch_of_a_base_is_raised(
    bench: SeriesSandbox, monkeypatch: pytest.MonkeyPatch, error: SourceError
) -> None:
    """The error is raised: it is not a reason of the patch, and no farther port is used."""
    bench.add_release("0.3.0", STOCK, "2024-12-01")
    bases = dict.fromkeys(("0.3.0", "0.3.1"), (STOCK, FIXED))
    bench.add_patch("two", bases, marker=("src/a.cpp", "first_7"))
    listed = series.load(bench.folder)
    only = series.Series((listed.definition("two"),))
    bench.store.delete_ref("refs/upstream/0.3.1")

    def refuse(*_args: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(fetch, "fetch", refuse)
    with pytest.raises(type(error), match=str(error)):
        apply.apply(bench.releases["0.3.2"], series=only, store=bench.store)
    with pytest.raises(type(error), match=str(error)):
        status.status([bench.releases["0.3.2"]], series=only, store=bench.store)


def test_port_that_only_adds_files_is_carried(bench: SeriesSandbox) -> None:
    """The difference between both releases is not read: it has changes of binary files."""
    image = {"media/logo.png": b"\0\x01"}
    added = STOCK | image | {"src/new.h": b"void fix(int);\n"}
    bench.add_release("0.3.5", STOCK | image, "2025-01-05")
    release = bench.add_release("0.3.6", STOCK | {"media/logo.png": b"\0\x02"}, "2025-01-06")
    bench.add_patch("adds", {"0.3.5": (STOCK | image, added)}, marker=("src/a.cpp", "none"))
    place = bench.folder / "adds" / "patch.toml"
    named = 'carry = [{ file = "src/a.cpp", has = "first_7" }]\n\n[[port]]'
    place.write_text(place.read_text("utf-8").replace("[[port]]", named), "utf-8")
    made = apply.apply(release, ["adds"], series=series.load(bench.folder), store=bench.store)
    assert made.carried == {"adds": "0.3.5"}
    assert file(bench, made.tree, "src/new.h") == b"void fix(int);\n"


def test_a_change_that_upstream_has_is_contained(bench: SeriesSandbox) -> None:
    """It is not a conflict: the advice is to drop the patch."""
    bench.add_release("0.3.4", FIXED | {"src/a.cpp": FIXED["src/a.cpp"] + b"\n"}, "2025-01-04")
    listed = series.load(bench.folder)
    (found,) = status.status([bench.releases["0.3.4"]], series=listed, store=bench.store)
    assert (found.state, found.bad) == ("contained", False)
    assert found.reason == "0.3.4 contains all changes of the patch: drop it for this release"


def test_a_branch_that_upstream_merged_as_one_commit_is_contained(bench: SeriesSandbox) -> None:
    """Its patches do not apply in reverse one by one, but do from the last one."""
    steps = [STOCK]
    for line in ("fix(1);", "fix(2);", "fix(3);"):
        steps.append(STOCK | {"src/a.cpp": code("first", line) + code("second")})
    after = steps[-1] | {"src/b.cpp": b"int b;\n"}
    names = [f"step-{number}" for number in (1, 2, 3)]
    for number, name in enumerate(names, 1):
        needs = names[number - 2 : number - 1]
        bench.add_patch(
            name,
            {"0.3.1": (steps[number - 1], steps[number])},
            requires=tuple(needs),
            marker=("src/a.cpp", "first_7"),
        )
    bench.add_patch("last", {"0.3.1": (steps[3], after)}, requires=("step-3",),
                    marker=("src/a.cpp", "first_7"))  # fmt: skip
    merged = steps[3] | {"src/h.h": b"int other;\n"}
    release = bench.add_release("0.3.4", merged, "2025-01-04")
    listed = series.load(bench.folder)
    only = series.Series(tuple(listed.definition(name) for name in (*names, "last")))
    found = status.status([release], series=only, store=bench.store)
    assert [one.state for one in found] == ["contained", "contained", "contained", "applies"]
    assert "together with step-2, step-3" in found[0].reason
    made = apply.apply(release, series=only, store=bench.store)
    assert made.patches == ("last",)
    assert not any(skip.failed for skip in made.skipped)


def test_a_commit_of_a_fork_is_no_newer_than_the_release_in_it(bench: SeriesSandbox) -> None:
    """Its bounds are compared with the date of the nearest base, not with that of the commit."""
    definition = replace(series.load(bench.folder).definition("fix"), releases="<=0.3.2")
    bench.add_patch("late", {"0.3.3": (SAME, SAME | {"src/h.h": b"int n;\n"})},
                    marker=("src/a.cpp", "other"))  # fmt: skip
    only = series.Series((definition, series.load(bench.folder).definition("late")))
    fork = replace(bench.add_release("fork", NEAR, "2026-01-01"), kind="git")
    assert Carrier(bench.store, fork, only).covers(definition)
    later = replace(bench.add_release("later", SAME, "2026-01-02"), kind="git")
    assert not Carrier(bench.store, later, only).covers(definition)
    assert not Carrier(bench.store, replace(fork, kind="npm"), only).covers(definition)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("upstream", "found"),
    [
        (("fix(a);",), "carried"),
        (("// upstream's reason", "fix( a );", ""), "carried"),
        (("fix(b);",), "manual"),
        (("fix(a);", "fix(a);"), "manual"),
    ],
    ids=["equal", "comment", "argument", "twice"],
)
def test_change_made_by_upstream_is_left_out(
    bench: SeriesSandbox, upstream: tuple[str, ...], found: str
) -> None:
    """It is omitted if only blanks and comments differ; the rest is merged and compared."""
    fixed = {"src/a.cpp": code("first", "fix(a);") + code("second", "more(b);")}
    bench.add_patch("two", {"0.3.1": (STOCK, STOCK | fixed)}, marker=("src/a.cpp", "second_7"))
    has = {"src/a.cpp": code("first", *upstream) + code("second")}
    release = bench.add_release("0.3.8", STOCK | has, "2025-01-08")
    listed = series.load(bench.folder)
    only = series.Series((listed.definition("two"),))
    (state,) = status.status([release], series=only, store=bench.store)
    assert state.state == found
    if found == "carried":
        made = apply.apply(release, ["two"], series=listed, store=bench.store)
        wanted = {"src/a.cpp": code("first", *upstream) + code("second", "more(b);")}
        assert file(bench, made.tree, "src/a.cpp") == wanted["src/a.cpp"]
        line = wanted["src/a.cpp"].split(b"\n").index(f"    {upstream[0]}".encode()) + 1
        assert state.reason.endswith(
            f"except those that 0.3.8 contains at src/a.cpp:{line}: drop these"
        )


def test_a_comment_of_upstream_is_no_change_of_the_patch(bench: SeriesSandbox) -> None:
    """A comment with the text of the line does not count as the line."""
    has = {"src/a.cpp": code("first", "// fix(a);") + code("second")}
    release = bench.add_release("0.3.8", STOCK | has, "2025-01-08")
    made = apply.apply(release, series=series.load(bench.folder), store=bench.store)
    assert b"    fix(a);\n" in file(bench, made.tree, "src/a.cpp")


@pytest.mark.slow
def test_an_accepted_port_gives_the_same_tree(bench: SeriesSandbox) -> None:
    """The carried patch becomes a port of the series, which then applies strictly."""
    release = bench.releases["0.3.2"]
    before = apply.apply(release, series=series.load(bench.folder), store=bench.store)
    (made,) = carry_acceptance.accept(release, patches=bench.folder, store=bench.store)
    assert (made.id, made.base, made.carried_from) == ("fix", "0.3.2", "0.3.1")
    assert made.path == bench.file("fix", "0.3.2")
    after = apply.apply(release, series=series.load(bench.folder), store=bench.store)
    assert (after.tree, after.carried) == (before.tree, {})
    (found,) = status.status([release], series=series.load(bench.folder), store=bench.store)
    assert (found.state, found.port) == ("applies", "0.3.2")
    assert not carry_acceptance.accept(release, patches=bench.folder, store=bench.store)


def test_a_server_patch_is_accepted_on_request(bench: SeriesSandbox) -> None:
    """Without ``server``, only the patches of the libraries become ports."""
    second = code("second"), code("second", "serve(a);")
    served = FIXED | {"src/a.cpp": FIXED["src/a.cpp"].replace(*second)}
    place = ("src/a.cpp", "second_2")
    bench.add_patch("serve", {"0.3.1": (FIXED, served)}, marker=place, target="server")
    near = NEAR["src/a.cpp"].replace(b"second_7();", b"second_7(a);")
    bench.add_release("0.3.4", {**NEAR, "src/a.cpp": near}, "2025-01-04")
    accept = functools.partial(
        carry_acceptance.accept,
        bench.releases["0.3.4"],
        patches=bench.folder,
        store=bench.store,
    )
    assert [each.id for each in accept()] == ["fix"]
    assert [each.id for each in accept(server=True)] == ["serve"]
    assert not accept(server=True)


def test_a_release_without_an_archive_is_no_base(bench: SeriesSandbox) -> None:
    """The series does not change."""
    folder = replace(bench.releases["0.3.2"], name="path:/x", kind="path")
    bench.store.update_ref(f"refs/upstream/{folder.key}", folder.commit)
    before = sorted(path.name for path in bench.folder.rglob("*"))
    with pytest.raises(UsageError, match="may change"):
        carry_acceptance.accept(folder, patches=bench.folder, store=bench.store)
    assert sorted(path.name for path in bench.folder.rglob("*")) == before
