"""Turn generated tokens into text, and know why and where a generation ended.

`GeneratedText` is one generation, in a `Context` or in a `Batcher`. `TextStream` iterates over the
text of one in a context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pyllamakv.errors import Cancelled
from pyllamakv.runtime.detokenizer import IncrementalDetokenizer
from pyllamakv.runtime.stop_strings import StopStrings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from pyllamakv.runtime.parts import ModelParts


Reason = Literal["end", "stop", "length", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of a generation; ``reused`` ones of the prompt were evaluated before it."""

    prompt: int
    reused: int
    generated: int


class GeneratedText:
    """The tokens and text that continue a prompt of ``n_prompt`` tokens.

    ``known`` has the text of tokens that are ASCII and end no generation; this adds to it.
    """

    def __init__(
        self,
        model: ModelParts,
        n_prompt: int,
        max_tokens: int | None,
        stop: tuple[str, ...],
        *,
        stop_at_end: bool,
        known: dict[int, str],
    ) -> None:
        #: The generated tokens, without the end token.
        self.tokens: list[int] = []
        #: Why the generation ended; None while it runs.
        self.finish_reason: Reason | None = None
        #: The error of a failed or cancelled generation.
        self.error: BaseException | None = None
        #: Number of prompt tokens found in the cache; None while that is unknown.
        self.cached: int | None = None
        self.max_tokens = max_tokens
        self._n_prompt = n_prompt
        #: The model, if it can turn tokens into text.
        self._vocab = model if model.info.has_vocab else None
        self._stop_at_end = stop_at_end
        self._known = known
        self._text = IncrementalDetokenizer()
        self._stops = StopStrings(stop) if stop else None
        self._parts: list[str] = []

    @property
    def done(self) -> bool:
        """Whether the generation has ended."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The text so far, without a possible part of a stop string or an incomplete character."""
        return "".join(self._parts)

    @property
    def usage(self) -> Usage:
        """The numbers of tokens so far: of the prompt, those reused, and those generated."""
        return Usage(self._n_prompt, self.cached or 0, len(self.tokens))

    def reuse(self, cached: int) -> None:
        """State how many prompt tokens were found in the cache."""
        self.cached = cached

    def parts(self, start: int = 0) -> list[str]:
        """Return the parts of the text so far from a number on."""
        return self._parts[start:]

    def is_end(self, token: int) -> bool:
        """Return whether a token ends the generation, instead of adding to it."""
        return self._stop_at_end and self._vocab is not None and self._vocab.is_eog(token)

    def accept_token(self, token: int) -> bool:
        """Continue with a sampled token, or end. Return False if the generation has ended."""
        text = self._known.get(token)
        if text is None or self._text.held:
            if self.is_end(token):
                self.end("end")
                return False
            text = self._read(token)
        tokens, stops = self.tokens, self._stops
        tokens.append(token)
        if stops is not None:
            text = stops.feed(text)
        if text:
            self._parts.append(text)
        if stops is not None and stops.found is not None:
            self.end("stop")
        elif len(tokens) == self.max_tokens:
            self.end("length")
        else:
            return True
        return False

    def end(self, reason: Reason, error: BaseException | None = None) -> None:
        """End the generation, and emit withheld text. A second call does nothing."""
        if self.finish_reason is not None:
            return
        if reason != "stop":
            self._flush()
            if self._stops is not None and self._stops.found is not None and reason != "failed":
                reason = "stop"
        self.finish_reason, self.error = reason, error

    def _read(self, token: int) -> str:
        if self._vocab is None:
            return ""
        piece = self._vocab.piece(token)
        if piece.isascii() and not self._vocab.is_eog(token):
            # Cache the text: the token ends no generation, and its bytes are complete characters.
            self._known[token] = piece.decode("ascii")
        return self._text.feed(piece)

    def _flush(self) -> None:
        text = self._text.flush()
        if self._stops is not None:
            text = self._stops.feed(text)
            if self._stops.found is None:
                text += self._stops.flush()
        if text:
            self._parts.append(text)


class TextStream:
    """Iterate over the text of a generation. `Sequence.generate` and `Context.chat` create it.

    After the iteration, ``finish_reason`` is "end" (end-of-generation token), "stop" (stop string)
    or "length" (``max_tokens``). It is "cancelled" after `Context.cancel` or `close`, and "failed"
    after another exception.
    """

    # The generator must not refer to this object: without a cycle, a generation that is
    # not continued ends at once, as that of a plain generator does.

    def __init__(
        self, output: GeneratedText, generate: Callable[[GeneratedText], Generator[str]]
    ) -> None:
        self._output = output
        self._run = generate(output)

    @property
    def finish_reason(self) -> Reason | None:
        """Return why the generation ended; None while it runs."""
        return self._output.finish_reason

    @property
    def error(self) -> BaseException | None:
        """Return the exception of a generation that was cancelled or failed."""
        return self._output.error

    @property
    def tokens(self) -> list[int]:
        """Return the generated tokens so far, without the end token."""
        return self._output.tokens.copy()

    @property
    def text(self) -> str:
        """Return the text so far, without a possible part of a stop string."""
        return self._output.text

    @property
    def usage(self) -> Usage:
        """Return the numbers of tokens so far.

        Tokens that were in the sequence before, and the same as the prompt, are ``reused``. For
        `Sequence.generate`, the prompt is all that the sequence had.
        """
        return self._output.usage

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        try:
            return next(self._run)
        except StopIteration:
            raise
        except BaseException as error:
            self._output.end("cancelled" if isinstance(error, Cancelled) else "failed", error)
            raise

    def close(self) -> None:
        """End the generation; the yielded tokens remain. A second call does nothing."""
        self._run.close()
        self._output.end("cancelled")

    def __repr__(self) -> str:
        used = self.usage
        state = self.finish_reason or "runs"
        return f"<TextStream of {used.prompt} + {used.generated} tokens, {state}>"
