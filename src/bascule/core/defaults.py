"""Defaults of settings that code without the settings also needs: the broker engine and the workers of the pipelines.

The settings take their defaults from here, so each value is defined once.
"""

from __future__ import annotations

from typing import Final

# -- addresses -----------------------------------------------------------------------------------------------------------

MAX_DELIVERY_ATTEMPTS: Final = 10
DEAD_LETTER_ADDRESS: Final = "DLQ"
EXPIRY_ADDRESS: Final = "ExpiryQueue"
DUPLICATE_WINDOW_COUNT: Final = 20_000
DUPLICATE_WINDOW_S: Final = 3600
AUTO_DELETE_AFTER_S: Final = 300
TRANSACTION_TIMEOUT_S: Final = 300
#: A queue of 1,000,000 messages needs 340 MB without bodies, and a selector that reads all of them 110 MB more. With 1 GiB this is below
#: the 80 % at which producers are blocked, and leaves room for a quarter of bodies, large transactions and busy connections.
MEMORY_BYTES: Final = 1 << 30
#: Ten times the memory limit: bodies of 10 KiB of a million messages.
SPILL_BYTES: Final = 10 << 30
#: The journal and logs may be on the same disk, and a full disk stops more than producers.
SPILL_FREE_BYTES: Final = 256 << 20
#: A SEND entry of the journal counts the queues of a message in 16 bits.
QUEUES_MAX: Final = 65_535
#: A SEND entry of the journal counts the exclusive diverts that take a message in 8 bits, and all of them may take the same message.
EXCLUSIVE_DIVERTS_MAX: Final = 255

#: The minimum of Kafka (group.min.session.timeout.ms).
SESSION_TIMEOUT_S: Final = 6.0

# -- pipelines -----------------------------------------------------------------------------------------------------------

DIVERT_TO: Final = "${address}"
DIVERT_KEY: Final = "message-id"
INGRESS_BODY: Final = "text"
INGRESS_UNBOUND: Final = "drop"
INGRESS_KEY_AS: Final = "none"
SPARK_MASTER: Final = "local[*]"
MAX_OFFSETS_PER_TRIGGER: Final = 50_000
TRANSACTION_RECORDS: Final = 10_000
TRANSACTION_BYTES: Final = 32 << 20
TRANSACTION_S: Final = 10
TARGET_PARTITIONS: Final = 1
REPLICATION_FACTOR: Final = 1
MIN_INSYNC_REPLICAS: Final = 1
#: Directory for all local data, and the environment variable that names another one.
DATA_DIR: Final = "bascule-data"
DATA_DIR_VARIABLE: Final = "BASCULE_EMBEDDED__DATA_DIR"
#: File in the data directory with a token for the admin server, which commands of the same user of the machine send.
OWNER_TOKEN_FILE: Final = "admin.token"
