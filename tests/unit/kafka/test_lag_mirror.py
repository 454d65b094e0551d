"""The mirror of the lag, which only monitoring uses, delays nothing else."""

import threading

from bascule.embedded.process import free_port
from bascule.kafka.history import LagMirror

ENDED_S = 20.0


def test_lag_mirror_closes_while_kafka_is_away() -> None:
    mirror = LagMirror({"bootstrap.servers": f"127.0.0.1:{free_port()}", "log_level": 0}, "mirror")
    mirror.show({("orders", 0): 7})
    closed = threading.Event()

    def close() -> None:
        mirror.close()
        closed.set()

    threading.Thread(target=close, daemon=True).start()
    assert closed.wait(ENDED_S)
