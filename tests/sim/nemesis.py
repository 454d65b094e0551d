"""The troubles of a simulated run, by chance: processes are killed, suspended and replaced, connections break, nodes and clocks fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tests.sim.broker import Broker
from tests.sim.cluster import NODES
from tests.sim.control import CONTROL
from tests.sim.kafka import SNAPSHOTS, STORE
from tests.sim.world import Process
from tests.sim.writer import POSITION_PARTITIONS, POSITIONS, committed_offset

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

#: How long a broker may not know that another one was elected.
ELECTION_MS: Final = 250.0
#: How soon a broker that has begun an epoch is replaced while it still reads.
OVERTAKE_MS: Final = 25.0
#: The duration of one or two steps of housekeeping.
STEP_MS: Final = 8.0
#: The longest outage of a database or the decision log.
OUTAGE_MS: Final = 200.0
#: The longest jump of a wall clock: a quarter of the time for which a broker knows a repeated message. The clocks of two brokers may jump
#: apart, and each may jump from one side to the other.
CLOCK_JUMP_MS: Final = 840_000.0


class Nemesis:
    """The source of troubles of a run. ``troubles`` has the relative frequency of each."""

    def __init__(self, run: Simulation) -> None:
        self.run = run
        self.world = run.world
        self.random = run.world.random
        self.troubles: dict[str, float] = {}
        self.pause_ms = 60.0
        self.frailty = 0.0  # how often a broker is killed at a step of its housekeeping
        self.hesitation = 0.0  # how often a broker that takes over is slow

    def draw(self) -> None:
        """Draw the troubles of this seed."""
        pick = self.random
        self.troubles = {name: pick.random() for name in TROUBLES if pick.random() < 0.5}
        self.pause_ms = pick.choice((15.0, 60.0, 200.0))

    def begin(self) -> None:
        """Cause troubles from now on, until all is healed."""
        self.world.after(self.random.random() * 40, self._trouble)

    def _trouble(self) -> None:
        if self.world.now_ms < self.run.healed_ms:
            if self.troubles:
                name = self.random.choices(list(self.troubles), list(self.troubles.values()))[0]
                TROUBLES[name](self)
            self.world.after(self.random.random() * self.pause_ms * 2, self._trouble)

    def kill_broker(self) -> None:
        """Kill a broker (kill -9). The same or the other one starts."""
        broker = self.random.choice(self.run.brokers)
        if broker.serving:
            self.world.note("kill broker", broker.process.name)
        self.kill(broker, broker.process)

    def take_over(self) -> None:
        """Let the broker that does not serve begin an epoch, as if the other were dead."""
        for broker in self.random.sample(self.run.brokers, len(self.run.brokers)):
            if not broker.serving:
                if not broker.process.alive or not broker.process.stopped:
                    if any(other.serving for other in self.run.brokers):
                        self.world.note("take over", broker.name)
                    if broker.standing_by:
                        self.world.note("elect standby", broker.name)
                        broker.elected.keep(None)
                    else:
                        broker.kill()
                        broker.hesitates = self.world.chance(self.hesitation)
                        broker.launch()
                        if broker.hesitates:
                            self.world.after(self.random.random() * OVERTAKE_MS, self._overtake, broker, broker.process)
                    self._elected(broker)
                return

    def _overtake(self, late: Broker, process: Process) -> None:
        """Elect another broker while one that has begun an epoch still reads."""
        if late.process is process and process.alive and not late.serving and self.world.now_ms < self.run.healed_ms:
            for broker in self.run.brokers:
                if broker is not late:
                    self.world.note("overtake", late.process.name)
                    broker.kill()
                    broker.launch()
                    self._elected(broker)

    def _elected(self, winner: Broker) -> None:
        """Tell the other brokers of an election some time later. What they do until then must not count."""
        for broker in self.run.brokers:
            if broker is not winner and broker.process.alive:
                broker.process.after(self.random.random() * ELECTION_MS, broker.lose_election, broker.epoch)

    def ensure_broker(self) -> None:
        """Make sure that a broker serves, as an election would."""
        if not any(broker.serving and broker.process.alive for broker in self.run.brokers):
            self.take_over()
        for broker in self.run.brokers:
            if broker.stands_by and not broker.process.alive:
                broker.launch(elected=False)

    def replaced(self) -> None:
        """Note that a broker has found that it must not serve. The election decides whether another one does."""
        self.world.after(self.random.random() * ELECTION_MS, self.ensure_broker)

    def stop_broker(self) -> None:
        """Suspend a broker (SIGSTOP), perhaps with a takeover meanwhile."""
        process = self.random.choice(self.run.brokers).process
        self._note_if_alive("stop broker", process)
        self._stop([process])
        self.world.after(self.random.random() * 300, process.go_on)
        if self.random.random() < 0.7:
            self.world.after(self.random.random() * 100, self.take_over)

    def housekeeping(self, broker: Broker) -> None:
        """Kill a broker (kill -9) at a step of a round, or soon after."""
        if self.world.chance(self.frailty):
            self.world.note("kill housekeeper", broker.process.name)
            self.world.after(self.random.random() * STEP_MS, self.kill, broker, broker.process)

    def kill(self, broker: Broker, process: Process) -> None:
        if broker.process is process:
            broker.kill()
            self.world.after(self.random.random() * 40, self.ensure_broker)

    def restart_standby(self) -> None:
        """Restart a standby: it reads again, while the serving broker continues its housekeeping."""
        for broker in self.run.brokers:
            if broker.standing_by:
                self.world.note("restart standby", broker.process.name)
                broker.kill()
                broker.launch(elected=False)

    def cut_clients(self) -> None:
        """Break connections."""
        for broker in self.run.brokers:
            for connection in list(broker.connections):
                if self.random.random() < 0.6:
                    self.world.note("cut clients", connection.name)
                    connection.drop()

    def kill_manager(self) -> None:
        """Kill a process of the transaction manager (kill -9). If it was the last one, another one starts."""
        for manager in self.run.xa_workload.one():
            self.world.note("kill manager", manager.name)
            manager.kill()
            self.world.after(self.random.random() * 60, self.run.xa_workload.supervise)

    def stop_manager(self) -> None:
        """Suspend a process of the manager (SIGSTOP). Another process may recover meanwhile."""
        for manager in self.run.xa_workload.one():
            self.world.note("stop manager", manager.name)
            self._stop([manager.process])
            self.world.after(self.random.random() * 300, manager.process.go_on)
            if self.random.random() < 0.7:
                self.run.xa_workload.launch(manager.manager)

    def lose_log(self) -> None:
        """Make the decision log unavailable for a while."""
        self.run.xa_workload.lose("log", self.random.random() * OUTAGE_MS)

    def lose_database(self) -> None:
        """Make the databases of the managers unavailable for a while."""
        self.run.xa_workload.lose("database", self.random.random() * OUTAGE_MS)

    def force_branch(self) -> None:
        """End a prepared branch as an administrator."""
        self.run.xa_workload.administrator.force()

    def kill_driver(self) -> None:
        """Kill the newest driver (kill -9), or only start another one."""
        if self.random.random() < 0.8:
            driver = self.run.pipelines.drivers[-1]
            self._note_if_alive("kill driver", driver.process)
            driver.kill()
        self.run.pipelines.launch()

    def stop_driver(self) -> None:
        """Suspend the driver with its workers (SIGSTOP); another one takes over."""
        driver = self.run.pipelines.drivers[-1]
        self._note_if_alive("stop driver", driver.process)
        stopped = [driver.process, *(worker.process for worker in driver.workers)]
        self._stop(stopped)
        for process in stopped:
            self.world.after(self.random.random() * 400, process.go_on)
        if self.random.random() < 0.7:
            self.run.pipelines.launch()

    def kill_worker(self) -> None:
        """Kill a Spark worker (kill -9)."""
        workers = [worker for driver in self.run.pipelines.drivers for worker in driver.workers if worker.process.alive]
        if workers:
            process = self.random.choice(workers).process
            self.world.note("kill worker", process.name)
            process.kill()

    def stop_worker(self) -> None:
        """Suspend a worker. Spark may try its task elsewhere."""
        workers = [worker for driver in self.run.pipelines.drivers for worker in driver.workers if worker.process.alive]
        if workers:
            process = self.random.choice(workers).process
            self.world.note("stop worker", process.name)
            self._stop([process])
            self.world.after(self.random.random() * 300, process.go_on)

    def _stop(self, processes: list[Process]) -> None:
        """Suspend processes of one machine, with or without their monotonic clocks."""
        if self.world.chance(0.4):
            self.world.note("suspend machine", processes[0].machine)
            for process in processes:
                process.suspend()
        else:
            for process in processes:
                process.stop()

    def jump_clock(self) -> None:
        """Let the wall clock of a machine jump, forwards or backwards."""
        processes = (
            *(broker.process for broker in self.run.brokers),
            *(manager.process for manager in self.run.xa_workload.processes),
            *(driver.process for driver in self.run.pipelines.drivers),
        )
        machine = self.random.choice(processes).machine
        self.world.note("jump clock", machine)
        self.world.offsets_ms[machine] = self.random.choice((-1, 1)) * self.random.choice((40.0, 2_000.0, CLOCK_JUMP_MS))

    def change_leader(self) -> None:
        """Let a node of Kafka hand its partitions over to others."""
        self.run.kafka.cluster.change_leaders()

    def cut_off_node(self) -> None:
        """Cut a node of Kafka off from its peers, but not from its clients."""
        self.run.kafka.cluster.leave(self.random.choice(NODES), cut_off=True)

    def stop_node(self) -> None:
        """Stop a node of Kafka, and start it again."""
        self.run.kafka.cluster.leave(self.random.choice(NODES), cut_off=False)

    def delete_old_input(self) -> None:
        """Delete records of an application's topic that are older than the ingress's position, as retention does."""
        for ingress, partition in self.run.pipelines.sources():
            if ingress is not None and partition.topic.startswith("in."):
                end = min(partition.stable, committed_offset(self.run.kafka, self.run.pipelines.key(ingress, partition)))
                if end > partition.start:
                    self.world.note("delete old input", partition.topic)
                    partition.trim(end)

    def compact(self) -> None:
        """Run the log cleaner."""
        control = [(CONTROL, 0)] if self.run.late is not None else []
        for topic, index in (*((POSITIONS, index) for index in range(POSITION_PARTITIONS)), (SNAPSHOTS, 0), (STORE, 0), *control):
            partition = self.run.kafka.partition(topic, index)
            if partition.compact(self.random.randint(0, partition.end)):
                self.world.note("compact", f"{topic}-{index}")

    def _note_if_alive(self, trouble: str, process: Process) -> None:
        if process.alive:
            self.world.note(trouble, process.name)


TROUBLES: Final[dict[str, Callable[[Nemesis], None]]] = {
    "kill broker": Nemesis.kill_broker,
    "take over": Nemesis.take_over,
    "stop broker": Nemesis.stop_broker,
    "restart standby": Nemesis.restart_standby,
    "cut clients": Nemesis.cut_clients,
    "kill manager": Nemesis.kill_manager,
    "stop manager": Nemesis.stop_manager,
    "force branch": Nemesis.force_branch,
    "lose log": Nemesis.lose_log,
    "lose database": Nemesis.lose_database,
    "kill driver": Nemesis.kill_driver,
    "stop driver": Nemesis.stop_driver,
    "kill worker": Nemesis.kill_worker,
    "stop worker": Nemesis.stop_worker,
    "jump clock": Nemesis.jump_clock,
    "change leader": Nemesis.change_leader,
    "cut off node": Nemesis.cut_off_node,
    "stop node": Nemesis.stop_node,
    "delete old input": Nemesis.delete_old_input,
    "compact": Nemesis.compact,
}
