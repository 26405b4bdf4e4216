"""Apply a slip to a copy of the cache managers, and run their quick tests on it.

The slips are in ``cache_slips.toml``. A copy of the package and of ``tests/cache`` is made once;
each slip changes one file of it for one run of pytest.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyllamakv.errors import HarnessError, PatchFormatError
from pyllamakv.home import checkout
from pyllamakv.patching import strict_toml
from qa import child_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The shipped slips.
FILE = Path(__file__).with_name("cache_slips.toml")
#: What the tests need of the checkout.
_COPIED: Final = (
    "pyllamakv",
    "qa",
    "tests/cache",
    "tests/kits",
    "tests/conftest.py",
    "pyproject.toml",
)
#: Timeout of the tests of a slip in seconds; a slip may cause an endless loop.
_TIMEOUT: Final = 600.0
_TEST_TIMEOUT: Final = 60
#: Stands for a test where the modules of a slip cannot be imported.
IMPORT: Final = "import"
_NO_TESTS: Final = 5


@dataclass(frozen=True)
class CacheSlip:
    """A mistake in the managers: ``was``, which occurs once, is replaced by ``now``.

    The tests of the module ``first`` run before the others, because they probably detect it.
    """

    id: str
    first: str
    kind: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.id}"

    def apply(self, modules: Mapping[str, str]) -> tuple[str, str]:
        """Return the name of the changed module and its text.

        Raises HarnessError unless ``was`` occurs once.
        """
        places = [(name, text.count(self.was)) for name, text in modules.items()]
        places = [(name, n) for name, n in places if n]
        if sum(n for _, n in places) != 1:
            found = ", ".join(f"{name} ({n})" for name, n in places) or "no module"
            msg = f"slip {self.id} of the managers: expected its text once, found it in {found}"
            raise HarnessError(msg)
        name = places[0][0]
        return name, modules[name].replace(self.was, self.now)


def load(path: Path = FILE) -> tuple[CacheSlip, ...]:
    """Read the file; raises PatchFormatError for an id that occurs twice."""
    table = strict_toml.load(path, {"schema", "slip"}, schema=1)
    found = tuple(
        CacheSlip(
            part.string("id"),
            part.string("first"),
            part.string("kind"),
            part.string("was"),
            part.string("now", ""),
        )
        for part in table.tables("slip", {"id", "first", "kind", "was", "now"})
    )
    twice = [name for name, n in Counter(slip.id for slip in found).items() if n > 1]
    if twice:
        msg = f"{path}: {twice[0]} is defined twice"
        raise PatchFormatError(msg, str(path))
    return found


def modules(root: Path) -> dict[str, str]:
    """Return the texts of the managers' modules in a checkout or its copy."""
    folder = root / "pyllamakv" / "cache"
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}


class ManagersCopy:
    """A copy of the managers with their tests, until `close`.

    Raises HarnessError if a test fails without a slip.
    """

    def __init__(self) -> None:
        root = checkout()
        if root is None:
            raise HarnessError("slips of the managers need a checkout, which has the tests")
        self._files = tempfile.TemporaryDirectory(prefix="pyllamakv-slips-")
        self.root = Path(self._files.name)
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        for name in _COPIED:
            source, target = root / name, self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignored)
            else:
                shutil.copy(source, target)
        self._modules = modules(self.root)
        failed, message = self._run_tests()
        if failed or message:
            self.close()
            msg = f"{failed or 'pytest'} fails without a slip: {message}"
            raise HarnessError(msg)

    def close(self) -> None:
        """Remove the copy."""
        self._files.cleanup()

    def run(self, slip: CacheSlip) -> tuple[str, str]:
        """Return the test that detects a slip and its message; "" if none does.

        The test is `IMPORT` if the changed module cannot be imported.
        """
        name, text = slip.apply(self._modules)
        path = self.root / "pyllamakv" / "cache" / name
        path.write_text(text, encoding="utf-8")
        try:
            return self._run_tests(slip.first)
        finally:
            path.write_text(self._modules[name], encoding="utf-8")

    def _run_tests(self, first: str = "") -> tuple[str, str]:
        files = sorted((self.root / "tests" / "cache").glob("test_*.py"))
        own = [file for file in files if file.stem == f"test_{first}"]
        for chosen in (own, [file for file in files if file not in own]):
            failed = self._run_files(chosen) if chosen else ("", "")
            if any(failed):
                return failed
        return "", ""

    def _run_files(self, files: list[Path]) -> tuple[str, str]:
        command = [
            # -P: the checkout that this process runs in is not imported.
            sys.executable, "-P", "-m", "pytest", "-x", "-q", "-m", "not slow and not native",
            "-p", "no:cacheprovider", "--timeout", str(_TEST_TIMEOUT), "--tb=line",
            *(str(file.relative_to(self.root)) for file in files),
        ]  # fmt: skip
        environment = child_environment.environment() | {"PYTHONPATH": str(self.root)}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ran = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, text=True,
                timeout=_TIMEOUT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "the time limit", f"the tests did not end within {_TIMEOUT:g} seconds"
        if ran.returncode in (0, _NO_TESTS):
            return "", ""
        if ran.returncode < 0:
            return "a crash", f"the tests ended with signal {-ran.returncode}"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", ran.stdout, re.MULTILINE)
        if failed is None:
            output = " ".join((ran.stderr + ran.stdout)[-600:].split())
            return "", f"pytest ended with status {ran.returncode}: {output}"
        # An error of a fixture names its test, one of an import only the file.
        imported = "::" in failed[1]
        return failed[1] if imported else IMPORT, (failed[2] or "")[:300]
