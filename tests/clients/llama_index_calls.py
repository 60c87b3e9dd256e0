"""LlamaIndex against a server, in the environment of `make clients`: prints one JSON object.

python llama_index_calls.py URL
"""

import asyncio
import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

URL = sys.argv[1] + "/v1"


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def main() -> None:
    chat = OpenAILike(
        model="builtin", api_base=URL, api_key="any", is_chat_model=True, temperature=0.0,
        is_function_calling_model=True,
    )  # fmt: skip
    text = OpenAILike(
        model="builtin", api_base=URL, api_key="any", is_chat_model=False, temperature=0.0,
        max_tokens=5,
    )  # fmt: skip
    messages = [ChatMessage(role="user", content="Hello!")]
    called = chat.chat_with_tools(
        [FunctionTool.from_defaults(get_weather)],
        "What is the weather in Paris?",
        tool_required=True,
    )
    results = {
        "tool": chat.get_tool_calls_from_response(called)[0].tool_name,
        "whole": chat.chat(messages).message.content,
        "stream": "".join(part.delta or "" for part in chat.stream_chat(messages)),
        "async": asyncio.run(chat.achat(messages)).message.content,
        "text": text.complete("Once upon a time").text,
        "text_stream": "".join(part.delta for part in text.stream_complete("Once upon a time")),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
