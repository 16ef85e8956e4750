"""Numbers of the command line."""

from __future__ import annotations

import pytest

from encoder_service import cli


@pytest.mark.parametrize(
    "wrong",
    [
        "bench serve --config x --requests 0",
        "bench serve --config x --seconds 0",
        "bench serve --config x --seconds nan",
        "bench serve --config x --timeout inf",
        "bench serve --config x --concurrency 0",
        "bench serve --config x --callers 0",
        "bench serve --config x --burst -1",
        "bench preprocess --threads 0",
        "bench preprocess --seconds x",
        "bench dataplane --repeats 0",
        "proxy --upstream http://x --timeout 0",
        "encode x.jpg --concurrency 0",
        "encode x.jpg --timeout -1",
        "simulate --replicas 0",
        "simulate --load 0",
    ],
)
def test_a_count_or_a_time_of_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(wrong.split())
    assert ended.value.code == 2
    assert f"{wrong.split()[-1]!r} is not a" in capsys.readouterr().err
