"""The entry of the command line.

Green pools need the standard library patched before anything else is imported, so this module
imports next to nothing, looks at the arguments itself, and only then loads the verbs.

Everything that goes wrong ends here: one line on stderr and a documented exit code, never a
traceback unless one was asked for (`--traceback`, or UMBEL_TRACEBACK=1).
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

# Flags of the worker that may be joined with -P in one word: `-EP gevent`.
_POOL_WORD = re.compile(r"-[Eq]*P(?P<value>.*)", re.DOTALL)

# When the command of this process began, for timeouts that count from there.
began: float | None = None


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    global began
    began = time.monotonic()
    try:
        if wants_gevent(argv, os.environ):
            _patch()
        from umbel.cli.group import cli

        returned = cli.main(args=list(argv), prog_name="umbel", standalone_mode=False)
        sys.stdout.flush()
        return returned if isinstance(returned, int) else 0
    except BaseException as exc:  # noqa: BLE001 - the barrier of the command line
        from umbel.cli import errors

        return errors.report(exc)


def wants_gevent(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether these arguments start a worker with the gevent pool."""
    if "worker" not in argv:
        return False
    return _pool(argv[argv.index("worker") + 1 :], environ.get("UMBEL_WORKER_POOL", "")) == "gevent"


def _pool(words: Sequence[str], pool: str) -> str:
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        short = _POOL_WORD.fullmatch(word)
        if word == "--":
            break
        if word == "--pool":
            pool = following
        elif word.startswith("--pool="):
            pool = word.removeprefix("--pool=")
        elif short:
            pool = short["value"] or following
    return pool


def _patch() -> None:
    try:
        from umbel.worker.execution.pools.gevent import patch
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in {"gevent", "greenlet"}:
            raise
        from umbel.exceptions import ImproperlyConfigured

        raise ImproperlyConfigured(
            "pool 'gevent' needs the package gevent: pip install 'umbel[gevent]'"
        ) from None
    patch()
