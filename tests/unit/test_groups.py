"""Which tests stay together when several processes run them."""

from __future__ import annotations

import pytest

from tests.groups import LONG, group_of, rank


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/unit/a/test_b.py::test_c", "tests/unit/a/test_b.py"),
        ("tests/unit/a/test_b.py::test_c[1-x]", "tests/unit/a/test_b.py"),
        ("tests/integration/test_b.py::test_c[redis]", "tests/integration/test_b.py redis"),
        ("tests/integration/test_b.py::test_c[solo-amqp-1]", "tests/integration/test_b.py amqp"),
        ("tests/interop/test_b.py::t[umbel-to-celery-prefork-on-amqp-rpc]",
         "umbel-to-celery-prefork-on-amqp-rpc"),
        ("tests/interop/test_c.py::t[celery-to-umbel-prefork-on-redis-gzip]",
         "celery-to-umbel-prefork-on-redis"),
    ],
)  # fmt: skip
def test_a_group_is_a_file_and_its_broker_or_a_line_over_all_files(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group


def test_the_longest_go_first() -> None:
    groups = ["tests/unit/test_a.py", f"tests/integration/{LONG[1]} amqp", f"tests/x/{LONG[0]}"]
    assert sorted(groups, key=rank) == [groups[2], groups[1], groups[0]]
