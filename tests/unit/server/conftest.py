from __future__ import annotations

import shutil

import pytest

from tests.support.certificates import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl makes the certificates of this test")
    return Authority(tmp_path_factory.mktemp("certificates"))
