"""Rules that map a name in a certificate to a user, as Kafka reads them."""

from __future__ import annotations

import pytest

from bascule.config import Settings
from bascule.config.user_rules import UserRule, mapped

NAME = "CN=Service.Ann,OU=sales,O=Acme"


@pytest.mark.parametrize(
    ("rules", "user"),
    [
        (["RULE:CN=(.*?),.*/$1/"], "Service.Ann"),
        (["RULE:CN=(.*?),.*/$1/L"], "service.ann"),
        (["RULE:CN=(.*?),OU=(.*?),.*/$1@$2/U"], "SERVICE.ANN@SALES"),
        (["RULE:CN=bob,.*/bob/", "RULE:^.*OU=sales.*$/seller/", "DEFAULT"], "seller"),
        (["RULE:CN=bob,.*/bob/", "DEFAULT"], NAME),
        (["RULE:CN=Service/x/"], None),  # a pattern must match the whole name
        (["RULE:CN=(.*?),.*/$1\\/\\$1/"], "Service.Ann/$1"),
        (["RULE:CN=(Other)?Service.*/x$1/"], "x"),
        (["RULE:.*/$0/"], NAME),
        ([], None),
    ],
)
def test_first_rule_that_matches_the_whole_name_gives_the_user(rules: list[str], user: str | None) -> None:
    assert mapped(map(UserRule.parse, rules), NAME) == user


@pytest.mark.parametrize(
    ("rule", "name", "user"),
    [
        ("RULE:(.*)/$1/L", "\N{KELVIN SIGN}ate", "\N{KELVIN SIGN}ate"),
        ("RULE:(.*)/$1/U", "ma\N{LATIN SMALL LETTER LONG S}ter", "MA\N{LATIN SMALL LETTER LONG S}TER"),
        ("RULE:(.*)/$1/U", "stra\N{LATIN SMALL LETTER SHARP S}e", "STRA\N{LATIN SMALL LETTER SHARP S}E"),
        ("RULE:(.*)/$1/L", "\N{LATIN CAPITAL LETTER E WITH ACUTE}VA", "\N{LATIN SMALL LETTER E WITH ACUTE}va"),
    ],
)
def test_case_of_other_letters_makes_no_name_of_plain_letters(rule: str, name: str, user: str) -> None:
    assert UserRule.parse(rule).user(name) == user


def test_slash_in_a_pattern_is_escaped() -> None:
    assert UserRule.parse(r"RULE:spiffe:\/\/acme\/(.*)/$1/").user("spiffe://acme/ann") == "ann"


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ("CN=(.*)", "must be DEFAULT or RULE:PATTERN/REPLACEMENT/"),
        ("RULE:a/b", "must be DEFAULT or RULE:PATTERN/REPLACEMENT/"),
        ("RULE:a/b/X", "must be DEFAULT or RULE:PATTERN/REPLACEMENT/"),
        ("RULE:a/b/c/", "must be DEFAULT or RULE:PATTERN/REPLACEMENT/"),
        ("RULE:(/b/", "no regular expression"),
        (r"RULE:(a)\1/b/", "back-references, .* are not supported"),
        ("RULE:(a)/$2/", r"\$2 names a group that the pattern does not have"),
    ],
)
def test_invalid_rule_is_refused_also_in_the_settings(rule: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        UserRule.parse(rule)
    with pytest.raises(ValueError, match=error):
        Settings.model_validate({"broker": {"tls": {"certificate": "c", "client_ca": "a", "user_rules": [rule]}}})


@pytest.mark.parametrize("key", [{"user_from": "san_dns"}, {"user_rules": ["DEFAULT"]}, {"only_known_users": True}])
def test_setting_about_certificates_without_an_authority_is_refused(key: dict[str, object]) -> None:
    for table in ("broker", "admin"):
        with pytest.raises(ValueError, match="is set without client_ca"):
            Settings.model_validate({table: {"tls": {"certificate": "c", **key}}})
