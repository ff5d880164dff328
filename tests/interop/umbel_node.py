"""The application of an Umbel worker under test: `umbel -A tests.interop.umbel_node worker`."""

from __future__ import annotations

import json
import os

from tests.interop.tasks import add_tasks
from umbel import Umbel

app = Umbel("interop", **json.loads(os.environ["INTEROP_SETTINGS"]))
add_tasks(app)
