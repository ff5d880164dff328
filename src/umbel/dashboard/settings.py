"""What a dashboard is told, checked before it serves anything."""

from __future__ import annotations

import ipaddress
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umbel.dashboard.live.source import TASKS_MAX
from umbel.exceptions import ImproperlyConfigured

PORT: Final = 5577
PASSWORD_CHARS_MIN: Final = 8
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_HEADER: Final = re.compile(r"[A-Za-z0-9-]{1,100}")
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Settings:
    """How a dashboard is served, and who may do what there.

    `host`             other than a loopback address needs a password or a proxy
    `prefix`           where it lies behind a proxy that serves other things too: `/umbel`
    `password`         who knows it may change things; without, nobody may
    `proxy_header`     a header in which a proxy names who has logged in there...
    `proxy_addresses`  ...taken from these addresses only, and X-Forwarded-For likewise
    `hosts`            names under which it may be asked for, besides its own
    `private`          nothing is shown without login; always so beyond loopback
    `public_details`   who has not logged in sees arguments, results and texts of errors too
    `audit`            the file to which every action is written; the log as well in any case
    `tables`           where `umbel history build` has put its tables
    `tasks_max`        more are remembered: each takes about 3 kB
    """

    host: str = "127.0.0.1"
    port: int = PORT
    prefix: str = ""
    password: str | None = None
    proxy_header: str | None = None
    proxy_addresses: tuple[Network, ...] = ()
    hosts: tuple[str, ...] = ()
    private: bool = False
    public_details: bool = False
    audit: Path | None = None
    tables: str | None = None
    tasks_max: int = TASKS_MAX
    live_clients_max: int = 100

    def __post_init__(self) -> None:
        """Refuse what would be unsafe or can not work; the message tells the way out."""
        if not _PREFIX.fullmatch(self.prefix):
            raise ImproperlyConfigured(
                f"prefix {self.prefix!r}: give a path such as /umbel, without a slash at its end"
            )
        if self.password is not None and len(self.password) < PASSWORD_CHARS_MIN:
            raise ImproperlyConfigured(
                f"the password is too short: give at least {PASSWORD_CHARS_MIN} characters"
            )
        if self.proxy_header is not None:
            if not _HEADER.fullmatch(self.proxy_header):
                raise ImproperlyConfigured(
                    f"{self.proxy_header!r} is not the name of a header, such as X-Forwarded-User"
                )
            if not self.proxy_addresses:
                raise ImproperlyConfigured(
                    "a header that names users is trusted from known addresses only: "
                    "give them with --proxy-address"
                )
        if self.private and not self.has_login:
            raise ImproperlyConfigured(
                "--private shows nothing without login, and nobody can log in: "
                "give --password-file, or --proxy-header and --proxy-address"
            )
        if not self.is_loopback and not self.has_login:
            raise ImproperlyConfigured(
                f"refusing to serve on {self.host} without authentication: give --password-file, "
                "or --proxy-header and --proxy-address, or stay on 127.0.0.1"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @property
    def has_login(self) -> bool:
        """Whether anybody can log in."""
        return self.password is not None or self.proxy_header is not None

    @property
    def reading_needs_login(self) -> bool:
        """Whether even looking is for those who have logged in."""
        return self.private or not self.is_loopback

    def is_proxy(self, address: str | None) -> bool:
        """Whether what comes from an address may say who somebody is."""
        try:
            found = ipaddress.ip_address(address or "")
        except ValueError:
            return False
        return any(found in network for network in self.proxy_addresses)

    def allows_host(self, header: str) -> bool:
        """Whether a request may ask for this host.

        A page of somebody else's that has its name point to 127.0.0.1 would otherwise read all.
        Beyond loopback the login protects, as its cookie belongs to the right name.
        """
        if not self.is_loopback:
            return True
        name = host_name(header)
        return name in LOCAL_NAMES or name == self.host.lower() or name in self.hosts


def is_loopback(host: str) -> bool:
    """Whether this is an address of the machine itself."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The name in a Host header, without its port."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def host_address(text: str) -> str:
    """The address in an entry of X-Forwarded-For, which may have a port; empty if it has none."""
    name = host_name(text.strip().strip('"'))
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return ""


def read_password(path: Path) -> str:
    """The first line of a file that nobody else can read."""
    try:
        mode = path.stat().st_mode
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "not a text"
        raise ImproperlyConfigured(f"cannot read the password from {path}: {reason}") from exc
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ImproperlyConfigured(f"{path} can be read by everybody: chmod 600 {path}")
    if not lines or not lines[0].strip():
        raise ImproperlyConfigured(f"{path} has no password in its first line")
    return lines[0].strip()


def read_network(text: str) -> Network:
    """`10.0.0.0/8`, or one address."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ImproperlyConfigured(
            f"{text!r} is no address: give one such as 10.0.0.7 or 10.0.0.0/8"
        ) from None
