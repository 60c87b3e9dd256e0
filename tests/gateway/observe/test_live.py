from types import SimpleNamespace
from typing import Any

from engine.step import Tier
from gateway.observe.live import LiveView
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings
from tests.engine.kv.test_saved_prefixes import Rig, prompt


def test_the_host_tier_shows_the_prefixes_that_it_keeps() -> None:
    rig = Rig(host=20)
    rig.serve(prompt(100, 17))
    engine: Any = SimpleNamespace(scheduler=rig.scheduler, rejection=lambda: None, engines=())
    nothing: Any = None
    readings = Readings(Metrics(), rig.scheduler, nothing)
    host = LiveView().snapshot(engine, readings, 0.0, 0.0)["kv"]["host"]
    assert Tier.HOST in rig.ledger.blocks.lower
    assert (host["free"], host["held"], host["cached"], host["moving"]) == (16, 0, 4, 0)
