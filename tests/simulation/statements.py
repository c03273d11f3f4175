"""Connections that execute what they know with less ado: the same SQL, the same values, the same rows.

Half of a run's time would be spent on SQLAlchemy's way to a cursor. A statement that comes again is compiled once, by
SQLAlchemy, and its SQL goes straight to SQLite from then on. Whatever is not known well, errors above all, goes the
usual way. A seed's log is the same either way.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from sqlalchemy import CompoundSelect, Connection, Delete, Insert, Select, Update
from sqlalchemy.engine import Dialect
from sqlalchemy.engine.result import IteratorResult, SimpleResultMetaData

_KNOWN = (Select, CompoundSelect, Update, Delete, Insert)
_Value = Callable[[Mapping[str, Any]], Any]


class _Rows(IteratorResult[Any]):
    """What a statement has found, and how many rows it has changed."""

    rowcount = -1


class Prepared:
    """A statement as SQLite takes it."""

    def __init__(self, statement: Any, dialect: Dialect, names: list[str]) -> None:
        self._compiled: Any = statement.compile(dialect=dialect, column_keys=names)
        entries = self._compiled._result_columns
        self.returns = bool(entries)
        defaults = (getattr(self._compiled, f"{kind}_prefetch", None) for kind in ("insert", "update"))
        self.is_plain = not self._compiled.literal_execute_params and not any(defaults)
        self._metadata = SimpleResultMetaData([entry.keyname for entry in entries])
        readers = [entry.type._cached_result_processor(dialect, None) for entry in entries]
        self._readers = readers if any(readers) else None
        self._lists = {name: bind.key for name, bind in self._compiled.binds.items() if bind.expanding}
        self._by_sizes: dict[tuple[int, ...], tuple[str, list[_Value]]] = {}

    def fits(self, parameters: Mapping[str, Any]) -> bool:
        """Whether it was compiled for such parameters: each list has something."""
        return not self._lists or all(parameters.get(key) for key in self._lists.values())

    def execute(self, raw: sqlite3.Connection, parameters: Mapping[str, Any]) -> _Rows:
        """Executes it once."""
        sizes = tuple([len(parameters[key]) for key in self._lists.values()])
        known = self._by_sizes.get(sizes)
        if known is None:
            known = self._by_sizes[sizes] = self._expanded(parameters)
        sql, values = known
        cursor = raw.execute(sql, [value(parameters) for value in values])
        rows: list[Any] = cursor.fetchall()
        if self._readers is not None:
            rows = [
                tuple(value if read is None else read(value) for value, read in zip(row, self._readers, strict=True))
                for row in rows
            ]
        result = _Rows(self._metadata, iter(rows))
        result.rowcount = cursor.rowcount
        return result

    def _expanded(self, parameters: Mapping[str, Any]) -> tuple[str, list[_Value]]:
        """The SQL for lists of these sizes, and what gives each of its values."""
        compiled = self._compiled
        if not self._lists:
            return compiled.string, [self._value(name) for name in compiled.positiontup or ()]
        state = compiled._process_parameters_for_postcompile(compiled.construct_params(parameters, escape_names=False))
        of_list = {
            expanded: _item(compiled.binds[name].key, number)
            for name in self._lists
            for number, expanded in enumerate(state.parameter_expansion[name])
        }
        return state.statement, [of_list.get(name) or self._value(name) for name in state.positiontup]

    def _value(self, name: str) -> _Value:
        bind, write = self._compiled.binds[name], self._compiled._bind_processors.get(name)
        key, default = bind.key, bind.effective_value
        if write is None:
            return lambda parameters: parameters.get(key, default)
        return lambda parameters: write(parameters.get(key, default))


def _item(key: str, number: int) -> _Value:
    def item(parameters: Mapping[str, Any]) -> Any:
        items = parameters[key]
        if isinstance(items[0], tuple):
            width = len(items[0])
            return items[number // width][number % width]
        return items[number]

    return item


class QuickConnection(Connection):
    """A connection to a slot. ``raw`` is the SQLite connection below all of them."""

    raw: ClassVar[sqlite3.Connection]
    prepared: ClassVar[WeakKeyDictionary[Any, dict[tuple[str, ...], Prepared]]]
    """By statement and names of its values; empty when it came once, since many that come once never come again."""

    def execute(self, statement: Any, parameters: Any = None, *, execution_options: Any = None) -> Any:
        """As its base."""
        many = parameters if type(parameters) is list else [parameters or {}]
        known = self._known(statement, many)
        if known is None or execution_options or (len(many) > 1 and known.returns):
            return super().execute(statement, parameters, execution_options=execution_options)
        if self._transaction is None:
            self._autobegin()
        try:
            results = [known.execute(self.raw, one) for one in many]
        except sqlite3.Error:
            return super().execute(statement, parameters)
        results[-1].rowcount = sum(result.rowcount for result in results)
        return results[-1]

    def _known(self, statement: Any, many: Sequence[Any]) -> Prepared | None:
        if not isinstance(statement, _KNOWN) or not many:
            return None
        of_statement = self.prepared.get(statement)
        if of_statement is None:
            self.prepared[statement] = {}
            return None
        names = tuple(many[0])
        known = of_statement.get(names)
        if known is None:
            known = of_statement[names] = Prepared(statement, self.dialect, sorted(names))
        return known if known.is_plain and known.fits(many[0]) else None
