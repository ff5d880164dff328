"""Whom an application believes: signs what it sends to nodes, and judges what it receives.

Everything by which one process makes another one act goes through here: commands, replies, and the
events by which nodes know each other. `umbel.wire.signing` says what a signature covers;
`control_signing` says what is done with it:

| `control_signing` | what is sent | an unsigned message          | a wrong signature |
| ----------------- | ------------ | ---------------------------- | ----------------- |
| `off`             | unsigned     | is believed                  | is not looked at  |
| `optional`        | signed       | is believed                  | is refused        |
| `required`        | signed       | is refused (`UNSIGNED`)      | is refused        |

Events of tasks are not signed: nobody acts on them, and there are too many of them.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from umbel.exceptions import ImproperlyConfigured
from umbel.wire.control import Written
from umbel.wire.signing import (
    KEY_BYTES_MIN,
    REPLY,
    Challenges,
    Nonces,
    Purpose,
    check_signature,
    is_signed,
    sign,
    verify,
)

if TYPE_CHECKING:
    from umbel.app.umbel import Umbel


def signing_key(app: Umbel) -> bytes | None:
    """The key with which messages to nodes are signed; None when they are not."""
    if app.conf.control_signing == "off":
        return None
    key = (app.conf.control_signing_key or "").encode()
    if len(key) < KEY_BYTES_MIN:
        raise ImproperlyConfigured(
            f"control_signing is {app.conf.control_signing!r} and control_signing_key has "
            f"{len(key)} bytes: give it at least {KEY_BYTES_MIN}, the same to all nodes and clients"
        )
    return key


class Trust:
    """Signs and judges messages as the settings of one application say.

    A message to be judged is anything with a body as it is on the wire, headers, content type and
    content encoding.
    """

    def __init__(self, app: Umbel) -> None:
        self._app = app
        self.now = time.time

    @property
    def is_required(self) -> bool:
        """Whether unsigned messages are refused."""
        return bool(self._app.conf.control_signing == "required")

    def signed(self, written: Written, exchange: str, purpose: Purpose) -> Written:
        """The message with a signature in its headers; as it is where signing is off."""
        key = signing_key(self._app)
        if key is None:
            return written
        headers = sign(
            written.body,
            written.headers,
            key,
            self.now(),
            uuid.uuid4().hex,
            exchange=exchange,
            content_type=written.content_type,
            content_encoding=written.content_encoding,
            purpose=purpose,
        )
        return written._replace(headers=headers)

    def judge(
        self,
        message: Any,
        exchange: str,
        purpose: Purpose,
        nonces: Nonces,
        challenges: Challenges | None = None,
    ) -> bool:
        """Whether a message is believed as it is; raises `Distrust` when it is refused.

        False when it is authentic but may be a copy of one that was sent before `nonces.since`;
        that is for the caller to decide.
        """
        key = self._key_for(message.headers)
        if key is None:
            return True
        is_new = verify(
            message.body,
            message.headers,
            key,
            self.now(),
            nonces,
            exchange=exchange,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            purpose=purpose,
            challenges=challenges,
        )
        # Where unsigned messages are believed nothing is gained by doubting signed ones.
        return is_new or not self.is_required

    def reply_nonce(self, message: Any, exchange: str) -> str | None:
        """The nonce of a signed reply; None for an unsigned one, whatever the settings.

        A reply belongs to the request whose ticket it carries, so its time is not looked at.
        Raises `Distrust` for a wrong signature.
        """
        if not is_signed(message.headers):
            return None
        key = signing_key(self._app)
        if key is None:
            return None
        _, nonce = check_signature(
            message.body,
            message.headers,
            key,
            exchange=exchange,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            purpose=REPLY,
        )
        return nonce

    def _key_for(self, headers: Any) -> bytes | None:
        """The key that a message has to be signed with; None when it is believed without."""
        key = signing_key(self._app)
        return key if is_signed(headers) or self.is_required else None
