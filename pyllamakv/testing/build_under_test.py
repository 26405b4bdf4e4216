"""Define the build under test, build it if it is missing, and open it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyllamakv.building import backend as backends
from pyllamakv.building import variant as variants
from pyllamakv.errors import UsageError
from pyllamakv.patching import foreign_series
from pyllamakv.scenarios.device_placement import DevicePlacement
from pyllamakv.source import verified

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyllamakv.building.variant import Variant
    from pyllamakv.runtime.context import Context
    from pyllamakv.testing.device_library import DeviceLibrary

#: What a context has where a test does not say otherwise.
OPTIONS = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 256, "n_seq_max": 4}


@dataclass(frozen=True)
class BuildUnderTest:
    """A release with patches of a series (default: the shipped one), on a backend."""

    spec: str
    backend: str = "cpu"
    patches: str = ""

    @property
    def name(self) -> str:
        """Return the parameter text after a test's name."""
        words = [self.spec, *([Path(self.patches).stem] if self.patches else ())]
        return "+".join(words) + ("" if self.backend == "cpu" else f"-{self.backend}")

    @property
    def place(self) -> DevicePlacement:
        """Return where caches are stored."""
        return DevicePlacement(self.backend)

    @property
    def stock(self) -> bool:
        """Return whether nothing is patched."""
        return variants.parse(self.spec).series == ()

    def build(self, say: Callable[[str], None] | None = None) -> Variant:
        """Return the variant, building it first if necessary; ``say`` receives a message."""
        if "variant" not in self.__dict__ and say is not None and not self._built():
            say(f"pyllamakv: building {self.name}, which takes minutes")
        return self.variant

    @cached_property
    def variant(self) -> Variant:
        """Return the variant, built first when it is not there."""
        from pyllamakv.building import build

        spec = variants.parse(self.spec)
        if not self.stock and not self._built():
            build.check_series(spec.release, spec.series, self.patches)
        return build.build_series(spec.release, spec.series, self.patches, backend=self.backend)

    def open(
        self,
        *,
        isolated: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> DeviceLibrary:
        """Open the library; on a device it always runs in a worker."""
        from pyllamakv.testing.device_library import DeviceLibrary

        folder = self.variant.folder
        return DeviceLibrary.at(self.place, folder, isolated=isolated, env=env, timeout=timeout)

    def _built(self) -> bool:
        return not self.patches and variants.find(self.spec, backend=self.backend) is not None


def choose(
    releases: Sequence[str], series: Sequence[str], backend: str, patches: str = ""
) -> list[BuildUnderTest]:
    """Return the selection of the options: every release with every series. Raises UsageError."""
    known = backends.known(backend)
    place = foreign_series.absolute(patches) if patches else ""
    found = []
    for release in dict.fromkeys(releases or (verified.newest().name,)):
        for chosen in dict.fromkeys(series or ("patched",)):
            words = [word for word in chosen.split(",") if word]
            if not words:
                msg = f"--llama-series={chosen}: expected patched, stock or PATCH,PATCH"
                raise UsageError(msg)
            spec = f"{release}+{','.join(words)}"
            stock = variants.parse(spec).series == ()
            found.append(BuildUnderTest(spec, known, "" if stock else place))
    return found


@contextmanager
def context(library: DeviceLibrary, asked: Mapping[str, Any]) -> Iterator[Context]:
    """Create a context with the arguments of a marker.

    ``model`` is a path, or the name of a model that `pyllamakv.scenarios.synthetic_models`
    generates. On a GPU, the variant of that model with wide rows is used.
    """
    from pyllamakv.scenarios import synthetic_models

    left = {key: value for key, value in asked.items() if key not in ("model", "env", "timeout")}
    path = synthetic_models.model(library.place.model(str(asked.get("model", "tiny"))))
    with library.load_model(path) as model, model.context(**{**OPTIONS, **left}) as made:
        yield made
