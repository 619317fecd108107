"""What gloo, NCCL and the rendezvous store report of a lost rank, as one line.

Knows no collective; asks the heartbeat where this rank stands.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sgt_ds.errors import LostPeer, NotMet
from sgt_ds.training.heartbeat import Heartbeat

# Where the other end is gone, in small letters.
_SIGNS_OF_LOSS = (
    *("connection closed", "connection was closed", "connection was likely closed"),
    *("connection reset", "connection refused", "broken pipe", "failed to recv"),
    *("no route to host", "network is unreachable", "ncclremoteerror", "remote process exited"),
    *("communicator was aborted", "timed out waiting", "timed out after", "socket timeout"),
    *("collective operation timeout", "application timeout", "wait timeout"),
)

log = logging.getLogger(__name__)


@contextmanager
def lost_peers_told(heartbeat: Heartbeat) -> Iterator[None]:
    """Raises: LostPeer, one line, where a collective failed because another rank has gone; NotMet,
    one line, where ranks were still starting.
    """
    try:
        yield
    except RuntimeError as error:  # gloo's and NCCL's errors are nothing narrower
        said = str(error).strip()
        if heartbeat.is_alone or not any(sign in said.lower() for sign in _SIGNS_OF_LOSS):
            raise
        log.warning("%s: %s", heartbeat.place, said)
        cause = said.splitlines()[0][:300]
        if heartbeat.is_starting:
            raise NotMet(
                f"{heartbeat.own_name} could not reach the other ranks, or lost one during "
                f"start-up: {cause}"
            ) from error
        raise LostPeer(
            f"{heartbeat.own_name} lost another rank in {heartbeat.place}: {cause}"
        ) from error
