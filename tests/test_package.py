"""Test the names of the package, and that its import is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pyllamakv


def test_every_public_name_is_importable() -> None:
    """Check the list of names."""
    for name in pyllamakv.__all__:
        assert getattr(pyllamakv, name) is not None
    assert set(pyllamakv.__all__) == set(dir(pyllamakv))
    assert {"open", "NoKVSlot", "Snapshot", "Batch"} <= set(pyllamakv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pyllamakv.nothing


def test_every_public_object_has_a_repr() -> None:
    """The default repr of owners of handles would show only an address."""
    public = [getattr(pyllamakv, name) for name in pyllamakv.__all__]
    classes = [each for each in public if isinstance(each, type)]
    without = [each.__name__ for each in classes if each.__repr__ is object.__repr__]
    assert without == ["Cache", "CacheManager", "Lease"], "only protocols"


def test_the_import_loads_nothing_heavy() -> None:
    """Check that `import pyllamakv` imports neither numpy nor cffi nor git."""
    code = (
        "import sys, pyllamakv; from pyllamakv import errors;"
        "assert not {'numpy', '_cffi_backend', 'git', 'gguf'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_decoding_needs_numpy_and_cffi_alone() -> None:
    """Check that opening a library by its path imports no git, building or harness module."""
    code = (
        "import sys, pyllamakv; pyllamakv.open, pyllamakv.Context, pyllamakv.Batcher;"
        "heavy = {'git', 'gguf', 'typer', 'rich', 'jinja2', 'unearth', 'pyllamakv.scenarios',"
        "'pyllamakv.traces', 'pyllamakv.verification', 'llguidance',"
        "'pyllamakv.runtime.template_worker', 'pyllamakv.runtime.template_process', 'platformdirs',"
        "'pyllamakv.binding.remote', 'pyllamakv.binding.rpc_server', 'statistics'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
