"""Write a sample of each persistent format: trace, lock, kept cache, saved sequence, prefix store.

``python tests/kits/formats.py FOLDER`` wrote what is in `tests/data/formats`. The current code must
read it, or refuse it with an error that states the reason. Write it again only when a format
changes.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyllamakv as kv
from pyllamakv.scenarios import synthetic_models

if TYPE_CHECKING:
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.sequence import Sequence

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "data" / "formats"

#: What each sequence holds in every file: tokens by the id of the sequence.
TOKENS = {0: [1, 2, 3, 4, 5, 6, 7, 8], 1: [9, 8, 7, 6]}
SHAPE: dict[str, Any] = {"n_ctx": 64, "n_batch": 32, "n_seq_max": 2}


def fill(context: Context) -> list[Sequence]:
    """Decode the tokens of every sequence, one batch each; return the sequences."""
    sequences = [context.sequence(number) for number in TOKENS]
    for sequence, tokens in zip(sequences, TOKENS.values(), strict=True):
        context.decode(sequence.feed(tokens))
    return sequences


def logits_after(context: Context, sequence: Sequence, token: int = 11) -> Any:
    """Return the logits (n_vocab,) of one more token of a sequence."""
    context.decode(sequence.feed([token]))
    return context.logits().copy()


def write(folder: Path) -> None:
    """Write the files; needs builds of the test release."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / "vendor" / "upstream.lock.toml", folder / "lock.toml")
    with kv.open("0.3.9+patched") as lib, lib.load_model(synthetic_models.tiny()) as model:
        with model.context(**SHAPE) as context, kv.record(context, folder / "trace.jsonl"):
            fill(context)[0].remove()
        with model.context(**SHAPE) as context:
            sequence = context.sequence(0)
            context.decode(sequence.feed(TOKENS[0]))
            (folder / "sequence.save").write_bytes(sequence.save())
        store = folder / "prefix-store"
        shutil.rmtree(store, ignore_errors=True)
        with model.context(**SHAPE) as context, kv.PrefixCache(context, store=store) as cache:
            for tokens in TOKENS.values():
                with cache.acquire(tokens) as lease:
                    lease.prefill()
        (store / "lock").unlink(missing_ok=True)
        kept = folder / "cache.kv"
        kept.unlink(missing_ok=True)
        with model.context(**SHAPE, kv_backing=kept, kv_keep=True) as context:
            fill(context)
        (folder / "cache.kv.flushed").unlink()


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
