"""Stored conversations: objects with items, kept and bounded as responses are."""

import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.errors import ConversationNotFound, ItemNotFound
from gateway.store.responses import Found, Item, Key, Responses, T

Distinct = Callable[[list[Item], set[str]], list[Item]]
MAX_ITEMS, MAX_BYTES = 10_000, 16 << 20  # bounds of a conversation that is to be continued


class Conversations(Responses):
    """The conversations of all tenants, each kept as long as a response after its last change."""

    _table = "conversation"
    _not_found = ConversationNotFound

    async def items(self, key: Key) -> list[Item]:
        """The items that a response continues. Raises `InvalidRequest` if they are too many or too
        large."""

        def read(db: sqlite3.Connection) -> list[Item]:
            seq = self._find(db, key)
            _check_room(db, seq)
            return self._items(db, seq)

        return await self._database.read(read)

    async def item(self, key: Key, item_id: str) -> bytes:
        """An item in JSON. Raises `ItemNotFound`."""
        return await self._read(key, lambda db, seq: _item(db, seq, item_id)[1])

    async def update(self, key: Key, fields: dict[str, Any]) -> dict[str, Any]:
        """The object with these fields, which replace its own."""

        def edit(db: sqlite3.Connection, seq: int) -> dict[str, Any]:
            changed = self._object(db, seq) | fields
            query = "UPDATE conversation SET num_bytes = num_bytes + length(?1) - length(record),"
            db.execute(f"{query} record = ?1 WHERE seq = ?2", (msgspec.json.encode(changed), seq))
            return changed

        return await self._change(key, edit)

    async def add(self, key: Key, items: list[Item], distinct: Distinct) -> list[Item]:
        """Store what `distinct` makes of the items, given the ids among theirs that are there
        already, and return it. Raises `InvalidRequest` if the conversation becomes too large."""

        def edit(db: sqlite3.Connection, seq: int) -> list[Item]:
            added = distinct(items, _known_ids(db, seq, items))
            self._add(db, seq, added)
            _check_room(db, seq)
            return added

        return await self._change(key, edit)

    async def add_turn(
        self, key: Key, items: list[Item], output: list[Item], distinct: Distinct
    ) -> None:
        """Store the input and the output of a response that has ended, whatever the limits; unless
        they are there, from a server that was killed before it had noted its stream's end."""

        def edit(db: sqlite3.Connection, seq: int) -> None:
            if not _known_ids(db, seq, output):
                turn = [*items, *output]
                self._add(db, seq, distinct(turn, _known_ids(db, seq, turn)))

        await self._change(key, edit)

    async def remove(self, key: Key, item_id: str) -> dict[str, Any]:
        """Delete an item; the object. Raises `ItemNotFound`."""

        def edit(db: sqlite3.Connection, seq: int) -> dict[str, Any]:
            item_seq, record = _item(db, seq, item_id)
            db.execute("DELETE FROM conversation_item WHERE seq = ?", (item_seq,))
            self._grow(db, seq, -1, -len(record))
            return self._object(db, seq)

        return await self._change(key, edit)

    async def _change(self, key: Key, edit: Found[T]) -> T:
        """What `edit` returns, in one transaction, after which the conversation is the one that was
        used last."""

        def write(db: sqlite3.Connection) -> T:
            seq = self._find(db, key)
            result = edit(db, seq)
            query = "UPDATE conversation SET expires_at = ?, used_at = ? WHERE seq = ?"
            db.execute(query, (key.now + self._limits.seconds, self._next_use(db), seq))
            self._trim(db, key)
            return result

        return await self._database.write(write)


def _item(db: sqlite3.Connection, seq: int, item_id: str) -> tuple[int, bytes]:
    """The `seq` of an item of a conversation, and the item in JSON."""
    query = "SELECT seq, record FROM conversation_item WHERE owner = ? AND id = ?"
    row: tuple[int, bytes] | None = db.execute(query, (seq, item_id)).fetchone()
    if row is None:
        raise ItemNotFound(item_id)
    return row


def _known_ids(db: sqlite3.Connection, seq: int, items: list[Item]) -> set[str]:
    """The ids of these items that a conversation has."""
    query = "SELECT 1 FROM conversation_item WHERE owner = ? AND id = ?"
    ids = {item["id"] for item in items}
    return {each for each in ids if db.execute(query, (seq, each)).fetchone()}


def _check_room(db: sqlite3.Connection, seq: int) -> None:
    query = "SELECT num_items, num_bytes FROM conversation WHERE seq = ?"
    num_items, num_bytes = db.execute(query, (seq,)).fetchone()
    if num_items > MAX_ITEMS or num_bytes > MAX_BYTES:
        raise InvalidRequest(
            f"The conversation would have {num_items} items in {num_bytes} bytes; at most "
            f"{MAX_ITEMS} items in {MAX_BYTES} bytes can be continued.",
            "conversation",
        )
