"""The page of clients says what was found, of what is in the table."""

from tests.sdk.sdks import SDKS
from tests.sdk.table import PAGE, TESTS, load, page

REMEDY = "run: make check-all ARGS=tests/sdk, then: python -m tests.sdk.table"


def test_the_page_lists_what_is_tried() -> None:
    results = load()
    for test in TESTS:
        assert list(results[test]) == [sdk.name for sdk in SDKS], REMEDY
        assert [name for name, facts in results[test].items() if not facts["passed"]] == []
    assert page(results) == PAGE.read_text("utf-8"), REMEDY
