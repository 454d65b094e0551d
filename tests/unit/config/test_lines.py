"""Line numbers of TOML keys."""

from bascule.config.lines import key_lines, line_of

TEXT = '''a.b = 1
[kafka]
x = """
[not.a.table]
y = 2
"""
[kafka.client]
"sasl.password" = 'z' # comment
[[divert]]  # first
name = "one"
[[divert]]
name = "two"
[divert.inner]
deep = [
  1,
]
last = {k = 1}
'''


def test_line_numbers_of_keys_tables_and_arrays_of_tables_are_found() -> None:
    assert key_lines(TEXT) == {
        ("a",): 1,
        ("a", "b"): 1,
        ("kafka",): 2,
        ("kafka", "x"): 3,
        ("kafka", "client"): 7,
        ("kafka", "client", "sasl.password"): 8,
        ("divert", 0): 9,
        ("divert", 0, "name"): 10,
        ("divert", 1): 11,
        ("divert", 1, "name"): 12,
        ("divert", 1, "inner"): 13,
        ("divert", 1, "inner", "deep"): 14,
        ("divert", 1, "inner", "last"): 17,
    }


def test_key_without_line_of_its_own_has_the_line_of_its_table() -> None:
    assert line_of(("divert", 1, "inner", "last", "k"), key_lines(TEXT)) == 17
    assert line_of(("nowhere",), key_lines(TEXT)) is None
