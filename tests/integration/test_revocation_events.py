"""Workers tell that they know of a revocation, all with the time at which it was made."""

from __future__ import annotations

import time

from tests.ears import Ears
from tests.servers import wait_until
from tests.sites import Site


def test_all_workers_tell_of_a_revoke_with_one_stamp_and_who_joins_tells_too(site: Site) -> None:
    with Ears(site.broker_url) as ears:
        for name in ("one@test", "two@test"):
            site.worker("solo", "-n", name, "--heartbeat-interval", "0.2")
        before = time.time()
        site.app.control.revoke(["b", "a"])
        told = ears.wait_for("worker-revocation", 2)
        assert {event["hostname"] for event in told} == {"one@test", "two@test"}
        stamps = {event["stamp"] for event in told}
        assert len(stamps) == 1
        assert before <= stamps.pop() <= time.time()
        assert [(event["ids"], event["method"]) for event in told] == [(["a", "b"], "revoke")] * 2

        def agree() -> bool:
            heard = ears.of("worker-heartbeat")
            last = {event["hostname"]: event["revoked"] for event in heard if "revoked" in event}
            return len(last) == 2 and len(set(last.values())) == 1

        wait_until(agree, 10, "both to know the same")
        assert len(ears.of("worker-revocation")) == 2, "there was nothing to exchange"

        site.worker("solo", "-n", "three@test")
        (joined,) = ears.wait_for("worker-revocation", hostname="three@test")
        assert (sorted(joined["ids"]), joined["method"]) == (["a", "b"], "mingle")
        assert joined["stamp"] == told[0]["stamp"]
        assert ears.receiver.gaps == {}, "the numbers of such events are not missing elsewhere"
