"""A Redis transport for kombu that moves messages in batches.

On the server everything is where kombu puts it: lists with priority steps, `unacked` and
`unacked_index`, binding sets, pub/sub for fanout. Celery's producers and workers share the queues,
and each side restores what the other one left. What differs is how messages are taken:

- *Taken and noted in one step.* One script removes what was acknowledged, pops up to as many
  messages as the window has room for and notes each as unacknowledged (`scripts.POP`). There is no
  moment in which nobody has a message.
- *Tags are known before they are given.* A message is noted under a tag of this consumer, made of
  a name and a number that is reserved before the server is asked (`ledger`). If the answer is lost
  with the connection, the next one asks for those tags and delivers what is there.
- *Nobody waits.* A request is sent when there is room and its answer is read when the socket is
  readable; the next one leaves while the messages of the last are being delivered (`fetching`).
- *Woken, not polling.* A pop that finds the lists exhausted reads their lengths in the same step,
  which makes the server tell this connection of the next change (client-side caching). It looks
  once a second all the same. Where the server can not do that, it waits with BRPOP; where it runs
  no scripts, kombu's own ways are used.
- *One clock.* When a message was taken, renewed, or is overdue is judged by the server's time
  (`broker/server_time.py`), in the same unit as kombu's, so that Celery's workers can judge too.
- *Nothing goes back twice.* Whoever gives a message back removes its note first, and acts only if
  it was there (`scripts.GIVE`).

An acknowledgement that did not reach the server is sent again on the next connection: saying it
twice is harmless. Publishing, fanout, bindings and queue sizes are kombu's, with one client that is
used again.
"""

from __future__ import annotations

from umbel.broker.redis.transport import SentinelTransport, Transport, transport_for

__all__ = ["SentinelTransport", "Transport", "transport_for"]
