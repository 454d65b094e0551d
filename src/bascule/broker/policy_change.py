"""A change of the owner's settings while the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from bascule.broker.containment import ErrorKind
from bascule.broker.errors import ResourceLimit
from bascule.broker.order import Line
from bascule.broker.policy import BLOCK, DROP, Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.turns import Work

if TYPE_CHECKING:
    from bascule.broker.engine import Engine

#: Steps to find the settings of a queue or window among thousands of rules, to change those of a queue, and to create one.
LOOK_STEPS: Final = 50
CHANGE_STEPS: Final = 100
CREATE_STEPS: Final = 200
#: Steps to wake one consumer.
WAKE_STEPS: Final = 2


def check_policy(engine: Engine, policy: Policy) -> None:
    """Check that there is room for the queues that a policy names. Raises ResourceLimit."""
    new = sum(name not in engine.addresses.anycast for name in policy.queues)
    if new and len(engine.addresses.queues) + new > policy.queues_max:
        raise ResourceLimit(
            f"[[queue]] names {new} new queues; with the {len(engine.addresses.queues)} queues and subscriptions that exist, the limit of"
            f" {policy.queues_max} (broker.max_queues) would be exceeded"
        )


def change_policy(engine: Engine, policy: Policy, refused: Callable[[str, ResourceLimit], None] = lambda _name, _error: None) -> None:
    """Use other settings of the owner, for all queues that exist. The queues follow in this turn and the next ones.

    A message keeps the expiry that it got on its arrival. A queue that begins to drop non-persistent messages drops only those that arrive
    from then on. Call ``check_policy`` before. ``refused`` is called for a queue of the policy that cannot be created: a client has been
    faster.
    """
    engine.destinations.policy = engine.sending.policy = engine.intake.policy = policy
    engine.local_transactions.ms_max = policy.transaction_ms_max
    engine.addresses.use_policy(policy)
    engine.turns.begin(_created(engine, policy, refused))
    engine.turns.begin(_followed(engine))


def _created(engine: Engine, policy: Policy, refused: Callable[[str, ResourceLimit], None]) -> Work:
    """Create the queues of a policy, unless it is replaced meanwhile. Yields steps."""
    for name in policy.queues:
        if engine.policy is not policy:
            return
        if name in engine.addresses.anycast:
            yield 1
            continue
        try:
            engine.queue(name)
        except ResourceLimit as error:
            refused(name, error)
        except Exception as error:
            engine.journaling.errors.contain(ErrorKind.WORK, error, queue=name)
        yield CREATE_STEPS


def _followed(engine: Engine) -> Work:
    """Let queues and duplicate windows follow the policy of the engine, which may change again meanwhile. Yields steps."""
    for queue in list(engine.addresses.queues.values()):
        try:
            yield from _follow(engine, queue)
        except Exception as error:  # of this queue, and not of the others
            engine.journaling.errors.contain(ErrorKind.WORK, error, queue=queue.name)
    for address, window in list(engine.windows.by_address.items()):
        window.count_max, window.period_ms = engine.destinations.window_limits(address)
        yield LOOK_STEPS
    engine.addresses.use_policy(engine.policy)  # routes that were worked out meanwhile


def _follow(engine: Engine, queue: BrokerQueue) -> Work:
    """Let a queue follow the policy of the engine. Yields steps."""
    settings, before = engine.policy.of(queue.address), queue.settings
    if queue.deleted or settings == before:
        yield LOOK_STEPS
        return
    queue.settings = settings
    if (settings.when_full == DROP) is not (queue.volatile is not None):
        queue.volatile = Line() if settings.when_full == DROP else None
    if queue.blocked and (settings.when_full != BLOCK or not queue.full()):
        engine.deliveries.go_on(queue)
    if settings.auto_delete_ms != before.auto_delete_ms:
        queue.idle_since_ms = 0
    if settings.subscription_expiry_ms != before.subscription_expiry_ms:
        queue.expiry_watched = False
    engine.look_for_use(queue)
    yield CHANGE_STEPS
    consumers = list(queue.consumers)
    for consumer in consumers:  # their limits may have changed
        if consumer in queue.consumers:
            engine.wake(queue, consumer)
        yield WAKE_STEPS
