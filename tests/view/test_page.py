"""Test that the page is one well-formed and complete file, and that all texts are escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from fakes.cell_results import failing, result, row

from pyllamakv.errors import UsageError
from pyllamakv.patching.conflict_report import HunkConflict, UncarriedPatch
from pyllamakv.patching.status import PatchStatus
from pyllamakv.verification.cell import FailedRun
from pyllamakv.verification.expected import Accepted, compare
from pyllamakv.verification.release_watch import FollowedRelease
from pyllamakv.verification.review_branch import ReviewBranch
from pyllamakv.verification.verdict import Verdict
from pyllamakv.view import page

RESULTS = (
    result(),
    result("0.3.6", "ineffective", failing=(failing(),), reason="<b>bold</b> & co"),
    result(
        "b4980",
        "untestable",
        runs=0,
        scenarios=(),
        drift=(),
        pictures=(),
        timelines=(),
        reason="no npm",
    ),
    result("0.3.36", "native", stale=True, scenarios=(row("x", "native"),)),
)
_VOID = {"meta", "rect", "br", "link"}


class Reader(HTMLParser):
    """Check that tags nest, and collect ids, links and attributes that load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        facts = dict(attrs)
        if "id" in facts:
            self.ids.append(facts["id"])
        if tag == "a":
            self.links.append(facts["href"])
        self.loads += [facts[key] for key in ("src", "srcset", "data") if key in facts]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def html() -> str:
    """Return a page with an example of each element."""
    return page.render(RESULTS, compare(RESULTS, {"b4980+patched cpu": Accepted("untestable")}))


def test_page_is_well_formed_without_external_resources(html: str) -> None:
    """Every tag is closed, every link has a target in the page, and nothing is loaded."""
    reader = Reader()
    reader.feed(html)
    assert not reader.open
    assert len(set(reader.ids)) == len(reader.ids)
    assert {link.removeprefix("#") for link in reader.links} <= set(reader.ids)
    assert not reader.loads
    addresses = set(re.findall(r"https?://[^\s\"'<]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in html and "url(" not in html


def test_page_contains_verdicts_drift_and_maps(html: str) -> None:
    """Verdicts, scenarios, drift of every hunk, maps and regressions are shown."""
    for word in ("0.3.9", "ineffective", "untestable", "native", "holds", "fork-then-defrag"):
        assert word in html
    assert "moved by +12 lines" in html
    assert "changed in 0.3.10, similar lines are in src/llama-memory.cpp (60%)" in html
    assert "1 of 2 hunks found" in html
    assert html.count("<svg") == (2 + 1) * 3
    assert "stock: nothing moved, and operation 2 ended with no-slot" in html
    assert "line 2: decode &lt;1&gt;; no-slot" in html
    assert "stock, when it failed: 128 of 256 cells used" in html
    assert "1 worse than accepted" in html
    assert "inputs changed since" in html


def test_page_names_a_carried_patch() -> None:
    """It has the base of the port that was merged."""
    found = (result(carried={"compaction": "0.3.30"}),)
    assert "compaction carried from 0.3.30" in page.render(found, compare(found, {}))


def test_page_lists_applied_patches_first() -> None:
    """Applied patches come first; patches for other releases and idle scenarios are folded."""
    (own,) = result().drift
    drift = [{**own, "patch": name, "state": state} for name, state in (
        ("elsewhere", "not-applicable"), ("broken", "fails"), ("applied", "applies"))]  # fmt: skip
    rows = (row("ran", "needed"), row("idle", "untestable"))
    one = result(drift=tuple(drift), patches=("applied",), scenarios=rows)
    html = page.render((one,), compare((one,), {}))
    places = [html.index(f"Drift of {name}<") for name in ("applied", "broken", "elsewhere")]
    assert places == sorted(places)
    folded = html.index("Patches not applied</b>")
    assert places[1] < folded < places[2] < html.index("</details>\n</details>\n</details>")
    idle = html.index("Scenarios without a verdict</b>")
    assert html.index("<td>ran</td>") < idle < html.index("<td>idle</td>") < places[0]


def test_equal_failures_are_listed_once() -> None:
    """A failure is listed with all its settings; a missing capability is not an alarm."""
    wrong = [replace(failing(), setting=name) for name in ("plain f16", "flash f16")]
    lacks = FailedRun("story", "plain f16", "absent", "no such model")
    results = (result("0.3.9", "harmful", failing=(*wrong, lacks)),)
    html = page.render(results, compare(results, {}))
    assert html.count("layer 0 differs") == 1
    assert "in plain f16, flash f16</span>" in html
    assert '<span class="tag dim">absent</span> no such model' in html


def test_messages_are_escaped_in_html(html: str) -> None:
    """Messages of a library are not markup."""
    assert "<b>bold</b>" not in html
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; co" in html
    assert "layer 0 differs &lt;here&gt;" in html
    assert "requires &lt;more&gt; &amp; better" in html


def test_page_supports_small_screens_and_dark_mode(html: str) -> None:
    """The page sets the viewport, and has colours for a dark scheme."""
    assert 'name="viewport" content="width=device-width' in html
    assert "prefers-color-scheme: dark" in html
    assert "@media (max-width:" in html


def test_every_verdict_has_a_tone_and_a_meaning() -> None:
    """A verdict that is added later must have both."""
    assert set(page.WORDS) == set(Verdict)
    tones = {str(verdict): page.css_class(verdict) for verdict in Verdict}
    assert tones["needed"] == page.css_class("holds") == "good"
    assert tones["native"] == tones["redundant"] == "idle"
    assert tones["untestable"] == "dim"
    assert {tones[v] for v in ("harmful", "ineffective", "broken-apply", "broken-build")} == {"bad"}


def test_a_scenario_that_the_patch_does_not_claim_is_not_drawn_as_a_defect() -> None:
    """Both sides fail alike, and the verdict is harmless."""
    one = result(scenarios=(replace(row("x", "harmless"), word="unchanged"),))
    html = page.render((one,), compare((one,), {}))
    assert '<span class="tag idle">unchanged</span>' in html


def test_empty_matrix_renders_a_page() -> None:
    """A matrix without results is not a failure."""
    reader = Reader()
    reader.feed(page.render((), ()))
    assert not reader.open


def test_page_shows_branches_and_conflicts_of_a_watch() -> None:
    """Branch, conflicts with both sides, error and warnings are shown; nothing is markup."""
    conflict = HunkConflict("src/a.cpp", 4, "x find", 12, ("<new>",), (), ("mine",), "b1", "b2")
    patches = (
        UncarriedPatch("fix", "manual", "0.3.36", "a conflict", (conflict,)),
        UncarriedPatch("next", "blocked", "", "requires <fix>"),
    )
    contained = PatchStatus("b2", "first", "contained", reason="drop <it>")
    branch = ReviewBranch("watch/b3", "1" * 40, ("patches/<x>",), ("look at <it>",))
    followed = (
        FollowedRelease("b2", RESULTS[:1], patches, contained=(contained,)),
        FollowedRelease("b3", branch=branch, error=UsageError("<b>no</b>")),
    )
    text = page.render(RESULTS[:1], compare(RESULTS[:1], {}), followed, ("npm: <no> answer",))
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    for part in (
        "src/a.cpp, hunk 4 in find, line 12: changed between b1 and b2",
        "<pre>&lt;new&gt;</pre>",
        "<pre>mine</pre>",
        "requires &lt;fix&gt;",
        "<b>first</b> is contained: drop &lt;it&gt;",
        "<code>watch/b3</code>, which changes patches/&lt;x&gt;",
        "Note: look at &lt;it&gt;",
        "Not completed: &lt;b&gt;no&lt;/b&gt;",
        "Warning: npm: &lt;no&gt; answer",
    ):
        assert part in text
    assert "New releases" not in page.render(RESULTS[:1], compare(RESULTS[:1], {}))


def test_page_explains_each_verdict_once() -> None:
    """The table of meanings contains each word once."""
    text = page.render(RESULTS, compare(RESULTS, {}))
    table = text.partition("Meaning of the verdicts")[2].partition("</table>")[0]
    words = re.findall(r'<span class="tag \w+">([\w-]+)</span>', table)
    assert sorted(words) == sorted([*map(str, Verdict), "holds"])


def test_long_release_names_may_wrap() -> None:
    """The path of a release may break anywhere: no rule keeps first columns on one line."""
    style = page.TEMPLATE.read_text("utf-8").partition("<style>")[2].partition("</style>")[0]
    rules = re.findall(r"([^{}]+){([^{}]*)}", style)
    first = [body for names, body in rules if "td:first-child" in names]
    assert any("overflow-wrap: anywhere" in body for body in first)
    assert not any("nowrap" in body for body in first)
