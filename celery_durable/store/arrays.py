"""Many rows as parameters of one statement of PostgreSQL, the same for any number of rows and any mix of values.

A column whose values differ is an array, or one JSON document where its values are JSON: psycopg would escape each of
their quotes. A column with one value for all rows is that value: of most columns that is so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def from_rows(types: Mapping[str, str]) -> str:
    """What stands behind ``FROM``: a table ``new`` of these columns, by their types, filled by :func:`parameters`.

    Its first column says how many rows there are: none of its values may be NULL.
    """
    functions = [
        f"json_array_elements(%({name})s::json)" if kind == "json" else f"unnest(%({name})b::{kind}[])"
        for name, kind in types.items()
    ]
    filled = [f"coalesce(one.{name}, %({name}_of_all)s::{kind}) AS {name}" for name, kind in types.items()]
    return f"(SELECT {', '.join(filled)} FROM ROWS FROM ({', '.join(functions)}) AS one({', '.join(types)})) AS new"


def parameters(types: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parameters of a statement with :func:`from_rows`, for psycopg."""
    first = next(iter(types))
    columns: dict[str, Any] = {}
    for name, kind in types.items():
        values = [row[name] for row in rows]
        if kind == "json":
            values = [json.dumps(value) for value in values]  # equal values may be other documents: True == 1
        is_one = name != first and all(value == values[0] for value in values)
        of_all, values = (values[0], []) if is_one else (None, values)
        columns[name] = f"[{','.join(values)}]" if kind == "json" else values
        columns[f"{name}_of_all"] = of_all
    return columns
