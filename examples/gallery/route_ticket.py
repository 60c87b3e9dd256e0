"""Route a ticket with probabilities: several questions about one text, in about one iteration.

Nothing is generated, so nothing has to be parsed; the text is computed once for all questions.

    python examples/gallery/route_ticket.py [URL] [TEXT]
"""

import sys

import httpx

TEXT = "The water heater that I bought on Monday leaks, and nobody has answered my two letters!"
QUESTIONS = {
    "is_angry": {"type": "noul", "instructions": "The writer is angry."},
    "is_dangerous": {"type": "noul", "instructions": "Somebody could be hurt."},
    "team": {
        "type": "choice",
        "instructions": "Which team should answer?",
        "criteria": {"sales": "offers", "repairs": "faults", "billing": "money", "other": None},
    },
    "urgency": {
        "type": "score",
        "instructions": "How soon is an answer needed?",
        "criteria": ["never", "this month", "this week", "today", "at once"],
    },
}


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    text = sys.argv[2] if len(sys.argv) > 2 else TEXT
    with httpx.Client(base_url=url, timeout=600) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "state": text, "questions": QUESTIONS}
        response = client.post("/v1/systemone", json=body)
    answer = response.raise_for_status().json()
    for name, found in answer["answers"].items():
        print(f"{name}: {found}")
    print("tokens:", answer["usage"])


if __name__ == "__main__":
    main()
