"""A broker on a Kafka of three nodes, some reachable for clients only or for peers only: nothing is lost or duplicated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.cluster_load import CONFIG, Load, storm
from tests.support.divided_cluster import DividedCluster
from tests.support.system import System, wait_for

PREFIX = "divided"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DividedCluster]:
    with DividedCluster(tmp_path_factory.mktemp("cluster"), divide_clients=True) as running:
        yield running


@pytest.fixture(scope="module")
def system(cluster: DividedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(cluster.bootstrap, tmp_path_factory.mktemp("broker"), prefix=PREFIX, config=CONFIG) as running:
        yield running


@pytest.fixture
def load(system: System, cluster: DividedCluster, tmp_path: Path) -> Iterator[Load]:
    with storm(system, tmp_path) as clients_at_work:
        load = Load(clients_at_work, system, cluster, PREFIX)
        load.goes_on()
        load.whole()
        yield load
        cluster.heal()


@pytest.mark.slow
def test_broker_continues_when_a_leader_is_unreachable_only_for_its_peers(load: Load, cluster: DividedCluster) -> None:
    former = load.leader()
    cluster.isolate(former)
    load.goes_on()
    wait_for(lambda: load.leader(but_for=former) is not former, "another leader")
    cluster.heal()
    load.goes_on()
    load.whole()
    load.judge()


def test_sends_wait_when_a_leader_is_unreachable_only_for_the_broker(load: Load, system: System, cluster: DividedCluster) -> None:
    """Kafka elects no other leader: it does not know which nodes clients reach."""
    cluster.shut_out(load.leader())
    wait_for(lambda: not system.status()["serving"], "the broker to find out")
    cluster.heal()
    load.goes_on()
    load.whole()
    load.judge()


@pytest.mark.slow
def test_broker_continues_when_a_node_that_leads_no_needed_partition_is_unreachable(load: Load, cluster: DividedCluster) -> None:
    needed = (load.leader(), load.coordinator())
    cluster.shut_out(next(node for node in cluster.nodes if node not in needed))
    load.goes_on()
    cluster.heal()
    load.goes_on()
    load.whole()
    load.judge()
