"""What can be done to the cluster: each action names its target, previews, and is carried out.

Only `gate` calls these. An action never does more than its preview said: a task, a queue, a node.
What can not be done is an `ActionError` whose text is for the person who asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from umbel.cluster.pauses import is_queue
from umbel.cluster.task_states import READY_STATES
from umbel.dashboard.texts import ago, shown
from umbel.wire.secret_texts import mask_addresses

if TYPE_CHECKING:
    from umbel.app.events.state import Task
    from umbel.dashboard.site import Site

ANSWER_S: Final = 2.0
ID_CHARS_MAX: Final = 200

Target = dict[str, str]


class ActionError(Exception):
    """This can not be done; the text says why."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What an action would touch, before anything is done."""

    action: str
    title: str
    verb: str
    target: Target
    sentences: list[str]
    touched: list[tuple[str, str]] = field(default_factory=list)
    dangerous: bool = False
    back: str = "/"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that can be done."""

    name: str
    target: Callable[[Mapping[str, str]], Target]
    preview: Callable[[Site, Target], Preview]
    run: Callable[[Site, Target], str]


# -- tasks -------------------------------------------------------------------------------------


def _task_target(given: Mapping[str, str]) -> Target:
    uuid = given.get("task", "")
    if not 0 < len(uuid) <= ID_CHARS_MAX or not uuid.isprintable():
        raise ActionError("which task? give its id")
    return {"task": uuid}


def _known(site: Site, uuid: str) -> Task | None:
    return site.live.state.tasks.get(uuid)


def _task_facts(site: Site, uuid: str) -> list[tuple[str, str]]:
    task = _known(site, uuid)
    facts = [("task", uuid)]
    if task is None:
        return [*facts, ("state", "not known here")]
    facts.append(("name", shown(task.name) or "not known"))
    facts.append(("state", task.state))
    if task.worker:
        facts.append(("worker", shown(task.worker)))
    if task.args or task.kwargs:
        facts.append(("arguments", f"{shown(task.args)} {shown(task.kwargs)}".strip()))
    if task.timestamp is not None:
        facts.append(("last heard", ago(task.timestamp)))
    return facts


def _nodes_meant(site: Site) -> int:
    return len(site.live.state.alive_workers())


def _preview_revoke(site: Site, target: Target) -> Preview:
    task = _known(site, target["task"])
    sentences = [f"All {_nodes_meant(site)} nodes are told not to run this task."]
    if task is not None and task.state in READY_STATES:
        sentences.append(f"It has ended already ({task.state}): this will change nothing.")
    elif task is not None and task.running:
        sentences.append("It runs already, and goes on: to end it, terminate it.")
    return Preview(
        "revoke", "Revoke a task", "Revoke", target, sentences,
        _task_facts(site, target["task"]), False, f"/tasks/{target['task']}",
    )  # fmt: skip


def _run_revoke(site: Site, target: Target) -> str:
    return _told(site, "revoke", {"task_id": target["task"], "terminate": False})


def _preview_terminate(site: Site, target: Target) -> Preview:
    task = _known(site, target["task"])
    text = (
        f"All {_nodes_meant(site)} nodes are told not to run this task, and to end it (SIGTERM) "
        "where it runs. What it has done by then stays done."
    )
    sentences = [text]
    if task is not None and task.state in READY_STATES:
        sentences.append(f"It has ended already ({task.state}): this will change nothing.")
    return Preview(
        "terminate", "Terminate a task", "Terminate", target, sentences,
        _task_facts(site, target["task"]), True, f"/tasks/{target['task']}",
    )  # fmt: skip


def _run_terminate(site: Site, target: Target) -> str:
    arguments = {"task_id": target["task"], "terminate": True, "signal": "SIGTERM"}
    return _told(site, "revoke", arguments)


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    queue: str | None


def _stored_call(site: Site, uuid: str) -> _Call:
    """What the result backend has kept of the call; events have only texts of it."""
    task = _known(site, uuid)
    if task is not None and task.state not in READY_STATES:
        raise ActionError(f"this task has not ended ({task.state}): it can not be sent again yet")
    try:
        result = site.app.AsyncResult(uuid)
        name, args, kwargs, queue = result.name, result.args, result.kwargs, result.queue
    except Exception as exc:
        text = mask_addresses(f"{type(exc).__name__}: {exc}")
        raise ActionError(f"the result cannot be read: {text}") from exc
    if not isinstance(name, str) or not isinstance(args, (list, tuple)):
        raise ActionError(
            "its arguments are not kept: set result_extended, and tasks that end from then on "
            "can be sent again"
        )
    if not isinstance(kwargs, dict):
        raise ActionError("its keyword arguments are not kept as values")
    return _Call(name, list(args), kwargs, queue if isinstance(queue, str) else None)


def why_no_retry(site: Site, uuid: str) -> str:
    """Why a task can not be sent again; empty if it can."""
    try:
        _stored_call(site, uuid)
    except ActionError as exc:
        return str(exc)
    return ""


def _preview_retry(site: Site, target: Target) -> Preview:
    call = _stored_call(site, target["task"])
    where = f" to the queue {shown(call.queue)}" if call.queue else ""
    return Preview(
        "retry", "Send a task again", "Send again", target,
        [f"The same call is sent once more{where}, as a new task with an id of its own."],
        _task_facts(site, target["task"]), False, f"/tasks/{target['task']}",
    )  # fmt: skip


def _run_retry(site: Site, target: Target) -> str:
    call = _stored_call(site, target["task"])
    options = {"queue": call.queue} if call.queue else {}
    sent = site.app.send_task(call.name, call.args, call.kwargs, **options)
    return f"sent again as {sent.id}"


# -- queues ------------------------------------------------------------------------------------


def _queue_target(given: Mapping[str, str]) -> Target:
    queue = given.get("queue", "")
    if not is_queue(queue) or not queue.isprintable():
        raise ActionError("which queue? give its name")
    return {"queue": queue}


def _queue_facts(site: Site, name: str) -> list[tuple[str, str]]:
    facts = site.polling.queues().get(name)
    consumers = [node for node, one in site.polling.nodes().items() if name in one.queues]
    length = None if facts is None else facts.length
    return [
        ("queue", name),
        ("waiting", "not known" if length is None else f"{length:,} messages"),
        ("consumed by", ", ".join(map(shown, sorted(consumers)[:10])) or "nobody that answered"),
    ]


def _preview_pause(site: Site, target: Target) -> Preview:
    text = (
        "No node takes messages from this queue until it is resumed, those that join later "
        "included. What was taken goes on; what waits stays."
    )
    return Preview(
        "pause", "Pause a queue", "Pause", target, [text],
        _queue_facts(site, target["queue"]), False, "/queues",
    )  # fmt: skip


def _preview_resume(site: Site, target: Target) -> Preview:
    return Preview(
        "resume", "Resume a queue", "Resume", target,
        ["Nodes take messages from this queue again, those that wait first."],
        _queue_facts(site, target["queue"]), False, "/queues",
    )  # fmt: skip


def _run_pause(site: Site, target: Target) -> str:
    replies = site.app.control.pause(target["queue"], **_options(site))
    return _summed_up(replies)


def _run_resume(site: Site, target: Target) -> str:
    replies = site.app.control.resume(target["queue"], **_options(site))
    return _summed_up(replies)


# -- nodes -------------------------------------------------------------------------------------


def _node_target(given: Mapping[str, str]) -> Target:
    node = given.get("node", "")
    if not 0 < len(node) <= ID_CHARS_MAX or not node.isprintable():
        raise ActionError("which node? give its name")
    return {"node": node}


def _everybody(given: Mapping[str, str]) -> Target:
    return {}


def _preview_events(site: Site, target: Target) -> Preview:
    text = (
        f"All {_nodes_meant(site)} nodes are asked to tell what becomes of their tasks, "
        "until they end."
    )
    return Preview(
        "enable-events", "Switch task events on", "Switch on", target, [text], [], False, "/",
    )  # fmt: skip


def _run_events(site: Site, target: Target) -> str:
    return _told(site, "enable_events", {})


def _preview_shutdown(site: Site, target: Target) -> Preview:
    worker = site.live.state.workers.get(target["node"])
    active = "not known" if worker is None or worker.active is None else str(worker.active)
    text = (
        "This node finishes what it runs, takes nothing new, and ends. "
        "Only its supervisor can start it again."
    )
    return Preview(
        "shutdown", "Shut a node down", "Shut down", target, [text],
        [("node", target["node"]), ("running", active)], True, "/",
    )  # fmt: skip


def _run_shutdown(site: Site, target: Target) -> str:
    site.app.control.shutdown(destination=[target["node"]])
    return f"{target['node']} was told to end"


# -- telling nodes -----------------------------------------------------------------------------


def _options(site: Site) -> dict[str, Any]:
    return {"reply": True, "timeout": ANSWER_S, "limit": _nodes_meant(site) or None}


def _told(site: Site, command: str, arguments: dict[str, Any]) -> str:
    return _summed_up(site.app.control.broadcast(command, arguments, **_options(site)))


def _summed_up(replies: list[dict[str, Any]] | None) -> str:
    """`3 nodes: ok`, or what was wrong."""
    answers = [(node, answer) for reply in replies or () for node, answer in reply.items()]
    if not answers:
        raise ActionError("told to all nodes; none has answered in time")
    wrong = [
        f"{shown(node)}: {shown(answer.get('error'))}"
        for node, answer in answers
        if isinstance(answer, Mapping) and "error" in answer
    ]
    fine = len(answers) - len(wrong)
    if wrong and not fine:
        raise ActionError("; ".join(wrong[:3]))
    said = f"{fine} node{'s' if fine != 1 else ''} did so"
    return said if not wrong else f"{said}; {'; '.join(wrong[:3])}"


ACTIONS: Final = {
    action.name: action
    for action in (
        Action("revoke", _task_target, _preview_revoke, _run_revoke),
        Action("terminate", _task_target, _preview_terminate, _run_terminate),
        Action("retry", _task_target, _preview_retry, _run_retry),
        Action("pause", _queue_target, _preview_pause, _run_pause),
        Action("resume", _queue_target, _preview_resume, _run_resume),
        Action("enable-events", _everybody, _preview_events, _run_events),
        Action("shutdown", _node_target, _preview_shutdown, _run_shutdown),
    )
}
