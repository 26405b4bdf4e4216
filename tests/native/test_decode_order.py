"""Test that batches which a hybrid memory with streams cannot split are refused (decode.cpp).

llama.cpp 0.3.15 and 0.3.16 abort the process on them; later releases split them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from native_kit import built

import pyllamakv as kv
from pyllamakv.errors import Unsupported
from pyllamakv.runtime.batch import Batch
from pyllamakv.scenarios import synthetic_models

pytestmark = pytest.mark.native

SPECS = [f"{release}+{side}" for release in ("0.3.16", "0.3.36") for side in ("stock", "patched")]

#: Sequences with their numbers of tokens, in order, and whether 0.3.16 can decode them.
BATCHES = [
    ({0: 30, 1: 30}, True),
    ({0: 20, 1: 40}, True),
    ({1: 20, 2: 20, 3: 20}, True),
    ({2: 70}, True),
    ({0: 20, 2: 20}, False),
    ({1: 20, 0: 20}, False),
    ({0: 20, 1: 10, 2: 20}, False),
]


@pytest.fixture(scope="module", params=SPECS)
def model(request: pytest.FixtureRequest) -> Iterator[kv.Model]:
    """Load a hybrid model on each variant, with slots that allow streams."""
    folder = built(request.param).folder
    with kv.open(folder, isolated=True, env={"LLAMA_SET_ROWS": "1"}) as library:
        yield library.load_model(synthetic_models.model("hybrid"))


@pytest.mark.parametrize(("counts", "allowed"), BATCHES, ids=str)
def test_a_batch_is_decoded_or_refused(
    model: kv.Model, counts: dict[int, int], allowed: bool, request: pytest.FixtureRequest
) -> None:
    """A refused batch changes nothing, and the context decodes the next one."""
    splits = "0.3.36" in request.node.callspec.params["model"]
    with model.context(
        n_ctx=1024, n_batch=96, n_ubatch=32, n_seq_max=4, kv_unified=False
    ) as context:
        assert context.info.n_streams == 4
        batch = Batch.of(
            np.arange(sum(counts.values()), dtype=np.int32) % 50,
            np.concatenate([np.arange(n) for n in counts.values()]).astype(np.int32),
            [seq for seq, n in counts.items() for _ in range(n)],
            np.ones(sum(counts.values()), dtype=np.int8),
        )
        if allowed or splits:
            context.decode(batch)
        else:
            with pytest.raises(Unsupported, match="two consecutive ones"):
                context.decode(batch)
        expected = [counts.get(seq, 0) if allowed or splits else 0 for seq in range(4)]
        assert [len(each) for each in context.ledgers] == expected
        last = context.sequence(3) if 3 not in counts else None
        if last is not None:
            last.step(7)
            assert len(last) == 1
