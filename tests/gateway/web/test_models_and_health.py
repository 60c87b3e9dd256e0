from tests.gateway.rig import CHAT, MODEL, Rig, Setting, chat, played


@played()
async def test_the_model_is_listed_and_found_by_an_id_with_a_slash(rig: Rig) -> None:
    listed = (await rig.client.get("/v1/models")).json
    found = (await rig.client.get(f"/v1/models/{MODEL}")).json
    assert listed == {"object": "list", "data": [found]}
    assert (found["id"], found["object"]) == (MODEL, "model")
    assert found["created"] == 1_700_000_000


@played()
async def test_a_live_server_is_healthy_and_ready(rig: Rig) -> None:
    for path in ("/health", "/ready"):
        assert (await rig.client.get(path)).status == 200


@played()
async def test_the_version_is_that_of_the_openapi_document(rig: Rig) -> None:
    version = (await rig.client.get("/openapi.json")).json["info"]["version"]
    assert (await rig.client.get("/version")).json == {"version": version}


@played()
async def test_metrics_have_our_names_and_vllms(rig: Rig) -> None:
    await rig.client.post(CHAT, chat())
    exchange = await rig.client.get("/metrics")
    assert exchange.headers["content-type"].startswith("text/plain")
    lines = exchange.content.decode().splitlines()
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
    assert [each["id"] for each in (await rig.client.get("/v1/models")).json["data"]] == names
    for name in names:
        assert (await rig.client.get(f"/v1/models/{name}")).json["id"] == name
        assert (await rig.client.post(CHAT, chat(model=name))).json["model"] == name
    exchange = await rig.client.post(CHAT, chat(model="gpt-5"))
    assert exchange.status == 404
    assert all(repr(name) in exchange.json["error"]["message"] for name in names)
