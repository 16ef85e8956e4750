"""The simulated fleet: what can be worked out by hand, and what must hold whatever happens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.types import Cost
from encoder_service import cli
from encoder_service.commands.simulate import relative_curves
from router.options import Policy
from router.policy.balance import POLICIES, largest_first
from router.simulate import Outcome, Scenario, Simulation, burst, heavy_tailed, steady

PLAIN = Cost(launch_seconds=0, patch_seconds=1, attention_seconds=0)
SLOW = Cost(13e-3, 20e-6, 2.6e-9)
TAILED = Cost(1.3e-3, 2e-6, 2.6e-10)


def simulate(scenario: Scenario, policy: Policy = "largest_first", seed: int = 0) -> Outcome:
    return Simulation(scenario, POLICIES[policy], seed).run()


def test_a_shard_costs_a_launch_its_patches_and_their_attention() -> None:
    assert Cost(1.0, 0.5, 0.25).seconds([2, 4]) == 1 + 0.5 * 6 + 0.25 * (4 + 16)


def test_the_published_example() -> None:
    scenario = Scenario(2, 1, [(0.0, [1000, 100, 200, 50])], PLAIN)
    outcome = Simulation(scenario, lambda random: largest_first, 0).run()
    assert outcome.patches == [1000, 350]
    assert outcome.latencies_seconds == [1000]
    assert outcome.imbalance == 1000 / 675


def test_a_replica_works_in_the_order_of_arrival() -> None:
    outcome = simulate(Scenario(1, 1, [(0.0, [10]), (1.0, [1]), (20.0, [2])], PLAIN))
    assert outcome.latencies_seconds == [10, 10, 2]
    assert outcome.makespan_seconds == 22


def test_replicas_on_one_device_share_its_time_while_both_have_work() -> None:
    apart = Scenario(2, 1, [(0.0, [10]), (1.0, [1])], PLAIN)
    assert simulate(apart).latencies_seconds == [1, 10]
    together = simulate(replace(apart, sharing=2))
    assert together.latencies_seconds == [2, 11]
    assert together.busy_seconds == [10, 1]
    assert together.makespan_seconds == 11


def test_five_times_too_much_costs_neither_goodput_nor_those_who_are_admitted() -> None:
    queue_seconds = 5.0
    for replicas, routers in ((1, 1), (4, 2), (16, 4)):
        requests = 1500 * max(2, replicas // 2)
        flow = steady(replicas, requests, 5, routers=routers, seed=1, cost=SLOW)
        outcome = simulate(replace(flow, queue_seconds=queue_seconds))
        assert sum(outcome.busy_seconds) > 0.9 * replicas * outcome.makespan_seconds
        assert 0.7 < outcome.rejected / requests < 0.9
        assert p99(outcome) < 2.5 * queue_seconds


@given(
    policy=st.sampled_from(list(POLICIES)),
    replicas=st.integers(1, 6),
    routers=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_every_patch_is_encoded_once(
    policy: Policy, replicas: int, routers: int, seed: int
) -> None:
    scenario = steady(replicas, 40, 0.9, routers=routers, seed=seed, cost=TAILED)
    simulation = Simulation(scenario, POLICIES[policy], seed)
    outcome = simulation.run()
    assert len(outcome.latencies_seconds) == 40
    assert sum(outcome.patches) == sum(sum(items) for _, items in scenario.arrivals)
    assert all(ledger.outstanding.patches == 0 for ledger in simulation.ledgers)


def test_the_same_seed_gives_the_same_outcome() -> None:
    scenario = steady(4, 100, 0.7, routers=2, seed=3, cost=TAILED)
    assert simulate(scenario, seed=5) == simulate(scenario, seed=5)


def test_largest_first_gains_where_sizes_are_heavy_tailed() -> None:
    for replicas in (4, 8):
        once = burst(replicas, 4 * replicas, seed=1, cost=TAILED)
        flow = steady(replicas, 1500, 0.7, routers=2, seed=1, cost=TAILED)
        naive = simulate(once, "round_robin").makespan_seconds, p99(simulate(flow, "round_robin"))
        assert simulate(once).makespan_seconds < 0.9 * naive[0]
        assert p99(simulate(flow)) < 0.75 * naive[1]


def test_many_routers_do_not_flee_to_the_same_replicas() -> None:
    """With reports alone eight routers did worse than in turn; answers tell in time."""
    flow = steady(16, 2000, 0.8, routers=8, seed=1, cost=TAILED)
    told, naive = p99(simulate(flow)), p99(simulate(flow, "round_robin"))
    alone = p99(simulate(replace(flow, reports_alone=True)))
    assert told < 0.75 * naive < 0.75 * alone


@pytest.mark.parametrize("slower", [(1,), (1, 4)])
def test_routers_of_a_small_fleet_know_of_each_others_items(slower: tuple[int, ...]) -> None:
    """Without being told at once, four routers were 1.4 times as slow as one that knows all."""
    flow = steady(8, 2000, 0.7, routers=4, seed=1, cost=TAILED, slower=slower)
    assert p99(simulate(flow)) < 1.2 * p99(simulate(replace(flow, known="everything")))


def test_replicas_whose_items_end_before_the_news_of_them_comes_do_not_tell() -> None:
    flow = steady(16, 2000, 0.7, routers=8, seed=1, cost=TAILED.times(0.1))
    assert p99(simulate(flow)) < 1.5 * p99(simulate(replace(flow, known="everything")))


@pytest.mark.parametrize("replicas", [4, 8, 16, 64])
@pytest.mark.parametrize(("slower", "at_least_by_patches"), [(2, 1.3), (4, 2.2)])
def test_replicas_of_different_speed_are_balanced_by_seconds(
    replicas: int, slower: int, at_least_by_patches: float
) -> None:
    """p99 is at most 10 % above that of a router that knows everything, and far better than by
    patches. 1,500 requests are too few: the ratio of eight replicas at 4:1 is then 0.99 to 1.13,
    depending on the seed. With 4,000 it is 1.03 to 1.08."""
    flow = steady(replicas, 4000, 0.7, routers=1, seed=1, cost=TAILED, slower=(1, slower))
    seconds, patches = simulate(flow), simulate(replace(flow, known="patches"))
    known = p99(simulate(replace(flow, known="everything")))
    assert p99(seconds) < 1.1 * known
    assert p99(patches) > at_least_by_patches * known
    shares = [sum(seconds.patches[first::2]) for first in (0, 1)]
    assert shares[0] > 0.8 * slower * shares[1]


def test_sizes_stay_within_what_a_model_takes() -> None:
    random = Random(0)
    sizes = [heavy_tailed(random) for _ in range(5000)]
    assert min(sizes) >= 64
    assert max(sizes) == 16384
    assert all(size % 4 == 0 for size in sizes)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "simulation.json", tmp_path / "simulation.png"
    arguments = ["simulate", "--replicas", "2", "3", "--requests", "16"]
    assert cli.main([*arguments, "--json", str(report), "--plot", str(picture)]) == 0
    assert "largest_first" in capsys.readouterr().out
    assert [row["replicas"] for row in json.loads(report.read_text())] == [2] * 6 + [3] * 6
    assert picture.read_bytes().startswith(b"\x89PNG")
    unequal = [*arguments, "--slower", "2", "4", "--json", str(report), "--plot", str(picture)]
    picture.unlink()
    assert cli.main(unequal) == 0
    assert "by patches" in (shown := capsys.readouterr().out)
    assert "all known" in shown
    assert shown.index("speeds 2:1") < shown.index("speeds 4:1")
    assert [row["slower"] for row in json.loads(report.read_text())] == [2] * 12 + [4] * 12
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_p99_of_unequal_replicas_is_plotted_relative_to_a_router_that_knows_everything() -> None:
    p99_ms = {"largest_first": 11.0, "round_robin": 90.0, "by patches": 40.0, "all known": 10.0}
    rows = [
        {"slower": 4, "replicas": 8, "policy": policy, "p99_ms": ms}
        for policy, ms in p99_ms.items()
    ]
    (lines,) = relative_curves(rows).values()
    assert lines == {"largest_first": {8: 1.1}, "by patches": {8: 4.0}, "all known": {8: 1.0}}


def p99(outcome: Outcome) -> float:
    return sorted(outcome.latencies_seconds)[int(0.99 * len(outcome.latencies_seconds))]
