from tests.gateway.rig import CHAT, MODEL, Rig, Setting, chat, played


@played()
async def test_the_model_is_listed_and_found_by_an_id_with_a_slash(rig: Rig) -> None:
    async with rig.client.get("/v1/models") as exchange:
        listed = await exchange.json()
    async with rig.client.get(f"/v1/models/{MODEL}") as exchange:
        found = await exchange.json()
    assert listed == {"object": "list", "data": [found]}
    assert (found["id"], found["object"]) == (MODEL, "model")
    assert found["created"] == 1_700_000_000


@played()
async def test_a_live_server_is_healthy_and_ready(rig: Rig) -> None:
    for path in ("/health", "/ready"):
        async with rig.client.get(path) as exchange:
            assert await exchange.start() == 200


@played()
async def test_metrics_have_our_names_and_vllms(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat()) as exchange:
        await exchange.json()
    async with rig.client.get("/metrics") as exchange:
        page = (await exchange.read()).decode()
    assert exchange.headers["content-type"].startswith("text/plain")
    lines = page.splitlines()
    assert 'podway_requests_total{outcome="finished"} 1.0' in lines
    assert "podway_orphan_blocks 0.0" in lines
    assert "podway_iterations_total 7.0" in lines
    assert 'podway_policy_info{admission="grow",policy="fcfs"} 1.0' in lines
    assert 'podway_kv_slots{state="free",tier="device"} 986.0' in lines
    assert 'podway_kv_slots{state="held",tier="device"} 0.0' in lines
    assert 'podway_kv_slots{state="cached",tier="device"} 14.0' in lines
    assert 'podway_preemptions_total{kind="recompute"} 0.0' in lines
    assert 'podway_requests_total{outcome="expired"} 0.0' in lines
    assert f'vllm:num_requests_running{{model_name="{MODEL}"}} 0.0' in lines
    assert f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}} 0.0' in lines
    assert f'vllm:generation_tokens_total{{model_name="{MODEL}"}} 7.0' in lines
    assert 'podway_inter_token_seconds_bucket{le="0.25"} 6.0' in lines
    assert 'podway_time_to_first_token_seconds_bucket{le="0.1"} 0.0' in lines
    assert 'podway_time_to_first_token_seconds_bucket{le="0.25"} 1.0' in lines
    assert 'podway_aborts_total{reason="client_gone"} 0.0' in lines


@played(Setting(aliases=("gpt-4o", "org/other")))
async def test_a_model_with_several_names_is_listed_and_served_under_each(rig: Rig) -> None:
    names = [MODEL, "gpt-4o", "org/other"]
    async with rig.client.get("/v1/models") as exchange:
        assert [each["id"] for each in (await exchange.json())["data"]] == names
    for name in names:
        async with rig.client.get(f"/v1/models/{name}") as exchange:
            assert (await exchange.json())["id"] == name
        async with rig.client.post(CHAT, chat(model=name)) as exchange:
            assert (await exchange.json())["model"] == name
    async with rig.client.post(CHAT, chat(model="gpt-5")) as exchange:
        message = (await exchange.json())["error"]["message"]
    assert exchange.status == 404
    assert all(repr(name) in message for name in names)
