"""A worker claims its node name on its first connection, before anybody hears of it.

Once per life of the worker: a later connection is the same node's, whatever the broker thinks.
`broker/sessions/names.py` says how a name is claimed, and what becomes of the claim.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kombu.exceptions import OperationalError

from umbel.app.control.mailbox import mailboxes_for
from umbel.broker.sessions.names import Name, name_for, new_token
from umbel.worker.control.pidbox import Pidbox, pidbox_for

if TYPE_CHECKING:
    from umbel.worker.runtime.consumer import Consumer


class Naming:
    """The claim of one worker."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._worker = consumer.worker
        self._token = new_token()
        self._name: Name | None = None
        self.sure = False  # whether the name was free, or its holder is gone for sure

    def claim(self) -> None:
        """Claim the name, the first time; raises `NodeNameTaken`."""
        connection, worker = self._consumer.connection, self._worker
        if self._name is not None or connection is None:
            return
        listens = worker.app.conf.worker_enable_remote_control
        name = name_for(
            connection,
            mailboxes_for(worker.app),
            worker.plan.hostname,
            self._token,
            listens_here=listens and pidbox_for(worker.pool) is Pidbox,
        )
        self.sure = self._claim(name)
        self._name = name

    def claim_again(self) -> None:
        """Somebody was quicker after all: raise `NodeNameTaken` if he answers."""
        if self._name is not None:
            self._claim(self._name)

    def release(self, *, lost: bool = False) -> None:
        """Let go of the name; `lost` if the broker is not there to hear of it."""
        name, self._name = self._name, None
        if name is not None:
            name.release(lost=lost)

    def _claim(self, name: Name) -> bool:
        worker = self._worker
        control = worker.app.control

        def ask(timeout_s: float) -> bool:
            worker.last_turn = time.monotonic()  # who waits for an answer is alive
            try:
                # Where signing is required nobody without the key keeps a worker from starting.
                replies = control.mailbox.call(
                    "ping",
                    {},
                    destination=[name.hostname],
                    timeout_s=timeout_s,
                    limit=1,
                    signed_only=True,
                )
            except OperationalError:
                return False
            return bool(replies)

        try:
            return name.claim(ask, worker.stop_wanted.wait)
        finally:
            control.close()
