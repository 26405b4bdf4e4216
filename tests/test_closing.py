"""The end of a `with` block closes the object, also after an exception."""

import pytest

from pyllamakv.closing import ClosedOnExit


class Door(ClosedOnExit):
    open = True

    def close(self) -> None:
        self.open = False


def test_the_end_of_the_block_closes() -> None:
    with Door() as door:
        assert door.open
    assert not door.open


def test_an_exception_closes_and_passes() -> None:
    door = Door()
    with pytest.raises(KeyError), door:
        raise KeyError
    assert not door.open
