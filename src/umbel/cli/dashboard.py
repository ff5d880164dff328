"""`umbel dashboard`."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import click

from umbel.cli.errors import FINE, CommandFailed, log_to_stderr
from umbel.cli.group import Invocation

_PACKAGES = frozenset({"starlette", "uvicorn", "jinja2", "markupsafe", "anyio", "h11"})
AUDIT_FILE = "umbel-audit.jsonl"

EPILOG = """\b
Examples:
  umbel -A shop dashboard
  umbel -A shop dashboard --password-file secret --tables /var/lib/umbel/tables
  umbel -A shop dashboard --host 0.0.0.0 --password-file secret --prefix /umbel
"""


@click.command("dashboard", epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Where to listen; beyond loopback only with a login.",
)
@click.option("--port", default=5577, show_default=True, type=click.IntRange(1, 65_535))
@click.option("--prefix", default="", metavar="/PATH", help="The path under which a proxy has it.")
@click.option("--tables", metavar="DIR", help="Tables of 'umbel history build', for the history.")
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Who knows its first line may change things.",
)
@click.option(
    "--proxy-header",
    metavar="NAME",
    help="A header in which a proxy names the user, such as X-Forwarded-User.",
)
@click.option(
    "--proxy-address",
    multiple=True,
    metavar="ADDRESS",
    help="A proxy whose headers are believed (also X-Forwarded-For); may be repeated.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="A name, besides those of loopback, under which browsers may ask.",
)
@click.option("--private", is_flag=True, help="Show nothing without login.")
@click.option(
    "--public-details",
    is_flag=True,
    help="Show arguments, results and errors also without login.",
)
@click.option(
    "--audit-log",
    default=AUDIT_FILE,
    show_default=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where every change is written down.",
)
@click.option(
    "--tasks-max",
    default=10_000,
    show_default=True,
    metavar="COUNT",
    type=click.IntRange(100, 1_000_000),
    help="How many tasks are remembered.",
)
@click.pass_obj
def dashboard(
    invocation: Invocation,
    host: str,
    port: int,
    prefix: str,
    tables: str | None,
    password_file: Path | None,
    proxy_header: str | None,
    proxy_address: tuple[str, ...],
    allow_host: tuple[str, ...],
    private: bool,
    public_details: bool,
    audit_log: Path,
    tasks_max: int,
) -> int:
    """Serve the web view of the cluster: live from its events, and its history.

    Anybody who can connect may look, but sees no arguments, results or errors of tasks. Those, and
    changes, need a login: --password-file, or a proxy that names users. Figures of tasks need
    workers started with -E.
    """
    try:
        from umbel.dashboard.serving import serve
        from umbel.dashboard.settings import Settings, read_network, read_password
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise CommandFailed(
            f"'umbel dashboard' needs the package {package}: pip install 'umbel[dashboard]'"
        ) from None
    settings = Settings(
        host=host,
        port=port,
        prefix=prefix.rstrip("/"),
        password=None if password_file is None else read_password(password_file),
        proxy_header=proxy_header,
        proxy_addresses=tuple(map(read_network, proxy_address)),
        hosts=tuple(name.lower() for name in allow_host),
        private=private,
        public_details=public_details,
        audit=audit_log if password_file is not None or proxy_header is not None else None,
        tables=tables,
        tasks_max=tasks_max,
    )
    app = invocation.app()
    _check_port(host, port)
    if not invocation.quiet:
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"The dashboard is at http://{shown}:{port}{settings.prefix}/", err=True)
    try:
        with log_to_stderr("umbel", logging.ERROR if invocation.quiet else logging.WARNING):
            serve(app, settings)
    finally:
        app.close()
    return FINE


def _check_port(host: str, port: int) -> None:
    """One line instead of the server's own words where the address can not be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
    except OSError as exc:
        raise CommandFailed(f"cannot listen on {host} port {port}: {exc.strerror}") from exc
