"""The flow of messages over HTTP: the pipelines that are known, with their states and rates, and the queues at their ends.

GET /flow    the pipelines of the configuration file and those that are defined at run time, for a drawing
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bascule.config.defined import default_of
from bascule.config.settings import Settings
from bascule.server.answers import AddressDepth, FlowAnswer, FlowDivert, FlowIngress, FlowState
from bascule.server.listing import check_known
from bascule.server.status import RetentionHoldStatus, hold_status, holds_of
from bascule.writer.control import KINDS, PipelineState

if TYPE_CHECKING:
    from bascule.server.node import Node
    from bascule.server.pipelines import KnownPipelines, PipelinePages


class FlowEnds(Protocol):
    """What a broker knows about the ends of pipelines. Called on its event loop."""

    def holds(self) -> Mapping[str, RetentionHoldStatus]:
        """Return what the journal is kept for on account of pipelines, by pipeline (``divert:orders``)."""

    def depth(self, address: str) -> AddressDepth | None:
        """Return the messages and consumers of the queue of an address; None if there is no such queue."""


class NodeFlowEnds:
    """The ends of pipelines at the broker of this process."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def holds(self) -> Mapping[str, RetentionHoldStatus]:
        """Return what the journal is kept for on account of pipelines, by pipeline."""
        return {hold.name: hold_status(hold) for hold in holds_of(self._node) if hold.keeper == "pipeline"}

    def depth(self, address: str) -> AddressDepth | None:
        """Return the messages and consumers of the queue of an address; None if there is no such queue."""
        engine = self._node.loaded_engine
        queue = None if engine is None else engine.addresses.anycast.get(address)
        return None if queue is None else AddressDepth(messages=queue.held_messages, consumers=len(queue.consumers))


class FlowPage:
    """The page with the flow of one broker."""

    def __init__(self, pages: PipelinePages, settings: Settings, ends: FlowEnds) -> None:
        self._pages = pages
        self._ends = ends
        #: The settings of the pipelines in this broker's own configuration, under the names of the configuration.
        self._configured = {f"{KINDS['divert']}{each.name}": each.model_dump(by_alias=True) for each in settings.divert}
        self._configured |= {f"{KINDS['ingress']}{each.name}": each.model_dump(by_alias=True) for each in settings.ingress}

    async def show(self, request: Request) -> Response:
        """Answer with the flow. Without Kafka it has the pipelines of the configuration alone, and the reason."""
        check_known(request.query_params, ())
        return JSONResponse(self._flow(*await self._pages.known_or_nothing()))

    def _flow(self, known: KnownPipelines, trouble: str) -> FlowAnswer:
        diverts: list[FlowDivert] = []
        ingresses: list[FlowIngress] = []
        holds = self._ends.holds()
        for pipeline in (*self._configured, *sorted(self._pages.names(known) - self._configured.keys())):
            kind, _, name = pipeline.partition(":")
            said = self._settings_of(known, pipeline)
            if said is None or kind not in KINDS:  # only a wish names it, so nobody knows its ends; or it is of a later version
                continue
            state = self._state(known, pipeline, enabled=said.get("enabled") is not False)
            if trouble:
                state["state"] = ""
            if kind == "divert":
                diverts.append(_divert(name, said, holds.get(pipeline), state))
            else:
                ingresses.append(_ingress(name, said, state))
        addresses = dict.fromkeys((*(each["from"] for each in diverts), *(each["to"] for each in ingresses)))
        return {
            "diverts": diverts, "ingresses": ingresses, "addresses": {each: self._ends.depth(_name_of(each)) for each in addresses},
            "trouble": trouble,
        }  # fmt: skip

    def _settings_of(self, known: KnownPipelines, pipeline: str) -> Mapping[str, Any] | None:
        """Return the settings of a pipeline as its definition has them, otherwise as its driver has reported them; None if nobody has."""
        if (configured := self._configured.get(pipeline)) is not None:
            return configured
        own, report = self._pages.definition(known, pipeline), known.reports.pipelines.get(pipeline)
        if own is not None:
            return own.settings
        return None if report is None or not report.definition else report.definition

    def _state(self, known: KnownPipelines, pipeline: str, *, enabled: bool) -> FlowState:
        found = self._pages.described(known, pipeline)
        return {
            "origin": found["origin"], "enabled": enabled and found["state"] != PipelineState.DISABLED.value, "state": found["state"],
            "wanted": found["wanted"], "lag": found["lag"], "records_per_s": found["records_per_s"], "error": found["error"],
        }  # fmt: skip


def _divert(name: str, said: Mapping[str, Any], pin: RetentionHoldStatus | None, state: FlowState) -> FlowDivert:
    text = partial(_text, "divert", said)
    return {
        "name": name, "from": text("from"), "selector": text("selector"), "to": text("to"),
        "exclusive": said.get("exclusive") is True, "group": text("group"), "pin": pin, **state,
    }  # fmt: skip


def _ingress(name: str, said: Mapping[str, Any], state: FlowState) -> FlowIngress:
    text, given = partial(_text, "ingress", said), said.get("topics") or ()
    topics = given if isinstance(given, list | tuple) else (given,)
    return {
        "name": name, "topics": list(map(str, topics)), "pattern": text("pattern"), "to": text("to"), "routing": text("routing"), **state,
    }  # fmt: skip


def _text(kind: str, said: Mapping[str, Any], name: str) -> str:
    """Return a setting as text. A definition of a later version, or of another writer, may have any value, or leave it out."""
    value = said.get(name)
    if value is None:
        value = default_of(kind, name)
    return "" if value is None else str(value)


def _name_of(target: str) -> str:
    """Return the address in the target of an ingress, which may begin with queue:// or topic://."""
    _, scheme, name = target.partition("://")
    return name if scheme else target
