from tests.attacks.siege import Siege


def test_x(siege: Siege) -> None:
    assert siege.raw(b"GET /v1/hello HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 200
