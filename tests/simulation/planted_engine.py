"""Faults planted in the engine, its loader, its journaling, the fence and the readers of the journal."""

from __future__ import annotations

from typing import Final

from bascule.broker.duplicates import DuplicateViolation
from bascule.broker.journaling import JournalingViolation
from bascule.broker.loading import LoadingViolation
from bascule.broker.local_transactions import EngineViolation
from bascule.journal.fence import FenceViolation
from bascule.pipelines.ingress import IngressViolation
from tests.simulation.planted_broker import housekeepers
from tests.simulation.planting import Planted

PLANTED: Final = (
    Planted(
        FenceViolation.OLDER_EPOCHS_COUNT,
        "readers count records of an older epoch after the start of a newer one",
        ("unexpected", "divert-dup", "duplicated", "zombie-ack"),
    ),
    Planted(DuplicateViolation.REPEATS_ADMITTED, "the broker treats repeated sends as new messages", ("duplicated", "divert-dup")),
    Planted(
        JournalingViolation.ANSWER_BEFORE_STORED,
        "the broker answers before the record that the answer depends on is stored",
        ("lost", "zombie-ack"),
    ),
    Planted(
        JournalingViolation.TRANSACTION_IN_SEVERAL_RECORDS,
        "the entries of one JMS transaction are spread over several records",
        ("torn-tx",),
    ),
    Planted(
        JournalingViolation.ACKNOWLEDGEMENTS_IN_NEXT_RECORD,
        "the acknowledgements of a JMS transaction are in the record after the one with its messages",
        ("torn-tx", "duplicated"),
    ),
    Planted(EngineViolation.ROLLBACK_COMMITS, "a rolled-back JMS transaction is applied", ("unexpected",)),
    Planted(
        EngineViolation.REFUSAL_FORGOTTEN,
        "a JMS transaction is committed, or prepared, although the broker has refused one of its messages",
        ("lost", "torn-tx"),
    ),
    Planted(
        LoadingViolation.RESERVATIONS_FORGOTTEN,
        "a new epoch forgets which messages may have been delivered before",
        ("redelivered-unmarked",),
    ),
    Planted(LoadingViolation.DELIVERY_COUNTS_FORGOTTEN, "a new epoch forgets journaled delivery counts", ("redelivered-unmarked",)),
    Planted(LoadingViolation.INGRESS_POSITIONS_FORGOTTEN, "a new epoch reads the ingress topic from its start", ("ingress-dup",)),
    Planted(
        LoadingViolation.BRANCHES_LOADED_EMPTY,
        "a prepared branch loses the messages that it has received when a broker loads its state",
        ("duplicated",),
    ),
    Planted(LoadingViolation.BRANCH_ENDS_PASSED_OVER, "a broker that loads its state ignores that a branch has ended", ("unexpected",)),
    Planted(
        LoadingViolation.UNWANTED_MESSAGES_NOT_COUNTED,
        "a load counts only the messages of a record that the snapshot lists, and confuses messages",
        ("lost", "duplicated", "stuck"),
        housekeepers,
    ),
    Planted(LoadingViolation.UNANNOUNCED_SNAPSHOTS_COUNT, "a snapshot counts before the journal announces it", ("stuck",)),
    Planted(IngressViolation.OWN_RECORDS_TAKEN, "an ingress takes records that its own bridge wrote", ("loop",)),
)
