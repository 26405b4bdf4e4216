"""Test the benchmark of the identity of models."""

from __future__ import annotations

import pytest

from pyllamakv import content_digest
from qa.bench import identity


@pytest.mark.native
@pytest.mark.usefixtures("patched")
def test_identity_figures_have_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure has its samples, and an unknown digest is computed each time."""
    computed = []
    real = content_digest._hash
    monkeypatch.setattr(content_digest, "_hash", lambda *rest: computed.append(1) or real(*rest))
    monkeypatch.setattr(content_digest, "SETTLED_NS", 0)
    digest, known, saves = identity.figures(lambda: None, size=5000, pairs=2)
    # Five times, at most once more after the wait, and once for the model of the saves.
    assert 5 <= len(computed) <= 7
    assert len(digest.data["seconds per GB"]) == 5
    assert len(known.data["seconds"]) == 20
    assert len(saves.data["with"]) == len(saves.data["without"]) == 2
