"""The one door to whatever changes the cluster.

Nobody passes who has not logged in. Every action tells beforehand what it will touch (`preview`),
is asked for by a form that a person confirms, and is written to the audit log twice: before it is
carried out, and with what came of it. What can not be written down is not done.

The audit log has one JSON object per line: `at`, `user`, `address`, `action`, `target`, `stage`
(`asked`, `done`, `failed`, `refused`) and `result`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from umbel.dashboard.actions import ACTIONS, Action, ActionError, Preview
from umbel.dashboard.identity import Identity
from umbel.files import open_file
from umbel.wire.secret_texts import mask_addresses

if TYPE_CHECKING:
    from umbel.dashboard.site import Site

logger = logging.getLogger("umbel.audit")

REMEMBERED_MAX: Final = 500


class Refused(Exception):
    """Somebody may not do this, or it can not be done; the text says why."""

    def __init__(self, text: str, code: int = 403) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the audit log."""

    at: float
    user: str
    address: str
    action: str
    target: dict[str, str]
    stage: str
    result: str = ""


class Audit:
    """The audit log: a file, if there is one, and the last entries in memory."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque(maxlen=REMEMBERED_MAX)

    def write(self, entry: Entry) -> None:
        """Keep an entry; raises OSError when it can not be written."""
        line = json.dumps(asdict(entry), ensure_ascii=True)
        with self._lock:
            if self.path is not None:
                with open_file(self.path, "a", encoding="ascii") as file:
                    file.write(f"{line}\n")
            self._entries.append(entry)
        logger.info("%s", line)

    def latest(self) -> list[Entry]:
        """The last entries of this process, the latest first."""
        with self._lock:
            return list(reversed(self._entries))


class Gate:
    """See the module's text."""

    def __init__(self, site: Site, audit: Audit) -> None:
        self._site, self.audit = site, audit

    def why_not(self, identity: Identity) -> str:
        """Why somebody may change nothing; empty for who may."""
        if identity.is_known:
            return ""
        if not self._site.settings.has_login:
            return "read-only: start the dashboard with --password-file to allow changes"
        return "log in to change something"

    def preview(self, identity: Identity, name: str, given: Mapping[str, str]) -> Preview:
        """What an action would touch; raises `Refused`."""
        action, target = self._checked(identity, name, given)
        try:
            return action.preview(self._site, target)
        except ActionError as exc:
            raise Refused(str(exc), 409) from None

    def carry_out(self, identity: Identity, name: str, given: Mapping[str, str]) -> str:
        """Do it, and say what came of it; raises `Refused`."""
        action, target = self._checked(identity, name, given)
        self._write(identity, action, target, "asked")
        try:
            result = action.run(self._site, target)
        except ActionError as exc:
            self._write(identity, action, target, "refused", str(exc))
            raise Refused(str(exc), 409) from None
        except Exception as exc:
            text = mask_addresses(f"{type(exc).__name__}: {exc}")
            self._write(identity, action, target, "failed", text)
            raise Refused(f"that failed: {text}", 502) from exc
        self._write(identity, action, target, "done", result)
        self._site.polling.hurry()
        return result

    def _checked(
        self, identity: Identity, name: str, given: Mapping[str, str]
    ) -> tuple[Action, dict[str, str]]:
        reason = self.why_not(identity)
        if reason:
            raise Refused(reason)
        action = ACTIONS.get(name)
        if action is None:
            raise Refused(f"there is no action {name!r:.100}", 404)
        try:
            return action, action.target(given)
        except ActionError as exc:
            raise Refused(str(exc), 400) from None

    def _write(
        self,
        identity: Identity,
        action: Action,
        target: dict[str, str],
        stage: str,
        result: str = "",
    ) -> None:
        entry = Entry(
            time.time(), identity.user, identity.address, action.name, target, stage, result[:1_000]
        )
        try:
            self.audit.write(entry)
        except OSError as exc:
            if stage == "asked":
                raise Refused(
                    f"the audit log can not be written ({exc.strerror}): nothing was done", 503
                ) from exc
            logger.error("the audit log can not be written: %s; lost: %s", exc, asdict(entry))
