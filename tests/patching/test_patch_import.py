"""Test that a user's patch becomes one of the series, after strict checks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from patching_kit import SeriesSandbox, diff, fill, numbered, repository

from pyllamakv.errors import NoPortApplies, PatchConflict, UnknownRelease, UsageError
from pyllamakv.patching import (
    apply,
    foreign_series,
    lint,
    patch_export,
    patch_import,
    series,
    status,
    trees,
)
from pyllamakv.patching.definition import Port
from pyllamakv.source import git_command, lockfile, spec_resolver
from pyllamakv.source.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

OLD = {"src/a.cpp": numbered(60), "src/b.cpp": numbered(20)}
NEW = OLD | {"src/a.cpp": numbered(60, l10="x"), "src/new.h": b"// new\n"}
THEN = NEW | {"src/b.cpp": numbered(20, l9="z")}
MAIL = b"""\
From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001
From: A Person <person@example.org>
Date: Mon, 3 Mar 2025 10:00:00 +0000
Subject: [PATCH 1/2] kv: do a thing that takes a great many words to say, too many of them all

%s
---
 src/a.cpp | 2 +-

""" % (b"A long line of words. " * 9)


@pytest.fixture
def bench(tmp_path: Path) -> SeriesSandbox:
    """Return three releases: the base, one where the hunks moved, one where they do not apply."""
    bench = SeriesSandbox(open_store(tmp_path / "store.git"), tmp_path / "patches")
    bench.add_release("0.3.1", OLD, "2025-01-01")
    bench.add_release("0.3.2", OLD | {"src/a.cpp": b"+\n" + numbered(60)}, "2025-01-02")
    bench.add_release("0.3.3", OLD | {"src/a.cpp": numbered(60, l10="other")}, "2025-01-03")
    bench.add_patch("one", {"0.3.1": (OLD, OLD | {"src/b.cpp": numbered(20, l3="one")})})
    return bench


def take(
    bench: SeriesSandbox, path: Path | str, id_: str = "mine", **words: object
) -> patch_import.Imported:
    words = {"folder": bench.folder, "scenarios": ["some-scenario"], **words}
    releases = list(bench.releases.values())
    return patch_import.import_patch(path, id_, releases, store=bench.store, **words)  # type: ignore[arg-type]


def read(path: str) -> list[Port]:
    return [port for patch in foreign_series.load(path) for port in patch.ports]


def test_imported_file_is_ported_to_the_nearest_base(bench: SeriesSandbox, tmp_path: Path) -> None:
    """It is tried on all releases, written for the nearest base, and passes lint."""
    file = tmp_path / "mine.patch"
    file.write_bytes(MAIL + diff(OLD, NEW))
    done = take(bench, file)
    assert (done.base, done.applies, done.findings) == ("0.3.1", ("0.3.1", "0.3.2"), ())
    assert [trial.offset for trial in done.trials] == [0, 1, 0]
    assert done.as_json()["applies"] == ["0.3.1", "0.3.2"]
    loaded = series.load(bench.folder)
    assert loaded.order == ("one", "mine")
    assert lint.lint(bench.folder) == ()
    patched = apply.apply(bench.releases["0.3.1"], ["mine"], series=loaded, store=bench.store)
    assert bench.store.read(patched.tree, "src/new.h") == b"// new\n"
    with pytest.raises(UsageError, match="already"):
        take(bench, file)


def test_author_date_and_message_stay(
    bench: SeriesSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the mail, also in the commit; no licence is added."""
    monkeypatch.setattr(spec_resolver, "resolve", lambda name, *_: bench.releases[name])
    file = tmp_path / "mine.patch"
    file.write_bytes(MAIL + diff(OLD, NEW))
    take(bench, file)
    loaded = series.load(bench.folder)
    mine = loaded.definition("mine")
    subject = "kv: do a thing that takes a great many words to say, too many of them all"
    body = " ".join(["A long line of words."] * 9)
    assert (mine.title, mine.why) == (subject, body)
    assert mine.author == "A Person <person@example.org>"
    patched = apply.apply(bench.releases["0.3.1"], ["mine"], series=loaded, store=bench.store)
    shown = git_command.git(
        bench.store.path, "show", "-s", "--format=%an|%ae|%aI|%s|%b", patched.commit
    )
    name, email, date, title, message = shown.split("|")
    assert (name, email, title) == ("A Person", "person@example.org", subject)
    assert date.startswith("2025-03-03T10:00:00")
    assert message.startswith(body)
    assert "Licence" not in message
    assert [each.kind for each in patch_export.check(loaded, store=bench.store)] == ["same"] * 2


@pytest.mark.slow
def test_each_mail_is_a_patch(bench: SeriesSandbox, tmp_path: Path) -> None:
    """Check the files of a directory, and the mails of a mailbox, in their order."""
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "0001-a.patch").write_bytes(MAIL + diff(OLD, NEW))
    second = MAIL.replace(b"1/2", b"2/2").replace(b"A Person <person", b"B Person <other")
    (folder / "0002-b.patch").write_bytes(second + diff(NEW, THEN))
    done = take(bench, folder)
    assert done.ids == ("mine-1", "mine-2")
    loaded = series.load(bench.folder)
    assert loaded.order == ("one", "mine-1", "mine-2")
    assert loaded.definition("mine-2").author == "B Person <other@example.org>"
    assert loaded.definition("mine-2").ports[0].requires == ()
    assert Port.from_file(done.paths[0]).patch.paths == ("src/a.cpp", "src/new.h")
    assert Port.from_file(done.paths[1]).patch.paths == ("src/b.cpp",)
    assert lint.lint(bench.folder) == ()
    release = bench.releases["0.3.1"]
    patched = apply.apply(release, ["mine-2"], series=loaded, store=bench.store)
    assert bench.store.read(patched.tree, "src/b.cpp") == THEN["src/b.cpp"]
    box = tmp_path / "both.mbox"
    box.write_bytes(b"".join(file.read_bytes() for file in sorted(folder.iterdir())))
    again = take(bench, box, "again", folder=tmp_path / "again")
    assert again.ids == ("again-1", "again-2")
    with pytest.raises(UsageError, match="title is for one patch"):
        take(bench, box, "more", title="Both")


@pytest.mark.slow
def test_mail_requires_the_patches_that_it_depends_on(bench: SeriesSandbox, tmp_path: Path) -> None:
    """One patch that needs manual work does not block independent ones."""
    other = THEN | {"src/b.cpp": numbered(20, l9="z", l18="own")}
    name = other | {"src/b.cpp": numbered(20, l9="z", l18="own", l2="new_name();")}
    use = name | {"src/a.cpp": numbered(60, l10="x", l50="new_name();")}
    header = use | {"src/new.h": b"// newer\n"}
    steps = [(OLD, NEW), (NEW, THEN), (THEN, other), (other, name), (name, use), (use, header)]
    for number, (old, new) in enumerate(steps, 1):
        (tmp_path / f"{number}.patch").write_bytes(MAIL + diff(old, new))
    ids = take(bench, tmp_path).ids
    loaded = series.load(bench.folder)
    needs = [loaded.definition(id_).ports[0].requires for id_ in ids]
    assert needs == [(), (), (), (), ("mine-4",), ("mine-1",)]
    near = THEN | {"src/b.cpp": numbered(20, l9="zz")}
    (tmp_path / "two").mkdir()
    for number, (old, new) in enumerate([(NEW, THEN), (THEN, near)], 1):
        (tmp_path / "two" / f"{number}.patch").write_bytes(MAIL + diff(old, new))
    own = tmp_path / "own"
    take(bench, tmp_path / "two", "two", folder=own)
    assert series.load(own).definition("two-2").ports[0].requires == ("two-1",)


def test_the_releases_are_those_that_it_applies_to(bench: SeriesSandbox, tmp_path: Path) -> None:
    """A newer best base is possible too; the markers match on each of the releases."""
    last = OLD | {"src/b.cpp": numbered(20, l2="a much longer line than all others")}
    bench.add_release("0.3.4", last, "2025-01-04")
    (tmp_path / "b.patch").write_bytes(diff(OLD, OLD | {"src/b.cpp": numbered(20, l17="x")}))
    done = take(bench, tmp_path / "b.patch", base="0.3.4")
    assert done.applies == ("0.3.1", "0.3.2", "0.3.3", "0.3.4")
    loaded = series.load(bench.folder)
    assert loaded.definition("mine").releases == ">=0.3.1"
    (port,) = loaded.definition("mine").ports
    for release in bench.releases.values():
        tree = trees.StoreTree(bench.store, release.tree)
        assert port.failed_markers(tree) == ()


def test_the_file_of_a_required_patch_is_no_marker(bench: SeriesSandbox, tmp_path: Path) -> None:
    """It is absent from the stock tree, where the markers are looked for."""
    with_new = OLD | {"src/new.h": b"// one\n// two\n"}
    bench.add_patch("first", {"0.3.1": (OLD, with_new)})
    changed = with_new | {"src/new.h": b"// one\n// 2\n"}
    head = b"Subject: [PATCH] more\n\nRequires: first\n---\n"
    (tmp_path / "more.patch").write_bytes(head + diff(with_new, changed))
    take(bench, tmp_path / "more.patch", base="0.3.1")
    loaded = series.load(bench.folder)
    (found,) = [
        one
        for one in status.status([bench.releases["0.3.1"]], series=loaded, store=bench.store)
        if one.id == "mine"
    ]
    assert (found.state, found.reason) == ("applies", "")


@pytest.mark.slow
def test_commits_of_a_branch_are_imported(
    bench: SeriesSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range, or a branch since its newest known release; none of its code runs."""
    repository = tmp_path / "llama.cpp"
    repository.mkdir()
    evil = tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n", encoding="utf-8")
    evil.chmod(0o755)

    def git(*words: str) -> str:
        return git_command.git(repository, *words)

    git("init", "-q", "-b", "main")
    for content, message in ((OLD, "base"), (NEW, "first"), (THEN, "second")):
        for name, data in content.items():
            (repository / name).parent.mkdir(exist_ok=True)
            (repository / name).write_bytes(data)
        git("add", "-A")
        git("commit", "-q", "-m", message)
    git("config", "diff.external", str(evil))
    texts = read(f"git:{repository}@HEAD~2..main")
    assert [text.title for text in texts] == ["first", "second"]
    assert take(bench, f"git:{repository}@HEAD~1..main", "top").ids == ("top",)
    assert not (tmp_path / "ran").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in ("llama.cpp", "~/llama.cpp"):
        assert read(f"git:{place}@HEAD~1..main")[0].title == "second"
        full = f"git:{repository.resolve()}@HEAD~1..main"
        assert foreign_series.absolute(f"git:{place}@HEAD~1..main") == full
    (tmp_path / "x.patch").touch()
    monkeypatch.chdir(tmp_path)
    assert foreign_series.absolute("x.patch") == str(tmp_path.resolve() / "x.patch")
    with pytest.raises(UsageError, match="no patch file or directory y"):
        foreign_series.absolute("y.patch")
    with pytest.raises(UsageError, match="no known release is part of main"):
        read(f"git:{repository}@main")
    for wrong in (f"git:{repository}", f"git:{tmp_path}/none@a..b", f"git:{repository}@--help"):
        with pytest.raises(UsageError, match="is not git:REPOSITORY"):
            read(wrong)
    with pytest.raises(UsageError, match="has no commit"):
        read(f"git:{repository}@main..main")
    for range_ in ("none", "none..main", "main...none"):
        with pytest.raises(UsageError, match="no branch, tag or commit none"):
            read(f"git:{repository}@{range_}")


def test_changes_that_only_a_merge_has_are_refused(tmp_path: Path) -> None:
    """No mail contains them; merges without changes of their own are left out."""
    folder = repository(tmp_path / "fork", OLD)
    for name, number in (("side", 9), ("main", 12)):
        git_command.git(folder, "checkout", "-q", "-B", name, "HEAD")
        fill(folder, {"src/a.cpp": numbered(60, **{f"l{number}": name})})
        git_command.git(folder, "commit", "-q", "-a", "-m", name)
        git_command.git(folder, "checkout", "-q", "--detach", "HEAD~1")
    git_command.git(folder, "checkout", "-q", "main")
    git_command.git(folder, "merge", "-q", "--no-ff", "-m", "Merge side", "side")
    assert [text.title for text in read(f"git:{folder}@main~1..main")] == ["side"]
    fill(folder, {"src/b.cpp": numbered(20, l3="only here")})
    git_command.git(folder, "commit", "-q", "-a", "--amend", "-m", "Merge side, with more")
    with pytest.raises(
        UsageError, match=r"merge \w{12} Merge side, with more .* src/b\.cpp.*rebase"
    ):
        read(f"git:{folder}@main~1..main")


@pytest.mark.slow
def test_newer_releases_fail_until_they_are_accepted(
    bench: SeriesSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release whose markers do not match is reported."""
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    bench.add_release("0.2.90", {"src/z.cpp": b"old\n"}, "2024-01-01")
    file = tmp_path / "mine.patch"
    file.write_bytes(MAIL + diff(OLD, NEW))
    take(bench, file)

    def states() -> list[str]:
        loaded = series.load(bench.folder)
        found = status.status(bench.releases.values(), series=loaded, store=bench.store)
        return [each.state for each in found if each.id == "mine"][:3]

    assert states() == ["applies", "offset", "manual"]
    patch_import.accept_until(bench.folder, "mine", "0.3.2")
    assert states() == ["applies", "offset", "not-applicable"]
    patch_import.accept_until(bench.folder, "mine", "0.3.3")
    assert states() == ["applies", "offset", "manual"]
    place = bench.folder / "mine" / "patch.toml"
    head, rest = place.read_text("utf-8").split("scenarios = ")
    place.write_text(head + rest.split("]\n", 1)[1], "utf-8")
    patch_import.accept_until(bench.folder, "mine", "0.3.2")
    assert states() == ["applies", "offset", "not-applicable"]
    with pytest.raises(UsageError, match="was not imported"):
        patch_import.accept_until(bench.folder, "one", "0.3.2")
    with pytest.raises(UnknownRelease, match="did you mean"):
        patch_import.accept_until(bench.folder, "mine", "0.3.99")
    with pytest.raises(UsageError, match=r"0\.2\.90 is older than 0\.3\.1"):
        patch_import.accept_until(bench.folder, "mine", "0.2.90")


@pytest.mark.slow
def test_any_release_can_be_the_first_or_last(
    bench: SeriesSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is not a version is compared by date."""
    names = ("b100", "0.3.2", "b300", "0.3.4")
    dates = {name: f"2025-01-0{day}" for day, name in enumerate(names, 1)}
    bench.releases.clear()
    for name, date in dates.items():
        bench.add_release(name, OLD, date)
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    file = tmp_path / "mine.patch"
    file.write_bytes(MAIL + diff(OLD, NEW))

    def covered() -> list[str]:
        mine = series.load(bench.folder).definition("mine")
        return [name for name in (*dates, "path:/x") if mine.covers_release(name)]

    assert take(bench, file, base="b300").base == "b300"
    assert covered() == [*dates, "path:/x"]
    patch_import.accept_until(bench.folder, "mine", "b300")
    assert covered() == ["b100", "0.3.2", "b300", "path:/x"]
    assert series.load(bench.folder).definition("mine").meant_for == (
        "b100 and later, releases through b300"
    )
    del bench.releases["b100"]
    bench.folder = tmp_path / "second"
    take(bench, file, "other", base="0.3.2", until="b300")
    text = (bench.folder / "other" / "patch.toml").read_text("utf-8")
    assert 'releases = ">=0.3.2"\nuntil = "b300"\n' in text
    patch_import.accept_until(bench.folder, "other", "0.3.4")
    text = (bench.folder / "other" / "patch.toml").read_text("utf-8")
    assert 'releases = ">=0.3.2,<=0.3.4"\nscenarios = ' in text


@pytest.mark.slow
def test_the_first_release_of_several_ports_stays(
    bench: SeriesSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does even if its name sorts after the others."""
    bench.add_release("0.3.12", OLD, "2025-02-02")
    monkeypatch.setattr(lockfile, "known", lambda: bench.releases)
    file = tmp_path / "mine.patch"
    file.write_bytes(MAIL + diff(OLD, NEW))
    del bench.releases["0.3.1"]
    take(bench, file, base="0.3.2")
    toml = bench.folder / "mine" / "patch.toml"
    table = toml.read_text("utf-8").partition("[[port]]")[2].replace("0.3.2", "0.3.10")
    toml.write_text(f"{toml.read_text('utf-8')}\n[[port]]{table}", encoding="utf-8")
    (toml.parent / "0.3.10.patch").write_bytes((toml.parent / "0.3.2.patch").read_bytes())
    patch_import.accept_until(bench.folder, "mine", "0.3.12")
    assert series.load(bench.folder).definition("mine").releases == ">=0.3.2,<=0.3.12"


@pytest.mark.slow
def test_required_patch_is_applied_before_the_imported_one(
    bench: SeriesSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is made on top of it, and requires it."""
    monkeypatch.setattr(spec_resolver, "resolve", lambda name, *_: bench.releases[name])
    bench.add_release("0.3.4", {"src/a.cpp": OLD["src/a.cpp"], "src/b.cpp": b"other\n"})
    after = OLD | {"src/b.cpp": numbered(20, l3="one")}
    mine = after | {"src/b.cpp": numbered(20, l3="one", l4="mine")}
    file = tmp_path / "mine.patch"
    file.write_bytes(MAIL.replace(b"---\n", b"Requires: one\n---\n", 1) + diff(after, mine))
    done = take(bench, file)
    assert done.applies == ("0.3.1", "0.3.2", "0.3.3")
    assert "one (0.3.1) does not apply to src/b.cpp" in str(done.trials[-1].conflict)
    loaded = series.load(bench.folder)
    assert loaded.definition("mine").ports[0].requires == ("one",)
    assert {each.kind for each in patch_export.check(loaded, store=bench.store)} == {"same"}
    release = bench.releases[done.base]
    patched = apply.apply(release, ["mine"], series=loaded, store=bench.store)
    assert patched.patches == ("one", "mine")
    assert bench.store.read(patched.tree, "src/b.cpp") == mine["src/b.cpp"]


@pytest.mark.slow
def test_patch_is_imported_on_top_of_the_series(bench: SeriesSandbox, tmp_path: Path) -> None:
    """It requires the patches of the series that it needs, as if all were imported at once."""
    first = OLD | {"src/a.cpp": numbered(60, l10="x")}
    second = first | {"src/a.cpp": numbered(60, l10="x", l30="other_name();")}
    third = second | {"src/a.cpp": numbered(60, l10="xy", l30="other_name();")}
    last = third | {"src/b.cpp": numbered(20, l15="other_name();")}
    for number, (old, new) in enumerate([(OLD, first), (first, second)], 1):
        (tmp_path / f"{number}.patch").write_bytes(diff(old, new))
        take(bench, tmp_path / f"{number}.patch", f"mine-{number}")
    for number, (old, new) in enumerate([(second, third), (third, last)], 3):
        (tmp_path / f"{number}.patch").write_bytes(diff(old, new))
        done = take(bench, tmp_path / f"{number}.patch", f"mine-{number}")
        assert done.applies == (("0.3.1", "0.3.2") if number == 3 else ("0.3.1", "0.3.2", "0.3.3"))
    loaded = series.load(bench.folder)
    needs = [loaded.definition(f"mine-{number}").ports[0].requires for number in range(1, 5)]
    assert needs == [(), (), ("mine-1",), ("mine-2",)]
    patched = apply.apply(bench.releases["0.3.2"], series=loaded, store=bench.store)
    assert patched.patches == ("one", "mine-1", "mine-2", "mine-3", "mine-4")
    assert bench.store.read(patched.tree, "src/a.cpp") == b"+\n" + last["src/a.cpp"]


@pytest.mark.slow
def test_scenarios_are_claimed_by_the_header_only(bench: SeriesSandbox, tmp_path: Path) -> None:
    """No claim is added; a claim in the message is not written twice."""
    file = tmp_path / "mine.patch"
    file.write_bytes(MAIL + diff(OLD, NEW))
    words: dict[str, Any] = {"folder": bench.folder, "store": bench.store}
    releases = list(bench.releases.values())
    patch_import.import_patch(file, "mine", releases, **words)
    file.write_bytes(MAIL.replace(b"---\n", b"Scenario: fragmented\n---\n", 1) + diff(NEW, THEN))
    patch_import.import_patch(file, "other", releases, **words)
    loaded = series.load(bench.folder)
    assert loaded.definition("mine").scenarios == ()
    assert loaded.definition("other").scenarios == ("fragmented",)
    assert loaded.definition("other").ports[0].patch.header.count(b"Scenario: fragmented") == 1
    assert lint.lint(bench.folder) == ()


def test_import_creates_a_series(bench: SeriesSandbox, tmp_path: Path) -> None:
    """The directory need not be a series before."""
    file = tmp_path / "x.diff"
    file.write_bytes(diff(OLD, NEW))
    own = tmp_path / "own"
    done = patch_import.import_patch(
        file, "x", list(bench.releases.values()), folder=own, scenarios=["s"], store=bench.store
    )
    assert done.findings == ()
    assert series.load(own).order == ("x",)


def test_a_commit_can_be_the_base(
    bench: SeriesSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port has the name of the commit, which the series pins; a directory is refused."""
    monkeypatch.setattr(patch_import.trees, "ensure_fetched", lambda _, release, *__: release)
    spec = "git:https://example.org/x.git@main"
    bench.releases[spec] = replace(bench.releases.pop("0.3.1"), name=spec, kind="git")
    file = tmp_path / "mine.patch"
    file.write_bytes(diff(OLD, NEW))
    commit = bench.releases[spec].commit
    done = take(bench, file, base=spec)
    assert (done.base, set(done.applies)) == (f"git-{commit[:12]}", {"0.3.2", spec})
    (pinned,) = lockfile.load(bench.folder / "upstream.lock.toml")
    assert (pinned.name, pinned.commit) == (f"git:https://example.org/x.git@{commit}", commit)
    loaded = series.load(bench.folder)
    assert lockfile.bases(loaded.lock)[done.base] == pinned
    assert done.base not in lockfile.bases()  # the pins of a series are not those of another one
    (found,) = status.of_release(bench.releases[spec], loaded.including(["mine"]), bench.store)[1:]
    assert (found.state, found.port) == ("applies", done.base)
    moved = replace(pinned, name="path:/x", kind="path")
    own = tmp_path / "own"
    with pytest.raises(UsageError, match="may change"):
        patch_import.import_patch(
            file, "more", [moved], folder=own, base=moved.name, store=bench.store
        )
    with pytest.raises(UsageError, match="which may change"):
        patch_import.import_patch(file, "more", [moved], folder=own, store=bench.store)


@pytest.mark.slow
def test_second_import_of_the_same_mails_is_refused(bench: SeriesSandbox, tmp_path: Path) -> None:
    """The patches that the series has are named, also if a later one changes the same lines."""
    then = NEW | {"src/a.cpp": numbered(60, l10="y"), "src/new.h": b"// new\n"}
    for number, (old, new) in enumerate([(OLD, NEW), (NEW, then)], 1):
        (tmp_path / f"{number}.patch").write_bytes(diff(old, new))
    files = [tmp_path / f"{number}.patch" for number in (1, 2)]
    box = tmp_path / "all.mbox"
    mails = [MAIL + file.read_bytes() + b"-- \n2.39\n\n" for file in files]
    box.write_bytes(b"".join(mails))
    take(bench, box)
    order = series.load(bench.folder).order
    for id_ in ("mine", "other"):
        with pytest.raises(
            UsageError, match=r"has the changes of .*\(as mine-1\), .*\(as mine-2\)"
        ):
            take(bench, box, id_)
    with pytest.raises(UsageError, match=r"of 2 \(as mine-2\) already, so nothing"):
        take(bench, files[1], "other")
    # Independent ones are contained one by one.
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "3.patch").write_bytes(
        diff(then, then | {"src/b.cpp": numbered(20, l9="z")})
    )
    take(bench, tmp_path / "two", "three")
    (tmp_path / "two" / "2.patch").write_bytes(files[1].read_bytes())
    with pytest.raises(UsageError, match=r"of 2 \(as mine-2\), 3 \(as three\) already"):
        take(bench, tmp_path / "two", "other")
    order = series.load(bench.folder).order
    assert series.load(bench.folder).order == order
    # The same lines at another place are another change.
    files[0].write_bytes(diff(then, then | {"src/a.cpp": numbered(60, l10="y", l50="y")}))
    take(bench, files[0], "other")


def test_refused_import_writes_nothing(bench: SeriesSandbox, tmp_path: Path) -> None:
    """A patch that does not apply, or has no valid name, is not written."""
    file = tmp_path / "mine.patch"
    file.write_bytes(diff(OLD, NEW))
    with pytest.raises(PatchConflict, match="hunk 1"):
        take(bench, file, base="0.3.3")
    with pytest.raises(UsageError, match="not among"):
        take(bench, file, base="0.3.9")
    with pytest.raises(UsageError, match="not an id"):
        take(bench, file, "Mine!")
    file.write_bytes(diff({"src/z.cpp": b"a\n"}, {"src/z.cpp": b"b\n"}))
    with pytest.raises(NoPortApplies, match=r"0\.3\.2: .*z\.cpp"):
        take(bench, file)
    assert not (bench.folder / "mine").exists()
    assert series.load(bench.folder).order == ("one",)
