"""Many rows in one statement.

SQLite's driver lets other threads in at every statement and then waits for its turn; a group of 32 completions is 4
statements this way, and 64 with one for each row. SQLAlchemy writes such a statement anew each time, which takes
longer than running it; here its text is made once for each number of rows.
"""

from collections.abc import Mapping, Sequence
from functools import cache

from sqlalchemy import Connection, Dialect, Table

MAX_ROWS = 64  # of one statement; fewer are split into powers of two, so that there are 7 texts of a table


def insert_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert rows that all name the same columns in the same order; values as the driver takes them."""
    start = 0
    while left := len(rows) - start:
        num_rows = min(MAX_ROWS, 1 << (left.bit_length() - 1))
        group = rows[start : start + num_rows]
        statement = _statement(connection.dialect, table, tuple(group[0]), num_rows)
        connection.exec_driver_sql(statement, tuple(value for row in group for value in row.values()))
        start += num_rows


@cache
def _statement(dialect: Dialect, table: Table, columns: tuple[str, ...], num_rows: int) -> str:
    mark = {"qmark": "?", "pyformat": "%s"}[dialect.paramstyle]
    quote = dialect.identifier_preparer.quote
    row = f"({', '.join([mark] * len(columns))})"
    names = ", ".join(map(quote, columns))
    return f"INSERT INTO {quote(table.name)} ({names}) VALUES {', '.join([row] * num_rows)}"
