"""What an option may name and what a table has by these names are the same."""

from collections.abc import Iterable
from typing import get_args

import pytest

from radixserve.configs.schema import ServeConfig
from radixserve.engine.policy import POLICIES
from radixserve.kvcache.eviction import EVICTION_ORDERS
from radixserve.server.output.formats import CALL_FORMATS, REASONING_FORMATS


@pytest.mark.parametrize(
    ("option", "table"),
    [
        ("radix_eviction_policy", EVICTION_ORDERS),
        ("schedule_policy", POLICIES),
        ("tool_call_parser", CALL_FORMATS),
        ("reasoning_parser", REASONING_FORMATS),
    ],
)
def test_every_name_is_in_the_table_and_the_other_way_round(option: str, table: Iterable[str]) -> None:
    assert set(get_args(ServeConfig.model_fields[option].annotation)) - {"auto", "none"} == set(table)
