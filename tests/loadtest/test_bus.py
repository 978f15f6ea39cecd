"""`python -m loadtest.bus` over a real Redis, with few tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtest.bus import main
from tests.support.redis_servers import redis_server


@pytest.mark.slow
def test_main_measures_the_pipe_and_the_bus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with redis_server(tmp_path / "redis") as server:
        assert main(["--bus", server.url, "--rounds", "2", "--requests", "3", "--streams", "4", "--tokens", "5"]) == 0
        assert server.admin.keys("chatcache:bus:out:loadtest.*"), "the tokens came over the bus"
    found = re.findall(r"pipe (\d+\.\d+) ms, bus (\d+\.\d+) ms.* 20 tokens each", capsys.readouterr().out)
    assert len(found) == 2 and all(float(figure) > 0 for pair in found for figure in pair)


def test_main_without_redis_returns_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bus", "redis://127.0.0.1:9/0"]) == 2
    assert "no Redis answers" in capsys.readouterr().err
