"""`/v1/batches`: create, list, retrieve and cancel batches of requests in a file."""

from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from engine.errors import InvalidRequest
from gateway.errors import FileNotFound
from gateway.schema.decoding import decode, invalid
from gateway.schema.openai.batches import WINDOWS, BatchRequest, batch_json
from gateway.schema.paging import list_json, read_page
from gateway.service import caller_of, service_of
from gateway.store.batch_records import BatchRecord
from gateway.web.route import RouteTable, decoded_body

Json = dict[str, Any]
DEFAULT_LISTED, MAX_LISTED = 20, 100
KEPT_SECONDS = 30 * 86_400  # after its creation, a batch is deleted


async def create_batch(http: HttpRequest) -> Json:
    """Queue a batch over an uploaded file; raises `InvalidRequest`."""
    service, caller = service_of(http), caller_of(http)
    routes: RouteTable = http.app.state.routes
    request = await decoded_body(http, partial(decode, BatchRequest))
    request.check(tuple(routes.batch_endpoints))
    now, tenant = service.unix_now(), caller.tenant
    await _check_file(http, request)
    expiry = request.output_expires_after
    record = BatchRecord(
        id=service.new_id("batch_"),
        tenant=tenant,
        endpoint=request.endpoint,
        input_file_id=request.input_file_id,
        completion_window=request.completion_window,
        created_at=now,
        expires_at=now + WINDOWS[request.completion_window],
        metadata=request.metadata,
        output_seconds=None if expiry is None else expiry.seconds,
    )
    await service.store.batch_queue.submit(record, now - KEPT_SECONDS)
    return batch_json(record)


async def list_batches(http: HttpRequest) -> Json:
    """A page of the caller's batches, newest first."""
    service, caller = service_of(http), caller_of(http)
    page = read_page(http.query_params, default=DEFAULT_LISTED, most=MAX_LISTED)
    if page.is_ascending:
        raise InvalidRequest(
            "Batches are listed newest first only: 'order' must be 'desc'.", "order"
        )
    batches = service.store.batch_queue.batches
    records = await batches.listed(caller.tenant, page.after, page.limit + 1)
    items = [batch_json(record) for record in records[: page.limit]]
    return list_json(items, has_more=len(records) > page.limit)


async def retrieve_batch(http: HttpRequest) -> Json:
    """The batch's status and counts; raises `BatchNotFound`."""
    service, caller = service_of(http), caller_of(http)
    batch_id = http.path_params["batch_id"]
    return batch_json(await service.store.batch_queue.batches.find(batch_id, caller.tenant))


async def cancel_batch(http: HttpRequest) -> Json:
    """Cancel the batch and keep its finished lines; raises `BatchNotFound`."""
    service, caller = service_of(http), caller_of(http)
    batch_id = http.path_params["batch_id"]
    now = service.unix_now()
    return batch_json(await service.store.batch_queue.cancel(batch_id, caller.tenant, now))


async def _check_file(http: HttpRequest, request: BatchRequest) -> None:
    service, caller = service_of(http), caller_of(http)
    file_id = request.input_file_id
    try:
        record = await service.store.files.find(file_id, caller.tenant, service.unix_now())
    except FileNotFound:
        reason = f"no file of yours has the id {file_id[:128]!r}."
        raise invalid("input_file_id", reason) from None
    if record.purpose != "batch":
        raise invalid("input_file_id", f"its purpose is {record.purpose!r}, not 'batch'.")
