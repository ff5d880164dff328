"""Blueprints as text, DOT and SVG, from classes alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from umbel import Umbel
from umbel.app.umbel import Umbel as App
from umbel.exceptions import ImproperlyConfigured
from umbel.worker.blueprint import Step
from umbel.worker.runtime.drawing import Drawing, Node, as_dot, as_svg, as_text, drawings_of
from umbel.worker.runtime.options import WorkerOptions

CONSUMER = [
    "Connection", "Events", "Mingle", "Gossip", "Heart", "Control", "Tasks", "DelayedDelivery",
    "Agent", "Evloop",
]  # fmt: skip


@pytest.fixture
def app() -> Iterator[App]:
    made = Umbel("a", broker="redis://127.0.0.1:1/0", set_as_current=False)
    yield made
    made.close()


def drawn(app: App, **options: Any) -> list[Drawing]:
    return drawings_of(app, WorkerOptions(**options))


def test_the_drawing_has_every_step_in_starting_order(app: App) -> None:
    worker, consumer = drawn(app)
    assert [node.label for node in worker.nodes] == [
        "Timer", "Hub", "Pool", "Autoscaler", "StateDB", "Consumer",
    ]  # fmt: skip
    assert [node.label for node in consumer.nodes] == CONSUMER


def test_the_text_says_what_is_required_and_what_is_off_and_why(app: App) -> None:
    text = as_text(drawn(app, without_gossip=True))
    assert re.search(r"Gossip +requires Mingle; off: --without-gossip$", text, re.MULTILINE)
    assert re.search(
        r"Agent +requires Connection; off: worker_agent is not set$", text, re.MULTILINE
    )
    assert re.search(r"DelayedDelivery +requires Tasks; off: no quorum queue$", text, re.MULTILINE)
    assert re.search(r"^ +1\. Connection$", text, re.MULTILINE)
    assert re.search(r"Evloop +requires Connection, Tasks$", text, re.MULTILINE)


def test_steps_of_users_are_drawn_where_their_requirements_put_them(app: App) -> None:
    class Mine(Step):
        requires = ("Tasks",)

    class Before(Step):
        requires = ("Connection",)

    class Around(Step):
        requires = (Before, "Mine")

    app.steps["consumer"].update({Mine, Around, Before})
    _, consumer = drawn(app)
    labels = [node.label for node in consumer.nodes]
    assert labels[-1] == "Evloop"
    wanted = ["Connection", "Before", "Around"], ["Tasks", "Mine", "Around"]
    for chain in wanted:
        assert all(labels.index(a) < labels.index(b) for a, b in pairwise(chain)), labels
    around = next(node for node in consumer.nodes if node.label == "Around")
    assert around.requires == ("Before", "Mine")


def test_dot_has_every_step_and_every_edge(app: App) -> None:
    drawings = drawn(app)
    dot = as_dot(drawings)
    assert dot.startswith("digraph")
    assert dot.count("{") == dot.count("}")
    for drawing in drawings:
        for node in drawing.nodes:
            own = f'"{drawing.title}.{node.label}"'
            assert f'{own} [label="{node.label}"];' in dot
            for needed in node.requires:
                assert f'{own} -> "{drawing.title}.{needed}";' in dot
    assert dot.count("->") == sum(len(n.requires) for d in drawings for n in d.nodes)


def test_svg_is_xml_with_a_box_for_every_step_and_an_arc_for_every_requirement(app: App) -> None:
    drawings = drawn(app)
    root = ET.fromstring(as_svg(drawings))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    texts = {text.text for text in root.iter(f"{space}text")}
    nodes = [node for drawing in drawings for node in drawing.nodes]
    assert {node.label for node in nodes} <= texts
    assert len(list(root.iter(f"{space}rect"))) == len(nodes)
    assert {title.text for title in root.iter(f"{space}title")} >= {"off: no quorum queue"}
    arcs = [path for path in root.iter(f"{space}path") if path.get("marker-end")]
    assert len(arcs) == sum(len(node.requires) for node in nodes)


def test_names_can_not_break_a_drawing() -> None:
    wild = 'a"b\\ <c> & --> ]]>'
    drawing = Drawing("t", (Node(wild, (), False, wild), Node("next", (wild,), True)))
    root = ET.fromstring(as_svg([drawing]))
    assert wild in {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert '"t.a\\"b\\\\ <c> & --> ]]>"' in as_dot([drawing])
    assert wild in as_text([drawing])


def test_a_drawing_of_what_can_not_be_sorted_is_refused_by_name(app: App) -> None:
    class Lost(Step):
        requires = ("Nowhere",)

    app.steps["worker"].add(Lost)
    with pytest.raises(ImproperlyConfigured, match="'Lost' requires 'Nowhere'"):
        drawn(app)
