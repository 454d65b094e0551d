import pytest

from tests.support.java import SOURCE_DIR, compiled


@pytest.mark.parametrize("program", sorted(path.stem for path in SOURCE_DIR.glob("*.java")))
def test_every_java_program_compiles(program: str) -> None:
    assert (compiled(program) / f"{program}.class").is_file()
