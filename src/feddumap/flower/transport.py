"""Messages to nodes and the replies to them, with a time limit: the only code that touches Flower's grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from feddumap.flower.codec import Refused

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.25  # seconds between two looks for replies
MARGIN = 60.0  # seconds that a message stays valid beyond the time that is waited for its reply

T = TypeVar("T")


class Transport:
    """Sends to nodes and collects what they reply."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> set[int]:
        """The nodes that are connected."""
        return set(self._grid.get_node_ids())

    def send(self, content: RecordDict, node: int, kind: str, seconds: float) -> str | None:
        """Hand a message over; returns its id, or None if Flower did not take it. One at a time, so that none
        can keep the others from being sent."""
        ids = list(self._grid.push_messages([Message(content, node, kind, ttl=seconds + MARGIN)]))
        return ids[0] or None if ids else None

    def replies(
        self, waiting: dict[str, T], seconds: float, enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[T, RecordDict | Refused]]:
        """The replies to the messages with these ids, as they come, until there are `enough` or the time is
        over. What is replied to is taken out of `waiting`.

        Every look is a request to the SuperLink. So one message after the other is looked at, and all of them
        once a reply has come, or when there is no time left.
        """
        until = time.monotonic() + seconds
        pause, turn = SHORTEST_PAUSE, 0
        looked = list(waiting)
        while True:
            came = False
            for sent in looked:
                reply = self._reply(sent)
                if reply is not None:
                    came = True
                    yield waiting.pop(sent), reply
            left = until - time.monotonic()
            if not waiting or enough() or (left <= 0 and len(looked) >= len(waiting)):
                return
            pause = SHORTEST_PAUSE if came else min(1.5 * pause, LONGEST_PAUSE)
            time.sleep(max(0.0, min(pause, left)))
            turn += 1
            known = list(waiting)
            looked = known if came or left <= 0 else [known[turn % len(known)]]

    def _reply(self, sent: str) -> RecordDict | Refused | None:
        """The reply to one message, or None if there is none yet. They are fetched one by one, because a
        broken one would take the others with it."""
        try:
            found = list(self._grid.pull_messages([sent]))
        except (httpx.HTTPError, OSError):  # the link itself is gone
            raise
        except Exception as error:  # whatever Flower makes of bytes that are not a message
            return Refused(f"its reply cannot be read ({type(error).__name__}: {str(error)[:200]})")
        replies = [message for message in found if message.metadata.reply_to_message_id == sent]
        if not replies:
            return None
        if replies[0].has_error():
            reason = " ".join((replies[0].error.reason or f"error {replies[0].error.code}").split())
            return Refused(f"its node failed ({reason[:300]})")
        return replies[0].content

    @staticmethod
    def each(seconds: float, pause: float = LONGEST_PAUSE) -> Iterator[float]:
        """The seconds left, again and again with pauses between, until none are."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            yield left
            time.sleep(min(pause, left))
