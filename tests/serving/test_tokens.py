import aiohttp

from tests.serving.client import Json


async def posted(session: aiohttp.ClientSession, url: str, body: Json) -> Json:
    async with session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        reply: Json = await response.json()
        return reply


async def test_a_rendered_prompt_is_the_same_after_detokenize_and_tokenize(server_url: str) -> None:
    chat = {"model": "builtin", "messages": [{"role": "user", "content": "Grüße! 🙂" * 500}]}
    async with aiohttp.ClientSession() as session:
        rendered = await posted(session, f"{server_url}/v1/chat/completions/render", chat)
        assert "Grüße! 🙂" in rendered["prompt"]
        ids = {"tokens": rendered["token_ids"]}
        back = await posted(session, f"{server_url}/detokenize", ids)
        assert back["prompt"] == rendered["prompt"]
        tokens = await posted(session, f"{server_url}/tokenize", chat | {"return_token_strs": True})
        assert tokens["tokens"] == rendered["token_ids"]
        assert len(tokens["token_strs"]) == tokens["count"]
        text = {"prompt": rendered["prompt"], "add_special_tokens": False}
        assert (await posted(session, f"{server_url}/tokenize", text))["tokens"] == tokens["tokens"]
        body = {**chat, "max_tokens": 1}
        reply = await posted(session, f"{server_url}/v1/chat/completions", body)
        assert reply["usage"]["prompt_tokens"] == tokens["count"]
