"""Fragment a cache, fail to decode, defragment, and decode; a patched library does it in one call.

    python examples/fragment_fail_defragment.py [MODEL.gguf]

Print the cells at each step. A digit is a cell of that sequence, a dot is a free cell.
"""

from __future__ import annotations

import sys

import pyllamakv as kv
from pyllamakv.scenarios import cell_picture, synthetic_models
from pyllamakv.view import cell_drawing


def show(context: kv.Context, what: str) -> None:
    """Print the cells under a heading."""
    print(cell_drawing.plain(cell_picture.Picture.of(context.kv.snapshot(), what)), end="\n\n")


def main(path: str) -> None:
    """Defragment by hand on stock; on patched, the decode defragments."""
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
                print(f"{len(comes)} tokens found cells: the decode defragmented the cache")
            except kv.NoKVSlot as error:
                print(f"no slot for {error.n_tokens} tokens, although {error.stats.free} are free")
                print(f"defragmented: {context.kv.defrag().cells} cells moved")
                context.decode(prompt)  # the failed decode kept every token
            show(context, "decoded")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(synthetic_models.model("bytes")))
