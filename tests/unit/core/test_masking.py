"""Passwords do not appear in error texts and reprs."""

from __future__ import annotations

import pytest

from bascule import ConnectionFactory
from bascule.cli.admin import AdminApiClient
from bascule.client.core import ConnectionSettings
from bascule.client.url import BrokerUrl
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.masking import MASK, NO_MASK, PropertyMask, mask_url

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://a:1", "amqp://a:1"),
        (f"amqp://ann:{SECRET}@a:1/x", f"amqp://{MASK}@a:1/x"),
        (f"amqp://ann:{SECRET}/{SECRET}@a", f"amqp://{MASK}@a"),
        (f"amqp://ann:{SECRET}@{SECRET}@a", f"amqp://{MASK}@a"),
        (f"http://a?jms.username=ann&jms.password={SECRET}&x=1", f"http://a?jms.username=ann&jms.password={MASK}&x=1"),
        (f"failover:(amqp://ann:{SECRET}@a,amqp://ann:{SECRET}@b", f"failover:(amqp://{MASK}@b"),
        (f"ann:{SECRET}@a", f"{MASK}@a"),
    ],
)
def test_url_is_shown_without_its_user_and_password(url: str, shown: str) -> None:
    assert mask_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        f"http://ann:{SECRET}@a",
        f"amqp://ann:{SECRET}@a/queue",
        f"amqp://ann:{SECRET}/x@a",
        f"amqp://ann:{SECRET}@a:port",
        f"amqp://ann:{SECRET}@[a",
        f"amqp://ann:{SECRET}\u2100@a",
        f"ann:{SECRET}@a",
        f"failover:(amqp://ann:{SECRET}@a,http://ann:{SECRET}@b)",
        f"failover:(amqp://ann:{SECRET}@a",
        f"http://a?jms.password={SECRET}",
    ],
)
def test_error_for_an_invalid_broker_url_does_not_show_the_password(url: str) -> None:
    with pytest.raises(InvalidInput, match="invalid broker URL") as raised:
        BrokerUrl.parse(url)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None or raised.value.__suppress_context__


def test_connection_settings_do_not_show_the_password_in_their_repr() -> None:
    url = f"amqp://ann:{SECRET}@broker"
    shown = [repr(ConnectionFactory(url, password=SECRET)), repr(BrokerUrl.parse(url)), repr(ConnectionSettings("ann", SECRET))]
    assert [text for text in shown if SECRET in text] == []
    assert "ann" in shown[1]


def test_error_for_an_invalid_url_of_an_admin_server_does_not_show_the_password() -> None:
    for url in (f"http://ann:{SECRET}@127.0.0.1:1", f"ann:{SECRET}@x"):
        with pytest.raises((InvalidInput, Unavailable), match=r"must not have a password|must begin with https") as raised:
            AdminApiClient(url, None).look("status")
        assert SECRET not in str(raised.value)


def test_values_of_masked_properties_are_not_shown() -> None:
    mask = PropertyMask(["password", "*Token*", "card?"])
    properties = {"Password": "a", "passwords": "b", "api_TOKEN": 1, "card1": "c", "card": "d", "[x]": "e"}
    assert mask.shown(properties) == {"Password": MASK, "passwords": "b", "api_TOKEN": MASK, "card1": MASK, "card": "d", "[x]": "e"}
    assert NO_MASK.shown(properties) == properties
