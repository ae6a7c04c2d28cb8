"""What HAProxy says of requests under way is read right, and what is not such a table is refused."""

from __future__ import annotations

import pytest

from serving.draining import under_way

TABLE = """# pxname,svname,qcur,qmax,scur,smax,
http_frontend,FRONTEND,,,3,4,
http-cachepilot,replica-1,0,0,1,2,
http-cachepilot,replica-2,0,0,1,2,
http-cachepilot,BACKEND,0,0,2,4,
stats,BACKEND,0,0,1,1,

"""


def test_requests_count_once_and_neither_idle_connections_nor_the_statistics_page_do() -> None:
    assert under_way(TABLE) == 2


def test_nothing_is_under_way_where_no_application_runs() -> None:
    assert under_way("# pxname,svname,qcur,qmax,scur,smax,\n") == 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Permission denied\n", "expected a table with pxname, svname and scur, got 'Permission denied"),
        ("", "expected a table"),
        ("# pxname,svname,scur\nhttp-cachepilot,BACKEND,many\n", "scur: expected numbers, but .*'many'"),
    ],
)
def test_another_answer_is_an_error_that_shows_it(answer: str, said: str) -> None:
    with pytest.raises(OSError, match=said):
        under_way(answer)
