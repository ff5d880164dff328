"""Reading the tables without Spark: duckdb over the Parquet files that a build has published.

`TABLES/_tables.json` names the directory of every table; it is replaced as the last step of a
build, so whoever resolves it once sees the tables of one build. Every table becomes a view in a
database in memory. After that the door is shut: no file but those of the views can be opened, none
written, no extension loaded, no setting changed.

A filter of the user is an expression over the columns of one table, and nothing else. It is parsed
before it runs: the statement with the filter must be the statement without it, but for the filter.
Whatever a user can get wrong is a `HistoryError` with one line that says what to do.
"""

# ruff: noqa: S608 - what is put into SQL: names are quoted, filters are checked
from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self

import duckdb

from umbel.pipeline.errors import HistoryError

INDEX: Final = "_tables.json"
FORMAT: Final = 1
FETCHED_ROWS: Final = 1_000
ALL: Final = 0
FILTER_CHARS_MAX: Final = 10_000
FILTER_PARENTHESES_MAX: Final = 400  # the parser takes the square of those that are not closed
_COLUMNS_SHOWN_MAX: Final = 80
_REASON_CHARS_MAX: Final = 300

_ORDER: Final = re.compile(
    r'\s*(?P<quote>"?)(?P<column>[^"]+?)(?P=quote)(?:\s+(?P<way>asc|desc))?\s*', re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Table:
    """A published table: its files, its columns with duckdb's types, or why it can not be read."""

    name: str
    rows: int | None
    files: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows as they come, and what their columns are called."""

    columns: dict[str, str]
    rows: Iterator[tuple[Any, ...]]


class Tables:
    """The tables of one build; closes with `with`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)
        self._store = _Store(self.directory)
        index = _read_index(self._store)
        self.run: str = str(index.get("run", ""))
        self._database = duckdb.connect(
            ":memory:",
            config={
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "temp_directory": str(Path(tempfile.gettempdir(), f"umbel-history-{os.getpid()}")),
            },
        )
        try:
            self.tables = self._open_all(index["tables"])
            self._shut()
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._database.close()

    def table(self, name: str) -> Table:
        """A table by its name; refused when there is none, or it can not be read."""
        found = self.tables.get(name)
        if found is None:
            known = ", ".join(sorted(self.tables)) or "none"
            raise HistoryError(f"unknown table {name!r}: {self.directory} has {known}")
        if found.broken:
            raise HistoryError(found.broken)
        return found

    def has(self, name: str, *columns: str) -> bool:
        """Whether there is such a table with such columns."""
        found = self.tables.get(name)
        return found is not None and not found.broken and found.columns.keys() >= set(columns)

    def query(
        self,
        name: str,
        where: str | None = None,
        order: Sequence[str] = (),
        limit: int = ALL,
        columns: Sequence[str] = (),
    ) -> Answer:
        """Rows of a table; `order` has texts such as `started desc`, `limit` 0 gives all."""
        table = self.table(name)
        for column in columns:
            _check_column(table, column)
        chosen = {column: table.columns[column] for column in columns or table.columns}
        head = f"SELECT {', '.join(map(_quoted, chosen))} FROM {_quoted(name)} WHERE\n"
        tail = _ordering(table, order) + (f"\nLIMIT {limit:d}" if limit else "")
        if where is None or not where.strip():
            where = "true"
        else:
            self._check_filter(table, head, where, tail)
        return Answer(chosen, self._rows(table, f"{head}{where}\n{tail}", where))

    def ask(self, sql: str, *parameters: Any) -> list[dict[str, Any]]:
        """A query of our own over several tables: one dictionary per row."""
        try:
            found = self._database.execute(sql, parameters)
            names = [column[0] for column in found.description or ()]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
        except duckdb.Error as exc:
            raise HistoryError(f"cannot read {self.directory}: {_reason(exc)}") from exc

    # -- opening -------------------------------------------------------------------------------

    def _open_all(self, index: dict[str, Any]) -> dict[str, Table]:
        if self._store.filesystem is not None:
            self._database.register_filesystem(self._store.filesystem)
        return {name: self._open(name, entry) for name, entry in sorted(index.items())}

    def _open(self, name: str, entry: dict[str, Any]) -> Table:
        files = self._store.parquet_files(entry["path"])
        rows = entry.get("rows")
        if not files:
            place = self._store.place(entry["path"])
            broken = f"table {name} has no files in {place}: build it anew"
            return Table(name, rows, broken=broken)
        listed = ", ".join(map(_literal, files))
        view = (
            f"CREATE VIEW {_quoted(name)} AS "
            f"SELECT * FROM read_parquet([{listed}], hive_partitioning = false)"
        )
        try:
            self._database.execute(view)
            described = self._database.execute(f"DESCRIBE {_quoted(name)}").fetchall()
        except duckdb.Error as exc:
            return Table(name, rows, broken=f"table {name} can not be read: {_reason(exc)}")
        return Table(name, rows, files, {column: kind for column, kind, *_ in described})

    def _shut(self) -> None:
        files = (path for table in self.tables.values() for path in table.files)
        allowed = ", ".join(map(_literal, files))
        for statement in (
            f"SET allowed_paths = [{allowed}]",
            "SET enable_external_access = false",
            "SET lock_configuration = true",
        ):
            self._database.execute(statement)

    # -- asking --------------------------------------------------------------------------------

    def _check_filter(self, table: Table, head: str, where: str, tail: str) -> None:
        """Refuse what is no expression, before anything of it runs."""
        if len(where) > FILTER_CHARS_MAX:
            raise HistoryError(f"--where is longer than {FILTER_CHARS_MAX} characters")
        if where.count("(") > FILTER_PARENTHESES_MAX:
            raise HistoryError(f"--where has more than {FILTER_PARENTHESES_MAX} parentheses")
        alone = self._parsed(f"{head}{where}\n")  # so that the user sees his own words
        meant = self._parsed(f"{head}true\n{tail}")
        given = self._parsed(f"{head}{where}\n{tail}") if isinstance(alone, list) else alone
        if isinstance(given, str):
            raise HistoryError(f"--where {_shown(where)}: {given}; {_columns_of(table)}")
        assert isinstance(meant, list)
        try:
            is_filter = len(given) == 1 and _without_filter(given[0]) == _without_filter(meant[0])
            classes = set(_classes(given[0]["node"].get("where_clause"))) if is_filter else set()
        except RecursionError:
            raise HistoryError(f"--where {_shown(where)}: too deep") from None
        if not is_filter:
            raise HistoryError(f"--where {_shown(where)}: give one expression over the columns")
        if "SUBQUERY" in classes:
            raise HistoryError(f"--where {_shown(where)}: there can be no query in it")

    def _parsed(self, sql: str) -> list[dict[str, Any]] | str:
        """The syntax trees of the statements in `sql`; why there are none as a text."""
        try:
            row = self._database.execute("SELECT json_serialize_sql(?)", [sql]).fetchone()
            parsed = json.loads(row[0]) if row else {}
        except RecursionError:
            return "too deep"
        except (duckdb.Error, ValueError) as exc:
            return _reason(exc)
        if parsed.get("error", True):
            if "Only SELECT" in parsed.get("error_message", ""):
                return "give one expression"
            return _one_line(parsed.get("error_message", "can not be understood"))
        return list(parsed["statements"])

    def _rows(self, table: Table, sql: str, where: str) -> Iterator[tuple[Any, ...]]:
        try:
            found = self._database.execute(sql)
            while rows := found.fetchmany(FETCHED_ROWS):
                yield from rows
        except duckdb.Error as exc:
            if isinstance(exc, (duckdb.BinderException, duckdb.CatalogException)):
                hint = f"; {_columns_of(table)}"
            elif where == "true" or isinstance(exc, duckdb.IOException):
                raise HistoryError(f"table {table.name} can not be read: {_reason(exc)}") from exc
            else:
                hint = ""
            raise HistoryError(f"--where {_shown(where)}: {_reason(exc)}{hint}") from exc


class _Store:
    """Where the tables are: a local directory, or an address for fsspec."""

    def __init__(self, directory: str) -> None:
        self._directory = directory.rstrip("/") or "/"
        self.filesystem: Any = None
        if "://" in directory:
            self.filesystem, self._root = _remote(directory)

    def place(self, path: str) -> str:
        return f"{self._directory}/{path}"

    def read_index(self) -> bytes:
        if self.filesystem is not None:
            found: bytes = self.filesystem.cat_file(f"{self._root}/{INDEX}")
            return found
        return Path(self._directory, INDEX).read_bytes()

    def parquet_files(self, path: str) -> tuple[str, ...]:
        """The files of a table, hidden ones left out, sorted."""
        if self.filesystem is None:
            root = Path(self._directory, path).absolute()
            return tuple(
                sorted(
                    str(name)
                    for name in root.rglob("*.parquet")
                    if _is_data(name.relative_to(root).parts)
                )
            )
        top = f"{self._root}/{path}"
        scheme = self._directory.partition("://")[0]
        return tuple(
            f"{scheme}://{name}"
            for name in sorted(self.filesystem.find(top))
            if name.endswith(".parquet") and _is_data(PurePosixPath(name[len(top) :]).parts)
        )


def _is_data(parts: tuple[str, ...]) -> bool:
    return not any(part.startswith((".", "_")) for part in parts)


def _remote(directory: str) -> tuple[Any, str]:
    try:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(directory)
    except (ImportError, ValueError) as exc:
        raise HistoryError(f"cannot open {directory}: {_one_line(str(exc))}") from exc
    return filesystem, root.rstrip("/")


def _read_index(store: _Store) -> dict[str, Any]:
    try:
        index = json.loads(store.read_index())
    except FileNotFoundError:
        raise HistoryError(
            f"there are no tables in {store.place('')}: "
            "make them with 'umbel history build --log DIR --tables DIR'"
        ) from None
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else _one_line(str(exc))
        raise HistoryError(f"cannot read {store.place(INDEX)}: {reason}") from exc
    if not isinstance(index, dict) or not isinstance(index.get("tables"), dict):
        raise HistoryError(f"{store.place(INDEX)} names no tables: build them anew")
    if index.get("format") != FORMAT:
        raise HistoryError(
            f"{store.place(INDEX)} has format {index.get('format')!r}, "
            f"this version of Umbel reads {FORMAT}"
        )
    for name, entry in index["tables"].items():
        path = entry.get("path") if isinstance(entry, dict) else None
        if not isinstance(path, str) or path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise HistoryError(f"{store.place(INDEX)}: table {name!r} has no path: build it anew")
    return index


# -- texts of SQL ------------------------------------------------------------------------------


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _check_column(table: Table, column: str) -> None:
    if column not in table.columns:
        raise HistoryError(f"table {table.name} has no column {column!r}; {_columns_of(table)}")


def _columns_of(table: Table) -> str:
    names = list(table.columns)
    more = " ..." if len(names) > _COLUMNS_SHOWN_MAX else ""
    return f"the columns of {table.name} are {', '.join(names[:_COLUMNS_SHOWN_MAX])}{more}"


def _ordering(table: Table, order: Sequence[str]) -> str:
    terms = []
    for text in order:
        found = _ORDER.fullmatch(text)
        if found is None:
            raise HistoryError(f"--order {_shown(text)}: give columns, each with asc or desc")
        _check_column(table, found["column"])
        terms.append(f"{_quoted(found['column'])} {found['way'] or 'asc'} NULLS LAST")
    return f"ORDER BY {', '.join(terms)}" if terms else ""


def _without_filter(statement: dict[str, Any]) -> Any:
    node = {key: part for key, part in statement["node"].items() if key != "where_clause"}
    return _without_places({**statement, "node": node})


def _without_places(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {
            key: _without_places(part)
            for key, part in tree.items()
            if not key.startswith("query_location")
        }
    return [_without_places(part) for part in tree] if isinstance(tree, list) else tree


def _classes(tree: Any) -> Iterator[str]:
    """The kinds of expression in a syntax tree."""
    if isinstance(tree, dict):
        if isinstance(tree.get("class"), str):
            yield tree["class"]
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _classes(part)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}...")


def _reason(exc: BaseException) -> str:
    """What duckdb says, without the kind of error, the drawing and the candidates."""
    text = re.split(r"\n\s*(?:LINE \d|Candidate|Did you mean)", str(exc))[0]
    return _one_line(re.sub(r"^[A-Z][A-Za-z -]* Error: ", "", text))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_REASON_CHARS_MAX].rstrip(".!")
