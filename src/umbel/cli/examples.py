"""Examples at the end of each verb's help; a test reads every one with the parser."""

from __future__ import annotations

import click

# verb -> (what to type, what that does)
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "worker": (
        ("umbel -A shop worker", "as many processes as there are cores"),
        ("umbel -A shop worker -P threads -c 20 -Q mail,default", "20 threads, two queues"),
        ("umbel -A shop worker -n w2@%h --autoscale 8,2 -l warning", "a second one on this host"),
        ("umbel -A shop worker -E --metrics-port 9808", "with task events, and for Prometheus"),
        ("umbel -A shop worker --show-blueprint", "what it is made of; nothing is started"),
    ),
    "call": (
        ("umbel -A shop call shop.charge 7 --wait", "run it, and print what it returns"),
        ('umbel -A shop call shop.mail -k \'{"to": "ann"}\' --countdown 60', "in a minute"),
        ("umbel -A shop call shop.charge 7 --queue money --expires 300", "or not at all"),
    ),
    "result": (
        ("umbel -A shop result 0b5ab6c5-6de4-4b6c-9d7f-6a1f0a3ff6f1", "as it is now"),
        ("umbel -A shop result 0b5ab6c5-6de4-4b6c-9d7f-6a1f0a3ff6f1 --json", "for a program"),
    ),
    "status": (
        ("umbel -A shop status", "one line for each node"),
        ("umbel -A shop status --json", "for a program"),
    ),
    "events": (
        ("umbel -A shop events", "as they come"),
        ("umbel -A shop events --type 'task-failed' --json", "one JSON object a line"),
    ),
    "inspect": (
        ("umbel -A shop inspect active", "what runs, on every node"),
        ("umbel -A shop inspect -d w1@host stats", "of one node"),
        ("umbel -A shop inspect elections", "who won what"),
    ),
    "control": (
        ("umbel -A shop control rate_limit shop.mail 10/m", "from now on"),
        ("umbel -A shop control revoke 0b5ab6c5-6de4-4b6c-9d7f-6a1f0a3ff6f1", "do not run it"),
        ("umbel -A shop control pause mail", "messages stay in the queue"),
        ("umbel -A shop control -d w1@host shutdown", "let tasks end, then stop"),
    ),
    "top": (("umbel -A shop top", "then ? for its keys"),),
    "doctor": (
        ("umbel -A shop doctor", "look at settings, broker, results and nodes"),
        ("umbel -A shop doctor --json", "for a program"),
    ),
    "record": (
        ("umbel -A shop record --log events", "all the time, somewhere"),
        ("umbel record --log events --import old.jsonl", "from elsewhere"),
        ("umbel record --log events --check", "is everything there?"),
    ),
    "purge": (("umbel -A shop purge -Q mail", "it asks first"),),
    "demo": (
        ("umbel demo", "a minute or two"),
        ("umbel demo --keep", "stays, with a dashboard, until Ctrl-C"),
    ),
    "sim": (
        ("umbel sim --seed 7", "one play, line by line"),
        ("umbel sim --seeds 5000 --nodes 9", "many, and what they had in common"),
    ),
    "report": (("umbel -A shop report", "versions and settings; secrets are masked"),),
}


def with_examples(verb: str, command: click.Command) -> click.Command:
    """The command, with its examples before whatever else stands at the end of its help."""
    examples, rest = EXAMPLES.get(verb), command.epilog or ""
    if examples and not rest.startswith("\b\nExamples:"):
        width = max(len(line) for line, _ in examples)
        lines = [f"  {line:{width}}   # {remark}" for line, remark in examples]
        command.epilog = "\n".join(["\b", "Examples:", *lines, "", rest])
    return command
