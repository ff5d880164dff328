"""Somebody who reaches the broker and has no key: hears everything and sends whatever he likes."""

from __future__ import annotations

import json
import time
from typing import Any, Self

from kombu import Exchange, Producer

from umbel import Umbel
from umbel.app.events.publisher import event_exchange

PERSISTENT, TRANSIENT = 2, 1


class Stranger:
    """Publishes control messages and events on a connection of its own."""

    def __init__(self, url: str) -> None:
        self.app = Umbel("stranger", broker=url, backend="disabled://", set_as_current=False)
        self.connection = self.app.connection()
        channel = self.connection.channel()
        self._control = Exchange("celery.pidbox", type="fanout", durable=False)
        self._events = event_exchange("celeryev", self.connection)
        for exchange in (self._control, self._events):
            exchange(channel).declare()
        self._producer = Producer(channel, auto_declare=False)

    def send(
        self,
        body: bytes,
        content_type: Any = "application/json",
        headers: Any = None,
        content_encoding: str = "utf-8",
    ) -> None:
        """Publish a control message as it is."""
        self._producer.publish(
            body,
            exchange=self._control.name,
            content_type=content_type,
            content_encoding=content_encoding,
            headers=headers or {},
            routing_key="",
            delivery_mode=PERSISTENT,
        )

    def command(self, method: str, headers: Any = None, **arguments: Any) -> None:
        """Publish a control message that asks for no reply."""
        self.send(json.dumps({"method": method, "arguments": arguments}).encode(), headers=headers)

    def event(self, kind: str, hostname: str, **fields: Any) -> None:
        """Publish an event that claims to come from `hostname`."""
        event = {
            "type": kind,
            "hostname": hostname,
            "timestamp": time.time(),
            "pid": 7,
            "clock": 1,
            "utcoffset": 0,
            **fields,
        }
        self.send_event(json.dumps(event).encode(), kind, {"hostname": hostname})

    def send_event(self, body: bytes, kind: str, headers: dict[str, Any]) -> None:
        """Publish the body of an event as it is."""
        self._producer.publish(
            body,
            exchange=self._events.name,
            routing_key=kind.replace("-", "."),
            headers=headers,
            content_type="application/json",
            content_encoding="utf-8",
            delivery_mode=TRANSIENT,
        )

    def heartbeat(self, hostname: str, **fields: Any) -> None:
        """Publish a heartbeat of a worker that may not exist."""
        known = {"freq": 2.0, "inc": 1, "sw_ident": "py-umbel", "active": 0, "processed": 0}
        self.event("worker-heartbeat", hostname, **{**known, **fields})

    def elect(self, id_: str, topic: str, action: Any, hostname: str = "forged@test") -> None:
        """Publish a candidate, which opens an election at every node that believes it."""
        fields = {"id": id_, "topic": topic, "action": action, "cver": 2, "inc": 1, "freq": 2.0}
        self.event("worker-elect", hostname, **fields)

    def close(self) -> None:
        self.connection.close()
        self.app.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
