"""Turn free text into typed data: the answer matches the schema by construction.

python examples/gallery/extract.py [URL] [TEXT]
"""

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

TEXT = "Please send 3 boxes of green tea and 12 cups to Ada, at 5 Mill Lane, by Friday."


class Item(BaseModel):
    name: str = Field(max_length=30)
    count: int = Field(ge=1, le=1000)


class Order(BaseModel):
    customer: str = Field(max_length=30)
    items: list[Item] = Field(min_length=1, max_length=5)
    urgency: Literal["today", "this week", "later"]


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    text = sys.argv[2] if len(sys.argv) > 2 else TEXT
    client = OpenAI(base_url=f"{url}/v1", api_key="any")
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": f"Extract the order: {text}"}],
        response_format=Order,
        temperature=0,
    )
    order = answer.choices[0].message.parsed
    assert order is not None
    print(order.model_dump_json(indent=2))


if __name__ == "__main__":
    main()
