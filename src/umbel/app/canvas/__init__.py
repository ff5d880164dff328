"""Canvas: calls as values, and the ways to put them together.

A `Signature` is one call that has not been made yet: the task's name, arguments and options.
It is a dictionary in the shape that travels on the wire, so it can be put into a message as it
is. `chain`, `group` and `chord` are signatures whose arguments are signatures.

Applying a composite has two halves. *Planning* (`plan`) works on a private copy: it gives every
part its id, rewrites groups that are followed by something into chords, and collects the plain
messages to be sent now and the chords to be announced. *Sending* then does all input and
output, in one batch. So the caller's signature is never changed, applying it again gives new
ids, and whatever is wrong is reported before anything is sent.
"""

from __future__ import annotations

from umbel.app.canvas.chain import chain
from umbel.app.canvas.chord import chord
from umbel.app.canvas.group import group
from umbel.app.canvas.maps import chunks, xmap, xstarmap
from umbel.app.canvas.signature import Signature, maybe_signature, signature
from umbel.app.canvas.stamps import StampingVisitor

__all__ = [
    "Signature",
    "StampingVisitor",
    "chain",
    "chord",
    "chunks",
    "group",
    "maybe_signature",
    "signature",
    "xmap",
    "xstarmap",
]
