"""What RabbitMQ says when a queue is there already and is another one.

The text of that error is the only way to ask for the arguments of a queue. Servers differ in how
they tell the values:

    PRECONDITION_FAILED - inequivalent arg 'x-expires' for queue 'q' in vhost '/': received '1' but
        current is '2'
    ... received none but current is the value '2' of type 'long'
    ... received the value '1' of type 'signedint' but current is none

It names the first argument that differs, and is cut to 255 bytes, with `...` at the end: a value
can be read if everything before it is short.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

TEXT_BYTES_MAX: Final = 255

_ARGUMENT = re.compile(r"inequivalent arg '([^']+)'")
_CURRENT: Final = "but current is "
_NONE: Final = "none"
_VALUE = re.compile(r"(?:the value )?'([^']*)'")


class Refusal(NamedTuple):
    """A queue is there already, and differs in this argument."""

    argument: str
    # Its value there; None when it has none, or when the text was cut before the end of it.
    current: str | None
    # It has none.
    is_absent: bool = False


def read_refusal(text: str) -> Refusal | None:
    """What the text of the error says; None when it is about something else."""
    found = _ARGUMENT.search(text)
    if found is None:
        return None
    # The value that was received comes before it, and is ours: nothing in it looks like this.
    _, marked, rest = text[found.end() :].rpartition(_CURRENT)
    if marked and rest.startswith(_NONE):
        return Refusal(found[1], None, is_absent=True)
    value = _VALUE.match(rest) if marked else None
    return Refusal(found[1], None if value is None else value[1])


def room_for_value(argument: str, queue: str, vhost: str) -> int:
    """How long a value may be to be told in full to who declares the queue with another, of one."""
    told = (
        f"PRECONDITION_FAILED - inequivalent arg '{argument}' for queue '{queue}' "
        f"in vhost '{vhost}': received '?' but current is ''"
    )
    return TEXT_BYTES_MAX - len(told.encode("utf-8", "surrogatepass"))
