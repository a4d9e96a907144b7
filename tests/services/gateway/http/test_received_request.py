"""What is read from an HTTP request, and how long texts of clients are cut."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from halfmoon.errors import InvalidRequest
from services.gateway.http.error_responses import shortened
from services.gateway.http.received_request import query_number


def test_a_number_of_the_query() -> None:
    request = make_mocked_request("GET", "/x?limit=7")
    assert (query_number(request, "limit", 5, 10), query_number(request, "minutes", 5, 10)) == (7, 5)


@pytest.mark.parametrize("given", ["0", "11", "-1", "1.5", "\u0663", "", "9" * 30])
def test_what_is_not_a_number_within_the_range_is_refused(given: str) -> None:
    with pytest.raises(InvalidRequest, match=r"limit must be 1\.\.10") as caught:
        query_number(make_mocked_request("GET", f"/x?limit={given}"), "limit", 5, 10)
    assert caught.value.param == "limit"


def test_long_texts_of_clients_are_cut() -> None:
    assert (shortened("x" * 200), shortened("x" * 201), shortened("abc", 2)) == ("x" * 200, "x" * 200 + "…", "ab…")
