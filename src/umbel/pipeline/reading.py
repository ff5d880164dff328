"""Reading the tables without Spark: duckdb over the Parquet files that a build has published.

`TABLES/_tables.json` names the files of every table; it is replaced as the last step of a build, so
whoever reads it once sees the tables of one build. A table becomes a view in a database in memory
when it is first asked for. Tables and columns whose names begin with `_` serve builds and are not
shown. The positions of `timeline` are worked out by its view (`umbel.pipeline.tables.timeline`).

Before a filter or query of a user runs, the database is locked: no file but those of the views can
be opened, none written, no extension loaded, no setting changed. If another table is asked for
afterwards, a new database takes the place of the locked one.

A filter of the user is an expression over the columns of one table, and nothing else. It is parsed
before it runs: the statement with the filter must be the statement without it, but for the filter.
A query of the user is one SELECT over the tables (`select_of`), refused by its syntax tree before
it runs if it is anything else; that the door is shut stands behind it.
Whatever a user can get wrong is a `HistoryError` with one line that says what to do.

duckdb does not look for signals: what the main thread asks runs in a thread of its own, so that
Ctrl-C ends it at once.
"""

# ruff: noqa: S608 - what is put into SQL: names are quoted, filters are checked
from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self, TypeVar

import duckdb

from umbel.pipeline.errors import HistoryError, TooLong
from umbel.stores import fsspec_url, open_store

INDEX: Final = "_tables.json"
FORMAT: Final = 2
FETCHED_ROWS: Final = 1_000
ALL: Final = 0
FILTER_CHARS_MAX: Final = 10_000
FILTER_PARENTHESES_MAX: Final = 400  # the parser takes the square of those that are not closed
QUERY_CHARS_MAX: Final = 100_000
_COLUMNS_SHOWN_MAX: Final = 80
_REASON_CHARS_MAX: Final = 300
_INTERRUPT_S: Final = 5.0  # that long is waited for a query that was told to end

_ORDER: Final = re.compile(
    r'\s*(?P<quote>"?)(?P<column>[^"]+?)(?P=quote)(?:\s+(?P<way>asc|desc))?\s*', re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Table:
    """A published table: its files, its columns with duckdb's types, or why it cannot be read."""

    name: str
    rows: int | None
    files: tuple[str, ...] = ()
    view: str = ""  # the statement that makes it
    columns: dict[str, str] = field(default_factory=dict)
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows as they come, and what their columns are called."""

    columns: dict[str, str]
    rows: Iterator[tuple[Any, ...]]


class Tables:
    """The tables of one build, each opened when it is needed; closes with `with`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)
        self._store = _Store(self.directory)
        index = _read_index(self._store)
        self.run: str = str(index.get("run", ""))
        self._entries: dict[str, Any] = {
            name: entry for name, entry in sorted(index["tables"].items()) if name[:1] != "_"
        }
        self._opened: dict[str, Table] = {}
        # Made here, for its owner alone: what does not fit into memory is written there.
        self._scratch = tempfile.mkdtemp(prefix="umbel-history-")
        self._database = self._connect()
        self._is_shut = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._database.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def names(self) -> list[str]:
        """Which tables there are."""
        return list(self._entries)

    @property
    def tables(self) -> dict[str, Table]:
        """All tables, by name; opens those that are not open yet."""
        self._need(self._entries)
        return {name: self._opened[name] for name in self._entries}

    def table(self, name: str) -> Table:
        """A table by its name; refused when there is none, or it cannot be read."""
        if name not in self._entries:
            known = ", ".join(self._entries) or "none"
            raise HistoryError(f"unknown table {name!r}: {self.directory} has {known}")
        self._need([name])
        found = self._opened[name]
        if found.broken:
            raise HistoryError(found.broken)
        return found

    def has(self, name: str, *columns: str) -> bool:
        """Whether there is such a table with such columns."""
        if name not in self._entries:
            return False
        self._need([name])
        found = self._opened[name]
        return not found.broken and found.columns.keys() >= set(columns)

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

    def sql(self, text: str, timeout_s: float | None = None) -> Answer:
        """The rows of one SELECT of the user over any of the tables.

        Raises `TooLong`, here or from the rows, when all of it takes longer than `timeout_s`.
        """
        ends = None if not timeout_s else time.monotonic() + timeout_s
        parsed = self._parsed(_checked_query(text))
        if isinstance(parsed, str):
            only_select = "Only SELECT" in parsed
            raise HistoryError(ONLY_SELECT if only_select else f"{_shown(text)}: {parsed}")
        try:
            named = select_of(parsed, self._entries)
        except RecursionError:
            raise HistoryError(f"{_shown(text)}: too deep") from None
        tables = [self.table(name) for name in named]
        self._shut()
        try:
            described = _waited(lambda: self._executed(f"DESCRIBE {text}"), self._database, ends)
        except duckdb.Error as exc:
            raise _refused(text, tables, exc) from exc
        columns = dict(_named_apart((name, kind) for name, kind, *_ in described))
        return Answer(columns, self._answers(text, tables, ends))

    def ask(self, sql: str, *parameters: Any) -> list[dict[str, Any]]:
        """A query of our own over several tables: one dictionary per row."""
        words = set(re.findall(r"\w+", sql))
        self._need(name for name in self._entries if name in words)
        try:
            found = self._database.execute(sql, parameters)
            names = [column[0] for column in found.description or ()]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
        except duckdb.Error as exc:
            raise HistoryError(f"cannot read {self.directory}: {_reason(exc)}") from exc

    # -- opening -------------------------------------------------------------------------------

    def _connect(self) -> duckdb.DuckDBPyConnection:
        database = duckdb.connect(
            ":memory:",
            config={
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "python_enable_replacements": "false",  # a variable of ours is no table
                "temp_directory": self._scratch,
            },
        )
        if self._store.filesystem is not None:
            database.register_filesystem(self._store.filesystem)
        return database

    def _need(self, names: Iterable[str]) -> None:
        """Open the tables that are not open yet."""
        new = [name for name in names if name not in self._opened]
        if not new:
            return
        if self._is_shut:
            # Rows that are still being read keep the old one alive.
            self._database, self._is_shut = self._connect(), False
            for table in self._opened.values():
                if not table.broken:
                    self._database.execute(table.view)
        for name in new:
            self._opened[name] = self._open(name, self._entries[name])

    def _open(self, name: str, entry: dict[str, Any]) -> Table:
        files = tuple(self._store.source(one["path"]) for one in entry["files"])
        rows = entry.get("rows")
        if not files:
            return Table(name, rows, broken=f"table {name} has no files: build it anew")
        source = f"read_parquet([{', '.join(map(_literal, files))}], hive_partitioning = false)"
        try:
            stored = self._database.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
            view = _view(name, source, [column for column, *_ in stored], entry.get("bases"))
            self._database.execute(view)
            described = self._database.execute(f"DESCRIBE {_quoted(name)}").fetchall()
        except duckdb.Error as exc:
            return Table(name, rows, broken=f"table {name} cannot be read: {_reason(exc)}")
        return Table(name, rows, files, view, {column: kind for column, kind, *_ in described})

    def _shut(self) -> None:
        """Before words of a user run: nothing but the tables that are open can be reached."""
        if self._is_shut:
            return
        files = (path for table in self._opened.values() for path in table.files)
        allowed = ", ".join(map(_literal, files))
        for statement in (
            f"SET allowed_paths = [{allowed}]",
            "SET enable_external_access = false",
            "SET lock_configuration = true",
        ):
            self._database.execute(statement)
        self._is_shut = True

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
            given = "give one expression" if "Only SELECT" in given else given
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
            return _one_line(parsed.get("error_message", "cannot be understood"))
        return list(parsed["statements"])

    def _rows(self, table: Table, sql: str, where: str) -> Iterator[tuple[Any, ...]]:
        self._shut()
        try:
            yield from _fetched(self._database, sql)
        except duckdb.Error as exc:
            if isinstance(exc, (duckdb.BinderException, duckdb.CatalogException)):
                hint = f"; {_columns_of(table)}"
            elif where == "true" or isinstance(exc, duckdb.IOException):
                raise HistoryError(f"table {table.name} cannot be read: {_reason(exc)}") from exc
            else:
                hint = ""
            raise HistoryError(f"--where {_shown(where)}: {_reason(exc)}{hint}") from exc

    def _answers(
        self, text: str, tables: Sequence[Table], ends: float | None
    ) -> Iterator[tuple[Any, ...]]:
        try:
            yield from _fetched(self._database, text, ends)
        except duckdb.Error as exc:
            raise _refused(text, tables, exc) from exc

    def _executed(self, sql: str) -> list[Any]:
        return self._database.execute(sql).fetchall()


class _Store:
    """Where the tables are: a local directory, or an address for fsspec."""

    def __init__(self, directory: str) -> None:
        self._directory = directory.rstrip("/") or "/"
        self.filesystem: Any = None
        if "://" in directory:
            self.filesystem, self._root = _remote(directory)
            self._top = f"{fsspec_url(self._directory).partition('://')[0]}://{self._root}"
        else:
            self._top = str(Path(self._directory).absolute())

    def place(self, path: str) -> str:
        """A path of the tables as the user has named them."""
        return f"{self._directory}/{path}"

    def source(self, path: str) -> str:
        """A path of the tables as duckdb takes it."""
        return f"{self._top}/{path}"

    def read_index(self) -> bytes:
        if self.filesystem is not None:
            found: bytes = self.filesystem.cat_file(f"{self._root}/{INDEX}")
            return found
        return Path(self._directory, INDEX).read_bytes()


def _remote(directory: str) -> tuple[Any, str]:
    try:
        return open_store(directory)
    except ValueError as exc:
        raise HistoryError(f"cannot open {directory}: {_one_line(str(exc))}") from exc


def _read_index(store: _Store) -> dict[str, Any]:
    try:
        index = json.loads(store.read_index())
    except FileNotFoundError:
        raise HistoryError(
            f"there are no tables in {store.place('')}: "
            "make them with 'umbel history build --log DIR --tables DIR'"
        ) from None
    except Exception as exc:
        if store.filesystem is None and not isinstance(exc, (OSError, ValueError)):
            raise  # each object store has exceptions of its own
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else _one_line(str(exc))
        raise HistoryError(f"cannot read {store.place(INDEX)}: {reason}") from exc
    if not isinstance(index, dict) or not isinstance(index.get("tables"), dict):
        raise HistoryError(f"{store.place(INDEX)} names no tables: build them anew")
    if index.get("format") != FORMAT:
        raise HistoryError(
            f"{store.place(INDEX)} has format {index.get('format')!r}, this version of Umbel reads "
            f"{FORMAT}: bring the tables up to date with 'umbel history build'"
        )
    for name, entry in index["tables"].items():
        files = entry.get("files") if isinstance(entry, dict) else None
        if not isinstance(files, list) or not all(map(_is_file, files)):
            raise HistoryError(f"{store.place(INDEX)}: table {name!r} has no files: build it anew")
    return index


def _is_file(entry: Any) -> bool:
    """Whether it names a file below the tables."""
    path = entry.get("path") if isinstance(entry, dict) else None
    return (
        isinstance(path, str) and not path.startswith("/") and ".." not in PurePosixPath(path).parts
    )


# -- waiting -----------------------------------------------------------------------------------

_Result = TypeVar("_Result")


def _fetched(
    database: duckdb.DuckDBPyConnection, sql: str, ends: float | None = None
) -> Iterator[tuple[Any, ...]]:
    """The rows of a statement, some at a time; others may ask meanwhile."""
    found = database.cursor()  # a connection has one result, and the next one ends it
    _waited(lambda: found.execute(sql), found, ends)
    while rows := _waited(lambda: found.fetchmany(FETCHED_ROWS), found, ends):
        yield from rows


def _waited(
    call: Callable[[], _Result], database: duckdb.DuckDBPyConnection, ends: float | None
) -> _Result:
    """Call duckdb, at most until `ends`; an interrupt from the keyboard ends it at once."""
    if ends is None and threading.current_thread() is not threading.main_thread():
        return call()
    result: list[_Result] = []
    failed: list[BaseException] = []
    ended = threading.Event()  # a join that is interrupted takes the thread for ended

    def work() -> None:
        try:
            result.append(call())
        except BaseException as exc:  # noqa: BLE001 - raised by whoever waits
            failed.append(exc)
        finally:
            ended.set()

    threading.Thread(target=work, name="history-query", daemon=True).start()
    try:
        in_time = ended.wait(None if ends is None else max(0.0, ends - time.monotonic()))
    finally:
        if not ended.is_set():
            database.interrupt()
            _wait_for(ended)
    if not in_time:
        raise TooLong("the query took too long and was ended: --timeout SECONDS gives it more time")
    if failed:
        raise failed[0]
    return result[0]


def _wait_for(ended: threading.Event) -> None:
    """Wait for a query that was told to end: Python cannot end in order while it is in duckdb."""
    deadline = time.monotonic() + _INTERRUPT_S
    while not ended.is_set() and (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(KeyboardInterrupt):  # impatient, but it is ending
            ended.wait(left_s)


# -- what a query of the user may be -----------------------------------------------------------

ONLY_SELECT: Final = (
    "give one SELECT (or WITH ... SELECT) over the tables: whatever writes, loads, attaches or "
    "changes settings is refused"
)
_NODES: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_SOURCES: Final = frozenset({"BASE_TABLE", "SUBQUERY", "JOIN", "EMPTY", "EXPRESSION_LIST", "PIVOT"})
_FUNCTIONS: Final = frozenset({"range", "generate_series", "unnest"})


def _checked_query(text: str) -> str:
    if len(text) > QUERY_CHARS_MAX:
        raise HistoryError(f"the query is longer than {QUERY_CHARS_MAX:,} characters")
    if text.count("(") - text.count(")") > FILTER_PARENTHESES_MAX:
        raise HistoryError("the query has too many parentheses that are not closed")
    return text


def select_of(statements: Sequence[Any], known: Iterable[str]) -> list[str]:
    """The tables that one SELECT reads, by its syntax tree; refuses whatever else there is."""
    if len(statements) != 1:
        raise HistoryError(ONLY_SELECT)
    names = {name.lower(): name for name in known}
    within = {name.lower() for name in _withs(statements)}
    found: dict[str, None] = {}
    for part in _parts(statements):
        kind = part.get("type")
        if "class" in part or not isinstance(kind, str):
            continue  # an expression; those cannot reach a file
        if kind.endswith("_NODE"):
            if kind not in _NODES:
                raise HistoryError(ONLY_SELECT)
        elif kind == "TABLE_FUNCTION":
            function = str((part.get("function") or {}).get("function_name", "")).lower()
            if function not in _FUNCTIONS:
                raise HistoryError(f"{function}() is refused: only the tables can be read")
        elif {"alias", "sample"} <= part.keys() and kind not in _SOURCES:
            raise HistoryError(ONLY_SELECT)
        elif kind == "BASE_TABLE":
            name = str(part.get("table_name", ""))
            foreign = part.get("catalog_name") or part.get("schema_name") not in ("", "main", None)
            if not foreign and name.lower() in names:
                found[names[name.lower()]] = None
            elif foreign or name.lower() not in within:
                listed = ", ".join(names.values()) or "none"
                raise HistoryError(f"unknown table {_shown(name)}: there are {listed}")
    return list(found)


def _withs(tree: Any) -> Iterator[str]:
    """The names that WITH gives to queries."""
    for part in _parts(tree):
        if isinstance(part.get("cte_map"), dict):
            yield from (str(one.get("key", "")) for one in part["cte_map"].get("map", ()))
        if part.get("type") in ("RECURSIVE_CTE_NODE", "CTE_NODE"):
            yield str(part.get("cte_name") or part.get("ctename") or "")


def _parts(tree: Any) -> Iterator[dict[str, Any]]:
    """All objects of a syntax tree."""
    if isinstance(tree, dict):
        yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for part in tree:
            yield from _parts(part)


def _named_apart(columns: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Columns of which no two have the same name: the second `uuid` is `uuid_2`."""
    seen: set[str] = set()
    for name, kind in columns:
        apart, number = name, 1
        while apart in seen:
            number += 1
            apart = f"{name}_{number}"
        seen.add(apart)
        yield apart, kind


def _refused(text: str, tables: Sequence[Table], exc: BaseException) -> HistoryError:
    hint = ""
    if isinstance(exc, (duckdb.BinderException, duckdb.CatalogException)):
        hint = "".join(f"; {_columns_of(table)}" for table in tables)
    return HistoryError(f"{_shown(text)}: {_reason(exc)}{hint}")


# -- texts of SQL ------------------------------------------------------------------------------


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _view(name: str, source: str, columns: Iterable[str], bases: dict[str, int] | None) -> str:
    shown = [_quoted(column) for column in columns if not column.startswith("_")]
    if bases is None:
        return f"CREATE VIEW {_quoted(name)} AS SELECT {', '.join(shown)} FROM {source}"
    # The place in its range and what is before the range give the place among all.
    values = ", ".join(f"({int(key)}, {int(base)})" for key, base in bases.items()) or "(0, 0)"
    before = "lag(position) OVER (PARTITION BY {} ORDER BY position)"
    return f"""
        CREATE VIEW {_quoted(name)} AS
        SELECT position, {", ".join(shown)},
            CASE WHEN uuid IS NOT NULL THEN {before.format("uuid")} END AS previous_of_task,
            {before.format("hostname")} AS previous_of_node
        FROM (
            SELECT base + _number AS position, {", ".join(shown)}
            FROM {source} JOIN (VALUES {values}) AS bases(range, base) ON _range = range
        )
    """


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
