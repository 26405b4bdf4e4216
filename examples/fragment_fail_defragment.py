"""Fragment a cache, let a decode fail in it, defragment, and decode: what the patch does by itself.

    python examples/fragment_fail_defragment.py [MODEL.gguf]

Prints the cells at each step. A letter is a cell of that sequence, a dot a free cell.
"""

from __future__ import annotations

import sys

import pyllamakv as kv
from pyllamakv.scenarios import cell_picture, synthetic_models
from pyllamakv.view import cell_drawing


def show(context: kv.Context, what: str) -> None:
    """Print the cells and what they are."""
    print(cell_drawing.plain(cell_picture.Picture.of(context.kv.snapshot(), what)), end="\n\n")


def main(path: str) -> None:
    """Do on stock llama.cpp by hand what patched does inside the decode."""
    for spec in ("0.3.9+stock", "0.3.9+patched"):
        print(f"--- {spec}")
        with (
            kv.open(spec) as library,
            library.load_model(path) as model,
            model.context(n_ctx=256, n_batch=256, n_ubatch=64, n_seq_max=3) as context,
        ):
            stays, leaves, comes = (context.sequence() for _ in range(3))
            for token in range(128):
                context.decode([stays.feed([3 + token % 20]), leaves.feed([5 + token % 20])])
            leaves.remove()
            show(context, "fragmented")

            prompt = comes.feed(list(range(3, 35)))
            try:
                context.decode(prompt)
                print(f"{len(comes)} tokens found cells: the decode defragmented by itself")
            except kv.NoKVSlot as error:
                print(f"no slot for {error.n_tokens} tokens, although {error.stats.free} are free")
                print(f"defragmented: {context.kv.defrag().cells} cells moved")
                context.decode(prompt)  # the same feed again: nothing was lost
            show(context, "decoded")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(synthetic_models.model("bytes")))
