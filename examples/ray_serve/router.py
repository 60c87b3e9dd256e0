"""Prefix affinity: prompts that begin alike go to the same replica, unless it is much busier.

Ray Serve asks `choose_replicas` for ranks of replicas; the first one that accepts gets the request.
"""

from hashlib import blake2b
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from examples.ray_serve.ingress import Request

PREFIX_BYTES = 1024  # of the body's messages or prompt, which begins with the system prompt
BALANCED = 8  # further requests that the preferred replica may have in flight


def affinity_key(request: Request) -> bytes:
    """The beginning of a generation request's input; empty for other requests.

    A body is JSON. Its first characters may differ although the prompts are alike, for instance
    in `user`, so that the key begins at the field with the input.
    """
    if request.method != "POST":
        return b""
    starts = [request.body.find(name) for name in (b'"messages"', b'"prompt"', b'"input"')]
    found = [start for start in starts if start >= 0]
    return request.body[min(found) :][:PREFIX_BYTES] if found else b""


def score(key: bytes, replica: str) -> bytes:
    """Rendezvous hashing: the replica with the highest score is preferred, and a replica that
    joins or leaves changes the preference of few keys."""
    return blake2b(
        key, digest_size=8, salt=blake2b(replica.encode(), digest_size=16).digest()
    ).digest()


class PrefixAffinityRouter(FIFOMixin, RequestRouter):  # type: ignore[misc] # untyped
    """Ranks replicas by rendezvous hashing of `affinity_key`, and by load where that is uneven."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        load: dict[Any, int] = {
            one: self.replica_queue_len_cache.get(one.replica_id) or 0 for one in candidate_replicas
        }
        by_load = sorted(candidate_replicas, key=lambda one: load[one])
        request = pending_request.args[0] if pending_request and pending_request.args else None
        key = affinity_key(request) if isinstance(request, Request) else b""
        if not key or not by_load:
            return [by_load]
        preferred = max(candidate_replicas, key=lambda one: score(key, str(one.replica_id)))
        if load[preferred] > load[by_load[0]] + BALANCED:
            return [by_load]
        return [[preferred], [one for one in by_load if one is not preferred]]
