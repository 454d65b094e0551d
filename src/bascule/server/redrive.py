"""Dead letters of the pipelines over HTTP: an administrator looks at them, and asks the driver to redrive or discard some.

GET  /redrive/letters                     dead letters that wait; ?pipeline=&reason=&since_ms=&until_ms=&header=NAME:VALUE&count=&from=
GET  /redrive/letters/PARTITION/OFFSET    one of them with its content
POST /redrive/run, /redrive/discard       store a job for the driver; 202 once Kafka has stored it
GET  /redrive/jobs                        the jobs and what has become of them

A job concerns the dead letters that exist at the time of the request, or, with ``upto`` of a list, those that existed when it was made.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bascule.broker.errors import UnknownAddress
from bascule.core.errors import BasculeError, InvalidInput, Scope
from bascule.core.log import get_log
from bascule.core.masking import MASK, PropertyMask
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.jms.from_kafka import property_of
from bascule.kafka.redriving import LetterTopic, RedriveTopics
from bascule.server.admin_access import AdminRole, Principal
from bascule.server.admin_app import AdminPage
from bascule.server.admin_arguments import arguments_of, number_in
from bascule.server.listing import number_of
from bascule.server.shown_messages import content
from bascule.timeline.budget import SearchBudget
from bascule.writer.dead_letters import LetterFilter, PipelineDeadLetter, Place, dead_letter_of
from bascule.writer.redrive import PLACES_MAX, RedriveAction, RedriveJob, RedriveReport, RedriveState

if TYPE_CHECKING:
    from bascule.server.pipelines import PipelinePages

log = get_log(__name__)

#: Dead letters in one answer: by default, and at most.
LETTERS: Final = 100
LETTERS_MAX: Final = 1_000
#: How long one request reads the dead-letter topic, in seconds. An answer that is not complete says so.
READ_S: Final = 5.0
#: Longest pause of such a request, in seconds. It pauses as long as it works: it shares the interpreter with the event loop.
PAUSE_MAX_S: Final = 0.05
#: How long one request waits for Kafka: for offsets, and for an open transaction of a driver that was killed.
KAFKA_S: Final = 10.0
#: Characters of a value or header that an answer shows.
SHOWN_MAX: Final = 1_000
#: Jobs that are not finished yet: a further one is refused.
JOBS_MAX: Final = 100
#: How long finished jobs are listed, in ms.
KEPT_MS: Final = 7 * 24 * 3600 * 1000
#: The largest number of a partition, offset or time that Kafka has.
NUMBER_MAX: Final = 2**63 - 1
_FILTERS: Final = ("pipeline", "reason", "since_ms", "until_ms", "headers")


class TooManyJobs(InvalidInput):
    """The broker accepts no further job before the driver has finished some."""

    scope = Scope.OPERATION
    http_status = 409


class _Found(NamedTuple):
    """Dead letters as an answer describes them, the place where the next request continues (None: there are no more), and the topic."""

    letters: list[dict[str, Any]]
    next: Place | None
    topic: LetterTopic | None


class RedrivePages:
    """The pages about dead letters of one broker."""

    def __init__(self, pages: PipelinePages, redriving: Callable[[], RedriveTopics], bridge: str, mask: Callable[[], PropertyMask]) -> None:
        self._pages = pages
        self._redriving = redriving
        self._bridge = bridge
        self._mask = mask

    def paths(self) -> list[AdminPage]:
        """Return all paths. Dead letters show the content of messages, and so may the reasons in a list."""
        return [
            AdminPage("GET", "/redrive/letters", AdminRole.EDIT, self._list),
            AdminPage("GET", "/redrive/letters/{partition}/{offset}", AdminRole.EDIT, self._show),
            AdminPage("GET", "/redrive/jobs", AdminRole.VIEW, self._jobs),
            AdminPage("POST", "/redrive/run", AdminRole.MANAGE, partial(self._ask, RedriveAction.REDRIVE)),
            AdminPage("POST", "/redrive/discard", AdminRole.MANAGE, partial(self._ask, RedriveAction.DISCARD)),
        ]

    async def _list(self, request: Request) -> Response:
        count = number_of(request.query_params, "count", LETTERS, 0, LETTERS_MAX)
        start = _place(request.query_params["from"]) if "from" in request.query_params else (0, 0)
        chosen = _filter_of(_parameters(request))
        for name in sorted(filter(partial(_hides, self._mask()), chosen.headers)):
            raise InvalidInput(f"header: admin.masked_properties hides the values of {name!r:.60}; choose by another header")
        self._record("redrive list", "", request)
        found = await self._pages.beside(partial(self._read, chosen, count, start))
        return JSONResponse({
            "letters": found.letters, "complete": found.next is None, "next": _text_of(found.next), "upto": _upto(found.topic),
        })  # fmt: skip

    async def _show(self, request: Request) -> Response:
        partition, offset = (number_in(name, request.path_params[name], 0, NUMBER_MAX) for name in ("partition", "offset"))
        place = f"{partition}:{offset}"
        self._record("redrive show", place, request)
        shown = await self._pages.beside(partial(self._read_one, partition, offset))
        if shown is None:
            raise UnknownAddress(f"there is no dead letter of a pipeline at {place}")
        return JSONResponse(shown)

    async def _jobs(self, _request: Request) -> Response:
        known = await self._pages.known()
        reports = await self._pages.beside(self._reports)
        jobs = sorted(known.wishes.redrives.values(), key=lambda job: (job.at_ms, job.id))
        tried = known.reports.driver.redrives if known.reports.driver is not None else {}
        return JSONResponse([_described_job(job, reports.get(job.id) or RedriveReport(error=tried.get(job.id, ""))) for job in jobs])

    async def _ask(self, action: RedriveAction, request: Request) -> Response:
        """Store a job, audited."""
        principal: Principal = request.state.principal
        arguments = await arguments_of(request)
        verb = "redrive run" if action is RedriveAction.REDRIVE else "redrive discard"
        acting = self._pages.audit.acting(
            verb, str(arguments.get("pipeline", "")), who=principal.name, peer=principal.peer, arguments=self._audited(arguments)
        )
        with acting as done:
            principal.authorize(Permission.MANAGE, MANAGEMENT_ADDRESS)
            chosen = _meant(action, arguments)
            known = await self._pages.known()
            job = await self._pages.beside(partial(self._store, action, chosen, arguments, principal.name, known.wishes.redrives))
            done["job"] = job.id
        log.info("administrator action", who=principal.name, action=verb, arguments={"job": job.id}, answer={"job": job.id})
        return JSONResponse({"job": job.id, "action": action.value}, 202)

    # -- in a thread ---------------------------------------------------------------------------------------------------

    def _read(self, chosen: LetterFilter, count: int, start: Place) -> _Found:
        with closing(self._redriving()) as topics:
            topic = topics.letter_topic(KAFKA_S)
            if topic is None:
                return _Found([], None, None)
            done = topics.table(KAFKA_S).of(topic.topic_id)
            bounds = {
                each: (max(first, start[1]) if each == start[0] else first, topic.ends[each])
                for each, first in topic.firsts.items() if each >= start[0]
            }  # fmt: skip
            budget = SearchBudget(READ_S, pause_max_s=PAUSE_MAX_S)
            reached: Place | None = None

            def enough(behind: Place, size_bytes: int) -> bool:
                nonlocal reached
                budget.take(size_bytes)
                reached = behind if budget.spent else None
                return reached is not None

            letters: list[dict[str, Any]] = []
            for letter in topics.letters(bounds, done, chosen, self._bridge, enough):
                if len(letters) == count:
                    return _Found(letters, letter.place, topic)
                letters.append(_described(letter))  # without the value: the values of all of them may not fit into memory
            return _Found(letters, reached, topic)

    def _read_one(self, partition: int, offset: int) -> dict[str, Any] | None:
        with closing(self._redriving()) as topics:
            topic = topics.letter_topic(KAFKA_S)
            record = None if topic is None else topics.record(topic, partition, offset)
            letter = None if record is None else dead_letter_of(record)
            if topic is None or record is None or letter is None or letter.bridge != self._bridge:
                return None
            done = topics.table(KAFKA_S).of(topic.topic_id).has(letter.place)
        mask = self._mask()
        headers = [[name, MASK if _hides(mask, name) else _beginning(value or b"")] for name, value in record.headers]
        return {**_described(letter), "state": "done" if done else "waiting", "headers": headers, "value": _value_of(letter, mask)}

    def _reports(self) -> Mapping[str, RedriveReport]:
        with closing(self._redriving()) as topics:
            return topics.table(KAFKA_S).reports

    def _store(
        self, action: RedriveAction, chosen: LetterFilter, said: Mapping[str, Any], who: str, jobs: Mapping[str, RedriveJob]
    ) -> RedriveJob:  # fmt: skip
        now_ms, upto, accept_lost_marks = self._pages.now_ms(), said.get("upto"), said.get("accept_lost_marks") is True
        with closing(self._redriving()) as topics:
            reports = topics.table(KAFKA_S).reports
            topic = topics.letter_topic(KAFKA_S)
            if not accept_lost_marks:
                topics.check_marks(KAFKA_S)
        if topic is None:
            raise UnknownAddress("there is no dead-letter topic")
        finished = {each for each, report in reports.items() if each in jobs and report.state is not RedriveState.PENDING}
        if len(jobs) - len(finished) >= JOBS_MAX:
            raise TooManyJobs(f"{JOBS_MAX} jobs are not finished yet; wait until the driver has finished some (bascule redrive jobs)")
        topic_id, ends = (topic.topic_id, topic.ends) if upto is None else _parsed_upto(upto)
        # Dead letters from now on may be made by the job itself.
        ends = {each: min(end, topic.ends.get(each, 0)) for each, end in ends.items()}
        job = RedriveJob(uuid.uuid4().hex, action, topic_id, ends, chosen, who, now_ms, accept_lost_marks)
        # The job is stored last: if anything before it fails, the answer is an error, and the driver does nothing.
        self._pages.topics.forget([each for each in finished if now_ms - reports[each].at_ms > KEPT_MS])
        self._pages.topics.ask(job)
        return job

    def _record(self, action: str, on: str, request: Request) -> None:
        principal: Principal = request.state.principal
        self._pages.audit.check()
        self._pages.audit.record(action, on, who=principal.name, peer=principal.peer)

    def _audited(self, arguments: Mapping[str, Any]) -> str:
        """Return the arguments of a request without the values of masked headers."""
        headers = arguments.get("headers")
        if not isinstance(headers, dict):
            return json.dumps(arguments)
        mask = self._mask()
        return json.dumps({**arguments, "headers": {name: MASK if _hides(mask, name) else value for name, value in headers.items()}})


def _hides(mask: PropertyMask, header: str) -> bool:
    """Return whether the value of a header is not shown: by its name, or by that of the property that it becomes."""
    return mask.covers(header) or mask.covers(property_of(header))


def _value_of(letter: PipelineDeadLetter, mask: PropertyMask) -> str:
    """Return the beginning of the body of a message, or of the value of a record."""
    try:
        return _beginning(content(letter.value or b"", mask) if letter.address else letter.value or b"")
    except BasculeError as error:
        return f"({error})"


def _beginning(value: bytes) -> str:
    return value[: 4 * SHOWN_MAX].decode(errors="replace")[:SHOWN_MAX]


def _described(letter: PipelineDeadLetter) -> dict[str, Any]:
    return {
        "place": f"{letter.partition}:{letter.offset}",
        "pipeline": letter.pipeline,
        "source": letter.source._asdict(),
        "stage": letter.stage,
        "reason": letter.reason,
        "time_ms": letter.timestamp_ms,
        "redrives": letter.redrives,
        "bytes": letter.size_bytes,
        "tombstone": letter.value is None,
        "address": letter.address,
        "message": letter.message_id,
        "incomplete": letter.incomplete,
    }


def _described_job(job: RedriveJob, report: RedriveReport) -> dict[str, Any]:
    return {
        "job": job.id, "action": job.action.value, "state": report.state.value, "redriven": report.redriven, "failed": report.failed,
        "discarded": report.discarded, "left": report.left, "error": report.error, "by": job.by, "at_ms": job.at_ms,
        "pipeline": job.filter.pipeline, "reason": job.filter.reason,
    }  # fmt: skip


def _meant(action: RedriveAction, arguments: Mapping[str, Any]) -> LetterFilter:
    """Return which dead letters a request means. Raises InvalidInput."""
    known = ("places", "all", "upto", "confirm", "accept_lost_marks", *_FILTERS)
    if unknown := sorted(set(arguments).difference(known)):
        raise InvalidInput(f"unknown argument {unknown[0]!r:.60}; known here: {', '.join(known)}")
    chosen = [name for name in ("places", *_FILTERS) if name in arguments]
    if (arguments.get("all") is True) == bool(chosen):
        raise InvalidInput('say which dead letters are meant: "places", a filter, or "all": true')
    if action is RedriveAction.DISCARD and arguments.get("confirm") is not True:
        raise InvalidInput('discarded dead letters are never carried; repeat the request with "confirm": true')
    return _filter_of(arguments)


def _parameters(request: Request) -> dict[str, Any]:
    """Return the filter in the parameters of a request. Raises InvalidInput."""
    said: dict[str, Any] = {}
    headers: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name == "header":
            key, colon, text = value.partition(":")
            if not colon:
                raise InvalidInput(f"parameter header is {value!r:.60}; must be NAME:VALUE")
            headers[key] = text
        elif name in ("since_ms", "until_ms"):
            said[name] = number_in(name, value, 0, NUMBER_MAX)
        elif name in ("pipeline", "reason"):
            said[name] = value
        elif name not in ("count", "from"):
            raise InvalidInput(f"unknown parameter {name!r:.60}")
    return {**said, "headers": headers}


def _filter_of(arguments: Mapping[str, Any]) -> LetterFilter:
    """Return the filter in the arguments of a request. Raises InvalidInput."""
    texts = {name: arguments.get(name, "") for name in ("pipeline", "reason")}
    times = {name: arguments.get(name, 0) for name in ("since_ms", "until_ms")}
    headers = arguments.get("headers", {})
    if any(not isinstance(text, str) for text in texts.values()):
        raise InvalidInput('"pipeline" and "reason" must be texts')
    if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in times.values()):
        raise InvalidInput('"since_ms" and "until_ms" must be times in milliseconds since the epoch')
    if not isinstance(headers, dict) or any(not isinstance(value, str) for value in headers.values()):
        raise InvalidInput('"headers" must be an object of texts')
    places = arguments.get("places")
    if places is not None and (not isinstance(places, list) or not 0 < len(places) <= PLACES_MAX):
        raise InvalidInput(f'"places" must be a list of 1 to {PLACES_MAX} places, each PARTITION:OFFSET')
    chosen = None if places is None else tuple(map(_place, places))
    return LetterFilter(chosen, texts["pipeline"], texts["reason"], times["since_ms"], times["until_ms"], headers)


def _place(text: object) -> Place:
    partition, colon, offset = str(text).partition(":")
    if not colon:
        raise InvalidInput(f"place {text!r:.60} must be PARTITION:OFFSET")
    return number_in("partition", partition, 0, NUMBER_MAX), number_in("offset", offset, 0, NUMBER_MAX)


def _text_of(place: Place | None) -> str:
    return "" if place is None else f"{place[0]}:{place[1]}"


def _upto(topic: LetterTopic | None) -> str:
    """Return the ends of a topic as text."""
    return "" if topic is None else " ".join((topic.topic_id, *_ends(topic.ends.items())))


def _ends(ends: Iterable[tuple[int, int]]) -> Iterable[str]:
    return (f"{partition}:{end}" for partition, end in sorted(ends))


def _parsed_upto(upto: object) -> tuple[str, dict[int, int]]:
    topic_id, *ends = str(upto).split(" ")
    return topic_id, dict(map(_place, ends))
