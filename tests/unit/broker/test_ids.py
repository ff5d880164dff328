"""New names: well formed, and never the same twice."""

from __future__ import annotations

import os
import threading
import uuid

from umbel.broker.ids import fresh_id, fresh_tag


def test_an_id_is_a_random_uuid() -> None:
    made = [fresh_id() for _ in range(2000)]
    assert len(set(made)) == len(made)
    for text in made:
        parsed = uuid.UUID(text)
        assert (str(parsed), parsed.version, parsed.variant) == (text, 4, uuid.RFC_4122)
    # Every digit that may vary does.
    varying = [place for place in range(36) if len({text[place] for text in made}) > 1]
    assert varying == [place for place in range(36) if place not in (8, 13, 14, 18, 23)]


def test_tags_differ_and_look_like_ids() -> None:
    made = [fresh_tag() for _ in range(2000)]
    assert len(set(made)) == len(made)
    assert {len(tag) for tag in made} == {36}


def test_a_forked_child_gives_no_name_of_its_parent() -> None:
    read, write = os.pipe()
    before = fresh_tag()
    fresh_id()  # there are more of them in store now
    pid = os.fork()
    if pid == 0:
        os.write(write, " ".join([fresh_tag(), *(fresh_id() for _ in range(200))]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        childs, *childs_ids = pipe.read().split()
    assert len(childs) == 36
    assert childs[:24] != before[:24] == fresh_tag()[:24]
    assert len(childs_ids) == 200
    assert not {fresh_id() for _ in range(200)} & set(childs_ids)


def test_threads_share_the_store() -> None:
    made: list[list[str]] = [[] for _ in range(8)]
    threads = [
        threading.Thread(target=lambda own=own: own.extend(fresh_id() for _ in range(2000)))
        for own in made
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one for own in made for one in own}) == 16_000
