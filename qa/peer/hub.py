"""Stand in for the model hub: a plugin for the pytest that runs llama-cpp-python's own tests.

Whoever asks for a model that would have to be downloaded is skipped, and says why. The file is
copied beside the tests: their Python has no pyllamakv.
"""

from __future__ import annotations

from typing import Any

import pytest

REASON = "needs a model hub"


def absent(*_: Any, **__: Any) -> Any:
    """Skip the test that asks."""
    pytest.skip(REASON)


try:
    import huggingface_hub
except ImportError:
    pass  # the oldest versions ask for no model
else:
    huggingface_hub.hf_hub_download = absent
    huggingface_hub.snapshot_download = absent
