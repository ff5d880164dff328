"""Remote control, the client's side: `app.control`.

- `control`     one method per command, as Celery's users know them
- `inspection`  the commands that only ask: `app.control.inspect(...)`
- `mailbox`     a request on its way out, and its replies on their way back
- `collector`   the thread that receives the replies to all requests of a process

A request goes to every node and each decides whether it is meant, so nobody knows how many replies
will come. A call ends when it has as many as it wanted, when every node it named has answered, or
at its deadline, whichever is first.
"""

from __future__ import annotations

from umbel.app.control.control import Control
from umbel.app.control.inspection import DuplicateNodenameWarning, Inspect
from umbel.app.control.mailbox import Mailbox

__all__ = ["Control", "DuplicateNodenameWarning", "Inspect", "Mailbox"]
