"""Replace the model hub: a pytest plugin for llama-cpp-python's own tests.

Tests that would download a model are skipped with a reason. The file is copied next to the tests,
because their Python has no pyllamakv.
"""

from __future__ import annotations

from typing import Any

import pytest

REASON = "needs a model hub"


def absent(*_: Any, **__: Any) -> Any:
    """Skip the calling test."""
    pytest.skip(REASON)


try:
    import huggingface_hub
except ImportError:
    pass  # the oldest versions ask for no model
else:
    huggingface_hub.hf_hub_download = absent
    huggingface_hub.snapshot_download = absent
