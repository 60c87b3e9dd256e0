import asyncio

from tests.gateway.rig import CHAT, MODEL, STEP, Rig, Setting, chat, played

CORE = {
    "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens",
    "token_usage", "gen_throughput", "cache_hit_rate", "utilization", "max_running_requests",
}  # fmt: skip


@played(
    Setting(texts=("a long story " * 5,), max_batch_size=2, prefix_cache=False, num_blocks=1000)
)
async def test_loads_are_those_of_the_scheduler(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True, n=3)) as one:
        await asyncio.sleep(3.5 * STEP)
        body = (await rig.client.get("/v1/loads?include=core,disagg,queues,memory")).json
        await one.read()
    (load,) = body["loads"]
    assert load.keys() >= CORE
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (2, 1)
    assert load["max_running_requests"] == 2
    assert load["utilization"] == 1.0
    assert 0 < load["num_used_tokens"] < load["max_total_num_tokens"] == 1000
    assert body["aggregate"]["total_reqs"] == 3


@played()
async def test_the_cache_configuration_is_a_metric(rig: Rig) -> None:
    page = (await rig.client.get("/metrics")).content.decode()
    labels = f'block_size="1",model_name="{MODEL}",num_gpu_blocks="1000"'
    assert f"vllm:cache_config_info{{{labels}}} 1.0" in page
