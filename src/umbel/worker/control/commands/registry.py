"""Where the families of commands register what they have."""

from __future__ import annotations

from umbel.app.commands import Commands

BUILTIN = Commands()
command = BUILTIN.command
