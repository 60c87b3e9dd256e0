"""Usage: how much each tenant has stored, and its limits. Checked before anything is added."""

import sqlite3
from dataclasses import dataclass

from gateway.errors import StoreFull, StoreOutOfSpace


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Maximum bytes of one file; files of a tenant; bytes of a tenant's files and batches; bytes
    of all tenants' files, batches and responses."""

    file_bytes: int = 200 << 20
    tenant_files: int = 10_000
    tenant_bytes: int = 4 << 30
    total_bytes: int = 16 << 30


def check_bytes(
    db: sqlite3.Connection, tenant: str, num_bytes: int, limits: StoreLimits, others: int = 0
) -> None:
    """Raises `StoreFull` if a tenant may not store so many bytes more, and `StoreOutOfSpace` if
    the store has no room for them and for `others`, bytes of other tenants' uploads."""
    own = _sum(db, "file", tenant) + _sum(db, "batch", tenant)
    if own + num_bytes > limits.tenant_bytes:
        raise StoreFull(f"{limits.tenant_bytes} bytes")
    tables = ("file", "batch", "response", "conversation", "stream")
    total = sum(_sum(db, table, None) for table in tables)
    if total + num_bytes + others > limits.total_bytes:
        raise StoreOutOfSpace


def check_file_count(db: sqlite3.Connection, tenant: str, limits: StoreLimits) -> None:
    """Raises `StoreFull` if a tenant may not store another file."""
    (count,) = db.execute("SELECT count(*) FROM file WHERE tenant = ?", (tenant,)).fetchone()
    if count >= limits.tenant_files:
        raise StoreFull(f"{limits.tenant_files} files")


def _sum(db: sqlite3.Connection, table: str, tenant: str | None) -> int:
    """Bytes in a table; `tenant` None: of all tenants."""
    where, values = ("", []) if tenant is None else (" WHERE tenant = ?", [tenant])
    query = f"SELECT coalesce(sum(num_bytes), 0) FROM {table}{where}"
    (num_bytes,) = db.execute(query, values).fetchone()
    return int(num_bytes)
