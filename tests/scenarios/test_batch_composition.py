"""Test that parts of an image share one position, and differ in row and column."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from pyllamakv.scenarios.batch_composition import image_rows


def test_image_rows_have_row_and_column_positions() -> None:
    """Rows and columns count from the position; the last embedding requests logits."""
    part = image_rows(1, 7, (2, 3), 3, 16)
    assert part.places.tolist() == [
        [7] * 6,
        [9, 9, 9, 10, 10, 10],
        [7, 8, 9, 7, 8, 9],
        [0] * 6,
    ]
    assert (part.pos == 7).all() and part.owners == ((1,),) * 6
    assert part.logits.tolist() == [0, 0, 0, 0, 0, 1]
    assert part.embd.shape == (6, 16) and part.embd.dtype == np.float32
    assert (part.embd == image_rows(1, 7, (2, 3), 3, 16).embd).all()
    assert (part.embd != image_rows(1, 7, (0, 1), 3, 16).embd).any()
    context, embd, places, counts, seqs, logits = part.run(
        SimpleNamespace(decode=lambda *arguments: arguments), "context"
    )
    assert (context, counts) == ("context", None)
    assert embd is part.embd and places is part.places and logits is part.logits
    assert seqs.tolist() == [1] * 6
