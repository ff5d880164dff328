"""Task messages with any header fields, written by the writer that applications use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from umbel.wire.outgoing import Parcel, TaskWriter, properties_of
from umbel.wire.reprs import safe_repr

# What a writer is made for; parts of the body; and what is a property, not a header.
SHARED = (
    "serializer", "compression", "time_limit", "soft_time_limit", "shadow", "origin",
    "ignore_result",
)  # fmt: skip
EMBEDDED = ("callbacks", "errbacks", "chain", "chord")
PROPERTIES = {"reply_to": None, "priority": 0, "delivery_mode": 2, "expires_in_s": None}


def written(
    name: str,
    id: str = "t",  # noqa: A002 - the name on the wire
    args: Any = (),
    kwargs: Any = None,
    *,
    headers: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Parcel:
    """A message of protocol 2; `headers` are the caller's own, `fields` the protocol's."""
    writer = TaskWriter(name=name, **{key: fields.pop(key) for key in SHARED if key in fields})
    embed = {key: fields.pop(key, None) for key in EMBEDDED}
    properties = [fields.pop(key, usual) for key, usual in PROPERTIES.items()]
    kwargs = {} if kwargs is None else kwargs
    own = {
        "id": id, "root_id": id, "argsrepr": safe_repr(args), "kwargsrepr": safe_repr(kwargs),
        "group": fields.pop("group_id", None), **fields,
    }  # fmt: skip
    own = {key: value for key, value in own.items() if value is not None}
    return writer.write(own, args, kwargs, properties_of(id, *properties), embed, headers)
