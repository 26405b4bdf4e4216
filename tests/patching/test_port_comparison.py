"""Test that lost parts of a port are listed: files, hunks, calls, kinds of lines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patching_kit import diff

from pyllamakv import home
from pyllamakv.patching import hunks, port_comparison, series
from pyllamakv.patching.definition import Port

RETRY = b"""\
    if (!cache->find_slot(ubatch)) {
        LLAMA_LOG_WARN("no slot: %d\\n", n);
        if (!cache->defrag_sched_slot(n_tokens)) {
            return 1;
        }
        kv_self_update();
        n_retries++;
    }
"""
BODY = [b"    x = %d;\n" % number for number in range(40)]
OLD = {
    "src/a.cpp": b"int decode(batch & b) {\n" + b"".join(BODY),
    "src/b.cpp": b"void update(int n) {\n" + b"".join(BODY),
}


def changed(a: bytes = b"", b: bytes = b"    plan_moves(cells);\n") -> hunks.Patch:
    """Return the patch that puts lines into `decode` and into `update`."""
    new = {
        "src/a.cpp": b"int decode(batch & b) {\n" + b"".join([*BODY[:10], a, *BODY[10:]]),
        "src/b.cpp": b"void update(int n) {\n" + b"".join([*BODY[:20], b, *BODY[20:]]),
    }
    return hunks.parse(diff(OLD, new))


def test_missing_hunk_is_named() -> None:
    """The hunk that retries after a defragmentation is missing in the second port."""
    lost = port_comparison.missing_parts(changed(RETRY), changed())
    assert [str(loss) for loss in lost if loss.what == "file"] == ["file src/a.cpp"]
    (hunk,) = (loss for loss in lost if loss.what == "hunk")
    assert str(hunk) == "src/a.cpp, hunk 1 (int decode)"
    assert "if (!cache->find_slot(ubatch)) {" in hunk.lines
    calls = {loss.name: (loss.before, loss.after) for loss in lost if loss.what == "call"}
    assert calls["find_slot"] == calls["kv_self_update"] == (1, 0)
    assert {loss.name for loss in lost if loss.what == "class"} >= {"condition", "return", "log"}


def test_missing_call_inside_a_hunk_is_named() -> None:
    """A call that is lost inside a kept hunk is listed too."""
    lost = port_comparison.missing_parts(
        changed(RETRY), changed(RETRY.replace(b"        kv_self_update();\n", b""))
    )
    assert [str(loss) for loss in lost] == [
        "calls of kv_self_update(): 1 -> 0",
        "lines that call: 2 -> 1",
    ]


def test_moved_code_is_not_reported_as_lost() -> None:
    """A hunk in another file, or with small changes, is not lost."""
    one, other = changed(RETRY), changed(b=b"    plan_moves(cells);\n" + RETRY)
    assert not [
        loss for loss in port_comparison.missing_parts(one, other) if loss.what in ("file", "hunk")
    ]
    spelled = RETRY.replace(b"cache->", b"memory.").replace(b"return 1", b"return NO_SLOT")
    assert not [
        x
        for x in port_comparison.missing_parts(one, changed(spelled))
        if x.what in ("file", "hunk")
    ]


def test_comparison_distinguishes_context_and_content() -> None:
    """Identical ports, other context and other content are distinguished."""
    one = changed(RETRY)
    shifted = hunks.parse(one.data.replace(b"@@ -9,", b"@@ -8,").replace(b" x = 9", b" y = 9"))
    assert port_comparison.change_of(one, one) == "identical"
    assert port_comparison.change_of(one, shifted) == "context"
    assert port_comparison.change_of(one, changed()) == "content"
    text = Port("x", one, "1")
    assert not port_comparison.compare(text, Port("x", shifted, "2")).lost
    found = port_comparison.compare(text, Port("x", changed(), "2"))
    assert found.missing
    assert not found.gained
    assert found.as_json()["change"] == "content"


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.sampled_from(RETRY.splitlines(keepends=True)), min_size=1))
def test_port_loses_nothing_against_itself(lines: list[bytes]) -> None:
    """A text loses nothing against itself."""
    head = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,1 +1,%d @@\n x\n" % (len(lines) + 1)
    patch = hunks.parse(head + b"".join(b"+" + line for line in lines))
    assert port_comparison.missing_parts(patch, patch) == ()


@pytest.mark.slow
def test_each_hunk_of_the_shipped_patch_is_missed() -> None:
    """Each hunk of the shipped patch that adds code is reported if it is removed."""
    text = series.load(home.data("patches")).definition("full-defrag").port("0.3.9")
    for file in text.patch.files:
        for number, hunk in enumerate(file.hunks, 1):
            if not any(b"(" in line for line in hunk.added) or len(hunk.added) < 6:
                continue
            lost = port_comparison.compare(text, text.without(file.path, number)).lost
            assert any(loss.file == file.path and loss.what == "hunk" for loss in lost) or any(
                loss.what == "file" for loss in lost
            ), (file.path, number)


@pytest.mark.parametrize(
    ("one", "kind"), [("call", "calls of f(): 2 -> 1"), ("class", "lines that loop: 2 -> 1")]
)
def test_loss_is_described_for_the_end_of_a_sentence(one: port_comparison.What, kind: str) -> None:
    """The text of a loss can end a sentence."""
    name = "f" if one == "call" else "loop"
    assert str(port_comparison.PortDifference(one, name, before=2, after=1)) == kind


def port(base: str, patch: hunks.Patch) -> Port:
    return Port("one", patch, base)


def test_changed_lines_of_a_function_are_listed() -> None:
    """They are even if calls and kinds of lines are the same, as for swapped arguments."""
    before = changed(b=b"    copy(k, v);\n    done();\n")
    after = changed(b=b"    copy(v, k);\n    done();\n")
    found = port_comparison.compare(port("0.3.1", before), port("0.3.2", after))
    (lines,) = found.changed
    assert str(lines) == "src/b.cpp, update"
    assert lines.lines == ("- copy(k, v);", "+ copy(v, k);")
    assert found.as_json()["changed"][0]["function"] == "update"
    assert not found.lost


def test_changed_lines_of_an_added_file_are_listed() -> None:
    """Two swapped views in a file that both ports add; its other functions are equal."""
    text = b"void keep(int n) {\n    use(n);\n}\n\nvoid move(int n) {\n    cpy(v_src, v_dst);\n}\n"
    other = text.replace(b"v_src, v_dst", b"v_dst, v_src")
    one, two = (hunks.parse(diff({}, {"src/new.h": data})) for data in (text, other))
    found = port_comparison.compare(port("0.3.1", one), port("0.3.2", two))
    (lines,) = found.changed
    assert str(lines) == "src/new.h, move"
    assert lines.lines == ("- cpy(v_src, v_dst);", "+ cpy(v_dst, v_src);")


@pytest.mark.slow
def test_another_order_and_other_removed_lines_are_listed() -> None:
    """A copy before a clear differs from one after it, and a kept line is still executed."""
    before = changed(b=b"    clear(k);\n    copy(k);\n")
    after = changed(b=b"    copy(k);\n    clear(k);\n")
    (lines,) = port_comparison.compare(port("0.3.1", before), port("0.3.2", after)).changed
    assert {line[2:] for line in lines.lines} <= {"clear(k);", "copy(k);"}
    assert {line[0] for line in lines.lines} == {"-", "+"}
    kept = {"src/b.cpp": OLD["src/b.cpp"].replace(BODY[20], BODY[20] + b"    done();\n")}
    gone = {"src/b.cpp": OLD["src/b.cpp"].replace(BODY[20], b"    done();\n")}
    one, other = (hunks.parse(diff({"src/b.cpp": OLD["src/b.cpp"]}, new)) for new in (gone, kept))
    (lines,) = port_comparison.compare(port("0.3.1", one), port("0.3.2", other)).changed
    assert lines.lines == ("- removed: x = 20;",)


def test_gains_count_in_the_order_of_the_ports() -> None:
    """Additional lines of the second port are gains."""
    found = port_comparison.compare(port("0.3.1", changed()), port("0.3.2", changed(RETRY)))
    assert "calls of find_slot(): 0 -> 1" in map(str, found.gained)
    assert not found.missing


def test_deleted_return_is_reported_although_the_port_adds_an_equal_one() -> None:
    """Each equal line that the port before deletes or adds explains one."""
    there = OLD | {"src/b.cpp": OLD["src/b.cpp"] + b"    return 1;\n"}
    here = there | {"src/a.cpp": OLD["src/a.cpp"].replace(BODY[10], RETRY)}
    before = hunks.parse(diff(there, here))
    lost = hunks.parse(diff(there, here | {"src/b.cpp": OLD["src/b.cpp"]}))
    (report,) = port_comparison.deletions(before, lost)
    assert report.startswith("deletes a check or a jump of upstream")
    assert report.endswith(": return 1;")
    assert port_comparison.deletions(lost, lost) == ()


def test_hunk_with_a_changed_line_is_not_missing() -> None:
    """A line that a resolution rewrote is still the hunk's, and one of another function is not."""
    line = b"    if (head > used + n_tokens) {}\n"
    merged = b"    if (head > used + n_tokens && used > 0) {}\n"
    one = changed(line)
    for other, missing in (
        (changed(merged), []),
        (changed(b=merged), ["src/a.cpp, hunk 1 (int decode)"]),
    ):
        lost = port_comparison.missing_parts(one, other)
        assert [
            str(loss) for loss in lost if loss.what == "hunk" and "a.cpp" in loss.file
        ] == missing
