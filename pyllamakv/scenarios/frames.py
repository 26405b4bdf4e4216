"""Film a player: keep the cells after every operation, also after one that failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pyllamakv.record import playback
from pyllamakv.record.playback import Film, Frame
from pyllamakv.scenarios import cell_samples
from pyllamakv.scenarios.player import Player, word
from pyllamakv.view.cell_drawing import Picture

if TYPE_CHECKING:
    from pyllamakv.binding.protocol import RawDefrag
    from pyllamakv.scenarios.cell_samples import Look
    from pyllamakv.scenarios.feeding import Feed

#: A film keeps no more frames: it is there to be looked at.
LONGEST = 400


class FilmedPlayer(Player):
    """Keep the film of what is played; a build that shows no cells leaves it empty."""

    film: Film
    _before: Look | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.film = Film("")
        self._before = None

    def defrag(self) -> RawDefrag:
        """Defragment now; raises Unsupported where the build cannot."""
        done = super().defrag()
        self._take("defrag", "")
        return done

    def _run(self, feed: Feed) -> int:
        status = super()._run(feed)
        fed: dict[str, int] = {}
        for owners in feed.owners:
            name = "+".join(map(str, owners))
            fed[name] = fed.get(name, 0) + 1
        self._take("decode", playback.detail({"feed": fed}), word(status) if status else "")
        return status

    def _step(self, op: str, *arguments: Any) -> None:
        super()._step(op, *arguments)
        self._take(op, ", ".join(str(each) for each in arguments if each != -1))

    def _take(self, op: str, detail: str, failed: str = "") -> None:
        if len(self.film) >= LONGEST:
            return
        now = cell_samples.look(self.native, self.context, self.info)
        if now is None:
            return
        moves: tuple[tuple[int, int, int], ...] = ()
        if self._before is not None and op in playback.MOVING:
            moves = tuple((a, b, n) for a, b, n in now.moved(self._before))
        number = len(self.film) + 1
        moved = sum(length for *_, length in moves)
        picture = Picture.of(now.snapshot)
        self.film.frames.append(Frame(number, op, detail, picture, failed, moves, moved))
        self._before = now


def films(players: Iterable[Player]) -> tuple[Film, ...]:
    """Return what was filmed of players, of those that were."""
    filmed = (each.film for each in players if isinstance(each, FilmedPlayer))
    return tuple(film for film in filmed if len(playback))
