"""Each setting states when a change takes effect; what a reload compares, and how it shows the changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bascule.config.load import load, models_in
from bascule.config.reload_effect import ReloadEffect
from bascule.config.reloading import compare, effect_of, plan_reload
from bascule.config.settings import Settings


def fields(model: type[BaseModel], path: str = "") -> dict[str, FieldInfo]:
    """Return all settings by name; those of an array of tables once."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        key = f"{path}{field.alias or name}"
        tables = models_in(field.annotation)
        found |= fields(tables[0], f"{key}.") if tables else {key: field}
    return found


ALL = fields(Settings)
KEYS = {key: effect_of(tuple(key.split("."))) for key in ALL}


def test_each_setting_states_exactly_once_when_a_change_takes_effect() -> None:
    stated = {key: [each for each in field.metadata if isinstance(each, ReloadEffect)] for key, field in ALL.items()}
    assert {key for key, effects in stated.items() if len(effects) != 1} == set(), (
        "write the type as AtOnce[...], ForNew[...] or AtRestart[...]"
    )
    assert {key: effects[0] for key, effects in stated.items()} == KEYS


def test_an_array_of_tables_needs_a_restart_as_a_whole_or_not_at_all() -> None:
    arrays = [name for name, field in Settings.model_fields.items() if not isinstance(field.annotation, type)]
    restarts = {name: {effect is ReloadEffect.RESTART for key, effect in KEYS.items() if key.startswith(f"{name}.")} for name in arrays}
    assert "divert" in restarts
    assert {name for name, effects in restarts.items() if len(effects) != 1} == set()


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("", "[broker]\nport = 5673\n", ["broker.port (5672 -> 5673)"]),
        ('[admin]\ntoken = "one"\n', '[admin]\ntoken = "two"\n', ["admin.token (******** -> ********)"]),
        ('[broker]\nusers = {ann = "one"}\n', '[broker]\nusers = {bob = "one"}\n',
         ["broker.users.ann (******** -> unset)", "broker.users.bob (unset -> ********)"]),
        ("", '[[address]]\nmatch = "a.#"\nprefetch = 0\n', ['address["a.#"].prefetch (unset -> 0)', 'address["a.#"].match (unset -> a.#)']),
        ("", '[[permission]]\nmatch = "a"\nsend = ["*"]\n', ['permission["a"].match (unset -> a)', 'permission["a"].send (none -> *)']),
        ('[[queue]]\nname = "a"\n[[queue]]\nname = "b"\n', '[[queue]]\nname = "b"\n[[queue]]\nname = "a"\n', []),
    ],
)  # fmt: skip
def test_changes_have_names_and_masked_values(before: str, after: str, changes: list[str], tmp_path: Path) -> None:
    files = tmp_path / "one.toml", tmp_path / "two.toml"
    for file, text in zip(files, (before, after), strict=True):
        file.write_text(text)
    one, two = (load(file).settings for file in files)
    assert sorted(map(str, compare(one, two).changes)) == sorted(changes)


def test_settings_that_need_a_restart_keep_their_values_in_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "bascule.toml"
    file.write_text('[broker]\nport = 1\n[[divert]]\nname = "d"\nfrom = "x"\n')
    running = load(file)
    file.write_text('[broker]\nport = 2\nmax_queues = 7\n[[divert]]\nname = "d"\nfrom = "y"\n[[divert]]\nname = "e"\nfrom = "y"\n')
    planned = plan_reload(running, load(file))
    settings = planned.configuration.settings
    assert (settings.broker.port, settings.broker.max_queues, [each.from_address for each in settings.divert]) == (1, 7, ["x"])
    assert [each.key for each in planned.compared.applied] == ["broker.max_queues"]
    assert [each.key for each in planned.compared.needs_restart] == [
        "broker.port", 'divert["d"].from', 'divert["e"].name', 'divert["e"].from'
    ]  # fmt: skip
    again = plan_reload(planned.configuration, load(file))
    assert again.compared.needs_restart == planned.compared.needs_restart
    assert again.compared.applied == ()
