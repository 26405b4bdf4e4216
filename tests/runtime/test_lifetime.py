"""Test that what is gone already can be freed, and other faults are told."""

from __future__ import annotations

import pytest

from pyllamakv.errors import Closed, NativeError, WorkerDied
from pyllamakv.runtime.lifetime import free_quietly


@pytest.mark.parametrize("error", [WorkerDied("gone"), Closed("gone"), None])
def test_what_is_gone_is_free(error: Exception | None) -> None:
    """Check a dead worker and a closed library."""

    def free(raw: int) -> None:
        assert raw == 7
        if error is not None:
            raise error

    free_quietly(free, 7)


def test_other_faults_are_told() -> None:
    """Check that a real failure is not hidden."""

    def free(raw: int) -> None:
        raise NativeError("broken")

    with pytest.raises(NativeError):
        free_quietly(free, 7)
