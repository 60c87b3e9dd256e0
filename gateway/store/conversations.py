"""Stored conversations: an object and its items in a record, kept and bounded as responses are."""

import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.errors import ConversationNotFound
from gateway.store.responses import ResponseRecord, Responses

Edit = Callable[[ResponseRecord], ResponseRecord]
MAX_ITEMS, MAX_BYTES = 10_000, 16 << 20  # bounds of a conversation that is to be continued


class Conversations(Responses):
    """The conversations of all tenants, each kept as long as a response after its last change."""

    _table = "conversation"
    _not_found = ConversationNotFound

    async def items(self, conversation_id: str, tenant: str, now: int) -> list[dict[str, Any]]:
        """The items that a response continues. Raises `ConversationNotFound`, and
        `InvalidRequest` if they are too many or too large."""

        def read(db: sqlite3.Connection) -> list[dict[str, Any]]:
            record = self._find(db, conversation_id, tenant, now)
            query = "SELECT num_bytes FROM conversation WHERE id = ?"
            _check_room(record, db.execute(query, (conversation_id,)).fetchone()[0])
            return record.items

        return await self._database.read(read)

    async def change(
        self, conversation_id: str, tenant: str, now: int, edit: Edit, *, has_ended: bool = False
    ) -> ResponseRecord:
        """Store what `edit` makes of the record, in one transaction. What is added by a response
        that `has_ended` may exceed the limits. Raises `ConversationNotFound`, `InvalidRequest` if
        it becomes too large, and what `edit` raises."""

        def write(db: sqlite3.Connection) -> ResponseRecord:
            record = edit(self._find(db, conversation_id, tenant, now))
            data = msgspec.json.encode(record)
            if not has_ended:
                _check_room(record, len(data))
            db.execute(
                "UPDATE conversation SET record = ?, num_bytes = ?, expires_at = ?, used_at = ?"
                " WHERE id = ?",
                (
                    *(data, len(data), now + self._limits.seconds),
                    *(self._next_use(db), conversation_id),
                ),
            )
            self._trim(db, tenant, now)
            return record

        return await self._database.write(write)


def _check_room(record: ResponseRecord, num_bytes: int) -> None:
    if len(record.items) > MAX_ITEMS or num_bytes > MAX_BYTES:
        raise InvalidRequest(
            f"The conversation would have {len(record.items)} items in {num_bytes} bytes; at most "
            f"{MAX_ITEMS} items in {MAX_BYTES} bytes can be continued.",
            "conversation",
        )
