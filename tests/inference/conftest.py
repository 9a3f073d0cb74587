"""What tests of inference share."""

import pytest


@pytest.fixture(autouse=True)
def weights_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laid-out weights go to a folder of this run, not to the user's cache."""
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
