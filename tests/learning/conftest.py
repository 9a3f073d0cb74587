"""Mathematics is tested in float32, whatever the machine has units for."""

import pytest

from blocktrain.learning import device


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: False)
