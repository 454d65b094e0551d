"""Masks of secrets in texts for people."""

from __future__ import annotations

import re
from typing import Final

#: What is shown instead of a secret.
MASK: Final = "********"
_PASSWORD_OPTION: Final = re.compile(r"(password=)[^&)\s]*", re.IGNORECASE)


def mask_url(text: str) -> str:
    """Return a URL, valid or not, or a text that quotes one, without user names and passwords.

    Everything before the last ``@`` is masked, from the first ``//`` on: in an invalid URL nothing else says where a password ends.
    """
    place = r"//.*@" if "//" in text else r"[^\s'\"]*@"
    masked = re.sub(place, f"//{MASK}@" if "//" in text else f"{MASK}@", text, flags=re.DOTALL)
    return _PASSWORD_OPTION.sub(rf"\1{MASK}", masked)
