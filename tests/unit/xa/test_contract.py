"""The contracts that the documentation describes agree with the code."""

from __future__ import annotations

import doctest
from itertools import product
from pathlib import Path

import pytest

from bascule.testing.xa import Checked, ModelResource
from bascule.xa.branches import BranchStates
from bascule.xa.errors import DuplicateXid, OutOfOrder, UnknownXid
from bascule.xa.resource import NEXT, BranchState, Call
from bascule.xa.xid import branch, new_gtrid

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "xa.md"


def test_examples_on_xa_page_produce_documented_output() -> None:
    # doctest would take the closing fence of an example for output.
    text = PAGE.read_text().replace("```python\n", "").replace("\n```\n", "\n\n")
    example = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(example.examples) > 40
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert "".join(said) == ""


@pytest.mark.parametrize(("state", "call"), list(product(BranchState, Call)))
def test_branch_call_outside_of_state_table_is_refused(state: BranchState, call: Call) -> None:
    branches, xid = BranchStates(), branch(new_gtrid("shop", 0), "db")
    branches.move(xid, state)
    if (state, call) in NEXT:
        assert branches.check(xid, call) is NEXT[state, call]
        return
    wanted = UnknownXid if state is BranchState.NONE else DuplicateXid if call is Call.START else OutOfOrder
    with pytest.raises(wanted, match=call.value):
        branches.check(xid, call)


def test_checked_resource_allows_commit_of_branch_from_other_process() -> None:
    resource = ModelResource("db")
    xid = branch(new_gtrid("shop", 0), "db")
    resource.start(xid, timeout_s=1).append("work")
    resource.end(xid, success=True)
    resource.prepare(xid)
    Checked(resource).commit(xid)
    assert resource.durable.committed == ["work"]
