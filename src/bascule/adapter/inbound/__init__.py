"""Kafka records into endpoints: at least once, or each within a transaction of its own."""

from bascule.adapter.inbound.activation import Activation, Status
from bascule.adapter.inbound.adapter import ResourceAdapter
from bascule.adapter.inbound.log import InboundLog
from bascule.adapter.inbound.record import Record
from bascule.adapter.inbound.spec import ActivationSpec, Backoff, Order, Start, Xa

__all__ = ["Activation", "ActivationSpec", "Backoff", "InboundLog", "Order", "Record", "ResourceAdapter", "Start", "Status", "Xa"]
