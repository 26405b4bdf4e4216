"""Test the commands trace view and trace stats, with a simulated library."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from cli_kit import EXAMPLE, Opened, cli
from fakes.simulated import SimulatedNative
from metrics_kit import parse

import pyllamakv
from pyllamakv.traces import trace as traces
from pyllamakv.traces import variant_selection
from pyllamakv.view import raster


@pytest.fixture(autouse=True)
def opened(monkeypatch, tmp_path) -> list[str]:
    """Replace libraries: ``…stock`` fails, and every other one defragments."""
    asked: list[str] = []

    def open_(spec, **_):
        asked.append(str(spec))
        return Opened(SimulatedNative(heals=not str(spec).endswith("stock")))

    monkeypatch.setenv("PYLLAMAKV_HOME", str(tmp_path))
    monkeypatch.setattr(pyllamakv, "open", open_, raising=False)
    return asked


@pytest.fixture
def trace(opened, capsys, tmp_path) -> Path:
    """Record the example."""
    path = tmp_path / "trace.jsonl"
    assert cli(capsys, "trace", "record", EXAMPLE, "-o", path)[0] == 0
    opened.clear()
    return path


def test_a_trace_is_shown_without_any_library(trace, opened, capsys) -> None:
    """The recording is sufficient."""
    code, out, _ = cli(capsys, "trace", "view", trace)
    assert code == 0 and not opened
    assert "before: 128 of 256 cells used" in out
    assert "after: 144 of 256 cells used" in out
    assert "decode 0: 16 tokens" in out


def test_a_script_is_shown_while_it_runs(opened, capsys) -> None:
    """It runs on the default build, or on the given variant."""
    code, out, _ = cli(capsys, "trace", "view", EXAMPLE)
    assert code == 0 and opened == ["None"]
    assert "after: 144 of 256 cells used" in out


def test_a_failing_script_shows_its_last_operation(opened, capsys) -> None:
    """The operation that ended the script is the last one, and the exit status is 1."""
    code, out, err = cli(capsys, "trace", "view", EXAMPLE, "--variant", "0.3.9+stock")
    assert code == 1
    assert "decode 0: 16 tokens; no-slot" in out.splitlines()[-1]
    assert "line 7 (decode)" in err


def test_trace_view_with_a_variant_replays_the_trace(trace, opened, capsys) -> None:
    """The operations of the variant are shown, not the recorded ones."""
    code, out, _ = cli(capsys, "trace", "view", trace, "--variant", "other-stock")
    assert code == 1 and opened == ["other-stock"]
    assert "no-slot" in out


@pytest.mark.parametrize("verb", ["view", "stats"])
def test_stock_means_the_recorded_release(verb, trace, opened, capsys, monkeypatch) -> None:
    """As in `replay`; for a script without a release it means the newest verified one."""
    release = traces.read(trace)[0].variant.partition("-")[0]
    assert cli(capsys, "trace", verb, trace, "--variant", "stock")[0] == 1
    assert opened == [f"{release}+stock"]
    newest = SimpleNamespace(manifest=SimpleNamespace(release="b11549"))
    monkeypatch.setattr(variant_selection, "newest_verified", lambda: newest)
    cli(capsys, "trace", verb, EXAMPLE, "--variant", "patched")
    assert opened[1:] == ["b11549+patched"]
    assert cli(capsys, "trace", verb, trace, "--variant", "stock,patched")[0] == 2
    assert len(opened) == 2


def test_a_timeline_is_written(trace, capsys, tmp_path) -> None:
    """It is an SVG whose name is on stdout; a failing run has one as well."""
    target = tmp_path / "new" / "line.svg"
    code, out, _ = cli(capsys, "trace", "view", trace, "--timeline", target)
    assert (code, out) == (0, f"{target}\n")
    assert ET.parse(target).getroot().tag.endswith("svg")
    code, out, _ = cli(
        capsys, "trace", "view", EXAMPLE, "--variant", "0.3.9+stock", "--timeline", target
    )
    assert code == 1
    assert "no-slot" in target.read_text(encoding="utf-8")


def test_png_is_written(trace, capsys, tmp_path) -> None:
    """There is a timeline, and a picture for each change, if Pillow is installed."""
    pytest.importorskip("PIL")
    code, out, _ = cli(
        capsys,
        "trace",
        "view",
        trace,
        "--timeline",
        tmp_path / "line.png",
        "--png",
        tmp_path / "all",
        "--dark",
    )
    assert code == 0
    files = [Path(line) for line in out.splitlines()]
    assert len(files) >= 4
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_png_without_pillow_is_refused_before_the_run(
    opened, capsys, tmp_path, monkeypatch
) -> None:
    """The error is raised before a long run, not after it."""

    def missing():
        raise raster.Unsupported("PNG pictures need Pillow", "pictures")

    monkeypatch.setattr(raster, "_pillow", missing)
    code, _, err = cli(capsys, "trace", "view", EXAMPLE, "--timeline", tmp_path / "line.png")
    assert code == 2 and "Pillow" in err and not opened


@pytest.mark.parametrize("words", [("--timeline", "x.gif"), ("--svg", EXAMPLE), ("--png", EXAMPLE)])
def test_unwritable_output_is_refused_before_the_run(opened, capsys, words) -> None:
    """The usage error has a remedy."""
    code, _, err = cli(capsys, "trace", "view", EXAMPLE, *words)
    assert code == 2 and ("directory" in err or ".svg" in err)
    assert not opened


def test_trace_view_json_lists_every_change(trace, capsys) -> None:
    """Each has its numbers and moves."""
    code, out, _ = cli(capsys, "trace", "view", trace, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [each["op"] for each in rows if each["moved"]] == ["decode"]
    assert rows[-1]["used"] == 144


@pytest.mark.parametrize("form", [(), ("--json",), ("--prometheus",)], ids="".join)
def test_stats_of_a_trace_equal_those_of_its_run(trace, capsys, form) -> None:
    """Statistics of recorded cells equal those of the library's cells."""
    found = []
    for words in ((trace,), (EXAMPLE, "--variant", "0.3.9+patched")):
        code, out, _ = cli(capsys, "trace", "stats", *words, *form)
        assert code == 0
        if form == ("--prometheus",):
            kinds, samples = parse(out)
            assert kinds["pyllamakv_run_operations_total"] == "counter"
            found.append({key[0]: value for key, value in samples.items() if "_kv_" in key[0]})
        elif form == ("--json",):
            raw = json.loads(out)
            assert raw["run"]["operations"] == {"decode": 2, "defrag": 1, "remove": 1}
            found.append(raw["kv"])
        else:
            found.append(dict(line.split("  ", 1) for line in out.splitlines()))
    recorded, played = found
    if not form:
        assert recorded["used"].strip() == played["used"].strip() == "144 (56%)"
    else:
        assert recorded.items() <= played.items()


def test_stats_labels_are_added_to_every_metric(trace, opened, capsys) -> None:
    """They are added to all metrics; invalid ones are refused before the run, in any format."""
    code, out, _ = cli(
        capsys, "trace", "stats", trace, "--prometheus", "--label", 'host=a"b', "--label", "x=y=z"
    )
    _, samples = parse(out)
    assert code == 0
    assert all({("host", 'a"b'), ("x", "y=z")} <= set(labels) for _, labels in samples)
    opened.clear()
    for wrong in ("host", "op=x", "1=2", "__x=y", "a-b=c", "ü=x", "=x", "manager=x"):
        for form in ((), ("--json",), ("--prometheus",)):
            words = ("trace", "stats", EXAMPLE, *form, "--label", wrong)
            assert cli(capsys, *words)[0] == 2
    assert not opened
    code, out, _ = cli(capsys, "trace", "stats", trace, "--label", "host=a\x1b[31mb")
    assert code == 0 and "a\\x1b[31mb" in out


def test_stats_of_a_failing_run_include_the_failure(capsys) -> None:
    """The statistics until the failure include it; the exit status is 1."""
    code, out, _ = cli(capsys, "trace", "stats", EXAMPLE, "--variant", "0.3.9+stock", "--json")
    assert code == 1
    raw = json.loads(out)
    assert raw["run"]["failures"] == {"decode: no-slot": 1}
    assert raw["kv"]["largest_hole"] == 1


@pytest.mark.parametrize("option", ["--timeline", "--svg"])
def test_pictures_that_cannot_be_written_are_a_usage_error(option, trace, capsys, tmp_path) -> None:
    """The path of the directory is a file."""
    (tmp_path / "file").write_text("")
    code, _, err = cli(capsys, "trace", "view", trace, option, tmp_path / "file" / "x.svg")
    assert code == 2
    assert "cannot be written" in err


def test_failed_decode_without_changed_cells_has_no_picture(opened, capsys, tmp_path) -> None:
    """`trace record` reads the cells after each line; without a change, there is no picture."""
    path = tmp_path / "failed.jsonl"
    assert cli(capsys, "trace", "record", EXAMPLE, "--variant", "0.3.9+stock", "-o", path)[0] == 1
    code, out, err = cli(capsys, "trace", "view", path)
    assert code == 0 and "no-slot" in out
    assert "kept no cells" not in err


def test_a_line_without_cells_names_those_that_have_some(trace, capsys) -> None:
    """It is after the end of the run, or before its first cells."""
    code, _, err = cli(capsys, "trace", "view", trace, "--line", 999)
    assert code == 2
    assert "lines 2 to 11 have" in err


def test_control_characters_of_a_run_are_escaped(opened, capsys, tmp_path) -> None:
    """Control characters of labels, names, notes and headers are escaped, also in pictures."""
    evil = "\x1b[2J\x07\x9b\r\u202e"
    lines = [
        {"op": "context", "n_ctx": 64},
        {"op": "decode", "feed": {"0": 4}},
        {"op": "save", "seq": 0, "as": evil},
        {"op": "snapshot", "label": evil},
        {"op": "note", "text": evil},
    ]
    script, trace = tmp_path / f"a{evil[:4]}.jsonl", tmp_path / "trace.jsonl"
    script.write_text("\n".join(map(json.dumps, lines)))
    assert cli(capsys, "trace", "record", script, "-o", trace)[0] == 0
    head, *rest = trace.read_text().splitlines()
    named = json.dumps({**json.loads(head), "variant": evil, "spec": evil})
    trace.write_text("\n".join([named, *rest]) + "\n")
    svg = tmp_path / "line.svg"
    output = ""
    for words in (
        ("run", script),
        ("trace", "view", script),
        ("trace", "view", trace),
        ("trace", "view", trace, "--timeline", svg),
        ("trace", "view", trace, "--svg", tmp_path / "all"),
        ("trace", "stats", trace),
        ("trace", "replay", trace, "--variant", "x"),
    ):
        code, out, err = cli(capsys, *words)
        assert code == 0, err
        output += out + err
    script.write_text(json.dumps({"op": evil}))
    code, _, err = cli(capsys, "run", script)
    assert code == 2
    output += err
    assert "\\x1b[2J\\x07" in output
    assert all(sign.isprintable() or sign == "\n" for sign in output)
    assert ET.parse(svg).getroot().tag.endswith("svg")
    for picture in (tmp_path / "all").iterdir():
        ET.parse(picture)


def test_a_trace_without_cells_has_a_timeline_of_their_number(capsys, tmp_path) -> None:
    """The shipped trace has the cells of two operations only."""
    target = tmp_path / "line.svg"
    code, _, err = cli(
        capsys, "trace", "view", EXAMPLE.with_name("stock-fails.jsonl"), "--timeline", target
    )
    assert code == 0 and "recorded no cells" in err
    output = [each.text or "" for each in ET.parse(target).iter("{http://www.w3.org/2000/svg}text")]
    assert any("112 of 114 operations recorded no cells" in each for each in output)
    assert "used, sequence not recorded" in output
    code, out, _ = cli(
        capsys, "trace", "view", EXAMPLE.with_name("stock-fails.jsonl"), "--line", "5"
    )
    assert code == 2 and not out
