"""AMQP, faster than py-amqp alone and under the same API.

py-amqp does a few things for every frame: it changes the time-out of the socket twice, asks the
kernel for seven bytes, then for the rest, then for one byte, and walks through its dispatch. Here
whole chunks are read and every message that is complete in them is handed over at once; the acks
of a turn of the loop are written together; many messages are published with one write, and their
confirms are waited for together.

| module       | what it does                                                              |
| ------------ | ------------------------------------------------------------------------- |
| `frames`     | bytes in, methods and messages out; no socket, no clock                   |
| `shapes`     | reads the properties of a message, quickly when it has seen such ones     |
| `tables`     | writes the properties of a message                                        |
| `settling`   | which deliveries are open, and which frames acknowledge the others        |
| `sockets`    | the socket, plain or TLS, read in chunks                                  |
| `bounded`    | waits for an answer that end                                              |
| `channel`    | py-amqp's channel: deliveries, gathered acks, publishing, confirms        |
| `connection` | py-amqp's connection on such sockets                                      |
| `transport`  | kombu's transport, for its blocking and its event loop                    |
| `batches`    | publishing many messages                                                  |

Whatever is not a delivery goes through py-amqp's own dispatch, so that answers, heartbeats, blocked
connections, cancelled consumers, closed channels and returned messages are as they always were.
`broker_amqp_transport = "pyamqp"` goes back to py-amqp altogether.

Two rules keep it safe. *Nothing is left lying*: what was read from the socket is not seen by a
poller any more, so a pair of sockets stands in for it while a frame is left over. *A broken stream
stays broken*: after a malformed frame every further read raises the same error, which counts as a
lost connection.
"""
