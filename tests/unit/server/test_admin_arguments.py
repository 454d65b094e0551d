"""Numbers in the parameters of requests to the admin server."""

from __future__ import annotations

import pytest

from bascule.core.errors import InvalidInput
from bascule.server.admin_arguments import number_in


@pytest.mark.parametrize("text", ["", "-1", "1.0", "+1", "\u0663", "10", "9" * 5000, "0x1"])
def test_all_numbers_of_requests_are_checked_by_one_rule(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^n '.{0,20} must be a number from 0 to 9$"):
        number_in("n", text, 0, 9)
    assert number_in("n", "007", 0, 9) == 7
