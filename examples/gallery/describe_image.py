"""Ask about an image; a second question about it computes no image again.

podway serve Qwen/Qwen3-VL-2B-Instruct
python examples/gallery/describe_image.py IMAGE [URL]
"""

import base64
import mimetypes
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI


def main() -> None:
    path = Path(sys.argv[1])
    url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    data = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    client = OpenAI(base_url=f"{url}/v1", api_key="any")
    model = client.models.list().data[0].id
    messages: list[Any] = []
    for question in ("What is in this image?", "Which colours has it?"):
        parts: list[Any] = [{"type": "text", "text": question}]
        if not messages:
            parts.insert(0, {"type": "image_url", "image_url": {"url": data}})
        messages.append({"role": "user", "content": parts})
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=100)
        text = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        cached = details.cached_tokens if details else 0
        print(f"{question} {text}\n  {cached} of {answer.usage.prompt_tokens} tokens cached")


if __name__ == "__main__":
    main()
