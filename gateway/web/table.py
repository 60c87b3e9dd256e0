"""The table of routes. A new route is one row here and its endpoint in `gateway.web.routes`."""

from gateway.pooling.decisions import plan_decision, plan_systemone
from gateway.pooling.embeddings import plan_embeddings
from gateway.pooling.scores import plan_rerank, plan_score
from gateway.schema.anthropic.renderer import AnthropicDialect
from gateway.schema.anthropic.request import AnthropicRequest
from gateway.schema.decisions.openai import DecisionRequest
from gateway.schema.decisions.systemone import SystemOneRequest
from gateway.schema.openai.batches import BatchRequest
from gateway.schema.openai.chat import ChatRequest
from gateway.schema.openai.completions import CompletionRequest
from gateway.schema.openai.infill import InfillRequest
from gateway.schema.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from gateway.schema.openai.tokens import DetokenizeRequest, TokenizeRequest
from gateway.schema.responses.conversations import (
    ConversationCreate,
    ConversationUpdate,
    ItemsCreate,
)
from gateway.schema.responses.dialect import ResponsesDialect
from gateway.schema.responses.request import ResponseRequest
from gateway.web.route import EVENTS, HTML, JSON, TEXT, Access, Route, RouteTable
from gateway.web.routes import (
    batches,
    chat,
    completions,
    conversations,
    files,
    messages,
    models,
    requests,
    response_plan,
    response_socket,
    responses,
    streams,
    tokens,
)
from gateway.web.routes.operations import admin, health, page

OPEN, ADMIN = Access.OPEN, Access.ADMIN
ANTHROPIC, RESPONSES = AnthropicDialect(), ResponsesDialect()
STREAM = (JSON, EVENTS)
PAGE_FILES = ("text/javascript", "text/css", HTML, "image/svg+xml", TEXT)
PAGING = ("after", "limit", "order")

# fmt: off
ROUTES = RouteTable((
    *(Route("POST", path, "text", "The next message of a conversation.",
            plan=chat.plan_chat_completion, body=ChatRequest, media_types=STREAM, is_metered=True,
            is_batchable=path == "/v1/chat/completions")
      for path in ("/v1/chat/completions", "/chat/completions")),
    *(Route("POST", path, "text", "The continuation of a prompt.",
            plan=completions.plan_completion, body=CompletionRequest, media_types=STREAM,
            is_metered=True, is_batchable=path == "/v1/completions")
      for path in ("/v1/completions", "/completions")),
    Route("POST", "/infill", "text", "The text between two texts, as llama.cpp's server.",
          plan=completions.plan_infill, body=InfillRequest, media_types=STREAM, is_metered=True),
    Route("GET", "/v1/models", "models", "The models of this server.", models.list_models),
    Route("GET", "/v1/models/{model:path}", "models", "One model.", models.retrieve_model),
    Route("GET", "/models", "models", "The models of this server.", models.list_models),
    Route("GET", "/models/sse", "models", "The statuses of the models, as they change.",
          models.model_events, media_types=(EVENTS,)),
    Route("POST", "/models/load", "models", "Load a model.", models.load_model,
          models.ModelAction, access=ADMIN),
    Route("POST", "/models/unload", "models", "Unload a model.", models.unload_model,
          models.ModelAction, access=ADMIN),
    Route("POST", "/v1/chat/completions/render", "text",
          "The rendered prompt of a conversation, as text and token ids.",
          chat.render_chat, ChatRequest, is_metered=True, is_of_model=True),
    Route("POST", "/tokenize", "text", "The token ids of a text.", tokens.tokenize,
          TokenizeRequest, is_metered=True, is_of_model=True),
    Route("POST", "/detokenize", "text", "The text of token ids.", tokens.detokenize,
          DetokenizeRequest, is_metered=True, is_of_model=True),

    Route("GET", "/v1/files", "batches", "Your files.", files.list_files, is_metered=True,
          query=(*PAGING, "purpose")),
    Route("POST", "/v1/files", "batches", "Upload a file.", files.create_file, is_metered=True,
          form=("purpose", "file")),
    Route("GET", "/v1/files/{file_id}", "batches", "The metadata of a file.", files.retrieve_file),
    Route("DELETE", "/v1/files/{file_id}", "batches", "Delete a file.", files.delete_file),
    Route("GET", "/v1/files/{file_id}/content", "batches", "The content of a file.",
          files.retrieve_content, is_metered=True, media_types=("application/octet-stream",)),
    Route("GET", "/v1/batches", "batches", "Your batches.", batches.list_batches, is_metered=True,
          query=PAGING),
    Route("POST", "/v1/batches", "batches", "Run a file of requests.", batches.create_batch,
          BatchRequest, is_metered=True),
    Route("GET", "/v1/batches/{batch_id}", "batches", "The status of a batch.",
          batches.retrieve_batch),
    Route("POST", "/v1/batches/{batch_id}/cancel", "batches", "Cancel a batch.",
          batches.cancel_batch),

    *(Route("POST", path, "pooling", "The embeddings of texts.", plan=plan_embeddings,
            body=EmbeddingRequest, is_metered=True, is_batchable=path == "/v1/embeddings")
      for path in ("/v1/embeddings", "/embeddings")),
    *(Route("POST", path, "pooling", "The scores of pairs of texts.", plan=plan_score,
            body=ScoreRequest, is_metered=True, is_batchable=path == "/v1/score")
      for path in ("/score", "/v1/score")),
    *(Route("POST", path, "pooling", "Documents by their relevance to a query.", plan=plan_rerank,
            body=RerankRequest, is_metered=True, is_batchable=path == "/v1/rerank")
      for path in ("/rerank", "/v1/rerank", "/v2/rerank")),

    Route("POST", "/v1/decisions", "decisions", "The probabilities of answers to questions.",
          plan=plan_decision, body=DecisionRequest, is_metered=True, is_batchable=True),
    Route("POST", "/v1/systemone", "decisions", "The same, in the format of System One.",
          plan=plan_systemone, body=SystemOneRequest, is_metered=True, is_batchable=True),

    Route("POST", "/v1/messages", "messages", "The next message, in the format of Anthropic's API.",
          plan=messages.plan_message, body=AnthropicRequest, media_types=STREAM, is_metered=True,
          dialect=ANTHROPIC),
    Route("POST", "/v1/messages/count_tokens", "messages", "The number of tokens of a prompt.",
          messages.count_tokens, AnthropicRequest, is_metered=True, is_of_model=True,
          dialect=ANTHROPIC),

    Route("GET", "/v1/responses", "responses", "A WebSocket for responses that continue.",
          response_socket.connect, dialect=RESPONSES),
    Route("POST", "/v1/responses", "responses", "The next items of a conversation.",
          plan=response_plan.plan_response, body=ResponseRequest, is_metered=True,
          is_batchable=True, media_types=STREAM, dialect=RESPONSES),
    Route("POST", "/v1/responses/input_tokens", "responses", "The number of tokens of a prompt.",
          response_plan.count_input_tokens, ResponseRequest, is_metered=True, is_of_model=True,
          dialect=RESPONSES),
    Route("POST", "/v1/responses/compact", "responses", "Rejected: compaction is not supported.",
          responses.compact_response, is_metered=True, dialect=RESPONSES),
    Route("GET", "/v1/responses/{response_id}", "responses", "A stored response, or its events.",
          responses.retrieve_response, media_types=STREAM, query=("stream", "starting_after"),
          dialect=RESPONSES),
    Route("DELETE", "/v1/responses/{response_id}", "responses", "Delete a stored response.",
          responses.delete_response, dialect=RESPONSES),
    Route("POST", "/v1/responses/{response_id}/cancel", "responses",
          "Cancel a response in progress.", responses.cancel_response, dialect=RESPONSES),
    Route("GET", "/v1/responses/{response_id}/input_items", "responses",
          "The input items of a response.", responses.list_input_items, is_metered=True,
          query=PAGING, dialect=RESPONSES),

    Route("POST", "/v1/conversations", "responses", "Create a conversation.",
          conversations.create_conversation, ConversationCreate, is_metered=True),
    Route("GET", "/v1/conversations/{conversation_id}", "responses", "A conversation.",
          conversations.retrieve_conversation),
    Route("POST", "/v1/conversations/{conversation_id}", "responses",
          "Replace the metadata of a conversation.", conversations.update_conversation,
          ConversationUpdate, is_metered=True),
    Route("DELETE", "/v1/conversations/{conversation_id}", "responses", "Delete a conversation.",
          conversations.delete_conversation),
    Route("GET", "/v1/conversations/{conversation_id}/items", "responses",
          "The items of a conversation.", conversations.list_items, is_metered=True,
          query=(*PAGING, "include")),
    Route("POST", "/v1/conversations/{conversation_id}/items", "responses",
          "Add items to a conversation.", conversations.create_items, ItemsCreate,
          is_metered=True, query=("include",)),
    Route("GET", "/v1/conversations/{conversation_id}/items/{item_id}", "responses",
          "An item of a conversation.", conversations.retrieve_item, query=("include",)),
    Route("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}", "responses",
          "Delete an item of a conversation.", conversations.delete_item),

    Route("GET", "/v1/streams", "streams", "Your streams that can be read again.",
          streams.list_streams, is_metered=True, query=("conversation_id",)),
    Route("GET", "/v1/stream/{name:path}", "streams", "The events of a stream.",
          streams.read_stream, media_types=(EVENTS,), query=("from",)),
    Route("DELETE", "/v1/stream/{name:path}", "streams", "End a stream and forget its events.",
          streams.delete_stream),

    Route("POST", "/v1/requests/{request_id:path}/cancel", "requests",
          "Cancel a running request by its x-request-id.", requests.cancel),
    Route("GET", "/v1/requests/{request_id:path}/timeline", "requests",
          "The phases of a request, and what cost it the most time.", requests.timeline,
          is_metered=True),

    Route("GET", "/", "operation", "The web page, or a short text.", page.index, access=OPEN,
          media_types=(HTML, TEXT)),
    Route("GET", "/page/{name:path}", "operation", "A file of the web page.", page.file,
          access=OPEN, media_types=PAGE_FILES),
    Route("POST", "/v1/load_lora_adapter", "operation", "Load a LoRA adapter.", admin.load_lora,
          admin.LoadLoraRequest, access=ADMIN, is_of_model=True, media_types=(TEXT,)),
    Route("POST", "/v1/unload_lora_adapter", "operation", "Unload a LoRA adapter.",
          admin.unload_lora, admin.UnloadLoraRequest, access=ADMIN, is_of_model=True,
          media_types=(TEXT,)),
    Route("POST", "/admin/simulate", "operation",
          "A recording under another policy, in virtual time.", admin.simulate, access=ADMIN,
          media_types=("application/jsonl",)),
    Route("GET", "/admin/live", "operation", "The engine's live state, ten events a second.",
          page.live, access=ADMIN, media_types=(EVENTS,)),
    Route("GET", "/admin/policy", "operation", "The scheduling policy.", admin.policy,
          access=ADMIN, is_of_model=True),
    Route("POST", "/admin/policy", "operation", "Change the scheduling policy while serving.",
          admin.policy, admin.PolicyChoice, access=ADMIN, is_of_model=True),
    Route("GET", "/health", "operation", "Liveness.", health.health, access=OPEN, is_probe=True),
    Route("GET", "/v1/loads", "operation", "Load, for routers, in SGLang's format.", health.loads),
    Route("GET", "/version", "operation", "The version, as vLLM's server.", health.version),
    Route("GET", "/ready", "operation", "Readiness.", health.ready, access=OPEN, is_probe=True),
    Route("GET", "/metrics", "operation", "Metrics in the Prometheus text format.",
          health.metrics, is_probe=True, media_types=(TEXT,)),
    Route("GET", "/openapi.json", "operation", "This document.", page.openapi, asks_browser=True),
    Route("GET", "/docs", "operation", "This document as a web page.", page.docs,
          asks_browser=True, media_types=(HTML,)),
))
# fmt: on
