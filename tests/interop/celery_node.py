"""The application of a Celery worker under test: `celery -A tests.interop.celery_node worker`."""

from __future__ import annotations

import json
import os

from celery import Celery

from tests.interop.tasks import add_tasks

app = Celery("interop")
app.conf.update(json.loads(os.environ["INTEROP_SETTINGS"]))
add_tasks(app)
