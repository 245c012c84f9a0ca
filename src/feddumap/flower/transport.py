"""Messages to nodes and their replies, with time limits. No other module uses Flower's grid."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from feddumap.flower.codec import Refused

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.25  # seconds between two polls for replies
SEND_TRIES = 3
MARGIN = 60.0  # seconds that a message stays valid after the time limit of its reply

T = TypeVar("T")


@dataclass(frozen=True)
class Connection:
    """What Flower knows of a connected node: its public key (PEM), whose private key it has proved to hold,
    and when it connected."""

    key: bytes = b""
    since: str = ""


class Transport:
    """Sends messages to nodes and collects their replies."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> dict[int, Connection]:
        """The connected nodes."""
        return {
            node.node_id: Connection(node.public_key, node.last_activated_at)
            for node in self._grid.get_nodes()
        }

    def send(self, content: RecordDict, node: int, kind: str, seconds: float) -> str | None:
        """Send a message; returns its id, or None if Flower did not accept it. Messages are sent one at a
        time, so a rejected one does not affect the others.

        A reply is accepted for the id of its message. Flower makes the id from the message's content, and
        does not compare a reply's sender with the node that delivers it; the random group id makes the ids of
        messages to other nodes unpredictable.

        A message whose sending fails is sent anew: a SuperLink that is restarted meanwhile does not know the
        parts of it that were sent before.
        """
        for attempt in range(SEND_TRIES):
            try:
                message = Message(content, node, kind, ttl=seconds + MARGIN, group_id=secrets.token_hex(16))
                ids = list(self._grid.push_messages([message]))
            except (httpx.HTTPError, OSError):  # the SuperLink itself is unreachable
                raise
            except Exception:  # Flower's own error, which is not public
                if attempt == SEND_TRIES - 1:
                    raise
            else:
                return ids[0] or None if ids else None
        return None

    def replies(
        self, waiting: dict[str, T], seconds: float, enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[T, RecordDict | Refused]]:
        """Yield the replies to the messages with these ids as they arrive, until there are `enough` or the
        time is over. Messages with a reply are removed from `waiting`.

        Every poll is a request to the SuperLink. So messages are polled one after another, and all of them
        once a reply has arrived, or when no time is left.
        """
        until = time.monotonic() + seconds
        pause, turn = SHORTEST_PAUSE, 0
        polled = list(waiting)
        while True:
            arrived = False
            for sent in polled:
                reply = self._reply(sent)
                if reply is not None:
                    arrived = True
                    yield waiting.pop(sent), reply
            left = until - time.monotonic()
            if not waiting or enough() or (left <= 0 and len(polled) >= len(waiting)):
                return
            pause = SHORTEST_PAUSE if arrived else min(1.5 * pause, LONGEST_PAUSE)
            time.sleep(max(0.0, min(pause, left)))
            turn += 1
            known = list(waiting)
            polled = known if arrived or left <= 0 else [known[turn % len(known)]]

    def _reply(self, sent: str) -> RecordDict | Refused | None:
        """The reply to one message, or None if there is none yet. Replies are fetched one at a time, because
        one that cannot be read would make the others fail too."""
        try:
            found = list(self._grid.pull_messages([sent]))
        except (httpx.HTTPError, OSError):  # the SuperLink itself is unreachable
            raise
        except Exception as error:  # what Flower raises for invalid bytes
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
        """Yield the seconds left, with pauses in between, until none are left."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            yield left
            time.sleep(min(pause, left))
