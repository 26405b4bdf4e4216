"""Test that scenarios are found in the package and outside of it, and have a claim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyllamakv.errors import UsageError
from pyllamakv.scenarios import synthetic_models
from pyllamakv.scenarios.runner import ScenarioRunner
from pyllamakv.scenarios.scenario import CACHES, MOVERS, PLAIN, Scenario, Setting
from pyllamakv.verification import discovery

ALL = discovery.discover()
DOCS = Path(__file__).resolve().parents[2] / "docs"

OWN = '''
from pyllamakv.scenarios.scenario import Scenario

def run(lab):
    """Do nothing."""

SCENARIO = Scenario("{id}", "guard", "It holds.", "none", run)
'''


@pytest.mark.parametrize("name", list(ALL))
def test_scenario_has_claim_issue_kind_and_settings(name: str) -> None:
    """It has one sentence of claim, a public issue, a kind, a known model, distinct settings."""
    each = ALL[name]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", each.id)
    assert each.source is not None
    assert each.source.stem == each.id.replace("-", "_")
    assert each.kind in ("fix", "guard", "feature")
    assert each.claim[0].isupper()
    assert each.claim.count(".") == 1
    assert each.claim.endswith(".")
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", each.issue)
    assert each.model in (*synthetic_models.SHAPES, synthetic_models.TEST)
    names = [setting.name for setting in each.settings]
    assert len(set(names)) == len(names) >= 1
    assert len(each.digest) == 64


def page(name: str) -> str:
    """Return a document, or skip if the package has no documents."""
    if not (DOCS / name).is_file():
        pytest.skip("no documents here")
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_page_lists_every_scenario() -> None:
    """docs/verification.md lists each scenario once, with its kind and public issue."""
    row = r"^\| ([a-z0-9-]+) \| (fix|guard|feature) \| (\S+ #\d+) \|"
    rows = re.findall(row, page("verification.md"), re.M)
    known = [(each.id, each.kind, each.issue.split("/")[1]) for each in ALL.values()]
    assert sorted((name, kind, issue.replace(" ", "")) for name, kind, issue in rows) == sorted(
        known
    )


@pytest.fixture
def example(tmp_path: Path) -> Scenario:
    """Return the scenario of docs/contributing.md, from a directory outside the package."""
    block = r"Save this as `(\w+\.py)`.*?^```python\n(.*?)^```"
    text = re.search(block, page("contributing.md"), re.S | re.M)
    assert text
    (tmp_path / text[1]).write_text(text[2], encoding="utf-8")
    return discovery.find(text[1].removesuffix(".py").replace("_", "-"), [tmp_path])


def test_example_of_the_page_is_a_valid_scenario(example: Scenario) -> None:
    """It has an unused id."""
    assert example.kind == "fix"
    assert example.id not in ALL


@pytest.mark.slow
@pytest.mark.native
def test_example_of_the_page_fails_on_stock_and_passes_on_patched(
    example: Scenario, stock, patched
) -> None:
    """The page states the same."""
    with ScenarioRunner() as bench:
        for setting in PLAIN:
            assert bench.run(stock.folder, example, setting).outcome.failure == "claim"
            assert bench.run(patched.folder, example, setting).outcome.status == "pass"


def test_scenarios_named_by_patches_exist() -> None:
    """Every id that a patch names exists."""
    from pyllamakv.patching import series

    for patch in series.load():
        for name in patch.scenarios:
            assert name in ALL, f"{patch.id} names the scenario {name}, which does not exist"


def test_setting_names_are_short_and_unique() -> None:
    """Names of settings are short and unique."""
    assert Setting().name == "plain f16"
    assert CACHES[1].name == "plain q8_0/f16"
    assert CACHES[5].name == "flash q4_0"
    every = [*CACHES, *MOVERS]
    assert len({setting.name for setting in every}) == len(every)


def test_user_scenario_directories_are_searched(tmp_path: Path, monkeypatch) -> None:
    """Scenarios outside the package are found by argument and by environment."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    (one / "mine.py").write_text(OWN.format(id="mine"))
    (one / "_helper.py").write_text("raise SystemExit")
    (other / "theirs.py").write_text(OWN.format(id="theirs"))
    monkeypatch.setenv(discovery.VARIABLE, str(other))
    found = discovery.discover([one])
    assert {"mine", "theirs", "fragmented"} <= set(found)
    assert found["mine"].source == one / "mine.py"


def test_a_changed_file_is_another_scenario(tmp_path: Path) -> None:
    """The digest depends on the file, so that results of another text are not reused."""
    path = tmp_path / "mine.py"
    path.write_text(OWN.format(id="mine"))
    before = discovery.discover([tmp_path])["mine"].digest
    path.write_text(OWN.format(id="mine") + "# changed\n")
    assert discovery.discover([tmp_path])["mine"].digest != before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "SCENARIO"),
        (OWN.format(id="fragmented"), "another scenario"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    """The error names the file and the expected content."""
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        discovery.discover([tmp_path])
    assert "wrong.py" in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """A missing directory is a usage error, not an empty list."""
    with pytest.raises(UsageError, match="nowhere"):
        discovery.discover([tmp_path / "nowhere"])


def test_selected_scenarios_are_found_by_name() -> None:
    """No name selects all; an unknown name gets the closest one."""
    assert [each.id for each in discovery.select(ALL, ["fragmented"])] == ["fragmented"]
    assert len(discovery.select(ALL)) == len(ALL)
    with pytest.raises(UsageError, match="fragmented"):
        discovery.select(ALL, ["fragmentd"])
    assert discovery.find("many-moves").model == "deep"


def test_a_scenario_without_a_file_has_a_digest() -> None:
    """Scenarios created in a test can run like any other."""
    assert Scenario("x", "guard", "It holds.", "none", lambda _lab: None).digest
