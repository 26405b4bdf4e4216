"""Hold one prompt in a `Batcher`, and the text that comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pyllamakv.cache.stopping import Stops
from pyllamakv.runtime.textstream import TextStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyllamakv.cache.batcher import Batcher
    from pyllamakv.cache.lease import Lease
    from pyllamakv.cache.request import Request
    from pyllamakv.runtime.context import Context
    from pyllamakv.runtime.ledger import Ledger
    from pyllamakv.runtime.sequence import Sequence

Reason = Literal["end", "stop", "length", "cancelled", "failed"]


class Generation:
    """Give a prompt's continuation piece by piece. `Batcher.submit` makes it.

    Iterating drives the batcher, and so all its generations, as far as this one's text needs.
    ``reason`` says why it ended, None while it has not: "end" (the model ended it), "stop" (a stop
    string), "length" (``max_tokens``), "cancelled" or "failed", with ``error``.
    """

    def __init__(self, batcher: Batcher, asked: Request) -> None:
        self.prompt = asked.prompt
        #: The tokens that were chosen, the one that ended it left out.
        self.tokens: list[int] = []
        self.reason: Reason | None = None
        self.error: Exception | None = None
        #: How many of the prompt's tokens the cache had; None while it waits.
        self.cached: int | None = None
        self.max_tokens = asked.max_tokens
        self.groups = asked.groups
        self.sampler = asked.sampler
        self.cancelled = False
        self._batcher = batcher
        self._owned = asked.owned
        model = batcher.context.model
        self._piece = model.piece if model.info.has_vocab else None
        self._is_end = model.is_end if model.info.has_vocab and asked.stop_at_end else None
        self._text = TextStream()
        #: The text of tokens that are known to be ASCII, and no end.
        self._known = batcher.known
        self._stops = Stops(asked.stop) if asked.stop else None
        self._parts: list[str] = []
        # What the batcher needs, while it has a lease.
        self.lease: Lease | None = None
        self.sequence: Sequence
        self.ledger: Ledger
        #: What the sequence has to hold: what it has, then what is to be decoded.
        self.stream: list[int] = []
        #: When it was fed last.
        self.served = 0

    @property
    def done(self) -> bool:
        """Tell whether it has ended."""
        return self.reason is not None

    @property
    def text(self) -> str:
        """Return the text so far; what may yet become a stop string or a character is not in it."""
        return "".join(self._parts)

    def cancel(self) -> None:
        """End it, also while it is decoded; callable from any thread. What it decoded stays."""
        if self.reason is None:
            self.cancelled = True
            self._batcher.interrupt(self)

    def result(self) -> str:
        """Go on until it has ended, and return all of its text; raises what made it fail."""
        return "".join(self)

    def __iter__(self) -> Iterator[str]:
        """Yield the text from its beginning, as it comes; raises what made it fail."""
        at = 0
        while True:
            while at < len(self._parts):
                at += 1
                yield self._parts[at - 1]
            if self.reason is not None:
                break
            self._batcher.step()
        if self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        state = self.reason or ("waits" if self.lease is None else "runs")
        return f"<Generation of {len(self.prompt)} + {len(self.tokens)} tokens, {state}>"

    # What the batcher asks for...

    def begin(self, lease: Lease, steps: int) -> None:
        """Take a lease over, after so many steps."""
        self.served = steps
        self.lease, self.cached = lease, lease.cached
        self.sequence = lease.sequence
        self.ledger = lease.sequence.ledger
        self.stream = [*self.prompt, *self.tokens]

    def choose(self, context: Context) -> bool:
        """Choose a token by its own sampler and take it; a sampler that raises makes it fail."""
        try:
            token = self.sampler.pick(context, self.ledger.logits_at)
        except Exception as error:
            self.end("failed", error)
            return False
        return self.take(token)

    def take(self, token: int) -> bool:
        """Go on with a chosen token, or end; False when it has ended."""
        text = self._known.get(token)
        if text is None or self._text.held:
            if self._is_end is not None and self._is_end(token):
                self.end("end")
                return False
            text = self._read(token)
        tokens = self.tokens
        tokens.append(token)
        if self._stops is not None:
            text = self._stops.feed(text)
        if text:
            self._parts.append(text)
        if self._stops is not None and self._stops.found is not None:
            self.end("stop")
        elif len(tokens) == self.max_tokens:
            self.end("length")
        else:
            self.stream.append(token)
            return True
        return False

    def _read(self, token: int) -> str:
        if self._piece is None:
            return ""
        piece = self._piece(token)
        if piece.isascii() and self._is_end is not None:
            # Read once: what is in here is no end, and text by itself.
            self._known[token] = piece.decode("ascii")
        return self._text.feed(piece)

    def end(self, reason: Reason, error: Exception | None = None) -> None:
        """End, let out the text that was held back, and give the lease back."""
        if self.reason is not None:
            return
        if reason != "stop":
            self._flush()
            if self._stops is not None and self._stops.found is not None and reason != "failed":
                reason = "stop"
        self.reason, self.error = reason, error
        try:
            self.give_back()
        finally:
            if self._owned is not None:
                self._owned.close()

    def give_back(self) -> None:
        """Release the lease; what was decoded stays in the cache."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()

    def _flush(self) -> None:
        text = self._text.flush()
        if self._stops is not None:
            text = self._stops.feed(text)
            if self._stops.found is None:
                text += self._stops.flush()
        if text:
            self._parts.append(text)
