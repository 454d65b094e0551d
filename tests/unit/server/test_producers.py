"""What a producer's link is given."""

from __future__ import annotations

from bascule.amqp.frames import frame_head
from bascule.amqp.performatives import Transfer
from bascule.server.links import PRODUCER_CREDIT
from tests.unit.server.served import Client, Served, run_async


@run_async
async def test_a_producer_that_gives_messages_up_gets_credit_again() -> None:
    served = Served()
    client = Client(served)
    link = client.producer("q")
    for number in range(PRODUCER_CREDIT):
        assert link.credit > 0
        link.credit -= 1
        link.delivery_count += 1
        client.session._next_outgoing_id += 2
        begun = Transfer(link.handle, number, b"%d" % number, more=True)
        client.amqp.out += [
            frame_head(client.session.channel, begun, 1) + b"x",
            frame_head(client.session.channel, Transfer(link.handle, aborted=True), 0),
        ]
        served.settle(client)
    assert link.credit >= PRODUCER_CREDIT // 2
