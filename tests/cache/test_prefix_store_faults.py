"""Test faults in processes with a prefix store: kills and failed writes at each change."""

from __future__ import annotations

import shutil

import pytest

from qa.faults import preloaded_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("cc"), reason="faults need a C compiler"),
]


@pytest.mark.parametrize("kind", ["kill", "eio", "full"])
def test_flushed_prefixes_survive_a_fault_at_each_change(kind: str) -> None:
    """Everything flushed before the fault is reused afterwards, and no logits are wrong."""
    steps = [("cache_kit:StoreSimulatedPrefixes", [])]
    (record,) = preloaded_process.run_injections(
        steps, [kind], seconds=600, seed=1, tick=lambda _: None
    )
    assert record.defects == []
    assert record.tried == record.places > 40
    assert record.struck > 20
    assert record.repeated == record.struck
    if kind == "full":
        assert set(record.errors) == {"PrefixStoreFull", "KvError"}
