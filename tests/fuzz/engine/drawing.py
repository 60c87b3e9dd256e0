"""Draws the settings of a case from a seeded random generator."""

from dataclasses import dataclass, replace
from math import inf
from random import Random

from engine.control.admission import Admission, SwapMode
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy.settings import PolicySettings
from engine.policy.table import POLICIES, RESEARCH
from engine.speculation.drafter import Drafter
from engine.speculation.settings import SpeculationSettings
from tests.fuzz.engine.answers import RowRates
from tests.fuzz.engine.executor import StepRates

Windows = tuple[int | None, ...]

FULL: Windows = (None,)
KINDS: tuple[tuple[Windows, bool], ...] = (  # windows, and whether there are recurrent layers
    *[(FULL, False)] * 5,
    *[(FULL, True)] * 5,
    ((None, 5), False),
    ((3,), False),
    ((7, 7, None), False),
    ((9, 2), False),
    ((1,), False),
    ((None, 6), True),
    ((), False),
)
METHODS = (None, None, None, "ngram", "suffix", "prediction", "draft_model", "mtp")
NAMES = (*POLICIES, *RESEARCH)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Blocks of each tier, and states of recurrent layers; `store` counts known names."""

    device: int
    host: int = 0
    disk: int = 0
    store: int = 0
    saves_on_host: bool = False
    states: int = 0
    host_states: int = 0
    disk_states: int = 0


@dataclass(frozen=True, slots=True)
class ClientRates:
    """How often clients leave, the worker dies and the policy is switched; `gap` seconds at most
    lie between two arrivals."""

    cancel: float
    kill: float
    switch: float
    gap: float


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one case."""

    windows: Windows
    block_size: int
    num_stages: int
    lookahead: int
    scheduler: SchedulerSettings
    tiers: Tiers
    method: str | None
    num_drafts: int
    rows: RowRates
    steps: StepRates
    clients: ClientRates
    unread_rate: float
    num_requests: int
    has_loras: bool

    def ledger(self) -> KVLedger:
        """An empty ledger."""
        tiers = self.tiers
        return KVLedger(
            KVShape(
                tiers.device,
                self.block_size,
                tiers.host,
                tiers.disk,
                saves_on_host=tiers.saves_on_host,
                windows=self.windows,
                chunk=self.scheduler.max_batch_tokens * (1 + self.lookahead),
                num_states=tiers.states,
                num_host_states=tiers.host_states,
                num_disk_states=tiers.disk_states,
                num_store_names=tiers.store,
            )
        )

    def drafter(self, cost: LiveCost) -> Drafter | None:
        """A drafter with the drawn method."""
        if self.method is None:
            return None
        config: dict[str, object] = {"method": self.method}
        config["num_speculative_tokens"] = self.num_drafts
        if self.method == "draft_model":
            config["model"] = "any"
        if self.method == "ngram":
            config["prompt_lookup_min"] = 1
        return Drafter.build(SpeculationSettings.parse(config), cost, 0.1)


def draw(random: Random) -> Settings:
    """The settings of a case."""
    choose = random.choice
    windows, is_recurrent = choose(KINDS)
    lookahead = choose([0, 1])
    scheduler = _draw_scheduler(random, choose([24, 40, 90]))
    if not windows and not is_recurrent:  # an encoder, which keeps nothing between two steps
        scheduler = replace(scheduler, reuses_prefixes=False)
    block_size = choose([1, 2, 4, 4, 8])
    method = choose(METHODS)
    if method in ("draft_model", "mtp") and windows != FULL:
        method = "ngram"  # what proposes in the worker keeps all its KV
    return Settings(
        windows=windows,
        block_size=block_size,
        num_stages=choose([1, 1, 1, 2, 3]),
        lookahead=lookahead,
        scheduler=scheduler,
        tiers=_draw_tiers(random, scheduler, block_size, windows, is_recurrent=is_recurrent),
        method=method,
        num_drafts=choose([1, 2, 4, 8]),
        rows=RowRates(late=choose([0.0, 0.1, 0.5]), fault=choose([0.0, 0.0, 0.01])),
        steps=StepRates(
            failed=choose([0.0, 0.0, 0.02]),
            stalled=choose([0.0, 0.01]),
            given_up=choose([0.0] * 9 + [0.3]),
        ),
        clients=ClientRates(
            cancel=choose([0.0, 0.1, 0.4]),
            kill=choose([0.0, 0.0, 0.3, 1.0]),
            switch=choose([0.0, 0.3]),
            gap=choose([0.0, 0.01, 0.1, 0.5]),
        ),
        unread_rate=choose([0.0, 0.1]),
        num_requests=random.randint(3, 30),
        has_loras=random.random() < 0.3,
    )


def _draw_scheduler(random: Random, max_model_len: int) -> SchedulerSettings:
    choose = random.choice
    batch = random.randint(1, 6)
    tokens = batch + choose([0, 1, 3, 8, 40])
    chunks = random.random() < 0.9
    return SchedulerSettings(
        max_model_len=max_model_len,
        max_batch_size=batch,
        max_batch_tokens=tokens if chunks else max(tokens, max_model_len),
        admission=choose([*[Admission.GROW] * 5, Admission.RESERVE, *[Admission.REQUEST] * 2]),
        max_queue_requests=choose([3, 100, 2048, 2048]),
        max_queue_tokens=choose([60, 1 << 20, 1 << 20]),
        max_step_overs=choose([0, 1, 3, 64]),
        max_preemptions=choose([0, 1, 3]),
        swap=choose(list(SwapMode)),
        max_crashes=choose([1, 2, 3]),
        reuses_prefixes=random.random() < 0.8,
        chunks_prompts=chunks,
        scan_limit=choose([1, 2, 16]),
        max_step_seconds=choose([inf, inf, 0.02, 0.05]),
        itl_goal=choose([inf, inf, 0.03, 0.1]),
        max_prefill_slowdown=choose([inf, inf, 1.5, 3.0]),
        max_background_slowdown=choose([inf, 1.2, 2.0]),
    )


def _draw_tiers(
    random: Random,
    scheduler: SchedulerSettings,
    block_size: int,
    windows: Windows,
    *,
    is_recurrent: bool,
) -> Tiers:
    """Mostly room for the longest request and little more; sometimes less."""
    choose = random.choice
    longest = -(-scheduler.max_model_len // block_size) + 2
    factor = max(1, len(windows)) * choose([1.0, 1.0, 1.2, 2.0])
    device = int(longest * factor) + choose([0, 0, 1, 5])
    if random.random() < 0.2:
        device = random.randint(1, longest)
    if not windows:
        return Tiers(device)
    host, disk = choose([0, 3, device, 4 * device]), choose([0, 0, 3, 2 * device])
    return Tiers(
        device=device,
        host=host,
        disk=disk,
        store=choose([0, 0, 0, 4, 200]),
        saves_on_host=host > 0 and random.random() < 0.6,
        states=random.randint(2, 9) if is_recurrent else 0,
        host_states=choose([0, 1, 8]) if is_recurrent else 0,
        disk_states=choose([1, 4]) if is_recurrent and disk else 0,
    )


def draw_policy(random: Random, max_batch_size: int) -> tuple[str, PolicySettings]:
    """A policy's name and its settings."""
    choose = random.choice
    return choose(NAMES), PolicySettings(
        starvation_seconds=choose([None, None, 0.2, 5.0]),
        seats=max_batch_size,
        base_quantum=choose([None, 0.02]),
        num_levels=choose([1, 4, 16]),
        skips=random.random() < 0.8,
        ttft_goal=choose([0.0, 0.0, 0.2]),
        fair_keys=random.random() < 0.25,
    )
