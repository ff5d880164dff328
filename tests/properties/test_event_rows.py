"""Any event becomes a row of the log whose `raw` is the event, and whose columns Arrow holds."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from umbel.cluster.event_rows import COLUMNS, row
from umbel.cluster.task_states import EVENT_STATE, FIELD_KIND
from umbel.recorder.rows import batch
from umbel.wire.content import decode
from umbel.wire.events import EVENT_LIMITS, check

TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=20)
# Words in JSON that stand for other kinds of values (`__type__`) are not themselves any more.
KEYS = TEXT.filter(lambda text: not text.startswith("__"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**300), 10**300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
NAMED = TEXT.filter(bool)
COUNTS = st.integers(0, 2**53 - 1)
EVENTS = st.builds(
    lambda fields, common: {**fields, **common},
    st.dictionaries(st.sampled_from(sorted({*COLUMNS, *FIELD_KIND})) | KEYS, VALUES, max_size=8),
    st.fixed_dictionaries(
        {
            "type": st.sampled_from([*EVENT_STATE, "worker-heartbeat", "worker-elect"]) | NAMED,
            "hostname": NAMED,
            "timestamp": st.floats(-1e15, 1e15) | st.integers(-(2**52), 2**52),
            "uuid": NAMED,
            "utcoffset": st.integers(-12, 12),
        },
        optional={"clock": COUNTS, "pid": COUNTS | st.none(), "seq": COUNTS, "inc": COUNTS},
    ),
)


@given(EVENTS)
def test_any_json_event_becomes_a_row_whose_raw_gives_it_back(sent: dict[str, Any]) -> None:
    body = json.dumps(sent).encode()
    accept = frozenset({"application/json"})
    event = decode(body, "application/json", "utf-8", accept=accept, limits=EVENT_LIMITS)
    for name in ("clock", "pid", "seq", "inc"):  # a name that was drawn with any value
        if type(event.get(name)) is not int or not 0 <= event[name] < 2**53:
            event.pop(name, None)
    assert check(event) == ""
    made = row(event, 1.0, "r")
    assert json.loads(made["raw"]) == event
    assert set(made) <= set(COLUMNS)
    (held,) = batch([made]).to_pylist()
    assert held["raw"] == made["raw"]
    assert held["type"] == event["type"].encode("utf-8", "backslashreplace").decode()
    assert held["clock"] == event.get("clock")
    assert held["timestamp"] == float(event["timestamp"])
