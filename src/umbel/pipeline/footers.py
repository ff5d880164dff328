"""What the footer of a Parquet file says: its rows, its columns, and the bounds of their values.

Reading it takes one look at the file; a job of Spark takes longer.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from umbel.pipeline.errors import HistoryError
from umbel.pipeline.places import Place


def read_footer(place: Place, path: str) -> pq.FileMetaData:
    """The footer of a file; raises `HistoryError` if there is none, or it is damaged."""
    try:
        with place.open(path) as file:
            return pq.read_metadata(file)
    except (pa.ArrowException, OSError) as exc:
        raise HistoryError(f"cannot read {place.shown}/{path}: {exc}") from exc


def bounds_of(footer: pq.FileMetaData, column: str) -> tuple[int, int] | None:
    """The least and the greatest whole number of a column; None where the footer has neither."""
    found: list[int] = []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for one in map(group.column, range(group.num_columns)):
            if one.path_in_schema == column:
                statistics = one.statistics
                if statistics is None or not statistics.has_min_max:
                    return None
                found += [statistics.min, statistics.max]
    return (min(found), max(found)) if found else None
